"""Rows on the host: those of one step, who still needs them, and where they go when the step's page-locked memory is wanted back."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qcap.capture.staging import HostArena

logger = logging.getLogger("qcap.capture")


class StepRows:
    """Query rows of one step, all layers.

    Args:
        step: its number; each row's stamp must be this.
        rows: ``[rows, L, H]``, any strides, on the host.
        stamps: int64 ``[rows]``: what the device wrote where it put each row.
        give_back: called with the events when nobody needs them any more.

    Attributes:
        events: device events after which ``rows`` and ``stamps`` are there.
    """

    def __init__(self, step: int, rows: torch.Tensor, stamps: torch.Tensor, give_back: Callable[[StepRows], None]) -> None:
        self.step, self.rows, self.stamps = step, rows, stamps
        self.events: list[Any] = []
        self._give_back = give_back
        self._lock = threading.Lock()
        self._holders = 1

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


_sources = threading.Lock()
"""A segment's source is read and changed under it: the mover changes it while the engine's thread drops or takes it."""


@dataclass(eq=False)
class Segment:
    """Rows ``[first, last)`` of a chunk: those from ``row`` on of ``source``, or a hole (None: computed on bad data). Holds its source."""

    first: int
    last: int
    source: StepRows | None
    row: int

    def part(self, first: int, last: int) -> Segment:
        """Rows ``[first, last)`` of it, held anew."""
        with _sources:
            source = None if self.source is None else self.source.hold()
            return Segment(first, last, source, self.row + first - self.first)

    def replace(self, source: StepRows, row: int) -> None:
        """The same rows lie elsewhere now. Nothing happens if it has been dropped."""
        with _sources:
            old = self.source
            if old is not None:
                self.source, self.row = source.hold(), row
        if old is not None:
            old.drop()

    def drop(self) -> None:
        """No longer needed."""
        with _sources:
            source, self.source = self.source, None
        if source is not None:
            source.drop()


class Mover:
    """Takes rows that are not yet part of a whole chunk out of the arena, on a thread of its own.

    A step's rows come to the arena in one piece, and most of them leave it with their chunks. What is left (the end of a prompt, a row of
    each request that is being decoded) may have to stay until its request has filled a chunk, so it moves to ordinary memory.

    Args:
        arena: told while something is on its way back to it.
    """

    def __init__(self, arena: HostArena) -> None:
        self._jobs: queue.SimpleQueue[list[Segment] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0
        self._thread: threading.Thread | None = None
        self.bytes = self.high_water = 0  # in ordinary memory now, and at most
        arena.watch(lambda: self._pending > 0)

    def move(self, segments: Sequence[Segment]) -> None:
        """Move these segments' rows; returns at once. All have one source."""
        held = [segment.part(segment.first, segment.last) for segment in segments]  # what is copied must not go away meanwhile
        if not held:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="qcap-rows", daemon=True)
            self._thread.start()
        with self._lock:
            self._pending += 1
        self._jobs.put([*segments, *held])

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            half = len(job) // 2
            segments, held = job[:half], job[half:]
            try:
                self._move(segments, held)
            except Exception:  # the rows stay where they are
                logger.exception("qcap: rows could not be moved out of the arena")
            finally:
                for segment in held:
                    segment.drop()
                with self._lock:
                    self._pending -= 1
            del job, segments, held

    def _move(self, segments: list[Segment], held: list[Segment]) -> None:
        source = held[0].source
        assert source is not None
        for event in source.events:
            event.synchronize()
        count = sum(segment.last - segment.first for segment in held)
        if 2 * count >= source.rows.shape[0]:  # one large copy rather than one for each request
            whole = self._new(source, 0, source.rows.shape[0])
            places = [(whole, segment.row) for segment in held]
        else:
            places = [(self._new(source, segment.row, segment.last - segment.first), 0) for segment in held]
        for segment, (rows, row) in zip(segments, places, strict=True):
            segment.replace(rows, row)
        for rows in {id(rows): rows for rows, _ in places}.values():
            rows.drop()  # our own hold, from its birth

    def _new(self, source: StepRows, row: int, count: int) -> StepRows:
        with torch.inference_mode(False):
            rows = source.rows[row : row + count].clone(memory_format=torch.contiguous_format)
            stamps = source.stamps[row : row + count].clone()
        with self._lock:
            self.bytes += rows.nbytes
            self.high_water = max(self.high_water, self.bytes)
        return StepRows(source.step, rows, stamps, self._gone)

    def _gone(self, rows: StepRows) -> None:
        with self._lock:
            self.bytes -= rows.rows.nbytes


def drop_all(segments: Iterable[Segment]) -> None:
    """Drop each."""
    for segment in segments:
        segment.drop()
