"""Whether a steady start is steady: the first and the last third of an hour of 64 chats, with several seeds.

    python -m reproduction.validation steady

A turn counts in the third in which it arrives, a session in the third in which it begins, so that long ones count like short ones. Sessions
go on beginning after the hour, so that all of the hour's sessions have company to their ends.
"""

from typing import Any

import numpy as np
import pandas as pd

from cbatch import ConfigError
from experiments.api import simulate
from experiments.report.intervals import Mean, mean_of
from experiments.settings.command_line import Count

SETTINGS: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "hardware": "h100",
    "batch": 64,
    "chunk": 512,
    "prefix_cache": True,
}
FIGURES = ("hit share", "turn seconds", "job seconds")


def thirds(requests: pd.DataFrame, num_warming: int, seconds: float) -> pd.DataFrame:
    """Returns the figures of the three thirds of the `seconds` after the warming requests, which end first: a row for each third."""
    warming, others = requests[:num_warming], requests[num_warming:]
    third = ((others["arrival"] - warming["last_token"].max()) // (seconds / 3)).rename("third")
    sessions = others[~others["session"].isin(warming["session"])].groupby("session")
    jobs = sessions["last_token"].max() - sessions["arrival"].min()
    begins = third.groupby(others["session"]).min()[jobs.index]
    if begins.max() < 3:
        raise ConfigError(f"the last session begins before {seconds:g} s; give more requests=")
    turns = others.assign(seconds=others["last_token"] - others["arrival"]).groupby(third)
    found = turns["cached_tokens"].sum() / turns["prompt_tokens"].sum()
    return pd.DataFrame(
        dict(zip(FIGURES, (found, turns["seconds"].mean(), jobs.groupby(begins).mean()), strict=True))
    ).loc[:2]


def differences(by_seed: list[pd.DataFrame]) -> dict[str, dict[str, Mean]]:
    """Returns, for each figure, the means over seeds of the first and the last third, and of last - first in pairs, with 95% intervals."""
    found = {}
    for name in FIGURES:
        first, last = ([float(each[name].iloc[place]) for each in by_seed] for place in (0, -1))
        found[name] = {
            "first": mean_of(first),
            "last": mean_of(last),
            "last - first": mean_of(np.subtract(last, first).tolist()),
        }
    return found


def main(seeds: Count = 5, sessions: Count = 64, requests: Count = 28_000, seconds: float = 3600.0) -> None:
    """Simulates `seeds` runs, and prints the figures of both thirds and their difference."""
    keys = {**SETTINGS, "sessions": sessions, "requests": requests}
    runs = (simulate("sarathi_serve", "chat", seed=seed, steady=True, **keys).requests for seed in range(seeds))
    for name, means in differences([thirds(run, sessions, seconds) for run in runs]).items():
        print(f"{name}: " + ", ".join(f"{which} {mean.mean:.4f} +- {mean.half:.4f}" for which, mean in means.items()))
