"""Attention mass from captured tensors: the one place where the SDK turns rows into what the kernel wants."""

from __future__ import annotations

import math

import torch

from qcap import kernels
from qcap.errors import CaptureEmpty
from qcap.geometry import Geometry
from qcap.sdk.ranks import split_heads


def layer_mass(q: torch.Tensor, kv: torch.Tensor, geometry: Geometry, layer: int, *, window: int = 0) -> torch.Tensor:
    """How much attention each token gets in one layer from the last ``window`` queries (all queries if 0).

    Args:
        q: ``[1, L, TQ, HQ * D]``, the queries of the last TQ of the T tokens.
        kv: ``[2, L, T, H]`` or keys alone ``[1, L, T, H]``.
        geometry: of the whole model; its scale, softcap and sliding window are used.
        layer: which.
        window: how many of the last queries count.

    Returns:
        float32 ``[HQ, T]``: per query head and key, the sum of softmax probabilities over those queries.
    """
    queries = split_heads(q[0, layer], geometry.num_q_heads)
    if window:
        queries = queries[-window:]
    keys = split_heads(kv[0, layer], geometry.num_kv_heads)
    sums = torch.empty(geometry.num_q_heads, keys.shape[0], dtype=torch.float32, device=keys.device)
    lse = torch.empty(geometry.num_q_heads, queries.shape[0], dtype=torch.float32, device=keys.device)
    kernels.attention_mass(
        queries,
        keys,
        geometry.scale or 1 / math.sqrt(geometry.head_size),
        softcap=geometry.softcap,
        sliding_window=geometry.sliding_window,
        column_sums=sums,
        row_lse=lse,
    )
    return sums


def nothing_retrieved(what: str, **rows: torch.Tensor | None) -> CaptureEmpty:
    """The error for a None where rows are wanted: ``retrieve`` says so when it finds not even one chunk."""
    missing = " and ".join(name for name, given in rows.items() if given is None)
    return CaptureEmpty(
        f"{what}: {missing} is None: retrieve() found nothing of these tokens. Look at ctx.coverage(tokens) for what is stored, "
        "and check the ids (those the engine was given, from the first on), the salt and the kind"
    )
