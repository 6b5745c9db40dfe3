"""Waiting requests in the order of a walk through the tree of their prefixes, which persists from plan to plan."""

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, eq

from sortedcontainers import SortedKeyList

from cbatch import BlockHash, Request, View
from policies.shared.kept_orders import KeptOrder


class Branch:
    """Requests with a common prefix: after the blocks of `parent`, all share the blocks `hashes` from block `start` on.

    requests: by arrival. is_cached: whether the prefix cache holds the first block.
    cached: cached child branches, most requests first; ties: the branch with the oldest request.
    """

    def __init__(
        self, parent: "Branch | None", hashes: Sequence[BlockHash], start: int, requests: Iterable[Request]
    ) -> None:
        self.parent, self.hashes, self.start, self.is_cached = parent, hashes, start, False
        self.requests = SortedKeyList(requests, key=attrgetter("arrival_time", "id"))
        self.cached: SortedKeyList[Branch, tuple[int, float, int]] = SortedKeyList(key=attrgetter("rank"))
        self.rank = (0, 0.0, 0)

    def look(self, block_size: int) -> None:
        """Updates whether the first block is cached."""
        self.move(self.requests[0].num_computed > self.start * block_size)

    def move(self, is_cached: bool) -> None:
        """Moves this branch among, into or out of the parent's cached branches. Call when requests have come or gone."""
        assert self.parent is not None
        if self.is_cached:
            self.parent.cached.remove(self)
        self.is_cached = is_cached
        if is_cached:
            oldest = self.requests[0]
            self.rank = -len(self.requests), oldest.arrival_time, oldest.id
            self.parent.cached.add(self)


class DepthFirst(KeptOrder):
    """Depth first through the tree of cached prefixes, branches with most waiting requests first; ties: arrival.

    A request comes after requests with longer matches in its branch. The tree covers whole prompts, so the number of requests in a
    branch does not depend on the cache. The cache only decides which branches the walk enters.
    """

    def __init__(self) -> None:
        super().__init__()
        self._root = Branch(None, (), 0, ())
        self._branches: dict[BlockHash, Branch] = {}  # by first hash
        self._ends: dict[Request, Branch] = {}  # the last branch of each request

    def discard(self, requests: Iterable[Request]) -> None:
        for request in requests:
            branch = self._ends.pop(request, None)
            while branch is not None:
                branch.requests.remove(request)
                if branch.parent is not None:
                    branch.move(branch.is_cached and bool(branch.requests))
                    if not branch.requests:
                        del self._branches[branch.hashes[0]]
                branch = branch.parent

    def _place(self, request: Request, view: View) -> None:
        self.discard([request])
        size, branch = view.kv.block_size, self._root
        rest = view.kv.block_hashes(request, (request.num_known - 1) // size)
        branch.requests.add(request)
        while rest:
            lower = self._branches.get(rest[0])
            if lower is None:
                lower = self._branches[rest[0]] = Branch(branch, rest, branch.start + len(branch.hashes), ())
            elif (number := sum(map(eq, lower.hashes, rest))) < len(lower.hashes):
                lower = self._split(lower, number, size)
            lower.requests.add(request)
            lower.look(size)
            branch, rest = lower, rest[len(lower.hashes) :]
        self._ends[request] = branch

    def _split(self, lower: Branch, number: int, block_size: int) -> Branch:
        """Splits a branch after `number` hashes. Returns the new upper branch, whose child is the rest of the branch."""
        upper = Branch(lower.parent, lower.hashes[:number], lower.start, lower.requests)
        lower.move(False)
        lower.parent, lower.hashes, lower.start = upper, lower.hashes[number:], lower.start + number
        lower.look(block_size)
        self._branches |= {branch.hashes[0]: branch for branch in (upper, lower)}
        return upper

    def _affected(self, hashes: Iterable[BlockHash], view: View) -> Iterable[Request]:
        for branch in filter(None, map(self._branches.get, hashes)):
            branch.look(view.kv.block_size)
        return ()

    def _ordered(self, view: View) -> Iterator[Request]:
        seen, stack = set[Request](), [(self._root, iter(self._root.cached))]
        while stack:
            branch, cached = stack[-1]
            if (lower := next(cached, None)) is not None:
                stack.append((lower, iter(lower.cached)))
                continue
            for request in branch.requests:
                if request not in seen and view.is_waiting(request):
                    seen.add(request)
                    yield request
            stack.pop()
