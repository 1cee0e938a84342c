"""Which row of which step is which token's: the books of the streaming ring.

Nothing here is a buffer. A step's rows lie one after another, request by request, in the order in which the scheduler named them; the plan
tells the device where each KV block's rows begin. Afterwards each chunk of each request is a list of segments, later ones over earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from qcap.attribution import RequestStep, Step, flatten
from qcap.capture.step_rows import Segment, StepRows, drop_all
from qcap.errors import Unsupported


@dataclass
class _Rows:
    """What is known of one request: segments by chunk, and chunks that have been staged or given up."""

    chunks: dict[int, list[Segment]] = field(default_factory=dict)
    staged: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class WholeChunk:
    """A chunk whose every row is there: ``pieces`` cover ``[0, CH)`` in order, each held."""

    index: int
    pieces: tuple[Segment, ...]


class StreamLedger:
    """Rows of running requests, by request and chunk.

    Args:
        block_size, chunk_size: N and CH.
        num_kv_blocks: of the engine; ids are below it.
        on_skip: called with (uid, chunk, reason).
    """

    def __init__(self, block_size: int, chunk_size: int, num_kv_blocks: int, on_skip: Callable[[int, int, str], None]) -> None:
        self._n, self._size, self._on_skip = block_size, chunk_size, on_skip
        self._requests: dict[int, _Rows] = {}
        self._owner = np.full(num_kv_blocks, -1, dtype=np.int64)  # KV block -> uid whose rows it stands for
        self._index = np.zeros(num_kv_blocks, dtype=np.int64)  # and its place in that request's block table
        self._places = self._multiples = np.arange(0, dtype=np.int64)  # 0, 1, 2, ... and 0, N, 2 N, ...
        self._open: tuple[Step, StepRows] | None = None  # the step that is running, and where its rows will be
        self._shared: list[tuple[int, int, int, int]] = []  # (uid, block, owner's uid, its block): to be looked up when it has run

    # ---- one step -----------------------------------------------------------------------------------------------------------------

    def plan(self, step: Step, out: np.ndarray) -> tuple[int, int]:
        """Write a row (block id, first, last, base) for each KV block of the step, block ids ascending, to ``out`` int64 ``[P, 4]``.

        Token ``block * N + offset`` with ``first <= offset < last`` goes to row ``base + offset``: requests one after another, those
        without a reason to skip them. What was noted of KV blocks that a load or the engine itself fills is forgotten. A step before it
        that never ended is abandoned.

        Returns:
            (blocks, rows) of the step. More blocks than P: nothing was written.
        """
        if self._open is not None:
            self.abandon()
        n = self._n
        if step.overwritten or step.loads or step.preempted or step.resampled:
            self._forget(step)
        for request in step.requests:
            if request.skip:
                self._owner[list(_written(request, n))] = -1
            elif request.admitted and request.uid in self._requests:
                self._forget_blocks(request.uid)
        flat = step.flat or flatten(step.requests, n)
        start, end, block_ids = flat.start, flat.end, flat.block_ids
        if not len(start):
            return 0, 0
        within = start % n
        blocks = (end - start + within + (n - 1)) // n
        blocks_end, rows_end = np.cumsum(blocks), np.cumsum(end - start)
        total, num_rows = len(block_ids), int(rows_end[-1])
        if total != blocks_end[-1]:
            raise Unsupported(f"the step's requests write {blocks_end[-1]} KV blocks and name {total}")
        if total > len(out):
            return total, num_rows
        if total > len(self._multiples):
            self._places = np.arange(2 * total, dtype=np.int64)
            self._multiples = self._places * n
        table = np.empty((total, 4), dtype=np.int64)
        table[:, 0] = block_ids
        table[:, 1] = 0
        table[:, 2] = n
        table[:, 3] = self._multiples[:total]
        table[blocks_end - blocks, 1] = within
        table[blocks_end - 1, 2] = (end - 1) % n + 1
        table[:, 3] += np.repeat(rows_end - end + start - within - (blocks_end - blocks) * n, blocks)
        keys = (block_ids << 32) + self._places[:total]  # sorted, they tell both the ids and where they came from
        keys.sort()
        np.take(table, keys & 0xFFFFFFFF, axis=0, out=out[:total])
        return total, num_rows

    def open(self, step: Step, source: StepRows) -> None:
        """The planned step runs, and its rows will be in ``source``."""
        self._open = step, source.hold()
        for request in step.requests:
            if request.uid not in self._requests and not request.skip and request.end > request.start:
                self._requests[request.uid] = _Rows()
        if any(request.admitted and request.start and not request.skip for request in step.requests):
            self._note_blocks(step)
            for request in step.requests:
                if request.admitted and request.start and not request.skip:
                    self._note_shared(request)

    def give_up(self, step: Step, reason: str) -> None:
        """There is no room for this step's rows: the chunks they belong to can no longer become whole, and hold nothing."""
        for request in step.requests:
            if not request.skip and request.end > request.start:
                rows = self._requests.setdefault(request.uid, _Rows())
                for chunk in range(request.start // self._size, -(-request.end // self._size)):
                    if chunk not in rows.staged:
                        self.release_chunk(request.uid, chunk)
                        rows.staged.add(chunk)
                        self._on_skip(request.uid, chunk, reason)

    def commit(self, invalid: Iterable[int] = ()) -> list[Segment]:
        """The step's rows have been written. Rows of ``invalid`` requests were computed on bad data: they count as not there.

        Returns:
            The step's segments that count.
        """
        return self._close_step(set(invalid))

    def _close_step(self, bad: set[int]) -> list[Segment]:
        if self._open is None:
            return []
        (step, source), self._open = self._open, None
        kept, size, row = [], self._size, 0
        for request in step.requests:
            if request.skip or request.end <= request.start:
                continue
            rows = self._requests.get(request.uid)
            if rows is None:  # it ended between the step and this
                row += request.end - request.start
                continue
            position, end, good = request.start, request.end, request.uid not in bad
            while position < end:
                chunk = position // size
                begin, last = chunk * size, min(end, (chunk + 1) * size)
                if chunk not in rows.staged:
                    segment = Segment(position - begin, last - begin, source.hold() if good else None, row)
                    rows.chunks.setdefault(chunk, []).append(segment)
                    if good:
                        kept.append(segment)
                row += last - position
                position = last
        source.drop()
        self._note_blocks(step)
        self._attach_shared()
        return kept

    def abandon(self) -> None:
        """The step will not be finished: whatever its rows were, they do not count, nor does what they were computed over."""
        if self._open is not None:
            self._shared = []
            self._close_step({request.uid for request in self._open[0].requests})

    # ---- blocks that two requests share -------------------------------------------------------------------------------------------

    def _forget(self, step: Step) -> None:
        """KV blocks that something else than this step's requests fills, and those of requests that start over."""
        for block in step.overwritten:
            self._owner[block] = -1
        for load in step.loads:
            self._owner[list(load.block_ids[load.start // self._n :])] = -1
        for uid in (*step.preempted, *step.resampled):
            self._forget_blocks(uid)

    def _note_blocks(self, step: Step) -> None:
        """Whose rows the KV blocks that the step writes stand for."""
        flat, n = step.flat or flatten(step.requests, self._n), self._n
        if len(flat.start):
            uids = np.array([r.uid for r in step.requests if r.end > r.start and not r.skip])
            first = flat.start // n
            counts = -(-flat.end // n) - first
            self._owner[flat.block_ids] = np.repeat(uids, counts)
            self._index[flat.block_ids] = self._places[: len(flat.block_ids)] + np.repeat(first - np.cumsum(counts) + counts, counts)

    def _forget_blocks(self, uid: int) -> None:
        """``uid`` starts over: the KV blocks that it had keep what it computed then, and its rows may become others."""
        self._owner[self._owner == uid] = -1

    def _note_shared(self, request: RequestStep) -> None:
        """Blocks before ``start``, in the chunk that ``start`` lies in, that another running request computes or has just computed."""
        first = request.start // self._size * self._size // self._n
        for index in range(first, request.start // self._n):
            block = request.block_ids[index - request.first_block]
            owner = int(self._owner[block])
            if owner >= 0 and owner != request.uid:
                self._shared.append((request.uid, index, owner, int(self._index[block])))

    def _attach_shared(self) -> None:
        shared, self._shared = self._shared, []
        per_chunk = self._size // self._n
        for uid, index, owner, theirs in shared:
            mine, other = self._requests.get(uid), self._requests.get(owner)
            if mine is None or other is None or index // per_chunk in mine.staged:
                continue
            if index != theirs:
                continue  # a prefix lies at the same place in both
            begin = index % per_chunk * self._n
            pieces = _cover(other.chunks.get(index // per_chunk, []), begin, begin + self._n)
            if pieces is not None:
                target = mine.chunks.setdefault(index // per_chunk, [])
                target[:0] = pieces  # before rows of its own, which count more

    # ---- chunks -------------------------------------------------------------------------------------------------------------------

    def complete(self, uid: int, final_tokens: int) -> list[WholeChunk]:
        """Chunks of ``uid`` below position ``final_tokens`` whose every row is there, each told once. They stay held until released."""
        rows = self._requests.get(uid)
        if rows is None:
            return []
        found = []
        for chunk in sorted(rows.chunks):
            if (chunk + 1) * self._size <= final_tokens and chunk not in rows.staged:
                pieces = _cover(rows.chunks[chunk], 0, self._size)
                if pieces is not None:
                    rows.staged.add(chunk)
                    found.append(WholeChunk(chunk, tuple(pieces)))
        return found

    def release_chunk(self, uid: int, chunk: int) -> None:
        """Let go of what ``uid`` holds of ``chunk``."""
        rows = self._requests.get(uid)
        if rows is not None:
            drop_all(rows.chunks.pop(chunk, ()))

    def forget_staged(self, uid: int, chunk: int) -> None:
        """``chunk`` was taken but could not be used: it may be taken again, if its rows come again."""
        rows = self._requests.get(uid)
        if rows is not None:
            rows.staged.discard(chunk)

    def release(self, uid: int) -> None:
        """Let go of everything ``uid`` holds: it finished, was aborted, or failed."""
        rows = self._requests.pop(uid, None)
        if rows is not None:
            for segments in rows.chunks.values():
                drop_all(segments)

    def release_all(self) -> None:
        """Let go of everything."""
        self.abandon()
        for uid in list(self._requests):
            self.release(uid)

    def any_rows(self, uid: int, chunk: int) -> bool:
        """Whether some row of ``chunk`` of ``uid`` is there."""
        rows = self._requests.get(uid)
        return rows is not None and any(segment.source is not None for segment in rows.chunks.get(chunk, ()))


def _written(request: RequestStep, block_size: int) -> Sequence[int]:
    """The KV blocks that the step writes for ``request``."""
    skip = request.start // block_size - request.first_block
    return request.block_ids[skip:] if skip > 0 else request.block_ids


def _cover(segments: list[Segment], first: int, last: int) -> list[Segment] | None:
    """Held pieces that cover ``[first, last)`` in order, later segments over earlier ones; None if a row is missing or bad."""
    if len(segments) == 1 and segments[0].first <= first and segments[0].last >= last:
        return None if segments[0].source is None else [segments[0].part(first, last)]
    of = np.full(last - first, -1, dtype=np.int64)
    for number, segment in enumerate(segments):
        of[max(segment.first - first, 0) : max(segment.last - first, 0)] = number if segment.source is not None else -1
    if (of < 0).any():
        return None
    edges = [0, *(np.flatnonzero(np.diff(of)) + 1).tolist(), last - first]
    return [segments[of[a]].part(first + a, first + b) for a, b in pairwise(edges)]
