"""Which ring slot each row of a step goes to, and the stamp of that slot.

``slot_attribution(slot_mapping, plan, block_size, ring_slots, stamps, counts=None) -> None``

- slot_mapping  [R]       int64, int32 or smaller int, contiguous, read. The KV slot that each row of the step writes: ``block * N +
                          offset``. Negative: padding. Rows may come in any order.
- plan          [1+P, 4]  int64, contiguous, P >= 1, read. Row 0 is (count, step, 0, 0), count clamped to 0..P. Rows 1..count are
                          (block, first, last, base), ascending by block; of equal blocks the first counts. Not ascending: wanted rows
                          may be missed, nothing worse. Rows past count are not looked at and may hold anything.
- block_size    N >= 1, tokens in a block of the engine's cache.
- ring_slots    [>= R]    int64, contiguous, written whole: ``base + offset`` of a wanted row, else -1. Entries past R are -1. A row is
                          wanted if its slot is not negative, its block is planned, first <= offset < last, and 0 <= base + offset < S.
- stamps        [S]       int64, contiguous; ``stamps[base + offset] = step`` for each wanted row, the rest is left as it is.
- counts        [P]       int32, contiguous, or None; ``counts[i]`` goes up by the wanted rows of plan row 1 + i. The caller zeroes it.

Graph-safe: the grid comes from ``ring_slots``' shape, nothing is allocated and nothing waits; count and step are read on the device, so
replays take each step's plan. One program does BLOCK rows, each with its own binary search over the plan (log2 P + 1 loads).
Reference: ``reference/slot_attribution.py``. Raises ValueError on a wrong shape, dtype, stride or device.
"""
# mypy: disable-error-code="import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qcap.kernels import checks
from qcap.kernels.launch import Launch

_BLOCK = 256
_WARPS = 4


@triton.jit(do_not_specialize=["num_rows", "num_out", "num_slots", "capacity"])  # they change from step to step: one kernel for all
def slot_attribution_kernel(
    slot_mapping_ptr,  # [R]
    plan_ptr,  # [1 + P, 4]
    ring_slots_ptr,  # [R_OUT]
    stamps_ptr,  # [S]
    counts_ptr,  # [P], anything without COUNT
    num_rows,  # R
    num_out,  # R_OUT
    num_slots,  # S
    capacity,  # P
    BLOCK_SIZE: tl.constexpr,
    STEPS: tl.constexpr,  # bits of P - 1
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_mapping_ptr + row, mask=row < num_rows, other=-1).to(tl.int64)
    block = slot // BLOCK_SIZE
    offset = slot - block * BLOCK_SIZE
    count = tl.minimum(tl.maximum(tl.load(plan_ptr), 0), capacity)
    step = tl.load(plan_ptr + 1)
    place = tl.zeros([BLOCK], dtype=tl.int64)
    valid = (slot >= 0) & (place < count)

    # Count the blocks below `block`, one bit of the count at a time, highest first. Where all are below, the last will do: no match either.
    for bit in tl.static_range(STEPS):
        candidate = place + (1 << (STEPS - 1 - bit))
        fits = valid & (candidate < count)
        below = tl.load(plan_ptr + candidate * 4, mask=fits, other=0) < block  # plan row 1 + (candidate - 1)
        place = tl.where(fits & below, candidate, place)

    entry_ptr = plan_ptr + (1 + place) * 4
    found = valid & (tl.load(entry_ptr, mask=valid, other=-1) == block)
    first = tl.load(entry_ptr + 1, mask=found, other=0)
    last = tl.load(entry_ptr + 2, mask=found, other=0)
    target = tl.load(entry_ptr + 3, mask=found, other=0) + offset
    wanted = found & (first <= offset) & (offset < last) & (target >= 0) & (target < num_slots)
    tl.store(ring_slots_ptr + row, tl.where(wanted, target, -1), mask=row < num_out)
    tl.store(stamps_ptr + target, tl.zeros([BLOCK], dtype=tl.int64) + step, mask=wanted)
    if COUNT:
        tl.atomic_add(counts_ptr + place, 1, mask=wanted, sem="relaxed")


_launch = Launch(slot_attribution_kernel)


def slot_attribution(
    slot_mapping: torch.Tensor,
    plan: torch.Tensor,
    block_size: int,
    ring_slots: torch.Tensor,
    stamps: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> None:
    """Where each row goes in the ring, by its KV slot; -1 for a row that is not wanted. The module's docstring is the contract."""
    checks.slot_attribution(slot_mapping, plan, block_size, ring_slots, stamps, counts)
    num_out, capacity = ring_slots.numel(), plan.shape[0] - 1
    if num_out == 0:
        return
    counted = ring_slots if counts is None else counts
    tensors = (slot_mapping, plan, ring_slots, stamps, counted)
    dtypes = (slot_mapping.dtype, torch.int64, torch.int64, torch.int64, counted.dtype)
    numbers = (slot_mapping.numel(), num_out, stamps.numel(), capacity)
    constants = (block_size, (capacity - 1).bit_length(), counts is not None, _BLOCK)
    _launch(((num_out + _BLOCK - 1) // _BLOCK, 1, 1), tensors, dtypes, numbers, constants, _WARPS)
