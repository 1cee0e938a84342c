"""The baseline that any policy must beat."""

from __future__ import annotations

from numbers import Integral

import torch

from qcap.errors import ConfigError
from qcap.geometry import Geometry
from qcap.sdk.policies.registry import policy


@policy("random")
def random(kv: torch.Tensor, q: torch.Tensor | None, geometry: Geometry, seed: int = 0) -> torch.Tensor:
    """Scores drawn at random, float32 ``[L, HK, T]`` in [0, 1): the same for all layers and heads, and for the same ``seed``.

    Raises:
        ConfigError: ``seed`` is no integer that a generator takes.
    """
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not -(2**63) <= seed < 2**64:
        raise ConfigError(f"seed must be an integer in [-2**63, 2**64), got {seed!r}")
    drawn = torch.rand(kv.shape[2], generator=torch.Generator().manual_seed(int(seed)), dtype=torch.float32)
    return drawn.to(kv.device).expand(geometry.num_layers, geometry.num_kv_heads, -1).contiguous()
