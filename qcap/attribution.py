"""From the scheduler's view of a step to ring blocks: which row belongs to which token, and which chunks are whole.

Everything here is host work on plain numbers; the device is never read. Rows are found on the device by the *slot attribution* kernel, by
comparing the engine's ``slot_mapping`` with the :class:`StepPlan` made here; nothing assumes an order of rows.

One KV block of a step gets one ring block, whoever shares it. A ring block carries a *stamp* a row: the number of the step in which the row
was last planned. The device keeps the same stamps, written by the attribution itself, and they travel with the chunk: where they differ, a
row was planned but never came, and the chunk is not published.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from qcap.errors import ConfigError
from qcap.ring import QRingBuffer
from qcap.tokens import TokenChunk


class RequestStep(NamedTuple):  # hundreds are made a step: a dataclass costs several times as much
    """What one request does in one step.

    Args:
        uid: number of the request, unique in the engine's life (request ids may be used again).
        request_id: the engine's id.
        salt: cache salt, "" for none.
        start, end: positions computed in this step, ``[start, end)``.
        first_block: index in the request's block table of ``block_ids[0]``.
        block_ids: KV block ids from ``first_block`` to the one of position ``end - 1``; an ``array("q")`` is planned fastest.
        admitted: first step since the request arrived or was resumed after preemption.
        skip: why nothing of this request may be stored ("" if it may): no token ids, multimodal input, LoRA.
    """

    uid: int
    request_id: str
    salt: str
    start: int
    end: int
    first_block: int
    block_ids: Sequence[int]
    admitted: bool = False
    skip: str = ""


RequestFields = tuple[int, str, str, int, int, int, Sequence[int], bool, str]
request_step: Callable[[RequestFields], RequestStep] = partial(tuple.__new__, RequestStep)
"""A :class:`RequestStep` of its fields in their order, in less than half of the constructor's time."""


class FlatStep(NamedTuple):
    """The requests of a step that may be captured and compute something, as flat arrays; made where the step is scheduled.

    Args:
        table: int64 ``[R, 4]``, in the order of the step's requests: first place of its blocks, start, end, first row. Places and rows
            count from the step's first; this is what the *slot attribution* kernel reads.
        block_ids: int64 ``[P]``: the KV blocks that each writes, one request after another.
        uids: of the R requests.
        blocks: how many blocks these positions lie in; P, unless a request names others than it writes.
        rows: of all requests.
        special: whether a request of the step is to be skipped or was just admitted.
    """

    table: np.ndarray
    block_ids: np.ndarray
    uids: list[int]
    blocks: int
    rows: int
    special: bool

    @property
    def start(self) -> np.ndarray:
        """int64 ``[R]``."""
        return self.table[:, 1]

    @property
    def end(self) -> np.ndarray:
        """int64 ``[R]``."""
        return self.table[:, 2]


def flatten(requests: Sequence[RequestStep], block_size: int) -> FlatStep:
    """The flat form of a step's requests.

    One loop over plain numbers: with it, a step of one request costs a few microseconds and one of 64 no more than arrays would, of which
    each operation costs about one.
    """
    numbers: list[int] = []
    parts: list[Sequence[int]] = []
    uids: list[int] = []
    special, place, row = False, 0, 0
    for uid, _, _, start, end, first, block_ids, admitted, skip in requests:  # unpacked: this is run for every request of every step
        if admitted or skip:
            special = True
            if skip:
                continue
        if end > start:
            block = start // block_size
            uids.append(uid)
            numbers += place, start, end, row
            place += (end - 1) // block_size - block + 1
            row += end - start
            parts.append(block_ids[block - first :] if block > first else block_ids)
    table = np.frombuffer(struct.pack(f"{len(numbers)}q", *numbers), np.int64).reshape(-1, 4)
    return FlatStep(table, _joined(parts, place), uids, place, row, special)


def _joined(parts: Sequence[Sequence[int]], count: int) -> np.ndarray:
    """int64, one part after another. ``count``: of the numbers, as expected."""
    try:
        joined = b"".join(parts)  # type: ignore[arg-type]  # of array("q"), their bytes
        if len(joined) == 8 * count:
            return np.frombuffer(joined, np.int64)
    except TypeError:  # other sequences
        pass
    return np.array([number for part in parts for number in part], dtype=np.int64)


class TokenUpdate(NamedTuple):
    """Token ids that became known: ``ids`` are those of positions ``offset, offset + 1, ...`` of request ``uid``.

    ``chunks``: the sequence's first whole chunks, if the sender knows them and ``ids`` holds all of their tokens; hashing a long prompt
    again would take the engine's thread milliseconds.
    """

    uid: int
    offset: int
    ids: tuple[int, ...]
    chunks: tuple[TokenChunk, ...] = ()


token_update: Callable[[tuple[int, int, tuple[int, ...], tuple[TokenChunk, ...]]], TokenUpdate] = partial(tuple.__new__, TokenUpdate)
"""A :class:`TokenUpdate` of its fields in their order."""


@dataclass(frozen=True)
class FinishedRequest:
    """A request that ended: ``num_tokens`` in all, of which rows of the first ``computed_tokens`` are final."""

    uid: int
    num_tokens: int
    prompt_tokens: int
    computed_tokens: int


NO_EDIT = "no edit"
"""See :attr:`LoadRequest.behind`."""


@dataclass(frozen=True)
class LoadRequest:
    """Stored chunks to put into pages before the forward pass.

    Args:
        uid, request_id, salt: whose.
        start, end: positions to fill; multiples of the block size.
        block_ids: the request's KV blocks from block 0 up to position ``end``.
        digests: of the chunks from chunk 0 up to the one of ``end - 1``.
        token_ids: of positions ``[0, end)`` rounded up to whole chunks, to check the objects against.
        behind: what the last chunk of an edit among them says of its rows (:attr:`~qcap.tokens.TokenChunk.behind`): what is computed next
            is stored as of these. "" if it says nothing, or ends before the edit does; :data:`NO_EDIT` if there was none.
    """

    uid: int
    request_id: str
    salt: str
    start: int
    end: int
    block_ids: tuple[int, ...]
    digests: tuple[str, ...]
    token_ids: tuple[int, ...]
    behind: str = ""


@dataclass(frozen=True)
class Step:
    """One step as the scheduler planned it. ``number`` counts from 1.

    ``speculative``: the engine drafts tokens, so computed rows may be rejected; rows are final up to the last known token only.
    ``overwritten``: KV blocks that the engine zeroes or copies to before the step begins.
    ``resampled``: requests whose tokens in flight were thrown away and will be sampled anew.
    ``flat``: of ``requests``, if whoever made the step made it too.
    """

    number: int
    requests: tuple[RequestStep, ...] = ()
    tokens: tuple[TokenUpdate, ...] = ()
    finished: tuple[FinishedRequest, ...] = ()
    preempted: tuple[int, ...] = ()
    loads: tuple[LoadRequest, ...] = ()
    speculative: bool = False
    resampled: tuple[int, ...] = ()
    overwritten: tuple[int, ...] = ()
    flat: FlatStep | None = field(default=None, compare=False)


@dataclass(frozen=True)
class StepPlan:
    """What the attribution kernel needs: ``block_ids`` int64 ``[P]`` ascending, ``ring_blocks`` int64 ``[P]`` beside them."""

    block_ids: np.ndarray
    ring_blocks: np.ndarray


@dataclass
class SpilledBlock:
    """Rows of a ring block moved to host memory: ``rows`` ``[1, L, N, H]``, the device's ``stamps`` int64 ``[N]``, the planned ones."""

    rows: torch.Tensor
    stamps: torch.Tensor
    planned: np.ndarray


@dataclass
class _Blocks:
    """A request's ring blocks by block index, and its rows moved to the host."""

    ring: dict[int, int] = field(default_factory=dict)
    spilled: dict[int, SpilledBlock] = field(default_factory=dict)
    staged: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class CompleteChunk:
    """A chunk whose every row has been planned.

    Args:
        index: number of the chunk.
        ring_blocks: its ring blocks in token order; -1 where all rows of a block have been spilled.
        planned: int64 ``[CH]``, the step in which each row was last planned.
        resident: bool ``[CH]``, rows to take from the ring; the others come from ``spilled``.
        spilled: block number in the chunk -> rows on the host.
    """

    index: int
    ring_blocks: tuple[int, ...]
    planned: np.ndarray
    resident: np.ndarray
    spilled: dict[int, SpilledBlock]


def ring_blocks_for(max_batched_tokens: int | None, block_size: int, depth: int) -> int:
    """Ring blocks for ``depth`` steps of the largest size: ``max(1, ceil(max_batched / block_size) * depth)``; 8,192 tokens if unknown."""
    tokens = max_batched_tokens or 8192
    return max(1, -(-tokens // block_size) * max(1, depth))


def step_block_limit(max_batched_tokens: int, max_requests: int, block_size: int) -> int:
    """The most KV blocks one step can write: each request starts and ends inside a block."""
    return max_batched_tokens // block_size + 2 * min(max_requests, max_batched_tokens) + 1


class RowLedger:
    """Which ring block holds which rows of which request, from step to step.

    Args:
        ring: the blocks to give out. Its block size is the KV block size.
        chunk_size: CH, a multiple of the block size.
        spill: copies a ring block to the host; given, a full ring never loses a row (``on_pressure="wait"``). None: a request that
            finds the ring full loses the chunks of that step, and ``on_skip`` is told.
        on_skip: called with (uid, chunk, reason).
    """

    def __init__(
        self,
        ring: QRingBuffer,
        chunk_size: int,
        *,
        spill: Callable[[int], tuple[torch.Tensor, torch.Tensor]] | None,
        on_skip: Callable[[int, int, str], None],
    ) -> None:
        if chunk_size % ring.block_size:
            raise ConfigError(f"chunk_size {chunk_size} is not a multiple of the ring's block size {ring.block_size}")
        self._ring = ring
        self._n = ring.block_size
        self._per_chunk = chunk_size // ring.block_size
        self._spill = spill
        self._on_skip = on_skip
        self._requests: dict[int, _Blocks] = {}
        self._owners: dict[int, int] = {}  # ring block -> requests that hold it
        self._stamps: dict[int, np.ndarray] = {}  # ring block -> int64 [N]
        self._of_kv: dict[int, int] = {}  # KV block of a running request -> its ring block
        self._kv_of: dict[int, int] = {}  # and back
        self._active: dict[int, RequestStep] = {}

    # ---- one step -----------------------------------------------------------------------------------------------------------------

    def begin(self, step: Step) -> StepPlan:
        """Give every KV block that this step writes a ring block.

        A step before it that never ended (its save hook did not come) is abandoned: what it wrote does not count.
        """
        if self._active:
            self.abandon()
        for uid in step.preempted:
            self._forget_kv(uid)
        for written in self._written(step):  # what another request's rows stood for is being overwritten
            self._drop_kv(self._of_kv.get(written))
        pairs: dict[int, int] = {}
        touched = {r.uid for r in step.requests}
        computing = [r for r in step.requests if not r.skip and r.end > r.start]
        for request in computing:
            blocks = self._requests.setdefault(request.uid, _Blocks())
            if request.admitted:
                self._forget_kv(request.uid)
            self._active[request.uid] = request
            if not self._assign(request, blocks, pairs, touched):
                del self._active[request.uid]
                self._give_up(request, blocks)
        for request in computing:  # after every block of the step has its ring block, whatever the order of the requests
            if request.admitted and request.start:
                self._attach_shared(request, self._requests[request.uid])
        kv = np.fromiter(pairs.keys(), dtype=np.int64, count=len(pairs))
        order = np.argsort(kv, kind="stable")
        ring = np.fromiter(pairs.values(), dtype=np.int64, count=len(pairs))
        return StepPlan(kv[order], ring[order])

    def _written(self, step: Step) -> Iterable[int]:
        for request in step.requests:
            first = request.start // self._n - request.first_block
            yield from request.block_ids[max(first, 0) :]
        for load in step.loads:
            yield from load.block_ids[load.start // self._n :]

    def commit(self, step_number: int, invalid: Iterable[int] = ()) -> None:
        """The step's rows have been written. Rows of ``invalid`` requests were computed on bad data: they count as not there."""
        bad = set(invalid)
        for uid, request in self._active.items():
            blocks = self._requests.get(uid)
            if blocks is None:
                continue
            stamp = 0 if uid in bad else step_number
            for index in range(request.start // self._n, -(-request.end // self._n)):
                ring_block = blocks.ring.get(index)
                if ring_block is not None:
                    first = max(request.start - index * self._n, 0)
                    self._stamps[ring_block][first : min(request.end - index * self._n, self._n)] = stamp
        self._active = {}

    def abandon(self) -> None:
        """The step will not be finished: whatever its rows were, they do not count."""
        self.commit(0, self._active.keys())

    # ---- chunks -------------------------------------------------------------------------------------------------------------------

    def complete(self, uid: int, final_tokens: int) -> list[CompleteChunk]:
        """Chunks of ``uid`` below position ``final_tokens`` whose every row is there, each told once. They stay held until released."""
        blocks = self._requests.get(uid)
        if blocks is None:
            return []
        found = []
        candidates = {i // self._per_chunk for i in blocks.ring} | {i // self._per_chunk for i in blocks.spilled}
        for index in sorted(candidates - blocks.staged):
            if (index + 1) * self._per_chunk * self._n <= final_tokens:
                chunk = self._assemble(blocks, index)
                if chunk is not None:
                    blocks.staged.add(index)
                    found.append(chunk)
        return found

    def _assemble(self, blocks: _Blocks, chunk: int) -> CompleteChunk | None:
        ring_blocks, planned, resident, spilled = [], [], [], {}
        for i in range(self._per_chunk):
            index = chunk * self._per_chunk + i
            ring_block = blocks.ring.get(index)
            here = self._stamps[ring_block] if ring_block is not None else np.zeros(self._n, dtype=np.int64)
            away = blocks.spilled.get(index)
            stamps = here if away is None else np.where(here > 0, here, away.planned)
            if not stamps.all():
                return None
            if away is not None:
                spilled[i] = away
            ring_blocks.append(-1 if ring_block is None else ring_block)
            planned.append(stamps.copy())
            resident.append(here > 0)
        return CompleteChunk(chunk, tuple(ring_blocks), np.concatenate(planned), np.concatenate(resident), spilled)

    def release_chunk(self, uid: int, chunk: int) -> None:
        """Give back what ``uid`` holds of ``chunk``."""
        blocks = self._requests.get(uid)
        if blocks is not None:
            for index in range(chunk * self._per_chunk, (chunk + 1) * self._per_chunk):
                blocks.spilled.pop(index, None)
                self._let_go(blocks, index)

    def forget_staged(self, uid: int, chunk: int) -> None:
        """``chunk`` was taken but could not be used: it may be taken again, if its rows come again."""
        blocks = self._requests.get(uid)
        if blocks is not None:
            blocks.staged.discard(chunk)

    def release(self, uid: int) -> None:
        """Give back everything ``uid`` holds: it finished, was aborted, or failed."""
        blocks = self._requests.pop(uid, None)
        if blocks is not None:
            for index in list(blocks.ring):
                self._let_go(blocks, index)
        self._active.pop(uid, None)

    def release_all(self) -> None:
        """Give back everything."""
        for uid in list(self._requests):
            self.release(uid)

    def missing_rows(self, uid: int, chunk: int) -> int:
        """How many rows of ``chunk`` of ``uid`` are not there (CH if nothing of it is)."""
        blocks = self._requests.get(uid, _Blocks())
        missing = 0
        for index in range(chunk * self._per_chunk, (chunk + 1) * self._per_chunk):
            ring_block, away = blocks.ring.get(index), blocks.spilled.get(index)
            here = self._stamps[ring_block] > 0 if ring_block is not None else np.zeros(self._n, dtype=bool)
            missing += int((~(here | (away.planned > 0) if away is not None else here)).sum())
        return missing

    # ---- blocks -------------------------------------------------------------------------------------------------------------------

    def _attach_shared(self, request: RequestStep, blocks: _Blocks) -> None:
        """Blocks before ``start`` that another running request computes, or has just computed: hold them too."""
        first = request.start // (self._per_chunk * self._n) * self._per_chunk
        for index in range(first, request.start // self._n):
            ring_block = self._of_kv.get(request.block_ids[index - request.first_block])
            if ring_block is not None and index not in blocks.ring and index // self._per_chunk not in blocks.staged:
                blocks.ring[index] = ring_block
                self._owners[ring_block] += 1

    def _assign(self, request: RequestStep, blocks: _Blocks, pairs: dict[int, int], touched: set[int]) -> bool:
        wanted = [
            index for index in range(request.start // self._n, -(-request.end // self._n)) if index // self._per_chunk not in blocks.staged
        ]
        new = [index for index in wanted if index not in blocks.ring]
        keep = set(pairs.values()) | {blocks.ring[index] for index in wanted if index in blocks.ring}
        taken = self._allocate(len(new), touched, keep)
        if taken is None:
            return False
        for index, ring_block in zip(new, taken, strict=True):
            blocks.ring[index] = ring_block
            self._owners[ring_block] = 1
            self._stamps[ring_block] = np.zeros(self._n, dtype=np.int64)
        for index in wanted:
            kv, ring_block = request.block_ids[index - request.first_block], blocks.ring[index]
            self._drop_kv(self._of_kv.get(kv))
            self._drop_kv(ring_block)
            self._of_kv[kv] = ring_block
            self._kv_of[ring_block] = kv
            pairs[kv] = ring_block
        return True

    def _give_up(self, request: RequestStep, blocks: _Blocks) -> None:
        """The ring has no room for this step's rows: the chunks they belong to can no longer become whole, so they hold nothing."""
        size = self._per_chunk * self._n
        for chunk in range(request.start // size, -(-request.end // size)):
            if chunk not in blocks.staged:
                self.release_chunk(request.uid, chunk)
                blocks.staged.add(chunk)
                self._on_skip(request.uid, chunk, "ring-full")

    def _allocate(self, count: int, touched: set[int], keep: set[int]) -> list[int] | None:
        taken = self._ring.allocate(count)
        if taken is not None or self._spill is None:
            return taken
        idle_first = sorted(self._requests.items(), key=lambda item: item[0] in touched)
        for _, blocks in idle_first:
            for ring_block in [b for b in blocks.ring.values() if b not in keep]:
                self._spill_block(ring_block)
            taken = self._ring.allocate(count)
            if taken is not None:
                return taken
        return None

    def _spill_block(self, ring_block: int) -> None:
        """Move a ring block's rows to the host, for every request that holds it."""
        assert self._spill is not None
        planned = self._stamps[ring_block].copy()
        rows, stamps = self._spill(ring_block) if planned.any() else (None, None)
        holders = [(b, i) for b in self._requests.values() for i, held in b.ring.items() if held == ring_block]
        for blocks, index in holders:
            if rows is not None and stamps is not None:
                away = blocks.spilled.get(index)
                if away is None:
                    blocks.spilled[index] = SpilledBlock(rows.clone(), stamps.clone(), planned.copy())
                else:
                    newer = torch.from_numpy(planned > 0)
                    away.rows[:, :, newer] = rows[:, :, newer]
                    away.stamps[newer] = stamps[newer]
                    away.planned[planned > 0] = planned[planned > 0]
            self._let_go(blocks, index)

    def _let_go(self, blocks: _Blocks, index: int) -> None:
        ring_block = blocks.ring.pop(index, None)
        if ring_block is None:
            return
        self._owners[ring_block] -= 1
        if self._owners[ring_block] == 0:
            del self._owners[ring_block], self._stamps[ring_block]
            self._drop_kv(ring_block)
            self._ring.free([ring_block])

    def _forget_kv(self, uid: int) -> None:
        """``uid`` no longer owns the KV blocks it had; its rows stay (they are its tokens' rows wherever the KV goes)."""
        blocks = self._requests.get(uid)
        if blocks is not None:
            for ring_block in blocks.ring.values():
                if self._owners[ring_block] == 1:
                    self._drop_kv(ring_block)

    def _drop_kv(self, ring_block: int | None) -> None:
        if ring_block is not None:
            kv = self._kv_of.pop(ring_block, None)
            if kv is not None:
                self._of_kv.pop(kv, None)
