"""Chats with a steady start have one state from begin to end; chats that begin with an empty server have not."""

import pandas as pd
import pytest

from cbatch import ConfigError
from experiments.api import simulate
from experiments.report.intervals import Mean
from reproduction.validation.steady import SETTINGS, differences, thirds

FEW = {**SETTINGS, "sessions": 12, "turns": 4, "pause": 5.0}


def compared(steady: bool, requests: int, seconds: float) -> dict[str, dict[str, Mean]]:
    """An empty server's first request warms nothing but the system prompt."""
    keys = {**FEW, "steady": steady, "requests": requests}
    return differences(
        [
            thirds(simulate("sarathi_serve", "chat", seed=seed, **keys).requests, 12 if steady else 1, seconds)
            for seed in range(4)
        ]
    )


@pytest.mark.long
def test_a_steady_start_is_steady_and_an_empty_one_is_not() -> None:
    """The sessions of an empty server begin in step, and their first turns find less than later ones."""
    for name, means in compared(True, 360, 90.0).items():
        assert abs(means["last - first"].mean) < means["last - first"].half, name
    early = compared(False, 200, 36.0)["hit share"]["last - first"]
    assert early.mean > early.half


def test_thirds_of_a_run_by_hand() -> None:
    """Two warming requests until 10 s; the third of `b` is that of its begin, at 21 s, though its second turn arrives at 31 s."""
    rows = [  # session, arrival, last token, prompt, found
        *(("x", 0.0, 9.0, 5, 0), ("y", 0.0, 10.0, 5, 0)),
        *(("a", 11.0, 12.0, 10, 1), ("x", 12.0, 15.0, 10, 7), ("b", 21.0, 23.0, 10, 2), ("b", 31.0, 35.0, 30, 15)),
        *(("c", 32.0, 36.0, 10, 0), ("d", 41.0, 42.0, 1, 1)),
    ]  # fmt: skip
    run = pd.DataFrame(rows, columns=["session", "arrival", "last_token", "prompt_tokens", "cached_tokens"])
    found = thirds(run, 2, 30.0)
    assert found["hit share"].tolist() == [8 / 20, 2 / 10, 15 / 40]
    assert found["turn seconds"].tolist() == [2.0, 2.0, 4.0]
    assert found["job seconds"].tolist() == [1.0, 14.0, 4.0]
    with pytest.raises(ConfigError, match="give more requests="):
        thirds(run, 2, 60.0)
