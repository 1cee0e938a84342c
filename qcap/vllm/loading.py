"""Loads of one rank that go layer by layer, while the forward pass runs; and what is asked of a stored chunk before any load."""

from __future__ import annotations

import itertools
import logging
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from qcap.attribution import LoadRequest
from qcap.capture.staging import HostArena
from qcap.errors import ObjectCorrupt, QcapError, Unsupported
from qcap.geometry import Geometry
from qcap.kernels import PageTable
from qcap.kinds import CacheKind
from qcap.layerwise import (
    LayerMissing,
    LayerwiseLoad,
    LazyReader,
    LoadBatch,
    LoadGear,
    PagedLayerConnector,
    ReaderFetch,
    Span,
    Streams,
    streams_for,
)
from qcap.store.tiers import Backend
from qcap.tokens import ChunkRecord, chunk_key

POOL_BYTES = 1 << 30
"""Most host memory for layers on their way in."""
STAGING_BYTES = 16 << 20
"""Size of the device buffer that a layer's rows pass through."""
READERS = 16
"""Chunks that are read at once."""

logger = logging.getLogger("qcap.vllm")


def pool_bytes(geometry: Geometry, *, cache_tokens: int, max_seqs: int, max_len: int, available: int) -> int:
    """Host memory for loads: two layers of the most that one step can load, at most :data:`POOL_BYTES` and an eighth of what is there,
    at least one layer of a chunk."""
    size = geometry.chunk_size
    row = CacheKind.KV.planes * geometry.hidden(CacheKind.KV) * geometry.torch_dtype.itemsize
    tokens = min(cache_tokens, max_seqs * max_len) + 2 * size * max_seqs  # chunks that hold a load's first and last token count whole
    return max(min(2 * tokens * row, POOL_BYTES, available // 8), size * row)


def check_record(record: ChunkRecord, geometry: Geometry, token_ids: Sequence[int], start: int) -> None:
    """A stored chunk is the one that a load is for.

    Raises:
        GeometryMismatch, ObjectCorrupt, Unsupported: it is of another engine, of other tokens, or at other positions.
    """
    geometry.check_same(record.geometry, "the stored chunk")
    if record.kind is not CacheKind.KV or record.token_ids != tuple(token_ids):
        raise ObjectCorrupt(f"the object under this key holds other tokens ({record.kind.value} from {record.start})")
    if record.start != start:
        raise ObjectCorrupt(f"the object under this key starts at token {record.start}, not {start}")
    if record.positions != tuple(range(start, start + len(token_ids))):
        raise Unsupported("its keys keep the positions they had before tokens were dropped; an engine needs them renumbered")


def check_edits(records: Sequence[ChunkRecord]) -> None:
    """An edit's chunks stand together.

    Raises:
        ObjectCorrupt: a chunk is of an edit that the one before it is not of.
    """
    for before, record in itertools.pairwise(records):
        if record.edit not in ("", before.edit):
            raise ObjectCorrupt(
                f"the chunk at token {record.start} is of an edit that the chunk before it is not of: two were mixed, or one was stored "
                "half"
            )


def edits_digest(records: Sequence[ChunkRecord]) -> int:
    """Equal on all ranks only if their chunks are of the same edits."""
    return zlib.crc32("\n".join(record.edit for record in records).encode())


def first_to_check(load: LoadRequest, chunk_size: int) -> int:
    """Index of the first chunk whose header matters: for a salted load that of the chunk before it too, if that is there."""
    first = load.start // chunk_size
    return first - 1 if load.salt and first else first


@dataclass(frozen=True)
class LoadOutcome:
    """What became of a load: ``problem`` is why its blocks hold garbage, None if they do not."""

    load: LoadRequest
    problem: Exception | None
    layerwise: bool


class LayerLoads:
    """The loads of a step: :meth:`begin` before the forward pass, :meth:`layer` before each attention layer, :meth:`end` after it.

    All are called on the engine's thread and none raises. Before the first page is written every chunk of a load is known to be there and
    to be the right one, on all ranks. What fails later is told by :meth:`end`, on all ranks alike, and leaves other loads alone.

    Host memory is lent to each load when it begins, one or two layers of it, and comes back when it ends: no load waits for another, or
    for what is being captured. A load for which there is none is loaded whole, at once.

    Args:
        geometry: of this rank.
        backend: where the chunks are.
        table: the pages.
        device: of the pages.
        host_bytes: memory for layers on their way; see :func:`pool_bytes`.
        lowest: over all tensor-parallel ranks, the least of each value. Each rank calls it as often.
        whole: loads a request at once; raises what went wrong.
        streams: of the device; for tests.
    """

    def __init__(
        self,
        geometry: Geometry,
        backend: Backend,
        table: PageTable,
        *,
        device: torch.device,
        host_bytes: int,
        lowest: Callable[[list[int]], list[int]],
        whole: Callable[[LoadRequest], None],
        streams: Streams | None = None,
    ) -> None:
        self._geometry, self._backend, self._lowest, self._whole = geometry, backend, lowest, whole
        cuda = device.type == "cuda"
        row = CacheKind.KV.planes * geometry.hidden(CacheKind.KV) * geometry.torch_dtype.itemsize
        self._layer_row = row
        connector = PagedLayerConnector(table, max(STAGING_BYTES // row, geometry.block_size) if cuda else 0)
        self.device_bytes = sum(buffer.nbytes for buffer in connector.staging)
        self.arena = HostArena(host_bytes, pinned=cuda, waits=False)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="qcap-read")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="qcap-load") if cuda else None
        self._gear = LoadGear(streams or streams_for(device), connector, self.arena, self._loader)
        self._entries: list[_Entry] = []
        self._next = 0
        self.unseen = False
        """Whether a forward pass ran without asking for its layers: loads of this engine must be whole before it."""

    @property
    def active(self) -> bool:
        """Whether a step's loads have begun and not ended."""
        return bool(self._entries)

    def begin(self, loads: Sequence[LoadRequest]) -> None:
        """Check all chunks of all loads by their headers, then start fetching layer 0 of each."""
        self._next = 0
        self._entries = [_Entry(load) for load in loads]
        for entry in self._entries:
            entry.attempt(self._open)
        for entry in self._entries:
            entry.attempt(self._check)
        self._agree()
        try:
            self._start([entry for entry in self._entries if entry.problem is None])
        except Exception as error:
            self._fail_all(error)

    def layer(self, index: int) -> None:
        """Layer ``index`` is about to be computed: what is queued on the current stream from here on sees its loaded rows.

        Layers left out before it are caught up with; one that was asked for already is there.
        """
        while self._entries and self._next <= index:
            layer, self._next = self._next, self._next + 1
            for entry in self._entries:
                if entry.job is not None:
                    try:
                        entry.job.layer(layer)
                    except Exception as error:  # a failed load raises nothing; this is a mistake of ours, and the last load waits for all
                        self._fail_all(error)

    def end(self, *, lost: bool = False) -> list[LoadOutcome]:
        """The forward pass has been queued: what became of the loads. Nothing if they were ended before.

        ``lost``: the engine gave the step up, so it is no wonder if it did not ask for all layers.
        """
        entries, self._entries = self._entries, []
        if not entries:
            return []
        layers = self._geometry.num_layers
        unseen = self._next < layers and any(entry.job is not None for entry in entries)
        self.unseen = self.unseen or (unseen and not lost)
        for entry in entries:
            if entry.job is not None:
                if unseen:
                    entry.problem = entry.problem or QcapError(f"the engine did not ask for layers {self._next}..{layers - 1}")
                else:
                    entry.attempt(lambda entry: entry.job.finish())  # type: ignore[union-attr]
                entry.problem = entry.problem or entry.job.failure
            entry.give_up()
        try:
            good = self._lowest([entry.problem is None for entry in entries])
        except Exception as error:
            good = [0] * len(entries)
            logger.error("the ranks cannot be asked about their loads: %s", error)
        other = QcapError("another rank could not load these chunks")
        return [
            LoadOutcome(entry.load, entry.problem if entry.problem is not None or ok else other, entry.job is not None)
            for entry, ok in zip(entries, good, strict=True)
        ]

    def close(self) -> None:
        """Give up what is under way, and wait for the threads. Twice is fine."""
        entries, self._entries = self._entries, []
        for entry in entries:
            entry.give_up()
        self._readers.shutdown(cancel_futures=True)
        if self._loader is not None:
            self._loader.shutdown()
        self.arena.close()

    # -- before the first page is written

    def _open(self, entry: _Entry) -> None:
        """Start reading the headers of a load's chunks."""
        geometry, load = self._geometry, entry.load
        size, first = geometry.chunk_size, load.start // geometry.chunk_size
        for index in range(first_to_check(load, size), -(-load.end // size)):

            def check(record: ChunkRecord, index: int = index) -> None:
                check_record(record, geometry, load.token_ids[index * size : (index + 1) * size], index * size)

            reader = LazyReader(self._backend, chunk_key(CacheKind.KV, geometry, load.digests[index], load.salt), check)
            entry.headers.append(self._readers.submit(_header, reader, index < first))
            if index >= first:
                entry.readers.append(reader)

    def _check(self, entry: _Entry) -> None:
        if entry.problem is None:
            entry.records = [record for header in entry.headers if (record := header.result()) is not None]
            check_edits(entry.records)

    def _agree(self) -> None:
        """All ranks load the same chunks of the same edits, or none does."""
        mine: list[int] = []
        for entry in self._entries:
            edits = edits_digest(entry.records)
            mine += [entry.problem is None, edits, -edits]
        try:
            least = self._lowest(mine)
        except Exception as error:
            self._fail_all(error)
            return
        for entry, good, low, high in zip(self._entries, least[::3], least[1::3], least[2::3], strict=True):
            if entry.problem is None and (not good or low != -high):
                entry.problem = QcapError("another rank cannot load these chunks" if not good else "the ranks' chunks are of other edits")

    # -- pages

    def _start(self, entries: list[_Entry]) -> None:
        n, size = self._geometry.block_size, self._geometry.chunk_size
        spans = [Span(entry.load.end, entry.load.start, entry.load.end, size) for entry in entries]
        needed = sum(span.chunks * size * self._layer_row for span in spans)
        layers = 2 if 2 * needed <= self.arena.nbytes - self.arena.used else 1
        for entry, span in zip(entries, spans, strict=True):
            entry.slots = self._lend(span.chunks * size, layers)
        layered = [(entry, span) for entry, span in zip(entries, spans, strict=True) if entry.slots is not None]
        batch = LoadBatch()
        for place, (entry, span) in enumerate(layered):
            load = entry.load
            assert entry.slots is not None
            entry.job = LayerwiseLoad(
                replace(self._gear, host=entry.slots),
                ReaderFetch(entry.readers, size, self._readers),
                load.block_ids[load.start // n : load.end // n],
                span,
                batch=batch,
                last=place == len(layered) - 1,
            )
        for entry, _ in layered:
            assert entry.job is not None
            entry.job.begin()
        for entry in entries:
            if entry.job is None:
                entry.attempt(lambda entry: self._whole(entry.load))

    def _lend(self, tokens: int, layers: int) -> LentLayers | None:
        planes, hidden, dtype = CacheKind.KV.planes, self._geometry.hidden(CacheKind.KV), self._geometry.torch_dtype
        if layers * tokens * self._layer_row > self.arena.nbytes:
            return None  # the arena would make page-locked memory now, which takes longer than a load
        with torch.inference_mode(False):  # steps run in inference mode, the threads that write to the layers do not
            block = self.arena.take((layers, planes, tokens, hidden), dtype)
        return None if block is None else LentLayers(self.arena, block)

    def _fail_all(self, error: Exception) -> None:
        for entry in self._entries:
            entry.problem = entry.problem or error
            if entry.job is not None:
                entry.job.close()


class LentLayers:
    """Host memory of one load (a :class:`~qcap.layerwise.HostPool`): a few layers of it, in one piece of an arena.

    Args:
        arena: gets the piece back once :meth:`release` was called and nobody uses any of it.
        block: ``[layers, planes, T, H]``.
    """

    def __init__(self, arena: HostArena, block: torch.Tensor) -> None:
        self._arena, self._block = arena, block
        self._free = list(range(len(block)))
        self._late: list[tuple[Any, int]] = []
        self._out = 0
        self._last: Any = None  # event behind the last copy out of it
        self._released = False
        self._lock = threading.Lock()

    @torch.inference_mode(False)
    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """One layer; None if none is free."""
        with self._lock:
            self._free += [place for event, place in self._late if event.query()]
            self._late = [(event, place) for event, place in self._late if place not in self._free]
            if self._released or not self._free:
                return None
            self._out += 1
            return self._block[self._free.pop()]

    def give(self, piece: torch.Tensor, after: Any = None) -> None:
        """Copies end in the order in which they were given back, so the last event is behind all of them."""
        place = (piece.data_ptr() - self._block.data_ptr()) // (self._block.stride(0) * self._block.element_size())
        with self._lock:
            self._out -= 1
            if after is None:
                self._free.append(place)
            else:
                self._late.append((after, place))
                self._last = after
            self._give_back()

    def release(self) -> None:
        """Nothing is taken any more."""
        with self._lock:
            if not self._released:
                self._released = True
                self._give_back()

    def _give_back(self) -> None:
        if self._released and not self._out:
            self._arena.give(self._block, self._last)


class _Entry:
    """A load under way."""

    def __init__(self, load: LoadRequest) -> None:
        self.load = load
        self.problem: Exception | None = None
        self.headers: list[Future[ChunkRecord | None]] = []
        self.readers: list[LazyReader] = []
        self.records: list[ChunkRecord] = []
        self.slots: LentLayers | None = None
        self.job: LayerwiseLoad | None = None

    def attempt(self, step: Callable[[_Entry], object]) -> None:
        try:
            step(self)
        except Exception as error:
            self.problem = self.problem or error

    def give_up(self) -> None:
        """What is not done is not done any more; memory goes back when nobody uses it."""
        if self.job is not None:
            self.job.close()
        if self.slots is not None:
            self.slots.release()


def _header(reader: LazyReader, may_be_missing: bool) -> ChunkRecord | None:
    try:
        return reader.record
    except LayerMissing:
        if may_be_missing:
            return None
        raise
