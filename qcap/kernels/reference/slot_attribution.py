"""Reference of :mod:`qcap.kernels.slot_attribution`; the contract is there."""

from __future__ import annotations

import torch


def slot_attribution(
    slot_mapping: torch.Tensor,
    plan: torch.Tensor,
    block_size: int,
    ring_slots: torch.Tensor,
    stamps: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> None:
    """Where each row goes in the ring, by its KV slot; -1 for a row that is not wanted. Stamps the slots that are."""
    ring_slots.fill_(-1)
    count, step = plan[0, :2].tolist()
    count = min(max(count, 0), plan.shape[0] - 1)
    if count == 0:
        return
    entries = plan[1 : 1 + count]
    slots = slot_mapping.to(torch.int64)
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    offsets = slots - blocks * block_size
    place = torch.searchsorted(entries[:, 0].contiguous(), blocks).clamp_max_(count - 1)
    block, first, last, base = entries.index_select(0, place).unbind(1)
    target = base + offsets
    wanted = (slots >= 0) & (block == blocks) & (first <= offsets) & (offsets < last) & (target >= 0) & (target < stamps.numel())
    rows = wanted.nonzero().squeeze(1)  # once: each boolean index would look for them again
    hit = target.index_select(0, rows)
    ring_slots.index_copy_(0, rows, hit)
    stamps.index_fill_(0, hit, step)
    if counts is not None:
        counts += torch.bincount(place.index_select(0, rows), minlength=counts.numel()).to(counts.dtype)
