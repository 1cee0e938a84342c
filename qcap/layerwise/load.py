"""Loading: layer i goes into the pages while the layers before it compute, and layer i + 1 is being fetched."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import torch

from qcap.connectors.streams import Streams
from qcap.errors import ConfigError, QcapError, ShapeError, StepOrderError
from qcap.layerwise.connector import HostPool, LayerConnector, check_blocks
from qcap.layerwise.fetch import ChunkFailed, LayerFetch

logger = logging.getLogger("qcap.layerwise")

MEMORY_PATIENCE_S = 2.0
"""How long a load with nothing in flight waits for other loads to give host memory back, before it gives up."""
_PAUSE_S = 0.0002


@dataclass(frozen=True)
class Span:
    """Positions ``[start, end)`` of a sequence of ``total`` tokens, to be filled from chunks of ``chunk_size`` tokens.

    The chunks are those that hold ``start`` and ``end - 1`` and all between; they lie side by side in a *slab* from :attr:`slab_start` on.
    """

    total: int
    start: int
    end: int
    chunk_size: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end <= self.total or self.chunk_size <= 0:
            raise ConfigError(f"positions {self.start}..{self.end} of {self.total} in chunks of {self.chunk_size} cannot be")

    @property
    def slab_start(self) -> int:
        """Position of the first chunk's first token."""
        return self.start // self.chunk_size * self.chunk_size

    @property
    def chunks(self) -> int:
        """How many chunks; 0 if there is nothing to fill."""
        return 0 if self.start == self.end else -(-(self.end - self.slab_start) // self.chunk_size)

    @property
    def first_chunk(self) -> int:
        """Index of the first chunk in its sequence."""
        return self.slab_start // self.chunk_size


class LoadBatch:
    """The loads of one step. They share the load stream, so the event behind the last copy of layer i is behind all copies of layer i."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while copies are queued, so that events are kept in the order of the stream
        self.queued: dict[int, Any] = {}


@dataclass(frozen=True)
class LoadGear:
    """What the loads of an engine share.

    Args:
        streams: of the device.
        connector: to its pages.
        host: memory for fetched layers.
        loader: a thread that waits for fetches and queues copies, so that the forward pass does neither; None does it in
            :meth:`LayerwiseLoad.layer`. With one thread the layers of a batch go in order, layer by layer over all of its loads.
        ahead: layers fetched beyond the one that is being moved.
        timeout_s: how long the forward pass waits for one layer before the load is given up; None for ever.
    """

    streams: Streams
    connector: LayerConnector
    host: HostPool
    loader: Executor | None = None
    ahead: int = 1
    timeout_s: float | None = 60.0

    def __post_init__(self) -> None:
        if not getattr(self.connector, "layerwise", False):
            raise ConfigError(f"{type(self.connector).__name__} does not move single layers: it has no layerwise=True")
        if self.ahead < 0:
            raise ConfigError(f"ahead must be 0 or more, got {self.ahead}")


@dataclass
class _Flight:
    """Layers of one load on their way."""

    fetches: dict[int, tuple[torch.Tensor, Future[None]]] = field(default_factory=dict)
    next_fetch: int = 0
    moved: int = 0  # layers whose copies are queued
    last: Any = None  # event behind the last copy, if any was queued
    copies: list[Any] = field(default_factory=list)  # events of copies that may still run


class LayerwiseLoad:
    """One request's load, in named steps: ``begin``, ``layer(0)`` .. ``layer(L - 1)``, ``finish``; ``close`` at any time.

    All steps are called on the engine's thread. A failure (store gone, wrong checksum, a layer missing, no memory, too slow) raises from
    none of them: it is kept in :attr:`failure`, nothing more is loaded, and :attr:`invalid` says which positions must be computed.

    Args:
        gear: what loads share.
        fetch: of the span's chunks. May be None where the span is empty.
        blocks: block ids of positions ``[start, end)``.
        span: which positions of which sequence. ``start`` and ``end`` are multiples of the block size.
        batch: of this step; a load by itself needs none.
        last: of its batch: it makes the compute stream wait for each layer, for the whole batch.
        keep_prefix: a chunk that fails ends the load before it instead of ending it whole.

    Raises:
        ShapeError: blocks and span do not fit, or there is no such block.
    """

    def __init__(
        self,
        gear: LoadGear,
        fetch: LayerFetch | None,
        blocks: Sequence[int],
        span: Span,
        *,
        batch: LoadBatch | None = None,
        last: bool = True,
        keep_prefix: bool = False,
    ) -> None:
        n = gear.connector.block_size
        if span.start % n or span.end % n or span.chunk_size % n or len(blocks) != (span.end - span.start) // n:
            raise ShapeError(
                f"positions {span.start}..{span.end} in chunks of {span.chunk_size} are {(span.end - span.start) / n:g} blocks of {n}, "
                f"got {len(blocks)}"
            )
        check_blocks(gear.connector, blocks)  # the mask would call rows loaded that went nowhere
        self.gear, self.span = gear, span
        self.failure: Exception | None = None
        self._fetch, self._batch, self._last, self._keep_prefix = fetch, batch or LoadBatch(), last, keep_prefix
        after = span.slab_start + span.chunks * span.chunk_size - span.end if span.chunks else 0
        before = (span.start - span.slab_start) // n if span.chunks else 0
        self._ids = [-1] * before + list(blocks) + [-1] * (after // n)
        self._chunks = span.chunks  # less, once the load was cut
        self._step = -1
        self._state = "new"
        self._change = threading.Condition()
        self._flight = _Flight()
        self._hungry_since: float | None = None

    # -- the steps

    def begin(self) -> int:
        """Start fetching layer 0; how many tokens are going to be loaded.

        Raises:
            StepOrderError: called before.
        """
        self._expect("new", "begin()")
        self._state, self._step = "begun", 0
        if self._chunks:
            try:
                streams = self.gear.streams
                # Blocks that this step was given may still be read or written by steps before it.
                streams.wait(streams.load, streams.record(streams.compute()))
                with streams.on(streams.load):
                    self._blocks = self.gear.connector.prepare(self._ids)
                self._start_fetches(0)
                if self.gear.loader is not None:
                    self.gear.loader.submit(self._run, 0)
            except Exception as error:
                self._fail(error)
        return self.span.end - self.span.start

    def layer(self, index: int) -> None:
        """Layer ``index`` is about to be computed: its copies are queued when this returns, and the compute stream waits for them.

        Raises:
            StepOrderError: another layer's turn.
        """
        if self._state != "begun" or index != self._step or index >= self.gear.connector.num_layers:
            raise StepOrderError(f"layer({index}) out of turn: {self._where()}")
        self._step += 1
        if self._chunks and not self._stopped():
            if self.gear.loader is None:
                self._try_move(index)
            else:
                with self._change:
                    if not self._change.wait_for(lambda: self._flight.moved > index or self._stopped(), self.gear.timeout_s):
                        self._fail(TimeoutError(f"layer {index} did not come within {self.gear.timeout_s} s"))
        if self._last:
            with self._batch.lock:
                queued = index in self._batch.queued
                event = self._batch.queued.get(index)
            if queued:
                self.gear.streams.wait(self.gear.streams.compute(), event)

    def finish(self) -> torch.Tensor:
        """All layers have been stepped through: the mask ``[total]`` (bool) of the tokens that were loaded.

        Raises:
            StepOrderError: not all layers have.
        """
        if self._state != "begun" or self._step != self.gear.connector.num_layers:
            raise StepOrderError(f"finish() out of turn: {self._where()}")
        self._stop("finished")
        mask = torch.zeros(self.span.total, dtype=torch.bool)
        mask[self.span.start : self.valid_end] = True
        return mask

    def close(self) -> None:
        """Give up what is not done. Host memory comes back when what reads or writes it is over. May be called at any time, and again."""
        if self._state not in ("finished", "closed"):
            self._stop("closed")

    @property
    def valid_end(self) -> int:
        """Positions ``[start, valid_end)`` are loaded, or will be if nothing fails any more."""
        if self.failure is not None and not (self._keep_prefix and self._chunks):
            return self.span.start
        return min(self.span.end, max(self.span.start, self.span.slab_start + self._chunks * self.span.chunk_size))

    @property
    def invalid(self) -> range:
        """Positions that were to be loaded and are not."""
        return range(self.valid_end, self.span.end)

    # -- order

    def _where(self) -> str:
        layers = self.gear.connector.num_layers
        if self._state != "begun":
            return f"the load is {self._state}; the steps are begin, layer(0) .. layer({layers - 1}), finish"
        return f"next is layer({self._step})" if self._step < layers else "next is finish()"

    def _expect(self, state: str, call: str) -> None:
        if self._state != state:
            raise StepOrderError(f"{call} out of turn: {self._where()}")

    def _stopped(self) -> bool:
        return self._state in ("finished", "closed") or (self.failure is not None and not self._chunks)

    def _fail(self, error: Exception, chunks: int = 0) -> None:
        """Keep the first failure; go on with the first ``chunks`` chunks only."""
        with self._change:
            if self._state in ("finished", "closed"):
                return
            if self.failure is None:
                self.failure = error
                logger.debug("a load of %d tokens ends early: %s", self.span.end - self.span.start, error)
            self._chunks = min(self._chunks, chunks)
            if not self._chunks:
                self._drop_fetches()
            self._change.notify_all()

    def _stop(self, state: str) -> None:
        """Nothing is queued after this. What was queued and not waited for, the compute stream waits for: its pages may get new owners."""
        with self._batch.lock, self._change:
            incomplete = self._step < self.gear.connector.num_layers or self.failure is not None
            self._state = state
            self._drop_fetches()
            self._change.notify_all()
        if incomplete and self._flight.last is not None:
            self.gear.streams.wait(self.gear.streams.compute(), self._flight.last)

    def _drop_fetches(self) -> None:
        """Buffers of layers that will not be moved, back when their readers are done. Called with ``_change`` held."""
        dropped, self._flight.fetches = self._flight.fetches, {}
        for buffer, future in dropped.values():
            future.add_done_callback(lambda _, buffer=buffer: self.gear.host.give(buffer))  # type: ignore[misc]

    # -- fetching and moving: on the loader's thread, or the engine's if there is none

    def _start_fetches(self, until: int) -> None:
        """Start fetching layers up to ``until``, as far as there is memory."""
        connector, flight = self.gear.connector, self._flight
        assert self._fetch is not None
        while flight.next_fetch <= min(until, connector.num_layers - 1):
            chunks = self._chunks
            if self._stopped() or not chunks:
                return
            shape = (connector.num_planes, chunks * self.span.chunk_size, connector.hidden)
            buffer = self.gear.host.take(shape, connector.dtype)
            if buffer is None:
                return
            with self._change:
                if self._stopped():
                    self.gear.host.give(buffer)
                    return
                try:
                    future = self._fetch.fetch(flight.next_fetch, buffer, chunks)
                except BaseException:
                    self.gear.host.give(buffer)
                    raise
                flight.fetches[flight.next_fetch] = (buffer, future)
                flight.next_fetch += 1

    def _fetching(self, layer: int) -> bool:
        """Whether ``layer`` is being fetched; False if there is no memory now, but there will be.

        Raises:
            QcapError: nothing of this load is in flight, and nobody else gives memory back.
        """
        flight = self._flight
        self._start_fetches(layer + self.gear.ahead)
        if flight.next_fetch > layer or self._stopped():
            self._hungry_since = None
            return True
        flight.copies = [event for event in flight.copies if event is not None and not event.query()]
        now = time.monotonic()
        self._hungry_since = now if self._hungry_since is None else self._hungry_since
        patience = 0.0 if self.gear.loader is None else MEMORY_PATIENCE_S
        if not flight.copies and now - self._hungry_since >= patience:
            if self.gear.loader is None:
                self._start_fetches(layer)  # the last copy may have ended between the two looks
                if flight.next_fetch > layer:
                    return True
            raise QcapError(
                f"no host memory for layer {layer}: {self._chunks * self.span.chunk_size} tokens of it do not fit in the pool beside what "
                "is in use"
            )
        return False

    def _run(self, layer: int) -> None:
        """The loader's job for one layer; it queues the next itself, behind those of the other loads."""
        try:
            if self._stopped() or self.gear.loader is None:
                return
            if not self._fetching(layer):
                time.sleep(_PAUSE_S)
                self.gear.loader.submit(self._run, layer)
                return
            self._move(layer)
            if layer + 1 < self.gear.connector.num_layers and not self._stopped():
                self.gear.loader.submit(self._run, layer + 1)
        except Exception as error:  # whatever a store, a device or a thread that was shut down can raise
            self._fail(error)

    def _try_move(self, layer: int) -> None:
        try:
            while not self._fetching(layer):
                time.sleep(_PAUSE_S)
            self._move(layer)
        except Exception as error:
            self._fail(error)

    def _move(self, layer: int) -> None:
        """Wait for the fetch, then queue the layer's copies."""
        with self._change:
            entry = self._flight.fetches.get(layer)
        if entry is None:
            return
        try:
            entry[1].result(self.gear.timeout_s)
        except ChunkFailed as error:
            if error.chunk < self._chunks:
                self._fail(error, error.chunk if self._keep_prefix else 0)
        streams, connector, flight = self.gear.streams, self.gear.connector, self._flight
        with self._batch.lock:
            with self._change:  # from here on the buffer is this thread's, unless the load was stopped and it is on its way back
                mine = flight.fetches.pop(layer, None)
            if mine is None:
                return
            buffer, tokens = mine[0], self._chunks * self.span.chunk_size
            try:
                with streams.on(streams.load):
                    connector.to_device(layer, buffer[:, :tokens], self._blocks[: tokens // connector.block_size])
            finally:
                event = streams.record(streams.load)  # if there is none to be had, the buffer stays lent: who knows what still reads it
                self._batch.queued[layer] = flight.last = event
                flight.copies.append(event)
                self.gear.host.give(buffer, event)  # the pool keeps it until the copy is over
        with self._change:
            flight.moved = layer + 1
            self._change.notify_all()
