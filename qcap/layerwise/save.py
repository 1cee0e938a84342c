"""Storing: layer i leaves the device while layer i + 1 computes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from qcap.connectors.streams import Streams
from qcap.errors import ConfigError, ShapeError, StepOrderError
from qcap.layerwise.connector import HostPool, LayerConnector, check_blocks

logger = logging.getLogger("qcap.layerwise")


class LayerSink(Protocol):
    """Takes what a :class:`LayerwiseStore` brings to the host. Exactly one of ``publish`` and ``discard`` ends it.

    A tensor's rows are there only once its event is over (None: they are).
    """

    def put(self, layer: int, tensors: Sequence[torch.Tensor], event: Any) -> None:
        """One layer: ``[planes, CH, H]`` a chunk. Nothing is visible yet."""

    def publish(self, chunks: Sequence[torch.Tensor], event: Any, done: Callable[[int], None]) -> None:
        """All layers have been put.

        Args:
            chunks: ``[planes, L, CH, H]`` each, what the layers were views of.
            event: behind the last layer.
            done: to be called with a chunk's index when its tensor is no longer read; from any thread, for each chunk.
        """

    def discard(self) -> None:
        """Given up: nothing may become visible."""


class LayerwiseStore:
    """One request's store, in named steps: ``begin``, ``layer(0)`` .. ``layer(L - 1)``, ``finish``; ``close`` at any time.

    All steps are called on the engine's thread; none waits for the device. ``layer(i)`` is called when layer i's rows have been queued
    on the compute stream. A failure raises from none of them: it is kept in :attr:`failure`, and nothing is published.

    Args:
        streams, connector, host: as for loads.
        sink: where it goes.
        blocks: block ids of each chunk, ``CH / block_size`` each.
        chunk_size: CH.

    Raises:
        ShapeError: blocks and chunk size do not fit, or there is no such block.
    """

    def __init__(
        self,
        streams: Streams,
        connector: LayerConnector,
        host: HostPool,
        sink: LayerSink,
        blocks: Sequence[Sequence[int]],
        chunk_size: int,
    ) -> None:
        if not getattr(connector, "layerwise", False):
            raise ConfigError(f"{type(connector).__name__} does not move single layers: it has no layerwise=True")
        if any(len(ids) * connector.block_size != chunk_size for ids in blocks):
            raise ShapeError(f"a chunk of {chunk_size} tokens is {chunk_size / connector.block_size:g} blocks, got {[*map(len, blocks)]}")
        for ids in blocks:
            check_blocks(connector, ids)  # a chunk would be published whose rows came from nowhere
        self.failure: Exception | None = None
        self.chunks = 0
        """Chunks that got memory: those that are stored."""
        self._streams, self._connector, self._host, self._sink = streams, connector, host, sink
        self._wanted, self._chunk_size = blocks, chunk_size
        self._buffers: list[torch.Tensor] = []
        self._given: set[int] = set()
        self._state, self._step = "new", 0
        self._event: Any = None
        self._moved = False

    def begin(self) -> int:
        """Take memory for all layers of each chunk; how many chunks got some. The first that gets none is the end, with a warning.

        Raises:
            StepOrderError: called before.
        """
        if self._state != "new":
            raise StepOrderError(f"begin() out of turn: {self._where()}")
        self._state = "begun"
        c = self._connector
        try:
            for _ in self._wanted:
                buffer = self._host.take((c.num_planes, c.num_layers, self._chunk_size, c.hidden), c.dtype)
                if buffer is None:
                    logger.warning("no host memory for %d of %d chunks: they are not stored", len(self._wanted) - len(self._buffers),
                                   len(self._wanted))  # fmt: skip
                    break
                self._buffers.append(buffer)
            self.chunks = len(self._buffers)
            if self.chunks:
                with self._streams.on(self._streams.store):
                    self._blocks = c.prepare([block for ids in self._wanted[: self.chunks] for block in ids])
        except Exception as error:
            self._fail(error)
        return self.chunks

    def layer(self, index: int) -> None:
        """Layer ``index`` has been queued on the compute stream: queue its way to the host, and hand the layer before to the sink.

        Raises:
            StepOrderError: another layer's turn.
        """
        if self._state != "begun" or index != self._step or index >= self._connector.num_layers:
            raise StepOrderError(f"layer({index}) out of turn: {self._where()}")
        self._step += 1
        if not self.chunks:
            return
        before, streams = self._event, self._streams
        try:
            streams.wait(streams.store, streams.record(streams.compute()))
            try:
                with streams.on(streams.store):
                    self._connector.from_device(index, self._blocks, self._views(index))
            finally:
                self._event, self._moved = streams.record(streams.store), True
            if index:
                self._sink.put(index - 1, self._views(index - 1), before)
        except Exception as error:
            self._fail(error)

    def finish(self) -> int:
        """Hand over the last layer and publish; how many chunks were handed over.

        Raises:
            StepOrderError: not all layers have been stepped through.
        """
        last = self._connector.num_layers - 1
        if self._state != "begun" or self._step != last + 1:
            raise StepOrderError(f"finish() out of turn: {self._where()}")
        self._state = "finished"
        self._hold_compute()
        if self.chunks:
            try:
                self._sink.put(last, self._views(last), self._event)
                self._sink.publish(self._buffers, self._event, self._give)
            except Exception as error:
                self._fail(error)
        return self.chunks

    def close(self) -> None:
        """Give up what is not published; memory comes back when the copies into it are over. May be called at any time, and again."""
        if self._state in ("finished", "closed"):
            return
        self._state = "closed"
        self._hold_compute()
        if self.chunks:
            self._end()

    def _views(self, layer: int) -> list[torch.Tensor]:
        return [buffer[:, layer] for buffer in self._buffers]

    def _hold_compute(self) -> None:
        """Pages that are still being read may get new owners in the next step: compute waits for the reads. The host does not."""
        if self._moved:
            self._streams.wait(self._streams.compute(), self._event)

    def _give(self, index: int) -> None:
        if index not in self._given:
            self._given.add(index)
            self._host.give(self._buffers[index], self._event)

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        logger.warning("a store of %d chunks is given up: %s: %s", len(self._buffers), type(error).__name__, error)
        self._end()

    def _end(self) -> None:
        self.chunks = 0
        try:
            self._sink.discard()
        except Exception:
            logger.exception("a sink could not be told that its chunks were given up")
        for index in range(len(self._buffers)):
            self._give(index)

    def _where(self) -> str:
        layers = self._connector.num_layers
        if self._state != "begun":
            return f"the store is {self._state}; the steps are begin, layer(0) .. layer({layers - 1}), finish"
        return f"next is layer({self._step})" if self._step < layers else "next is finish()"
