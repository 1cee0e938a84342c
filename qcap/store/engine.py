"""The store in this process: a queue of chunks in host memory, writers that publish them, and reads that go straight to the tier.

A chunk's way: ``store()`` reserves its bytes and queues it; a writer waits for the device event, writes the object beside and checks it;
then, in the order of the queue, it becomes visible. So several chunks are written at once, yet a receipt that was queued after its
chunks is never seen before them. The reservation goes back as soon as the outcome is known, before the future says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from qcap.config import parse_choice, parse_int
from qcap.errors import ObjectCorrupt, QcapError, StoreUnavailable
from qcap.geometry import Geometry
from qcap.kinds import CacheKind
from qcap.store.chunkfile import ChunkHeader, empty_layer
from qcap.store.metrics import Counters, RateLimitedLog
from qcap.store.objects import LayerReplaced, ObjectTier, PreparedChunk
from qcap.store.tiers import LayerReader, Lease, LoadedChunk, Resting, SequenceRecord, StoreOutcome
from qcap.store.write_queue import Job, WriteQueue
from qcap.tokens import ChunkKey, ChunkRecord

logger = logging.getLogger("qcap.store")
T = TypeVar("T")

COUNTERS = (
    "stored",
    "exists",
    "refused",
    "failed",
    "stored_kv",
    "stored_query",
    "tokens_stored",
    "bytes_stored",
    "bytes_waiting_max",
    "write_us",
    "waits",
    "wait_us",
    "loaded",
    "layers_loaded",
    "bytes_loaded",
    "load_missing",
    "load_corrupt",
    "sequences_stored",
    "sequences_failed",
    "sequences_corrupt",
)
"""``stored + exists + refused + failed`` is the number of ``store()`` calls that ended. ``tokens_stored`` counts tokens of objects really
written. ``loaded`` counts whole chunks, ``layers_loaded`` single layers, ``bytes_loaded`` both. ``write_us``: microseconds from queue to
visible, summed over ``stored``; ``wait_us``: that callers were held for room."""

STALE_STAGING_S = 24 * 3600.0
MAX_REMEMBERED = 1 << 17


class StoreEngine:
    """A :class:`~qcap.store.tiers.Backend` over an :class:`ObjectTier`.

    Args:
        tier: where objects go.
        on_pressure: when ``host_bytes`` are waiting, ``wait`` holds the caller of ``store()``, ``skip`` refuses the chunk.
        host_bytes: bound on bytes of sources queued and not yet written. One chunk that is larger is taken when nothing else waits.
        writers: threads; the tier knows a good number. They start with the first write.
    """

    def __init__(self, tier: ObjectTier, *, on_pressure: str = "wait", host_bytes: int = 256 << 20, writers: int | None = None) -> None:
        self._tier = tier
        self._waits = parse_choice("on_pressure", on_pressure, ("wait", "skip")) == "wait"
        self._queue = WriteQueue(parse_int("host_bytes", host_bytes, 1), writers or tier.writers, self._write)
        self._counts = Counters(COUNTERS)
        self._log = RateLimitedLog(logger)
        self._known = _Remembered(MAX_REMEMBERED)
        self._corrupt = _Remembered(MAX_REMEMBERED)
        self._clean_staging()

    # -- Backend: asking

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See :class:`Backend`. Raises ``StoreUnavailable``."""
        return [self._contains(key) for key in keys]

    def lookup(self, keys: Sequence[ChunkKey]) -> int:
        """See :class:`Backend`. Raises ``StoreUnavailable``."""
        return next((i for i, key in enumerate(keys) if not self._contains(key)), len(keys))

    def _contains(self, key: ChunkKey) -> bool:
        if key in self._corrupt:
            return False  # asked for its bytes before, and they were wrong: as good as not there until it is written anew
        if key in self._known:
            return True
        found = self._reach(lambda: self._tier.exists(key))
        if found and not self._tier.cheap_exists:
            self._known.add(key)
        return found

    def edit_of(self, key: ChunkKey) -> str | None:
        """See :class:`Backend`. Raises ``ObjectCorrupt``, ``StoreUnavailable``."""
        header = self._reach(lambda: self._tier.header(key))
        return None if header is None else header.record.edit

    @property
    def cheap_contains(self) -> bool:
        """Whether :meth:`contains` costs no round trip, so that an engine's step may ask."""
        return self._tier.cheap_exists

    @property
    def keeps_leases(self) -> bool:
        """See :class:`Backend`."""
        return self._tier.keeps_leases

    def has_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more would be taken at once, neither refused nor held."""
        return self._queue.has_room(nbytes)

    # -- Backend: writing

    def store(
        self, record: ChunkRecord, source: torch.Tensor, event: Any = None, *, overwrite: bool = False, lease: Lease | None = None
    ) -> Future[StoreOutcome]:
        """See :class:`Backend`. Never raises: what is wrong with the arguments ends as ``FAILED`` too, with the reason in the log."""
        try:
            taken = self._queue.put_chunk(record, source, event, overwrite, self._waits, lease)
        except Exception as error:  # the store is closed, or record and source are not what they should be
            return self._ended(StoreOutcome.FAILED, "chunk was not stored: %s: %s", type(error).__name__, error)
        if taken.future is None:
            why = "chunk was not stored: %d bytes wait to be written already; the store is slower than capture"
            return self._ended(StoreOutcome.REFUSED, why, taken.bytes_waiting)
        self._counts.high_water("bytes_waiting_max", taken.bytes_waiting)
        if taken.waited_s:
            self._counts.add("waits")
            self._counts.add("wait_us", int(taken.waited_s * 1e6))
        return taken.future

    def put_sequence(self, record: SequenceRecord) -> Future[None]:
        """See :class:`Backend`. The future never raises; a failure is in the log and in ``sequences_failed``."""
        try:
            return self._queue.put_sequence(record)
        except Exception as error:
            self._counts.add("sequences_failed")
            self._log.error("receipt was not stored: %s", error)
            future: Future[None] = Future()
            future.set_result(None)
            return future

    def put_manifest(self, geometry: Geometry, kinds: Sequence[CacheKind], engine: dict[str, str]) -> None:
        """See :class:`Backend`."""
        self._reach(lambda: self._tier.put_manifest(geometry, kinds, engine))

    def _ended(self, outcome: StoreOutcome, why: str, *args: object) -> Future[StoreOutcome]:
        self._counts.add(outcome.value)
        self._log.warning(why, *args)
        future: Future[StoreOutcome] = Future()
        future.set_result(outcome)
        return future

    # -- the writers' side

    def _write(self, job: Job) -> None:
        """One job from event to visible. Never raises."""
        if isinstance(job.record, SequenceRecord):
            self._write_sequence(job, job.record)
        else:
            self._write_chunk(job, job.record)

    def _write_sequence(self, job: Job, record: SequenceRecord) -> None:
        try:
            with self._queue.turn(job):
                self._tier.put_sequence(record)
            self._counts.add("sequences_stored")
        except Exception as error:
            self._counts.add("sequences_failed")
            self._log.error("receipt of request %s was not stored: %s: %s", record.request_id, type(error).__name__, error)
        self._queue.release(job)
        self._queue.finish(job, None, None)

    def _write_chunk(self, job: Job, record: ChunkRecord) -> None:
        outcome, prepared = StoreOutcome.FAILED, None
        try:
            key = record.key
            overwrite = job.overwrite or key in self._corrupt
            prepared = self._prepare(job, record, overwrite)
            with self._queue.turn(job):
                published = prepared is not None and prepared.publish(overwrite=overwrite)
            outcome = StoreOutcome.STORED if published else StoreOutcome.EXISTS
            self._corrupt.discard(key)
            if not self._tier.cheap_exists:
                self._known.add(key)
            if published and prepared is not None:
                self._count_stored(job, record, prepared.nbytes)
        except Exception as error:  # nothing may leave a writer: disk full, event of a lost device, a source of the wrong shape
            self._log.error(
                "chunk [%s, %s) of %s was not stored: %s: %s",
                record.start, record.start + len(record.token_ids), record.geometry.model, type(error).__name__, error,
            )  # fmt: skip
        finally:
            if prepared is not None:
                self._discard(prepared)
            attached_outcome = StoreOutcome.FAILED if outcome is StoreOutcome.FAILED else StoreOutcome.EXISTS
            attached = self._queue.release(job)
            self._counts.add(outcome.value)
            self._counts.add(attached_outcome.value, attached)
            self._queue.finish(job, outcome, attached_outcome)

    def _prepare(self, job: Job, record: ChunkRecord, overwrite: bool) -> PreparedChunk | None:
        """Write beside; None if an object is there already, which costs one look instead of a write."""
        if job.event is not None:
            job.event.synchronize()
        if not overwrite and self._tier.exists(record.key):
            return None
        assert job.source is not None
        return self._tier.prepare(record, job.source, job.lease)

    def _discard(self, prepared: PreparedChunk) -> None:
        try:
            prepared.discard()
        except Exception as error:
            self._log.warning("a file under staging/ could not be removed: %s", error)

    def _count_stored(self, job: Job, record: ChunkRecord, nbytes: int) -> None:
        self._counts.add("bytes_stored", nbytes)
        self._counts.add("tokens_stored", len(record.token_ids))
        self._counts.add(f"stored_{record.kind.value}")
        self._counts.add("write_us", int((time.monotonic() - job.queued_at) * 1e6))

    # -- Backend: reading

    def load(self, key: ChunkKey) -> LoadedChunk | None:
        """See :class:`Backend`."""
        try:
            loaded = self._reach(lambda: self._tier.load(key))
        except ObjectCorrupt as error:
            self._found_corrupt(key, error)
            raise
        if loaded is None:
            self._known.discard(key)
            self._counts.add("load_missing")
            return None
        self._corrupt.discard(key)
        self._counts.add("loaded")
        self._counts.add("bytes_loaded", loaded.tensor.nbytes)
        return loaded

    def open_layers(self, key: ChunkKey) -> LayerReader | None:
        """See :class:`Backend`."""
        try:
            header = self._reach(lambda: self._tier.header(key))
        except ObjectCorrupt as error:
            self._found_corrupt(key, error)
            raise
        if header is None:
            self._known.discard(key)
            self._counts.add("load_missing")
            return None
        return _Layers(self, key, header)

    def rest(self, header: ChunkHeader) -> Resting | None:
        """See :class:`LayerReader`, which is how to get here."""
        return self._tier.rest(header)

    def read_layer(self, key: ChunkKey, header: ChunkHeader, layer: int, out: torch.Tensor) -> None:
        """One layer into ``out``; see :class:`LayerReader`, which is how to get here."""
        try:
            self._reach(lambda: self._tier.read_layer(header, layer, out))
        except LayerReplaced as error:
            self._counts.add("load_corrupt")
            self._log.warning("%s", error)
            raise
        except ObjectCorrupt as error:
            self._found_corrupt(key, error)
            raise
        self._counts.add("layers_loaded")
        self._counts.add("bytes_loaded", header.layer_bytes)

    def _found_corrupt(self, key: ChunkKey, error: ObjectCorrupt) -> None:
        self._corrupt.add(key)
        self._known.discard(key)
        self._counts.add("load_corrupt")
        self._log.error("%s", error)

    def manifests(self, model: str | None = None) -> list[tuple[Geometry, tuple[CacheKind, ...], dict[str, str]]]:
        """See :class:`Backend`. Raises ``ObjectCorrupt`` for one that cannot be read."""
        return self._reach(lambda: self._tier.manifests(model))

    def sequences(self, model: str | None = None) -> list[SequenceRecord]:
        """See :class:`Backend`. A receipt that cannot be read is left out, logged and counted in ``sequences_corrupt``."""
        return self._reach(lambda: self._sequences(model))

    def _sequences(self, model: str | None) -> list[SequenceRecord]:
        found = []
        for path in self._tier.list_sequences(model):
            try:
                record = self._tier.read_sequence(path)
            except ObjectCorrupt as error:
                self._counts.add("sequences_corrupt")
                self._log.warning("receipt left out: %s", error)
                continue
            if record is not None and model in (None, record.model):
                found.append(record)
        return sorted(found, key=lambda r: r.finished_at)

    # -- Backend: the rest

    def poll(self) -> int:
        """See :class:`Backend`."""
        return self._queue.pending

    def drain(self, timeout_s: float | None = None) -> bool:
        """See :class:`Backend`. Not to be called from a future's callback, which is part of what is being waited for."""
        return self._queue.drain(timeout_s)

    def counters(self) -> dict[str, int]:
        """See :data:`COUNTERS`."""
        return self._counts.snapshot()

    def loaded(self, keys: Sequence[ChunkKey]) -> None:
        """See :class:`Backend`."""
        self._tier.loaded(keys)

    def relieve(self, nbytes: int) -> bool:
        """See :class:`Backend`."""
        return self._tier.relieve(nbytes)

    def close(self) -> None:
        """See :class:`Backend`. A ``store()`` that is still held for room ends as ``FAILED``; later ones do too. Reads go on working."""
        self._queue.close()
        self._tier.close()

    def _clean_staging(self) -> None:
        try:
            self._tier.clean_staging(STALE_STAGING_S)
        except Exception as error:  # a store that may only be read
            logger.debug("staging/ of %s was not cleaned: %s", self._tier.url, error)

    def _reach(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except QcapError:
            raise
        except Exception as error:  # OSError, and obstore's own tree that has no common base with it
            reason = str(error).split("\n", 1)[0]
            raise StoreUnavailable(
                f"{self._tier.url} cannot be reached: {type(error).__name__}: {reason}. `qcap doctor --store {self._tier.url}` tries to "
                "write and to read there"
            ) from error


class _Layers:
    """A :class:`~qcap.store.tiers.LayerReader`."""

    def __init__(self, engine: StoreEngine, key: ChunkKey, header: ChunkHeader) -> None:
        self._engine, self._key, self._header = engine, key, header

    @property
    def record(self) -> ChunkRecord:
        """Its header, checked."""
        return self._header.record

    def rest(self) -> Resting | None:
        """See :class:`LayerReader`."""
        return self._engine.rest(self._header)

    def read(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """See :class:`LayerReader`."""
        if not 0 <= layer < len(self._header.layer_checksums):
            raise IndexError(f"layer {layer} of {len(self._header.layer_checksums)}")
        out = empty_layer(self._header) if out is None else out
        self._engine.read_layer(self._key, self._header, layer, out)
        return out


class _Remembered:
    """A bounded set of keys; the least recently used one goes first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._keys: OrderedDict[ChunkKey, None] = OrderedDict()

    def __contains__(self, key: ChunkKey) -> bool:
        if not self._keys:
            return False
        with self._lock:
            if key not in self._keys:
                return False
            self._keys.move_to_end(key)
            return True

    def add(self, key: ChunkKey) -> None:
        with self._lock:
            self._keys[key] = None
            self._keys.move_to_end(key)
            while len(self._keys) > self._limit:
                self._keys.popitem(last=False)

    def discard(self, key: ChunkKey) -> None:
        with self._lock:
            self._keys.pop(key, None)
