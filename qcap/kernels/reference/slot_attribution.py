"""Reference of :mod:`qcap.kernels.slot_attribution`; the contract is there."""

from __future__ import annotations

import torch


def slot_attribution(
    slot_mapping: torch.Tensor, block_ids: torch.Tensor, ring_blocks: torch.Tensor, block_size: int, ring_slots: torch.Tensor
) -> None:
    """Where each row goes in the ring, by its KV slot; -1 for a row that is not wanted."""
    slots = slot_mapping.to(torch.int64)
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    place = torch.searchsorted(block_ids, blocks).clamp_max(block_ids.numel() - 1)
    target = ring_blocks[place]
    wanted = (slots >= 0) & (block_ids[place] == blocks) & (blocks != torch.iinfo(torch.int64).max) & (target >= 0)
    ring_slots.fill_(-1)
    ring_slots[: slots.numel()] = torch.where(wanted, target * block_size + slots % block_size, -1)
