"""Where single layers are kept: in memory, or as byte ranges of a backend's objects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Protocol

import torch

from qcap.layerwise.fetch import LayerFetch, LayerMissing, LazyReader, ReaderFetch, after_all
from qcap.layerwise.save import LayerSink
from qcap.store.tiers import Backend, StoreOutcome
from qcap.tokens import ChunkKey, ChunkRecord, LayerKey


class LayerStore(Protocol):
    """Layers by key. Any thread."""

    local: frozenset[str]
    """Locations that a frozen engine may still read from."""

    def contains(self, keys: Sequence[LayerKey]) -> list[bool]:
        """For each key, whether it is there. Raises ``StoreUnavailable``."""

    def location(self, key: LayerKey) -> str:
        """Where a layer that is there lies, by name."""

    def reader(self, chunks: Sequence[ChunkKey]) -> LayerFetch:
        """To fetch these chunks layer by layer, one future a layer; for one load, so that no two versions of an object mix."""

    def writer(self, records: Sequence[ChunkRecord]) -> LayerSink:
        """To put these chunks layer by layer."""


def layer_major(chunks: Sequence[ChunkKey], num_layers: int) -> list[tuple[LayerKey, ...]]:
    """Keys by layer, then by chunk: ``keys[layer][chunk]``."""
    return list(zip(*(key.split_layers(num_layers) for key in chunks), strict=True))


class MemoryLayers:
    """Single layers in this process's memory.

    Args:
        num_layers: L.
        executor: threads to copy on; None copies when asked.
        name: what :meth:`location` says.
    """

    def __init__(self, num_layers: int, executor: Executor | None = None, name: str = "memory") -> None:
        self.num_layers, self.name, self.local = num_layers, name, frozenset({name})
        self._executor = executor
        self._lock = threading.Lock()
        self._layers: dict[LayerKey, torch.Tensor] = {}
        self._late: list[tuple[Any, Callable[[], None]]] = []  # published while their copies were running

    def contains(self, keys: Sequence[LayerKey]) -> list[bool]:
        """See :class:`LayerStore`."""
        self.poll()
        with self._lock:
            return [key in self._layers for key in keys]

    def location(self, key: LayerKey) -> str:
        """This store's name."""
        return self.name

    def remove(self, key: LayerKey) -> None:
        """Forget one layer."""
        with self._lock:
            self._layers.pop(key, None)

    def put(self, key: LayerKey, layer: torch.Tensor) -> None:
        """Keep a copy of one layer ``[planes, CH, H]``."""
        copy = layer.clone()
        with self._lock:
            self._layers[key] = copy

    def get(self, key: LayerKey, out: torch.Tensor) -> None:
        """Copy one layer to ``out``. Raises :class:`LayerMissing`."""
        self.poll()
        with self._lock:
            layer = self._layers.get(key)
        if layer is None:
            raise LayerMissing(f"{key} is not in {self.name}")
        out.copy_(layer)

    def reader(self, chunks: Sequence[ChunkKey]) -> LayerFetch:
        """See :class:`LayerStore`."""
        return _MemoryFetch(self, layer_major(chunks, self.num_layers), self._executor)

    def writer(self, records: Sequence[ChunkRecord]) -> LayerSink:
        """See :class:`LayerStore`."""
        return _MemorySink(self, layer_major([record.key for record in records], self.num_layers))

    def when(self, event: Any, call: Callable[[], None]) -> None:
        """``call()`` once ``event`` is over: now, or at a later :meth:`poll`."""
        with self._lock:
            self._late.append((event, call))
        self.poll()

    def poll(self) -> None:
        """Make visible what has reached the host."""
        with self._lock:
            ready = [call for event, call in self._late if event is None or event.query()]
            self._late = [(event, call) for event, call in self._late if call not in ready]
        for call in ready:
            call()


class _MemoryFetch:
    def __init__(self, store: MemoryLayers, keys: list[tuple[LayerKey, ...]], executor: Executor | None) -> None:
        self._store, self._keys, self._executor = store, keys, executor

    @torch.inference_mode(False)  # a slice made in inference mode could not be written to by threads that are not in it
    def fetch(self, layer: int, out: torch.Tensor, chunks: int) -> Future[None]:
        keys = self._keys[layer][:chunks]
        size = out.shape[1] // max(chunks, 1)
        return after_all([self._get(key, out[:, i * size : (i + 1) * size]) for i, key in enumerate(keys)])

    def _get(self, key: LayerKey, out: torch.Tensor) -> Future[None]:
        if self._executor is not None:
            return self._executor.submit(self._store.get, key, out)
        future: Future[None] = Future()
        try:
            self._store.get(key, out)
            future.set_result(None)
        except LayerMissing as error:
            future.set_exception(error)
        return future


class _MemorySink:
    """Layers that were put are kept by reference until they are published, then copied."""

    def __init__(self, store: MemoryLayers, keys: list[tuple[LayerKey, ...]]) -> None:
        self._store, self._keys = store, keys
        self._put: dict[LayerKey, torch.Tensor] = {}

    def put(self, layer: int, tensors: Sequence[torch.Tensor], event: Any) -> None:
        self._put.update(zip(self._keys[layer], tensors, strict=False))  # fewer tensors than keys: the rest got no memory

    def publish(self, chunks: Sequence[torch.Tensor], event: Any, done: Callable[[int], None]) -> None:
        def copy() -> None:
            for key, tensor in reversed(list(self._put.items())):  # layer 0, which says that a chunk is there, comes last
                self._store.put(key, tensor)
            self._put.clear()
            for index in range(len(chunks)):
                done(index)

        self._store.when(event, copy)

    def discard(self) -> None:
        self._put.clear()


class BackendLayers:
    """A backend's objects, read layer by layer and written whole.

    Args:
        backend: where the objects are.
        executor: threads that read.
        overwrite: replace what is there (only edits may).
    """

    LOCATION = "store"

    def __init__(self, backend: Backend, executor: Executor, *, overwrite: bool = False) -> None:
        self.backend, self._executor, self._overwrite = backend, executor, overwrite
        self.local = frozenset({self.LOCATION}) if backend.cheap_contains else frozenset[str]()

    def contains(self, keys: Sequence[LayerKey]) -> list[bool]:
        """See :class:`LayerStore`. An object has all of its layers."""
        return self.backend.contains([key.chunk for key in keys])

    def location(self, key: LayerKey) -> str:
        """A backend is one place."""
        return self.LOCATION

    def reader(self, chunks: Sequence[ChunkKey]) -> LayerFetch:
        """See :class:`LayerStore`."""
        return _BackendFetch([LazyReader(self.backend, key) for key in chunks], self._executor)

    def writer(self, records: Sequence[ChunkRecord]) -> LayerSink:
        """See :class:`LayerStore`."""
        return _BackendSink(self.backend, records, self._overwrite)


class _BackendFetch:
    def __init__(self, readers: list[LazyReader], executor: Executor) -> None:
        self._readers, self._executor = readers, executor

    def fetch(self, layer: int, out: torch.Tensor, chunks: int) -> Future[None]:
        return ReaderFetch(self._readers, out.shape[1] // max(chunks, 1), self._executor).fetch(layer, out, chunks)


class _BackendSink:
    """One object a chunk, queued when its last layer was put; the backend's writer waits for the event."""

    def __init__(self, backend: Backend, records: Sequence[ChunkRecord], overwrite: bool) -> None:
        self._backend, self._records, self._overwrite = backend, records, overwrite

    def put(self, layer: int, tensors: Sequence[torch.Tensor], event: Any) -> None:
        """Nothing: an object becomes visible whole."""

    def publish(self, chunks: Sequence[torch.Tensor], event: Any, done: Callable[[int], None]) -> None:
        for index, (record, chunk) in enumerate(zip(self._records, chunks, strict=False)):

            def ended(_: Future[StoreOutcome], index: int = index) -> None:
                done(index)

            self._backend.store(record, chunk, event, overwrite=self._overwrite).add_done_callback(ended)

    def discard(self) -> None:
        """Nothing was given to the backend."""
