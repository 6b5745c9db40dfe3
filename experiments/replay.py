"""`python -m experiments.replay FOLDER [key=value ...]`: replay a run recorded with decisions=true, on any machine.

Without keys, the run's policy plans again at every view, and must make the same plans. Keys of experiments.run describe another
policy to plan at each view: policy=orca, or chunk=512, also from another --config-dir=FOLDER. replica=1 replays one of several
replicas. Code that has changed since the recording is listed. As with `diff`, the exit status is 0 if all plans are the same, 1 if
some differ.
"""

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from omegaconf import OmegaConf

from cbatch.errors import ReplayError
from cbatch.policy import copy_policy, name_of
from cbatch.replay.decisions import Decided
from cbatch.replay.replay import ReplayComparison, replay
from cbatch.sim.drafter import SurvivalsDrafter
from cbatch.validation import parse, whole
from experiments.keys import key_of
from experiments.settings.command_line import run
from experiments.settings.compose import compose_run
from experiments.settings.groups import CONFIG_FOLDER
from experiments.settings.keywords import OF_FILES
from experiments.settings.overrides import check_effects
from experiments.settings.settings import PLANS_BY, Composed, Keys, Settings, read_settings
from experiments.setup.pools import include_drafts, pools_of
from experiments.store.decisions_file import DecisionsFile, read_decisions
from experiments.store.run_folder import CONFIG, DECISIONS, PROFILE, read_summary
from experiments.store.sources import differences, sources_of

_SHOWN = 12  # most requests printed per view or plan; the others are counted


def main(arguments: Sequence[str]) -> int:
    """Runs the command line. Returns the exit status: 0 or 1 like `diff`, 2 for a user error, 130 after Ctrl-C."""
    return run(_replay, arguments, lambda: str(__doc__), composes=True)


def _replay(run_folder: str, *arguments: str) -> int:
    folder = Path(run_folder.removesuffix(f"/{DECISIONS}"))
    files, settings = read_decisions(folder / DECISIONS), _settings(folder)
    overrides = [argument for argument in arguments if key_of(argument) != "replica"]
    planned, chosen = _replanned(settings, files[0].overrides, overrides), range(len(files))
    for argument in {*arguments} - {*overrides}:
        last = len(files) - 1
        number = parse(Annotated[int, whole(0, last)], argument.partition("=")[2], "replica")
        chosen = range(number, number + 1)
    different, of_replicas = False, _of_replicas(planned)
    for replica in chosen:
        where = f"{folder}, replica {replica}" if len(files) > 1 else str(folder)
        backend = of_replicas[replica].backend
        if backend.role == "decode" or getattr(backend.router, "moves", False):
            problem = "requests come here with KV blocks of other replicas, which a replay lacks"
            raise ReplayError(f"{where}: {problem}; replicas with role=prefill can be replayed, by replica=NUMBER")
        different |= _replay_one(where, files[replica], of_replicas[replica], folder / PROFILE)
    if files[0].cut:
        print(f"\n{DECISIONS} is cut off, as when a run is killed: later plans are not compared")
    code = (read_summary(folder) or {"about": {}})["about"].get("code")
    if code and (changed := differences(code, sources_of(settings.composed.keys))):
        print(f"\nchanged since the recording: {changed}")
    return 1 if different else 0


def _of_replicas(settings: Settings) -> list[Settings]:
    return [of_pool for of_pool in pools_of(settings).values() for _ in range(of_pool.backend.replicas)]


def _replay_one(where: str, file: DecisionsFile, settings: Settings, measured: Path) -> bool:
    """Prints how the plans of a replica's policy differ from the recorded ones; returns whether they do."""
    policy = settings.policy()
    hardware = str(measured if measured.is_file() else settings.hardware)
    cost = settings.backend.cost(hardware, settings.model, settings.batch)
    if settings.drafter.max_drafts:
        include_drafts(cost, settings, file.recorded.limits)
    drafter = settings.drafter.on(cost) if isinstance(settings.drafter, SurvivalsDrafter) else settings.drafter
    comparisons: list[ReplayComparison] = []
    try:
        eviction = copy_policy(settings.eviction, "eviction")
        replay(file.recorded, file.requests, policy, cost, comparisons.append, eviction, drafter)
    except ReplayError as error:
        raise ReplayError(f"{where}, {error}") from error
    different = [comparison for comparison in comparisons if not comparison.same]
    name = name_of(policy)
    if different:
        print(f"{where}: {_count(different, len(comparisons), name)}\n\n{_difference(different[0], name)}")
    else:
        print(f"{where}: {name} makes the same {len(comparisons)} plans")
    if num_empty := sum(not comparison.recorded.decided.entries for comparison in comparisons):
        among = f"among the {len(comparisons)} recorded ones"
        print(f"\nempty plans {among}, which are not iterations of the run: {num_empty}")
    return bool(different)


def _count(different: Sequence[ReplayComparison], num_plans: int, name: str) -> str:
    """Returns a line: at how many views a policy's plans differ from the recorded plans, and how."""
    num_illegal = sum(bool(comparison.problem) for comparison in different)
    num_reserves = sum(comparison.same_but_reserves for comparison in different)
    illegal = f"; {num_illegal} of its plans could not be carried out" if num_illegal else ""
    reserves = f", {num_reserves} of them only in the KV cache it reserves" if num_reserves else ""
    return f"{name} decides differently at {len(different)} of {num_plans} views{reserves}{illegal}"


def _difference(comparison: ReplayComparison, name: str) -> str:
    """Describes a view at which two policies differ, and both plans."""
    recorded, now = comparison.recorded, comparison.decided
    before = recorded.decided
    seen = recorded.seen
    rows = [
        ("waiting ids", _some([str(id_) for id_ in seen.waiting])),
        ("running ids", _some([f"{kept.id} ({kept.computed} computed, {kept.ready} ready)" for kept in seen.running])),
        ("in flight", f"{seen.num_in_flight} iterations"),
        ("KV blocks", f"{seen.num_free} free, {seen.num_retiring} about to be"),
    ]
    rows += [("recorded plans", _words(before)), (f"{name} plans", comparison.problem or _words(now))]
    if before.reserve != now.reserve:
        for who, decided in (("recorded", before), (name, now)):
            rows.append((f"{who} reserves", _some([f"{id_}:{tokens}" for id_, tokens in decided.reserve], " ")))
    if before.wake_at != now.wake_at:
        rows.append(("wakes at", f"recorded {before.wake_at}, {name} {now.wake_at}"))
    width = max(len(label) for label, _ in rows)
    head = f"first at iteration {recorded.iteration}, {seen.now:.6g} s; plans and reserves as id:tokens:"
    return "\n".join([head, *(f"  {label:{width}}  {text}" for label, text in rows)])


def _words(decided: Decided) -> str:
    return _some(str(decided).split(" "), " ")


def _some(words: Sequence[str], comma: str = ", ") -> str:
    rest = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return comma.join(words[:_SHOWN]) + rest or "none"


def _settings(folder: Path) -> Settings:
    """Returns the run's settings. Keys that are newer than the run, and keys of files, get their defaults."""
    try:
        keys = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ReplayError(f"{folder / CONFIG}: cannot be read ({error}); give the folder of a run") from error
    if not isinstance(keys, dict) or not {"policy", "hardware", "model", "backend", "batch"} <= keys.keys():
        raise ReplayError(f"{folder / CONFIG}: does not hold a run's settings; give the folder of a run")
    defaults: Any = OmegaConf.load(CONFIG_FOLDER / "config.yaml")
    names = [field.name for field in fields(Keys) if field.name not in keys or field.name in OF_FILES]
    return read_settings(Composed(keys | {name: defaults[name] for name in names}))


def _replanned(settings: Settings, recorded: Sequence[str], overrides: Sequence[str]) -> Settings:
    """Returns a run's settings with the policy that the recorded command line, with these overrides, describes.

    A key in place of a recorded one also replaces those of its section: `policy=orca` leaves out `policy.low=32`.
    """
    if not overrides:
        return settings
    check_effects(overrides, PLANS_BY, "replay")
    replaced = {key_of(override) for override in overrides}
    before = [override for override in recorded if not replaced & {key := key_of(override), key.split(".")[0]}]
    backend = settings.backend
    if "policy" in replaced and backend.pools:  # whose arguments are those of the recorded policy
        backend = replace(backend, pools={name: replace(pool, policy=None) for name, pool in backend.pools.items()})
    return replace(settings, backend=backend, policy=compose_run(*before, *overrides).policy)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
