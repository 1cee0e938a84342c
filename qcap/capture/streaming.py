"""Queries streamed off the device: a few layers of a large step in flight, and the rows of small steps, within one budget.

A large step (prefill) runs Python between its layers, so each layer's rows are scattered into one of a few windows and leave for the host
while the next layers compute; a window is written again when its copy is over, which the device waits for by itself. A small step may be
a replayed CUDA graph, in which no Python runs: its rows, all layers, go to a resident part, and leave in one copy when the step has been
queued. On the host, chunks are put together from the rows of one or many steps, by the store's writers.

Where the engine leaves queries alone once it has computed them, a large step of one request needs not even a window: its layers are copied
from where they lie (:mod:`~qcap.capture.held`). Of steps that are not that large, several layers are scattered in one launch.

Nothing that is left to wait for a chunk to fill stays on the device, so the budget does not grow with the number of requests.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from qcap import kernels
from qcap.attribution import Step
from qcap.capture.features import QueryBooks, RequestTrack, Stage
from qcap.capture.held import HELD, HeldQueries
from qcap.capture.plan import PlanBuffer
from qcap.capture.staging import HostArena, PageStager, Ready, RowsMissing, Staged
from qcap.capture.step_rows import Mover, Piece, StepRecord, StepRows, assemble, wrong_stamps
from qcap.capture.stream_ledger import StreamLedger, WholeChunk
from qcap.errors import ConfigError, Unsupported
from qcap.geometry import Geometry
from qcap.kinds import CacheKind
from qcap.store.metrics import RateLimitedLog

often = RateLimitedLog(logging.getLogger("qcap.capture"))

RESIDENT_STEPS = 2
"""Small steps whose rows fit into the resident part: one is written while the one before leaves."""
MAX_WINDOWS = 8
MAX_TOGETHER = 8
HELD_ROWS = 2048
"""Steps of at least so many rows leave from where they lie, if they may: for smaller ones the calls cost the host more than they save, and
several of their layers are scattered in one launch."""


@dataclass(frozen=True)
class StreamBudget:
    """How a ring's bytes are spent.

    Args:
        max_rows: tokens of the largest step.
        small_rows: a step of at most so many rows is resident; every graph that the engine records must be.
        windows: layers of a large step in flight.
        row_bytes: one row of one layer.
        num_layers: L.
    """

    max_rows: int
    small_rows: int
    windows: int
    row_bytes: int
    num_layers: int

    @classmethod
    def plan(cls, geometry: Geometry, *, max_rows: int, small_rows: int, ring_bytes: int) -> StreamBudget:
        """The most windows that ``ring_bytes`` allow beside the resident part.

        Raises:
            ConfigError: not even one window fits; the message names what is needed.
        """
        least = cls.least(geometry, max_rows=max_rows, small_rows=small_rows)
        if least.nbytes > ring_bytes:
            raise ConfigError(
                f"the query ring needs {least.nbytes / 2**20:.0f} MiB and qcap.q.ring_bytes is {ring_bytes / 2**20:.0f} MiB: "
                f"{least.resident_bytes / 2**20:.0f} MiB for {RESIDENT_STEPS} steps of {small_rows} rows x {geometry.num_layers} layers "
                f"(the largest recorded graph) and {least.window_bytes / 2**20:.0f} MiB for a layer of {max_rows} rows. Raise "
                "qcap.q.ring_bytes, or lower max_num_batched_tokens or the engine's graph sizes"
            )
        if not least.windows:
            return least
        windows = min(MAX_WINDOWS, geometry.num_layers, (ring_bytes - least.nbytes) // least.window_bytes + 1)
        return cls(max_rows, small_rows, windows, least.row_bytes, geometry.num_layers)

    @classmethod
    def least(cls, geometry: Geometry, *, max_rows: int, small_rows: int) -> StreamBudget:
        """One window (none if every step is small)."""
        row = geometry.hidden(CacheKind.QUERY) * geometry.torch_dtype.itemsize
        return cls(max_rows, small_rows, 1 if max_rows > small_rows else 0, row, geometry.num_layers)

    @property
    def window_bytes(self) -> int:
        """One layer of the largest step."""
        return self.max_rows * self.row_bytes

    @property
    def resident_bytes(self) -> int:
        """All layers of small steps."""
        return RESIDENT_STEPS * self.small_rows * self.num_layers * self.row_bytes

    @property
    def nbytes(self) -> int:
        """All of it, the rows' stamps included."""
        stamps = 8 * (RESIDENT_STEPS * self.small_rows + self.max_rows)
        return self.resident_bytes + self.windows * self.window_bytes + stamps


class _Leaving:
    """Rows of a device buffer that a copy still reads: the device waits before it writes over them."""

    def __init__(self, stager: PageStager) -> None:
        self._stager = stager
        self._spans: deque[tuple[int, int, Any]] = deque()  # (first, last, event), in the order of their copies

    def add(self, first: int, last: int, event: Any) -> None:
        """Rows ``[first, last)`` are read until ``event``."""
        self._spans.append((first, last, event))

    def wait(self, first: int, last: int) -> None:
        """What is queued on the current stream from now on may write rows ``[first, last)``."""
        spans = self._spans
        while spans and spans[0][2].query():
            spans.popleft()
        overlapping = [event for a, b, event in spans if a < last and first < b]
        if overlapping:  # copies are over in their order, so the last one will do
            self._stager.wait_for(overlapping[-1])


def _give_back(arena: HostArena, rows: StepRows) -> None:
    if rows.memory is not None:
        arena.give(rows.memory, rows.events[-1] if rows.events else None)


class StreamingQueryFeature(QueryBooks):
    """Queries, streamed to the host as they are computed.

    Args:
        geometry: of this rank.
        budget: how large the device's part is.
        num_kv_blocks: of the engine's cache.
        plan_blocks, plan_requests: the most KV blocks that a step can write, and the most requests.
        padded_rows: rows that an engine's largest forward pass has, padding included.
        stager: the way to the host; its arena holds a step's rows.
        host_bytes: bound on rows that wait in ordinary memory for their chunk to fill. Only with an arena that does not wait.
        recorded_layers: so many layers leave in one launch of a recorded graph (in a decode step the launches are most of what
            capture costs the device). More than 1 only where queries that are referred to stay what they are until then.
        queries_stay: the engine writes to a layer's queries only where their memory is given to something else, and frees them as any
            tensor; none of a step that is large belongs to a graph.
        debug: after each step, wait for the device and compare how many rows it found with how many were announced.
    """

    def __init__(
        self,
        geometry: Geometry,
        budget: StreamBudget,
        *,
        num_kv_blocks: int,
        plan_blocks: int,
        plan_requests: int,
        padded_rows: int,
        stager: PageStager,
        counters: Counter[str],
        host_bytes: int,
        recorded_layers: int = 1,
        queries_stay: bool = False,
        debug: bool = False,
    ) -> None:
        super().__init__(geometry, counters)
        self.budget, self._stager = budget, stager
        self._arena, self._host_bytes = stager.arena, host_bytes
        device, self.dtype, width = stager.device, geometry.torch_dtype, geometry.hidden(CacheKind.QUERY)
        self._cuda = device.type == "cuda"
        self._device = device
        self.windows = torch.empty((budget.windows * budget.max_rows, width), dtype=self.dtype, device=device)
        self.resident = torch.empty((RESIDENT_STEPS * budget.small_rows, geometry.num_layers, width), dtype=self.dtype, device=device)
        self._resident_layers = [self.resident[:, layer] for layer in range(geometry.num_layers)]
        self._stamps_small = torch.zeros(RESIDENT_STEPS * budget.small_rows, dtype=torch.int64, device=device)
        self._stamps_large = torch.zeros(max(budget.max_rows, 1), dtype=torch.int64, device=device)
        self._stamps_free: Any = None  # event after which the large stamps may be written
        self._plan = PlanBuffer(plan_blocks, plan_requests, device)
        self._ring_slots = torch.full((max(padded_rows, budget.max_rows, budget.small_rows),), -1, dtype=torch.int64, device=device)
        self._counts = torch.zeros(plan_requests, dtype=torch.int32, device=device) if debug else None
        self._announced: Any = None
        self.on_device_bytes = budget.nbytes
        self.mover = Mover()
        self._resting: deque[StepRecord] = deque()  # of steps whose rows are in the arena still: most chunks fill before it does
        self._arena.watch(lambda: self._relieve(0))
        self.ledger: StreamLedger = StreamLedger(geometry.block_size, geometry.chunk_size, num_kv_blocks, self._on_skip)
        self._leaving = _Leaving(stager)  # resident rows on their way
        self._leaving_large = _Leaving(stager)  # and rows of the windows
        self._together = self._places = 1  # layers that leave in one copy, and such groups that the windows hold
        self._recorded_layers = recorded_layers if self._cuda else 1
        self._kept: list[torch.Tensor] = []  # queries of the last layers, put away with the next ones
        self._kept_end = 0  # the layer after the last of them
        self._queries_stay, self._held_rows = queries_stay and self._cuda, HELD_ROWS
        self._held = HeldQueries(stager)
        self._first: torch.Tensor | None = None  # queries of layer 0, which leave with those of layer 1: the device waits for the host here
        self._spared, self._refused = 0, 1 << 62  # the most bytes that the device could once spare, and the least that it could not
        self._direct = False  # the step's rows leave from where they lie
        self._grouped = False  # the step's layers go to the windows several at a time
        self._slots_large = torch.full((max(budget.max_rows, 1),), -1, dtype=torch.int64, device=device)  # of such a step: no graph's
        self._next_small = 0
        self._rows: StepRows | None = None
        self._step: Step | None = None
        self._record: StepRecord | None = None  # of the step that was committed
        self._slots = self._ring_slots[:0]  # those of the rows that layer 0 had
        self._window_views: dict[int, torch.Tensor] = {}  # first row -> as many rows of the windows as the step has: a view has its price
        self._number = self._calls = self._flushed = self._seen_rows = self._count = self._base = 0
        self._large = False
        self.active = False

    @property
    def graph_buffers(self) -> tuple[torch.Tensor, ...]:
        """What kernels in a recorded graph read and write."""
        return (self._plan.device, self._ring_slots, self._stamps_small, self.resident)

    # ---- the step -----------------------------------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Send the step's plan to the device: one launch, nothing awaited by the host (unless there is no host memory, and it may wait)."""
        self._drop_step()
        table = self._plan.next()
        requests, blocks, count = self.ledger.plan(step, table)
        self._number, self._calls, self._flushed, self.active = step.number, 0, 0, False
        if not count:
            return
        if 4 * requests + blocks > len(table) or count > self.budget.max_rows:
            raise Unsupported(
                f"the step computes {count} rows of {requests} requests in {blocks} KV blocks, qcap was set up for {self.budget.max_rows}, "
                f"{self._plan.num_requests} and {self._plan.num_blocks}: the engine's max_num_batched_tokens or max_num_seqs changed"
            )
        large = count > self.budget.small_rows
        if count != self._count:
            self._window_views.clear()
        self._step, self._rows, self._count, self._large = step, StepRows.later(step.number, partial(_give_back, self._arena)), count, large
        alone = requests == 1 == len(step.requests)  # one that nothing is captured of has rows too, somewhere
        self._direct = large and alone and self._queries_stay and count >= self._held_rows
        if large:  # a step that does not fill a window leaves several layers at a time: fewer calls for the host
            room = len(self.windows) // count
            self._together = max(1, min(MAX_TOGETHER, room // 3))
            self._places = room // self._together
        self._grouped = large and self._queries_stay and count < self._held_rows and self._together > 1
        self._base = 0 if large else self._resident_place(count)
        self._plan.send(step.number, requests, blocks, self._base)
        self.ledger.open(step, self._rows)
        if self._counts is not None:
            self._counts.zero_()
            self._announced = (table[2 : 4 * requests : 4] - table[1 : 4 * requests : 4]).copy()
        self.active = True

    def _reserved(self) -> StepRows | None:
        """The step's rows, with memory on the host: ``[L, rows, H]`` where layers come one by one, ``[rows, L, H]`` where they come at
        once. None if there is none left: the step is given up. Made when the first rows leave: the device does not wait for it."""
        rows, step = self._rows, self._step
        if rows is None or rows.memory is not None:
            return rows
        layers, width, count = self._geometry.num_layers, self._geometry.hidden(CacheKind.QUERY), self._count
        used = layers * count * self.budget.row_bytes
        full = not self._arena.waits and self.mover.bytes + used > self._host_bytes
        nbytes = -(-used // 8) * 8
        memory = None if full else self._arena.take((nbytes + 8 * count * (1 + self._direct),), torch.uint8)
        if memory is None:
            self._drop_step()
            assert step is not None
            self.ledger.give_up(step, "host-full")
            return None
        home = memory[:used].view(self.dtype).view((layers, count, width) if self._large else (count, layers, width))
        stamps = memory[nbytes:].view(torch.int64)
        rows.put(memory, home.transpose(0, 1) if self._large else home, stamps[:count])
        if self._direct:
            rows.slots = stamps[count:]
        return rows

    def _resident_place(self, count: int) -> int:
        """First of ``count`` resident rows that are next in turn; where they are still on their way out, the device will wait."""
        if self._next_small + count > self.resident.shape[0]:
            self._next_small = 0
        first, self._next_small = self._next_small, self._next_small + count
        self._leaving.wait(first, first + count)
        return first

    def on_layer(self, layer: int, query: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Rows of one layer: ``query`` ``[rows, HQ, D]`` or ``[rows, H]``, any row stride; ``slot_mapping`` int ``[<= rows or more]``.

        While a graph is recorded, no step is active: what is recorded is the way of small steps, which finds nothing planned then.
        """
        rows = query.shape[0]
        large = self._large if self.active else rows > self.budget.small_rows
        if large and not self.active:
            return  # a profiling run: too large for any graph
        if layer == 0:
            self._kept = []
            self._seen_rows, self._slots = rows, self._ring_slots[:rows]
            if self._direct and self.active:
                self._direct = query.is_contiguous() and rows >= self._count and self._can_spare(query, HELD + 1)
                if self._direct:
                    self._flushed = self._geometry.num_layers  # through no window
                    self._slots = self._slots_large[: self._count]
            if large and self._grouped:  # rows of all requests are kept, also of those that nothing is captured of
                self._grouped = rows < self._held_rows and self._can_spare(query, self._together)
            stamps = self._stamps_large if large else self._stamps_small
            if large and self._stamps_free is not None:
                self._stager.wait_for(self._stamps_free)
            n, slots = self._geometry.block_size, slot_mapping[: len(self._slots)]
            if self._counts is None:
                kernels.slot_attribution(slots, self._plan.device, n, self._slots, stamps)
            else:
                kernels.slot_attribution(slots, self._plan.device, n, self._slots, stamps, self._counts)
        elif rows != self._seen_rows:  # fast prefill with shared KV: later layers see fewer rows, and which ones is not ours to guess
            raise Unsupported(f"layer {layer} has {rows} query rows, layer 0 had {self._seen_rows}")
        if not rows:
            self._calls += 1
            return
        width = query.numel() // rows
        if width != self._resident_layers[0].shape[1]:
            raise Unsupported(f"layer {layer}: rows are {width} wide, expected {self._resident_layers[0].shape[1]} (heads x head size)")
        if large and self._direct:
            self._leave(layer, query.reshape(rows, width)[: self._count])
            return
        if large:
            self._flush(layer)  # those before it, should nobody have said that they are done
            if not self.active:
                return  # there was no room on the host: the step has been given up
            first = self._window_of(layer)
            if layer % self._together == 0:
                self._leaving_large.wait(first, first + min(self._together, self._geometry.num_layers - layer) * self._count)
            if self._grouped:
                self._keep(layer, query.reshape(rows, width), self._together, large)
                return
            target = self._window_views.get(first)
            if target is None:
                target = self._window_views[first] = self.windows[first : first + self._count]
        elif self._recorded_layers > 1 and not self.active and torch.cuda.is_current_stream_capturing():
            self._keep(layer, query.reshape(rows, width), self._recorded_layers, large)
            return
        else:
            target = self._resident_layers[layer]
        kernels.row_scatter(query.reshape(rows, width), self._slots, target)
        self._calls += 1
        if large and not self._cuda:
            self._flush(layer + 1)

    def _can_spare(self, query: torch.Tensor, layers: int) -> bool:
        """Whether the device has room for the queries of so many layers, which are freed later than they would be. ``query`` is one
        layer's, and may be a part of something larger."""
        needed = 2 * layers * query.untyped_storage().nbytes()
        if needed > self._spared:
            if needed >= self._refused or (self._cuda and torch.cuda.mem_get_info(self._device)[0] < needed):
                self._refused = min(self._refused, needed)
                return False
            self._spared = needed
        return True

    def _leave(self, layer: int, query: torch.Tensor) -> None:
        """Copy a layer's queries from where they lie; those of layer 0 with the next ones."""
        self._calls += 1
        if layer == 0 and self._geometry.num_layers > 1:
            self._first = query
            return
        rows = self._reserved()
        first, self._first = self._first, None
        if rows is None:
            return
        home = rows.rows.transpose(0, 1)  # [L, rows, H], contiguous
        if first is not None:
            self._held.leave(first, home[0])
        self._held.leave(query.contiguous(), home[layer])

    def _keep(self, layer: int, query: torch.Tensor, together: int, large: bool) -> None:
        """Put a layer's queries away in one launch with those of its neighbours, ``together`` layers at a time: as part of a graph, or of a
        ``large`` step. Until then they are referred to, and so their memory is given to no later layer."""
        kept = self._kept
        if kept and (layer != self._kept_end or kept[0].stride() != query.stride() or kept[0].dtype != query.dtype):
            self._put_kept(large)
        self._kept.append(query)
        self._kept_end = layer + 1
        self._calls += 1
        if (layer + 1) % together == 0 or layer + 1 == self._geometry.num_layers:
            self._put_kept(large)

    def _put_kept(self, large: bool) -> None:
        """Put away the queries that are kept."""
        kept, self._kept = self._kept, []
        first, layers = self._kept_end - len(kept), len(kept)
        if large:
            place = self._window_of(first)
            target = self.windows[place : place + layers * self._count].view(layers, self._count, -1).transpose(0, 1)
        else:
            target = self.resident[:, first : self._kept_end]
        kernels.row_scatter_layers(kept, self._slots, target)

    def layer_done(self, layer: int) -> None:
        """Rows of layers up to ``layer`` may leave, if Python brought them here."""
        if self._large and self.active and self._calls > layer and (layer or self._places == 1):  # layer 0 goes with the next: not yet
            self._flush(layer + 1)

    def _flush(self, layers: int) -> None:
        """Queue the copies of a large step's groups of layers that end below ``layers``."""
        total = self._geometry.num_layers
        while self._flushed < total:
            begin, end = self._flushed, min(self._flushed + self._together, total)
            if end > layers or (rows := self._reserved()) is None:
                return
            self._flushed = end
            first = self._window_of(begin)
            last = first + (end - begin) * self._count
            home = rows.rows.transpose(0, 1)[begin:end]  # [layers, rows, H], contiguous
            self._stager.copy_out(self.windows[first:last].view(home.shape), home, keep=True)
            if self._cuda:
                self._leaving_large.add(first, last, self._stager.copied())

    def _window_of(self, layer: int) -> int:
        """First row of the windows that ``layer`` of the running step goes to."""
        return (layer // self._together % self._places * self._together + layer % self._together) * self._count

    def commit(self, step_number: int, invalid: Sequence[int]) -> None:
        """The forward pass has been queued. In a replayed graph, which only a small step can be, no layer called; else all must have."""
        if step_number != self._number or self._rows is None or not self.active:
            return
        layers = self._geometry.num_layers
        if self._calls % layers or (self._large and self._calls != layers):
            self._counters["query.steps_incomplete"] += 1
            self._drop_step()
            often.error("only %d of %d layers brought queries in step %d: its rows are dropped", self._calls, layers, step_number)
            self.quiet()
            return
        if not self._calls:
            self._counters["query.steps_replayed"] += 1
        elif self._direct:
            self._counters["query.steps_held"] += 1
        rows = self._reserved()
        if rows is None:
            return
        if self._large:
            self._flush(layers)
            if rows.slots is not None:
                self._stager.copy_out(self._slots_large[: self._count], rows.slots, keep=True)
            self._stager.copy_out(self._stamps_large[: self._count], rows.stamps, keep=True)
        else:
            here = slice(self._base, self._base + self._count)
            self._stager.copy_out(self.resident[here], rows.rows, keep=True)
            self._stager.copy_out(self._stamps_small[here], rows.stamps, keep=True)
        self._note_events(rows)
        if self._cuda and self._large:
            self._stamps_free = rows.events[-1]
        elif self._cuda:
            self._leaving.add(self._base, self._base + self._count, rows.events[-1])
        self._record = self.ledger.commit(invalid)
        self._check_counts()
        self.quiet()

    def _note_events(self, rows: StepRows) -> None:
        if self._cuda:
            rows.events.append(self._stager.copied())

    def _check_counts(self) -> None:
        if self._counts is not None:
            missing = int((torch.from_numpy(self._announced) - self._counts[: len(self._announced)].cpu()).abs().sum())
            if missing:
                self._counters["query.debug.rows_off"] += missing
                often.error("step %d: %d rows differ from what was announced", self._number, missing)

    def quiet(self) -> None:
        """Empty the plan: what runs before the next :meth:`begin` matches no block."""
        self._plan.quiet()
        self.active = self._direct = False
        self._first, self._kept = None, []
        self._held.let_go()

    def end(self) -> None:
        """What was left over by the step's whole chunks leaves the arena."""
        rows, record = self._rows, self._record
        self._rows = self._record = None
        if rows is not None:
            if record is not None and record.refs:
                keep = self.ledger.needed(record) if self._large else None
                if keep is None:
                    self._resting.append(record)
                else:  # the end of a prompt would hold all of its step
                    self.mover.move(record, rows, keep)
            rows.drop()
        self._relieve(self._arena.may_rest)

    def _relieve(self, limit: int) -> bool:
        """Move rows that rest out of the arena, oldest first, until no more than ``limit`` bytes of it are in use (or will be)."""
        resting, leaving = self._resting, 0
        while resting and (resting[0].place is None or self._arena.used - leaving > limit):
            record = resting.popleft()
            if record.place is not None:
                source = record.place.source
                if source is not None:
                    leaving += source.rows.nbytes
                    self.mover.move(record, source, self.ledger.needed(record))
        return self.mover.busy()

    def _drop_step(self) -> None:
        """A step that was begun and never ended, or whose rows cannot be used."""
        if self.active:
            self.quiet()
        rows, self._rows = self._rows, None
        self._record = None
        self.ledger.abandon()
        if rows is not None:
            if not rows.events and rows.memory is not None:
                self._note_events(rows)  # copies that were queued may still run
            rows.drop()

    # ---- chunks -------------------------------------------------------------------------------------------------------------------

    def take(self, track: RequestTrack, final_tokens: int) -> Iterator[tuple[int, Stage]]:
        """Whole chunks below ``final_tokens``."""
        found = self.ledger.complete(track.uid, final_tokens)
        unused = {chunk.index: chunk for chunk in found}

        def stage(chunk: WholeChunk) -> Staged:
            staged = self._stage(chunk)
            del unused[chunk.index]
            return staged

        try:
            for chunk in found:
                yield chunk.index, partial(stage, chunk)
                self.ledger.release_chunk(track.uid, chunk.index)
        finally:  # also of chunks that were never asked for, should the caller not come back
            for chunk in unused.values():
                for piece in chunk.pieces:
                    piece.drop()

    def _stage(self, chunk: WholeChunk) -> Staged:
        shape, pieces = self._geometry.chunk_shape(CacheKind.QUERY), chunk.pieces
        events = [event for source in {id(p.source): p.source for p in pieces}.values() for event in source.events]
        dropped = False

        def drop() -> None:
            nonlocal dropped
            if not dropped:
                dropped = True
                for piece in pieces:
                    piece.drop()

        first = pieces[0]
        if len(pieces) == 1 and first.source.rows.stride(0) == shape[3]:  # a large step's: the chunk lies in it as it is, layer by layer
            host = first.source.rows[first.row : first.row + shape[2]].transpose(0, 1).unsqueeze(0)
            return Staged(host, Ready(events, lambda: self._check_rows(pieces)), drop, pinned=self._arena.pinned)
        with torch.inference_mode(False):
            host = torch.empty(shape, dtype=self.dtype)

        def put_together() -> None:
            self._check_rows(pieces)
            assemble(pieces, host)
            drop()

        return Staged(host, Ready(events, put_together), drop, lent=False)

    def _check_rows(self, pieces: Sequence[Piece]) -> None:
        wrong = wrong_stamps(pieces)
        if self._queries_stay and any(piece.source.displaced for piece in pieces):
            self._queries_stay = False
            often.error("the rows of a step of one request do not lie in order: they leave through the ring from now on")
        if wrong:
            self._counters["query.rows_missing"] += wrong
            raise RowsMissing(f"{wrong} of {self._geometry.chunk_size} rows of a chunk never reached the ring: it is not published")

    def close(self) -> None:
        """Let go of everything."""
        self._drop_step()
        self.ledger.release_all()
        self._resting.clear()
        self.mover.close()
