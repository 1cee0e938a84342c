"""Which layers can be captured, and where K and V lie in their pages.

A layout is never guessed: every layout that fits a page tensor's shape is a candidate, the engine's own cache-write is asked to write a
pattern to two free blocks, and the one candidate that reads the pattern back is certified. The pages are put back as they were.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch

from qcap.errors import Unsupported
from qcap.geometry import PagedLayout, PlaneStrides


@dataclass(frozen=True)
class CacheGroup:
    """The KV cache group that is captured: the full-attention group with the most layers.

    Args:
        index: its number in ``kv_cache_config.kv_cache_groups``.
        specs: layer name -> vLLM's spec of it, in model order.
        block_size: tokens in a block of this group.
        num_blocks: B.
        left_out: layer name -> why it is not captured.
        alone: there is no other group, which would share the block pool.
    """

    index: int
    specs: dict[str, Any]
    block_size: int
    num_blocks: int
    left_out: dict[str, str] = field(default_factory=dict)
    alone: bool = True

    @property
    def whole(self) -> bool:
        """Whether it holds all of the target model's layers: only then may its pages be filled from a store."""
        return all(reason == DRAFT for reason in self.left_out.values())


DRAFT = "draft-model layer"


def layer_number(name: str) -> int:
    """``model.layers.12.self_attn.attn`` -> 12; names without a number sort first."""
    numbers = re.findall(r"\.(\d+)\.", f".{name}.")
    return int(numbers[0]) if numbers else -1


def pick_group(kv_cache_config: Any, num_hidden_layers: int | None) -> CacheGroup:
    """The group to capture.

    Args:
        kv_cache_config: vLLM's, of either role.
        num_hidden_layers: layers of the target model; a draft model's layers have higher numbers and are left out.

    Raises:
        Unsupported: no group of plain full attention; names each group's kind.
    """
    best: CacheGroup | None = None
    left_out: dict[str, str] = {}
    groups = list(getattr(kv_cache_config, "kv_cache_groups", None) or ())
    for index, group in enumerate(groups):
        spec = group.kv_cache_spec
        per_layer = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, spec)
        good = {}
        for name in group.layer_names:
            reason = _why_not(per_layer.get(name, spec))
            drafts = name.startswith("draft_model.") or (num_hidden_layers is not None and layer_number(name) >= num_hidden_layers)
            if not reason and drafts:
                reason = DRAFT
            if reason:
                left_out[name] = reason
            else:
                good[name] = per_layer.get(name, spec)
        ordered = dict(sorted(good.items(), key=lambda item: layer_number(item[0])))
        block_sizes = {s.block_size for s in ordered.values()}
        if ordered and len(block_sizes) == 1 and (best is None or len(ordered) > len(best.specs)):
            if best is not None:
                left_out.update(dict.fromkeys(best.specs, "in another cache group"))
            best = CacheGroup(index, ordered, block_sizes.pop(), int(kv_cache_config.num_blocks))
        else:
            left_out.update(dict.fromkeys(ordered, "in another cache group"))
    if best is None:
        kinds = ", ".join(sorted({type(g.kv_cache_spec).__name__ for g in groups})) or "no cache groups"
        raise Unsupported(f"no full-attention cache group to capture ({kinds})")
    left_out = {n: r for n, r in left_out.items() if n not in best.specs}
    return CacheGroup(best.index, best.specs, best.block_size, best.num_blocks, left_out, alone=len(groups) == 1)


def _why_not(spec: Any) -> str:
    names = {base.__name__ for base in type(spec).__mro__}
    if "AttentionSpec" not in names:
        return f"{type(spec).__name__} is not attention"
    if "MLAAttentionSpec" in names:
        return "multi-head latent attention"
    for other in (
        "SlidingWindowSpec",
        "ChunkedLocalAttentionSpec",
        "CrossAttentionSpec",
        "EncoderOnlyAttentionSpec",
        "SinkFullAttentionSpec",
        "RSWASpec",
    ):
        if other in names:
            return other
    if "FullAttentionSpec" not in names:
        return f"{type(spec).__name__} is not full attention"
    head_v = getattr(spec, "head_size_v", None)
    if head_v not in (None, 0, spec.head_size):
        return f"value heads of size {head_v} beside key heads of {spec.head_size}"
    return ""


def candidates(pages: torch.Tensor, *, blocks: int, block_size: int, heads: int, head_size: int) -> list[PagedLayout]:
    """Every layout known in vLLM 0.20-0.32 that fits ``pages``' shape: name, and affine maps built from its own strides."""
    b, n, h, d = blocks, block_size, heads, head_size
    s = pages.stride()
    found: list[tuple[str, PlaneStrides, PlaneStrides]] = []
    shape = tuple(pages.shape)
    if shape == (b, h, n, 2 * d):
        found.append(("BHN(K|V)", PlaneStrides(0, s[0], s[1], s[2], s[3]), PlaneStrides(d * s[3], s[0], s[1], s[2], s[3])))
        if s[3] == 1 and s[2] == 2 * d:  # a page of one head is one run of 2ND elements: a K plane, then a V plane
            value = PlaneStrides(n * d, s[0], s[1], d, 1)
            found.append(("BH(Kt,V)", PlaneStrides(0, s[0], s[1], 1, n), value))
            found.append(("BH(K,V)", PlaneStrides(0, s[0], s[1], d, 1), value))
    if shape == (b, 2, n, h, d):
        found.append(("B2NHD", PlaneStrides(0, s[0], s[3], s[2], s[4]), PlaneStrides(s[1], s[0], s[3], s[2], s[4])))
    if shape == (2, b, n, h, d):
        found.append(("2BNHD", PlaneStrides(0, s[1], s[3], s[2], s[4]), PlaneStrides(s[0], s[1], s[3], s[2], s[4])))
    if shape == (2, b, h, n, d):
        found.append(("2BHND", PlaneStrides(0, s[1], s[2], s[3], s[4]), PlaneStrides(s[0], s[1], s[2], s[3], s[4])))
        if s[4] == 1 and s[3] == d:
            found.append(("2BH(Kt)", PlaneStrides(0, s[1], s[2], 1, n), PlaneStrides(s[0], s[1], s[2], s[3], s[4])))
    return [PagedLayout(name=name, blocks=b, heads=h, block_size=n, head_size=d, planes=(k, v)) for name, k, v in found]


def certify(name: str, layer: Any, pages: torch.Tensor, spec: Any, num_blocks: int) -> PagedLayout:
    """The layout of one layer's pages, proved by a pattern that the engine itself writes.

    Must run before the engine serves: blocks 1 and B-1 are written to and restored.

    Raises:
        Unsupported: no known layout fits, the cache is quantised, there is no way to write a pattern, or none or several read it back.
    """
    if not isinstance(pages, torch.Tensor):
        raise Unsupported(f"{name}: the cache is a {type(pages).__name__}, not one tensor")
    n, h, d = spec.block_size, spec.num_kv_heads, spec.head_size
    if pages.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise Unsupported(f"{name}: a {pages.dtype} cache is quantised; its scales are not stored yet")
    if num_blocks < 3:
        raise Unsupported(f"{name}: {num_blocks} blocks leave none to write a test pattern to")
    fitting = candidates(pages, blocks=num_blocks, block_size=n, heads=h, head_size=d)
    where = f"{name}: pages {tuple(pages.shape)} with strides {pages.stride()} ({type(layer.impl).__name__})"
    if not fitting:
        raise Unsupported(f"{where} match no known layout")
    write = getattr(layer.impl, "do_kv_cache_update", None)
    if write is None:
        raise Unsupported(f"{where}: this backend offers no cache write to prove the layout with")
    block_dim = next(i for i, size in enumerate(pages.shape) if size == num_blocks)
    used = (1, num_blocks - 1)
    saved = [pages.select(block_dim, b).clone() for b in used]
    generator = torch.Generator().manual_seed(num_blocks * 31 + n)
    rows = torch.randn((2, 2 * n, h, d), generator=generator).to(pages.dtype).to(pages.device)
    slots = torch.cat([torch.arange(n) + b * n for b in used]).to(pages.device)
    order = torch.randperm(2 * n, generator=generator).to(pages.device)  # the write is by slot; a layout that ignored it would be found out
    try:
        write(layer, rows[0].index_select(0, order), rows[1].index_select(0, order), pages, slots.index_select(0, order))
        proved = []
        for layout in fitting:
            seen = [view[list(used)].permute(0, 2, 1, 3).reshape(2 * n, h, d) for view in layout.views(pages)]
            if torch.equal(seen[0], rows[0]) and torch.equal(seen[1], rows[1]):
                proved.append(layout)
    except Exception as error:
        raise Unsupported(f"{where}: the test write failed ({type(error).__name__}: {error})") from error
    finally:
        for b, page in zip(used, saved, strict=True):
            pages.select(block_dim, b).copy_(page)
    if len(proved) != 1:
        raise Unsupported(f"{where}: {len(proved)} of the layouts {[c.name for c in fitting]} read the test pattern back; one was wanted")
    return proved[0]
