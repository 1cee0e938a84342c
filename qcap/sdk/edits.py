"""Keep or drop tokens of a cache, and what is needed to go on from the result.

Dropping tokens renumbers positions by default: the kept keys are rotated from where they were to ``0..B-1``, in float32, with the model's
own rope. Values carry no position. The rotation is by the difference of positions, so no attention scaling factor (yarn) enters.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from blake3 import blake3

from qcap import kernels
from qcap.errors import ConfigError, ShapeError, TokenError, Unsupported
from qcap.geometry import Geometry
from qcap.sdk.ranks import split_heads
from qcap.tokens import TokenIds, as_token_array, check_salt

if TYPE_CHECKING:
    from qcap.sdk.context import CacheContext

_log = logging.getLogger("qcap.sdk")
_MODES = ("renumber", "keep")

Index = torch.Tensor | np.ndarray | Sequence[int] | Sequence[bool]


def keep(kv: torch.Tensor, index: Index, *, geometry: Geometry, positions: str = "renumber", first_position: int = 0) -> torch.Tensor:
    """The rows of ``kv`` at ``index``, as one shorter cache.

    Args:
        kv: ``[2, L, T, H]`` keys and values, or ``[1, L, T, HQ * D]`` queries (they rotate the same way); any float dtype and device.
        index: which tokens to keep: positions ``[B]``, strictly increasing; or a bool mask ``[T]``; or, for *composite tokens*, another
            choice of B tokens for each layer and KV head ``[L, HK, B]``: slot b then holds, per layer and head, that head's b-th token.
        geometry: of the whole model (``ctx.geometry``).
        positions: ``"renumber"`` rotates the kept rows to ``first_position + 0..B-1``, which is where an engine that is given B tokens puts
            them; ``"keep"`` leaves their rotation alone, so that they still stand at ``first_position + index``: for simulations, because
            an engine will number the following tokens from B on.
        first_position: the position of ``kv``'s first row, before and after: 0 for a cache from the start of a sequence.

    Returns:
        A new tensor ``[planes, L, B, H]`` of ``kv``'s dtype and device; ``kv`` is not changed.

    Raises:
        ShapeError: ``kv`` does not fit ``geometry``.
        TokenError: the index is empty, out of range, not strictly increasing, or of the wrong shape.
        ConfigError: an unknown ``positions``, or a rope that cannot be re-rotated exactly.
        Unsupported: renumbering rows of 8 bits: rotate them in 16 or 32 and decide on the rounding yourself.

    Does not:
        Look at sliding windows: renumbering changes which tokens fall into a later token's window (a warning says so). Refuse NaN: rows
        that hold it are carried along (``store`` warns).
    """
    if positions not in _MODES:
        raise ConfigError(f"positions must be 'renumber' or 'keep', got {positions!r}")
    heads = _heads_of(kv, geometry)
    if positions == "renumber" and kv.dtype.itemsize == 1 and geometry.rope.kind != "none":
        raise Unsupported(
            f"renumbering {kv.dtype} rows: a rotation can leave the format's range. "
            "Give keep(kv.to(torch.bfloat16), ...) and cast the result"
        )
    layers, tokens, size = kv.shape[1], kv.shape[2], geometry.head_size
    chosen = as_index(index, tokens, layers, geometry.num_kv_heads)
    if chosen.dim() == 3 and heads != geometry.num_kv_heads:
        chosen = chosen.repeat_interleave(heads // geometry.num_kv_heads, dim=1)  # a query head sees the tokens of its KV head
    rows = split_heads(kv, heads)
    out = torch.empty((kv.shape[0], layers, chosen.shape[-1], heads, size), dtype=kv.dtype, device=kv.device)
    per_layer = chosen if chosen.dim() == 3 else [chosen] * layers
    for layer, at in enumerate(per_layer):
        _gather(rows[:, layer], at.to(kv.device), out[:, layer])
    if positions == "renumber":
        if geometry.sliding_window:
            _log.warning("keep: %s has a sliding window of %d tokens; renumbering moves kept tokens into or out of it",
                         geometry.model, geometry.sliding_window)  # fmt: skip
        inv_freq = geometry.rope.inv_freq().to(kv.device)
        for layer, at in enumerate(per_layer):
            _renumber(out[0, layer], at.to(kv.device) + first_position, first_position, inv_freq, geometry.rope.interleaved)
    return out.flatten(-2)


def drop(kv: torch.Tensor, index: Index, *, geometry: Geometry, positions: str = "renumber", first_position: int = 0) -> torch.Tensor:
    """``kv`` without the tokens at ``index``: :func:`keep` of all others. ``index`` is ``[B]`` or a bool mask ``[T]``; the rest as there.

    Raises:
        TokenError: as :func:`keep`; also if nothing would be left, or the index is one per layer and head.
    """
    _heads_of(kv, geometry)
    return keep(kv, _others(index, kv.shape[2]), geometry=geometry, positions=positions, first_position=first_position)


def as_index(index: Index, tokens: int, layers: int, kv_heads: int) -> torch.Tensor:
    """A checked int64 index on the CPU, ``[B]`` or ``[L, HK, B]``, from an index or a bool mask ``[T]``.

    Raises:
        TokenError: empty, out of range, not strictly increasing, or of the wrong shape or dtype.
    """
    try:
        at = torch.as_tensor(index).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise TokenError(
            f"an index must be integers or a bool mask, in a list, an array or a tensor, got {type(index).__name__}: "
            "for a slice, range(start, stop)"
        ) from None
    if at.dtype == torch.bool:
        if at.shape != (tokens,):
            raise TokenError(f"a mask must be bool [T] = [{tokens}], got {tuple(at.shape)}; for a choice per layer and head give an index")
        at = at.nonzero().flatten()
    if at.numel() == 0:
        raise TokenError("the index is empty: at least one token must be kept")
    if at.dtype.is_floating_point or at.dtype.is_complex:
        raise TokenError(f"an index must be integers or a bool mask, got {at.dtype}; of scores, select(scores, keep) makes an index")
    at = at.long()
    if at.dim() not in (1, 3) or (at.dim() == 3 and at.shape[:2] != (layers, kv_heads)):
        raise TokenError(f"an index must be [B] or [L, HK, B] = [{layers}, {kv_heads}, B], got {tuple(at.shape)}")
    low, high = int(at.min()), int(at.max())
    if low < 0 or high >= tokens:
        raise TokenError(f"index {low if low < 0 else high} is out of range: the cache has tokens 0..{tokens - 1}")
    steps = at.diff(dim=-1)
    if bool((steps <= 0).any()):
        where = [int(i) for i in (steps <= 0).nonzero()[0]]
        before, after = int(at[tuple(where)]), int(at[(*where[:-1], where[-1] + 1)])
        what = "a duplicate" if before == after else "not sorted"
        place = f" (layer {where[0]}, head {where[1]})" if at.dim() == 3 else ""
        raise TokenError(f"the index is {what}{place}: {before} is followed by {after}; give each token once, in order")
    return at


def _heads_of(kv: torch.Tensor, geometry: Geometry) -> int:
    """How many heads a row of ``kv`` has, by its planes."""
    if kv.dim() != 4 or kv.shape[0] not in (1, 2):
        raise ShapeError(f"wanted [2, L, T, H] (KV) or [1, L, T, H] (queries), got {tuple(kv.shape)}")
    heads = geometry.num_kv_heads if kv.shape[0] == 2 else geometry.num_q_heads
    if kv.shape[1] != geometry.num_layers or kv.shape[3] != heads * geometry.head_size:
        raise ShapeError(
            f"tensor {tuple(kv.shape)} does not fit {geometry.model!r}: L={geometry.num_layers} and H={heads} x {geometry.head_size} = "
            f"{heads * geometry.head_size} wanted; is this the geometry of the same model (ctx.geometry)?"
        )
    if not kv.dtype.is_floating_point:
        raise ShapeError(f"a cache is floating point, got {kv.dtype}")
    return heads


def _gather(rows: torch.Tensor, at: torch.Tensor, out: torch.Tensor) -> None:
    """``out[planes, B, heads, D]`` = rows ``[planes, T, heads, D]`` at ``[B]`` or ``[heads, B]``."""
    if at.dim() == 1:
        out.copy_(rows[:, at])
        return
    head = torch.arange(at.shape[0], device=at.device)
    out.copy_(rows[:, at.T, head])


def _renumber(keys: torch.Tensor, old: torch.Tensor, first: int, inv_freq: torch.Tensor, interleaved: bool) -> None:
    """Rotate ``keys[B, heads, D]`` in place from positions ``old`` (``[B]`` or ``[heads, B]``) to ``first..first+B-1``."""
    if not len(inv_freq):
        return
    slots, heads, size = keys.shape
    new = torch.arange(first, first + slots, device=keys.device)
    if old.dim() == 1:
        kernels.rope_shift(keys, old, new, inv_freq, interleaved, keys)
        return
    flat = keys.transpose(0, 1).reshape(heads * slots, 1, size)  # a copy: each head's rows have positions of their own
    kernels.rope_shift(flat, old.reshape(-1).contiguous(), new.repeat(heads), inv_freq, interleaved, flat)
    keys.copy_(flat.view(heads, slots, size).transpose(0, 1))


def _others(index: Index, tokens: int) -> torch.Tensor:
    """The mask of the tokens that are not dropped."""
    at = torch.as_tensor(index)
    if at.dim() != 1:
        raise TokenError(f"an index of tokens to drop must be [B] or a bool mask [T], got {tuple(at.shape)}")
    kept = torch.ones(tokens, dtype=torch.bool)
    drops_something = bool(at.any()) if at.dtype == torch.bool and at.shape == (tokens,) else at.numel() > 0
    if drops_something:
        kept[as_index(index, tokens, 0, 0)] = False
    if not kept.any():
        raise TokenError(f"all {tokens} tokens would be dropped: at least one must stay")
    return kept


# -- salts and the Edit value ---------------------------------------------------------------------------------------


def salt_for(name: str, params: Mapping[str, Any] | None = None, parent: str = "") -> str:
    """A short salt that is the same for the same edit: ``name-`` and 20 hex digits over the name, its parameters and its parent.

    Args:
        name: of the edit; what a key may not hold is replaced by ``_``.
        params: anything JSON can say, and tensors or arrays (as lists).
        parent: what was edited: its salt, or any text that stands for it.

    Raises:
        TokenError: the name is empty.
        ConfigError: a parameter that JSON cannot say.
    """
    readable = re.sub(r"[^A-Za-z0-9._+-]", "_", name)[:64]
    if not readable:
        raise TokenError("an edit needs a name: it is what you will see in listings")
    return check_salt(f"{readable}-{blake3(_canonical([name, dict(params or {}), parent]).encode()).hexdigest()[:20]}")


def _canonical(value: Any) -> str:
    def plain(item: Any) -> Any:
        if isinstance(item, torch.Tensor | np.ndarray):
            return item.tolist()
        if isinstance(item, np.generic):
            return item.item()
        raise ConfigError(f"an edit's parameters must be numbers, text, lists, mappings or tensors; got {type(item).__name__}: {item!r}")

    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=plain)


@dataclass(frozen=True, kw_only=True)
class Edit:
    """An edited cache and everything needed to go on from it.

    Args:
        tensor: ``[planes, L, B, H]``.
        token_ids: ``[B]``, the ids under which the rows are stored.
        positions: ``[B]``, what each row's rotation stands for.
        salt: under which it is stored; give it to the engine as the request's cache salt.
        description: name, parameters, parent salt, and what was done.
        tail: ids that followed the cache in the original sequence (its last, unfilled chunk): they come next in a prompt.
    """

    tensor: torch.Tensor
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    salt: str
    description: dict[str, Any] = field(default_factory=dict)
    tail: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        rows = self.tensor.shape[2] if self.tensor.dim() == 4 else -1
        if not rows == len(self.token_ids) == len(self.positions):
            raise ShapeError(
                f"an edit's tensor {tuple(self.tensor.shape)} [planes, L, B, H], its {len(self.token_ids)} token ids and its "
                f"{len(self.positions)} positions must agree on B"
            )
        if not check_salt(self.salt):
            raise TokenError("an edit needs a salt: salt_for(name, params) makes one")

    def store(self, context: CacheContext, *, overwrite: bool = False) -> bool:
        """Write it: see :meth:`CacheContext.store`."""
        return context.store(self, overwrite=overwrite)

    def prompt(self, rest: TokenIds = ()) -> list[int]:
        """The token ids to send with this edit's salt: the kept ones, the original's tail, then ``rest`` (a question, a new turn)."""
        ids = [*self.token_ids, *self.tail, *as_token_array(rest).tolist()]
        if len(ids) == len(self.token_ids):
            _log.warning(
                "prompt: nothing follows the edited tokens; an engine must compute at least one token, so it will compute the end of the "
                "edited part itself, and not as edited. Give the rest of the prompt"
            )
        return ids

    def __repr__(self) -> str:
        return f"Edit({self.salt!r}: {len(self.token_ids)} tokens kept, {len(self.tail)} in the tail, tensor {tuple(self.tensor.shape)})"


def keep_tokens(
    source: torch.Tensor | CacheContext,
    tokens: TokenIds,
    index: Index,
    *,
    name: str = "keep",
    params: Mapping[str, Any] | None = None,
    geometry: Geometry | None = None,
    positions: str = "renumber",
    parent_salt: str = "",
) -> Edit:
    """Keep the tokens at ``index`` and return an :class:`Edit` ready to be stored.

    Args:
        source: the cache ``[planes, L, T, H]``, or a context to retrieve it from.
        tokens: ids of the sequence, at least T; those after T become the edit's tail.
        index: as in :func:`keep`. With composite tokens, a slot's id is one of the B tokens that most heads keep.
        name, params: what is edited; part of the salt.
        geometry: needed with a tensor.
        positions: as in :func:`keep`. Composite tokens can only be renumbered: kept, a slot would stand at several positions at once.
        parent_salt: the salt ``source`` was (or is to be) retrieved with.

    Raises:
        TokenError, ShapeError, ConfigError: as :func:`keep`; TokenError also if the context holds nothing of ``tokens``.
        Unsupported: composite tokens with ``positions="keep"``.
    """
    kv, shape, array = _source(source, tokens, geometry, parent_salt)
    rows = kv.shape[2]
    at = as_index(index, rows, shape.num_layers, shape.num_kv_heads)
    if at.dim() == 3 and positions == "keep":
        raise Unsupported('composite tokens with positions="keep": a slot would stand at another position in each head; use "renumber"')
    edited = keep(kv, at, geometry=shape, positions=positions)
    named = at if at.dim() == 1 else _most_kept(at, rows)
    slots = at.shape[-1]
    # The salt must tell apart two sources whose kept ids are equal (same keys, other rows): the source's digest is part of the parent.
    digest = blake3(array.astype(">u4").tobytes()).hexdigest()
    choice = blake3(at.numpy().astype("<i8").tobytes()).hexdigest()
    description = {
        "name": name,
        "params": json.loads(_canonical(dict(params or {}))),
        "parent_salt": parent_salt,
        "source_digest": digest,
        "index_digest": choice,
        "positions": positions,
        "kept": slots,
        "of": rows,
        "composite": at.dim() == 3,
    }
    salt = salt_for(name, {"params": params or {}, "index": choice, "positions": positions}, f"{parent_salt}\n{digest}")
    return Edit(
        tensor=edited,
        token_ids=tuple(array[named.numpy()].tolist()),
        positions=tuple(range(slots) if positions == "renumber" else named.tolist()),
        salt=salt,
        description=description,
        tail=tuple(array[rows:].tolist()),
    )


def drop_tokens(
    source: torch.Tensor | CacheContext,
    tokens: TokenIds,
    index: Index,
    *,
    name: str = "drop",
    params: Mapping[str, Any] | None = None,
    geometry: Geometry | None = None,
    positions: str = "renumber",
    parent_salt: str = "",
) -> Edit:
    """Drop the tokens at ``index`` (``[B]`` or a bool mask ``[T]``): :func:`keep_tokens` of all others, with the same arguments."""
    kv, shape, _ = _source(source, tokens, geometry, parent_salt)
    others = _others(index, kv.shape[2])
    return keep_tokens(kv, tokens, others, name=name, params=params, geometry=shape, positions=positions, parent_salt=parent_salt)


def _source(
    source: torch.Tensor | CacheContext, tokens: TokenIds, geometry: Geometry | None, salt: str
) -> tuple[torch.Tensor, Geometry, np.ndarray]:
    """The cache, its geometry and the ids, from a tensor or a context."""
    array = as_token_array(tokens)
    if isinstance(source, torch.Tensor):
        if geometry is None:
            raise ConfigError("a tensor does not know its heads and rope: give geometry=ctx.geometry, or the context itself")
        _heads_of(source, geometry)
        kv: torch.Tensor | None = source
    else:
        geometry = source.geometry
        kv = source.retrieve(array, salt)
    if kv is None:
        raise TokenError(f"nothing is stored of these {len(array)} tokens (salt {salt!r}): ctx.coverage(tokens) tells what is")
    if len(array) < kv.shape[2]:
        raise TokenError(f"{len(array)} token ids for {kv.shape[2]} rows: give the ids of the whole sequence")
    return kv, geometry, array


def _most_kept(at: torch.Tensor, tokens: int) -> torch.Tensor:
    """The B tokens that most (layer, head) pairs keep, in order; ties go to the lower position."""
    votes = torch.bincount(at.flatten(), minlength=tokens)
    return torch.sort(-votes, stable=True).indices[: at.shape[-1]].sort().values


__all__ = ["Edit", "as_index", "drop", "drop_tokens", "keep", "keep_tokens", "salt_for"]
