"""Which pages and rows an iteration touches, and whose they are: what only the check of accesses wants to know."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.executor import Step
from cbatch.kv import blocks_for
from cbatch.request_table import NEVER, Ints
from cbatch.runtime.batch import Fields

PAGE = "KV page"
ROW = "row of the request table"


def pages_read(packed: Fields[NDArray[Any]], page_size: int) -> Ints:
    """Pages that hold the contexts of an iteration, as its packed inputs say it; int64 [pages], each once."""
    held = blocks_for(packed.context_lens, page_size)  # [rows]
    columns = np.arange(packed.block_tables.shape[1])
    return np.unique(packed.block_tables[columns < held[:, None]]).astype(np.int64)


def pages_written(packed: Fields[NDArray[Any]], page_size: int) -> Ints:
    """Pages that take the keys and values of an iteration's tokens, padding counted; int64 [pages], each once."""
    return np.unique(packed.kv_slots // page_size).astype(np.int64)


class Tenancy:
    """To whom each page and row was given last, as far as launched steps show it.

    Giving a page or row to a new tenant is a write of the host's: nobody may still use it for the old one. A request that
    was preempted comes back as a new tenant.
    """

    def __init__(self) -> None:
        self._of_page = np.zeros(0, np.int64)
        self._of_row = np.zeros(0, np.int64)

    def new_pages(self, step: Step) -> Ints:
        """Pages that a step's requests hold and that were somebody else's before; int64 [pages]. Notes the change."""
        pool, rows = step.pool, step.rows
        held = blocks_for(step.start + step.num_tokens, pool.block_size)  # [batch]
        width = int(held.max())
        mine = np.arange(width) < held[:, None]  # [rows, width]
        pages = pool.tables[rows, :width][mine].astype(np.int64)
        tenants = np.broadcast_to(_tenants(step)[:, None], mine.shape)[mine]
        self._of_page = _with_room(self._of_page, pool.num_blocks)
        changed = self._of_page[pages] != tenants
        self._of_page[pages] = tenants
        given: Ints = pages[changed]
        return given

    def new_rows(self, step: Step) -> Ints:
        """Rows that were another request's before; int64 [rows]. Notes the change."""
        ids = step.table.id[step.rows]
        self._of_row = _with_room(self._of_row, step.table.num_rows)
        changed = self._of_row[step.rows] != ids
        self._of_row[step.rows] = ids
        given: Ints = step.rows[changed]
        return given


def _tenants(step: Step) -> Ints:
    """A number for each request of the batch that no other has had, nor itself before its last preemption; int64 [batch]."""
    preemptions = np.array([request.num_preemptions for request in step.requests], np.int64)
    tenants: Ints = step.table.id[step.rows] * (1 << 20) + preemptions
    return tenants


def _with_room(tenants: Ints, num_items: int) -> Ints:
    missing = num_items - len(tenants)
    return np.pad(tenants, (0, missing), constant_values=NEVER) if missing > 0 else tenants
