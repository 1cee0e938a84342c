"""Work beside the engine's own, on a second stream: queries are put away while the attention, which reads the same queries, runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Branch:
    """A stream that leaves the engine's current one and comes back to it, layer after layer, with two events for all of them.

    Works the same while a graph is recorded: the events become the graph's fork and join.

    Args:
        side: the second stream, on the device of the engine.
    """

    def __init__(self, side: torch.cuda.Stream) -> None:
        self._side = side
        self._forked, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._main: torch.cuda.Stream | None = None

    def run(self, queue: Callable[..., object], *args: Any) -> Callable[[], None]:
        """``queue(*args)`` with the second stream as the current one; what it queues comes after all that the engine has queued.

        Returns:
            What makes the engine's stream wait for it: to be called before anything can be given memory that was read here.

        Raises:
            BaseException: ``queue``'s own; the streams are joined then.
        """
        main, side = torch.cuda.current_stream(), self._side
        self._main = main
        self._forked.record(main)
        side.wait_event(self._forked)
        torch.cuda.set_stream(side)  # what torch.cuda.stream() does, without the object that it makes
        try:
            queue(*args)
        except BaseException:
            self._done.record(side)
            self.join()  # a branch that is not joined would spoil a recording
            raise
        finally:
            torch.cuda.set_stream(main)
        self._done.record(side)
        return self.join

    def join(self) -> None:
        """What the engine queues from now on comes after what the last :meth:`run` queued."""
        if self._main is not None:
            self._main.wait_event(self._done)
