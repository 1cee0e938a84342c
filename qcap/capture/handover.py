"""Whole chunks, handed to the store a little later than they became whole.

With asynchronous scheduling an engine queues step k + 1 before it reads the token of step k. Handing over what step k completed costs its
thread time, and wakes the store's writers, just when that token is about to be read; two steps later it has been.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from qcap.capture.staging import Staged
from qcap.store import write_queue

STEPS = 2
"""What becomes whole in a step is handed over at the end of the step so many later."""
DEADLINE_S = 0.05
"""Or, should the engine rest, when it has been on the host for at least so long."""


@dataclass(eq=False, slots=True)
class PutOff:
    """A whole chunk, on its way to the host or there, and how to hand it over."""

    staged: Staged
    publish: Callable[[], None]
    step: int
    landed: bool = False  # seen on the host


class Handover:
    """Chunks that are put off, published in their order: by the end of a step, by a timer, or because someone wants it now.

    Args:
        lock: held while publishing, which may wait for the store.
        most: bytes. Beyond that the oldest go at once: the memory that they lie in will be wanted.

    Attributes:
        nbytes: of the chunks that are put off.
    """

    def __init__(self, lock: threading.RLock, most: int) -> None:
        self._lock, self._most = lock, most
        self._chunks: deque[PutOff] = deque()
        self._step = 0  # as counted here
        self._some, self._closed = threading.Event(), threading.Event()
        self._timer: threading.Thread | None = None
        self.nbytes = 0
        self.pid = os.getpid()
        _all.add(self)

    def put_off(self, staged: Staged, publish: Callable[[], None]) -> None:
        """Call ``publish``, which never raises, later."""
        with self._lock:
            self._chunks.append(PutOff(staged, publish, self._step))
            self.nbytes += staged.host.nbytes
            while self.nbytes > (0 if self._closed.is_set() else self._most):
                self._publish_oldest()
            if self._chunks and not self._some.is_set():
                self._wake_timer()

    def step_ended(self) -> None:
        """Publish what was put off :data:`STEPS` steps ago."""
        with self._lock:
            while self._chunks and self._chunks[0].step <= self._step - STEPS:
                self._publish_oldest()
            self._step += 1

    def flush(self) -> bool:
        """Publish everything now; whether there was anything. Any thread."""
        with self._lock:
            some = bool(self._chunks)
            while self._chunks:
                self._publish_oldest()
            return some

    def close(self) -> None:
        """Publish everything, and put nothing off any more. The timer touches nothing from then on."""
        with self._lock:
            self._closed.set()
            self._some.set()
            self.flush()

    def _publish_oldest(self) -> None:
        oldest = self._chunks.popleft()
        self.nbytes -= oldest.staged.host.nbytes
        oldest.publish()

    # ---- the timer ----------------------------------------------------------------------------------------------------------------

    def _wake_timer(self) -> None:
        self._some.set()
        if self._timer is None:
            some = self._some
            me = weakref.ref(self, lambda _: some.set())  # the thread keeps nobody alive, and ends with who is gone
            self._timer = threading.Thread(target=_tick, args=(me, some, self._closed), name="qcap-handover", daemon=True)
            self._timer.start()

    def publish_landed(self) -> bool:
        """Publish what was on the host the last time, note what is now; False once closed. On the timer's thread.

        Time alone would not do: a large step takes longer, and its chunks would be handed over while it runs.
        """
        with self._lock:
            if self._closed.is_set():
                return False
            while self._chunks and self._chunks[0].landed:
                self._publish_oldest()
            for chunk in self._chunks:
                if not _landed(chunk.staged):
                    break
                chunk.landed = True
            if not self._chunks:
                self._some.clear()
            return True


def _tick(handover: weakref.ref[Handover], some: threading.Event, closed: threading.Event) -> None:
    while some.wait():
        closed.wait(DEADLINE_S)
        alive = handover()
        if alive is None or not alive.publish_landed():
            return
        del alive


def _landed(staged: Staged) -> bool:
    try:
        return staged.ready.done()
    except Exception:  # a device that is lost: the writers will say so
        return True


_all: weakref.WeakSet[Handover] = weakref.WeakSet()


def _flush_at_exit() -> None:
    for handover in list(_all):
        if handover.pid == os.getpid():  # a forked child has no writers, and what was put off is the parent's
            handover.flush()


# What is with the store when the interpreter exits is written (see `write_queue`), so what was put off has to be there by then. Hooks run
# last in, first out: that one was registered when its module was imported.
write_queue.at_exit(_flush_at_exit)
