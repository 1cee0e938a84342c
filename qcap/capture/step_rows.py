"""Rows on the host: those of one step, who still needs them, and where they go when the step's page-locked memory is wanted back."""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

logger = logging.getLogger("qcap.capture")

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPARE_BYTES = 512 << 20
"""Memory of steps that were done with is kept for the next ones, up to so much: fresh pages cost as much as the copy."""


class StepRows:
    """Query rows of one step, all layers.

    Args:
        step: its number; each row's stamp must be this.
        rows: ``[rows, L, H]``, any strides but a contiguous last dim, on the host.
        stamps: int64 ``[rows]``: what the device wrote where it put each row.
        give_back: called with them when nobody needs them any more.

    Attributes:
        events: device events after which ``rows`` and ``stamps`` are there.
        memory: what they lie in, if the step's owner made them :meth:`later`.
        slots: int64 ``[rows]``, where the rows that were copied as they lay belong, if they were: each where it is, or :meth:`settle` says
            that it never came.
        displaced: some did not.
    """

    rows: torch.Tensor
    stamps: torch.Tensor

    def __init__(self, step: int, rows: torch.Tensor | None, stamps: torch.Tensor | None, give_back: Callable[[StepRows], None]) -> None:
        self.step = step
        if rows is not None and stamps is not None:
            self.rows, self.stamps = rows, stamps
        self.memory: torch.Tensor | None = None
        self.slots: torch.Tensor | None = None
        self.displaced = False
        self.events: list[Any] = []
        self._give_back = give_back
        self._lock = threading.Lock()
        self._holders = 1

    @classmethod
    def later(cls, step: int, give_back: Callable[[StepRows], None]) -> StepRows:
        """Rows that have no memory yet: it is to be put in place before anybody looks at them."""
        return cls(step, None, None, give_back)

    def put(self, memory: torch.Tensor, rows: torch.Tensor, stamps: torch.Tensor) -> None:
        """They are in ``memory``."""
        self.memory, self.rows, self.stamps = memory, rows, stamps

    def settle(self) -> None:
        """The copies are over: rows that do not lie where they belong lose their stamp. Any thread, before stamps are read."""
        with self._lock:
            slots, self.slots = self.slots, None
            if slots is not None:
                wrong = slots.numpy() != np.arange(len(slots))
                if wrong.any():
                    self.displaced = True
                    self.stamps.numpy()[wrong] = -1  # no step has this number

    def bits(self) -> np.ndarray:
        """The rows as integers of their size. NumPy copies on one thread, and lets other threads run meanwhile."""
        return self.rows.view(_BITS[self.rows.element_size()]).numpy()

    def hold(self) -> StepRows:
        """One more needs them."""
        with self._lock:
            self._holders += 1
        return self

    def drop(self) -> None:
        """One less needs them."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        self._give_back(self)


class Place(NamedTuple):
    """Where a step's rows lie: request i's positions ``[start[i], end[i])`` are the rows of ``source`` from ``row[i]`` on. Without a
    source none of them counts."""

    source: StepRows | None
    start: list[int]
    end: list[int]
    row: list[int]


_places = threading.Lock()
"""A record's place is read and changed under it: the mover changes it while the engine's thread reads it or lets it go."""


class StepRecord:
    """What one step brought, by request. Held by every chunk of a request that has rows in it and is not whole.

    Args:
        uids: of the requests, in the order of ``place``.
        bad: those whose rows were computed on bad data.
    """

    __slots__ = ("_index", "bad", "place", "refs", "shared", "uids")

    def __init__(self, uids: Sequence[int], place: Place, bad: frozenset[int]) -> None:
        self.uids = uids
        self._index: dict[int, int] | None = None
        self.place: Place | None = place
        self.bad = bad
        self.refs = 0
        self.shared: list[tuple[int, int, int]] = []  # (uid, first, last): rows that another request's chunk took

    @property
    def index(self) -> dict[int, int]:
        """Request -> its number in ``place``. Most records are let go with a chunk's, many at once, and never asked."""
        if self._index is None:
            self._index = dict(zip(self.uids, range(len(self.uids)), strict=True))
        return self._index

    def release(self, count: int = 1) -> None:
        """``count`` chunks less need it. Called by the engine's thread alone."""
        self.refs -= count
        if self.refs == 0:
            with _places:
                place, self.place = self.place, None
            if place is not None and place.source is not None:
                place.source.drop()

    def span(self, uid: int) -> tuple[int, int]:
        """The positions ``[start, end)`` that request ``uid`` has in it."""
        place, i = self.place, self.index[uid]
        assert place is not None
        return place.start[i], place.end[i]

    def piece(self, uid: int, first: int, last: int, at: int) -> Piece:
        """Rows of positions ``[first, last)``, held, to be put at row ``at`` of a chunk."""
        with _places:
            place = self.place
            assert place is not None and place.source is not None
            i = self.index[uid]
            return Piece(place.source.hold(), place.row[i] + first - place.start[i], last - first, at)

    def move(self, place: Place) -> None:
        """Its rows lie in ``place`` now, which is held for it; nothing happens if it has been let go."""
        with _places:
            old, alive = self.place, self.place is not None
            if alive:
                self.place = place
        gone = old.source if alive and old is not None else place.source
        if gone is not None:
            gone.drop()


@dataclass(frozen=True)
class Piece:
    """``count`` rows from ``row`` on of ``source``, which is held, for rows ``at`` on of a chunk."""

    source: StepRows
    row: int
    count: int
    at: int

    def drop(self) -> None:
        """No longer needed."""
        self.source.drop()


def wrong_stamps(pieces: Sequence[Piece]) -> int:
    """How many rows never came. All copies are over."""
    for piece in pieces:
        piece.source.settle()
    return sum(int((p.source.stamps.numpy()[p.row : p.row + p.count] != p.source.step).sum()) for p in pieces)


def assemble(pieces: Sequence[Piece], chunk: torch.Tensor) -> None:
    """Write the pieces, which cover it, to ``chunk`` ``[1, L, CH, H]``."""
    out = chunk[0].view(_BITS[chunk.element_size()]).numpy().transpose(1, 0, 2)  # [CH, L, H]
    parts = [p.source.bits()[p.row : p.row + p.count] for p in pieces]
    if len(parts) < 16:
        for piece, part in zip(pieces, parts, strict=True):
            np.copyto(out[piece.at : piece.at + piece.count], part)
    else:  # many rows of one step each: few calls, in which other threads run
        np.copyto(out, np.concatenate(parts))


@dataclass(frozen=True)
class Keep:
    """What of a record's rows is still needed: request ``index``'s positions ``[first, last)``."""

    index: int
    first: int
    last: int


class Mover:
    """Takes rows that are not yet part of a whole chunk out of the arena, on a thread of its own.

    A step's rows come to the arena in one piece, and most of them leave it with their chunks. What is left (the end of a prompt, a row of
    each request that is being decoded) may have to stay until its request has filled a chunk, so it moves to ordinary memory.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[StepRecord, StepRows, list[Keep] | None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0
        self._thread: threading.Thread | None = None
        self._spare: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._spare_bytes = 0
        self.bytes = self.high_water = 0  # in ordinary memory now, and at most

    def move(self, record: StepRecord, source: StepRows, keep: list[Keep] | None) -> None:
        """Move these rows of ``record`` (None: all), which lie in ``source``; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="qcap-rows", daemon=True)
            self._thread.start()
        with self._lock:
            self._pending += 1
        self._jobs.put((record, source.hold(), keep))

    def busy(self) -> bool:
        """Whether something is on its way out of the arena."""
        return self._pending > 0

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        with self._lock:
            self._spare.clear()
            self._spare_bytes = 0

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            record, source, keep = job
            try:
                if record.place is not None:
                    self._move(record, source, keep)
            except Exception:  # the rows stay where they are
                logger.exception("qcap: rows could not be moved out of the arena")
            finally:
                source.drop()
                with self._lock:
                    self._pending -= 1
            del job, record, source

    def _move(self, record: StepRecord, source: StepRows, keep: list[Keep] | None) -> None:
        for event in source.events:
            event.synchronize()
        source.settle()
        place = record.place
        if place is None or place.source is not source:
            return
        if keep is None or 2 * sum(k.last - k.first for k in keep) >= source.rows.shape[0]:  # one large copy, not one for each request
            record.move(Place(self._copy(source, [(0, source.rows.shape[0])]), place.start, place.end, place.row))
            return
        start, end, row, spans, at = [0] * len(place.start), [0] * len(place.end), [0] * len(place.row), [], 0
        for k in keep:
            spans.append((place.row[k.index] + k.first - place.start[k.index], k.last - k.first))
            start[k.index], end[k.index], row[k.index] = k.first, k.last, at
            at += k.last - k.first
        record.move(Place(self._copy(source, spans), start, end, row))

    def _copy(self, source: StepRows, spans: Sequence[tuple[int, int]]) -> StepRows:
        """New rows: those of ``spans`` (first row, count), one after another."""
        count = sum(n for _, n in spans)
        shape, dtype = (count, *source.rows.shape[1:]), source.rows.dtype
        with self._lock:
            spare = self._spare[shape, dtype]
            rows = spare.pop() if spare else None
            if rows is not None:
                self._spare_bytes -= rows.nbytes
        with torch.inference_mode(False):
            if rows is None:  # NumPy asks for huge pages, which are filled several times as fast
                rows = torch.from_numpy(np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
            stamps = torch.empty(count, dtype=torch.int64)
        moved = StepRows(source.step, rows, stamps, self._gone)
        bits, theirs, at = moved.bits(), source.bits(), 0
        for first, n in spans:
            np.copyto(bits[at : at + n], theirs[first : first + n])
            np.copyto(stamps.numpy()[at : at + n], source.stamps.numpy()[first : first + n])
            at += n
        with self._lock:
            self.bytes += rows.nbytes
            self.high_water = max(self.high_water, self.bytes)
        return moved

    def _gone(self, moved: StepRows) -> None:
        rows = moved.rows
        with self._lock:
            self.bytes -= rows.nbytes
            if self._thread is not None and self._spare_bytes + rows.nbytes <= SPARE_BYTES:
                self._spare[tuple(rows.shape), rows.dtype].append(rows)
                self._spare_bytes += rows.nbytes
