"""The steps of `experiments.profile`: build, measure, divide, compare, write."""

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from cbatch import ConfigError, ModelSpec
from cbatch.model.topology import Degree, Topology, split_ranks
from cbatch.results.metrics import Floats
from cbatch.sim import PROFILES, ProfileCost, load_profile
from cbatch.sim.attention import rows_per_read
from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.links import Links
from cbatch.sim.profile_file import make_profile, profile_content, profile_text, read_profile
from cbatch.validation import whole
from experiments.profile import tables
from experiments.profile.batches import held_out, prompts
from experiments.profile.copies import copy_times
from experiments.profile.host import host_times
from experiments.profile.kernels import ShareOf, kernel_times, shares, unknown
from experiments.profile.laboratory import Batch, Laboratory
from experiments.profile.machine import TILES, Machine, build, ceilings, hardware_name
from experiments.profile.measure import (
    Iterations,
    Report,
    drafted_attention,
    drafted_bases,
    measure,
    mixed_bases,
    time_bases,
)
from experiments.settings.compose import compose_run
from experiments.settings.hardware import cpu_profile, memory_bytes
from experiments.settings.overrides import check_effects
from experiments.setup.presets import load_spec
from experiments.store.claim import check_writable
from experiments.store.provenance import commit, slug, today, versions, write_text

Size = Annotated[int, whole(2)]

_DISTURBED = 0.1
"""Median error above which a measurement of the CPU warns: the parts add up to what was measured, unless other programs ran."""

QUICK = {"max_tokens": 512, "longest": 1024}
"""Limits of the iterations of `measure_cpu`; predictions beyond them are extrapolated."""


def profile(
    report: Report,
    model: tuple[str, ...],
    batch: tuple[Size, ...] = (16, 128),
    max_tokens: Size = 65536,
    longest: Size = 131072,
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
    for spec in specs:
        path, _ = _measure_model(spec, batches, limits, backend, output, report)
        report(f"written: {path}")
    return path


def measure_copies(report: Report, model: str = "llama-3.1-8b", hardware: str = "", output: str = "") -> Path:
    """Measures copies of a model's KV blocks between the GPU and host memory, and to a second GPU, into a copy of its profile.

    Raises ConfigError or ProfileError: a key that cannot be used.
    """
    name, spec = hardware or slug(hardware_name("cuda")), load_spec(model)
    content = profile_content(load_profile(name))
    report(f"copies of blocks of {spec.name}, on {hardware_name('cuda')}")
    links = copy_times(spec)
    source = f"measured by python -m experiments.profile copies model={model}; {today()}; {hardware_name('cuda')}"
    tables.put_links(content, f"{source}; commit {commit()}", links)
    path = _write(content, Path(output) if output else PROFILES / f"{name}.json")
    for key, table in (("to_host", links.to_host), ("from_host", links.from_host), ("kv_blocks", links.kv_blocks)):
        if not isinstance(table, PiecewiseLinear):
            continue
        rates = {size: size / seconds / 1e9 for size, seconds in zip(*table, strict=True)}
        report(f"{key} [GB/s]: " + ", ".join(f"{size / 1e6:.1f} MB {rate:.1f}" for size, rate in rates.items()))
    report(f"written: {path}")
    return path


def measure_drafts(
    report: Report,
    model: str = "llama-3.1-8b",
    hardware: str = "",
    output: str = "",
    backend: str = "cuda",
    batch: Size = 128,
    drafts: Size = 7,
    longest: Size = 8192,
) -> Path:
    """Measures iterations of decodes with drafts, into a copy of the model's profile.

    Raises ConfigError, ProfileError or CapacityError: a key that cannot be used.
    """
    name, spec = hardware or slug(hardware_name(backend)), load_spec(model)
    if drafts < (together := rows_per_read(spec)) - 1:
        reads = f"the kernel reads a context of {spec.name} for {together} rows at once"
        raise ConfigError(f"profile drafts: drafts={drafts}: {reads}; give at least {together - 1}")
    content = profile_content(load_profile(name))
    sizes = {"max_tokens": batch * (1 + drafts), "longest": longest}
    machine = build(backend, spec, batch=batch, drafts=drafts, **sizes)
    with closing(machine.server):
        report(f"decodes with up to {drafts} drafts, {spec.name} on {machine.name}")
        laboratory = machine.laboratory(spec)
        bases = drafted_bases(laboratory, machine.decode_sizes)
        base = PiecewiseLinear.through((size, laboratory.seconds(one)) for size, one in bases.items())
        report("attention")
        attention = drafted_attention(laboratory, base, machine.decode_sizes, together)
        report("shares of kernels")
        shares_of = _shares_of(laboratory, bases) if backend == "cuda" else unknown
    options = {"model": model, "batch": batch, "drafts": drafts, "longest": longest}
    origin = _origin(" drafts", options, machine.name)
    tables.put_drafted(content, spec, origin, tables.drafted_only(base, shares_of, *attention))
    path = _write(content, Path(output) if output else PROFILES / f"{name}.json")
    report(f"written: {path}")
    return path


def measure_cpu(report: Report, *keys: str) -> Path:
    """Measures this machine's CPU quickly for one model, and writes the file that `hardware=cpu` reads. keys: of the model.

    Raises:
        ConfigError: a key that cannot be used. OSError: the cache folder cannot be written.
    """
    check_effects(keys, ("model",), "profile cpu")
    path = cpu_profile(spec := compose_run("backend=cpu", *keys).model)
    check_writable(path.parent, "make room there, or set HOME to another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier = path.with_suffix(".earlier")
    with suppress(FileNotFoundError):
        path.replace(earlier)  # it may be of another version, and the measurement would read it
    try:
        _, errors = _measure_model(spec, [16], QUICK, "cpu", str(path), report)
    except BaseException:
        with suppress(FileNotFoundError):
            earlier.replace(path)
        raise
    earlier.unlink(missing_ok=True)
    _write(profile_content(read_profile(path)) | {"error": _error_text(errors)}, path)
    report(f"written: {path}")
    if (median := np.median(errors)) > _DISTURBED:
        report(f"warning: predictions are {median:.1%} off (median); measure again while nothing else runs")
    return path


def _measure_model(
    spec: ModelSpec, batches: list[int], limits: dict[str, int], backend: str, output: str, report: Report
) -> tuple[Path, Floats]:
    """Measures one model, and adds its tables to the file; returns the file's path, and the errors that `_compare` returns."""
    hardware = hardware_name(backend)
    path = Path(output) if output else PROFILES / f"{slug(hardware)}.json"
    degree, on_gpu = limits.get("tensor_parallel", 1), backend == "cuda"
    options = {"model": spec.name, "backend": backend, "batch": ",".join(map(str, batches)), **limits}
    origin = _origin("", options, hardware)
    content = _content(path, hardware, backend, origin)
    tables.put_links(content, origin, _links(backend, spec, report))
    make = partial(build, backend, spec, **limits)
    machine = make(batch=batches[-1])
    content["block_size"] = machine.server.kv.block_size
    with closing(machine.server):
        report(f"{spec.name} on {machine.name}, attention: {machine.attention}")
        laboratory, decode_sizes, sizes = machine.laboratory(spec), machine.decode_sizes, machine.mixed_sizes
        iterations = measure(laboratory, decode_sizes, sizes, report, power_limited=on_gpu)
        report("batches between the measured ones")
        between = [batch for batch in held_out(decode_sizes, laboratory.limits) if laboratory.holds(batch)]
        for batch in between:
            laboratory.time(batch)
        host = None
        if degree == 1:
            report("host time")
            host = host_times(machine.server, laboratory, spec.vocab_size, max(sizes, default=0))
        report("shares of kernels")
        alone, mixed = _shares(laboratory, machine, iterations) if on_gpu else (unknown, unknown)
        measured = laboratory.measured
    del laboratory, machine  # frees memory for the next machine
    smaller = [_captured_by(make(batch=number), spec, iterations, report) for number in batches[:-1] if sizes]
    bases = dict(zip(batches, (*(base for _, base in smaller), iterations.mixed), strict=False)) if sizes else {}
    graphs = tables.captured_graphs(decode_sizes, *(shorter for shorter, _ in smaller), sizes)
    made = tables.model_tables(iterations, alone, mixed, batches[-1])
    made = replace(made, captured_rows=tables.captured_rows(bases), captured_graphs=graphs)
    if not on_gpu:  # a busy CPU may have been slower when its ceilings were measured
        tables.raise_ceiling(content, made.linear, spec)
    tables.put_model(content, spec, origin, made, host, degree)
    _write(content, path)
    errors = _compare(ProfileCost(read_profile(path), spec, Topology(degree)), measured, between, report)
    return path, errors


def _content(path: Path, hardware: str, backend: str, origin: str) -> dict[str, Any]:
    """Returns the content of the file, or of a new one; called before a model takes the memory."""
    if path.is_file():
        return profile_content(read_profile(path))
    rates = ceilings(torch.device(backend), TILES[backend])
    memory = memory_bytes()
    if backend == "cuda":
        memory = float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return tables.new_content(path.stem, hardware, origin, memory, rates, origin)


def _write(content: dict[str, Any], path: Path) -> Path:
    """Checks a profile's content, then writes it. Returns the path."""
    return write_text(path, profile_text(make_profile(content)))


def _links(backend: str, spec: ModelSpec, report: Report) -> Links:
    """Times copies to host memory, and the links between GPUs that can access each other's memory."""
    if backend != "cuda":
        return Links()
    report("copies between GPU and host memory")
    copies = copy_times(spec)
    if (num_gpus := torch.cuda.device_count()) < 2:
        return copies
    # its kernels are written in Triton, which machines without a GPU lack
    from experiments.profile.links import link_times

    report(f"links of {num_gpus} GPUs")
    try:
        among = link_times(spec, num_gpus)
        return replace(copies, all_reduce=among.all_reduce, within_node=among.within_node)
    except ConfigError as error:
        report(f"links are not measured: {error}")
        return copies


def _shares(laboratory: Laboratory, machine: Machine, iterations: Iterations) -> tuple[ShareOf, ShareOf]:
    """Returns the shares of iterations without and with prompts."""
    alone = {size: Batch((), (1,) * size) for size in machine.decode_sizes}
    totals = [*machine.mixed_sizes, int(iterations.mixed.sizes[-1])]
    mixed = {size: Batch(prompts(size)) for size in totals}
    return _shares_of(laboratory, alone), _shares_of(laboratory, mixed)


def _shares_of(laboratory: Laboratory, batches: dict[int, Batch]) -> ShareOf:
    """Returns a function from tokens to the shares of the next larger batch. batches: by their number of tokens."""
    known = {size: shares(kernel_times(partial(laboratory.compute, batch))) for size, batch in batches.items()}
    return lambda tokens: known[min((size for size in known if size >= tokens), default=max(known))]


def _captured_by(
    machine: Machine, spec: ModelSpec, iterations: Iterations, report: Report
) -> tuple[Sequence[int], PiecewiseLinear]:
    """Returns the sizes and the base times of captured iterations on a machine whose graphs are for another batch."""
    report(f"captured rows: graphs for batch {machine.server.limits.max_batch}")
    with closing(machine.server):
        edges = sorted({2, *machine.mixed_sizes, *(size + 1 for size in machine.mixed_sizes[:-1])})
        laboratory = machine.laboratory(spec)
        time_bases(laboratory, edges)
        return machine.mixed_sizes, mixed_bases(laboratory, edges, iterations.chunks)


def _compare(cost: ProfileCost, measured: dict[Batch, float], between: list[Batch], report: Report) -> Floats:
    """Prints the errors of predictions from the written file; returns their absolute values."""
    errors = {batch: cost.predict(batch.shape()) / seconds - 1 for batch, seconds in measured.items()}
    for batch in between:
        report(f"between: {batch.shape()}: measured {measured[batch] * 1e3:.3f} ms, predicted {errors[batch]:+.1%}")
    sizes = np.abs([*errors.values()])
    report(_error_text(sizes))
    return sizes


def _error_text(errors: Floats) -> str:
    off = f"{np.median(errors):.1%} off (median), {errors.max():.1%} at most"
    return f"{len(errors)} batches of this measurement: {off}"


def _origin(command: str, options: dict[str, Any], hardware: str) -> str:
    """Returns the command, date, card, commit and versions of the current measurement."""
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    given = (f"{key}={value}" for key, value in options.items())
    command = " ".join([f"python -m experiments.profile{command}", *given])
    state = f"commit {commit() or 'unknown'}; {packages}; {torch.get_num_threads()} threads"
    return f"measured by {command}; {today()}; {hardware}; {state}"
