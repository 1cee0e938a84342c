"""Keys and values, read from the engine's own pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from qcap import kernels
from qcap.attribution import Step
from qcap.capture.features import RequestTrack, Stage
from qcap.capture.staging import PageJob, PageStager, Ready, Staged
from qcap.geometry import Geometry, PagedLayout
from qcap.kinds import CacheKind


class KVFeature:
    """Keys and values: read from the engine's pages when a chunk is whole. What a prefix hit brought is in the pages too.

    Chunks that become whole in a step leave layer by layer while it runs, if Python runs between the layers; else, and for chunks that
    become final later, all layers leave at once. Either way nothing waits: a later step that writes over pages which are still being read
    makes its own stream wait for that, on the device.

    Args:
        geometry: of this rank.
        pages, layouts: of each layer.
        stager: the way to the host.
        strict: blocks may be written by what is not in a step (another cache group of the engine, or the engine itself before a step
            begins): the device then goes on only when all pages have been read. Turned on by the first step that tells of such blocks.
    """

    kind = CacheKind.KV
    starts_early = True

    def __init__(
        self, geometry: Geometry, pages: Sequence[torch.Tensor], layouts: Sequence[PagedLayout], stager: PageStager, *, strict: bool = False
    ) -> None:
        self._geometry, self._stager, self._strict = geometry, stager, strict
        self.table = kernels.PageTable([layout.views(page) for page, layout in zip(pages, layouts, strict=True)])
        self.on_device_bytes = stager.nbytes
        self._job: PageJob | None = None
        self._early: dict[tuple[int, int], int] = {}  # (uid, chunk) -> its place in the job
        self._reading: deque[tuple[Any, frozenset[int]]] = deque()  # (event, blocks that are being read until then)
        self._first_open: dict[int, int] = {}  # uid -> chunks below it have all been staged

    def begin(self, step: Step) -> None:
        """Make the device wait where the step writes over blocks that are still being read."""
        self._abandon()
        self._guard_pages(step)

    def start(self, due: Sequence[tuple[RequestTrack, int]]) -> None:
        """Reserve memory for ``due``, so that they may leave layer by layer."""
        if due:
            self._job = self._stager.start(self.table, [block for track, index in due for block in self._blocks(track, index)], len(due))
            if self._job is not None:
                self._early = {(track.uid, index): place for place, (track, index) in enumerate(due)}

    def _guard_pages(self, step: Step) -> None:
        reading = self._reading
        while reading and reading[0][0].query():
            reading.popleft()
        self._strict = self._strict or bool(step.overwritten)
        if not reading:
            return
        if step.number == 0 or any(request.skip == "block-table-unknown" for request in step.requests):
            self._stager.wait_for(reading[-1][0])  # which blocks it writes is not known
            return
        n = self._geometry.block_size
        written = set(step.overwritten)
        for request in step.requests:
            written.update(request.block_ids[max(request.start // n - request.first_block, 0) :])
        for load in step.loads:
            written.update(load.block_ids[load.start // n :])
        for event, blocks in reading:
            if not written.isdisjoint(blocks):
                self._stager.wait_for(event)

    def layer_done(self, layer: int) -> None:
        """The pages of layers up to ``layer`` hold what this step writes: what is due may leave."""
        if self._job is not None and layer + 1 - self._job.queued >= self._stager.layers_at_once(self._job.host):
            self._job.advance(layer + 1)

    def commit(self, step_number: int, invalid: Sequence[int]) -> None:
        """The pages hold what the step computed."""
        if self._job is not None:
            self._job.advance(self._geometry.num_layers)
            self._read(self._job)

    def take(self, track: RequestTrack, final_tokens: int) -> Iterator[tuple[int, Stage]]:
        """Whole chunks below ``final_tokens`` that have not been staged."""
        staged = track.staged.get(self.kind, ())
        first = self._first_open.get(track.uid, 0)
        while first in staged:
            first += 1
        self._first_open[track.uid] = first
        for index in range(first, final_tokens // self._geometry.chunk_size):
            if index not in staged:
                blocks = self._blocks(track, index)
                if len(blocks) == self._per_chunk:
                    yield index, lambda index=index, blocks=blocks: self._stage(track.uid, index, blocks)  # type: ignore[misc]

    @property
    def _per_chunk(self) -> int:
        return self._geometry.chunk_size // self._geometry.block_size

    def _blocks(self, track: RequestTrack, index: int) -> Sequence[int]:
        return track.block_ids[index * self._per_chunk : (index + 1) * self._per_chunk]

    def _stage(self, uid: int, index: int, blocks: Sequence[int]) -> Staged | None:
        place = self._early.pop((uid, index), None)
        job = self._job
        if place is not None and job is not None:
            size = self._geometry.chunk_size
            view = job.host[:, :, place * size : (place + 1) * size]
            return Staged(view, Ready([] if job.copied is None else [job.copied]), job.release, pinned=self._stager.arena.pinned)
        job = self._stager.start(self.table, blocks)
        if job is None:
            return None
        job.advance(self._geometry.num_layers)
        self._read(job)
        return Staged(job.host, Ready([] if job.copied is None else [job.copied]), job.release, pinned=self._stager.arena.pinned)

    def _read(self, job: PageJob) -> None:
        if job.packed is not None:
            self._reading.append((job.packed, frozenset(job.block_ids.tolist())))
            if self._strict:
                self._stager.wait_for(job.packed)

    def end(self) -> None:
        """Chunks that were due and that nobody took give their memory back."""
        self._abandon()

    def _abandon(self) -> None:
        job, self._job = self._job, None
        early, self._early = self._early, {}
        if job is not None and early:
            if job.copied is None:  # the step was never finished: what was queued may still run
                job.packed, job.copied = self._stager.events()
                self._read(job)
            for _ in early:
                job.release()

    def put(self, block_ids: Sequence[int], source: torch.Tensor) -> None:
        """Write rows ``[2, L, len(block_ids) * N, H]`` (host) into pages, on the current stream."""
        blocks = torch.as_tensor(np.asarray(block_ids, dtype=np.int64)).to(self._stager.device)
        kernels.scatter_pages(self.table, blocks, source.contiguous().to(self._stager.device))

    def forget(self, track: RequestTrack, chunk: int) -> None:
        """The chunk may be taken again."""
        self._first_open.pop(track.uid, None)

    def release(self, track: RequestTrack) -> None:
        """Nothing is held."""
        self._first_open.pop(track.uid, None)

    def why_missing(self, track: RequestTrack, chunk: int) -> str:
        """Pages of every computed token are there until the request ends."""
        return "not-captured"

    def close(self) -> None:
        """Give back what a step that never ended had reserved."""
        self._abandon()
