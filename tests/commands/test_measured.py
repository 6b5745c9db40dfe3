"""A figure that a command is given by its key is refused before the first run if the settings rule it out, and only then."""

from typing import Any

import pytest

from cbatch import ConfigError
from experiments.report.headings import _known_figures, flat
from experiments.serve import serve
from experiments.settings.keywords import settings_of
from experiments.settings.settings import Settings
from experiments.setup.measured import check_measured

SLO = {"workload.slo": {"ttft": 1}}
TIERS = {"workload.tiers": {"NAME": {"share": 1, "slo": {"tpot": 1, "total": 2}}}}
DRAFTS = {"drafter": "survivals", "alpha": 0.7, "drafting": "fixed"}
ROLES = {"backend.pools": {"NAME": {"role": "prefill"}, "other": {"role": "decode"}}}
CLIENTS = {"workload.clients": {"NAME": {"rate": 60, "prompt_tokens": 8, "output_tokens": 8}}}
CHAT = {"workload": "chat", "turns": 2}

ONLY_AFTER_A_RUN = {
    *("run.broken_off_requests", "run.cancelled_requests", "run.lost_tokens"),  # only if there are any
    *("replicas.idle", "transfers.copied_seconds"),
}


def settings(keys: dict[str, Any]) -> Settings:
    others = {key: value for key, value in keys.items() if key != "workload"}
    return settings_of("sarathi_serve", keys.get("workload", "queued"), {"backend": "sim", "requests": 12, **others})


def refusal(key: str, *runs: Settings) -> str:
    try:
        check_measured([key], runs)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.long
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"workload": "open_loop", "bounds": True, "price": 2, **SLO},
        {"workload": "open_loop", "metrics": {"objectives": {"tbt": 1}}},
        {"workload": "open_loop", "prefix_cache": True, "kv": {"host_tokens": 65536}, **TIERS},
        {"workload": "vtc_on_off", **CLIENTS, "prefix_cache": True, **SLO},
        {**CHAT, "sessions": 2},
        {**CHAT, "sessions": 2, "prefix_cache": True},
        {**CHAT, "closed": False, "rate": 5},
        {"replicas": 2, **DRAFTS},
        {"workload": "open_loop", "replicas": 2, "autoscale": "arrivals", "capacity": 5},
        {"backend.pools": {"NAME": {"price": 1}, "other": {}}},
        {"backend.pools": {"NAME": {"price": 1}, "other": {"price": 0}}},
        {**ROLES, "prefix_cache": True},
    ],
    ids=str,
)
def test_a_figure_is_refused_exactly_if_the_run_would_not_have_it(keys: dict[str, Any]) -> None:
    run = settings(keys)
    summary = serve(run, log=lambda line: None).summary
    figures = {key for key, _ in flat({key: value for key, value in summary.items() if key != "about"})}
    for key in {*_known_figures()} - ONLY_AFTER_A_RUN:
        assert bool(refusal(key, run)) == (key not in figures), key


def test_runs_that_do_not_measure_a_figure_are_named() -> None:
    """A CPU has no stated peak and no meter. The requests of a trace may state sessions and clients: nothing is known of them before it is read."""
    cached, plain = settings({"prefix_cache": True}), settings({"prefix_cache": False})
    said = "metric=prefix_cache.hit_share: runs with prefix_cache=false do not measure it; give prefix_cache=true"
    assert refusal("prefix_cache.hit_share", cached, plain).startswith(said)
    assert refusal("prefix_cache.hit_share", plain, plain).startswith(
        "metric=prefix_cache.hit_share: no run measures it;"
    )
    assert not refusal("prefix_cache.hit_share", cached, cached)
    processor = settings({"model": "tiny", "hardware": "cpu", "backend": "cpu", "price": 1})
    keys = ("mfu.run", "mbu.decode", "energy.joules", "cost.dollars")
    assert [bool(refusal(key, processor)) for key in keys] == [True, True, True, False]
    trace = settings({"workload": "trace", "path": "none.csv"})
    for key in ("sessions.per_hour", "clients.ann.ttft_seconds.p50", "attainment.share", "run.tail_share"):
        assert not refusal(key, trace)
