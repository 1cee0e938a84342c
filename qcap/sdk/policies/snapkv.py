"""SnapKV (arXiv 2404.14469): keep what the last queries look at."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from qcap.errors import ConfigError
from qcap.geometry import Geometry
from qcap.sdk.mass import layer_mass
from qcap.sdk.policies.registry import policy

_REDUCE: dict[str, Callable[..., torch.Tensor]] = {"mean": torch.mean, "max": torch.amax, "sum": torch.sum}


@policy("snapkv", needs_queries=True)
def snapkv(
    kv: torch.Tensor,
    q: torch.Tensor,
    geometry: Geometry,
    window: int = 32,
    kernel: int = 7,
    pool: str = "max",
    reduce: str = "mean",
) -> torch.Tensor:
    """The attention that the last ``window`` queries pay to each earlier token, pooled over neighbours.

    Args:
        kv, q: ``[2, L, T, H]`` and ``[1, L, T, HQ * D]``.
        window: queries that vote; their own tokens always score highest, so they are kept.
        kernel: width of the pooling, odd; 1 for none.
        pool: ``"max"`` or ``"avg"``.
        reduce: over the query heads of a KV head: ``"mean"``, ``"max"`` or ``"sum"``.

    Returns:
        float32 ``[L, HK, T]``.

    Raises:
        ConfigError: a parameter is out of range, or T is not more than ``window``.

    Does not:
        Know which tokens are the question. If it is inside the window the policy has seen it: say so next to any result.
    """
    tokens = kv.shape[2]
    if reduce not in _REDUCE or pool not in ("max", "avg"):
        raise ConfigError(f"pool must be 'max' or 'avg' and reduce one of {sorted(_REDUCE)}, got {pool!r} and {reduce!r}")
    if not 0 < window < tokens or kernel < 1 or kernel % 2 == 0:
        raise ConfigError(f"window must lie in 1..{tokens - 1} (T - 1) and kernel be odd, got window={window}, kernel={kernel}")
    result = torch.empty(geometry.num_layers, geometry.num_kv_heads, tokens, dtype=torch.float32, device=kv.device)
    for layer in range(geometry.num_layers):
        mass = layer_mass(q, kv, geometry, layer, window=window)[:, : tokens - window]  # [HQ, T - window]
        if kernel > 1:
            average = functional.avg_pool1d(mass, kernel, stride=1, padding=kernel // 2)
            mass = functional.max_pool1d(mass, kernel, stride=1, padding=kernel // 2) if pool == "max" else average
        result[layer, :, : tokens - window] = _REDUCE[reduce](mass.view(geometry.num_kv_heads, -1, tokens - window), dim=1)
    # More than any token of any head can have, yet finite: an infinity would hide all else in a mean over heads.
    result[:, :, tokens - window :] = result[:, :, : tokens - window].max() + 1
    return result
