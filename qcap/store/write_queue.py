"""A bounded queue of chunks and receipts, taken by writer threads that publish in the order of the queue."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from qcap.errors import StoreUnavailable
from qcap.store.tiers import Lease, SequenceRecord, StoreOutcome
from qcap.tokens import ChunkKey, ChunkRecord

PAUSE_S = 1e-4
"""A writer's pause between two chunks. A prefill's chunks are whole all at once, just when the engine's thread wakes up for the token, and
a thread that keeps the interpreter's lock is asked for it only after milliseconds."""


@dataclass(eq=False)
class Job:
    """One queued chunk or receipt."""

    turn: int
    queued_at: float
    record: ChunkRecord | SequenceRecord
    nbytes: int
    source: torch.Tensor | None
    event: Any
    overwrite: bool
    lease: Lease | None
    future: Future[Any]
    attached: list[Future[StoreOutcome]] = field(default_factory=list)


class Admission(NamedTuple):
    """How a chunk was taken: its future (None if there was no room), the bytes then waiting, and how long it was held."""

    future: Future[StoreOutcome] | None
    bytes_waiting: int
    waited_s: float


class _Turn:
    """Held by the one job whose turn it is to publish."""

    def __init__(self, queue: WriteQueue, job: Job) -> None:
        self._queue = queue
        self._job = job

    def __enter__(self) -> None:
        self._queue._wait_turn(self._job)

    def __exit__(self, *exc: object) -> None:
        self._queue._pass_turn(self._job)


class WriteQueue:
    """Jobs in order, bounded by bytes, taken by threads that publish in the same order.

    Args:
        limit: bytes.
        writers: threads.
        write: handles one job: publishes it inside :meth:`turn`, then calls :meth:`release` and :meth:`finish`; never raises.

    ``bytes`` are reserved, ``pending`` jobs are not finished.
    """

    def __init__(self, limit: int, writers: int, write: Callable[[Job], None]) -> None:
        self._limit = limit
        self._writers = writers
        self._write = write
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._jobs: deque[Job] = deque()
        self._in_flight: dict[ChunkKey, Job] = {}
        self._next_turn = 0  # given to the next job
        self._turn = 0  # whose turn it is to publish
        self._passed: set[int] = set()  # turns above it that are over
        self._pid = os.getpid()
        self._closing = False  # takes no more chunks; the receipts of those it has are still taken
        self._closed = False
        self.bytes = 0
        self.pending = 0
        _queues.add(self)

    def put_chunk(
        self, record: ChunkRecord, source: torch.Tensor, event: Any, overwrite: bool, waits: bool, lease: Lease | None = None
    ) -> Admission:
        """Queue a chunk, or attach to the same chunk in flight. Raises when closed, also while it waits for room."""
        key, nbytes, waited_since = record.key, source.nbytes, 0.0
        with self._changed:
            while True:
                self._check_open(self._closing)
                twin = self._in_flight.get(key)
                if twin is not None and not overwrite:
                    twin.attached.append(future := _running_future())
                    break
                if self.has_room(nbytes):
                    future = _running_future()
                    self._in_flight[key] = self._append(record, nbytes, source, event, overwrite, lease, future)
                    break
                if not waits:
                    return Admission(None, self.bytes, 0.0)
                waited_since = waited_since or time.monotonic()
                self._changed.wait()
            return Admission(future, self.bytes, time.monotonic() - waited_since if waited_since else 0.0)

    def has_room(self, nbytes: int) -> bool:
        """Whether a chunk of ``nbytes`` would be taken now."""
        with self._changed:
            return self.bytes == 0 or self.bytes + nbytes <= self._limit

    def put_sequence(self, record: SequenceRecord) -> Future[None]:
        """Queue a receipt. Raises when closed."""
        with self._changed:
            self._check_open(self._closed)
            return self._append(record, 0, None, None, False, None, _running_future()).future

    def _check_open(self, closed: bool) -> None:
        if closed:
            raise StoreUnavailable("the store was closed")

    def _append(
        self,
        record: ChunkRecord | SequenceRecord,
        nbytes: int,
        source: torch.Tensor | None,
        event: Any,
        overwrite: bool,
        lease: Lease | None,
        future: Future[Any],
    ) -> Job:
        while len(self._threads) < self._writers:
            thread = threading.Thread(target=self._run, name=f"qcap-store-{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)
        job = Job(self._next_turn, time.monotonic(), record, nbytes, source, event, overwrite, lease, future)
        self._next_turn += 1
        self._jobs.append(job)
        self.bytes += nbytes
        self.pending += 1
        self._changed.notify_all()
        return job

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    if self._closed:
                        return
                    self._changed.wait()
                job = self._jobs.popleft()
            self._write(job)
            del job  # or it would keep its source alive until the next one comes
            if self._jobs:
                time.sleep(PAUSE_S)

    def turn(self, job: Job) -> _Turn:
        """``with queue.turn(job):`` waits until every job queued before has published or failed."""
        return _Turn(self, job)

    def _wait_turn(self, job: Job) -> None:
        # Jobs are taken in order, so the one whose turn it is, is always being worked on: this ends.
        with self._changed:
            while self._turn < job.turn:
                self._changed.wait()

    def _pass_turn(self, job: Job) -> None:
        with self._changed:
            if job.turn >= self._turn:
                self._passed.add(job.turn)
            while self._turn in self._passed:
                self._passed.remove(self._turn)
                self._turn += 1
            self._changed.notify_all()

    def release(self, job: Job) -> int:
        """The outcome of ``job`` is known: its room goes back and nobody attaches to it any more. How many are attached."""
        self._pass_turn(job)  # of a job that failed before it came to publish: those behind it need not wait
        with self._changed:
            self.bytes -= job.nbytes
            job.source = job.event = job.lease = None
            if isinstance(job.record, ChunkRecord) and self._in_flight.get(job.record.key) is job:
                del self._in_flight[job.record.key]
            self._changed.notify_all()
        return len(job.attached)

    def finish(self, job: Job, outcome: Any, attached_outcome: Any) -> None:
        """After :meth:`release`: tell the futures, then take the job off :attr:`pending`."""
        job.future.set_result(outcome)
        for future in job.attached:
            future.set_result(attached_outcome)
        with self._changed:
            self.pending -= 1
            self._changed.notify_all()

    def drain(self, timeout_s: float | None) -> bool:
        """Wait until nothing is pending; False if ``timeout_s`` went by first."""
        with self._changed:
            return self._changed.wait_for(lambda: self.pending == 0, timeout_s)

    def close(self) -> None:
        """Take no more, finish what is queued, end the threads."""
        if os.getpid() != self._pid:
            return  # a forked child has no threads of ours, and what is queued is the parent's to write
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if threading.current_thread() not in self._threads:
                self._changed.wait_for(lambda: self.pending == 0)  # a chunk's receipt is queued before the chunk is taken off
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


def _running_future() -> Future[Any]:
    """A future that its holder cannot cancel: a chunk that is queued will be written."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


_queues: weakref.WeakSet[WriteQueue] = weakref.WeakSet()


def _drain_at_exit() -> None:
    for queue in list(_queues):
        queue.close()


def at_exit(hook: Callable[[], None]) -> None:
    """Run ``hook`` when the interpreter exits, before those that were registered earlier, while threads still work."""
    # `threading._register_atexit` is what concurrent.futures uses; plain `atexit` is the fallback, should it go away.
    getattr(threading, "_register_atexit", atexit.register)(hook)


at_exit(_drain_at_exit)  # queued chunks must land
