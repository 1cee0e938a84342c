"""Which ring slot each row of a step goes to, and the stamp of that slot.

``slot_attribution(slot_mapping, plan, block_size, ring_slots, stamps, counts=None) -> None``

- slot_mapping  [R]      int64, int32 or smaller int, contiguous, read. The KV slot that each row of the step writes: ``block * N +
                         offset``. Negative: padding. Rows may come in any order.
- plan          [L >= 4] int64, contiguous, read; below.
- block_size    N >= 1, tokens in a block of the engine's cache.
- ring_slots    [>= R]   int64, contiguous, written whole: the ring slot of a wanted row, else -1. Entries past R are -1.
- stamps        [S]      int64, contiguous; ``stamps[ring slot] = step`` for each wanted row, the rest is left as it is.
- counts        [any]    int32, contiguous, or None; ``counts[r]`` goes up by the wanted rows of request r. Requests past its end are not
                         counted. The caller zeroes it.

The plan is what the host can write quickly; the kernel works out the rest for each row:

- ``plan[0:4]`` = (count, step, requests, base). A count below 0 counts as 0.
- then ``requests`` rows of 4: (first place, start, end, row). Request r computes positions start..end-1, 0 <= start; its first one goes to
  ring slot base + row, and so on upwards. It writes the blocks of places first_place[r] .. first_place[r + 1] - 1 (the last: count - 1), in
  the order of its positions; the first of them is block start // N of the request. First places ascend; equal ones: the last counts.
- then ``count`` keys, ascending: ``block_id << 32 | place``, both 0 <= x < 2**31, place below count. Of equal block ids the first counts.
- what lies past ``4 + 4 * requests + count`` is not looked at. If that is more than L, or requests is below 0, or 0 with a count above 0,
  no row is wanted. Out of order: rows may be missed or go to another request's slots; nothing is read or written out of bounds.

Row with slot s >= 0: its key is that of block s // N, place is the key's, r the last request with first_place[r] <= place. It is wanted if
these exist and start <= position < end, where position = (start // N + place - first_place) * N + s % N, and if its ring slot, base + row +
position - start, is in 0..S-1.

Graph-safe: the grid comes from ``ring_slots``' shape, nothing is allocated and nothing waits; the whole plan is read on the device, so
replays take each step's plan. One program does BLOCK rows, each with its own two binary searches, as deep as count and requests of the
step ask for. Reference: ``reference/slot_attribution.py``. Raises ValueError on a wrong shape, dtype, stride or device.
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


@triton.jit(do_not_specialize=["num_rows", "num_out", "num_slots", "num_counts", "length"])  # they change by step: one kernel for all
def slot_attribution_kernel(
    slot_mapping_ptr,  # [R]
    plan_ptr,  # [L]
    ring_slots_ptr,  # [R_OUT]
    stamps_ptr,  # [S]
    counts_ptr,  # [C], anything without COUNT
    num_rows,  # R
    num_out,  # R_OUT
    num_slots,  # S
    num_counts,  # C
    length,  # L
    BLOCK_SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_mapping_ptr + row, mask=row < num_rows, other=-1).to(tl.int64)
    block = slot // BLOCK_SIZE
    offset = slot - block * BLOCK_SIZE
    count = tl.load(plan_ptr)  # below 0, no row is valid
    step = tl.load(plan_ptr + 1)
    requests = tl.load(plan_ptr + 2)
    base = tl.load(plan_ptr + 3)
    room = length - 4
    fits = (requests > 0) & (requests <= room // 4) & (count <= room - requests * 4)  # each alone holds what the next multiplies
    count = tl.where(fits, count, 0)
    requests = tl.where(fits, requests, 0)
    keys_ptr = plan_ptr + 4 + requests * 4
    index = tl.zeros([BLOCK], dtype=tl.int64)
    valid = (slot >= 0) & (index < count)

    # The first key of `block` or above is one of index .. index + size, and index + size <= count. If it is the last, no key matches.
    size = count
    while size > 1:
        half = size // 2
        below = (tl.load(keys_ptr + index + half - 1) >> 32) < block  # in bounds whatever the row, so unmasked
        index = tl.where(below, index + half, index)
        size -= half
    key = tl.load(keys_ptr + index, mask=valid, other=-1)
    place = key & 0xFFFFFFFF
    found = valid & ((key >> 32) == block) & (place < count)

    # The last request that begins at `place` or before is one of request .. request + size - 1, if there is any.
    request = tl.zeros([BLOCK], dtype=tl.int64)
    size = requests
    while size > 1:
        half = size // 2
        begun = tl.load(plan_ptr + 4 + (request + half) * 4) <= place
        request = tl.where(begun, request + half, request)
        size -= half
    request_ptr = plan_ptr + 4 + request * 4
    first_place = tl.load(request_ptr, mask=found, other=0)
    start = tl.load(request_ptr + 1, mask=found, other=0)
    end = tl.load(request_ptr + 2, mask=found, other=0)
    first_row = tl.load(request_ptr + 3, mask=found, other=0)
    position = (start // BLOCK_SIZE + place - first_place) * BLOCK_SIZE + offset
    target = base + first_row + position - start
    wanted = found & (first_place <= place) & (start <= position) & (position < end) & (target >= 0) & (target < num_slots)
    tl.store(ring_slots_ptr + row, tl.where(wanted, target, -1), mask=row < num_out)
    tl.store(stamps_ptr + target, tl.zeros([BLOCK], dtype=tl.int64) + step, mask=wanted)
    if COUNT:
        tl.atomic_add(counts_ptr + request, 1, mask=wanted & (request < num_counts), sem="relaxed")


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
    num_out = ring_slots.numel()
    if num_out == 0:
        return
    num_counts = 0 if counts is None else counts.numel()
    counted = counts if counts is not None and num_counts else ring_slots
    tensors = (slot_mapping, plan, ring_slots, stamps, counted)
    dtypes = (slot_mapping.dtype, torch.int64, torch.int64, torch.int64, counted.dtype)
    numbers = (slot_mapping.numel(), num_out, stamps.numel(), num_counts, plan.numel())
    constants = (block_size, num_counts > 0, _BLOCK)
    _launch(((num_out + _BLOCK - 1) // _BLOCK, 1, 1), tensors, dtypes, numbers, constants, _WARPS)
