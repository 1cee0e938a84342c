"""``qcap.connect``: from a store's URL to the cache of one model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qcap.backends import open_backend
from qcap.config import parse_seconds
from qcap.errors import ConfigError, ModelNotFound, QcapError
from qcap.geometry import Geometry, dtype_name, parse_dtype
from qcap.kinds import CacheKind
from qcap.sdk.context import CacheContext
from qcap.store.tiers import Backend
from qcap.store.verify import Nothing, nothing_at

Manifest = tuple[Geometry, tuple[CacheKind, ...], dict[str, str]]


def connect(
    url: str,
    *,
    model: str | None = None,
    kind: CacheKind | str = CacheKind.KV,
    timeout_s: float = 60.0,
    dtype: torch.dtype | str | None = None,
    chunk_size: int | None = None,
    tp_size: int | None = None,
) -> CacheContext:
    """Open the store at ``url`` and read what it holds of one model. Needs no engine, no GPU and no server.

    Args:
        url: the store (``file:///data/captures``, ``memory://name``, ``s3://bucket/prefix``).
        model: the model's name as the engine was given it; None takes the only one there.
        kind: keys and values (``CacheKind.KV``) or queries (``CacheKind.QUERY``), or its name.
        timeout_s: how long ``store`` waits, in seconds, until its objects are published.
        dtype, chunk_size, tp_size: which capture is meant, where a model was captured in more than one way.

    Returns:
        A :class:`CacheContext`. Close it, or use it as a context manager.

    Raises:
        ConfigError: an unknown kind or dtype, or a timeout that is not a positive number of seconds (also a ValueError).
        ModelNotFound: nothing there, nothing of this model or kind, or more than one capture fits; the message lists what there is.
        StoreUnavailable: the URL cannot be opened.

    Does not:
        Write anything: no registration, no layout entry, no lease. A context may idle for as long as the store exists.
    """
    wanted_kind = _kind(kind)
    wanted_dtype = None if dtype is None else dtype_name(parse_dtype(dtype))
    timeout_s = parse_seconds("timeout_s", timeout_s)
    backend = open_backend(url, on_pressure="wait")
    try:
        geometry = _pick(backend, url, model, wanted_kind, wanted_dtype, chunk_size, tp_size)
        return CacheContext(backend, geometry, wanted_kind, url=url, timeout_s=timeout_s)
    except BaseException:
        backend.close()
        raise


def _kind(kind: CacheKind | str) -> CacheKind:
    try:
        return CacheKind.parse(kind)
    except ValueError as error:
        raise ConfigError(f"connect(kind=...): {error}") from None


def _pick(
    backend: Backend, url: str, model: str | None, kind: CacheKind, dtype: str | None, chunk_size: int | None, tp_size: int | None
) -> Geometry:
    """The one manifest that is meant."""
    manifests: Sequence[Manifest] = backend.manifests()
    if not manifests:
        try:
            nothing = nothing_at(url)
        except QcapError:  # nor is there more to say
            nothing = Nothing(True, "")
        if nothing is None:
            raise ModelNotFound(
                f"{url} has objects or receipts, but no manifest that says what they are of (models/ was removed?): "
                "an engine that is started with this store writes it again"
            )
        if not nothing.exists:
            raise ModelNotFound(f"{nothing.reason}. Check that the URL is the one that the engine was given")
        raise ModelNotFound(
            f"{url} holds no capture yet: run the engine with kv_transfer_config=qcap.vllm.transfer_config({url!r}) first, "
            "and check that the URL is the one the engine was given"
        )
    models = sorted({geometry.model for geometry, _, _ in manifests})
    if model is None:
        if len(models) > 1:
            raise ModelNotFound(f"{url} holds several models, say which: model= one of {', '.join(map(repr, models))}")
        model = models[0]
    base = kind.base_name(model)  # both "m" and "m##query" name the queries of m
    of_model = [m for m in manifests if m[0].model == base]
    if not of_model:
        raise ModelNotFound(
            f"{url} holds nothing of model {model!r}; it holds {', '.join(map(repr, models))}. "
            "Give model= as the engine was given it, or start the engine with that model and this store"
        )
    of_kind = [m for m in of_model if kind in m[1]]
    if not of_kind:
        there = sorted({k.value for _, kinds, _ in of_model for k in kinds})
        switch = "qcap.transfer_intermediate_tensors" if kind is CacheKind.QUERY else "qcap.kv"
        raise ModelNotFound(
            f"{url} holds {base!r} but no {kind.value!r} chunks of it, only {', '.join(there) or 'none'}: "
            f"capture again with {switch} set to true"
        )
    fitting = [
        geometry
        for geometry, _, _ in of_kind
        if dtype in (None, geometry.dtype) and chunk_size in (None, geometry.chunk_size) and tp_size in (None, geometry.tp_size)
    ]
    if len(fitting) == 1:
        return fitting[0]
    listed = "; ".join(f"dtype={g.dtype!r}, chunk_size={g.chunk_size}, tp_size={g.tp_size}" for g in (fitting or [m[0] for m in of_kind]))
    if fitting:
        raise ModelNotFound(
            f"{url} holds {len(fitting)} captures of {base!r}: say which with dtype=, chunk_size= or tp_size=. They are: {listed}"
        )
    raise ModelNotFound(
        f"{url} holds {base!r}, but not with dtype={dtype!r}, chunk_size={chunk_size}, tp_size={tp_size}. There are: {listed}"
    )
