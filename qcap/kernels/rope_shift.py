"""Keys re-rotated from their old positions to new ones.

``rope_shift(keys, old_positions, new_positions, inv_freq, interleaved, out) -> None``
``rope_shift_(keys, old_positions, new_positions, inv_freq, interleaved) -> None``, in place

- keys                          [T, HK, D]  float32, bfloat16 or float16, any strides, read. Post-RoPE.
- old_positions, new_positions  [T]         int64, contiguous, read. Exact up to 2**24, where float32 still counts.
- inv_freq                      [R/2]       float32, contiguous, read. Angle per position of each pair; R <= D. Dims >= R are not rotated.
- interleaved                   False: pairs are (i, i + R/2); True: (2i, 2i + 1).
- out                           [T, HK, D]  keys' dtype, any strides, written whole. It may be ``keys`` itself; other overlap is undefined.

The angle of a position is ``position * inv_freq`` rounded once to float32, which is what engines take cos and sin of, so the angles agree
with theirs to the last bit. The difference of two angles and its cos and sin are taken in float64, the rotation in float32, and the result
is rounded to the keys' dtype. Where the angle does not change, the bits do not either.

Graph-safe: the grid comes from ``keys``' shape, nothing is allocated and nothing waits. One program does BLOCK_H heads of one token; each
element is read and written by one program. Reference: ``reference/rope_shift.py``.
Raises ValueError on a wrong shape, dtype, stride or device.
"""
# mypy: disable-error-code="import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qcap.kernels import checks


@triton.jit
def rope_shift_kernel(
    keys_ptr,  # [T, HK, D]
    old_positions_ptr,  # [T]
    new_positions_ptr,  # [T]
    inv_freq_ptr,  # [HALF]
    out_ptr,  # [T, HK, D]
    keys_stride_token: tl.int64,
    keys_stride_head: tl.int64,
    keys_stride_dim,  # not annotated, so that 1 becomes a constant and loads are wide
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    out_stride_dim,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COPY_REST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_heads = (head < HEADS)[:, None]
    keys_row = keys_ptr + token * keys_stride_token + head[:, None] * keys_stride_head
    out_row = out_ptr + token * out_stride_token + head[:, None] * out_stride_head

    pair = tl.arange(0, BLOCK_PAIRS)
    inv_freq = tl.load(inv_freq_ptr + pair, mask=pair < HALF, other=0.0)
    old_angle = tl.load(old_positions_ptr + token).to(tl.float32) * inv_freq
    new_angle = tl.load(new_positions_ptr + token).to(tl.float32) * inv_freq
    delta = new_angle.to(tl.float64) - old_angle.to(tl.float64)
    cos = tl.cos(delta).to(tl.float32)[None, :]
    sin = tl.sin(delta).to(tl.float32)[None, :]
    still = (delta == 0)[None, :]

    if INTERLEAVED:
        first = (2 * pair).to(tl.int64)[None, :]
        second = first + 1
    else:
        first = pair.to(tl.int64)[None, :]
        second = first + HALF
    inside = in_heads & (pair < HALF)[None, :]
    x = tl.load(keys_row + first * keys_stride_dim, mask=inside)
    y = tl.load(keys_row + second * keys_stride_dim, mask=inside)
    new_x = (x.to(tl.float32) * cos - y.to(tl.float32) * sin).to(x.dtype)
    new_y = (y.to(tl.float32) * cos + x.to(tl.float32) * sin).to(y.dtype)
    tl.store(out_row + first * out_stride_dim, tl.where(still, x, new_x), mask=inside)
    tl.store(out_row + second * out_stride_dim, tl.where(still, y, new_y), mask=inside)

    if COPY_REST:
        rest = (2 * HALF + tl.arange(0, BLOCK_REST)).to(tl.int64)[None, :]
        beyond = in_heads & (rest < D)
        tl.store(out_row + rest * out_stride_dim, tl.load(keys_row + rest * keys_stride_dim, mask=beyond), mask=beyond)


def rope_shift(
    keys: torch.Tensor,
    old_positions: torch.Tensor,
    new_positions: torch.Tensor,
    inv_freq: torch.Tensor,
    interleaved: bool,
    out: torch.Tensor,
) -> None:
    """Rotate keys by the angle between their old and their new position, into ``out``. The module's docstring is the contract."""
    checks.rope_shift(keys, old_positions, new_positions, inv_freq, out)
    if keys.numel() == 0:
        return
    num_tokens, heads, head_size = keys.shape
    half = inv_freq.numel()
    block_pairs = triton.next_power_of_2(max(half, 1))
    block_h = min(triton.next_power_of_2(heads), max(1, 2048 // block_pairs))
    rope_shift_kernel[(num_tokens, triton.cdiv(heads, block_h))](
        keys,
        old_positions,
        new_positions,
        inv_freq,
        out,
        *keys.stride(),
        *out.stride(),
        HEADS=heads,
        D=head_size,
        HALF=half,
        INTERLEAVED=bool(interleaved),
        COPY_REST=out is not keys and 2 * half < head_size,
        BLOCK_H=block_h,
        BLOCK_PAIRS=block_pairs,
        BLOCK_REST=triton.next_power_of_2(max(head_size - 2 * half, 1)),
    )


def rope_shift_(
    keys: torch.Tensor, old_positions: torch.Tensor, new_positions: torch.Tensor, inv_freq: torch.Tensor, interleaved: bool
) -> None:
    """:func:`rope_shift` in place."""
    rope_shift(keys, old_positions, new_positions, inv_freq, interleaved, keys)
