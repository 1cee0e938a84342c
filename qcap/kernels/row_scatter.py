"""Rows of one layer, or of a few neighbouring ones, into the ring.

``row_scatter(rows, ring_slots, ring) -> None``

- rows        [R, H]   float32, bfloat16, float16, float8 (e4m3fn, e5m2) or int64, any strides (a slice of fused QKV, say), read.
- ring_slots  [>= R]   int64, contiguous, read. Where row i goes; negative or >= S: the row is dropped. Entries past R are not looked at.
                       Two rows with one slot: one of them is written, which one is not defined.
- ring        [S, H]   column stride 1, any row stride (one layer of a ring ``[S, L, H]``, say), written; what lies between its rows is
                       not. The rows' own dtype (copied bit for bit), or float32, bfloat16 or float16 (cast, rounding to nearest even).
                       A float8 ring takes rows of its own dtype only. float8_e4m3fn rows are cast by compute capability 8.9 and up.

Graph-safe: the grid comes from ``rows``' shape, nothing is allocated and nothing waits. Elements are addressed with 64 bits. One program
does BLOCK_H elements of one row; a dropped row is read for nothing. Reference: ``reference/row_scatter.py``.
Raises ValueError on a wrong shape, dtype, stride or device.

``row_scatter_layers(rows, ring_slots, ring) -> None``: the same for G layers in one launch, whose cost is most of a decode step's scatter.

- rows        1 to 8 tensors ``[R, H]`` of one dtype, shape, row stride and column stride, at any addresses, read; ``rows[g]`` is layer g's.
- ring_slots  as above, one slot a row for all layers.
- ring        [S, G, H]   column stride 1, any slot and layer stride (``ring_all[:, first : first + G]``, say), written. Row i of
                          ``rows[g]`` goes to ``ring[ring_slots[i], g]``.

All else is as above: dtypes, casts, dropping, 64-bit addresses, graph safety and errors.
"""
# mypy: disable-error-code="import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from qcap.kernels import checks
from qcap.kernels.launch import Launch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WARPS = 4


@triton.jit
def row_scatter_kernel(
    rows_ptr,  # [R, H]
    ring_slots_ptr,  # [>= R]
    ring_ptr,  # [S, H]
    num_slots,  # S
    stride_row: tl.int64,
    stride_col,  # not annotated, so that 1 becomes a constant and loads are wide
    stride_slot: tl.int64,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    values = tl.load(rows_ptr + row * stride_row + column * stride_col, mask=column < H)  # under way while the slot is looked up
    slot = tl.load(ring_slots_ptr + row)
    if (slot >= 0) & (slot < num_slots):
        tl.store(ring_ptr + slot * stride_slot + column, values.to(ring_ptr.dtype.element_ty), mask=column < H)


@triton.jit
def row_scatter_layers_kernel(
    rows_0_ptr,  # [R, H], and the seven after it; past the last layer it is any of them, and not looked at
    rows_1_ptr,
    rows_2_ptr,
    rows_3_ptr,
    rows_4_ptr,
    rows_5_ptr,
    rows_6_ptr,
    rows_7_ptr,
    ring_slots_ptr,  # [>= R]
    ring_ptr,  # [S, G, H]
    num_slots,  # S
    stride_row: tl.int64,
    stride_col,  # not annotated, as above
    stride_slot: tl.int64,
    stride_layer: tl.int64,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    layer = tl.program_id(2)
    # Selects, not a table of addresses: nothing to load before the rows, and the compiler still knows the addresses' alignment.
    low = tl.where(layer < 2, tl.where(layer == 0, rows_0_ptr, rows_1_ptr), tl.where(layer == 2, rows_2_ptr, rows_3_ptr))
    high = tl.where(layer < 6, tl.where(layer == 4, rows_4_ptr, rows_5_ptr), tl.where(layer == 6, rows_6_ptr, rows_7_ptr))
    rows_ptr = tl.where(layer < 4, low, high)
    values = tl.load(rows_ptr + row * stride_row + column * stride_col, mask=column < H)  # under way while the slot is looked up
    slot = tl.load(ring_slots_ptr + row)
    if (slot >= 0) & (slot < num_slots):
        target_ptr = ring_ptr + slot * stride_slot + layer.to(tl.int64) * stride_layer
        tl.store(target_ptr + column, values.to(ring_ptr.dtype.element_ty), mask=column < H)


_launch = Launch(row_scatter_kernel)
_launch_layers = Launch(row_scatter_layers_kernel)


def block_width(width: int) -> int:
    """BLOCK_H for a row of ``width`` elements."""
    return min(1 << (width - 1).bit_length(), 4096)


def row_scatter(rows: torch.Tensor, ring_slots: torch.Tensor, ring: torch.Tensor) -> None:
    """Write ``rows[i]`` to ``ring[ring_slots[i]]``, dropping slots out of range. The module's docstring is the contract."""
    checks.row_scatter(rows, ring_slots, ring)
    num_rows, width = rows.shape
    stride_row, stride_col = rows.stride()
    num_slots, stride_slot = ring.shape[0], ring.stride()[0]
    if num_rows == 0 or width == 0 or num_slots == 0:
        return
    seen, kept = rows.dtype, ring.dtype
    if seen == kept:
        seen = kept = _BITS[seen.itemsize]  # a copy needs no float type, which matters for float8 on older devices and for NaNs
    block = block_width(width)
    grid = (num_rows, (width + block - 1) // block, 1)
    numbers = (num_slots, stride_row, stride_col, stride_slot)
    _launch(grid, (rows, ring_slots, ring), (seen, torch.int64, kept), numbers, (width, block), _WARPS)


def row_scatter_layers(rows: Sequence[torch.Tensor], ring_slots: torch.Tensor, ring: torch.Tensor) -> None:
    """Write ``rows[g][i]`` to ``ring[ring_slots[i], g]``, dropping slots out of range. The module's docstring is the contract."""
    checks.row_scatter_layers(rows, ring_slots, ring)
    first, num_layers = rows[0], len(rows)
    num_rows, width = first.shape
    stride_row, stride_col = first.stride()
    num_slots, (stride_slot, stride_layer, _) = ring.shape[0], ring.stride()
    if num_rows == 0 or width == 0 or num_slots == 0:
        return
    seen, kept = first.dtype, ring.dtype
    if seen == kept:
        seen = kept = _BITS[seen.itemsize]  # as above
    block = block_width(width)
    grid = (num_rows, (width + block - 1) // block, num_layers)
    numbers = (num_slots, stride_row, stride_col, stride_slot, stride_layer)
    pointers = (*rows, *[first] * (checks.MAX_LAYERS - num_layers), ring_slots, ring)
    _launch_layers(grid, pointers, (*[seen] * checks.MAX_LAYERS, torch.int64, kept), numbers, (width, block), _WARPS)
