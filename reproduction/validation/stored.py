"""Comparisons that were written: their errors in one statement, and their runs, whose requests follow from the trace."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cbatch import ConfigError, Request
from cbatch.request import spec_of
from cbatch.sim import load_profile
from cbatch.sim.provenance import IN_GRAPHS
from reproduction.validation.cases import CASES, SERVE, sizes, workload
from reproduction.validation.compare import (
    TARGETS,
    card_of,
    gpus_of,
    in_graphs,
    of_newest_runtime,
    on_card,
    summarize,
    tables_of,
)
from reproduction.validation.runs import ServedRun, asked_run

KNOWN = {case.name: case for case in CASES}


def pool(files: Iterable[Path], profile: str) -> dict[str, dict[str, Any]]:
    """Returns the comparisons of this profile in files of `bench fidelity` and `bench capacity` as one, of all their cards, by `Profile.compared`'s keys.

    Raises:
        ConfigError: a file cannot be read, or is of another profile.
    """
    loops: dict[str, dict[str, Any]] = {"async": {}, "sync": {}}
    origins: list[dict[str, Any]] = []
    for file in files:
        try:
            content = json.loads(file.read_text())
            found = content.get("errors", {}).get("profile", content)  # at the profile's speed, not at the cards'
            if found["profile"] != profile:
                raise ValueError(f"compares profile {found['profile']}, not {profile}")
            gpus = gpus_of(found["cases"])
            tables = tables_of(load_profile(profile), gpus)
            if found.get("tables", tables) != tables:
                raise ValueError(f"was simulated with other tables of {profile}; give path=TRACE to simulate again")
            for name, policies in found["cases"].items():
                case, card = card_of(name)
                for policy, run in policies.items():
                    whole = {"batch": KNOWN[case].batch, "loop": KNOWN[case].loop} | run if "batch" not in run else run
                    key = whole["loop"] + (f", {gpus} GPUs" if gpus > 1 else "")
                    loops.setdefault(key, {}).setdefault(on_card(case, len(origins) + int(card)), {})[policy] = whole
            origins += content["measured"]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"measured={file}: no comparison with this profile: {error!r}") from error
    loops = {loop: of_newest_runtime(cases) for loop, cases in loops.items()}
    within = {loop + IN_GRAPHS: in_graphs(cases) for loop, cases in loops.items()}
    loops |= {loop: cases for loop, cases in within.items() if cases != loops[loop.removesuffix(IN_GRAPHS)]}
    about = {"profile": profile, "targets": TARGETS}
    return {
        loop: about
        | {"measured": [origins[int(card) - 1] for card in _cards(cases)], **summarize(cases), "cases": cases}
        for loop, cases in loops.items()
        if cases
    }


def _cards(cases: Iterable[str]) -> list[str]:
    return sorted({card_of(case)[1] for case in cases})


def served_before(file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a comparison that was written, and what tells its measurement: of one simulated again, the first."""
    kept: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    return kept, {"measured": kept.get("measured") or {key: kept[key] for key in ("hardware", "date", "commit")}}


def stored_runs(file: Path, paths: Sequence[str], tables: str) -> list[ServedRun]:
    """Returns the runs in a file that `fidelity` wrote. paths: the traces that were served; a run's tokens tell which.

    Of their iterations a file has the errors alone; they hold if the file was simulated with these tables, otherwise there are none.

    Raises:
        ConfigError: the file cannot be read, no comparison of known cases, or of another trace.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        cases: Mapping[str, Any] = content["cases"]
        found = []
        for name, policies in cases.items():
            case = KNOWN[card_of(name)[0]]
            rival = cases.get(name.replace(case.name, case.capacity_of), {}).get(SERVE)
            capacity = rival and rival["requests"] / rival["measured"]["total time"]
            for policy, run in policies.items():
                if missing := TARGETS.keys() - run["measured"].keys():
                    raise KeyError(*missing)
                again, tokens = replace(case, num_requests=run["requests"]), _tokens(run["measured"])
                made = (workload(again, path, capacity).requests(None) for path in paths)
                if (asked := next((asked for asked in made if _asked_tokens(asked) == tokens), None)) is None:
                    raise ValueError(f"{name} was served from another trace than path={','.join(paths)}")
                settings = {"case": name, "policy": policy, **sizes(case, asked), "load": case.load, "rate": case.rate}
                settings["receives_in_launch"] = run.get("receives_in_launch", False)
                settings["iterations"] = run["iterations"] if content["tables"] == tables else {}
                found.append(asked_run({**settings, "loop": case.loop}, run["measured"], asked))
        return found
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"measured={file}: is no comparison that bench fidelity wrote: {error!r}") from error


def _tokens(measured: Mapping[str, float]) -> int:
    """Returns the prompt and output tokens of a run with these figures."""
    return round(measured["throughput"] * measured["total time"])


def _asked_tokens(asked: Iterable[Request]) -> int:
    """Returns the tokens of these requests, up to their true ends."""
    return sum(
        request.num_prompt_tokens + (spec_of(request).true_new_tokens or request.max_new_tokens) for request in asked
    )
