"""Reference of :mod:`qcap.kernels.row_scatter`; the contract is there."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def row_scatter(rows: torch.Tensor, ring_slots: torch.Tensor, ring: torch.Tensor) -> None:
    """Write ``rows[i]`` to ``ring[ring_slots[i]]``, dropping slots that are negative or past the ring's end."""
    slots = ring_slots[: rows.shape[0]]
    keep = (slots >= 0) & (slots < ring.shape[0])
    ring[slots[keep]] = rows[keep].to(ring.dtype)


def row_scatter_layers(rows: Sequence[torch.Tensor], ring_slots: torch.Tensor, ring: torch.Tensor) -> None:
    """Write ``rows[g][i]`` to ``ring[ring_slots[i], g]``, dropping slots that are negative or past the ring's end."""
    slots = ring_slots[: rows[0].shape[0]]
    keep = (slots >= 0) & (slots < ring.shape[0])
    for layer, layer_rows in enumerate(rows):
        ring[slots[keep], layer] = layer_rows[keep].to(ring.dtype)
