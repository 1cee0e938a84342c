"""The step's plan on its way to the device: one small copy from page-locked memory into a buffer that a recorded graph reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class PlanBuffer:
    """``device`` is int64 ``[1 + P, 4]``: (count, step, 0, 0), then a row (block id, first, last, base) for each block that is planned.

    Between steps the count is 0, so what runs then (warm-up, recording, an idle rank's dummy run) matches no block.

    Args:
        num_blocks: P, the most KV blocks that a step can write.
        device: of the engine's cache.
        depth: uploads that may be on their way at once.
    """

    def __init__(self, num_blocks: int, device: torch.device, depth: int = 4) -> None:
        cuda = device.type == "cuda"
        self.num_blocks = num_blocks
        self.device = torch.zeros((1 + num_blocks, 4), dtype=torch.int64, device=device)
        self._hosts = [torch.zeros((1 + num_blocks, 4), dtype=torch.int64, pin_memory=cuda) for _ in range(depth if cuda else 1)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._events: list[Any] = [torch.cuda.Event() if cuda else None for _ in self._hosts]
        self._used = [False] * len(self._hosts)
        self._turn = 0

    def next(self) -> np.ndarray:
        """Int64 ``[P, 4]`` to write the next plan's rows to."""
        self._turn = turn = (self._turn + 1) % len(self._hosts)
        event = self._events[turn]
        if event is not None and self._used[turn]:
            event.synchronize()  # four steps old: long done
        return self._arrays[turn][1:]

    def send(self, step: int, count: int) -> None:
        """Queue the plan whose ``count`` rows were written to :meth:`next`'s array, on the current stream."""
        turn = self._turn
        event, host = self._events[turn], self._hosts[turn]
        self._arrays[turn][0, :2] = count, step
        self.device[: 1 + count].copy_(host[: 1 + count], non_blocking=True)
        if event is not None:
            event.record()
            self._used[turn] = True

    def quiet(self) -> None:
        """Plan nothing."""
        self.device[0].zero_()
