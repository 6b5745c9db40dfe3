"""vLLM's real scheduler without vLLM installed: its sources are read from a wheel, and the rest of vLLM is stand-ins.

    pip download --no-deps --only-binary=:all: --dest FOLDER vllm==0.22.1

fetches a wheel. Scheduler, KV cache manager, requests and sampling parameters are vLLM's own; configuration, model, executor
and connectors are empty classes. Needs msgspec and cachetools beside the packages of the tests.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections import UserList
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from zipimport import zipimporter

_REAL = (
    "vllm.v1.core",
    "vllm.v1.request",
    "vllm.v1.engine",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.outputs",
    "vllm.v1.metrics.stats",
    "vllm.v1.spec_decode.metrics",
    "vllm.v1.structured_output.request",
    "vllm.sampling_params",
    "vllm.utils.math_utils",
)
"""Modules that are vLLM's own, with those below them."""


def stand_in(name: str) -> Any:
    """Returns an empty class that takes any arguments."""
    return type(name, (), {"__init__": lambda self, *args, **kwargs: None, "__class_getitem__": lambda cls, key: cls})


class _StandIn(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (self.__name__ == "vllm" and name.islower()):  # a submodule
            raise AttributeError(name)
        key = f"{self.__name__}.{name}"
        made = _GIVEN[key] if key in _GIVEN else stand_in(name)
        setattr(self, name, made)
        return made


class _Publishers:
    @staticmethod
    def create(*args: Any) -> Any:
        return None


class _ConstantList(UserList[Any]):
    """A list under another name, which `vllm.v1.utils` makes read-only."""

    def __init__(self, items: list[Any]) -> None:
        self.data = items

    def copy(self) -> Any:
        return self.data.copy()


def _images_between(features: list[Any], start: int, end: int) -> tuple[int, int]:
    """Places of the first image that ends after `start`, and of the first that begins at `end` or later."""
    places = [each.mm_position for each in features]
    return sum(each.offset + each.length <= start for each in places), sum(each.offset < end for each in places)


class RefusedError(ValueError):
    """What vLLM's front raises for a field of a client."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args)


_GIVEN: dict[str, Any] = {
    "vllm.exceptions.VLLMValidationError": RefusedError,
    "vllm.v1.attention.backends.registry.MambaAttentionBackendEnum": type("Backends", (), {"MAMBA2": 0}),
    "vllm.v1.serial_utils.PydanticMsgspecMixin": type("PydanticMsgspecMixin", (), {}),
    "vllm.envs.VLLM_MAX_N_SEQUENCES": 16384,
    "vllm.envs.VLLM_USE_V2_MODEL_RUNNER": False,
    "vllm.logger.init_logger": logging.getLogger,
    "vllm.distributed.kv_events.EventPublisherFactory": _Publishers,
    "vllm.platforms.interface.PlatformEnum": SimpleNamespace(OOT="out of tree"),
    "vllm.platforms.current_platform": SimpleNamespace(
        register_custom_kv_cache_specs=lambda config: None, is_xpu=lambda: False
    ),
    "vllm.multimodal.utils.get_mm_features_in_window": _images_between,
    "vllm.v1.utils.ConstantList": _ConstantList,
    "vllm.v1.utils.record_function_or_nullcontext": lambda name: nullcontext(),
    "vllm.utils.length_from_prompt_token_ids_or_embeds": lambda ids, embeds: len(ids),
}


class VllmFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM's own modules in a wheel, and a stand-in for every other one of its modules."""

    def __init__(self, wheel: Path) -> None:
        self._wheel = zipimporter(str(wheel))
        self.version = wheel.name.split("-")[1]

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "vllm":
            return None
        if any(name == real or name.startswith(f"{real}.") for real in _REAL):
            folder = zipimporter(f"{self._wheel.archive}/{name.rpartition('.')[0].replace('.', '/')}")
            if (spec := folder.find_spec(name)) is not None:
                return spec
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module = _StandIn(spec.name)
        if spec.name == "vllm":
            module.__version__ = self.version  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """A stand-in has nothing to run."""


def load(folder: Path) -> None:
    """Makes `import vllm` find the scheduler of the one wheel in a folder. Once in a process."""
    wheels = list(folder.glob("vllm-*.whl"))
    if len(wheels) != 1:
        raise FileNotFoundError(f"--vllm={folder}: give a folder with one wheel of vLLM, not {len(wheels)}")
    sys.meta_path.insert(0, VllmFinder(*wheels))
