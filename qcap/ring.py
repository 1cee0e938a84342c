"""The ring that holds captured query rows until their chunk is complete and stored.

It knows which blocks are free and where the layer tensors are, not who uses them. Block ids and slots are the ring's own: slot ``s`` is
row ``s % block_size`` of block ``s // block_size``, in every layer.
"""

from __future__ import annotations

import logging
import math
import operator
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from qcap import kernels
from qcap.errors import ConfigError, ShapeError
from qcap.kernels import PageTable

logger = logging.getLogger("qcap.ring")


@dataclass(frozen=True)
class RingUsage:
    """Blocks of a ring at one moment: ``capacity == used + free``; ``high_water`` is the most ever used at once."""

    capacity: int
    used: int
    free: int
    high_water: int


class QRingBuffer:
    """One uninitialised tensor ``[num_blocks, block_size, hidden_dim]`` a layer, and the list of free blocks.

    ``allocate`` and ``free`` may be called from any thread. ``scatter`` is graph-safe: it allocates nothing and waits for nothing, unless
    ``debug`` is set or the query cannot be flattened as a view.

    Args:
        num_layers: L, captured layers.
        num_blocks: blocks that can be in use at once.
        block_size: tokens in a block; the engine's.
        hidden_dim: query heads on this rank x head size.
        dtype, device: of the layer tensors.
        debug: make ``scatter`` look at the slots and raise on one past the ring. This waits for the device.

    Raises:
        ConfigError: one of the four sizes is not positive; the message gives all four.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        hidden_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        debug: bool = False,
    ) -> None:
        if min(num_layers, num_blocks, block_size, hidden_dim) <= 0:
            raise ConfigError(
                f"a query ring needs positive sizes, got num_layers={num_layers}, num_blocks={num_blocks}, block_size={block_size}, "
                f"hidden_dim={hidden_dim}: check qcap.q.ring_blocks and the model's head count and head size"
            )
        shape = (num_blocks, block_size, hidden_dim)
        self._layers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._rows = [layer.view(num_blocks * block_size, hidden_dim) for layer in self._layers]
        self._table = PageTable([[layer.unsqueeze(1)] for layer in self._layers])
        self._debug = debug
        self._lock = threading.Lock()
        self._free = list(range(num_blocks))
        self._is_free = bytearray(b"\x01" * num_blocks)
        self._high_water = 0

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self._layers)

    @property
    def num_blocks(self) -> int:
        """Blocks in the ring."""
        return self._layers[0].shape[0]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._layers[0].shape[1]

    @property
    def hidden_dim(self) -> int:
        """Width of a row."""
        return self._layers[0].shape[2]

    @property
    def layers(self) -> list[torch.Tensor]:
        """The layer tensors themselves, in order; a new list each time."""
        return list(self._layers)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The layer tensors themselves by name, ``qcap_q_layer_{i}`` in layer order."""
        return {f"qcap_q_layer_{index}": layer for index, layer in enumerate(self._layers)}

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self._layers)

    def page_table(self) -> PageTable:
        """The ring as one plane of pages: ``gather_pages`` of it gives ``[1, L, T, H]``."""
        return self._table

    def allocate(self, n: int) -> list[int] | None:
        """Take the last ``n`` blocks of the free list; None if there are fewer, and then nothing is taken.

        Raises:
            ConfigError: ``n`` is negative.
        """
        if n < 0:
            raise ConfigError(f"cannot allocate a negative block count: {n}")
        with self._lock:
            left = len(self._free) - n
            if left < 0:
                return None
            taken = self._free[left:]
            del self._free[left:]
            for block in taken:
                self._is_free[block] = 0
            self._high_water = max(self._high_water, self.num_blocks - left)
            return taken

    def free(self, block_ids: Iterable[int]) -> None:
        """Give blocks back. Never raises: what is no block in use is dropped with a warning, and the rest is freed."""
        dropped: list[object] = []
        try:
            with self._lock:
                for block_id in block_ids:
                    try:
                        block = operator.index(block_id)
                    except TypeError:
                        block = -1
                    if not 0 <= block < self.num_blocks or self._is_free[block]:
                        dropped.append(block_id)
                        continue
                    self._is_free[block] = 1
                    self._free.append(block)
        except Exception as error:  # a failure path must be able to call this with whatever it holds
            logger.warning("query ring: could not read the block ids to free (%s): %r", error, block_ids)
        for bad in dropped:
            logger.warning("query ring: block %r is not in use (the ring has blocks 0..%d), not freed", bad, self.num_blocks - 1)

    def num_free_blocks(self) -> int:
        """Blocks that ``allocate`` could take now."""
        with self._lock:
            return len(self._free)

    def usage(self) -> RingUsage:
        """Capacity, used, free and high water, all of one moment."""
        with self._lock:
            free = len(self._free)
            return RingUsage(capacity=self.num_blocks, used=self.num_blocks - free, free=free, high_water=self._high_water)

    def scatter(self, layer_index: int, query: torch.Tensor, ring_slots: torch.Tensor) -> None:
        """Write each row of ``query`` to its slot of one layer, cast to the ring's dtype.

        Args:
            layer_index: which layer, 0..L-1.
            query: ``[rows, ...]``, flattened to ``[rows, hidden_dim]``; any strides. A view that cannot be flattened is copied first.
            ring_slots: int64 ``[rows]`` on the ring's device. A negative slot drops its row; so does one past the ring's end.

        Raises:
            ShapeError: no such layer, a row of another width, or not one slot a row; nothing is written then. With ``debug``, also a
                slot past the ring's end.
            ValueError: from the kernel's own checks, for dtypes, strides and devices.
        """
        if not 0 <= layer_index < len(self._rows):
            raise ShapeError(
                f"query ring: layer_index {layer_index} is not in 0..{len(self._rows) - 1}: the ring was set up for other layers"
            )
        rows = query.shape[0] if query.dim() else 0
        if rows == 0:
            return
        width = math.prod(query.shape[1:])
        if width != self.hidden_dim:
            raise ShapeError(
                f"query ring: layer {layer_index}: rows are {width} wide and the ring {self.hidden_dim}: its head count x head size "
                f"does not fit the model's queries {tuple(query.shape)} on this rank"
            )
        if ring_slots.dim() != 1 or ring_slots.shape[0] != rows:
            raise ShapeError(f"query ring: layer {layer_index}: {rows} query rows and ring_slots {tuple(ring_slots.shape)}: one slot a row")
        if self._debug and bool((ring_slots >= self.num_blocks * self.block_size).any()):
            worst = int(ring_slots.max())
            raise ShapeError(f"query ring: layer {layer_index}: slot {worst} is past the last slot {self.num_blocks * self.block_size - 1}")
        kernels.row_scatter(query.reshape(rows, width), ring_slots, self._rows[layer_index])
