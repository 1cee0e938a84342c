"""What is captured in a step, and how it leaves the device.

:class:`Capture` fans a step out to its features: :class:`QueryFeature` keeps queries in a ring until a chunk is whole,
:class:`KVFeature` reads keys and values from the engine's pages. It knows a :class:`~qcap.store.tiers.Backend`; nothing of transport
or files, and nothing of vLLM. In the engine's process nothing here raises into a forward pass: :meth:`Capture.guard` records an error,
says it once, and turns the feature off.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from qcap import kernels
from qcap.attribution import PLAN_PADDING, CompleteChunk, FinishedRequest, RowLedger, Step, TokenUpdate
from qcap.errors import StoreError, TokenError, Unsupported
from qcap.geometry import Geometry, PagedLayout
from qcap.kinds import CacheKind
from qcap.ring import QRingBuffer
from qcap.store.metrics import RateLimitedLog
from qcap.store.tiers import Backend, SequenceRecord, StoreOutcome
from qcap.tokens import ChunkedTokenDatabase, ChunkRecord, TokenChunk, chunk_key

logger = logging.getLogger("qcap.capture")
often = RateLimitedLog(logger)


@dataclass(frozen=True)
class Staged:
    """A whole chunk on its way: ``host`` ``[planes, L, CH, H]``, good once ``ready`` is over; ``also`` are buffers that go back with it."""

    host: torch.Tensor
    ready: Ready
    also: tuple[torch.Tensor, ...] = ()


class RowsMissing(Unsupported):
    """Rows that the scheduler announced never reached the ring; the chunk is not published."""


class Feature(Protocol):
    """One tensor kind's part in a step. A new kind is a new class with these methods, given to :class:`Capture` beside the others."""

    kind: CacheKind

    def begin(self, step: Step) -> None:
        """The step is about to run."""

    def commit(self, step_number: int, invalid: Sequence[int]) -> None:
        """The step's device work has been queued."""

    def take(self, track: RequestTrack, final_tokens: int) -> Iterator[tuple[int, Callable[[], Staged]]]:
        """Chunks of a request that are whole now: (index, how to stage it)."""

    def forget(self, track: RequestTrack, chunk: int) -> None:
        """A taken chunk could not be used: it may be taken again, if it is computed again."""

    def release(self, track: RequestTrack) -> None:
        """The request is over."""

    def why_missing(self, track: RequestTrack, chunk: int) -> str:
        """Why a chunk of computed tokens was never staged."""

    def close(self) -> None:
        """Give everything back."""


@dataclass
class RequestTrack:
    """What the worker knows of one request."""

    uid: int
    request_id: str
    salt: str
    tokens: list[int] = field(default_factory=list)
    chunks: list[TokenChunk] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    end: int = 0  # of the last step
    cached_until: int = 0  # positions that were in the engine's cache when the request was admitted (the most, if more than once)
    barred: str = ""  # why nothing of this request may be stored
    staged: dict[CacheKind, set[int]] = field(default_factory=dict)
    waiting: dict[CacheKind, dict[int, Staged]] = field(default_factory=dict)  # whole, but token ids are not known yet
    stored: dict[CacheKind, set[int]] = field(default_factory=dict)
    reasons: dict[CacheKind, dict[int, str]] = field(default_factory=dict)
    in_flight: int = 0
    finished: FinishedRequest | None = None
    receipt_written: bool = False


class HostBuffers:
    """Host memory for chunks on their way, used again and again. Pinned where the device is a GPU.

    Args:
        pinned: page-lock the buffers.
        keep_bytes: how much to keep for the next chunk; more than that is freed when it comes back.
    """

    def __init__(self, *, pinned: bool, keep_bytes: int) -> None:
        self._pinned, self._keep_bytes = pinned, keep_bytes
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}
        self._lock = threading.Lock()
        self._free_bytes = 0
        self.outstanding = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised host tensor."""
        with self._lock:
            self.outstanding += 1
            stack = self._free.get((shape, dtype))
            if stack:
                buffer = stack.pop()
                self._free_bytes -= buffer.nbytes
                return buffer
        with torch.inference_mode(False):  # an engine's steps run in inference mode; the writer's thread, which may patch rows in, does not
            return torch.empty(shape, dtype=dtype, pin_memory=self._pinned)

    def give(self, buffer: torch.Tensor, *, written: bool = True) -> None:
        """The buffer is no longer read by anyone. ``written=False``: a copy into it may still run, so it is not used again."""
        with self._lock:
            self.outstanding -= 1
            if written and self._free_bytes + buffer.nbytes <= self._keep_bytes:
                self._free.setdefault((tuple(buffer.shape), buffer.dtype), []).append(buffer)
                self._free_bytes += buffer.nbytes


class Ready:
    """Waits for a chunk's copies, then runs ``check`` (once, on the writer's thread). ``failure`` says what the check found."""

    def __init__(self, event: Any, check: Callable[[], None] | None = None) -> None:
        self._event, self._check = event, check
        self.failure = ""

    def done(self) -> bool:
        """Whether the copies are over; waits for nothing."""
        return self._event is None or bool(self._event.query())

    def synchronize(self) -> None:
        """Block until the chunk is on the host.

        Raises:
            RowsMissing: it is there, but not whole.
        """
        if self._event is not None:
            self._event.synchronize()
        if self._check is not None:
            check, self._check = self._check, None
            try:
                check()
            except RowsMissing:
                self.failure = "rows-missing"
                raise


class Stager:
    """Moves gathered chunks to the host on a stream of its own; on the CPU the gather writes to the host buffer itself."""

    def __init__(self, device: torch.device, buffers: HostBuffers) -> None:
        self.device, self.buffers = device, buffers
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def indices(self, values: Sequence[int] | np.ndarray) -> torch.Tensor:
        """int64 indices on the device, sent without waiting for it."""
        host = torch.as_tensor(np.asarray(values, dtype=np.int64))
        if self._stream is None:
            return host
        return host.pin_memory().to(self.device, non_blocking=True)

    def stage(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        gather: Callable[[torch.Tensor], None],
        extras: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        check: Callable[[torch.Tensor], None] | None = None,
    ) -> Staged:
        """Gather on the compute stream, copy to the host on the store stream. ``extras``: further (device, host) pairs to copy."""
        host = self.buffers.take(shape, dtype)
        finish = None if check is None else (lambda: check(host))
        if self._stream is None:
            gather(host)
            for source, target in extras:
                target.copy_(source)
            return Staged(host, Ready(None, finish), tuple(target for _, target in extras))
        on_device = torch.empty(shape, dtype=dtype, device=self.device)
        gather(on_device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            host.copy_(on_device, non_blocking=True)
            on_device.record_stream(self._stream)
            for source, target in extras:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Staged(host, Ready(event, finish), tuple(target for _, target in extras))


class QueryFeature:
    """Queries: scattered to a ring in every attention layer, gathered when a chunk is whole.

    All device work of a step has fixed shapes and persistent buffers, so it can be recorded into a CUDA graph: :meth:`on_layer` launches
    *slot attribution* on the first layer and *row scatter* on each; a replay reads the plan that :meth:`begin` has sent. Between steps the
    plan is empty, so warm-up and capture runs write nothing.

    Args:
        geometry: of this rank.
        device: of the engine's KV cache.
        dtype: of the ring.
        ring_blocks: blocks in the ring.
        max_rows: rows in the largest step, padding included.
        plan_blocks: the most KV blocks a step can write.
        never_lose: move partial chunks to the host when the ring is full, instead of dropping them.
    """

    kind = CacheKind.QUERY

    def __init__(
        self,
        geometry: Geometry,
        *,
        device: torch.device,
        dtype: torch.dtype,
        ring_blocks: int,
        max_rows: int,
        plan_blocks: int,
        never_lose: bool,
        stager: Stager,
        counters: Counter[str],
    ) -> None:
        self._geometry, self._device, self._stager, self._counters = geometry, device, stager, counters
        n = geometry.block_size
        self.ring = QRingBuffer(geometry.num_layers, ring_blocks, n, geometry.hidden(CacheKind.QUERY), dtype, device)
        self.dtype = dtype
        self._table = self.ring.page_table()
        self._stamps = torch.zeros((ring_blocks, 1, n, 1), dtype=torch.int64, device=device)  # step in which each ring row was written
        self._stamp_table = kernels.PageTable([[self._stamps]])
        self._plan = torch.full((2, plan_blocks), PLAN_PADDING, dtype=torch.int64, device=device)
        self._step = torch.zeros((1, 1), dtype=torch.int64, device=device)
        self._ring_slots = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        self._uploads = _PinnedUploads(device, (2, plan_blocks))
        self.ledger = RowLedger(self.ring, geometry.chunk_size, spill=self._spill if never_lose else None, on_skip=self._on_skip)
        self._skips: dict[int, dict[int, str]] = {}
        self._number = self._calls = self._rows = 0
        self.active = False

    def _on_skip(self, uid: int, chunk: int, reason: str) -> None:
        self._skips.setdefault(uid, {})[chunk] = reason
        self._counters[f"query.skipped.{reason}"] += 1

    # ---- the step -----------------------------------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Send the step's plan to the device: one copy, nothing awaited."""
        plan = self.ledger.begin(step)
        count = len(plan.block_ids)
        if count > self._plan.shape[1]:
            self.ledger.abandon()
            raise Unsupported(f"the step writes {count} KV blocks, the plan holds {self._plan.shape[1]}: raise max_num_seqs' limit in qcap")
        host = self._uploads.next()
        host[:, :] = PLAN_PADDING
        host[0, :count] = torch.from_numpy(plan.block_ids)
        host[1, :count] = torch.from_numpy(plan.ring_blocks)
        self._plan.copy_(host, non_blocking=True)
        self._step.fill_(step.number)
        self._uploads.sent()
        self._number, self._calls, self.active = step.number, 0, count > 0

    def on_layer(self, layer: int, query: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Rows of one layer: ``query`` ``[rows, HQ, D]`` or ``[rows, H]``, any row stride; ``slot_mapping`` int ``[<= rows or more]``."""
        rows = query.shape[0]
        slots = self._ring_slots[:rows]
        if layer == 0:
            self._rows = rows
            kernels.slot_attribution(slot_mapping[:rows], self._plan[0], self._plan[1], self._geometry.block_size, slots)
            kernels.row_scatter(self._step.expand(rows, 1), slots, self._stamps.view(-1, 1))
        elif rows != self._rows:  # fast prefill with shared KV: later layers see fewer rows, and which ones is not ours to guess
            raise Unsupported(f"layer {layer} has {rows} query rows, layer 0 had {self._rows}")
        self.ring.scatter(layer, query, slots)
        self._calls += 1

    def commit(self, step_number: int, invalid: Sequence[int]) -> None:
        """The forward pass has been queued. In a replayed graph no layer called; else all must have."""
        if step_number != self._number:
            return
        if self.active and self._calls % self._geometry.num_layers:
            self._counters["query.steps_incomplete"] += 1
            self.ledger.abandon()
            often.error(
                "only %d of %d layers brought queries in step %d: its rows are dropped", self._calls, self._geometry.num_layers, step_number
            )
        else:
            if self.active and not self._calls:
                self._counters["query.steps_replayed"] += 1
            self.ledger.commit(step_number, invalid)
        self.quiet()

    def quiet(self) -> None:
        """Empty the plan: what runs before the next :meth:`begin` matches no block."""
        self._plan.fill_(PLAN_PADDING)
        self.active = False

    # ---- chunks -------------------------------------------------------------------------------------------------------------------

    def take(self, track: RequestTrack, final_tokens: int) -> Iterator[tuple[int, Callable[[], Staged]]]:
        """Whole chunks; their ring blocks go back as soon as the gather has been queued."""
        for chunk in self.ledger.complete(track.uid, final_tokens):
            try:
                yield chunk.index, lambda chunk=chunk: self._stage(chunk)  # type: ignore[misc]
            finally:
                self.ledger.release_chunk(track.uid, chunk.index)

    def _stage(self, chunk: CompleteChunk) -> Staged:
        g = self._geometry
        blocks = self._stager.indices(chunk.ring_blocks)
        stamps_device = torch.empty((1, 1, g.chunk_size, 1), dtype=torch.int64, device=self._device)
        kernels.gather_pages(self._stamp_table, blocks, stamps_device)
        stamps = self._stager.buffers.take((g.chunk_size,), torch.int64)

        def check(host: torch.Tensor) -> None:
            seen = stamps.numpy().copy()
            for block, away in chunk.spilled.items():
                span = slice(block * g.block_size, (block + 1) * g.block_size)
                rows = ~chunk.resident[span]
                host[:, :, span][:, :, torch.from_numpy(rows)] = away.rows[:, :, torch.from_numpy(rows)]
                seen[span][rows] = away.stamps.numpy()[rows]
            wrong = int((seen != chunk.planned).sum())
            if wrong:
                self._counters["query.rows_missing"] += wrong
                raise RowsMissing(f"{wrong} of {g.chunk_size} rows of a chunk never reached the ring: it is not published")

        return self._stager.stage(
            g.chunk_shape(CacheKind.QUERY),
            self.dtype,
            lambda out: kernels.gather_pages(self._table, blocks, out),
            extras=[(stamps_device.view(-1), stamps)],
            check=check,
        )

    def _spill(self, ring_block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy one ring block and its stamps to the host. Waits for the device: only ``on_pressure="wait"`` comes here."""
        g = self._geometry
        index = self._stager.indices([ring_block])
        with torch.inference_mode(False):
            rows = torch.empty((1, g.num_layers, g.block_size, g.hidden(CacheKind.QUERY)), dtype=self.dtype, device=self._device)
            kernels.gather_pages(self._table, index, rows)
            self._counters["query.blocks_spilled"] += 1
            return rows.cpu(), self._stamps[ring_block].view(-1).clone().cpu()

    def forget(self, track: RequestTrack, chunk: int) -> None:
        """The chunk's rows may be taken again, if they come again."""
        self.ledger.forget_staged(track.uid, chunk)

    def release(self, track: RequestTrack) -> None:
        """Give the request's ring blocks back."""
        self.ledger.release(track.uid)
        self._skips.pop(track.uid, None)

    def why_missing(self, track: RequestTrack, chunk: int) -> str:
        """``ring-full``, ``prefix-cached`` or ``not-captured``."""
        reason = self._skips.get(track.uid, {}).get(chunk)
        if reason:
            return reason
        return "prefix-cached" if chunk * self._geometry.chunk_size < track.cached_until else "not-captured"

    def close(self) -> None:
        """Give every ring block back."""
        self.ledger.release_all()


class KVFeature:
    """Keys and values: read from the engine's pages when a chunk is whole. What a prefix hit brought is in the pages too."""

    kind = CacheKind.KV

    def __init__(self, geometry: Geometry, pages: Sequence[torch.Tensor], layouts: Sequence[PagedLayout], stager: Stager) -> None:
        self._geometry, self._stager = geometry, stager
        self.table = kernels.PageTable([layout.views(page) for page, layout in zip(pages, layouts, strict=True)])

    def begin(self, step: Step) -> None:
        """Nothing to prepare: pages are the engine's."""

    def commit(self, step_number: int, invalid: Sequence[int]) -> None:
        """Nothing to note: the pages hold what the step computed."""

    def take(self, track: RequestTrack, final_tokens: int) -> Iterator[tuple[int, Callable[[], Staged]]]:
        """Whole chunks below ``final_tokens`` that have not been staged."""
        g = self._geometry
        per_chunk = g.chunk_size // g.block_size
        for index in range(final_tokens // g.chunk_size):
            if index not in track.staged.get(self.kind, ()):
                blocks = track.block_ids[index * per_chunk : (index + 1) * per_chunk]
                if len(blocks) == per_chunk:
                    yield index, lambda blocks=blocks: self.stage(blocks)  # type: ignore[misc]

    def stage(self, block_ids: Sequence[int]) -> Staged:
        """One chunk's pages to the host."""
        g = self._geometry
        blocks = self._stager.indices(block_ids)
        return self._stager.stage(g.chunk_shape(self.kind), g.torch_dtype, lambda out: kernels.gather_pages(self.table, blocks, out))

    def put(self, block_ids: Sequence[int], source: torch.Tensor) -> None:
        """Write rows ``[2, L, len(block_ids) * N, H]`` (host) into pages, on the current stream."""
        blocks = self._stager.indices(block_ids)
        device = self._stager.device
        kernels.scatter_pages(self.table, blocks, source.contiguous().to(device))

    def forget(self, track: RequestTrack, chunk: int) -> None:
        """Nothing is remembered."""

    def release(self, track: RequestTrack) -> None:
        """Nothing is held."""

    def why_missing(self, track: RequestTrack, chunk: int) -> str:
        """Pages of every computed token are there until the request ends."""
        return "not-captured"

    def close(self) -> None:
        """Nothing is held."""


class _PinnedUploads:
    """Host buffers that a non-blocking copy to the device may still be reading: used in turn, each guarded by an event."""

    def __init__(self, device: torch.device, shape: tuple[int, ...], depth: int = 4) -> None:
        cuda = device.type == "cuda"
        self._buffers = [torch.empty(shape, dtype=torch.int64, pin_memory=cuda) for _ in range(depth if cuda else 1)]
        self._events: list[Any] = [None] * len(self._buffers)
        self._cuda, self._turn = cuda, -1

    def next(self) -> torch.Tensor:
        """A buffer that no copy reads any more."""
        self._turn = (self._turn + 1) % len(self._buffers)
        if self._events[self._turn] is not None:
            self._events[self._turn].synchronize()  # four steps old: long done
        return self._buffers[self._turn]

    def sent(self) -> None:
        """The copy from the buffer in hand has been queued."""
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
            self._events[self._turn] = event


class Capture:
    """The features of one rank, the requests they follow, and the way to the store.

    Args:
        geometry: of this rank.
        backend: where chunks go.
        features: what to capture; none is legal (loading alone).
        engine_id: goes into receipts.
        write_receipts: one rank does.
        buffers: returned to when a chunk has been written.
        may_wait: the engine may be held back until the store has room (``on_pressure="wait"``).
        refused: kinds that were asked for and cannot be captured here, with the reason that receipts give.
    """

    def __init__(
        self,
        geometry: Geometry,
        backend: Backend,
        features: Sequence[Feature],
        *,
        engine_id: str,
        write_receipts: bool,
        buffers: HostBuffers,
        counters: Counter[str],
        refused: Mapping[CacheKind, str] | None = None,
        may_wait: bool = True,
    ) -> None:
        self.geometry, self.backend = geometry, backend
        self._refused = dict(refused or {})
        self._may_wait = may_wait
        self.features: list[Feature] = list(features)
        self.counters = counters
        self._engine_id, self._write_receipts, self._buffers = engine_id, write_receipts, buffers
        self._database = ChunkedTokenDatabase(geometry.chunk_size)
        self._tracks: dict[int, RequestTrack] = {}
        self._step: Step | None = None
        self._invalid: set[int] = set()
        self._speculative = False
        self._lock = threading.RLock()  # steps and ends; may be held while the store makes the engine wait
        self._book = threading.Lock()  # what the writer's thread notes; never held while calling the store
        self._off: set[str] = set()
        self._told: set[str] = set()
        self._tainted: set[int] = set()  # KV blocks that hold what was computed on a failed load, until they are computed anew

    # ---- posture ------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def guard(self, what: str, feature: Feature | None = None) -> Iterator[None]:
        """Nothing raises into the engine: the error is counted and logged, and the feature (or all of them) is turned off for good."""
        try:
            yield
        except Exception:
            self.counters["errors"] += 1
            names = [feature] if feature is not None else list(self.features)
            if what not in self._told:
                self._told.add(what)
                logger.exception(
                    "qcap: %s failed; %s is turned off, the engine goes on", what, ", ".join(f.kind.value for f in names) or "nothing"
                )
            for broken in names:
                self.turn_off(broken)

    def turn_off(self, feature: Feature) -> None:
        """Capture nothing of this kind from now on, and give back what it held."""
        if feature in self.features:
            self.features.remove(feature)
            self._off.add(feature.kind.value)
            self.counters[f"{feature.kind.value}.turned_off"] += 1
            try:
                feature.close()
            except Exception:
                logger.exception("qcap: closing %s failed", feature.kind.value)

    # ---- the step -----------------------------------------------------------------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        """Before the forward pass: token ids that became known, requests that ended, the plan of this step."""
        with self._lock:
            self._step, self._invalid, self._speculative = step, set(), step.speculative
            gone = set(step.overwritten)
            for uid in (*(done.uid for done in step.finished), *step.preempted) if gone else ():
                track = self._tracks.get(uid)
                if track is not None:
                    del track.block_ids[next((i for i, block in enumerate(track.block_ids) if block in gone), len(track.block_ids)) :]
            for request in step.requests:
                if request.uid not in self._tracks:
                    self._tracks[request.uid] = RequestTrack(request.uid, request.request_id, request.salt)
            for update in step.tokens:
                self._learn(update.uid, update.offset, update.ids)
            for done in step.finished:
                self.finish(done)
            for uid in step.preempted:
                if uid in self._tracks:
                    if step.speculative:  # its pages are still what they were: the forward pass that may write over them comes after
                        self._collect(self._tracks[uid], min(self._tracks[uid].end, len(self._tracks[uid].tokens) - 1))
                    self._tracks[uid].block_ids.clear()
            for uid in step.resampled:
                if uid in self._tracks:
                    self._drop_waiting(self._tracks[uid], "token-ids-changed", again=True)
            for request in step.requests:
                track = self._tracks[request.uid]
                track.barred = track.barred or request.skip
                del track.block_ids[request.first_block :]
                track.block_ids.extend(request.block_ids)
                track.end = request.end
                if request.admitted:
                    track.cached_until = max(track.cached_until, request.start)
                if step.speculative and not request.admitted:
                    self._collect(track, min(request.start, len(track.tokens) - 1))
            if self._tainted:
                for load in step.loads:  # about to be filled; tainted again if that fails
                    self._tainted.difference_update(load.block_ids[load.start // self.geometry.block_size :])
                self._spread_taint(step)
            for feature in list(self.features):
                with self.guard("planning a step", feature):
                    feature.begin(step)

    def mark_invalid(self, block_ids: set[int], reason: str) -> None:
        """These KV blocks hold garbage (a load failed): every request of this step that uses one is computed on it, and is stored no more.

        What it computes is garbage too, and stays in the engine's blocks until it is computed anew; see :meth:`_spread_taint`.
        """
        with self._lock:
            self._tainted |= block_ids
            if self._step is not None:
                self._spread_taint(self._step, reason, loading=True)

    def _spread_taint(self, step: Step, reason: str = "load-failed", *, loading: bool = False) -> None:
        """Requests that read a tainted block are invalid in this step, and so is what they write; blocks that a good request writes from
        their first row on are good again."""
        n = self.geometry.block_size
        pending = {r.uid: r for r in step.requests if r.uid in self._tracks}
        while True:  # a request may read in this very step what another one computes anew in it
            good = [r for r in pending.values() if not self._tainted.intersection(self._tracks[r.uid].block_ids[: -(-r.start // n)])]
            if not good:
                break
            for request in good:
                del pending[request.uid]
                if not loading:
                    self._tainted.difference_update(self._tracks[request.uid].block_ids[-(-request.start // n) :])
        for uid, request in pending.items():
            track = self._tracks[uid]
            self._invalid.add(uid)
            track.barred = track.barred or reason
            self._tainted.update(track.block_ids[request.start // n :])

    def end_step(self) -> None:
        """After the forward pass was queued: take what became whole."""
        with self._lock:
            step, self._step = self._step, None
            if step is None:
                return
            for feature in list(self.features):
                with self.guard("closing a step", feature):
                    feature.commit(step.number, sorted(self._invalid))
            if not step.speculative:
                for request in step.requests:
                    track = self._tracks.get(request.uid)
                    if track is not None:  # else it ended between its step and this
                        self._collect(track, request.end)
            self.counters["steps"] += 1

    def _collect(self, track: RequestTrack, final_tokens: int) -> None:
        """Stage every chunk of ``track`` that is whole below ``final_tokens``, and publish those whose token ids are known."""
        for feature in list(self.features):
            with self.guard("taking chunks", feature):
                staged = track.staged.setdefault(feature.kind, set())
                for index, stage in feature.take(track, final_tokens):
                    if index in staged:
                        continue
                    staged.add(index)
                    if track.barred:
                        track.reasons.setdefault(feature.kind, {})[index] = track.barred
                        continue
                    if self.backend.cheap_contains and self._already_stored(track, feature.kind, index):
                        continue
                    if not self._may_wait and not self.backend.has_room(self.geometry.chunk_bytes(feature.kind)):
                        self._lose(track, feature.kind, index, "store-busy")  # before it costs device and host memory
                        continue
                    try:
                        self._hand_over(track, feature.kind, index, stage())
                    except torch.OutOfMemoryError:
                        self._lose(track, feature.kind, index, "no-device-memory")
                    except (StoreError, TokenError) as error:  # one chunk's fault, not the feature's
                        often.error("a chunk is not stored: %s", error)
                        self._lose(track, feature.kind, index, "store-failed")

    def _lose(self, track: RequestTrack, kind: CacheKind, index: int, reason: str) -> None:
        with self._book:
            self.counters[f"{kind.value}.skipped.{reason}"] += 1
            track.reasons.setdefault(kind, {})[index] = reason

    def _already_stored(self, track: RequestTrack, kind: CacheKind, index: int) -> bool:
        if index >= len(track.chunks):
            return False  # token ids not known yet
        key = chunk_key(kind, self.geometry, track.chunks[index].digest, track.salt)
        try:
            if not self.backend.contains([key])[0]:
                return False
        except StoreError as error:
            self.counters["store.unavailable"] += 1
            often.warning("the store cannot be asked: %s", error)
            return False
        with self._book:
            track.stored.setdefault(kind, set()).add(index)
            self.counters[f"{kind.value}.exists"] += 1
        return True

    def _hand_over(self, track: RequestTrack, kind: CacheKind, index: int, staged: Staged) -> None:
        if index >= len(track.chunks):
            track.waiting.setdefault(kind, {})[index] = staged
            return
        chunk = track.chunks[index]
        record = ChunkRecord(
            kind, self.geometry, chunk.start, tuple(track.tokens[chunk.start : chunk.end]), chunk.digest, chunk.parent, track.salt
        )
        with self._book:
            track.in_flight += 1
        future = self.backend.store(record, staged.host, staged.ready)
        future.add_done_callback(lambda done: self._written(track, kind, index, staged, done))

    def _written(self, track: RequestTrack, kind: CacheKind, index: int, staged: Staged, future: Future[StoreOutcome]) -> None:
        outcome = StoreOutcome.FAILED if future.cancelled() or future.exception() else future.result()
        with self._book:
            self.counters[f"{kind.value}.{outcome.value}"] += 1
            if outcome in (StoreOutcome.STORED, StoreOutcome.EXISTS):
                track.stored.setdefault(kind, set()).add(index)
            else:
                busy = "store-busy" if outcome is StoreOutcome.REFUSED else "store-failed"
                track.reasons.setdefault(kind, {})[index] = staged.ready.failure or busy
            track.in_flight -= 1
        self._give_back(staged)
        self._maybe_receipt(track)

    def _give_back(self, staged: Staged) -> None:
        written = staged.ready.done()
        for buffer in (staged.host, *staged.also):
            self._buffers.give(buffer, written=written)

    def _drop_waiting(self, track: RequestTrack, reason: str, *, again: bool = False) -> None:
        """Chunks that wait for their token ids will not get them. ``again``: their tokens will be sampled and computed anew."""
        for kind, waiting in track.waiting.items():
            for index, staged in waiting.items():
                track.reasons.setdefault(kind, {})[index] = reason
                self._give_back(staged)
                if again:
                    track.staged[kind].discard(index)
                    for feature in self.features:
                        if feature.kind is kind:
                            feature.forget(track, index)
            waiting.clear()

    # ---- token ids and ends -------------------------------------------------------------------------------------------------------

    def _learn(self, uid: int, offset: int, ids: Sequence[int]) -> None:
        track = self._tracks.get(uid)
        if track is None:
            return
        if offset > len(track.tokens):
            track.barred = track.barred or "token-ids-unknown"
            return
        if list(track.tokens[offset : offset + len(ids)]) != list(ids[: len(track.tokens) - offset]):
            track.barred = track.barred or "token-ids-changed"
            return
        track.tokens.extend(ids[len(track.tokens) - offset :])
        if len(track.tokens) // self.geometry.chunk_size > len(track.chunks):
            track.chunks = self._database.extend(track.chunks, track.tokens)
        for kind, waiting in track.waiting.items():
            for index in [i for i in waiting if i < len(track.chunks)]:
                staged = waiting.pop(index)
                if self._already_stored(track, kind, index):
                    self._give_back(staged)
                else:
                    self._hand_over(track, kind, index, staged)

    def finished(self, update: TokenUpdate | None, done: FinishedRequest) -> None:
        """A request ended between steps; ``update`` brings its last token ids."""
        with self._lock:
            if update is not None:
                self._learn(update.uid, update.offset, update.ids)
            self.finish(done)

    def finish(self, done: FinishedRequest) -> None:
        """A request ended (by itself, by abort, or by failure): take its last chunks, give everything back, write its receipt."""
        with self._lock:
            track = self._tracks.pop(done.uid, None)
            if track is None:
                return
            if self._speculative:
                self._collect(track, done.computed_tokens)
            self._drop_waiting(track, "token-ids-unknown")
            for feature in list(self.features):
                whole = done.computed_tokens // self.geometry.chunk_size
                staged_now = track.staged.get(feature.kind, set())
                for index in set(range(whole)) - staged_now:
                    track.reasons.setdefault(feature.kind, {}).setdefault(index, track.barred or feature.why_missing(track, index))
                with self.guard("releasing a request", feature):
                    feature.release(track)
            with self._book:
                track.finished = done
        self._maybe_receipt(track)

    def _maybe_receipt(self, track: RequestTrack) -> None:
        with self._book:
            done = track.finished
            if done is None or track.in_flight or track.receipt_written or not self._write_receipts:
                return
            track.receipt_written = True
        g = self.geometry
        whole = done.computed_tokens // g.chunk_size
        stored: dict[str, tuple[int, ...]] = {}
        skipped: dict[str, dict[str, int]] = {}
        for kind in CacheKind:
            if all(f.kind is not kind for f in self.features) and kind.value not in self._off and kind not in self._refused:
                continue
            have = {i for i in track.stored.get(kind, set()) if i < whole}
            for index in range(min(whole, len(track.chunks))):  # an earlier run may have left it there
                if index not in have and not track.barred and self._already_stored(track, kind, index):
                    have.add(index)
            stored[kind.value] = tuple(sorted(have))
            reasons = Counter(
                track.reasons.get(kind, {}).get(i, track.barred or self._refused.get(kind, "turned-off"))
                for i in range(whole)
                if i not in have
            )
            if reasons:
                skipped[kind.value] = dict(reasons)
                with self._book:
                    for reason, count in reasons.items():
                        self.counters[f"{kind.value}.lost.{reason}"] += count
        self.backend.put_sequence(
            SequenceRecord(
                model=g.model,
                request_id=track.request_id,
                engine_id=self._engine_id,
                salt=track.salt,
                token_ids=tuple(track.tokens[: done.num_tokens]),
                prompt_tokens=done.prompt_tokens,
                computed_tokens=done.computed_tokens,
                chunk_size=g.chunk_size,
                stored=stored,
                skipped=skipped,
                finished_at=time.time(),
            )
        )
        self.counters["requests"] += 1

    def idle(self) -> bool:
        """Whether no request is being followed."""
        with self._lock:
            return not self._tracks

    def close(self) -> None:
        """Give everything back and wait for the store. Requests that are still being served are cut off, and counted."""
        try:
            with self._lock:
                size = self.geometry.block_size
                for uid, track in list(self._tracks.items()):
                    self.counters["requests_cut_off"] += 1
                    known = len(track.tokens)
                    self.finish(FinishedRequest(uid, known, known, max(0, min(known - 1, len(track.block_ids) * size))))
                for feature in list(self.features):
                    with self.guard(f"closing {feature.kind.value}", feature):
                        feature.close()
        finally:
            self.backend.close()


def ring_bytes(geometry: Geometry, ring_blocks: int, dtype: torch.dtype) -> int:
    """What a ring costs, to be said before it is allocated."""
    return math.prod((geometry.num_layers, ring_blocks, geometry.block_size, geometry.hidden(CacheKind.QUERY))) * dtype.itemsize
