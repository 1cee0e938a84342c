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
    count, step, requests, base = plan[:4].tolist()
    keys_at = 4 + 4 * requests
    if count <= 0 or requests <= 0 or keys_at + count > plan.numel():
        return
    slots = slot_mapping.to(torch.int64)
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    keys = plan[keys_at : keys_at + count]
    ids = keys >> 32
    index = torch.searchsorted(ids, blocks).clamp_max_(count - 1)
    place = keys.index_select(0, index) & 0xFFFFFFFF
    table = plan[4:keys_at].view(requests, 4)
    request = torch.searchsorted(table[:, 0].contiguous(), place, right=True).sub_(1).clamp_min_(0)
    first_place, start, end, first_row = table.index_select(0, request).unbind(1)
    blocks_before = torch.div(start, block_size, rounding_mode="floor") + place - first_place
    position = blocks_before * block_size + slots - blocks * block_size
    target = base + first_row + position - start
    wanted = (slots >= 0) & (ids.index_select(0, index) == blocks) & (place < count) & (first_place <= place)
    wanted &= (start <= position) & (position < end) & (target >= 0) & (target < stamps.numel())
    rows = wanted.nonzero().squeeze(1)  # once: each boolean index would look for them again
    hit = target.index_select(0, rows)
    ring_slots.index_copy_(0, rows, hit)
    stamps.index_fill_(0, hit, step)
    if counts is not None:
        per_request = torch.bincount(request.index_select(0, rows), minlength=counts.numel())
        counts += per_request[: counts.numel()].to(counts.dtype)
