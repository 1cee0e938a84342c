"""Who waits for whom on the device: three streams and events between them. The host waits for nothing here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """A compute stream, which is whatever is current where it is asked for, a load stream and a store stream.

    Work queued in ``with streams.on(stream)`` goes to that stream. An event says when all that a stream was given before is done; its
    ``query()`` tells that without waiting. On a device without streams all of them are None, and work is done when it is queued.
    """

    @property
    def load(self) -> Any:
        """Host to pages."""

    @property
    def store(self) -> Any:
        """Pages to host."""

    def compute(self) -> Any:
        """The stream that the calling thread queues work on."""

    def record(self, stream: Any) -> Any:
        """A new event behind all that ``stream`` was given so far."""

    def wait(self, stream: Any, event: Any) -> None:
        """``stream`` goes on only when ``event`` is over. The host does not wait."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """What is queued inside goes to ``stream``."""


class NullStreams:
    """The CPU: everything happens in order, when it is called."""

    load: Any = None
    store: Any = None

    def compute(self) -> Any:
        """None."""
        return None

    def record(self, stream: Any) -> Any:
        """None: it is over."""
        return None

    def wait(self, stream: Any, event: Any) -> None:
        """Nothing to wait for."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Here."""
        return nullcontext()


class CudaStreams:
    """Two streams of their own on ``device``, beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.load: Any = torch.cuda.Stream(device)
        self.store: Any = torch.cuda.Stream(device)

    def compute(self) -> Any:
        """The current stream of the calling thread on this device."""
        return torch.cuda.current_stream(self.device)

    def record(self, stream: Any) -> Any:
        """A new event on ``stream``."""
        with torch.cuda.device(self.device):
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """See :class:`Streams`."""
        if event is not None:
            stream.wait_event(event)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """See :class:`Streams`."""
        with torch.cuda.stream(stream):
            yield


def streams_for(device: torch.device) -> Streams:
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else NullStreams()
