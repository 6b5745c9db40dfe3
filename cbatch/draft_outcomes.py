"""What becomes of drafts: an engine counts all of them as tokens when their step begins, and takes back those that were rejected when it ends."""

from collections.abc import Callable

import numpy as np

from cbatch.drafts import Drafts
from cbatch.executor import Step, Tokens
from cbatch.request import FinishReason, Ints, Request
from cbatch.request_table import ONE, ZERO


def is_stop(request: Request, token: int, ends_text: Callable[[Request, int], bool]) -> bool:
    """Returns whether a token ends the request. ends_text: see `State`."""
    return token in request.stop_tokens or (bool(request.stop_strings) and ends_text(request, token))


def expect(step: Step) -> tuple[Ints, Ints]:
    """Enters a launched step's drafts in the table. Returns the places that sample and have no drafts in flight, and their requests' total tokens."""
    table, rows, drafts = step.table, step.rows, step.drafts
    assert drafts is not None
    table.drafts[rows] += drafts
    table.num_drafting += int(drafts.sum())
    table.total[rows] += drafts
    table.sampled_row[rows[step.sampled]] = step.first_rows[step.sampled]
    places = step.sampled[table.drafts[rows[step.sampled]] == ZERO]
    return places, table.total[rows[places]]


def settle(
    policy_drafts: Drafts,
    step: Step,
    places: Ints,
    tokens: Tokens | None,
    accepted: Ints | None,
    ends_text: Callable[[Request, int], bool],
) -> tuple[Ints, dict[Request, FinishReason], Ints]:
    """Gives requests the tokens that a step with drafts has sampled, and takes back what their counters held for rejected drafts.

    What rejected drafts wrote to the KV cache is overwritten by the tokens that take their positions; the blocks remain with the request.

    places: of the requests that receive tokens. tokens, accepted: see `StepResult`; without `accepted` no draft is.
    Returns how many tokens each request receives, [places], the requests that end there by a token, and the places of those whose last token
    by length is now certainly in flight.
    """
    table, drafts = step.table, step.drafts
    assert drafts is not None
    table.num_drafting -= int(drafts.sum())
    table.drafts[step.rows] -= drafts
    rows, drafts = step.rows[places], drafts[places]
    known, first = table.known[rows], step.first_rows[places]
    numbers = np.zeros_like(drafts) if accepted is None else np.minimum(accepted[places], drafts)
    counts = numbers + ONE
    if table.has_hidden_lengths:
        stop = table.stop[rows]
        counts = np.where(stop > ZERO, np.minimum(counts, stop - known), counts)
    done: dict[Request, FinishReason] = {}
    if tokens is not None:
        for index in table.can_stop[rows].nonzero()[0].tolist():
            request, begin = step.requests[places[index]], first.item(index)
            for place, token in enumerate(tokens[begin : begin + counts.item(index)].tolist()):
                if is_stop(request, token, ends_text):
                    counts[index], done[request] = place + 1, FinishReason.STOP
                    break
        if table.tokens is not None:
            after = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
            table.tokens[rows.repeat(counts), known.repeat(counts) + after] = tokens[first.repeat(counts) + after]
    too_many = drafts + ONE - counts
    table.known[rows] = known = known + counts
    table.total[rows] = total = table.total[rows] - too_many
    table.computed[rows] = computed = np.maximum(table.computed[rows] - too_many, ZERO)
    for index in ((computed == ZERO) & (counts > ONE)).nonzero()[0].tolist():  # preempted in flight
        step.requests[places[index]].lose_accepted(counts.item(index) - 1, known.item(index) - 1)
    ended = (known >= table.limit[rows]) | (known == table.stop[rows])
    if done:
        ended |= [step.requests[place] in done for place in places.tolist()]
    goes_on = (drafts > ZERO) & ~ended  # a draft after the end would count as rejected
    policy_drafts.note(rows[goes_on], drafts[goes_on], numbers[goes_on])
    last = places[(table.drafts[rows] == ZERO) & (known < total) & (total >= table.limit[rows])]
    return counts, done, last
