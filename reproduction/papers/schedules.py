"""Draws docs/figures/policies/NAME.png: each policy's schedule beside first come, first served, of the same five requests.

The machine is synchronous; an iteration takes one second and holds two requests; the KV cache has 18 blocks of one token.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cbatch import SLO, CostFunction, KVSize, Limits, Policy, Request, Server
from cbatch.replay.decisions import Decision, StepEnd, record_decisions
from cbatch.sim import SimExecutor
from experiments.plots.schedule import Doing, Schedule, draw_schedule, num_iterations, schedule_of
from experiments.plots.style import new_figure, print_style
from experiments.settings.compose import compose_run, policy_names
from experiments.store.provenance import atomic_write
from policies.evictions import LRU

FCFS = "sarathi_serve"
NAMES = "ABCDE"
CHUNK, KV_TOKENS = 6, 18
LIMITS = Limits(max_batch=2, max_tokens=KV_TOKENS, max_request_tokens=KV_TOKENS, tile=1)

LENGTHS = ((6, 6, 0), (8, 6, 0), (2, 5, 1), (4, 4, 2), (1, 2, 3))
"""Prompt tokens, output tokens and arrival, in seconds."""

DUE = (20.0, 20.0, 8.0, 12.0, 3.0)
"""Objective for the first token. The last request has the highest priority, and a client of its own; D continues the session of A."""

OWN_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "dlpm": {"quantum": 4},
    "joint": {"tbt": 1, "most": 6},
    "lars": {"target": 1},
    "mlfq": {"quantum": 1, "promote_after": 100},
    "plas": {"thresholds": [1, 3]},
    "atlas": {"thresholds": [1, 3]},
    "past_future": {"reserve": 0},
    "qoserve": {"alpha": 1},
    "slai": {"offset": 1},
    "trail": {"c": 0.2},
}
"""Arguments of policies whose defaults are for iterations of milliseconds or for long outputs."""

PREFIXES = ("continuum", "dlpm", "infercept", "prefix_order")
"""Policies that need a prefix cache. D's prompt is the beginning of A's."""

PAUSING = ("mlfq", "ltr", "plas", "atlas")
"""Policies that need more places than the batch has."""


def record(policy: str) -> tuple[Schedule, list[Request]]:
    """Serves the five requests."""
    cost, events, requests = CostFunction(lambda shape: 1.0), list[Decision | StepEnd](), _requests()
    limits = LIMITS if policy not in PAUSING else Limits(2, KV_TOKENS, KV_TOKENS, tile=1, max_running=len(requests))
    cache = LRU() if policy in PREFIXES else None
    server = Server(SimExecutor(cost), limits, cost, KVSize(KV_TOKENS, 1), asynchronous=False, prefix_cache=cache)
    engine = server.engine(_policy(policy), requests)
    with record_decisions(engine, events.append):
        engine.run()
    return schedule_of(events, requests), requests


def main(folder: str = "docs/figures/policies") -> None:
    """Draw every policy's figure into a folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    fcfs, _ = record(FCFS)
    for policy in policy_names():
        schedule, requests = record(policy)
        path = Path(folder) / f"{policy}.png"
        panels = {policy: schedule} if policy == FCFS else {FCFS: fcfs, policy: schedule}
        _draw(path, panels, requests, text_of(schedule))
        print(path)


def text_of(schedule: Schedule) -> str:
    """Returns text as in "A2 B2 | A1 B3 pre C": by iteration, requests with the tokens computed, and those preempted."""
    entries = []
    for iteration in range(num_iterations(schedule)):
        column = {NAMES[id_]: row[iteration] for id_, row in schedule.items() if iteration in row}
        words = [f"{name}{cell.tokens}" for name, cell in column.items() if cell.tokens]
        words += [f"pre {name}" for name, cell in column.items() if cell.doing is Doing.PREEMPTED]
        entries.append(" ".join(words))
    return " | ".join(entries)


@print_style()
def _draw(path: Path, panels: Mapping[str, Schedule], requests: list[Request], text: str) -> None:
    """text: stored in the picture, for a test that it is up to date."""
    figure, [axes] = new_figure(1, 2, 1.75)
    labels = {
        request.id: f"{name} {request.num_prompt_tokens}/{request.max_new_tokens} @{request.arrival_time:g}"
        for name, request in zip(NAMES, requests, strict=True)
    }
    handles: dict[str, Any] = {}
    for panel, (name, schedule) in zip(axes, panels.items(), strict=False):
        drawn = draw_schedule(panel, schedule, requests, labels, width=0.5)
        handles |= {str(handle.get_label()): handle for handle in drawn}
        settings = [f"{key}={value}" for key, value in OWN_SETTINGS.get(name, {}).items()]
        panel.set_title(f"{name} (first come, first served)" if name == FCFS else ", ".join([name, *settings]))
        panel.set_xlim(-0.5, max(map(num_iterations, panels.values())) - 0.5)
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    figure.legend([*handles.values()], [*handles], loc="outside lower center", ncols=len(handles))
    with atomic_write(path) as partial:
        figure.savefig(partial, dpi=150, format="png", metadata={"Description": text, "Software": None})


def _requests() -> list[Request]:
    last = len(LENGTHS) - 1
    return [
        Request(
            id_,
            prompt,
            output,
            prompt=[0 if name in "AD" else ord(name)] * prompt,
            arrival_time=float(arrival),
            client="second" if id_ == last else "first",
            session="A" if name in "AD" else name,
            turn=int(name == "D"),
            last=name != "A",
            priority=int(id_ == last),
            slo=SLO(ttft=DUE[id_], tbt=4.0),
        )
        for id_, (name, (prompt, output, arrival)) in enumerate(zip(NAMES, LENGTHS, strict=True))
    ]


def _policy(name: str) -> Policy:
    """With chunks of `CHUNK` tokens and true output lengths."""
    own = (f"policy.{key}={value}" for key, value in OWN_SETTINGS.get(name, {}).items())
    return compose_run(f"policy={name}", "chunking=tile_aligned", "predictor=oracle", f"chunk={CHUNK}", *own).policy()
