"""Which code and files made a result: hashes of the framework, of the modules that the settings name, and of their files.

A module is hashed once per process, after its import: later edits of its file do not affect the run.
"""

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any, NamedTuple

from cbatch.sim import PROFILES

_ROOT = Path(__file__).resolve().parents[2]
_FRAMEWORK = ("cbatch", "experiments/settings", "experiments/workloads", "experiments/serve.py")
"""What every run depends on. Policies are not in it: a run depends on its own."""

_INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_SECTIONS = ("policy", "workload", "model", "runtime", "backend", "hardware")
"""Root keys that name modules and files. A policy has its own copy of `chunking` and `predictor` if it uses them."""

_SMALL = 2**20  # bytes; larger files of a folder count by size and time, as weights do
_HASHED = "_cbatch_source"  # attribute of a loaded module's spec


class _Source(NamedTuple):
    digest: str
    imports: tuple[str, ...]


def sources_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The origin of a run, for summary.json.

    Returns:
        framework: hash of its files; own: hashes, by name, of the modules that the settings name and what these import
        (neither the framework nor installed packages), and of files and folders.
    """
    leaves = list(_leaves({key: value for key, value in settings.items() if key in _SECTIONS}))
    targets = [str(value) for key, value in leaves if key == "_target_"]
    own = {name: source.digest for name, source in sorted(_modules(targets))}
    named = [(str(value), Path(str(value))) for key, value in leaves if _may_be_file(key, value)]
    hardware = settings.get("hardware")
    for name, path in [*named, (f"profile {hardware}", PROFILES / f"{hardware}.json")]:
        with suppress(OSError, ValueError):
            own[name] = _digest_of(path)
    return {"framework": hash_of(_FRAMEWORK), "own": own}


def differences(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """What differs between the origins of two runs, in words; empty if nothing does. before: None if it was not recorded."""
    if before is None:
        return "not recorded"
    framework = ["cbatch"] if before["framework"] != now["framework"] else []
    own = [name for name in {**before["own"], **now["own"]} if before["own"].get(name) != now["own"].get(name)]
    return ", ".join([*framework, *own])


def mixed(origins: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names that stand for different code or files in the origins of several runs."""
    found: dict[str, set[str]] = {}
    for origin in origins:
        for name, digest in {"cbatch": origin["framework"], **origin["own"]}.items():
            found.setdefault(name, set()).add(digest)
    return [name for name, digests in found.items() if len(digests) > 1]


def _leaves(values: Any, key: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _leaves(value, str(name))
    elif isinstance(values, Sequence) and not isinstance(values, str):
        for value in values:
            yield from _leaves(value, key)
    else:
        yield key, values


def _may_be_file(key: str, value: object) -> bool:
    """A file by any key, a folder where a path is asked for."""
    if not isinstance(value, str):
        return False
    with suppress(OSError, ValueError):
        return Path(value).is_file() or (key in ("path", "hardware") and Path(value).is_dir())
    return False


def _modules(targets: Sequence[str]) -> Iterator[tuple[str, _Source]]:
    """Yields the modules that hold the targets, those that these import, and the packages of both."""
    tops = {target.partition(".")[0] for target in targets}
    to_do, seen = [target.rpartition(".")[0] for target in targets], set[str]()
    while to_do:
        name = to_do.pop()
        top, _, _ = name.partition(".")
        if name in seen or not top or top in ("cbatch", "experiments"):
            continue
        seen.add(name)
        if source := _source(name, installed=top in tops):
            yield name, source
            to_do += [*source.imports, name.rpartition(".")[0]]


def _source(name: str, installed: bool) -> _Source | None:
    """Returns a module's source; None if there is none, or if it belongs to an installed package and `installed` is false."""
    spec = _find(name)
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    file = Path(spec.origin)
    if not installed and any(file.resolve().is_relative_to(folder) for folder in _INSTALLED):
        return None
    with suppress(OSError):
        return (_read_once if name in sys.modules else _read)(file, spec)
    return None


def _find(name: str) -> ModuleSpec | None:
    """Finds a module without importing it or its packages, which would fix their sources."""
    if (module := sys.modules.get(name)) is not None:
        return module.__spec__
    parent, _, _ = name.rpartition(".")
    if not parent:
        return find_spec(name)
    package = _find(parent)
    within = None if package is None else package.submodule_search_locations
    return None if within is None else PathFinder.find_spec(name, within)


def _read_once(file: Path, spec: ModuleSpec) -> _Source:
    """The source of a loaded module, as it was at the first call: a reloaded module has another spec."""
    found: _Source | None = getattr(spec, _HASHED, None)
    if found is None:
        found = _read(file, spec)
        setattr(spec, _HASHED, found)
    return found


def _read(file: Path, spec: ModuleSpec) -> _Source:
    content = file.read_bytes()
    imports: list[str] = []
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(content)) if file.suffix == ".py" else ():
            if isinstance(node, ast.Import):
                imports += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = resolve_name("." * node.level + (node.module or ""), spec.parent) if node.level else node.module
                imports += [str(base), *(f"{base}.{alias.name}" for alias in node.names)]
    parents = [name.rpartition(".")[0] for name in imports]
    return _Source(hashlib.sha256(content).hexdigest()[:16], tuple(dict.fromkeys([*imports, *parents])))


@cache
def hash_of(parts: tuple[str, ...]) -> str:
    """Hash of files and folders of the source tree, as they are at the first call."""
    found = hashlib.sha256()
    for part in parts:
        path = _ROOT / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found.update(f"{file.relative_to(_ROOT).as_posix()}\n".encode())
            found.update(file.read_bytes())
    return found.hexdigest()[:16]


def _digest_of(path: Path) -> str:
    """Hash of a file, or of a folder's files."""
    if not path.is_dir():
        return _digest(path, path.stat().st_size, path.stat().st_mtime_ns)
    found = hashlib.sha256()
    for file in sorted(file for file in path.iterdir() if file.is_file()):
        size, time = file.stat().st_size, file.stat().st_mtime_ns
        content = _digest(file, size, time) if size <= _SMALL else time
        found.update(f"{file.name} {size} {content}\n".encode())
    return found.hexdigest()[:16]


@lru_cache(1024)
def _digest(file: Path, size: int, time: int) -> str:
    """Hash of a file's content. size, time: of the file, so that a changed one is read again."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:16]
