"""Keys re-rotated from their old positions to new ones.

``rope_shift(keys, old_positions, new_positions, inv_freq, interleaved, out) -> None``
``rope_shift_(keys, old_positions, new_positions, inv_freq, interleaved) -> None``, in place

- keys                          [T, HK, D]  float32, bfloat16 or float16, any strides, read. Post-RoPE.
- old_positions, new_positions  [T]         int64, contiguous, read. Exact up to 2**24, where float32 still counts.
- inv_freq                      [R/2]       float32, contiguous, read. Angle per position of each pair; R <= D. Dims >= R are not rotated.
- interleaved                   False: pairs are (i, i + R/2); True: (2i, 2i + 1).
- out                           [T, HK, D]  keys' dtype, any strides, written whole. It may be ``keys`` itself; other overlap is undefined.

The angle of a position is ``position * inv_freq`` rounded once to float32, which is what engines take cos and sin of, so the angles agree
with theirs to the last bit. The difference of two angles is taken in float64, its cos and sin with an error of at most 2**-22 (for
differences up to 1e8), the rotation in float32, and the result is rounded to the keys' dtype. Where the angle does not change, the bits do
not either.

Graph-safe: the grid comes from ``keys``' shape, nothing is allocated and nothing waits. One program does BLOCK_H heads of BLOCK_T tokens;
each element is read and written by one program. Reference: ``reference/rope_shift.py``.
Raises ValueError on a wrong shape, dtype, stride or device.
"""
# mypy: disable-error-code="import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qcap.kernels import checks


@triton.jit
def _cos_sin(angle):
    """cos and sin of float64, as float32: brought to -pi/4..pi/4 in float64, then polynomials. libdevice's float64 cos costs far more."""
    quarters = tl.floor(angle * 0.6366197723675814 + 0.5)
    rest = angle - quarters * 1.570796325802803  # pi / 2 in three parts; the first two have 27 bits, so the products are exact
    rest = rest - quarters * 9.920935739593517e-10
    rest = rest - quarters * 5.721188726109832e-18
    x = rest.to(tl.float32)
    left = (rest - x.to(tl.float64)).to(tl.float32)
    z = x * x
    sin = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))  # the usual minimax coefficients (Cephes)
    cos = 1.0 - 0.5 * z + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    sin, cos = sin + left * cos, cos - left * sin
    quadrant = quarters.to(tl.int32) & 3
    swapped_cos, swapped_sin = tl.where(quadrant % 2 == 1, sin, cos), tl.where(quadrant % 2 == 1, cos, sin)
    cos = tl.where((quadrant == 1) | (quadrant == 2), -swapped_cos, swapped_cos)
    return cos, tl.where(quadrant >= 2, -swapped_sin, swapped_sin)


@triton.jit(do_not_specialize=["num_tokens"])
def rope_shift_kernel(
    keys_ptr, old_positions_ptr, new_positions_ptr, inv_freq_ptr, out_ptr,  # [T, HK, D], [T], [T], [HALF], [T, HK, D]
    num_tokens, keys_stride_token: tl.int64, keys_stride_head: tl.int64, keys_stride_dim,  # dims' strides are not annotated, so that
    out_stride_token: tl.int64, out_stride_head: tl.int64, out_stride_dim,  # 1 becomes a constant and loads are wide
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, COPY_REST: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = (token < num_tokens)[:, None, None] & (head < HEADS)[None, :, None]
    keys_row = keys_ptr + token[:, None, None] * keys_stride_token + head[None, :, None] * keys_stride_head
    out_row = out_ptr + token[:, None, None] * out_stride_token + head[None, :, None] * out_stride_head

    pair = tl.arange(0, BLOCK_PAIRS)
    inv_freq = tl.load(inv_freq_ptr + pair, mask=pair < HALF, other=0.0)[None, :]
    old_angle = tl.load(old_positions_ptr + token, mask=token < num_tokens, other=0).to(tl.float32)[:, None] * inv_freq
    new_angle = tl.load(new_positions_ptr + token, mask=token < num_tokens, other=0).to(tl.float32)[:, None] * inv_freq
    delta = new_angle.to(tl.float64) - old_angle.to(tl.float64)  # [BLOCK_T, BLOCK_PAIRS]: once for all heads
    cos, sin = _cos_sin(delta)
    cos, sin, still = cos[:, None, :], sin[:, None, :], (old_angle == new_angle)[:, None, :]

    if INTERLEAVED:
        dim = tl.arange(0, 2 * BLOCK_PAIRS).to(tl.int64)[None, None, :]
        rotated = inside & (dim < 2 * HALF)
        both = tl.load(keys_row + dim * keys_stride_dim, mask=rotated)
        x, y = tl.split(tl.reshape(both, [BLOCK_T, BLOCK_H, BLOCK_PAIRS, 2]))
    else:
        dim = pair.to(tl.int64)[None, None, :]
        rotated = inside & (dim < HALF)
        x = tl.load(keys_row + dim * keys_stride_dim, mask=rotated)
        y = tl.load(keys_row + (dim + HALF) * keys_stride_dim, mask=rotated)
    new_x = tl.where(still, x, (x.to(tl.float32) * cos - y.to(tl.float32) * sin).to(x.dtype))
    new_y = tl.where(still, y, (y.to(tl.float32) * cos + x.to(tl.float32) * sin).to(y.dtype))
    if INTERLEAVED:
        both = tl.reshape(tl.join(new_x, new_y), [BLOCK_T, BLOCK_H, 2 * BLOCK_PAIRS])
        tl.store(out_row + dim * out_stride_dim, both, mask=rotated)
    else:
        tl.store(out_row + dim * out_stride_dim, new_x, mask=rotated)
        tl.store(out_row + (dim + HALF) * out_stride_dim, new_y, mask=rotated)

    if COPY_REST:
        rest = (2 * HALF + tl.arange(0, BLOCK_REST)).to(tl.int64)[None, None, :]
        beyond = inside & (rest < D)
        tl.store(out_row + rest * out_stride_dim, tl.load(keys_row + rest * keys_stride_dim, mask=beyond), mask=beyond)


def block_shape(heads: int, head_size: int, half: int) -> dict[str, int]:
    """The blocks: at most 2048 pairs a program, all heads of a token in one where they fit."""
    pairs, rest = triton.next_power_of_2(max(half, 1)), triton.next_power_of_2(max(head_size - 2 * half, 1))
    width = max(pairs, rest // 2)
    block_h = min(triton.next_power_of_2(heads), max(1, 2048 // width))
    return {"BLOCK_T": min(8, max(1, 2048 // (block_h * width))), "BLOCK_H": block_h, "BLOCK_PAIRS": pairs, "BLOCK_REST": rest}


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
    blocks = block_shape(heads, head_size, half)
    rope_shift_kernel[(triton.cdiv(num_tokens, blocks["BLOCK_T"]), triton.cdiv(heads, blocks["BLOCK_H"]))](
        keys,
        old_positions,
        new_positions,
        inv_freq,
        out,
        num_tokens,
        *keys.stride(),
        *out.stride(),
        HEADS=heads,
        D=head_size,
        HALF=half,
        INTERLEAVED=bool(interleaved),
        COPY_REST=out is not keys and 2 * half < head_size,
        **blocks,
    )


def rope_shift_(
    keys: torch.Tensor, old_positions: torch.Tensor, new_positions: torch.Tensor, inv_freq: torch.Tensor, interleaved: bool
) -> None:
    """:func:`rope_shift` in place."""
    rope_shift(keys, old_positions, new_positions, inv_freq, interleaved, keys)
