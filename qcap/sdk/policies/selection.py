"""From scores to a choice of tokens, and from a policy's name to an edit."""

from __future__ import annotations

import warnings
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from qcap.errors import ConfigError, ShapeError, TokenError
from qcap.geometry import Geometry
from qcap.sdk.context import outside
from qcap.sdk.edits import Edit, Index, as_index, keep_tokens
from qcap.sdk.policies.registry import scores
from qcap.tokens import TokenIds


def select(
    scores: torch.Tensor, keep: float, *, multiple_of: int = 1, scope: str = "global", always_keep: Index | None = None
) -> torch.Tensor:
    """The tokens with the highest scores, in their order.

    Args:
        scores: float32 ``[L, HK, T]``.
        keep: a float in (0, 1] is a share of T, an int a number of tokens.
        multiple_of: the number is rounded down to a multiple of this (the chunk size, so that no kept row is left in an unstored tail).
        scope: ``"global"`` chooses the same tokens for all layers and heads, by the mean of their scores; ``"head"`` lets each layer and
            KV head choose its own, equally many (composite tokens).
        always_keep: tokens that are kept whatever their score: positions ``[B]`` or a bool mask ``[T]``.

    Returns:
        int64, strictly increasing along its last axis: ``[B]``, or ``[L, HK, B]`` for ``"head"``. Of equal scores the lower position is
        kept, on every device.

    Raises:
        ShapeError: scores are not float32 ``[L, HK, T]`` or hold NaN.
        ConfigError: ``keep``, ``multiple_of`` or ``scope`` cannot be used.
        TokenError: ``always_keep`` is not usable, or longer than what is kept.
    """
    if scores.dim() != 3 or scores.dtype != torch.float32:
        raise ShapeError(f"scores must be float32 [L, HK, T], got {tuple(scores.shape)} of {scores.dtype} (16 bits tie: use .float())")
    if scores.isnan().any():
        raise ShapeError("scores hold NaN: their order would depend on the device")
    if scope not in ("global", "head"):
        raise ConfigError(f"scope must be 'global' or 'head', got {scope!r}")
    tokens = scores.shape[-1]
    count = _count(keep, tokens, multiple_of)
    # Summed in float64 and rounded: equal columns stay equal, whatever the order in which a device adds them up.
    ranked = scores.mean(dim=(0, 1), dtype=torch.float64).float() if scope == "global" else scores
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices
    if always_keep is not None:
        protected = torch.zeros(tokens, dtype=torch.bool, device=scores.device)
        protected[as_index(always_keep, tokens, 0, 0).to(scores.device)] = True
        if int(protected.sum()) > count:
            raise TokenError(f"always_keep has {int(protected.sum())} tokens, but only {count} are kept: raise keep")
        order = order.gather(-1, torch.sort(~protected[order], dim=-1, stable=True).indices)  # protected first, else as they were
    return order[..., :count].sort(dim=-1).values


def _count(keep: float, tokens: int, multiple_of: int) -> int:
    if isinstance(keep, bool | np.bool_) or not isinstance(keep, Real):
        raise ConfigError(f"keep must be a share in (0, 1] as a float or a number of tokens as an int, got {keep!r}")
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, Integral) or multiple_of < 1:
        raise ConfigError(f"multiple_of must be an integer, at least 1, got {multiple_of!r}")
    if not isinstance(keep, Integral):
        if not 0 < keep <= 1:
            raise ConfigError(f"keep as a float is a share in (0, 1], got {keep}; for a number of tokens give an int")
        wanted = round(float(keep) * tokens)
    else:
        wanted = int(keep)
        if not 0 < wanted <= tokens:
            raise ConfigError(f"keep as an int is a number of tokens in 1..{tokens}, got {keep}")
    count = wanted // multiple_of * multiple_of
    if not count:
        raise ConfigError(f"keep={keep!r} of {tokens} tokens is {wanted}, less than multiple_of={multiple_of}: nothing could be stored")
    return count


def apply(
    name: str,
    kv: torch.Tensor,
    q: torch.Tensor | None,
    tokens: TokenIds,
    geometry: Geometry,
    keep: float,
    *,
    multiple_of: int | None = None,
    scope: str = "global",
    always_keep: Index | None = None,
    positions: str = "renumber",
    parent_salt: str = "",
    **params: Any,
) -> Edit:
    """Score, select and cut in one go.

    Args:
        name: of the policy.
        kv: ``[2, L, T, H]`` as retrieved.
        q: the same tokens' queries ``[1, L, T, HQ * D]``, or None where the policy needs none.
        tokens: ids of the whole sequence; those after T become the edit's tail.
        geometry: ``ctx.geometry``.
        keep: share (float) or number (int) of the T tokens.
        multiple_of: see :func:`select`; the chunk size if not given, so that every kept row is stored.
        scope, always_keep: see :func:`select`.
        positions: see :func:`qcap.edits.keep`.
        parent_salt: the salt ``kv`` was retrieved with.
        params: of the policy.

    Returns:
        An :class:`Edit`; its salt stands for all of the above.

    Warns:
        UserWarning: a share comes out smaller by a twentieth or more, for it is rounded down to whole chunks.

    Raises:
        ConfigError, ShapeError, TokenError: as :func:`scores`, :func:`select` and :func:`qcap.edits.keep_tokens`.
    """
    marks = scores(name, kv, q, geometry, **params)
    index = select(
        marks, keep, multiple_of=geometry.chunk_size if multiple_of is None else multiple_of, scope=scope, always_keep=always_keep
    )
    kept, tokens_there = index.shape[-1], marks.shape[-1]
    if multiple_of is None and not isinstance(keep, Integral) and kept <= 0.95 * keep * tokens_there:
        warnings.warn(
            f"keep={keep} of {tokens_there} tokens: {kept} are kept, {kept / tokens_there:.1%}, since it is rounded down to whole chunks "
            f"of {geometry.chunk_size}, so that every kept row is stored. Capture with a smaller chunk_size for a finer share, or give "
            "multiple_of=1: the engine then computes the rows behind the last whole chunk anew",
            UserWarning,
            stacklevel=outside(),
        )
    told = {**params, "keep": keep, "scope": scope}
    return keep_tokens(kv, tokens, index, name=name, params=told, geometry=geometry, positions=positions, parent_salt=parent_salt)
