"""SGLang's token pool, a layer at a time: K and V of every layer are one tensor each, ``[slots, H, D]``, and a slot is a row of it."""

from __future__ import annotations

from typing import Any

import torch

from qcap.connectors.formats import LayerFormat
from qcap.connectors.layer import LayerConnector
from qcap.connectors.registry import register
from qcap.errors import ConfigError, Unsupported
from qcap.kernels import PageTable


def pool_table(pool: Any) -> PageTable:
    """A pool's slots as pages of one token.

    Args:
        pool: SGLang's ``MHATokenToKVPool``: it has ``k_buffer`` and ``v_buffer``, a tensor ``[slots, H, D]`` a layer.

    Raises:
        Unsupported: a pool of another kind: latent, quantised, paged by head, or with value heads of another size.
    """
    name = type(pool).__name__
    keys, values = getattr(pool, "k_buffer", None), getattr(pool, "v_buffer", None)
    if not keys or not values or len(keys) != len(values):
        raise Unsupported(f"{name} has no k_buffer and v_buffer with a tensor a layer: only pools of full attention (MHA) are known")
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout != "nhd" or any(not isinstance(t, torch.Tensor) or t.dim() != 3 for t in (*keys, *values)):
        raise Unsupported(f"{name}: its layout is {layout!r}: only 'nhd', [slots, heads, head size], is known")
    stored, dtype = getattr(pool, "store_dtype", keys[0].dtype), getattr(pool, "dtype", keys[0].dtype)
    if stored != dtype or getattr(pool, "k_scale_buffer", None) is not None:
        raise Unsupported(f"{name}: a {dtype} cache kept as {stored} is quantised; its scales are not stored yet")
    try:
        return PageTable([[k.unsqueeze(2), v.unsqueeze(2)] for k, v in zip(keys, values, strict=True)])
    except ValueError as error:
        raise Unsupported(f"{name}: K {tuple(keys[0].shape)} and V {tuple(values[0].shape)} differ, or layers do ({error})") from None


@register("sglang", "cuda", "xpu", "cpu", "musa", layerwise=True)
class SGLangConnector(LayerConnector):
    """Layer by layer into a token pool.

    Args:
        pool: see :func:`pool_table`; kept alive by the views of its tensors. A ``PageTable`` is taken as it is.
        staging_tokens, format, device_module: as for every connector.

    Raises:
        Unsupported: a pool of another kind.
    """

    def __init__(self, pool: Any, *, staging_tokens: int = 0, format: LayerFormat | None = None, device_module: Any = None) -> None:
        pages = pool if isinstance(pool, PageTable) else pool_table(pool)
        super().__init__(pages, staging_tokens=staging_tokens, format=format, device_module=device_module)
        if pages.block_size != 1:
            raise ConfigError(f"a token pool has one token a page, these pages have {pages.block_size}: they are not SGLang's")
