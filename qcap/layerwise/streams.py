"""Who waits for whom on the device: streams and events between them. The host waits for nothing here."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch


class Streams(Protocol):
    """A compute stream, which is whatever is current where it is asked for, a load stream and a store stream; and one between staging and
    pages, for loads whose copies and scatters are to overlap.

    Work queued in ``with streams.on(stream)`` goes to that stream. An event says when all that a stream was given before is done; its
    ``query()`` tells that without waiting. On a device without streams all of them are None, and work is done when it is queued.
    """

    @property
    def load(self) -> Any:
        """Host to pages, or to staging."""

    @property
    def pages(self) -> Any:
        """Staging to pages."""

    @property
    def store(self) -> Any:
        """Pages to host."""

    def compute(self) -> Any:
        """The stream that the calling thread queues work on."""

    def record(self, stream: Any, event: Any = None) -> Any:
        """An event behind all that ``stream`` was given so far: a new one, or ``event`` used again (who waits for it already still waits
        for what it stood for then)."""

    def wait(self, stream: Any, event: Any) -> None:
        """``stream`` goes on only when ``event`` is over. The host does not wait."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """What is queued inside goes to ``stream``."""


class NullStreams:
    """The CPU: everything happens in order, when it is called."""

    load: Any = None
    store: Any = None
    pages: Any = None

    def compute(self) -> Any:
        """None."""
        return None

    def record(self, stream: Any, event: Any = None) -> Any:
        """None: it is over."""
        return None

    def wait(self, stream: Any, event: Any) -> None:
        """Nothing to wait for."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Here."""
        return nullcontext()


class CudaStreams:
    """Streams of their own on ``device``, beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.load: Any = torch.cuda.Stream(device)
        self.store: Any = torch.cuda.Stream(device)
        # Of high priority: a scatter is short, and behind compute's blocks that are waiting for a multiprocessor it would hold up copies.
        self.pages: Any = torch.cuda.Stream(device, priority=-1)

    def compute(self) -> Any:
        """The current stream of the calling thread on this device."""
        return torch.cuda.current_stream(self.device)

    def record(self, stream: Any, event: Any = None) -> Any:
        """See :class:`Streams`."""
        if event is not None:
            event.record(stream)
            return event
        with torch.cuda.device(self.device):
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """See :class:`Streams`."""
        if event is not None:
            stream.wait_event(event)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """See :class:`Streams`."""
        return cast(AbstractContextManager[Any], torch.cuda.stream(stream))


def streams_for(device: torch.device) -> Streams:
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else NullStreams()
