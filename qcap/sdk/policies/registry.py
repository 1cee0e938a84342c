"""The policies by name, and the check of what they return."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from qcap.errors import CaptureEmpty, ConfigError, ShapeError
from qcap.geometry import Geometry
from qcap.kinds import CacheKind
from qcap.sdk.mass import nothing_retrieved

ScoreFunction = Callable[..., torch.Tensor]


class QueriesMissing(CaptureEmpty, ConfigError):
    """A policy needs queries and got None: none were captured, or none of these tokens."""


@dataclass(frozen=True)
class Policy:
    """A registered policy: its name, its function, and whether it needs captured queries."""

    name: str
    function: ScoreFunction
    needs_queries: bool

    @property
    def params(self) -> dict[str, Any]:
        """Its parameters and their defaults (``inspect.Parameter.empty`` for none)."""
        return {p.name: p.default for p in list(inspect.signature(self.function).parameters.values())[3:]}


_POLICIES: dict[str, Policy] = {}


def policy(name: str, *, needs_queries: bool = False) -> Callable[[ScoreFunction], ScoreFunction]:
    """Register ``scores(kv, q, geometry, **params) -> float32 [L, HK, T]`` under ``name``. The function itself is returned unchanged.

    A name that is already known is replaced, so that a notebook cell can be run again.

    Args:
        name: what ``apply`` and ``scores`` know it by.
        needs_queries: it reads ``q``; ``apply`` then says early, and how, if there are none.
    """

    def register(function: ScoreFunction) -> ScoreFunction:
        _POLICIES[name] = Policy(name, function, needs_queries)
        return function

    return register


def names() -> list[str]:
    """All registered names, sorted."""
    return sorted(_POLICIES)


def get(name: str) -> Policy:
    """The policy of that name.

    Raises:
        ConfigError: there is none; the message has the nearest one.
    """
    if name not in _POLICIES:
        near = difflib.get_close_matches(name, names(), n=1, cutoff=0.4)
        raise ConfigError(f"unknown policy {name!r}{f', did you mean {near[0]!r}?' if near else ''} Known: {', '.join(names())}")
    return _POLICIES[name]


def scores(name: str, kv: torch.Tensor | None, q: torch.Tensor | None, geometry: Geometry, **params: Any) -> torch.Tensor:
    """Run a policy and check what it returns.

    Args:
        name: of the policy.
        kv: ``[2, L, T, H]``.
        q: ``[1, L, T, HQ * D]``, the same tokens' queries, or None where the policy needs none.
        geometry: of the whole model.
        params: of the policy.

    Returns:
        float32 ``[L, HK, T]``, without NaN.

    Raises:
        ConfigError: unknown policy or parameter.
        CaptureEmpty: ``kv`` is None, or queries are needed and ``q`` is None (then also a ConfigError).
        ShapeError: an input does not fit the model, or the policy returned something else than it must.
    """
    chosen = get(name)
    unknown = [key for key in params if key not in chosen.params]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(chosen.function).parameters.values()):
        raise ConfigError(f"policy {name!r} has no parameter {unknown[0]!r}; it has {', '.join(chosen.params) or 'none'}")
    if kv is None:
        raise nothing_retrieved(f"policy {name!r}", kv=kv)
    _check_inputs(chosen, kv, q, geometry)
    result = chosen.function(kv, q, geometry, **params)
    wanted = (geometry.num_layers, geometry.num_kv_heads, kv.shape[2])
    if not isinstance(result, torch.Tensor) or tuple(result.shape) != wanted or result.dtype != torch.float32:
        got = f"{tuple(result.shape)} of {result.dtype}" if isinstance(result, torch.Tensor) else type(result).__name__
        raise ShapeError(f"policy {name!r} returned {got}, wanted [L, HK, T] = {wanted} of torch.float32 (bf16 scores tie: use .float())")
    bad = result.isnan()
    if bad.any():
        layer, head, token = (int(i) for i in bad.nonzero()[0])
        raise ShapeError(
            f"policy {name!r} returned NaN for {int(bad.sum())} of {bad.numel()} scores, first at layer {layer} "
            f"({geometry.layer_names[layer]}), head {head}, token {token}: is there NaN in the cache, or a division by zero?"
        )
    return result


def _check_inputs(chosen: Policy, kv: torch.Tensor, q: torch.Tensor | None, geometry: Geometry) -> None:
    row = (geometry.num_layers, geometry.hidden(CacheKind.KV))
    if kv.dim() != 4 or (kv.shape[0], kv.shape[1], kv.shape[3]) != (2, *row):
        raise ShapeError(f"kv must be [2, L, T, H] = [2, {row[0]}, T, {row[1]}], got {tuple(kv.shape)}")
    if q is None:
        if chosen.needs_queries:
            raise QueriesMissing(
                f"policy {chosen.name!r} needs the queries, and q is None. If q.retrieve(tokens) returned it, nothing was found: look at "
                "ctx.coverage(tokens) of the query context. Else capture with qcap.transfer_intermediate_tensors on "
                "(qcap.vllm.transfer_config(url, query=True)), then q = qcap.connect(url, kind='query').retrieve(tokens)"
            )
        return
    wanted = (1, geometry.num_layers, kv.shape[2], geometry.hidden(CacheKind.QUERY))
    if tuple(q.shape) != wanted:
        cause = "is it a KV tensor?"
        if q.dim() == 4 and (q.shape[0], q.shape[1], q.shape[3]) == (wanted[0], wanted[1], wanted[3]):
            cause = (
                f"{q.shape[2]} queries for {kv.shape[2]} keys: cut both to the same tokens, "
                "t = min(kv.shape[2], q.shape[2]); kv[:, :, :t], q[:, :, :t]"
            )
        raise ShapeError(f"q must be [1, L, T, HQ * D] = {wanted}, got {tuple(q.shape)}; {cause}")
