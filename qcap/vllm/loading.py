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

from qcap.attribution import NO_EDIT, LoadRequest
from qcap.capture.staging import HostArena
from qcap.connectors import LayerConnector, build
from qcap.errors import ObjectCorrupt, QcapError, Unsupported
from qcap.geometry import Geometry
from qcap.kernels import PageTable
from qcap.kinds import CacheKind
from qcap.layerwise import (
    EarlyCopies,
    LayerMissing,
    LayerwiseLoad,
    LazyReader,
    LoadBatch,
    LoadGear,
    ReaderFetch,
    RestingPipe,
    RestingSpan,
    Span,
    Streams,
    streams_for,
)
from qcap.store.tiers import Backend, LayerReader, Resting
from qcap.tokens import ChunkKey, ChunkRecord, TokenChunk, chunk_key

POOL_BYTES = 1 << 30
"""Most host memory for layers on their way in."""
STAGING_BYTES = 16 << 20
"""Size of the device buffer that a fetched layer's rows pass through."""
RESTING_BYTES = 32 << 20, 64 << 20
"""Size of a device buffer that rows pass through which lie in this process's memory, at least and at most: a sixteenth of what all of them
may take. The larger they are, the fewer calls a layer costs the engine's thread."""
RESTING_BYTES_CPU = 1 << 20
AHEAD_BYTES = {"all": 2 << 30, "salted": 256 << 20}
"""Device memory for such buffers by what is loaded, as far as nothing else is said and there is eight times as much. Beyond the few that
loads need, they hold what is copied before the engine has given a request its blocks and begun the step: 36 ms of a fast link."""
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
    if record.geometry is not geometry and record.geometry != geometry:  # cheaper than a list of what differs, which is to be empty
        geometry.check_same(record.geometry, "the stored chunk")
    if record.kind is not CacheKind.KV or record.token_ids != tuple(token_ids):
        raise ObjectCorrupt(f"the object under this key holds other tokens ({record.kind.value} from {record.start})")
    if record.start != start:
        raise ObjectCorrupt(f"the object under this key starts at token {record.start}, not {start}")
    if not record.in_place:
        raise Unsupported("its keys keep the positions they had before tokens were dropped; an engine needs them renumbered")


def check_edits(records: Sequence[ChunkRecord], behind: str) -> None:
    """An edit's chunks stand together, and what an engine computed stands behind the rows that it was computed on.

    Args:
        behind: see :class:`~qcap.attribution.LoadRequest`.

    Raises:
        ObjectCorrupt: a chunk is of an edit that the one before it is not of, or was computed behind other rows.
        QcapError: the edit is not the one that was there when the load was planned.
    """
    for before, record in itertools.pairwise(records):
        if record.edit and (record.edit != before.edit or not record.follows(before)):
            raise ObjectCorrupt(
                f"the chunk at token {record.start} is of an edit that the chunk before it is not of: two were mixed, or one was stored "
                "half"
            )
        if not record.edit and before.behind and record.parent != before.behind:
            raise ObjectCorrupt(f"the chunk at token {record.start} was computed behind other rows than those of the edit before it")
    last = next((record for record in reversed(records) if record.edit), None)
    if behind and last is not None and last.behind != behind:
        raise QcapError(f"an edit was {'stored' if behind == NO_EDIT else 'replaced'} under its salt while the request was waiting")


def edits_digest(records: Sequence[ChunkRecord]) -> int:
    """Equal on all ranks only if their chunks are of the same edits."""
    return zlib.crc32("\n".join(f"{record.edit} {record.rows}" for record in records).encode())


def first_to_check(load: LoadRequest, chunk_size: int) -> int:
    """Index of the first chunk whose header matters: for a salted load that of the chunk before it too, if that is there."""
    first = load.start // chunk_size
    return first - 1 if load.salt and first else first


@dataclass(frozen=True)
class LoadOutcome:
    """What became of a load: ``problem`` is why its blocks hold garbage, None if they do not. ``resting``: it was made from where its
    chunks lie in memory; ``early``: and begun before it had its blocks."""

    load: LoadRequest
    problem: Exception | None
    layerwise: bool
    resting: bool = False
    early: bool = False


class LayerLoads:
    """The loads of a step: :meth:`begin` before the forward pass, :meth:`layer` before each attention layer, :meth:`end` after it.

    All are called on the engine's thread and none raises. Before the first page is written every chunk of a load is known to be there and
    to be the right one, on all ranks. What fails later is told by :meth:`end`, on all ranks alike, and leaves other loads alone.

    A load whose chunks all lie in page-locked memory of this process is copied from there (:class:`~qcap.layerwise.RestingPipe`), together
    with all such loads of the step. For any other, host memory is lent when it begins, one or two layers of it, and comes back when it
    ends: no load waits for another, or for what is being captured. A load for which there is none is loaded whole, at once.

    Copies from memory need no pages: with ``ahead_bytes`` they may begin while vLLM still looks for blocks (:meth:`early`).

    Args:
        geometry: of this rank.
        backend: where the chunks are.
        table: the pages.
        device: of the pages.
        host_bytes: memory for layers on their way; see :func:`pool_bytes`.
        lowest: over all tensor-parallel ranks, the least of each value. Each rank calls it as often.
        whole: loads a request at once; raises what went wrong.
        layered: False for an engine that does not run Python before each layer: then :meth:`at_once` is the only step, nothing is fetched
            layer by layer, and ``host_bytes`` is not needed.
        streams: of the device; for tests.
        resting_bytes: of each device buffer for chunks in memory; None takes :data:`RESTING_BYTES`, less on the CPU and where the pages are
            fewer.
        ahead_bytes: of all of them together, at least the few that loads need.
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
        layered: bool = True,
        streams: Streams | None = None,
        resting_bytes: int | None = None,
        ahead_bytes: int = 0,
    ) -> None:
        self._geometry, self._backend, self._lowest, self._whole = geometry, backend, lowest, whole
        cuda = device.type == "cuda"
        row = CacheKind.KV.planes * geometry.hidden(CacheKind.KV) * geometry.torch_dtype.itemsize
        self._layer_row, self.layered = row, layered
        streams = streams or streams_for(device)
        connector = build(
            table,
            engine="vllm",
            device=device.type,
            layerwise=True,
            staging_tokens=max(STAGING_BYTES // row, geometry.block_size) if cuda and layered else 0,
            store_staging=False,
        )
        assert isinstance(connector, LayerConnector)
        if cuda:
            connector.warm_up()
        layer_bytes = table.num_blocks * geometry.block_size * row  # no load is more of a layer
        if resting_bytes is None:
            least, most = RESTING_BYTES if cuda else (RESTING_BYTES_CPU, RESTING_BYTES_CPU)
            resting_bytes = min(max(ahead_bytes // 16, least), most, layer_bytes)
        slots = max(min(ahead_bytes, geometry.num_layers * layer_bytes) // resting_bytes, 4 if cuda else 2)
        self._pipe = RestingPipe(streams, connector, staging_tokens=resting_bytes // row, slots=slots)
        self.device_bytes = sum(buffer.nbytes for buffer in connector.staging) + self._pipe.nbytes
        self.arena = HostArena(host_bytes, pinned=cuda and layered, waits=False)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="qcap-read")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="qcap-load") if cuda else None
        self._gear = LoadGear(streams, connector, self.arena, self._loader)
        self._entries: list[_Entry] = []
        self._early: dict[int, _EarlyLoad] = {}  # by uid of the request
        self._next = 0
        self.unseen = False
        """Whether a forward pass ran without asking for its layers: loads of this engine must be whole before it."""

    @property
    def active(self) -> bool:
        """Whether a step's loads have begun and not ended."""
        return bool(self._entries)

    def early(self, uid: int, salt: str, start: int, end: int, chunks: Sequence[TokenChunk], token_ids: Sequence[int]) -> bool:
        """Tokens ``[start, end)`` of a load that comes with the next step, unless vLLM finds no blocks for it. Those of one load come one
        behind the other; their chunks are checked as those of any load.

        Args:
            uid, salt: whose.
            chunks, token_ids: of the sequence, up to ``end`` at least.

        Returns:
            Whether this load may be told more of. If not, nothing of it was begun, and the step's loads bring it as if it had never been
            told of.
        """
        early = self._early.get(uid)
        if early is None:
            backend = self._backend
            can = self._geometry.tp_size == 1 and backend.cheap_contains and backend.keeps_leases  # all in this process
            copies = self._pipe.early() if can else None
            if copies is None:
                return False
            early = self._early[uid] = _EarlyLoad(start, copies)
        try:
            self._extend(early, salt, start, end, chunks, token_ids)
        except Exception as error:
            self._give_up_early(uid, error)
            return False
        return True

    def early_told(self, uid: int) -> None:
        """The load has been told of to its end: what room there is may be used for it."""
        early = self._early.get(uid)
        if early is not None:
            try:
                self._pipe.fill(early.copies)
            except Exception as error:
                self._give_up_early(uid, error)

    def _give_up_early(self, uid: int, error: Exception) -> None:
        logger.debug("a load is not begun early: %s: %s", type(error).__name__, error)
        self._pipe.drop(self._early.pop(uid).copies)

    def forget_early(self) -> None:
        """No load of the next step was told of."""
        early, self._early = self._early, {}
        for one in early.values():
            self._pipe.drop(one.copies)

    def _extend(self, early: _EarlyLoad, salt: str, start: int, end: int, chunks: Sequence[TokenChunk], token_ids: Sequence[int]) -> None:
        if start != early.end:
            raise QcapError(f"tokens from {start} on do not follow {early.end}")
        size = self._geometry.chunk_size
        first = start // size
        key = chunk_key(CacheKind.KV, self._geometry, chunks[first].digest, salt)
        if salt and first and not early.records:  # see first_to_check
            self._look(early.records, None, key.sibling(chunks[first - 1].digest), token_ids, start=(first - 1) * size)
        readers: list[LayerReader] = []
        for index in range(first, -(-end // size)):
            digest = chunks[index].digest
            self._look(early.records, readers, key.sibling(digest), token_ids, start=index * size)
            early.digests.append(digest)
        rest = _rest(readers)
        if not rest:
            raise QcapError("its chunks do not lie in memory")
        self._pipe.more(early.copies, rest, start % size, end - start)
        early.end = end

    def begin(self, loads: Sequence[LoadRequest]) -> None:
        """Check all chunks of all loads by their headers, then start fetching layer 0 of each, or copying it from where it lies."""
        self._next = 0
        self._pipe.end()
        self._entries = [_Entry(load) for load in loads]
        for entry in self._entries:
            early = self._early.get(entry.load.uid)
            if early is not None and early.is_of(entry.load, self._geometry.chunk_size):
                entry.early, entry.records = early, early.records
                del self._early[entry.load.uid]
        self.forget_early()
        for entry in self._entries:
            if entry.early is None:
                entry.attempt(self._open)
        for entry in self._entries:
            entry.attempt(self._check)
        self._agree()
        for entry in self._entries:
            if entry.early is not None and entry.problem is not None:
                self._pipe.drop(entry.early.copies)
        try:
            self._start([entry for entry in self._entries if entry.problem is None])
        except Exception as error:
            self._fail_all(error)

    def at_once(self, loads: Sequence[LoadRequest]) -> list[LoadOutcome]:
        """All of a step's loads: what is queued on the current stream from here on sees them."""
        self.begin(loads)
        self.layer(self._geometry.num_layers - 1)
        return self.end()

    def layer(self, index: int) -> None:
        """Layer ``index`` is about to be computed: what is queued on the current stream from here on sees its loaded rows.

        Layers left out before it are caught up with; one that was asked for already is there.
        """
        while self._entries and self._next <= index:
            layer, self._next = self._next, self._next + 1
            try:
                self._pipe.layer(layer)
                for entry in self._entries:
                    if entry.job is not None:
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
        unseen = self._next < layers and any(entry.layerwise for entry in entries)
        self.unseen = self.unseen or (unseen and not lost)
        self._pipe.end()
        for entry in entries:
            if entry.layerwise and unseen:
                entry.problem = entry.problem or QcapError(f"the engine did not ask for layers {self._next}..{layers - 1}")
            if entry.resting:
                entry.problem = entry.problem or self._pipe.failure
            if entry.job is not None:
                if not unseen:
                    entry.attempt(lambda entry: entry.job.finish())  # type: ignore[union-attr]
                entry.problem = entry.problem or entry.job.failure
            entry.give_up()
        try:
            good = self._lowest([entry.problem is None for entry in entries])
        except Exception as error:
            good = [0] * len(entries)
            logger.error("the ranks cannot be asked about their loads: %s", error)
        other = QcapError("another rank could not load these chunks")
        if self._backend.keeps_leases:
            for entry in entries:
                if entry.problem is None:
                    try:
                        self._backend.loaded([record.key for record in entry.records])
                    except Exception as error:  # they are loaded all the same
                        logger.warning("the store was not told what was loaded: %s: %s", type(error).__name__, error)
        return [
            LoadOutcome(
                entry.load,
                entry.problem if entry.problem is not None or ok else other,
                entry.layerwise,
                entry.resting,
                entry.resting and entry.early is not None,
            )
            for entry, ok in zip(entries, good, strict=True)
        ]

    def poll(self) -> bool:
        """Give memory back that chunks were loaded from, where the copies are over; whether some are not. Any thread."""
        return self._pipe.poll()

    def close(self) -> None:
        """Give up what is under way, and wait for the threads, and for copies out of memory that is not ours. Twice is fine."""
        entries, self._entries = self._entries, []
        self._early.clear()
        self._pipe.close()
        for entry in entries:
            entry.give_up()
        self._readers.shutdown(cancel_futures=True)
        if self._loader is not None:
            self._loader.shutdown()
        self.arena.close()

    # -- before the first page is written

    def _open(self, entry: _Entry) -> None:
        """Start reading the headers of a load's chunks; where that costs no round trip, read them."""
        geometry, backend, load = self._geometry, self._backend, entry.load
        size, inline = geometry.chunk_size, backend.cheap_contains
        first = first_to_check(load, size)
        any_key = chunk_key(CacheKind.KV, geometry, load.digests[first], load.salt)
        for start in range(first * size, load.end, size):
            wanted = start + size > load.start  # else it is the one before, which may be missing
            key = any_key.sibling(load.digests[start // size])

            def check(record: ChunkRecord, start: int = start) -> None:
                check_record(record, geometry, load.token_ids[start : start + size], start)

            if inline:
                self._look(entry.records, entry.readers if wanted else None, key, load.token_ids, start)
            else:
                reader = LazyReader(backend, key, check)
                entry.headers.append(self._readers.submit(_header, reader, not wanted))
                if wanted:
                    entry.readers.append(reader)

    def _look(
        self, records: list[ChunkRecord], readers: list[LayerReader] | None, key: ChunkKey, token_ids: Sequence[int], start: int
    ) -> None:
        """Read and check one header, where that costs no round trip. Without ``readers`` the chunk may be missing."""
        geometry = self._geometry
        found = self._backend.open_layers(key)
        if found is not None:
            check_record(found.record, geometry, token_ids[start : start + geometry.chunk_size], start)
            records.append(found.record)
            if readers is not None:
                readers.append(found)
        elif readers is not None:
            raise LayerMissing(f"{key} is no longer in the store")

    def _check(self, entry: _Entry) -> None:
        if entry.problem is None:
            entry.records += [record for header in entry.headers if (record := header.result()) is not None]
            check_edits(entry.records, entry.load.behind)

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
        self._start_resting(entries)
        self._start_others([entry for entry in entries if not entry.resting and entry.problem is None])

    def _start_resting(self, entries: list[_Entry]) -> None:
        n, size = self._geometry.block_size, self._geometry.chunk_size
        spans: list[RestingSpan] = []
        for entry in entries:
            load = entry.load
            blocks = load.block_ids[load.start // n : load.end // n]
            if entry.early is not None:
                spans.append(RestingSpan((), 0, blocks, entry.early.copies))
                entry.resting = True
                continue
            entry.attempt(lambda entry: entry.chunks.extend(_rest(entry.readers)))
            if entry.chunks:
                spans.append(RestingSpan(entry.chunks, load.start % size, blocks))
                entry.chunks, entry.resting = [], True
        if spans:
            self._pipe.begin(spans)

    def _start_others(self, entries: list[_Entry]) -> None:
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
        if not self.layered or layers * tokens * self._layer_row > self.arena.nbytes:
            return None  # the arena would make page-locked memory now, which takes longer than a load
        with torch.inference_mode(False):  # steps run in inference mode, the threads that write to the layers do not
            block = self.arena.take((layers, planes, tokens, hidden), dtype)
        return None if block is None else LentLayers(self.arena, block)

    def _fail_all(self, error: Exception) -> None:
        self._pipe.end()
        for entry in self._entries:
            entry.problem = entry.problem or error
            if entry.early is not None:
                self._pipe.drop(entry.early.copies)
            if entry.job is not None:
                entry.attempt(lambda entry: entry.job.close())  # type: ignore[union-attr]


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
        self.readers: list[LayerReader] = []
        self.records: list[ChunkRecord] = []
        self.chunks: list[Resting] = []
        self.early: _EarlyLoad | None = None
        self.resting = False
        self.slots: LentLayers | None = None
        self.job: LayerwiseLoad | None = None

    @property
    def layerwise(self) -> bool:
        return self.resting or self.job is not None

    def attempt(self, step: Callable[[_Entry], object]) -> None:
        try:
            step(self)
        except Exception as error:
            self.problem = self.problem or error

    def give_up(self) -> None:
        """What is not done is not done any more; memory goes back when nobody uses it."""
        if self.job is not None:
            self.attempt(lambda entry: entry.job.close())  # type: ignore[union-attr]
        if self.slots is not None:
            self.slots.release()


class _EarlyLoad:
    """What of a load was begun before it had its blocks: tokens ``[start, end)``."""

    def __init__(self, start: int, copies: EarlyCopies) -> None:
        self.start = self.end = start
        self.copies = copies
        self.records: list[ChunkRecord] = []
        self.digests: list[str] = []  # of the chunks that hold them

    def is_of(self, load: LoadRequest, chunk_size: int) -> bool:
        """Whether that is just what ``load`` loads."""
        return (self.start, self.end) == (load.start, load.end) and self.digests == list(load.digests[load.start // chunk_size :])


def _rest(readers: Sequence[LayerReader]) -> list[Resting]:
    """Chunks where they lie in memory; none, and nothing is held, unless all of them are there."""
    found: list[Resting] = []
    done = False
    try:
        for reader in readers:
            chunk = reader.rest()
            if chunk is None:
                return []
            found.append(chunk)
        done = True
        return found
    finally:
        if not done:
            for chunk in found:
                chunk.lease.release()


def _header(reader: LazyReader, may_be_missing: bool) -> ChunkRecord | None:
    try:
        return reader.record
    except LayerMissing:
        if may_be_missing:
            return None
        raise
