"""``memory://``: chunks that never leave the process rest as tensors, and become files only if someone asks for their bytes.

A chunk that an engine captured is copied once, outside the interpreter's lock, and that is all: no header, no checksums. They would cost
the engine's own Python thread milliseconds a chunk, and guard against nothing, since the bytes are on no medium and on no wire. Loads copy
the tensor back. Whatever needs the file (``ls``, ``verify``, export, a listing) makes it then, checksums and all, and from then on the
chunk is an object like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qcap._version import __version__
from qcap.store import chunkfile
from qcap.store.buckets import Entry, Reader, memory_bucket
from qcap.store.objects import LayerReplaced, ObjectTier, PreparedChunk, object_path
from qcap.store.tiers import LoadedChunk
from qcap.tokens import ChunkKey, ChunkRecord


@dataclass(frozen=True, eq=False)
class _Resting:
    """A published chunk as a tensor ``[planes, L, CH, H]``; ``header`` has no checksums and stands for this very chunk."""

    record: ChunkRecord
    tensor: torch.Tensor
    header: chunkfile.ChunkHeader


def forget(name: str) -> None:
    """Let go of every chunk that rests under ``memory://name``."""
    with _shelves_lock:
        shelf = _shelves.get(name)
    if shelf is not None:
        with shelf.lock:
            shelf.chunks.clear()


class _Shelf:
    """The resting chunks of one name, by path."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.chunks: dict[str, _Resting] = {}


_shelves: dict[str, _Shelf] = {}
_shelves_lock = threading.Lock()


class MemoryTier(ObjectTier):
    """The object tier ``memory://name``. All openers of one name in this process share it."""

    def __init__(self, name: str) -> None:
        with _shelves_lock:
            self._shelf = _shelves.setdefault(name, _Shelf())
        self._bucket = memory_bucket(name)
        super().__init__(self._bucket, f"memory://{name}")

    def exists(self, key: ChunkKey) -> bool:
        """Whether a chunk is published under ``key``."""
        path = object_path(key)
        if path in self._shelf.chunks or self._bucket.exists(path):
            return True
        with self._shelf.lock:  # it may have moved from one to the other between the two looks
            return path in self._shelf.chunks or self._bucket.exists(path)

    def prepare(self, record: ChunkRecord, tensor: torch.Tensor) -> PreparedChunk:
        """Copy one chunk. Raises as :meth:`ObjectTier.prepare`."""
        chunkfile.check_chunk(record, tensor)
        own = chunkfile.copy_chunk(tensor)
        layers = own.shape[1]
        header = chunkfile.ChunkHeader(record, 0, own.nbytes // layers, ("",) * layers, __version__)
        return PreparedChunk(object_path(record.key), own.nbytes, _Waiting(self, _Resting(record, own, header)))

    def load_path(self, path: str, *, verify: bool = True) -> LoadedChunk | None:
        """As :meth:`ObjectTier.load_path`."""
        resting = self._shelf.chunks.get(path)
        if resting is None:
            loaded = super().load_path(path, verify=verify)
            if loaded is not None:
                return loaded
            with self._shelf.lock:  # as in `exists`
                resting = self._shelf.chunks.get(path)
                if resting is None:
                    return super().load_path(path, verify=verify)
        return LoadedChunk(resting.record, chunkfile.copy_chunk(resting.tensor))

    def header(self, key: ChunkKey) -> chunkfile.ChunkHeader | None:
        """The header of one chunk; one that rests has no checksums in it."""
        path = object_path(key)
        resting = self._shelf.chunks.get(path)
        if resting is None:
            header = super().header(key)
            if header is not None:
                return header
            with self._shelf.lock:  # as in `exists`
                resting = self._shelf.chunks.get(path)
                if resting is None:
                    return super().header(key)
        return resting.header

    def read_layer(self, header: chunkfile.ChunkHeader, layer: int, out: torch.Tensor) -> None:
        """As :meth:`ObjectTier.read_layer`."""
        path = object_path(header.record.key)
        resting = self._shelf.chunks.get(path)
        if resting is not None and resting.header is header:
            if not 0 <= layer < resting.tensor.shape[1]:
                raise IndexError(f"layer {layer} of {resting.tensor.shape[1]}")
            chunkfile.copy_layer(header, resting.tensor[:, layer], out)
        elif header.layer_checksums[0]:
            super().read_layer(header, layer, out)
        else:
            raise LayerReplaced(f"{path}: it was replaced, removed or written out while it was read, layer by layer: load it anew")

    def delete(self, key: ChunkKey) -> None:
        """Remove one chunk, if it is there."""
        with self._shelf.lock:
            self._shelf.chunks.pop(object_path(key), None)
            self._bucket.delete(object_path(key))

    def publish(self, path: str, resting: _Resting, overwrite: bool) -> bool:
        """Make a chunk visible; False if one is there and not ``overwrite``."""
        with self._shelf.lock:
            if not overwrite and (path in self._shelf.chunks or self._bucket.exists(path)):
                return False
            self._shelf.chunks[path] = resting
            self._bucket.delete(path)
            return True

    def list_objects(self) -> Iterator[Entry]:
        """All files below ``objects/``; what rests is written out first."""
        for path in list(self._shelf.chunks):
            with self._shelf.lock:  # of one chunk at a time: those who publish wait
                resting = self._shelf.chunks.get(path)
                if resting is not None:
                    self._bucket.stage(chunkfile.encode(resting.record, resting.tensor).buffers()).publish(path, overwrite=True)
                    del self._shelf.chunks[path]
        return super().list_objects()


class _Waiting:
    """A copied chunk that is not visible yet."""

    def __init__(self, tier: MemoryTier, resting: _Resting) -> None:
        self._tier = tier
        self._resting: _Resting | None = resting

    def open(self) -> Reader:
        raise NotImplementedError("a chunk at rest is not read back: it is no file")

    def publish(self, path: str, *, overwrite: bool = False) -> bool:
        if self._resting is None:
            raise RuntimeError("already published or discarded")
        resting, self._resting = self._resting, None
        return self._tier.publish(path, resting, overwrite)

    def discard(self) -> None:
        self._resting = None
