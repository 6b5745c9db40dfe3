"""Converts published measurements of other projects to profiles of `cbatch.sim`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cbatch import ModelSpec
from cbatch.errors import ProfileError
from cbatch.sim import Profile
from cbatch.sim.interpolation import PiecewiseLinear
from reproduction.profiles import aiconfigurator, llmservingsim, vidur

_KINDS = (vidur, aiconfigurator, llmservingsim)


def convert(
    folder: Path, specs: Sequence[ModelSpec], host_ms: float = 0.0, host_us_per_request: float = 0.0
) -> Profile:
    """Returns the profile of a folder of published tables, whose kind is recognised by its files, for these models.

    host_ms, host_us_per_request: what an iteration of the engine takes besides the measured kernels, and each of its requests.

    Raises:
        ProfileError: no known kind, no table of a model, or a damaged table. The message names folder or file.
    """
    for kind in _KINDS:
        if kind.recognises(folder):
            profile: Profile = kind.convert(folder, specs)
            if missing := [spec.name for spec in specs if spec.name not in profile.models]:
                problem = f"has no table of model={','.join(missing)}, whose times would be estimates"
                raise ProfileError(f"{folder}: {problem}; leave it out, or give the folder of its tables")
            host = host_ms * 1e-3, host_us_per_request * 1e-6
            return _with_host(profile, *host) if any(host) else profile
    layouts = "; ".join(kind.LAYOUT for kind in _KINDS)
    raise ProfileError(f"{folder}: no tables known here; give the folder of one device: {layouts}")


def _with_host(profile: Profile, seconds: float, seconds_per_request: float) -> Profile:
    """Adds times to those of the output head, which each iteration has once, and which depend on the number of its requests alone."""
    models, origins = {}, dict(profile.origins)
    added = f"derived: published times, and {1e3 * seconds:.3g} ms and {1e6 * seconds_per_request:.3g} us per request of the engine"
    for name, model in profile.models.items():
        degrees = {}
        for degree, tables in model.tensor_parallel.items():
            if tables.head is None:
                raise ProfileError(f"host_ms: no output head was measured of {name}, to whose times it is added")
            longer = [
                (size, time + seconds + seconds_per_request * size) for size, time in zip(*tables.head, strict=True)
            ]
            degrees[degree] = replace(tables, head=PiecewiseLinear.through(longer))
            origins["models", name, "tensor_parallel", str(degree), "head"] = added
        models[name] = replace(model, tensor_parallel=degrees)
    return replace(profile, models=models, origins=origins)
