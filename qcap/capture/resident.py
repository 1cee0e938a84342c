"""Queries in a ring on the device that holds all layers of every chunk until it is whole: the resident form."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from qcap import kernels
from qcap.attribution import CompleteChunk, RowLedger, Step
from qcap.capture.features import QueryBooks, RequestTrack, Stage
from qcap.capture.plan import PlanBuffer
from qcap.capture.staging import PageStager, RowsMissing, Staged
from qcap.errors import Unsupported
from qcap.geometry import Geometry
from qcap.kinds import CacheKind
from qcap.ring import QRingBuffer
from qcap.store.metrics import RateLimitedLog

often = RateLimitedLog(logging.getLogger("qcap.capture"))


class QueryFeature(QueryBooks):
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
        stager: PageStager,
        counters: Counter[str],
    ) -> None:
        super().__init__(geometry, counters)
        self._device, self._stager = device, stager
        n = geometry.block_size
        self.ring = QRingBuffer(geometry.num_layers, ring_blocks, n, geometry.hidden(CacheKind.QUERY), dtype, device)
        self.dtype = dtype
        self._table = self.ring.page_table()
        self._stamps = torch.zeros(ring_blocks * n, dtype=torch.int64, device=device)  # step in which each ring row was written
        self._plan = PlanBuffer(plan_blocks, plan_blocks, device)
        self._ring_slots = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        self.on_device_bytes = self.ring.nbytes + self._stamps.nbytes
        self.ledger: RowLedger = RowLedger(self.ring, geometry.chunk_size, spill=self._spill if never_lose else None, on_skip=self._on_skip)
        self._number = self._calls = self._rows = 0
        self._reading: Any = None  # event after which no ring block that was given back is read any more
        self.active = False

    @property
    def graph_buffers(self) -> tuple[torch.Tensor, ...]:
        """What kernels in a recorded graph read and write."""
        return (self._plan.device, self._ring_slots, self._stamps, *self.ring.layers)

    # ---- the step -----------------------------------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Send the step's plan to the device: one launch, nothing awaited by the host."""
        if self._reading is not None:  # blocks of chunks on their way have been given back already: the device waits, if it must
            self._stager.wait_for(self._reading)
            self._reading = None
        plan = self.ledger.begin(step)
        if len(plan.block_ids) > self._plan.num_blocks:
            self.ledger.abandon()
            raise Unsupported(
                f"the step writes {len(plan.block_ids)} KV blocks, the plan has {self._plan.num_blocks}: the engine's max_num_seqs changed"
            )
        n, count = self._geometry.block_size, len(plan.block_ids)
        out = self._plan.next()
        blocks, keys = out[: 4 * count].reshape(count, 4), out[4 * count : 5 * count]  # each block by itself, as if it were a request
        blocks[:, 0], blocks[:, 1], blocks[:, 2], blocks[:, 3] = np.arange(count), 0, n, plan.ring_blocks * n
        keys[:] = (plan.block_ids << 32) + np.arange(count)
        self._plan.send(step.number, count, count)
        self._number, self._calls, self.active = step.number, 0, len(plan.block_ids) > 0

    def on_layer(self, layer: int, query: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Rows of one layer: ``query`` ``[rows, HQ, D]`` or ``[rows, H]``, any row stride; ``slot_mapping`` int ``[<= rows or more]``."""
        rows = query.shape[0]
        slots = self._ring_slots[:rows]
        if layer == 0:
            self._rows = rows
            kernels.slot_attribution(slot_mapping[:rows], self._plan.device, self._geometry.block_size, slots, self._stamps)
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
        self._plan.quiet()
        self.active = False

    def layer_done(self, layer: int) -> None:
        """Rows stay in the ring until their chunk is whole."""

    def end(self) -> None:
        """Nothing to clear."""

    # ---- chunks -------------------------------------------------------------------------------------------------------------------

    def take(self, track: RequestTrack, final_tokens: int) -> Iterator[tuple[int, Stage]]:
        """Whole chunks; their ring blocks go back as soon as the gather has been queued."""
        for chunk in self.ledger.complete(track.uid, final_tokens):
            try:
                yield chunk.index, lambda chunk=chunk: self._stage(chunk)  # type: ignore[misc]
            finally:
                self.ledger.release_chunk(track.uid, chunk.index)

    def _stage(self, chunk: CompleteChunk) -> Staged | None:
        g = self._geometry
        n = g.block_size
        blocks = torch.as_tensor(chunk.ring_blocks)
        # Taken on the compute stream: the blocks go back at once, and the next step may write to them.
        at = (blocks[:, None] * n + torch.arange(n)).reshape(-1)
        seen_device = self._stamps[self._stager.send(at.clamp(min=0).numpy())]
        stamps = torch.empty(g.chunk_size, dtype=torch.int64, pin_memory=self._device.type == "cuda")

        def check(host: torch.Tensor) -> None:
            seen = stamps.numpy().copy()
            for block, away in chunk.spilled.items():
                span = slice(block * n, (block + 1) * n)
                rows = ~chunk.resident[span]
                host[:, :, span][:, :, torch.from_numpy(rows)] = away.rows[:, :, torch.from_numpy(rows)]
                seen[span][rows] = away.stamps.numpy()[rows]
            wrong = int((seen != chunk.planned).sum())
            if wrong:
                self._counters["query.rows_missing"] += wrong
                raise RowsMissing(f"{wrong} of {g.chunk_size} rows of a chunk never reached the ring: it is not published")

        done = self._stager.stage(self._table, chunk.ring_blocks, [(seen_device, stamps)], check)
        if done is None:
            return None
        staged, self._reading = done
        return staged

    def _spill(self, ring_block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy one ring block and its stamps to the host. Waits for the device: only ``on_pressure="wait"`` comes here."""
        g = self._geometry
        index = self._stager.send([ring_block])
        with torch.inference_mode(False):
            rows = torch.empty((1, g.num_layers, g.block_size, g.hidden(CacheKind.QUERY)), dtype=self.dtype, device=self._device)
            kernels.gather_pages(self._table, index, rows)
            self._counters["query.blocks_spilled"] += 1
            return rows.cpu(), self._stamps[ring_block * g.block_size : (ring_block + 1) * g.block_size].clone().cpu()

    def close(self) -> None:
        """Give every ring block back."""
        self.ledger.release_all()
