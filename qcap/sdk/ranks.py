"""Whose heads lie where: one rank's rows against the whole model's rows. Plain arithmetic.

Heads are rank-major and contiguous: rank r holds heads ``[r * h, (r + 1) * h)``. Where there are more ranks than KV heads, each KV head is
repeated on consecutive ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from qcap.errors import ConfigError
from qcap.geometry import Geometry
from qcap.kinds import CacheKind


def replicas(rank_geometry: Geometry, kind: CacheKind) -> int:
    """How many consecutive ranks hold the same heads of ``kind``: 1 unless KV heads are repeated.

    Raises:
        ConfigError: the ranks' KV heads are no whole multiple of the model's.
    """
    if kind is not CacheKind.KV or not rank_geometry.total_num_kv_heads:
        return 1
    held, total = rank_geometry.num_kv_heads * rank_geometry.tp_size, rank_geometry.total_num_kv_heads
    if held % total:
        raise ConfigError(
            f"geometry of {rank_geometry.model!r}: {rank_geometry.tp_size} ranks hold {rank_geometry.num_kv_heads} KV heads each, "
            f"which is no whole multiple of the model's {total}"
        )
    return held // total


def whole_model(rank_geometry: Geometry) -> Geometry:
    """The geometry of all ranks' heads together: what the SDK's tensors look like."""
    ranks = rank_geometry.tp_size
    kv_heads = rank_geometry.num_kv_heads * ranks // replicas(rank_geometry, CacheKind.KV)
    return replace(
        rank_geometry,
        num_q_heads=rank_geometry.num_q_heads * ranks,
        num_kv_heads=kv_heads,
        total_num_kv_heads=kv_heads,
        tp_size=1,
        tp_rank=0,
    )


def columns(rank_geometry: Geometry, kind: CacheKind, rank: int) -> slice:
    """Which columns of the whole model's row (``[H]``) ``rank`` holds."""
    width = rank_geometry.hidden(kind)
    first = rank // replicas(rank_geometry, kind) * width
    return slice(first, first + width)


def owners(rank_geometry: Geometry, kind: CacheKind) -> range:
    """The ranks whose columns together make the whole row, each column once."""
    return range(0, rank_geometry.tp_size, replicas(rank_geometry, kind))


def split_heads(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """``[..., H]`` as ``[..., heads, D]``, a view for any strides."""
    return rows.view(*rows.shape[:-1], heads, rows.shape[-1] // heads)
