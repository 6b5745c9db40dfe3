"""Claims on folders: a file that names the process that holds it, created atomically even on a network file system.

A claim ends when its process removes it, gives it another status than "begun", or no longer exists; then one other
process can take it over. A process on another host or in another container cannot be seen: its claim is never taken
over.
"""

import errno
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from shlex import quote
from typing import Any

from cbatch.errors import ResultsError
from experiments.store.provenance import now, partial_path, write_json

Claim = Mapping[str, Any]
"""status, process, host, begun (time), and what tells the process from a later one with its number: `_identity`."""

_NOT_YET_WRITTEN = {"status": "begun", "process": "?", "host": "?", "begun": "just now"}
_SECONDS_TO_WRITE = 60.0  # an empty claim older than this is of a process that was killed before it could write
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)  # of file systems without hard links
_MOST_ATTEMPTS = 1000  # while other processes create and remove the same paths


class ClaimedError(ResultsError):
    """Another process has claimed the folder.

    who: the process, in words. visible: whether this process can tell that it has ended.
    """

    def __init__(self, path: Path, claim: Claim) -> None:
        self.visible = _is_visible(claim)
        self.who = f"process {claim['process']} on {claim['host']}"
        ended = f"if it has ended, remove {quote(str(path))}"
        remedy = "wait for its end, or give another name" if self.visible else ended
        super().__init__(f"{path.parent}: is in use since {claim['begun']} by {self.who}; {remedy}")


def take(path: Path) -> Claim:
    """Creates a claim, and its folder, or takes over one that has ended.

    Raises:
        ClaimedError: another process has it.
        OSError: it cannot be written.
    """
    process = os.getpid()
    mine = {"status": "begun", "process": process, "host": socket.gethostname(), "begun": now(), **_identity(process)}
    for _ in range(_MOST_ATTEMPTS):
        make_folder(path.parent)
        with suppress(FileNotFoundError):  # it was released, or its folder removed, just now
            if _create(path, mine) or _take_over(path, mine):
                return mine
    raise FileExistsError(errno.EEXIST, "another process creates it again and again", str(path))


def release(path: Path, mine: Claim) -> None:
    """Removes this process's own claim."""
    if _read(path) == mine:
        path.unlink()


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Holds a claim inside the `with`. Raises as `take` does."""
    mine = take(path)
    try:
        yield
    finally:
        release(path, mine)


def check_free(path: Path) -> None:
    """Raises ClaimedError if a process has this claim now."""
    claim = _read(path)
    if claim is not None and not has_ended(claim):
        raise ClaimedError(path, claim)


def has_ended(claim: Claim) -> bool:
    """Whether the process of a claim has ended or given it up; False if it cannot be seen from here."""
    if claim["status"] != "begun":
        return True
    return _is_visible(claim) and not _runs(claim)


def make_new_folder(stem: Path) -> Path:
    """Creates a folder called `stem`, or `stem_2` and so on if that exists. Raises as `make_folder`."""
    for number in count(1):
        folder = stem if number == 1 else stem.with_name(f"{stem.name}_{number}")
        try:
            make_folder(folder, new=True)
            break
        except FileExistsError as error:
            if error.filename != str(folder):
                raise
    return folder


def make_folder(folder: Path, *, new: bool = False) -> None:
    """Creates a folder and its parents, even if other runs remove empty ones at the same time.

    Raises:
        FileExistsError: it, or one of its parents, is a file; or, with `new`, it exists.
        OSError: it cannot be created.
    """
    for attempt in range(1, _MOST_ATTEMPTS + 1):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(exist_ok=not new)
            return
        except FileNotFoundError:
            if attempt == _MOST_ATTEMPTS:
                raise
        except FileExistsError as error:  # also where `mkdir` found a folder that was removed before it looked at it
            there = Path(error.filename)
            if there.is_file() or (new and there == folder) or attempt == _MOST_ATTEMPTS:
                raise


def _create(path: Path, mine: Claim) -> bool:
    """Creates a claim, complete from the first moment; False if there is one."""
    if path.exists():
        return False
    partial, text = partial_path(path), json.dumps(mine, indent=1) + "\n"
    try:
        partial.write_text(text, encoding="utf-8")
        os.link(partial, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(text)
            return True
        return False
    finally:
        partial.unlink(missing_ok=True)
    return True


def _take_over(path: Path, mine: Claim) -> bool:
    """Replaces a claim that has ended; False if another process has just replaced it."""
    import fcntl  # not on Windows

    with path.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # those that take it over, one after the other
        if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return False
        check_free(path)
        write_json(path, mine)
    return True


def _read(path: Path) -> Claim | None:
    """Returns a claim; None if there is none, or one that was never written."""
    try:
        text, written = path.read_text(encoding="utf-8"), path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
    with suppress(ValueError):
        claim = json.loads(text)
        if isinstance(claim, dict) and claim.keys() >= _NOT_YET_WRITTEN.keys():
            return claim
    return _NOT_YET_WRITTEN if time.time() - written < _SECONDS_TO_WRITE else None


def _is_visible(claim: Claim) -> bool:
    """Whether a claim's process was started on this host and, unless it was restarted since, in this container."""
    ours = _identity(os.getpid())
    same = claim.get("boot") != ours.get("boot") or claim.get("container") == ours.get("container")
    return same and bool(claim["host"] == socket.gethostname())


def _runs(claim: Claim) -> bool:
    """Whether the process of a visible claim still runs."""
    try:
        os.kill(claim["process"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    present = _identity(claim["process"])
    return all(claim[key] == value for key, value in present.items() if key in claim)


def _identity(process: int) -> dict[str, str]:
    """The host's boot, the container, and the clock tick at which a process started; empty if the system hides them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        tick = "ended" if fields[0] in "ZX" else fields[19]  # a zombie, until its parent waits for it
        return {"boot": boot, "container": os.readlink("/proc/self/ns/pid"), "tick": tick}
    except OSError:
        return {}
