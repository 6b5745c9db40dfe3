"""Draws the schedule of a small run: a row per request, a column per iteration. Colours show each request's activity."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from cbatch import ConfigError, Request
from cbatch.replay.decisions import Decision, StepEnd
from cbatch.request import spec_of
from experiments.plots.parts import draw_spans, lane_axes
from experiments.plots.series import load_runs
from experiments.plots.style import DECODE, IDLE, PAGE, PLAIN, PREFILL, Look, add_title, new_figure, print_style
from experiments.settings.command_line import Count, Index
from experiments.store.decisions_file import read_decisions
from experiments.store.run_folder import DECISIONS


class Doing(StrEnum):
    """A request's activity in an iteration.

    PREFILL, DECODE: computes tokens of its prompt (after a preemption, also of its output), or its newest token.
    WAITING: is not admitted yet. PAUSED: is left out and keeps its KV blocks. PREEMPTED: loses its KV blocks.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    WAITING = "waiting"
    PAUSED = "paused"
    PREEMPTED = "preempted"


class Cell(NamedTuple):
    """A request in an iteration. tokens: tokens computed for the request."""

    doing: Doing
    tokens: int = 0


Schedule = dict[int, dict[int, Cell]]
"""Cells by request id, then by iteration, from the arrival of a request to its end."""

_MOST_REQUESTS = 64
_DIGIT = 0.06  # inches

_STYLES: Mapping[Doing, Mapping[str, Any]] = {
    Doing.PREFILL: {"facecolor": PREFILL},
    Doing.DECODE: {"facecolor": DECODE},
    Doing.WAITING: {"facecolor": "#DDDDDD"},
    Doing.PAUSED: {"facecolor": IDLE, "hatch": "//////", "edgecolor": "#888888", "linewidth": 0.0},
    Doing.PREEMPTED: {"facecolor": "#222222"},
}
_LABELS = {Doing.PREFILL: "prefill, with its tokens", Doing.PAUSED: "paused, with its KV cache"}


@print_style()
def draw(
    folder: Path, look: Look = PLAIN, first: Index | None = None, iterations: Count = 32, replica: Index = 0
) -> Figure:
    """Draws a cell for each request and iteration of a run with decisions=true. Numbers in cells count prompt tokens.

    Args:
        first, iterations: the first iteration that is shown, by default the first with two requests, and how many.
        replica: whose iterations, if there are several.

    Raises:
        ConfigError: no finished run, several, no such iteration or replica, or too many requests.
        ReplayError: the run has no decisions.
    """
    shown = load_runs(folder, look, 1)
    files = read_decisions(Path(shown.iloc[0]["folder"]) / DECISIONS)
    if replica >= len(files):
        raise ConfigError(f"{replica=}: no such replica; the run has {len(files)}, counted from 0")
    file = files[replica]
    whole = schedule_of(file.recorded.events, file.requests)
    if first is None:
        present = Counter(at for row in whole.values() for at in row)
        first = min((at for at, requests in present.items() if requests > 1), default=0)
    length, last = num_iterations(whole), min(first + iterations, num_iterations(whole))
    schedule = {id_: {at: row[at] for at in range(first, last) if at in row} for id_, row in whole.items()}
    num = sum(map(bool, schedule.values()))
    if not num:
        raise ConfigError(f"{first=} {iterations=}: the run has {length} iterations; choose among them")
    if num > _MOST_REQUESTS:
        remedy = f"give a part with fewer, or workload.num_requests={_MOST_REQUESTS}"
        raise ConfigError(f"{first=} {iterations=}: {num} requests, {_MOST_REQUESTS} can be shown; {remedy}")
    figure, [[panel]] = new_figure(1, 1, 1.3 + 0.17 * max(num, 4))
    handles = draw_schedule(panel, schedule, file.requests)
    panel.set_ylabel("request:\nprompt/\noutput tokens")
    part = [] if last - first == length else [f"iterations {first} to {last - 1} of {length}"]
    note = ", ".join([*[f"replica {replica}"] * (len(files) > 1), *part])
    add_title(figure, shown, str(shown.iloc[0]["label"]), handles, note, look=look)
    return figure


def schedule_of(events: Iterable[Decision | StepEnd], requests: Sequence[Request]) -> Schedule:
    """Returns the schedule of a run. events: from `record_decisions(engine, events.append)` or a decisions file."""
    cells: Schedule = {request.id: {} for request in requests}
    for event in events:
        if isinstance(event, StepEnd):
            continue
        iteration, seen, decided = event[:3]
        for id_ in seen.waiting:
            cells[id_].setdefault(iteration, Cell(Doing.WAITING))
        for progress in seen.running:
            if progress.ready:  # otherwise its next token is still being computed
                cells[progress.id][iteration] = Cell(Doing.PAUSED)
        for id_ in decided.preempt:
            cells[id_][iteration] = Cell(Doing.PREEMPTED)
        for id_, tokens in decided.entries:
            cells[id_][iteration] = Cell(Doing.DECODE if id_ in seen.decoding else Doing.PREFILL, tokens)
    return cells


def num_iterations(schedule: Schedule) -> int:
    return 1 + max((iteration for row in schedule.values() for iteration in row), default=-1)


def draw_schedule(
    panel: Axes,
    schedule: Schedule,
    requests: Sequence[Request],
    names: Mapping[int, str] | None = None,
    width: float = 1.0,
) -> list[Patch]:
    """Draws a schedule into a panel, also in notebooks. Returns the handles of its legend.

    Args:
        names: requests' names by id; the default is the id with prompt and output tokens.
        width: width of the panel, as a share of a page.
    """
    rows = {id_: row for id_, row in schedule.items() if row}
    by_id = {request.id: request for request in requests}
    lanes = [names[id_] if names else _name(by_id[id_]) for id_ in rows]
    columns = [iteration for row in rows.values() for iteration in row]
    begin, end = min(columns), max(columns) + 1
    lane_axes(panel, lanes[::-1], begin - 0.5, end - 0.5)
    most_digits = int(0.85 * width * PAGE / (end - begin) / _DIGIT)
    for place, row in enumerate(rows.values()):
        lane = len(rows) - 1 - place
        for doing, style in _STYLES.items():
            spans = [(iteration - 0.47, 0.94) for iteration, cell in row.items() if cell.doing is doing]
            draw_spans(panel, lane, spans, **{"linewidth": 0.0, **style})
        for iteration, cell in row.items():
            text = {Doing.PREFILL: str(cell.tokens), Doing.PREEMPTED: "x"}.get(cell.doing, "")
            if 0 < len(text) <= most_digits:
                panel.text(iteration, lane, text, ha="center", va="center", fontsize=6, color="white")
    panel.set_xlabel("iteration")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    present = {cell.doing for row in rows.values() for cell in row.values()}
    labels = _LABELS if any(text.get_text() != "x" for text in panel.texts) else {**_LABELS, Doing.PREFILL: "prefill"}
    return [Patch(label=labels.get(doing, doing), **style) for doing, style in _STYLES.items() if doing in present]


def _name(request: Request) -> str:
    output = min(spec_of(request).true_new_tokens or request.max_new_tokens, request.max_new_tokens)
    return f"{request.id}: {request.num_prompt_tokens}/{output}"
