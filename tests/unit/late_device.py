"""A device that does its work late: streams, events and asynchronous copies with a CUDA device's rules, in any order these allow.

What is queued runs only when somebody waits for it, or by chance; of several streams a random one goes on. So a copy that starts too early,
a buffer that is written over too soon and a wait that is missing show as wrong values on a machine without a GPU.
"""

from __future__ import annotations

import random
from collections import deque
from contextlib import contextmanager
from typing import Any

import torch

from qcap import kernels
from qcap.connectors import streams
from qcap.connectors.streams import Turns


class Marker:
    """A place in a stream: over once all before it is."""

    def __init__(self) -> None:
        self.done = False


class LateStream:
    """A queue of (what must be over first, what to run)."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.queue: deque[tuple[Marker | None, Any]] = deque()
        device.streams.append(self)

    def mark(self) -> Marker:
        marker = Marker()

        def over() -> None:
            marker.done = True

        self.queue.append((None, over))
        return marker

    def wait_stream(self, other: LateStream) -> None:
        if other is not self:
            self.queue.append((other.mark(), lambda: None))

    def record_event(self, event: LateEvent | None = None) -> LateEvent:
        event = event or self.device.Event()
        event.record(self)
        return event

    def wait_event(self, event: LateEvent) -> None:
        if event.marker is not None:
            self.queue.append((event.marker, lambda: None))


class LateEvent:
    """As torch.cuda.Event."""

    device: LateDevice

    def __init__(self, **_: Any) -> None:
        self.marker: Marker | None = None

    def record(self, stream: LateStream | None = None) -> None:
        self.marker = (stream or self.device.current).mark()

    def query(self) -> bool:
        self.device.run(self.device.random.randrange(4))
        return self.marker is None or self.marker.done

    def synchronize(self) -> None:
        while self.marker is not None and not self.marker.done:
            assert self.device.run(1), "a wait that never ends"


class LateDevice:
    """Install with ``with LateDevice(seed).installed(monkeypatch) as device:``."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams: list[LateStream] = []
        self.current = LateStream(self)
        self.launches = 0

        class Event(LateEvent):
            device = self

        self.Event = Event

    def launch(self, what: Any) -> None:
        """Queue ``what`` on the current stream."""
        self.launches += 1
        self.current.queue.append((None, what))

    def run(self, count: int) -> bool:
        """Run up to ``count`` queued things; False if there was none that could run."""
        for _ in range(count):
            ready = [s for s in self.streams if s.queue and (s.queue[0][0] is None or s.queue[0][0].done)]
            if not ready:
                return False
            self.random.choice(ready).queue.popleft()[1]()
        return True

    def finish(self) -> None:
        """Run everything."""
        while any(s.queue for s in self.streams):
            assert self.run(1), "streams wait for each other"

    @contextmanager
    def stream(self, stream: LateStream) -> Any:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def install(self, monkeypatch: Any) -> None:
        """torch.cuda's streams and events, asynchronous copies and qcap's kernels are this device's from now on."""
        device = self
        monkeypatch.setattr(streams, "TURN_BYTES", self.random.choice([1, 2000, 1 << 30]))
        monkeypatch.setattr(torch.cuda, "Event", self.Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: device.current)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(device, "current", stream))
        monkeypatch.setattr(torch.cuda, "stream", device.stream)
        copy = torch.Tensor.copy_

        def late_copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if non_blocking:
                device.launch(lambda: copy(target, source))
                return target
            return copy(target, source)

        monkeypatch.setattr(torch.Tensor, "copy_", late_copy)
        for name in ("host_read", "slot_attribution", "row_scatter", "row_scatter_layers", "gather_pages", "scatter_pages"):
            real = getattr(kernels, name)
            monkeypatch.setattr(kernels, name, lambda *args, real=real: device.launch(lambda: real(*args)))

    def own(self, feature: Any, stager: Any, slot_bytes: int) -> None:
        """Make a feature and a stager, built for the CPU, believe that their memory is this device's."""
        stager._cuda, stager._pack = True, LateStream(self)
        stager._turns = Turns(LateStream(self), LateStream(self), LateStream.record_event, LateStream.wait_event)
        stager._slots, stager._turn = [torch.zeros(slot_bytes, dtype=torch.uint8) for _ in range(2)], 0
        stager._slot_events = [(self.Event(), self.Event()) for _ in range(2)]
        stager.send = lambda values: torch.as_tensor(values).clone()
        stager.send_to_pack = stager.send
        if feature is not None:
            feature._cuda = True
            plan = feature._plan
            plan._cuda, plan._hosts = True, [torch.zeros_like(plan.device) for _ in range(32)]
            plan._arrays, plan._events = [host.numpy() for host in plan._hosts], [None] * 4
            plan.quiet = lambda: self.launch(lambda: plan.device[:1].zero_())
