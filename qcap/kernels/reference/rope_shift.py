"""Reference of :mod:`qcap.kernels.rope_shift`; the contract is there."""

from __future__ import annotations

import torch


def rope_shift(
    keys: torch.Tensor,
    old_positions: torch.Tensor,
    new_positions: torch.Tensor,
    inv_freq: torch.Tensor,
    interleaved: bool,
    out: torch.Tensor,
) -> None:
    """Rotate keys by the angle between their old and their new position, into ``out`` (which may be ``keys``)."""
    half = inv_freq.numel()
    old_angle = old_positions.to(torch.float32)[:, None] * inv_freq  # one float32 rounding, as in an engine's cos/sin cache
    new_angle = new_positions.to(torch.float32)[:, None] * inv_freq
    delta = (new_angle.double() - old_angle.double())[:, None, :]  # [T, 1, R/2]
    cos, sin = delta.cos().float(), delta.sin().float()

    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    x, y = keys[..., first].clone(), keys[..., second].clone()
    out.copy_(keys)
    # Where the angle does not change the bits do not either: x*1 - y*0 would lose -0.0 and spread inf and NaN.
    out[..., first] = torch.where(delta == 0, x, (x.float() * cos - y.float() * sin).to(keys.dtype))
    out[..., second] = torch.where(delta == 0, y, (y.float() * cos + x.float() * sin).to(keys.dtype))


def rope_shift_(
    keys: torch.Tensor, old_positions: torch.Tensor, new_positions: torch.Tensor, inv_freq: torch.Tensor, interleaved: bool
) -> None:
    """:func:`rope_shift` in place."""
    rope_shift(keys, old_positions, new_positions, inv_freq, interleaved, keys)
