"""Who waits for whom on the device: streams and events between them. The host waits for nothing here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Protocol, cast

import torch

from qcap.errors import ConfigError

TURN_BYTES = 32 << 20
"""What a stream is given before the other one's turn: 0.6 ms of a fast link. Turns of 8 MiB cost 3 % of an H200's rate, of 32 MiB 0.4 %."""


class Turns:
    """Two streams that take turns at the large copies of one direction, which stay in the order in which they are queued.

    A device copies with one engine a direction, and that stays with a stream for as long as there is something for it. What goes the
    same way on other streams - an inference engine's own tokens and block tables, a few bytes each - would wait for all that is queued: on
    an H200 for the whole 19.6 ms of a GiB. Where the next copy is another stream's, and waits for the last one, such small ones go first.

    Args:
        first, second: the streams; None on a device without.
        record, wait: as of :class:`Streams`.

    Attributes:
        current: whose turn it is. An event on it is behind all copies of both.
    """

    def __init__(self, first: Any, second: Any, record: Callable[[Any, Any], Any], wait: Callable[[Any, Any], None]) -> None:
        self.current, self._other = first, second
        self._record, self._wait = record, wait
        self._event: Any = None
        self._taken = 0

    def take(self, nbytes: int) -> Any:
        """The stream for the next ``nbytes``."""
        if self._taken >= TURN_BYTES:
            self._event = self._record(self.current, self._event)
            self._wait(self._other, self._event)
            self.current, self._other = self._other, self.current
            self._taken = 0
        self._taken += nbytes
        return self.current


class Streams(Protocol):
    """A compute stream, which is whatever is current where it is asked for, a load stream and a store stream; and one between staging and
    pages, for loads that are larger than their staging.

    Work queued in ``with streams.on(stream)`` goes to that stream. An event says when all that a stream was given before is done; its
    ``query()`` tells that without waiting. On a device without streams all of them are None, and work is done when it is queued.
    """

    @property
    def load(self) -> Any:
        """Host to pages, or to staging."""

    @property
    def load_twin(self) -> Any:
        """Another one for loads, to take :class:`Turns` with."""

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
    load_twin: Any = None
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


def device_module(device: torch.device) -> Any:
    """The module with ``device``'s streams and events; None for the CPU.

    Raises:
        ConfigError: torch knows no such module here.
    """
    if device.type == "cpu":
        return None
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "Stream"):
        raise ConfigError(f"torch has no streams for device {device.type!r} here: import its plug-in (torch_{device.type}) first")
    return module


class DeviceStreams:
    """Streams of their own on ``device``, beside the current one.

    Args:
        device: where the pages are.
        module: stands in for the device's own (``torch.cuda``, ``torch.xpu``, ``torch.musa``): then a test sees who waits for whom on a
            machine without the device.

    Raises:
        ConfigError: as :func:`device_module`.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self.device, self._module = device, device_module(device) if module is None else module
        self.load: Any = self._module.Stream(device=device)
        self.store: Any = self._module.Stream(device=device)

    @cached_property
    def load_twin(self) -> Any:
        """See :class:`Streams`; made when it is first asked for."""
        return self._module.Stream(device=self.device)

    @cached_property
    def pages(self) -> Any:
        """See :class:`Streams`; made when it is first asked for. Not of high priority: on an H200 a compute stream that waits for one such
        always takes 3 to 5 % of the link's rate from the copies, for an ordinary one sometimes."""
        return self._module.Stream(device=self.device)

    def compute(self) -> Any:
        """The current stream of the calling thread on this device."""
        return self._module.current_stream(self.device)

    def record(self, stream: Any, event: Any = None) -> Any:
        """See :class:`Streams`."""
        event = self._module.Event() if event is None else event
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """See :class:`Streams`."""
        if event is not None:
            stream.wait_event(event)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """See :class:`Streams`."""
        return cast(AbstractContextManager[Any], self._module.stream(stream))


class _Current:
    """``torch.cuda.stream()``, for a stream of the current device, at a tenth of its price: a layer's loads come here three times."""

    __slots__ = ("_before", "_index", "_stream")

    def __init__(self, stream: Any, index: int) -> None:
        self._stream, self._index = stream, index

    def __enter__(self) -> None:
        self._before = torch.cuda.current_stream(self._index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self._before)


class CudaStreams(DeviceStreams):
    """Those of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(torch.device("cuda", index))
        self._index = index  # asked with it, torch does not look for the device

    def compute(self) -> Any:
        """See :class:`Streams`."""
        return torch.cuda.current_stream(self._index)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """See :class:`Streams`."""
        if torch.cuda.current_device() != self._index:
            return super().on(stream)
        return _Current(stream, self._index)

    def record(self, stream: Any, event: Any = None) -> Any:
        """See :class:`Streams`."""
        if event is not None:
            event.record(stream)
            return event
        with torch.cuda.device(self.device):
            return super().record(stream)


def streams_for(device: torch.device, module: Any = None) -> Streams:
    """The streams of a device; ``module`` as for :class:`DeviceStreams`."""
    if module is None and device.type == "cpu":
        return NullStreams()
    return CudaStreams(device) if module is None and device.type == "cuda" else DeviceStreams(device, module)
