"""Which row of which step is which token's: the books of the streaming ring.

Nothing here is a buffer. A step's rows lie one after another, request by request, in the order in which the scheduler named them; the plan
tells the device where each KV block's rows begin. Afterwards each chunk of each request is a list of the steps that brought rows of it,
later ones over earlier. A step costs a few list operations a request; rows are looked up when a chunk is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from qcap.attribution import FlatStep, RequestStep, Step, flatten
from qcap.capture.step_rows import Keep, Piece, Place, StepRecord, StepRows
from qcap.errors import Unsupported

_HALF = np.array(32)  # of a key's bits; an array, which NumPy takes as it is


@dataclass(frozen=True)
class Shared:
    """Rows of positions ``[first, last)`` that request ``owner`` computed; in another's chunk, it holds ``record``."""

    record: StepRecord
    owner: int
    first: int
    last: int


@dataclass(slots=True)
class _Rows:
    """What is known of one request: who brought rows, by chunk; chunks that have been staged or given up; and chunks that cannot become
    whole (their first rows were never computed here, and nobody has them), which hold nothing unless they are computed from their start.

    ``growing`` is what ``chunks`` has of the chunk ``[first, last)`` that rows came for last, so that a decode step finds it at once.
    """

    chunks: dict[int, list[StepRecord | Shared]] = field(default_factory=dict)
    staged: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    growing: list[StepRecord | Shared] = field(default_factory=list)
    first: int = 0
    last: int = 0

    def add(self, record: StepRecord, begin: int, until: int, size: int) -> int:
        """``record`` has rows of positions ``[begin, until)``. Returns how many chunks hold it for that."""
        held = 0
        for chunk in range(begin // size, (until - 1) // size + 1):
            if chunk in self.dead:
                if begin > chunk * size:
                    continue
                self.dead.discard(chunk)
            if chunk not in self.staged:
                self.growing = self.chunks.setdefault(chunk, [])
                self.growing.append(record)
                self.first, self.last = chunk * size, (chunk + 1) * size
                held += 1
        return held

    def stage(self, chunk: int) -> None:
        """Nothing is added to ``chunk`` any more."""
        self.staged.add(chunk)
        self.first = self.last = 0

    def drop(self, chunk: int) -> None:
        """Let go of what is held of ``chunk``."""
        _release(self.chunks.pop(chunk, ()))
        self.first = self.last = 0


@dataclass(frozen=True)
class WholeChunk:
    """A chunk whose every row is there: ``pieces`` cover ``[0, CH)`` in order, each held."""

    index: int
    pieces: tuple[Piece, ...]


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
        self._flat = flatten((), block_size)  # of the step that was planned last
        self._places = np.arange(0, dtype=np.int64)  # 0, 1, 2, ...
        self._open: tuple[Step, FlatStep, StepRows] | None = None  # the step that is running, and where its rows will be
        self._shared: list[tuple[int, int, int]] = []  # (uid, block, owner's uid): to be looked up when it has run

    # ---- one step -----------------------------------------------------------------------------------------------------------------

    def plan(self, step: Step, out: np.ndarray) -> tuple[int, int, int]:
        """Write what the *slot attribution* kernel needs to ``out`` int64: (first place, start, end, row) for each request, then the KV
        blocks that the step writes, ascending, each with its place in the step.

        Rows go to requests one after another, those without a reason to skip them. What was noted of KV blocks that a load or the engine
        itself fills is forgotten. A step before it that never ended is abandoned.

        Returns:
            (requests, blocks, rows) of the step. What does not fit into ``out`` is not written.
        """
        if self._open is not None:
            self.abandon()
        n = self._n
        if step.overwritten or step.loads or step.preempted or step.resampled:
            self._forget(step)
        flat = self._flat = step.flat or flatten(step.requests, n)
        for request in step.requests if flat.special else ():
            if request.skip:
                self._owner[list(_written(request, n))] = -1
            elif request.admitted and request.uid in self._requests:
                self._forget_blocks(request.uid)
        table, block_ids, _, total, rows, _ = flat
        if total != len(block_ids):
            raise Unsupported(f"the step's requests write {total} KV blocks and name {len(block_ids)}")
        begin = table.size
        end = begin + total
        if total and end <= len(out):
            out[:begin] = table.reshape(-1)
            keys = out[begin:end]
            np.left_shift(block_ids, _HALF, out=keys)
            keys += self._first_places(total)
            keys.sort()
        return len(table), total, rows

    def _first_places(self, count: int) -> np.ndarray:
        """0, 1, 2, ... ``count - 1``."""
        if count > len(self._places):
            self._places = np.arange(2 * count, dtype=np.int64)
        return self._places[:count]

    def open(self, step: Step, source: StepRows) -> None:
        """The planned step runs, and its rows will be in ``source``."""
        self._open = step, self._flat, source.hold()
        requests = self._requests
        for uid in self._flat.uids:
            if uid not in requests:
                requests[uid] = _Rows()
        if self._flat.special and any(r.admitted and r.start and not r.skip for r in step.requests):
            self._note_blocks(self._flat)
            for request in step.requests:
                if request.admitted and request.start and not request.skip:
                    self._note_shared(request)

    def give_up(self, step: Step, reason: str) -> None:
        """There is no room for the rows of this open step: the chunks they belong to can no longer become whole, and hold nothing."""
        self.abandon()
        for request in step.requests:
            rows = self._requests.get(request.uid)  # None if it ended meanwhile
            if rows is not None and not request.skip and request.end > request.start:
                for chunk in range(request.start // self._size, -(-request.end // self._size)):
                    if chunk not in rows.staged:
                        rows.drop(chunk)
                        rows.stage(chunk)
                        self._on_skip(request.uid, chunk, reason)
        self._owner[self._flat.block_ids] = -1

    def commit(self, invalid: Iterable[int] = ()) -> StepRecord | None:
        """The step's rows have been written. Rows of ``invalid`` requests were computed on bad data: they count as not there.

        Returns:
            What it brought, None if nobody needs it.
        """
        return self._close_step(frozenset(invalid))

    def _close_step(self, bad: frozenset[int]) -> StepRecord | None:
        if self._open is None:
            return None
        (step, flat, opened), self._open = self._open, None
        source: StepRows | None = opened
        uids = flat.uids
        start, end, row = flat.table[:, 1:].T.tolist()
        if bad.issuperset(uids):  # none of its rows counts: only that they are no longer what they were
            opened.drop()
            source = None
        record = StepRecord(uids, Place(source, start, end, row), bad)
        requests, size, refs = self._requests, self._size, 0
        for uid, begin, until in zip(uids, start, end, strict=True):
            rows = requests.get(uid)
            if rows is None:  # it ended between the step and this
                continue
            if rows.first <= begin and until <= rows.last:
                rows.growing.append(record)
                refs += 1
            else:
                refs += rows.add(record, begin, until, size)
        record.refs = refs + 1  # our own, until the end of this
        self._note_blocks(flat)
        self._attach_shared()
        if flat.special:
            self._bury(step)
        record.release()
        return record if record.refs else None

    def _bury(self, step: Step) -> None:
        """Chunks that requests were admitted in the middle of, and whose rows before that nobody has."""
        for request in step.requests:
            rows, chunk = self._requests.get(request.uid), request.start // self._size
            begin = chunk * self._size
            if rows is None or not request.admitted or request.start == begin or chunk in rows.staged or chunk in rows.dead:
                continue
            if _cover(rows.chunks.get(chunk, []), request.uid, begin, request.start) is None:
                rows.drop(chunk)
                rows.dead.add(chunk)

    def needed(self, record: StepRecord) -> list[Keep] | None:
        """What of a step's rows is needed still; None for at least half of them, which :meth:`Mover.move` moves as one."""
        keep, place, size = [], record.place, self._size
        if place is None:
            return []
        if place.source is not None and 2 * (record.refs - len(record.shared)) >= place.source.rows.shape[0]:
            return None  # without a loop: each chunk that holds it for its own request needs at least a row that no other such chunk does
        for uid, i in record.index.items():
            rows, begin, until = self._requests.get(uid), place.start[i], place.end[i]
            spans = [(first, last) for owner, first, last in record.shared if owner == uid]
            if rows is not None:
                for chunk in range(begin // size, (until - 1) // size + 1):
                    if record in rows.chunks.get(chunk, ()):
                        spans.append((chunk * size, (chunk + 1) * size))
            if spans:
                keep.append(Keep(i, max(begin, min(spans)[0]), min(until, max(last for _, last in spans))))
        return keep

    def abandon(self) -> None:
        """The step will not be finished: whatever its rows were, they do not count, nor does what they were computed over."""
        if self._open is not None:
            self._shared = []
            self._close_step(frozenset(request.uid for request in self._open[0].requests))

    # ---- blocks that two requests share -------------------------------------------------------------------------------------------

    def _forget(self, step: Step) -> None:
        """KV blocks that something else than this step's requests fills, and those of requests that start over."""
        for block in step.overwritten:
            self._owner[block] = -1
        for load in step.loads:
            self._owner[list(load.block_ids[load.start // self._n :])] = -1
        for uid in (*step.preempted, *step.resampled):
            self._forget_blocks(uid)

    def _note_blocks(self, flat: FlatStep) -> None:
        """Whose rows the KV blocks that the step writes stand for."""
        if not flat.rows:
            return
        uids, index = np.array(flat.uids), flat.start // self._n
        if flat.blocks > len(uids):  # else one block each, as when all decode
            place = flat.table[:, 0]
            counts = np.diff(place, append=flat.blocks)
            uids, index = np.repeat(uids, counts), self._first_places(flat.blocks) + np.repeat(index - place, counts)
        self._owner[flat.block_ids] = uids
        self._index[flat.block_ids] = index

    def _forget_blocks(self, uid: int) -> None:
        """``uid`` starts over: the KV blocks that it had keep what it computed then, and its rows may become others."""
        self._owner[self._owner == uid] = -1

    def _note_shared(self, request: RequestStep) -> None:
        """Blocks before ``start``, in the chunk that ``start`` lies in, that another running request computes or has just computed."""
        first = request.start // self._size * self._size // self._n
        for index in range(first, request.start // self._n):
            block = request.block_ids[index - request.first_block]
            owner = int(self._owner[block])
            if owner >= 0 and owner != request.uid and int(self._index[block]) == index:  # a prefix lies at the same place in both
                self._shared.append((request.uid, index, owner))

    def _attach_shared(self) -> None:
        shared, self._shared = self._shared, []
        for uid, index, owner in shared:
            first, last = index * self._n, (index + 1) * self._n
            chunk = first // self._size
            mine, other = self._requests.get(uid), self._requests.get(owner)
            if mine is None or other is None or chunk in mine.staged:
                continue
            found = _cover(other.chunks.get(chunk, []), owner, first, last)
            if found is not None:
                ours = [Shared(record, whose, a, b) for record, whose, a, b in found]
                for piece in ours:
                    piece.record.refs += 1
                    piece.record.shared.append((piece.owner, piece.first, piece.last))
                mine.chunks.setdefault(chunk, [])[:0] = ours  # before rows of its own, which count more

    # ---- chunks -------------------------------------------------------------------------------------------------------------------

    def complete(self, uid: int, final_tokens: int) -> list[WholeChunk]:
        """Chunks of ``uid`` below position ``final_tokens`` whose every row is there, each told once. They stay held until released."""
        rows = self._requests.get(uid)
        if rows is None:
            return []
        found, size = [], self._size
        for chunk in sorted(rows.chunks):
            begin = chunk * size
            if begin + size <= final_tokens and chunk not in rows.staged:
                cover = _cover(rows.chunks[chunk], uid, begin, begin + size)
                if cover is not None:
                    rows.stage(chunk)
                    found.append(WholeChunk(chunk, tuple(record.piece(whose, a, b, a - begin) for record, whose, a, b in cover)))
        return found

    def release_chunk(self, uid: int, chunk: int) -> None:
        """Let go of what ``uid`` holds of ``chunk``."""
        rows = self._requests.get(uid)
        if rows is not None:
            rows.drop(chunk)

    def forget_staged(self, uid: int, chunk: int) -> None:
        """``chunk`` was taken but could not be used: it may be taken again, if its rows come again."""
        rows = self._requests.get(uid)
        if rows is not None:
            rows.staged.discard(chunk)

    def release(self, uid: int) -> None:
        """Let go of everything ``uid`` holds: it finished, was aborted, or failed."""
        rows = self._requests.pop(uid, None)
        if rows is not None:
            for entries in rows.chunks.values():
                _release(entries)

    def release_all(self) -> None:
        """Let go of everything."""
        self.abandon()
        for uid in list(self._requests):
            self.release(uid)


def _written(request: RequestStep, block_size: int) -> Sequence[int]:
    """The KV blocks that the step writes for ``request``."""
    skip = request.start // block_size - request.first_block
    return request.block_ids[skip:] if skip > 0 else request.block_ids


def _release(entries: Iterable[StepRecord | Shared]) -> None:
    for entry in entries:
        (entry.record if isinstance(entry, Shared) else entry).release()


def _cover(entries: Sequence[StepRecord | Shared], uid: int, first: int, last: int) -> list[tuple[StepRecord, int, int, int]] | None:
    """(record, whose, begin, end) pieces that cover positions ``[first, last)`` in order, later entries over earlier ones; None if a row
    is missing or bad."""
    of = np.full(last - first, -1, dtype=np.int64)
    whose: list[tuple[StepRecord, int]] = []
    for number, entry in enumerate(entries):
        if isinstance(entry, Shared):
            record, owner, begin, end = entry.record, entry.owner, entry.first, entry.last
        else:
            record, owner = entry, uid
            begin, end = record.span(uid)
        whose.append((record, owner))
        of[max(begin - first, 0) : max(end - first, 0)] = -1 if owner in record.bad else number
    if (of < 0).any():
        return None
    edges = [0, *(np.flatnonzero(np.diff(of)) + 1).tolist(), last - first]
    return [(*whose[of[a]], first + a, first + b) for a, b in pairwise(edges)]
