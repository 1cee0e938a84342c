"""To and from a ``transformers`` cache, to try an edit without an engine. ``transformers`` is imported on the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from qcap.errors import ShapeError, Unsupported
from qcap.geometry import Geometry
from qcap.sdk.ranks import split_heads

if TYPE_CHECKING:
    from transformers import DynamicCache


def to_dynamic_cache(kv: torch.Tensor, geometry: Geometry) -> DynamicCache:
    """A ``transformers.DynamicCache`` with these rows as its past.

    Args:
        kv: ``[2, L, T, H]``.
        geometry: of the whole model; L must be all of the model's layers.

    Returns:
        A cache of batch 1: per layer, keys and values ``[1, HK, T, D]``, copies.

    Raises:
        ShapeError: ``kv`` does not fit.
        Unsupported: ``transformers`` is not installed.

    Does not:
        Know positions. A model numbers the next token T; after ``keep(..., positions="keep")`` give it ``position_ids`` yourself. Crop:
        make a shorter cache with :func:`qcap.edits.keep` instead of ``DynamicCache.crop``, whose meaning changed between versions.
    """
    wanted = (2, geometry.num_layers, geometry.num_kv_heads * geometry.head_size)
    if kv.dim() != 4 or (kv.shape[0], kv.shape[1], kv.shape[3]) != wanted:
        raise ShapeError(f"kv must be [2, L, T, H] = [2, {wanted[1]}, T, {wanted[2]}], got {tuple(kv.shape)}")
    cache: DynamicCache = _cache_class()()
    for layer in range(geometry.num_layers):
        keys, values = (split_heads(plane[layer], geometry.num_kv_heads).transpose(0, 1)[None] for plane in kv)
        cache.update(keys, values, layer)
    return cache


def from_dynamic_cache(cache: Any, geometry: Geometry | None = None) -> torch.Tensor:
    """The rows of a ``transformers`` cache as ``[2, L, T, H]``: the inverse of :func:`to_dynamic_cache`.

    Args:
        cache: a ``DynamicCache`` of batch 1 with plain full-attention layers.
        geometry: to check against, if given.

    Returns:
        A new tensor of the cache's dtype, on its device.

    Raises:
        ShapeError: batch is not 1, the cache is empty, or ``geometry`` differs.
        Unsupported: layers of different lengths or widths, sliding-window layers, or layers without keys.
    """
    planes: list[list[torch.Tensor]] = [[], []]
    for number, layer in enumerate(getattr(cache, "layers", ())):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor) or keys.dim() != 4:
            raise Unsupported(f"layer {number} of this cache ({type(layer).__name__}) holds no keys and values [1, HK, T, D]")
        if getattr(layer, "is_sliding", False):
            raise Unsupported(f"layer {number} of this cache is a sliding-window layer: it holds the last tokens only, not all")
        if keys.shape[0] != 1:
            raise ShapeError(f"layer {number} of this cache has batch {keys.shape[0]}, wanted 1: see cache.batch_select_indices")
        for plane, rows in zip(planes, (keys, values), strict=True):
            plane.append(rows[0].transpose(0, 1).flatten(1))
    if not planes[0]:
        raise ShapeError("this cache is empty: run the model once with past_key_values=cache")
    shapes = {tuple(rows.shape) for plane in planes for rows in plane}
    if len(shapes) > 1:
        raise Unsupported(f"this cache's layers differ in [T, H]: {sorted(shapes)}")
    kv = torch.stack([torch.stack(plane) for plane in planes])
    if geometry is not None:
        wanted = (2, geometry.num_layers, kv.shape[2], geometry.num_kv_heads * geometry.head_size)
        if tuple(kv.shape) != wanted:
            raise ShapeError(f"this cache is {tuple(kv.shape)} as [2, L, T, H]; {geometry.model!r} has {wanted}")
    return kv


def _cache_class() -> Any:
    try:
        from transformers import DynamicCache
    except ImportError as error:
        raise Unsupported(f"qcap.hf needs transformers: pip install 'qcap[notebook]' ({error})") from None
    return DynamicCache
