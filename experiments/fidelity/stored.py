"""Runs of a comparison that was written: what they measured stands in it, and their requests follow from the trace."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cbatch import ConfigError
from experiments.fidelity.cases import CASES, SERVE, sizes, workload
from experiments.fidelity.compare import TARGETS, card_of
from experiments.fidelity.runs import ServedRun, asked_run


def stored_runs(file: Path, path: str) -> list[ServedRun]:
    """Returns the runs in a file that `bench fidelity` wrote, without their iterations. path: the trace that was served.

    Raises:
        ConfigError: the file cannot be read, or no comparison of known cases.
    """
    known = {case.name: case for case in CASES}
    try:
        cases: Mapping[str, Any] = json.loads(file.read_text())["cases"]
        found = []
        for name, policies in cases.items():
            case = known[card_of(name)[0]]
            rival = cases.get(name.replace(case.name, case.capacity_of), {}).get(SERVE)
            capacity = rival and rival["requests"] / rival["measured"]["total time"]
            for policy, run in policies.items():
                if missing := TARGETS.keys() - run["measured"].keys():
                    raise KeyError(*missing)
                numbers = {case.name.split()[0]: run["requests"]}
                asked = workload(case, path, numbers, capacity).requests(None)
                settings = {"case": name, "policy": policy, **sizes(case, asked), "load": case.load, "rate": case.rate}
                found.append(asked_run({**settings, "loop": case.loop}, run["measured"], asked))
        return found
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"measured={file}: is no comparison that bench fidelity wrote: {error!r}") from error
