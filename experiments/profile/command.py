"""The steps of `experiments.profile`: build, measure, divide, compare, write."""

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, get_args

import numpy as np
import torch

from cbatch import ConfigError, ModelSpec
from cbatch.model.topology import Degree, Topology, split_ranks
from cbatch.sim import PROFILES, HostTime, Profile, ProfileCost
from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.links import Links
from cbatch.sim.measured import HostTimes
from cbatch.sim.profile_file import profile_text, read_profile
from cbatch.sim.provenance import Loop
from cbatch.validation import whole
from experiments.profile.batches import captured_edges, held_out, prompts
from experiments.profile.host import eager_seconds, host_time
from experiments.profile.kernels import UNKNOWN, Shares, kernel_times, shares
from experiments.profile.laboratory import Batch, Laboratory
from experiments.profile.machine import TILES, Machine, build, device_memory, hardware_name
from experiments.profile.measure import Iterations, Report, measure, mixed_bases
from experiments.profile.tables import UNCOMPARED, captured_graphs, captured_rows, model_tables, put_links, put_model
from experiments.profile.transfers import ceilings, copy_times
from experiments.settings.hardware import cpu_profile
from experiments.settings.presets import load_spec
from experiments.store.benchmark_file import slug
from experiments.store.provenance import commit, today, versions, write_text

Size = Annotated[int, whole(2)]

QUICK = {"max_tokens": 512, "longest": 1024}
"""Limits of the iterations of `measure_cpu`; predictions beyond them are extrapolated."""


def profile(
    report: Report,
    model: tuple[str, ...],
    batch: tuple[Size, ...] = (16, 128),
    max_tokens: Size = 16384,
    longest: Size = 8192,
    tensor_parallel: Degree = 1,
    backend: str = "cuda",
    output: str = "",
) -> Path:
    """Measures models in turn and writes their tables into a profile; `experiments.profile.__main__` explains the options.

    Raises:
        ConfigError: an option that cannot be used. ProfileError: the file is not a profile. CapacityError: no room for a model.
    """
    specs = [load_spec(name) for name in model]
    batches = sorted(set(batch))
    for spec in specs:
        split_ranks(spec, tensor_parallel)
    if tensor_parallel > 1 and backend == "cpu":
        raise ConfigError("profile: tensor_parallel is measured on GPUs; give backend=cuda, or leave it out")
    limits = {"max_tokens": max_tokens, "longest": longest}
    if tensor_parallel > 1:
        limits["tensor_parallel"] = tensor_parallel
    return [_one(spec, batches, limits, backend, output, report) for spec in specs][-1]


def measure_cpu(spec: ModelSpec) -> None:
    """Measures this machine's CPU with a model, quickly, into the file that `hardware=cpu` reads."""
    path = cpu_profile(spec)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as folder:  # other processes may measure as well
        _one(spec, [16], QUICK, "cpu", str(Path(folder) / path.name), lambda what: None).replace(path)


def _one(
    spec: ModelSpec, batches: list[int], limits: dict[str, int], backend: str, output: str, report: Report
) -> Path:
    """Measures one model into the existing file."""
    hardware = hardware_name(backend)
    path = Path(output) if output else PROFILES / f"{slug(hardware)}.json"
    degree = limits.get("tensor_parallel", 1)
    origin = _origin(spec, limits, backend, batches, hardware)
    profile = read_profile(path) if path.is_file() else _blank(hardware, backend, path.stem, origin)
    profile = put_links(profile, origin, _transfers(backend, spec, report))
    make = partial(build, backend, spec, **limits)
    machine = make(batch=batches[-1])
    with closing(machine.server):
        report(f"{spec.name} on {machine.name}, attention: {machine.attention}")
        laboratory = machine.laboratory(spec)
        found = measure(laboratory, machine.decode_sizes, machine.mixed_ranges, report, power_limited=backend == "cuda")
        report("batches between the measured ones")
        between = _between(laboratory, machine)
        host = None
        if degree == 1:
            report("host time")
            host = _host(machine, laboratory, spec)
        report("shares of kernels")
        alone, mixed = _shares(laboratory, machine, found, on_gpu=backend == "cuda")
        decode_sizes, ranges, measured = machine.decode_sizes, machine.mixed_ranges, laboratory.measured
    del laboratory, machine  # their memory is the next machine's
    smaller = [_captured_by(make(batch=number), spec, found, report) for number in batches[:-1] if ranges]
    bases = dict(zip(batches, (*(base for _, base in smaller), found.mixed), strict=False)) if ranges else {}
    graphs = captured_graphs(decode_sizes, *(shorter for shorter, _ in smaller), ranges)
    tables = model_tables(found, alone, mixed, batches[-1], captured_rows(bases), graphs)
    origin = f"{origin}; {_limits_text(spec, limits, batches)}"
    write_text(path, profile_text(put_model(profile, spec, origin, tables, host, degree)))
    _compare(ProfileCost(read_profile(path), spec, Topology(degree)), measured, between, report)
    report(f"written: {path}")
    return path


def _between(laboratory: Laboratory, machine: Machine) -> list[Batch]:
    """Measures batches between those of the tables; returns them."""
    batches = held_out(machine.decode_sizes, machine.server.limits.max_batch, machine.server.limits.max_request_tokens)
    held = [batch for batch in batches if laboratory.holds(batch)]
    for batch in held:
        laboratory.time(batch)
    return held


def _blank(hardware: str, backend: str, name: str, origin: str) -> Profile:
    """Returns a new profile; called before a model takes the memory."""
    device = torch.device("cuda" if backend == "cuda" else "cpu")
    return Profile(
        name=name,
        hardware=hardware,
        source=origin,
        error=UNCOMPARED,
        memory_bytes=device_memory(backend),
        ceilings=ceilings(device, TILES[backend]),
        origins={("ceilings",): origin},
    )


def _host(machine: Machine, laboratory: Laboratory, spec: ModelSpec) -> HostTimes:
    """Measures the host times of both loops, and what launching without a graph adds."""
    eager = eager_seconds(laboratory, machine.mixed_ranges[-1][1]) if machine.mixed_ranges else 0.0
    times = {loop: host_time(machine.server, spec.vocab_size, asynchronous=loop == "async") for loop in get_args(Loop)}
    return {
        loop: HostTime(round(time.seconds, 7), round(time.seconds_per_request, 10), round(eager, 5))
        for loop, time in times.items()
    }


def _shares(laboratory: Laboratory, machine: Machine, found: Iterations, *, on_gpu: bool) -> tuple[Any, Any]:
    """Returns functions from tokens to shares, of iterations without and with prompts; each takes the next measured size."""
    if not on_gpu:
        return lambda size: UNKNOWN, lambda size: UNKNOWN

    def shares_of(batch: Batch) -> Shares:
        return shares(kernel_times(partial(laboratory.compute, batch)))

    alone = {size: shares_of(Batch((), (1,) * size)) for size in machine.decode_sizes}
    totals = [*(size for _, size in machine.mixed_ranges), int(found.mixed.sizes[-1])]
    mixed = {size: shares_of(Batch(prompts(size))) for size in totals}
    return partial(_next_of, alone), partial(_next_of, mixed)


def _next_of(known: dict[int, Shares], size: float) -> Shares:
    sizes = sorted(known)
    return known[sizes[min(bisect_left(sizes, size), len(sizes) - 1)]]


def _transfers(backend: str, spec: ModelSpec, report: Report) -> Links:
    """Times copies and, where GPUs can access each other's memory, links."""
    if backend != "cuda":
        return Links()
    # its kernels are written in Triton, which machines without a GPU lack
    from experiments.profile.links import link_times

    num_gpus = torch.cuda.device_count()
    report(f"copies, and links of {num_gpus} GPUs" if num_gpus > 1 else "copies")
    copies = copy_times(torch.device("cuda"))
    try:
        links = link_times(spec, num_gpus)
    except ConfigError as error:
        report(f"links are not measured: {error}")
        return copies
    return replace(links, to_device=copies.to_device, to_host=copies.to_host)


def _captured_by(
    machine: Machine, spec: ModelSpec, found: Iterations, report: Report
) -> tuple[Sequence[tuple[int, int]], PiecewiseLinear]:
    """Returns the ranges and the bases of captured iterations on a machine with graphs for another batch."""
    report(f"captured rows: graphs for batch {machine.server.limits.max_batch}")
    with closing(machine.server):
        return machine.mixed_ranges, mixed_bases(
            machine.laboratory(spec), captured_edges(machine.mixed_ranges), found.chunks
        )


def _compare(cost: ProfileCost, measured: dict[Batch, float], between: list[Batch], report: Report) -> None:
    """Prints the errors of predictions from the written file."""
    errors = {batch: cost.predict(batch.shape()) / seconds - 1 for batch, seconds in measured.items()}
    for batch in between:
        report(f"between: {_words(batch)}: measured {measured[batch] * 1e3:.3f} ms, predicted {errors[batch]:+.1%}")
    inside = np.abs([error for batch, error in errors.items() if batch not in between])
    within = f"{np.median(inside):.2%} (median), {inside.max():.1%} at most"
    report(f"{len(inside)} measured batches are predicted within {within}")


def _words(batch: Batch) -> str:
    chunks = " + ".join(f"{tokens} at {context}" for tokens, context in batch.chunks)
    mean = sum(batch.decodes) / max(len(batch.decodes), 1)
    decodes = f"{len(batch.decodes)} decodes of {mean:.0f}, at most {max(batch.decodes, default=0)}"
    return f"{decodes}, chunks {chunks}" if chunks else decodes


def _origin(spec: ModelSpec, limits: dict[str, int], backend: str, batches: list[int], hardware: str) -> str:
    """Returns the command, date, card, commit and versions of what is measured now."""
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    given = {"model": spec.name, "backend": backend, "batch": ",".join(map(str, batches)), **limits}
    options = " ".join(f"{key}={value}" for key, value in given.items())
    return (
        f"measured by python -m experiments.profile {options}; {today()}; {hardware}; commit {commit() or 'unknown'}; {packages}; "
        f"{torch.get_num_threads()} threads"
    )


def _limits_text(spec: ModelSpec, limits: dict[str, int], batches: list[int]) -> str:
    return (
        f"iterations as executed, with graphs for batches of {' and '.join(map(str, batches))}, up to {limits['max_tokens']} "
        f"tokens, requests up to {min(limits['longest'], spec.max_positions)}"
    )
