"""Loads of chunks that lie in page-locked memory of this process: they are copied from where they lie. Nothing is fetched, no host memory
is taken, no thread is used, and the engine's thread waits for nothing.

A layer goes in parts, each through one of two staging buffers on the device in turn, so that the copy into one runs beside the scatter out
of the other::

    load stream     wait until the buffer was scattered | copies into it, one a run of neighbouring chunks and plane | event
    pages stream    wait for that event | scatter to the pages | event: the buffer may be written again
    compute         before layer i: waits for the event behind its last scatter
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qcap.errors import ConfigError, ShapeError, StepOrderError
from qcap.layerwise.connector import LayerConnector
from qcap.layerwise.streams import Streams
from qcap.store.tiers import Lease, Resting

logger = logging.getLogger("qcap.layerwise")

_PAUSE_S = 0.0005
_Piece = tuple[torch.Tensor, int, int]
"""Tokens ``[first, last)`` of a run ``[planes, L, T, H]``."""


@dataclass(frozen=True)
class RestingSpan:
    """One load.

    Args:
        chunks: in the order of the sequence, of one shape ``[planes, L, CH, H]``.
        skip: tokens at the beginning of the first chunk that are not loaded.
        blocks: block ids of the tokens behind them; what is left of the last chunk is not loaded either.
    """

    chunks: Sequence[Resting]
    skip: int
    blocks: Sequence[int]


def merged(chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Chunks ``[planes, L, CH, H]`` as runs ``[planes, L, T, H]``: those that follow each other along the token axis in memory are one."""
    runs: list[torch.Tensor] = []
    tokens = behind = storage = 0
    strides: tuple[int, ...] = ()

    def close() -> None:
        if tokens > runs[-1].shape[2]:
            planes, layers, _, hidden = runs[-1].shape
            runs[-1] = runs[-1].as_strided((planes, layers, tokens, hidden), strides)

    for chunk in chunks:
        here, its_strides, its_storage = chunk.data_ptr(), chunk.stride(), chunk.untyped_storage().data_ptr()
        if runs and here == behind and its_strides == strides and its_storage == storage:
            tokens += chunk.shape[2]
        else:
            if runs:
                close()
            runs.append(chunk)
            tokens, strides, storage = chunk.shape[2], its_strides, its_storage
        behind = here + chunk.shape[2] * its_strides[2] * chunk.element_size()
    if runs:
        close()
    return runs


class RestingPipe:
    """The loads of a step, all together: ``begin``, ``layer(0)`` .. ``layer(L - 1)``, ``end``. Made once for an engine's pages.

    The steps are called on the engine's thread; none waits for the device. A failure of the device raises from none of them: it is kept
    in :attr:`failure`, nothing more is queued, and none of the step's loads counts.

    Leases are released when the copies out of their memory are over on the device, seen at any later step or :meth:`poll`.

    Args:
        streams, connector: of the pages.
        staging_tokens: tokens that one of the two buffers holds, rounded down to whole blocks, at least one. They are made here.
        ahead: layers queued beyond the one that is about to be computed.

    Raises:
        ConfigError: ``ahead`` is negative.
    """

    def __init__(self, streams: Streams, connector: LayerConnector, *, staging_tokens: int, ahead: int = 2) -> None:
        if ahead < 0:
            raise ConfigError(f"ahead must be 0 or more, got {ahead}")
        self.failure: Exception | None = None
        self._streams, self._connector, self._ahead = streams, connector, ahead
        self._tokens = max(staging_tokens // connector.block_size, 1) * connector.block_size
        self._slots = [_Slot(connector.new_staging(self._tokens)) for _ in range(2)]
        self._turn = 0
        self._events: list[Any] = [None] * (ahead + 1)  # behind a layer's scatters; compute waits for it before it is used again
        self._before: Any = None  # behind what compute was given before the step
        self._parts: list[_Part] = []
        self._leases: list[Lease] = []
        self._touched = False  # whether copies of this step were queued
        self._queued = self._waited = 0  # layers
        self._late: list[tuple[Any, list[Lease]]] = []
        self._lock = threading.Lock()  # over `_late`: who is short of memory polls from other threads

    @property
    def nbytes(self) -> int:
        """Of the two buffers."""
        return sum(slot.buffer.nbytes for slot in self._slots)

    @property
    def leases_held(self) -> int:
        """How many have not been released."""
        with self._lock:
            return len(self._leases) + sum(len(leases) for _, leases in self._late)

    # -- the steps

    @torch.inference_mode()  # once a step and layer rather than once a copy
    def begin(self, spans: Sequence[RestingSpan]) -> None:
        """Queue the first layers of all loads of a step. The leases are the pipe's from here on.

        Raises:
            StepOrderError: another step has not ended.
        """
        if self._parts or self._leases:
            raise StepOrderError("begin() out of turn: another step's loads are under way; the steps are begin, layer(0) .., end")
        self.poll()
        self.failure, self._touched, self._queued, self._waited = None, False, 0, 0
        self._leases = [chunk.lease for span in spans for chunk in span.chunks]
        streams = self._streams
        try:
            parts = _cut([piece for span in spans for piece in self._pieces(span)], self._tokens)
            self._before = streams.record(streams.compute(), self._before)
            # Blocks that this step was given may still be read or written by steps before it. Staging and chunks are not.
            streams.wait(streams.pages, self._before)
            with streams.on(streams.pages):
                blocks = self._connector.prepare([block for span in spans for block in span.blocks])
            first, n = 0, self._connector.block_size
            for pieces in parts:
                count = sum(end - start for _, start, end in pieces) // n
                self._parts.append(_Part(self._connector, pieces, blocks[first : first + count]))
                first += count
            for layer in range(min(self._ahead + 1, self._connector.num_layers)):
                self._queue(layer)
        except Exception as error:
            self._fail(error)

    @torch.inference_mode()
    def layer(self, index: int) -> None:
        """Layer ``index`` is about to be computed: the compute stream waits for it, and one more layer is queued. Nothing if there are no
        loads, or they failed.

        Raises:
            StepOrderError: another layer's turn.
        """
        if not self._parts:
            return
        if index != self._waited or index >= self._connector.num_layers:
            raise StepOrderError(f"layer({index}) out of turn: next is layer({self._waited})")
        try:
            self._streams.wait(self._streams.compute(), self._events[index % len(self._events)])
            self._waited += 1
            if self._queued < self._connector.num_layers:
                self._queue(self._queued)
        except Exception as error:
            self._fail(error)

    def end(self) -> None:
        """Nothing more is queued. What was queued and not waited for, compute waits for: its pages may get new owners. Twice is fine."""
        self._parts = []
        try:
            if self._waited < self._queued:
                self._streams.wait(self._streams.compute(), self._events[(self._queued - 1) % len(self._events)])
        except Exception as error:
            self.failure = self.failure or error
        self._waited = self._queued
        self._let_go()
        self.poll()

    def close(self) -> None:
        """Give up what is under way, and wait until no memory of others is read any more. Twice is fine."""
        self.end()
        while self._release(closing=True):
            time.sleep(_PAUSE_S)

    def poll(self) -> bool:
        """Release the leases of copies that are over; whether some are not. Any thread."""
        return bool(self._late) and self._release(closing=False)

    # -- queueing

    def _queue(self, layer: int) -> None:
        streams, connector = self._streams, self._connector
        try:
            for part in self._parts:
                slot = self._slots[self._turn]
                sources = part.sources
                targets, staged = part.places(self._turn, slot.buffer)
                self._turn = 1 - self._turn
                self._touched = True
                try:
                    with streams.on(streams.load):
                        if slot.free is not None:
                            streams.wait(streams.load, slot.free)
                        for target, source in zip(targets, sources, strict=True):
                            connector.copy(target, source[layer])
                finally:
                    slot.copied = streams.record(streams.load, slot.copied)
                if slot.copied is not None:
                    streams.wait(streams.pages, slot.copied)
                try:
                    with streams.on(streams.pages):
                        connector.write(layer, staged, part.blocks)
                finally:
                    slot.free = streams.record(streams.pages, slot.free)
        finally:
            place = layer % len(self._events)
            self._events[place] = streams.record(streams.pages, self._events[place])
            self._queued = layer + 1
        if self._queued == connector.num_layers:
            self._let_go()

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        logger.warning("loads from memory are given up: %s: %s", type(error).__name__, error)
        self.end()

    def _pieces(self, span: RestingSpan) -> Iterator[_Piece]:
        c = self._connector
        chunks = [chunk.tensor for chunk in span.chunks]
        wanted = torch.Size((c.num_planes, c.num_layers, chunks[0].shape[2] if chunks else 0, c.hidden))
        for chunk in chunks:
            if chunk.shape != wanted or chunk.dtype != c.dtype or chunk.stride()[2:] != (c.hidden, 1):
                raise ShapeError(
                    f"a chunk is {tuple(wanted)} of {c.dtype}, each [CH, H] contiguous; got {tuple(chunk.shape)} of {chunk.dtype}, strides "
                    f"{chunk.stride()}"
                )
        left, first = len(span.blocks) * c.block_size, span.skip
        if not 0 <= first + left <= sum(chunk.shape[2] for chunk in chunks):
            raise ShapeError(f"{len(span.blocks)} blocks of {c.block_size} from token {first} on are more than {len(chunks)} chunks hold")
        for run in merged(chunks):
            last = min(run.shape[2], first + left)
            if first < last:
                yield run, first, last
                left -= last - first
            first = max(first - run.shape[2], 0)

    # -- leases

    def _let_go(self) -> None:
        """No copy of this step is queued any more: its leases go when those that were are over."""
        leases, self._leases = self._leases, []
        if not leases:
            return
        event: Any = None
        if self._touched:
            try:
                event = self._streams.record(self._streams.load)
            except Exception:
                logger.exception("a device cannot be asked whether its copies are over: their memory is kept until the end")
                event = _Unknown()
        with self._lock:
            self._late.append((event, leases))

    def _release(self, *, closing: bool) -> bool:
        over: list[tuple[Any, list[Lease]]] = []
        late: list[tuple[Any, list[Lease]]] = []
        with self._lock:
            for entry in self._late:
                (over if _over(entry[0], closing) else late).append(entry)
            self._late = late
        for _, leases in over:
            for lease in leases:
                try:
                    lease.release()
                except Exception:
                    logger.exception("a lease could not be released")
        return bool(late)


class _Slot:
    """A staging buffer, an event behind the last copy into it, and one behind the last scatter out of it."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.copied: Any = None
        self.free: Any = None


class _Part:
    """What goes through a staging buffer at once, of any layer.

    Attributes:
        sources: ``[L, t * H]`` on the host, for each piece and plane.
        blocks: ids, on the device.
    """

    def __init__(self, connector: LayerConnector, pieces: Sequence[_Piece], blocks: torch.Tensor) -> None:
        self._planes, self._hidden = connector.num_planes, connector.hidden
        self._lengths = [end - start for _, start, end in pieces]
        self.blocks = blocks
        self.sources: list[torch.Tensor] = []
        self._places: list[tuple[list[torch.Tensor], torch.Tensor] | None] = [None, None]
        for run, start, end in pieces:
            by_plane, by_layer, row, _ = run.stride()
            shape, strides, offset = (run.shape[1], (end - start) * self._hidden), (by_layer, 1), run.storage_offset() + start * row
            self.sources += [run.as_strided(shape, strides, offset + plane * by_plane) for plane in range(self._planes)]

    def places(self, index: int, buffer: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Where each source goes in buffer ``index``, and what is then to be scattered, ``[planes, T, H]``."""
        found = self._places[index]
        if found is None:
            tokens, targets, first = sum(self._lengths), [], 0
            for length in self._lengths:
                for plane in range(self._planes):
                    targets.append(buffer.narrow(0, (plane * tokens + first) * self._hidden, length * self._hidden))
                first += length
            staged = buffer[: self._planes * tokens * self._hidden].view(self._planes, tokens, self._hidden)
            found = self._places[index] = (targets, staged)
        return found


class _Unknown:
    """Stands for an event that a broken device did not give."""

    def query(self) -> bool:
        raise RuntimeError("nothing is known of these copies")


def _over(event: Any, closing: bool) -> bool:
    """Whether an event is over. A device that cannot be asked may still copy, until everything is closed: then it never will again."""
    if event is None:
        return True
    try:
        return bool(event.query())
    except Exception:
        return closing


def _cut(pieces: Sequence[_Piece], capacity: int) -> list[list[_Piece]]:
    """Pieces by staging buffer, ``capacity`` tokens each; only the last is not full."""
    parts: list[list[_Piece]] = []
    room = 0
    for run, first, end in pieces:
        start = first
        while start < end:
            if not room:
                parts.append([])
                room = capacity
            last = min(end, start + room)
            parts[-1].append((run, start, last))
            room -= last - start
            start = last
    return parts
