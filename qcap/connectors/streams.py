"""Three streams of one device: the compute stream, one for loads and one for stores. On the CPU there are none, and every call is a no-op.

The device's module (``torch.cuda``, ``torch.xpu``, ``torch.musa``) is looked up by the device's type, or given: then a test sees who
waits for whom on a machine without the device. Nothing here makes the host wait.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from qcap.errors import ConfigError


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


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``, without waiting for it: from pageable memory CUDA would."""
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Streams:
    """The streams of one connector.

    Args:
        device: where the pages are.
        module: stands in for the device's own module.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self.device = device
        self.module = device_module(device) if module is None else module
        self.load: Any = None if self.module is None else self.module.Stream(device=device)
        self.store: Any = None if self.module is None else self.module.Stream(device=device)

    def current(self) -> Any:
        """The stream that compute is queued on now; None on the CPU."""
        return None if self.module is None else self.module.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """What is queued inside goes to ``stream``."""
        return nullcontext() if stream is None else self.module.stream(stream)

    def mark(self, stream: Any) -> Any:
        """An event after all that ``stream`` has been given so far; None on the CPU."""
        if stream is None:
            return None
        event = self.module.Event()
        event.record(stream)
        return event

    @staticmethod
    def wait(stream: Any, event: Any) -> None:
        """What ``stream`` is given from now on waits for ``event``; the host does not."""
        if stream is not None and event is not None:
            stream.wait_event(event)
