"""Loads of chunks that lie in page-locked memory of this process: they are copied from where they lie. Nothing is fetched, no host memory
is taken, no thread is used, and the engine's thread waits for nothing.

A layer goes in parts, each through one of a few staging buffers on the device, so that copies into some run beside what is computed out of
others::

    load streams    wait until the buffer was scattered | copies into it, one a run of neighbouring chunks | event
    compute         before layer i: waits for the event behind its last copy | scatters to the pages | event: a buffer is free again

The scatters are the compute stream's own. On a stream beside it, and for which of torch's streams nobody can tell beforehand, they may
take 5 % of an H200's link from the copies as long as compute has to wait for them (docs/performance.md). But then the copies get no
further ahead of compute than there are buffers. So for a step of which not even two layers fit into them there is such a stream::

    pages stream    wait for the event behind a part's last copy | scatters to the pages | event: the buffer is free again
    compute         before layer i: waits for the event behind its last scatter

and its scatters are some layers ahead of compute, whatever there is of buffers.

Copies come in the order in which layers need them. Two streams take :class:`~qcap.connectors.streams.Turns` at them, so that an engine's
own small copies get through.
Copies need no pages, so those of a load that is sure to come may begin before the engine has given it blocks: :class:`EarlyCopies`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from qcap.connectors.streams import Streams, Turns
from qcap.errors import ConfigError, ShapeError, StepOrderError
from qcap.layerwise.connector import LayerConnector
from qcap.layerwise.parts import Part, Piece, cut, joined, pieces_of
from qcap.store.tiers import Lease, Resting

logger = logging.getLogger("qcap.layerwise")

_PAUSE_S = 0.0005
LEAST_SLOTS = 2
"""Buffers that copies which begin early leave to loads that have their pages."""
PARTS_A_PART = 3
"""Parts that are copied, if there is room, for each that is needed: until there is none, the link gets ahead of compute."""
EARLY_LAYERS = 8
"""At most so many layers of what is known of a load are copied at once, early: the link has work until more of it is known."""
EARLY_PARTS = 3
"""And no more than leave room for the first layer of so many parts."""


class EarlyCopies:
    """The beginning of one load whose pages are not known yet. Made by :meth:`RestingPipe.early`, filled by :meth:`RestingPipe.more`,
    used by the load's :class:`RestingSpan`, or dropped.

    Attributes:
        tokens: how many it has been given.
        filled: whether these are all.
    """

    def __init__(self, layers: range) -> None:
        self.tokens, self.filled = 0, False
        self.leases: list[Lease] = []
        self.pieces: list[Piece] = []
        self.cuts = [_Cut(layers)]  # as it was given; and, once all of it is known, as it is best cut for the layers behind those


@dataclass(frozen=True)
class RestingSpan:
    """One load.

    Args:
        chunks: in the order of the sequence, of one shape ``[planes, L, CH, H]``.
        skip: tokens at the beginning of the first chunk that are not loaded.
        blocks: block ids of the tokens behind them; what is left of the last chunk is not loaded either.
        early: in place of ``chunks`` and ``skip``: those same tokens, which were given before.
    """

    chunks: Sequence[Resting]
    skip: int
    blocks: Sequence[int]
    early: EarlyCopies | None = None


class RestingPipe:
    """The loads of a step, all together: ``begin``, ``layer(0)`` .. ``layer(L - 1)``, ``end``. Made once for an engine's pages.

    The steps are called on the engine's thread; none waits for the device. A failure of the device raises from none of them: it is kept
    in :attr:`failure`, nothing more is queued, and none of the step's loads counts.

    Before that, :meth:`early`, :meth:`more` and :meth:`fill` begin the copies of a load that is to come, into buffers that nobody else
    needs. They may come at any time, between the steps of another step too.

    Leases are released when the copies out of their memory are over on the device, seen at any later step or :meth:`poll`.

    Args:
        streams, connector: of the pages.
        staging_tokens: tokens that a buffer holds, rounded down to whole blocks, at least one.
        slots: buffers, at least two; more let more copies begin early. They are made here.
        ahead: layers queued beyond the one that is about to be computed: as far as there are buffers, or, on the pages stream, always.

    Raises:
        ConfigError: ``ahead`` is negative, or there are too few buffers.
    """

    def __init__(
        self, streams: Streams, connector: LayerConnector, *, staging_tokens: int, slots: int = LEAST_SLOTS, ahead: int = 2
    ) -> None:
        if ahead < 0:
            raise ConfigError(f"ahead must be 0 or more, got {ahead}")
        if slots < LEAST_SLOTS:
            raise ConfigError(f"loads need {LEAST_SLOTS} staging buffers, got {slots}")
        self.failure: Exception | None = None
        self._streams, self._connector, self._ahead = streams, connector, ahead
        self._turns = Turns(streams.load, streams.load_twin, streams.record, streams.wait)
        self._tokens = max(staging_tokens // connector.block_size, 1) * connector.block_size
        self._slots = [_Slot(connector.new_staging(self._tokens)) for _ in range(slots)]
        self._free = deque(self._slots)
        self._cuts: list[_Cut] = []  # of the step's loads
        self._pending: deque[tuple[int, _Cut, int]] = deque()  # (layer, cut, part) to be copied, in the order in which they are needed
        self._leases: list[Lease] = []
        self._early: list[EarlyCopies] = []
        self._aside = False  # whether the step's scatters are on the pages stream
        self._events: list[Any] = [None] * (ahead + 1)  # behind a layer's scatters there; compute waits for it before it is used again
        self._before: Any = None  # behind what compute was given before such a step
        self._queued = self._next = 0  # layers
        self._copies = 0  # that were ever queued
        self._late: list[tuple[Any, list[Lease]]] = []
        self._lock = threading.Lock()  # over `_late`: who is short of memory polls from other threads

    @property
    def nbytes(self) -> int:
        """Of the buffers."""
        return sum(slot.buffer.nbytes for slot in self._slots)

    @property
    def leases_held(self) -> int:
        """How many have not been released."""
        with self._lock:
            early = sum(len(early.leases) for early in self._early)
            return len(self._leases) + early + sum(len(leases) for _, leases in self._late)

    # -- before there are pages

    def early(self) -> EarlyCopies | None:
        """A load to come, with no tokens so far; None if every buffer has its use."""
        room = len(self._free) - LEAST_SLOTS
        if room <= 0:
            return None
        layers = min(EARLY_LAYERS, max(room // EARLY_PARTS, 1), self._connector.num_layers)
        self._early.append(early := EarlyCopies(range(layers)))
        return early

    @torch.inference_mode()
    def more(self, early: EarlyCopies, chunks: Sequence[Resting], skip: int, tokens: int) -> None:
        """``tokens`` tokens behind those it has, from token ``skip`` of ``chunks`` on. Their first layers are copied, as far as there is
        room. The leases are the pipe's from here on.

        Raises:
            StepOrderError: all of it was told before: it was filled.
            Exception: the chunks are not what they should be, or the device failed: drop it.
        """
        early.leases += [chunk.lease for chunk in chunks]
        first = early.cuts[0]
        if early.filled:
            raise StepOrderError("more() out of turn: the load was told of to its end; the steps are early, more .., fill")
        pieces = self._pieces(chunks, skip, tokens)
        early.pieces += pieces
        early.tokens += tokens
        known = len(first.parts)
        first.parts += self._parts(pieces)
        new = range(known, len(first.parts))
        self._copy_early(first, [(layer, index) for layer in first.layers for index in new])

    @torch.inference_mode()
    def fill(self, early: EarlyCopies) -> None:
        """It has all its tokens: as much of it is copied as there is room. Raises as :meth:`more`."""
        early.filled = True
        self._complete(early)
        for one in early.cuts:
            self._copy_early(one, [place for layer in one.layers for place in one.places(layer)])

    def drop(self, early: EarlyCopies) -> None:
        """The load does not come. Nothing if it was begun, or dropped before."""
        if early in self._early:
            self._early.remove(early)
            for one in early.cuts:
                self._give_up(one)  # the buffers' next copies come behind these
            leases, early.leases = early.leases, []
            self._let_go(leases)
            self.poll()

    def _complete(self, early: EarlyCopies) -> None:
        """All of it is known: the layers of which nothing was copied are cut anew, for the fewest copies."""
        (first, *others), layers = early.cuts, self._connector.num_layers
        if not others and first.layers.stop < layers:
            early.cuts.append(_Cut(range(first.layers.stop, layers), self._parts(joined(early.pieces))))

    def _copy_early(self, one: _Cut, places: Sequence[tuple[int, int]]) -> None:
        """What of ``places`` was not copied, in their order, as far as there is room: of a small part several layers go into one buffer."""
        places = [place for place in places if place not in one.copied]
        begun: dict[int, tuple[_Slot, int]] = {}  # part -> its last buffer, and how much of that is taken
        for layer, index in places:
            part = one.parts[index]
            slot, taken = begun.get(index, (None, 0))
            if slot is None or taken + part.size > len(slot.buffer):
                if len(self._free) <= LEAST_SLOTS:
                    return
                slot, taken = self._free.popleft(), 0
            one.copied[layer, index] = self._copy(part, layer, slot, taken)
            begun[index] = (slot, taken + part.size)

    # -- the steps

    @torch.inference_mode()  # once a step and layer rather than once a copy
    def begin(self, spans: Sequence[RestingSpan]) -> None:
        """Queue the copies of the first layers of all loads of a step. The leases are the pipe's from here on.

        The current stream is the one that reads and writes these blocks, and did so before: what it was given for their former owners
        comes first.

        Raises:
            StepOrderError: another step has not ended.
        """
        if self._cuts or self._leases:
            raise StepOrderError("begin() out of turn: another step's loads are under way; the steps are begin, layer(0) .., end")
        self.poll()
        self.failure, self._queued, self._next = None, 0, 0
        self._leases = [chunk.lease for span in spans for chunk in span.chunks]
        n = self._connector.block_size
        early = [(span.blocks, span.early) for span in spans if span.early is not None]
        others = [span for span in spans if span.early is None]
        layers = range(self._connector.num_layers)
        for _, copies in early:
            self._early.remove(copies)
            self._leases += copies.leases
            self._cuts += copies.cuts
        try:
            for block_ids, copies in early:
                if copies.tokens != len(block_ids) * n:
                    raise ShapeError(f"{len(block_ids)} blocks of {n} for {copies.tokens} tokens, whose copies began early")
                if len(copies.cuts) == 1:
                    self._complete(copies)
                    self._cuts += copies.cuts[1:]
            pieces = [piece for span in others for piece in self._pieces(span.chunks, span.skip, len(span.blocks) * n)]
            self._cuts.append(rest := _Cut(layers, self._parts(pieces)))
            ids = [ids for ids, _ in early] + [span.blocks for span in others]
            blocks = self._connector.prepare(list(chain.from_iterable(ids)))
            first = 0
            for block_ids, copies in early:
                for one in copies.cuts:
                    one.place(blocks[first : first + len(block_ids)], n)
                first += len(block_ids)
            rest.place(blocks[first:], n)
            self._pending.extend(
                (layer, one, index)
                for layer in layers
                for one in self._cuts
                if layer in one.layers
                for index in range(len(one.parts))
                if (layer, index) not in one.copied
            )
            self._aside = 2 * sum(len(one.parts) for one in self._cuts if layers[-1] in one.layers) > len(self._slots)
            if self._aside:
                # Blocks that this step was given may still be read or written by steps before it. Staging and chunks are not.
                self._before = self._streams.record(self._streams.compute(), self._before)
                self._streams.wait(self._streams.pages, self._before)
                for layer in layers[: self._ahead + 1]:
                    self._queue(layer)
            else:
                self._stage((self._ahead + 1) * PARTS_A_PART * sum(len(one.parts) for one in self._cuts if 0 in one.layers))
        except Exception as error:
            self._fail(error)

    @torch.inference_mode()
    def layer(self, index: int) -> None:
        """Layer ``index`` is about to be computed: what is queued on the current stream from here on sees its rows. Nothing if there are no
        loads, or they failed.

        Raises:
            StepOrderError: another layer's turn.
        """
        if not self._cuts:
            return
        if index != self._next or index >= self._connector.num_layers:
            raise StepOrderError(f"layer({index}) out of turn: next is layer({self._next})")
        try:
            if self._aside:
                self._streams.wait(self._streams.compute(), self._events[index % len(self._events)])
            self._next += 1
            if self._queued < (self._connector.num_layers if self._aside else self._next):
                self._queue(self._queued)
        except Exception as error:
            self._fail(error)

    def end(self) -> None:
        """Nothing more is queued. What the pages stream was given and compute did not wait for, it waits for now: its pages may get new
        owners. Twice is fine."""
        try:
            if self._aside and self._next < self._queued:
                self._streams.wait(self._streams.compute(), self._events[(self._queued - 1) % len(self._events)])
        except Exception as error:
            self.failure = self.failure or error
        for one in self._cuts:
            self._give_up(one)  # copied, and never needed
        self._cuts = []  # and with them the block ids: compute, whose memory they are, is behind who read them
        self._pending.clear()
        self._next = self._queued
        leases, self._leases = self._leases, []
        self._let_go(leases)
        self.poll()

    def close(self) -> None:
        """Give up what is under way, and wait until no memory of others is read any more. Twice is fine."""
        for early in tuple(self._early):
            self.drop(early)
        self.end()
        while self._release(closing=True):
            time.sleep(_PAUSE_S)

    def poll(self) -> bool:
        """Release the leases of copies that are over; whether some are not. Any thread."""
        return bool(self._late) and self._release(closing=False)

    # -- queueing

    def _queue(self, layer: int) -> None:
        """Queue the scatters of a layer, the copies that they need, and some of those that come next: the link shall never be idle."""
        streams = self._streams
        stream = streams.pages if self._aside else streams.compute()
        left = [(one, index) for one in self._cuts if layer in one.layers for index in range(len(one.parts))]
        further = (PARTS_A_PART - 1) * len(left)
        try:
            while left:
                self._stage(len(left))
                here = [(one, index) for one, index in left if (layer, index) in one.copied]
                if not here:
                    raise RuntimeError("no staging buffer for a layer that is needed: its load is given up")
                left = [place for place in left if place not in here] if len(here) < len(left) else []
                if not self._aside:  # for the last of them, and so for all that were queued before it
                    streams.wait(stream, max((one.copied[layer, index] for one, index in here), key=lambda room: room.number).copied)
                with streams.on(stream):
                    for one, index in here:
                        room = one.copied.pop((layer, index))
                        try:
                            if self._aside:  # one by one: a buffer that is free again is filled while the next part comes
                                streams.wait(stream, room.copied)
                            self._write(room, layer, one.blocks[index], stream)
                        finally:
                            self._let_in(room.slot)
        finally:
            if self._aside:
                place = layer % len(self._events)
                self._events[place] = streams.record(stream, self._events[place])
            self._queued = layer + 1
        self._stage(further)

    def _stage(self, most: int) -> None:
        """Queue up to ``most`` of the copies that come next, as far as there are buffers.

        A layer's parts find some: all but two were given to layers behind it at most, and to those only early; and what is copied here is
        copied in order. Memory of which nothing is left to be copied goes back when those copies are over.
        """
        while most and self._pending and self._free:
            layer, one, index = self._pending.popleft()
            one.copied[layer, index] = self._copy(one.parts[index], layer, self._free.popleft())
            most -= 1
        if not self._pending:
            leases, self._leases = self._leases, []
            self._let_go(leases)

    def _copy(self, part: Part, layer: int, slot: _Slot, first: int = 0) -> _Room:
        """Queue the copies of one layer of ``part`` into a buffer, from element ``first`` on. What else is in the buffer has come there
        since it was last free."""
        streams, copy = self._streams, self._connector.copy
        self._copies += 1
        slot.used += 1
        try:
            load = self._turns.take(part.size * slot.buffer.element_size())
            if slot.free is not None:
                streams.wait(load, slot.free)
            targets, staged = part.places(slot.buffer, first)
            try:
                with streams.on(load):
                    for target, source in zip(targets, part.sources, strict=True):
                        copy(target, source[layer])
            finally:
                copied = slot.copied.pop() if slot.copied else None
                copied = streams.record(load, copied)
        except BaseException:
            self._let_in(slot)
            raise
        return _Room(slot, staged, copied, self._copies)

    def _write(self, room: _Room, layer: int, blocks: Sequence[torch.Tensor], stream: Any) -> None:
        """Queue the scatters of a part on ``stream``, which is current and waits for its copies."""
        slot = room.slot
        slot.copied.append(room.copied)  # to be used again: who waits for it waits for what it stands for now
        try:
            for staged, ids in zip(room.staged, blocks, strict=True):
                self._connector.write(layer, staged, ids)
        finally:
            slot.free = self._streams.record(stream, slot.free)

    def _let_in(self, slot: _Slot) -> None:
        """One layer of a part less is in it."""
        slot.used -= 1
        if not slot.used:
            self._free.append(slot)

    def _give_up(self, one: _Cut) -> None:
        for room in one.copied.values():
            room.slot.copied.append(room.copied)
            self._let_in(room.slot)
        one.copied = {}

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        logger.warning("loads from memory are given up: %s: %s", type(error).__name__, error)
        self.end()

    def _parts(self, pieces: Sequence[Piece]) -> list[Part]:
        return [Part(self._connector, part) for part in cut(pieces, self._tokens)]

    def _pieces(self, chunks: Sequence[Resting], skip: int, tokens: int) -> list[Piece]:
        c = self._connector
        tensors = [chunk.tensor for chunk in chunks]
        wanted = torch.Size((c.num_planes, c.num_layers, tensors[0].shape[2] if tensors else 0, c.hidden))
        for chunk in tensors:
            if chunk.shape != wanted or chunk.dtype != c.dtype or chunk.stride()[2:] != (c.hidden, 1):
                raise ShapeError(
                    f"a chunk is {tuple(wanted)} of {c.dtype}, each [CH, H] contiguous; got {tuple(chunk.shape)} of {chunk.dtype}, strides "
                    f"{chunk.stride()}"
                )
        if not 0 <= skip + tokens <= sum(chunk.shape[2] for chunk in tensors):
            raise ShapeError(f"{tokens} tokens from token {skip} on are more than {len(tensors)} chunks hold")
        return list(pieces_of(tensors, skip, tokens))

    # -- leases

    def _let_go(self, leases: list[Lease]) -> None:
        """No further copy out of their memory will be queued: they go when those that were are over."""
        if not leases:
            return
        event: Any = None
        if self._copies:
            try:
                event = self._streams.record(self._turns.current)
            except Exception:
                logger.exception("a device cannot be asked whether its copies are over: their memory is kept until the end")
                event = _Unknown()
        with self._lock:
            self._late.append((event, leases))

    def _release(self, *, closing: bool) -> bool:
        over: list[list[Lease]] = []
        late: list[tuple[Any, list[Lease]]] = []
        with self._lock:
            for event, leases in self._late:
                if _over(event, closing):
                    over.append(leases)
                else:
                    late.append((event, leases))
            self._late = late
        for leases in over:
            for lease in leases:
                try:
                    lease.release()
                except Exception:
                    logger.exception("a lease could not be released")
        return bool(late)


class _Slot:
    """A staging buffer, events for copies into it, one behind the last scatter out of it, and how many layers of parts it holds."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.copied: list[Any] = []  # that nobody else needs
        self.free: Any = None
        self.used = 0


class _Room(NamedTuple):
    """Where one layer of a part is, once ``copied`` is over; what of it is to be scattered; and the how many-th copy it was."""

    slot: _Slot
    staged: Sequence[torch.Tensor]
    copied: Any
    number: int


class _Cut:
    """Some layers of a load, cut into parts: their block ids, and which were copied and not yet scattered, by layer and part."""

    def __init__(self, layers: range, parts: Sequence[Part] = ()) -> None:
        self.layers, self.parts = layers, list(parts)
        self.copied: dict[tuple[int, int], _Room] = {}
        self.blocks: list[list[torch.Tensor]] = []  # of each part and piece

    def places(self, layer: int) -> list[tuple[int, int]]:
        """(layer, part) of each part."""
        return [(layer, index) for index in range(len(self.parts))]

    def place(self, block_ids: torch.Tensor, block_size: int) -> None:
        """The parts' rows go to these blocks."""
        first = 0
        for part in self.parts:
            self.blocks.append([])
            for length in part.lengths:
                self.blocks[-1].append(block_ids[first : first + length // block_size])
                first += length // block_size


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
