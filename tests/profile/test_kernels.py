"""Finds the library that is detached after a kernel trace; tracing itself needs a GPU."""

from pathlib import Path

from experiments.profile.kernels import detach_cupti_at_exit, loaded_library


def test_a_loaded_library_is_found_by_the_start_of_its_name() -> None:
    path = loaded_library("libc.so")
    assert path is not None and Path(path).exists()


def test_nothing_is_detached_where_cupti_is_not_loaded() -> None:
    assert loaded_library("no-such-library.so") is None
    detach_cupti_at_exit()
