"""``memory://``: chunks that never leave the process rest as tensors, and become files only if someone asks for their bytes.

A chunk that comes with a lease (an engine's) stays in the memory that it came in, and is not even copied: in page-locked memory it is
loaded again at the rate of the link. When that memory is wanted back, what no engine has loaded for longest moves to ordinary memory, on
threads of this tier.
A chunk without a lease is copied once, outside the interpreter's lock. There is no header and there are no checksums: they would cost the
engine's own Python thread milliseconds a chunk, and guard against nothing, since the bytes are on no medium and on no wire.

Whatever needs the file (``ls``, ``verify``, export, a listing) makes it then, checksums and all, and from then on the chunk is an object
like any other.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from qcap._version import __version__
from qcap.store import chunkfile
from qcap.store.buckets import Entry, Reader, memory_bucket
from qcap.store.metrics import RateLimitedLog
from qcap.store.objects import LayerReplaced, ObjectTier, PreparedChunk, object_path
from qcap.store.tiers import Lease, LoadedChunk, Resting
from qcap.tokens import ChunkKey, ChunkRecord

often = RateLimitedLog(logging.getLogger("qcap.store"))


class _Order:
    """Chunks in lent memory of one tier; those that came or were loaded last are last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: OrderedDict[_Chunk, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def add(self, chunk: _Chunk, *, last: bool = True) -> None:
        """If its memory is still lent."""
        chunk.order = self
        with self._lock:
            if chunk.lent:
                self._chunks[chunk] = None
                self._chunks.move_to_end(chunk, last=last)

    def touch(self, chunk: _Chunk) -> None:
        """It was loaded."""
        with self._lock:
            if chunk in self._chunks:  # not on its way out
                self._chunks.move_to_end(chunk)

    def drop(self, chunk: _Chunk) -> None:
        """It is not there any more."""
        with self._lock:
            self._chunks.pop(chunk, None)

    def pop(self) -> _Chunk | None:
        """The first."""
        with self._lock:
            return self._chunks.popitem(last=False)[0] if self._chunks else None


class _Chunk:
    """A chunk as a tensor ``[planes, L, CH, H]``, perhaps in lent memory. ``header`` has no checksums and stands for this very chunk.

    Memory that is lent is read only by those who hold the lease: :meth:`borrow`.
    """

    def __init__(self, record: ChunkRecord, tensor: torch.Tensor, lease: Lease | None) -> None:
        self.record = record
        self.header = chunkfile.ChunkHeader(record, 0, tensor.nbytes // tensor.shape[1], ("",) * tensor.shape[1], __version__)
        self._lock = threading.Lock()
        self._tensor: torch.Tensor | None = tensor
        self._lease = lease
        self.nbytes = tensor.nbytes
        self.order: _Order | None = None

    @property
    def lent(self) -> bool:
        """Whether it lies in memory that is wanted back."""
        return self._lease is not None

    def rest(self) -> Resting | None:
        """The chunk where it lies, if that is page-locked."""
        with self._lock:
            if self._tensor is None or self._lease is None or not self._lease.pinned:
                return None
            self._lease.hold()
            resting = Resting(self._tensor, self._lease)
        if self.order is not None:
            self.order.touch(self)  # while it is read nothing is gained by moving it
        return resting

    @contextmanager
    def borrow(self) -> Iterator[torch.Tensor]:
        """Its tensor, which stays as it is meanwhile. Raises ``LayerReplaced`` if it was let go."""
        with self._lock:
            tensor, lease = self._tensor, self._lease
            if tensor is None:
                raise LayerReplaced(f"{object_path(self.record.key)}: it was replaced or removed while it was read: load it anew")
            if lease is not None:
                lease.hold()
        try:
            yield tensor
        finally:
            if lease is not None:
                lease.release()

    def settle(self) -> None:
        """Move to ordinary memory, unless it is there, or was let go."""
        try:
            with self.borrow() as tensor:
                own = chunkfile.copy_chunk(tensor)
        except LayerReplaced:
            return
        with self._lock:
            lease = None if self._tensor is None else self._lease
            if lease is not None:
                self._tensor, self._lease = own, None
        if lease is not None:
            lease.release()

    def let_go(self) -> None:
        """Nobody looks for it any more; who reads it goes on reading."""
        with self._lock:
            lease, self._tensor, self._lease = self._lease, None, None
        if self.order is not None:
            self.order.drop(self)
        if lease is not None:
            lease.release()


def forget(name: str) -> None:
    """Let go of every chunk that rests under ``memory://name``."""
    with _shelves_lock:
        shelf = _shelves.get(name)
    if shelf is not None:
        with shelf.lock:
            gone = list(shelf.chunks.values())
            shelf.chunks.clear()
            shelf.paths.clear()
        for chunk in gone:
            chunk.let_go()


class _Shelf:
    """The resting chunks of one name, by path."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.chunks: dict[str, _Chunk] = {}
        self.paths: dict[ChunkKey, str] = {}  # of chunks that were put here; looked up first, because a path takes a hash to make
        self.written_out = False  # whether any became a file


_shelves: dict[str, _Shelf] = {}
_shelves_lock = threading.Lock()


class MemoryTier(ObjectTier):
    """The object tier ``memory://name``. All openers of one name in this process share it."""

    def __init__(self, name: str) -> None:
        with _shelves_lock:
            self._shelf = _shelves.setdefault(name, _Shelf())
        self._bucket = memory_bucket(name)
        self._lent = _Order()
        self._stuck: list[_Chunk] = []  # and could not be moved
        self._movers: ThreadPoolExecutor | None = None
        self._moving = 0  # bytes
        self._moves_lock = threading.Lock()
        super().__init__(self._bucket, f"memory://{name}")

    keeps_leases = True

    @property
    def cheap_exists(self) -> bool:
        """Nothing is asked outside of this process."""
        return True

    @property
    def writers(self) -> int:
        """Threads that a store should write with: what they do takes little time, most of it with the interpreter's lock."""
        return min(2, os.cpu_count() or 1)

    def exists(self, key: ChunkKey) -> bool:
        """Whether a chunk is published under ``key``."""
        if self._shelf.paths.get(key) in self._shelf.chunks:
            return True
        if not self._shelf.written_out:
            with self._shelf.lock:  # while one is written out
                if not self._shelf.written_out:
                    return key in self._shelf.paths
        path = object_path(key)
        if path in self._shelf.chunks or self._bucket.exists(path):
            return True
        with self._shelf.lock:  # it may have moved from one to the other between the two looks
            return path in self._shelf.chunks or self._bucket.exists(path)

    def prepare(self, record: ChunkRecord, tensor: torch.Tensor, lease: Lease | None = None) -> PreparedChunk:
        """Copy one chunk, or keep it where it is and hold the ``lease``. Raises as :meth:`ObjectTier.prepare`."""
        chunkfile.check_chunk(record, tensor)
        if lease is None:
            chunk = _Chunk(record, chunkfile.copy_chunk(tensor), None)
        elif not lease.lent:
            chunk = _Chunk(record, tensor, None)
        else:
            lease.hold()
            chunk = _Chunk(record, tensor, lease)
        return PreparedChunk(object_path(record.key), tensor.nbytes, _Waiting(self, chunk))

    def load_path(self, path: str, *, verify: bool = True) -> LoadedChunk | None:
        """As :meth:`ObjectTier.load_path`."""
        gone: _Chunk | None = None
        while True:
            chunk = self._shelf.chunks.get(path)
            if chunk is None or chunk is gone:
                loaded = super().load_path(path, verify=verify)
                if loaded is not None:
                    return loaded
                with self._shelf.lock:  # as in `exists`
                    chunk = self._shelf.chunks.get(path)
                    if chunk is None:
                        return super().load_path(path, verify=verify)
            try:
                with chunk.borrow() as tensor:
                    return LoadedChunk(chunk.record, chunkfile.copy_chunk(tensor))
            except LayerReplaced:
                gone = chunk  # look again: another may be there now

    def header(self, key: ChunkKey) -> chunkfile.ChunkHeader | None:
        """The header of one chunk; one that rests has no checksums in it."""
        path = self._shelf.paths.get(key) or object_path(key)
        chunk = self._shelf.chunks.get(path)
        if chunk is None:
            header = super().header(key)
            if header is not None:
                return header
            with self._shelf.lock:  # as in `exists`
                chunk = self._shelf.chunks.get(path)
                if chunk is None:
                    return super().header(key)
        return chunk.header

    def read_layer(self, header: chunkfile.ChunkHeader, layer: int, out: torch.Tensor) -> None:
        """As :meth:`ObjectTier.read_layer`."""
        chunk = self._of(header)
        if chunk is not None:
            if not 0 <= layer < len(header.layer_checksums):
                raise IndexError(f"layer {layer} of {len(header.layer_checksums)}")
            with chunk.borrow() as tensor:
                chunkfile.copy_layer(header, tensor[:, layer], out)
        elif header.layer_checksums[0]:
            super().read_layer(header, layer, out)
        else:
            path = object_path(header.record.key)
            raise LayerReplaced(f"{path}: it was replaced, removed or written out while it was read, layer by layer: load it anew")

    def rest(self, header: chunkfile.ChunkHeader) -> Resting | None:
        """As :meth:`ObjectTier.rest`."""
        chunk = self._of(header)
        return None if chunk is None else chunk.rest()

    def loaded(self, keys: Sequence[ChunkKey]) -> None:
        """As :meth:`ObjectTier.loaded`. Of one load the last chunk goes first: what others share with it is in front."""
        shelf = self._shelf
        for key in reversed(keys):
            chunk = shelf.chunks.get(shelf.paths.get(key, ""))
            if chunk is not None and chunk.order is not None:
                chunk.order.touch(chunk)

    def _of(self, header: chunkfile.ChunkHeader) -> _Chunk | None:
        chunk = self._shelf.chunks.get(object_path(header.record.key))
        return chunk if chunk is not None and chunk.header is header else None

    def delete(self, key: ChunkKey) -> None:
        """Remove one chunk, if it is there."""
        with self._shelf.lock:
            chunk = self._shelf.chunks.pop(object_path(key), None)
            self._shelf.paths.pop(key, None)
            self._bucket.delete(object_path(key))
        if chunk is not None:
            chunk.let_go()

    def publish(self, path: str, chunk: _Chunk, overwrite: bool) -> bool:
        """Make a chunk visible; False if one is there and not ``overwrite``."""
        with self._shelf.lock:
            if not overwrite and (path in self._shelf.chunks or self._bucket.exists(path)):
                return False
            before = self._shelf.chunks.get(path)
            self._bucket.delete(path)
            self._shelf.chunks[path] = chunk
            self._shelf.paths[chunk.record.key] = path
        if before is not None:
            before.let_go()
        if chunk.lent:
            self._lent.add(chunk)
        return True

    def list_objects(self) -> Iterator[Entry]:
        """All files below ``objects/``; what rests is written out first."""
        for path in list(self._shelf.chunks):
            with self._shelf.lock:  # of one chunk at a time: those who publish wait
                chunk = self._shelf.chunks.get(path)
                if chunk is None:
                    continue
                self._shelf.written_out = True
                with chunk.borrow() as tensor:
                    self._bucket.stage(chunkfile.encode(chunk.record, tensor).buffers()).publish(path, overwrite=True)
                del self._shelf.chunks[path]
                self._shelf.paths.pop(chunk.record.key, None)
            chunk.let_go()
        return super().list_objects()

    def relieve(self, nbytes: int) -> bool:
        """As :meth:`ObjectTier.relieve`: chunks move to ordinary memory, those first that came or were loaded longest ago, until ``nbytes``
        are on their way."""
        with self._moves_lock:
            while self._moving < nbytes and (chunk := self._lent.pop()) is not None:
                if not chunk.lent:
                    continue
                try:
                    self._movers = self._movers or ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="qcap-rest")
                    self._movers.submit(self._move, chunk)
                except RuntimeError as error:  # no more threads
                    self._lent.add(chunk, last=False)
                    often.warning("chunks stay in the memory that they came in: %s", error)
                    break
                self._moving += chunk.nbytes
            return self._moving > 0

    def _move(self, chunk: _Chunk) -> None:
        try:
            chunk.settle()
        except Exception as error:  # no memory for a copy, say: trying again would keep those waiting who could go beyond their bound
            often.warning("a chunk stays in the memory that it came in: %s: %s", type(error).__name__, error)
            with self._moves_lock:
                self._stuck.append(chunk)
        finally:
            with self._moves_lock:
                self._moving -= chunk.nbytes

    def close(self) -> None:
        """What lies in lent memory moves out of it: who lent it is going to need it. Raises what stood in the way, when all was tried."""
        movers, self._movers = self._movers, None
        if movers is not None:
            movers.shutdown()
        with self._moves_lock:
            lent, self._stuck = self._stuck, []
            while (chunk := self._lent.pop()) is not None:
                lent.append(chunk)
        problem: Exception | None = None
        for chunk in lent:
            try:
                chunk.settle()
            except Exception as error:
                problem = problem or error
                self._stuck.append(chunk)
        if problem is not None:
            raise problem


class _Waiting:
    """A chunk that is not visible yet."""

    def __init__(self, tier: MemoryTier, chunk: _Chunk) -> None:
        self._tier = tier
        self._chunk: _Chunk | None = chunk

    def open(self) -> Reader:
        raise NotImplementedError("a chunk at rest is not read back: it is no file")

    def publish(self, path: str, *, overwrite: bool = False) -> bool:
        if self._chunk is None:
            raise RuntimeError("already published or discarded")
        chunk, self._chunk = self._chunk, None
        done = False
        try:
            done = self._tier.publish(path, chunk, overwrite)
        finally:
            if not done:
                chunk.let_go()
        return done

    def discard(self) -> None:
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            chunk.let_go()
