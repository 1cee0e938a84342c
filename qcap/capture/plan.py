"""The step's plan on its way to the device: a kernel reads it from page-locked memory into a buffer that a recorded graph reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from qcap import kernels

_HEADER = 4
_ROUND = 256  # what is read is as long as a multiple of this, so that few views are ever made; what lies past the plan is not looked at
_GROUP = 8  # one event guards so many uploads


class PlanBuffer:
    """``device`` is what the *slot attribution* kernel reads: int64, (count, step, requests, base), then four numbers a request, then a
    key for each KV block that is planned.

    Between steps the count is 0, so what runs then (warm-up, recording, an idle rank's dummy run) matches no block.

    Args:
        num_blocks: the most KV blocks that a step can write.
        num_requests: the most requests of a step.
        device: of the engine's cache.
    """

    def __init__(self, num_blocks: int, num_requests: int, device: torch.device) -> None:
        self.num_blocks, self.num_requests = num_blocks, num_requests
        size = -(-(_HEADER + 4 * num_requests + num_blocks) // _ROUND) * _ROUND
        self._cuda = device.type == "cuda"
        self.device = torch.zeros(size, dtype=torch.int64, device=device)
        self._count = self.device[:1]
        self._hosts = [torch.zeros(size, dtype=torch.int64, pin_memory=self._cuda) for _ in range(4 * _GROUP if self._cuda else 1)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._events: list[Any] = [None] * (len(self._hosts) // _GROUP)
        self._turn = 0

    def next(self) -> np.ndarray:
        """Int64, to write the next plan's requests and keys to, from place 0 on."""
        turn = self._turn
        if self._cuda and turn % _GROUP == 0 and self._events[turn // _GROUP] is not None:
            self._events[turn // _GROUP].synchronize()  # 24 steps old: long done
        return self._arrays[turn][_HEADER:]

    def send(self, step: int, requests: int, blocks: int, base: int = 0) -> None:
        """Queue the plan that was written to :meth:`next`'s array, on the current stream. ``base`` is added to its rows."""
        turn = self._turn
        header = self._arrays[turn].data
        header[0], header[1], header[2], header[3] = blocks, step, requests, base
        length = -(-(_HEADER + 4 * requests + blocks) // _ROUND) * _ROUND
        views = self._views.get((turn, length))
        if views is None:
            views = self._views[turn, length] = (self.device[:length], self._hosts[turn][:length])
        kernels.host_read(views[1], views[0])
        if self._cuda and turn % _GROUP == _GROUP - 1:
            event = self._events[turn // _GROUP] = self._events[turn // _GROUP] or torch.cuda.Event()
            event.record()
        self._turn = (turn + 1) % len(self._hosts)  # a plan that is not sent leaves its turn to the next

    def quiet(self) -> None:
        """Plan nothing."""
        self._count.zero_()
