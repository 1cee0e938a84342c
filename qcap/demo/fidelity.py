"""How far two caches are apart, by what the model says next. Plain torch; no engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qcap.errors import ShapeError


@dataclass(frozen=True)
class Fidelity:
    """Two runs over the same forced continuation, position by position.

    Args:
        same_top: bool ``[P]``, the most likely next token is the same one.
        kl: float64 ``[P]``, KL(reference || other) over the whole vocabulary, in nats.
    """

    same_top: torch.Tensor
    kl: torch.Tensor


def fidelity(reference: torch.Tensor, other: torch.Tensor) -> Fidelity:
    """Compare next-token logits.

    Args:
        reference, other: logits ``[P, V]`` of the same P positions, any float dtype; a constant added to a row changes nothing.

    Raises:
        ShapeError: the shapes differ, or a row holds NaN.
    """
    if reference.dim() != 2 or reference.shape != other.shape or not len(reference):
        raise ShapeError(f"logits must be two [P, V] of one shape, got {tuple(reference.shape)} and {tuple(other.shape)}")
    if reference.isnan().any() or other.isnan().any():
        raise ShapeError("logits hold NaN: the engine computed them from rows that hold NaN")
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    terms = torch.where(p.exp() > 0, p.exp() * (p - q), torch.zeros_like(p))  # 0 * log 0 is 0; also where both logits are -inf
    return Fidelity(reference.argmax(-1) == other.argmax(-1), terms.sum(-1).clamp_min(0.0))


def average(parts: list[Fidelity]) -> tuple[float, float]:
    """(top-1 agreement 0..1, mean KL in nats) over all positions of all ``parts``."""
    same = torch.cat([part.same_top for part in parts])
    return float(same.double().mean()), float(torch.cat([part.kl for part in parts]).mean())
