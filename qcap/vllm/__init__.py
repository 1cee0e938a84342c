"""qcap inside vLLM: the connector, and the few helpers a user of ``vllm.LLM`` needs. Importing this does not import vLLM."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from qcap.backends import open_backend
from qcap.config import CaptureConfig
from qcap.errors import CaptureEmpty, StoreUnavailable
from qcap.store.tiers import SequenceRecord
from qcap.tokens import check_salt

__all__ = ["CaptureReceipt", "prompt", "receipt", "recompute_prefix", "transfer_config"]


def transfer_config(
    store_url: str,
    *,
    query: bool = False,
    chunk_size: int = 256,
    on_pressure: str = "wait",
    kv: bool = True,
    load: str = "salted",
    **more: Any,
) -> Any:
    """The ``kv_transfer_config`` that makes a stock vLLM capture into ``store_url``.

    Args:
        store_url: ``file:///data/captures`` or another URL of :func:`qcap.connect`.
        query: capture post-RoPE queries too.
        chunk_size: tokens in a stored chunk; a multiple of the engine's block size.
        on_pressure: ``"wait"`` holds the engine back rather than lose a row; ``"skip"`` never slows it and counts what it left out.
        kv: capture keys and values.
        load: who may load stored KV: ``"salted"`` requests, ``"all"``, or ``"off"``.
        **more: other settings by their name without ``qcap.`` and with ``_`` for ``.`` (``q_ring_blocks=64``).

    Returns:
        ``vllm.config.KVTransferConfig``.

    Raises:
        ConfigError: a setting is unknown (the nearest name is given) or has no legal value.
    """
    from vllm.config import KVTransferConfig

    extra: dict[str, Any] = {
        "qcap.store": store_url,
        "qcap.transfer_intermediate_tensors": query,
        "qcap.kv": kv,
        "qcap.chunk_size": chunk_size,
        "qcap.on_pressure": on_pressure,
        "qcap.load": load,
    }
    for name, value in more.items():
        extra["qcap." + (name.replace("q_", "q.", 1) if name.startswith("q_") else name)] = value
    CaptureConfig.from_extra(extra)  # a wrong setting is told here, not in a child process
    return KVTransferConfig(
        kv_connector="QcapConnector",
        kv_role="kv_both",
        kv_connector_module_path="qcap.vllm.connector",
        kv_connector_extra_config=extra,
        kv_load_failure_policy="recompute",
    )


def prompt(token_ids: Iterable[int], salt: str = "") -> dict[str, Any]:
    """A prompt of ``token_ids`` for ``LLM.generate``. With ``salt``, the request goes on from KV stored under that salt, and neither qcap
    nor vLLM's own prefix cache ever serves it to a request without."""
    ids = [int(t) for t in token_ids]
    return {"prompt_token_ids": ids, "cache_salt": check_salt(salt)} if salt else {"prompt_token_ids": ids}


def recompute_prefix(params: Any) -> Any:
    """A copy of ``SamplingParams`` for which vLLM computes the whole prompt, whatever its prefix cache holds.

    Rows that the prefix cache serves are never computed, so there are no queries of them to capture (they are reported as
    ``prefix-cached`` unless the store has them already). Such a request does not load stored KV either.
    """
    import copy

    fresh = copy.deepcopy(params)
    fresh.skip_reading_prefix_cache = True
    return fresh


@dataclass(frozen=True)
class CaptureReceipt:
    """What a batch of requests left in the store.

    Args:
        sequences: one record a request, in the order asked for.
        stored: kind -> chunks in the store.
        whole: chunks that the computed tokens fill, of one kind.
        skipped: ``kind:reason`` -> chunks that are not in the store.
    """

    sequences: tuple[SequenceRecord, ...]
    stored: dict[str, int]
    whole: int
    skipped: dict[str, int]


def receipt(outputs: Sequence[Any], *, timeout_s: float = 60.0) -> CaptureReceipt:
    """Wait until everything that ``outputs`` (of ``LLM.generate``) left behind is visible in the store, and say what it is.

    Raises:
        CaptureEmpty: the engine ran without qcap, or not one chunk was stored although there were whole ones.
        StoreUnavailable: a receipt did not appear within ``timeout_s``.
    """
    wanted: dict[str, set[tuple[str, str]]] = {}
    order: list[tuple[str, str]] = []
    for output in outputs:
        note = (output.kv_transfer_params or {}).get("qcap")
        if not note:
            raise CaptureEmpty(
                "these outputs carry no qcap receipt: start the engine with kv_transfer_config=qcap.vllm.transfer_config(...)"
            )
        ident = (note["engine_id"], note["request_id"])
        wanted.setdefault(note["store"], set()).add(ident)
        order.append(ident)
    found: dict[tuple[str, str], SequenceRecord] = {}
    deadline = time.monotonic() + timeout_s
    for url, idents in wanted.items():
        backend = open_backend(url)
        try:
            while True:
                for record in backend.sequences():
                    if (record.engine_id, record.request_id) in idents:
                        found[record.engine_id, record.request_id] = record
                missing = idents - found.keys()
                if not missing:
                    break
                if time.monotonic() > deadline:
                    raise StoreUnavailable(
                        f"{len(missing)} of {len(idents)} receipts are not in {url} after {timeout_s:.0f} s: look into the engine's log"
                    )
                time.sleep(0.05)
        finally:
            backend.close()
    records = tuple(found[ident] for ident in order)
    stored: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for record in records:
        for kind, chunks in record.stored.items():
            stored[kind] += len(chunks)
        for kind, reasons in record.skipped.items():
            for reason, count in reasons.items():
                skipped[f"{kind}:{reason}"] += count
    whole = sum(r.computed_tokens // r.chunk_size for r in records)
    if whole and not any(stored.values()):
        raise CaptureEmpty(f"not one of {whole} whole chunks was stored: {dict(skipped)}; look into the engine's log")
    return CaptureReceipt(records, dict(stored), whole, dict(skipped))
