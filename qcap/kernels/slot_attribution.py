"""Which ring slot each row of a step goes to.

``slot_attribution(slot_mapping, block_ids, ring_blocks, block_size, ring_slots) -> None``

- slot_mapping  [R]       int64, int32 or smaller int, contiguous, read. The KV slot that each row of the step writes: ``block * N +
                          offset``. Negative: padding. Rows may come in any order.
- block_ids     [P >= 1]  int64, contiguous, read. The KV blocks that are being captured, ascending, padded at the end with INT64_MAX.
                          Of equal ids the first counts. Not ascending: wanted rows may be missed, nothing worse.
- ring_blocks   [P]       int64, contiguous, read. The ring block for that KV block; negative: not wanted.
- block_size    N >= 1, tokens in a block, of the engine's cache and of the ring alike.
- ring_slots    [>= R]    int64, contiguous, written whole: ``ring_block * N + offset``, or -1 where the slot is negative, its block is not
                          in ``block_ids``, or its ring block is negative. Entries past R are -1.

Graph-safe: the grid comes from ``ring_slots``' shape, nothing is allocated and nothing waits; replays read the buffers anew. One program
does BLOCK rows, each with its own binary search over ``block_ids`` (log2 P + 1 loads). Reference: ``reference/slot_attribution.py``.
Raises ValueError on a wrong shape, dtype, stride or device.
"""
# mypy: disable-error-code="import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qcap.kernels import checks

_BLOCK = 256


@triton.jit
def slot_attribution_kernel(
    slot_mapping_ptr,  # [R]
    block_ids_ptr,  # [P]
    ring_blocks_ptr,  # [P]
    ring_slots_ptr,  # [R_OUT]
    num_rows,  # R
    num_out,  # R_OUT
    num_blocks,  # P
    BLOCK_SIZE: tl.constexpr,
    STEPS: tl.constexpr,  # bits of P - 1
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_mapping_ptr + row, mask=row < num_rows, other=-1).to(tl.int64)
    block = slot // BLOCK_SIZE
    valid = slot >= 0

    # Count the ids below `block`, one bit of the count at a time, highest first. Where all P are below, P - 1 will do: no match either.
    place = tl.zeros([BLOCK], dtype=tl.int64)
    for bit in tl.static_range(STEPS):
        candidate = place + (1 << (STEPS - 1 - bit))
        fits = valid & (candidate < num_blocks)
        below = tl.load(block_ids_ptr + candidate - 1, mask=fits, other=0) < block
        place = tl.where(fits & below, candidate, place)

    found = valid & (tl.load(block_ids_ptr + place, mask=valid, other=-1) == block)
    found = found & (block != 0x7FFFFFFFFFFFFFFF)  # the padding is no block, not even with one token a block
    ring_block = tl.load(ring_blocks_ptr + place, mask=found, other=-1)
    ring_slot = ring_block * BLOCK_SIZE + (slot - block * BLOCK_SIZE)
    tl.store(ring_slots_ptr + row, tl.where(ring_block >= 0, ring_slot, -1), mask=row < num_out)


def slot_attribution(
    slot_mapping: torch.Tensor, block_ids: torch.Tensor, ring_blocks: torch.Tensor, block_size: int, ring_slots: torch.Tensor
) -> None:
    """Where each row goes in the ring, by its KV slot; -1 for a row that is not wanted. The module's docstring is the contract."""
    checks.slot_attribution(slot_mapping, block_ids, ring_blocks, block_size, ring_slots)
    if ring_slots.numel() == 0:
        return
    slot_attribution_kernel[(triton.cdiv(ring_slots.numel(), _BLOCK),)](
        slot_mapping,
        block_ids,
        ring_blocks,
        ring_slots,
        slot_mapping.numel(),
        ring_slots.numel(),
        block_ids.numel(),
        BLOCK_SIZE=block_size,
        STEPS=(block_ids.numel() - 1).bit_length(),
        BLOCK=_BLOCK,
    )
