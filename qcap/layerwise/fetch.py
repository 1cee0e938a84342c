"""One layer of many chunks, from where they are kept into one host buffer, on a few threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Protocol

import torch

from qcap.errors import QcapError, StoreError
from qcap.store.tiers import Backend, LayerReader, Resting
from qcap.tokens import ChunkKey, ChunkRecord


class LayerMissing(StoreError):
    """A chunk was found by its layer 0, and another layer of it is not there."""


class ChunkFailed(QcapError):
    """A layer of one chunk could not be fetched.

    Args:
        chunk: the first that could not, counted in the fetch.
        cause: why.
    """

    def __init__(self, chunk: int, cause: BaseException) -> None:
        super().__init__(f"chunk {chunk}: {type(cause).__name__}: {cause}")
        self.chunk, self.cause = chunk, cause


class LayerFetch(Protocol):
    """Reads layers of a fixed row of chunks."""

    def fetch(self, layer: int, out: torch.Tensor, chunks: int) -> Future[None]:
        """Start reading one layer of the first ``chunks`` chunks.

        Args:
            layer: index of the layer.
            out: ``[planes, chunks * CH, H]``; chunk c goes to ``out[:, c * CH : (c + 1) * CH]``.
            chunks: how many.

        Returns:
            A future that is done when nobody writes to ``out`` any more; it raises :class:`ChunkFailed`.
        """


def after_all(futures: Sequence[Future[None]]) -> Future[None]:
    """Done when all are; raises :class:`ChunkFailed` for the first (in order) that failed."""
    done: Future[None] = Future()
    lock, left = threading.Lock(), len(futures)

    def one(_: Future[None]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        for index, future in enumerate(futures):
            error: BaseException | None = QcapError("cancelled") if future.cancelled() else future.exception()
            if error is not None:
                done.set_exception(ChunkFailed(index, error))
                return
        done.set_result(None)

    if not futures:
        done.set_result(None)
    for future in futures:
        future.add_done_callback(one)
    return done


class ReaderFetch:
    """A :class:`LayerFetch` over one reader a chunk.

    Args:
        readers: in the order of the sequence, chunks of one size.
        chunk_size: CH.
        executor: threads that read; so many chunks are read at once.
    """

    def __init__(self, readers: Sequence[LayerReader], chunk_size: int, executor: Executor) -> None:
        self._readers, self._chunk_size, self._executor = readers, chunk_size, executor

    @torch.inference_mode(False)  # a slice made in inference mode could not be written to by threads that are not in it
    def fetch(self, layer: int, out: torch.Tensor, chunks: int) -> Future[None]:
        """See :class:`LayerFetch`."""
        size = self._chunk_size
        jobs: list[Future[None]] = []
        for index, reader in enumerate(self._readers[:chunks]):
            try:
                jobs.append(self._executor.submit(_read, reader, layer, out[:, index * size : (index + 1) * size]))
            except RuntimeError as error:  # the threads were shut down; jobs before this one may be writing to out
                failed: Future[None] = Future()
                failed.set_exception(error)
                jobs.append(failed)
                break
        return after_all(jobs)


def _read(reader: LayerReader, layer: int, out: torch.Tensor) -> None:
    reader.read(layer, out)


class LazyReader:
    """A :class:`~qcap.store.tiers.LayerReader` that opens its object with the first layer, on the thread that reads it.

    Args:
        backend: where the object is.
        key: its key.
        check: called once with the record; raises if it is not what was expected.
    """

    def __init__(self, backend: Backend, key: ChunkKey, check: Callable[[ChunkRecord], None] | None = None) -> None:
        self._backend, self._key, self._check = backend, key, check
        self._lock = threading.Lock()
        self._reader: LayerReader | None = None

    @property
    def record(self) -> ChunkRecord:
        """The header. Raises :class:`LayerMissing` if the object is gone, and as :meth:`Backend.open_layers`."""
        return self._open().record

    def read(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """See :class:`~qcap.store.tiers.LayerReader`. Raises :class:`LayerMissing` too."""
        return self._open().read(layer, out)

    def rest(self) -> Resting | None:
        """See :class:`~qcap.store.tiers.LayerReader`. Raises :class:`LayerMissing` too."""
        return self._open().rest()

    def _open(self) -> LayerReader:
        with self._lock:
            if self._reader is None:
                reader = self._backend.open_layers(self._key)
                if reader is None:
                    raise LayerMissing(f"{self._key} is no longer in the store")
                if self._check is not None:
                    self._check(reader.record)
                self._reader = reader
            return self._reader


def open_readers(
    backend: Backend, keys: Sequence[ChunkKey], executor: Executor, check: Callable[[int, ChunkRecord], None]
) -> list[LayerReader]:
    """Readers of all ``keys``, headers read at once on ``executor``'s threads and each given to ``check(index, record)``.

    Raises:
        ChunkFailed: the first that is missing, is corrupt, or that ``check`` refuses.
    """
    readers = [LazyReader(backend, key, lambda record, i=i: check(i, record)) for i, key in enumerate(keys)]  # type: ignore[misc]
    jobs: list[Future[None]] = [executor.submit(_touch, reader) for reader in readers]
    after_all(jobs).result()
    return list(readers)


def _touch(reader: LazyReader) -> None:
    _ = reader.record
