"""Identifies the code and files behind a result by hashes of the framework, and of modules and files that the settings name.

A module is hashed once per process, after its import: later edits of its file do not affect the run.
"""

import ast
import hashlib
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib.util import find_spec, resolve_name
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from cbatch.sim import PROFILES
from experiments.store.provenance import ROOT
from policies.routers import ROUTERS

_PARTS = ("settings", "setup", "trials", "workloads", "serve.py", "text.py", "capacity/simulation.py")
_FRAMEWORK = ("cbatch", *(f"experiments/{name}" for name in _PARTS))
"""Code that runs, or the simulations of a search, depend on. Policies are not included, since a run depends only on its policy."""

_INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_SECTIONS = ("policy", "workload", "model", "runtime", "backend", "autoscale", "hardware")
"""Root keys that name modules and files; with a prefix cache also `eviction`. The policy's section has its `chunking` and `predictor`."""

_SMALL = 2**20  # bytes; for larger files of a folder, such as weights, size and time are hashed instead
_HASHED = "_cbatch_source"  # attribute of a loaded module's spec


def sources_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the origin of a run, for summary.json.

    framework: hash of the framework's files. own: hashes by name for modules that the settings name, for modules that these import
    (except the framework and installed packages), and for files and folders.
    """
    sections = (*_SECTIONS, "eviction") if settings.get("prefix_cache") else _SECTIONS
    leaves = list(_leaves({key: value for key, value in settings.items() if key in sections}))
    targets = [str(value) for key, value in leaves if key == "_target_"]
    routers = (ROUTERS[str(value)] for key, value in leaves if key == "router" and value in ROUTERS)
    targets += (f"{router.__module__}.{router.__name__}" for router in routers)
    own = dict(sorted(_modules(targets)))
    named = [(str(value), Path(str(value))) for key, value in leaves if _may_be_file(key, value)]
    hardware = settings.get("hardware")
    for name, path in [*named, (f"profile {hardware}", PROFILES / f"{hardware}.json")]:
        with suppress(OSError, ValueError):
            own[name] = _digest_of(path)
    return {"framework": _framework(), "own": own}


def differences(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Returns the names of code and files that differ in the origins of two runs, as text. before: None if not recorded."""
    if before is None:
        return "not recorded"
    old, new = _by_name(before), _by_name(now)
    return ", ".join(name for name in {**old, **new} if old.get(name) != new.get(name))


def mixed(origins: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the names of code and files that differ in the origins of several runs."""
    hashes = dict.fromkeys(item for origin in origins for item in _by_name(origin).items())
    return [name for name, number in Counter(name for name, _ in hashes).items() if number > 1]


def _by_name(origin: Mapping[str, Any]) -> dict[str, str]:
    return {"cbatch": origin["framework"], **origin["own"]}


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
    """Returns whether a value names a file, or a folder if the key accepts folders."""
    if not isinstance(value, str):
        return False
    with suppress(OSError, ValueError):
        return Path(value).is_file() or (key in ("path", "hardware") and Path(value).is_dir())
    return False


def _modules(targets: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields name and hash of the targets' modules and of modules that these import, except the framework and installed packages.

    Imports are found in the source, since a policy may import within functions.
    """
    named = {target.rpartition(".")[0] for target in targets}
    to_do, seen = [*chain.from_iterable(map(_with_packages, named))], {""}
    while to_do:
        name = to_do.pop()
        file = None if name in seen else _file_of(name)
        seen.add(name)
        if file is not None and (name in named or not _is_installed(file)):
            yield name, _module_digest(name, file)
            if file.suffix == ".py" and not _is_installed(file):  # imports of compiled modules are unknown
                package = name if file.name == "__init__.py" else name.rpartition(".")[0]
                to_do += _imported(package, file.read_bytes())


def _file_of(name: str) -> Path | None:
    """Returns the file of a module; None for modules of the framework and of Python, packages without a file, and missing modules."""
    top = name.partition(".")[0]
    if top in ("cbatch", "experiments") or top in sys.stdlib_module_names:
        return None
    package = name.rpartition(".")[0]
    with suppress(ImportError, ValueError, AttributeError):
        if package and getattr(find_spec(package), "submodule_search_locations", None) is None:
            return None  # a name inside a module; find_spec would import the module
        spec = find_spec(name)
        return Path(spec.origin) if spec is not None and spec.origin and spec.has_location else None
    return None


@cache
def _is_installed(file: Path) -> bool:
    return any(file.resolve().is_relative_to(folder) for folder in _INSTALLED)


@lru_cache(256)
def _imported(package: str, source: bytes) -> list[str]:
    """Returns the names of modules that source code in a package may import, and of the packages that contain these modules."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += chain.from_iterable(_with_packages(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names += (*_with_packages(base), *(f"{base}.{alias.name}" for alias in node.names))
    return names


def _with_packages(name: str) -> Iterator[str]:
    """Returns the names of the packages that contain a module, and the module's name: a, a.b, a.b.c."""
    return accumulate(name.split("."), "{}.{}".format)


def _module_digest(name: str, file: Path) -> str:
    """Returns the hash of a module's file; for a loaded module the hash at the first call. Reloading gives a module a new spec."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    digest: str = getattr(spec, _HASHED, "") or hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    if spec is not None:
        setattr(spec, _HASHED, digest)
    return digest


@cache
def _framework() -> str:
    """Returns the hash of the framework's files at the first call."""
    content = hashlib.sha256()
    for path in (ROOT / part for part in _FRAMEWORK):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            content.update(f"{file.relative_to(ROOT).as_posix()}\n".encode() + file.read_bytes())
    return content.hexdigest()[:16]


def _digest_of(path: Path) -> str:
    """Returns the hash of a file, or of the files in a folder."""
    if not path.is_dir():
        return _digest(path, path.stat().st_size, path.stat().st_mtime_ns)
    content = hashlib.sha256()
    for file in sorted(file for file in path.iterdir() if file.is_file()):
        size, time = file.stat().st_size, file.stat().st_mtime_ns
        state = _digest(file, size, time) if size <= _SMALL else time
        content.update(f"{file.name} {size} {state}\n".encode(errors="surrogatepass"))
    return content.hexdigest()[:16]


@lru_cache(1024)
def _digest(file: Path, size: int, time: int) -> str:
    """Returns the hash of a file's content. size, time: cache keys, so that a changed file is read again."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:16]
