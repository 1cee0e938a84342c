"""Queries of a large step that leave from where the engine computed them: nothing is scattered, nothing is written on the device.

Only for a step of one request, whose rows lie in order of their positions, and where the engine leaves queries alone: then a layer is one
copy. That the rows do lie so is not taken for granted: the slots that the attribution found for them go along, and rows that lie elsewhere
count as never having come (:meth:`~qcap.capture.step_rows.StepRows.settle`).
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from qcap.capture.staging import PageStager

HELD = 2
"""Layers whose queries are kept from being used again while they leave. The device waits for the copy of the one before them, which was
over long ago, unless the link is slower than the model."""


class HeldQueries:
    """The queries of a step's last layers, and their copies.

    Args:
        stager: makes the copies.
    """

    def __init__(self, stager: PageStager) -> None:
        self._stager = stager
        self._held: deque[tuple[torch.Tensor, Any]] = deque()
        self._spare: list[Any] = []

    def leave(self, query: torch.Tensor, home: torch.Tensor) -> None:
        """Copy ``query`` ``[rows, H]``, contiguous, to ``home`` on the host. It may be written to again once the compute stream was told
        to wait for that, which a later layer does."""
        if len(self._held) == HELD:
            before, event = self._held.popleft()
            self._stager.wait_for(event)
            del before  # free from here on, for what the compute stream is given behind the wait
            self._spare.append(event)
        self._stager.copy_out(query, home, keep=True)
        self._held.append((query, self._stager.copied_so_far(self._spare.pop() if self._spare else None)))

    def let_go(self) -> None:
        """The step is over, or given up: what is still leaving is kept by the allocator until it has left."""
        for query, event in self._held:
            self._stager.keep_until_copied(query)
            self._spare.append(event)
        self._held.clear()
