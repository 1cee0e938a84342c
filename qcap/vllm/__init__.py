"""qcap inside vLLM: the connector, and the few helpers a user of ``vllm.LLM`` needs. Importing this does not import vLLM."""

from __future__ import annotations

import difflib
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qcap.backends import open_backend
from qcap.config import ARGUMENTS, CaptureConfig, parse_seconds
from qcap.errors import CaptureEmpty, ConfigError, StoreUnavailable, TokenError
from qcap.kinds import CacheKind
from qcap.reasons import explain
from qcap.store.extents import sequence_chunks
from qcap.store.tiers import Backend, SequenceRecord
from qcap.store.urls import check_url, check_writable
from qcap.tokens import as_token_array, check_salt, chunk_key

__all__ = ["CaptureReceipt", "prompt", "receipt", "recompute_prefix", "transfer_config"]


def transfer_config(
    store_url: str,
    *,
    query: bool = False,
    chunk_size: int = 256,
    on_pressure: str | None = "wait",
    kv: bool = True,
    load: str = "salted",
    **more: Any,
) -> Any:
    """The ``kv_transfer_config`` that makes a stock vLLM capture into ``store_url``.

    Args:
        store_url: ``file:///data/captures`` or another URL of :func:`qcap.connect`.
        query: capture post-RoPE queries too.
        chunk_size: tokens in a stored chunk; a multiple of the engine's block size.
        on_pressure: ``"wait"``, also for None, holds the engine back rather than lose a row; ``"skip"`` never slows it and counts what it
            left out.
        kv: capture keys and values.
        load: who may load stored KV: ``"salted"`` requests, ``"all"``, or ``"off"``.
        **more: ``q_ring_bytes``, ``q_ring_blocks``, ``q_ring_depth``, ``q_recorded_layers``, ``host_bytes``, ``load_ahead_bytes``,
            ``debug``, ``model_name``, ``layerwise``: see :class:`~qcap.config.CaptureConfig`.

    Returns:
        ``vllm.config.KVTransferConfig``.

    Raises:
        ConfigError: a setting is unknown (the nearest name is given) or has no legal value; a URL of an unknown scheme; nothing to do.
        StoreUnavailable: a folder that cannot be written to.
    """
    for name in more:
        if name not in ARGUMENTS:
            near = difflib.get_close_matches(name, ARGUMENTS, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown argument {name!r}: did you mean {near!r}? Known: {', '.join(ARGUMENTS)}")
    extra: dict[str, Any] = {
        "qcap.store": store_url,
        "qcap.transfer_intermediate_tensors": query,
        "qcap.kv": kv,
        "qcap.chunk_size": chunk_size,
        "qcap.on_pressure": "wait" if on_pressure is None else on_pressure,
        "qcap.load": load,
    }
    extra.update((ARGUMENTS[name], value) for name, value in more.items())
    config = CaptureConfig.from_extra(extra)  # a wrong setting is told here, not in a child process that has loaded the model
    check_url(config.store)
    if config.kv or config.query:
        check_writable(config.store)
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="QcapConnector",
        kv_role="kv_both",
        kv_connector_module_path="qcap.vllm.connector",
        kv_connector_extra_config=extra,
        kv_load_failure_policy="recompute",
    )


def prompt(token_ids: Iterable[int], salt: str = "") -> dict[str, Any]:
    """A prompt of ``token_ids`` for ``LLM.generate``. With ``salt``, the request goes on from KV stored under that salt, and neither qcap
    nor vLLM's own prefix cache ever serves it to a request without.

    Raises:
        TokenError: text, no ids, ids that are no integers in ``[0, 2**32)``, or a salt that cannot be part of a key.
    """
    ids = as_token_array(list(token_ids) if not isinstance(token_ids, str | bytes) else token_ids).tolist()
    if not ids:
        raise TokenError("a prompt needs at least one token id")
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


def _sample_ids(request_id: str, samples: int) -> list[str]:
    """vLLM serves ``n`` samples of a prompt as requests ``0_ID``, ``1_ID``, ... and tells the id of the last one to finish."""
    number, mark, parent = request_id.partition("_")
    return [f"{i}_{parent}" for i in range(samples)] if samples > 1 and mark and number.isdigit() else [request_id]


def _on_all_ranks(backend: Backend, record: SequenceRecord, tp_size: int, deadline: float) -> SequenceRecord:
    """A receipt is rank 0's: wait for the other tensor-parallel ranks' objects, and count those that do not come."""
    fitting = [g for g, _, _ in backend.manifests(record.model) if (g.chunk_size, g.tp_size) == (record.chunk_size, tp_size)]
    if len(fitting) != 1:
        return record  # two dtypes in one store: which of them this engine had is not in the receipt
    (geometry,) = fitting
    chunks = sequence_chunks(backend, geometry, record.token_ids, record.salt)
    stored, skipped = dict(record.stored), {kind: dict(reasons) for kind, reasons in record.skipped.items()}
    for kind, indices in record.stored.items():
        keys = {i: chunk_key(CacheKind.parse(kind), geometry, chunks[i].digest, record.salt) for i in indices}
        while True:
            late = {i for i, key in keys.items() if not all(backend.contains([key.for_rank(r) for r in range(geometry.tp_size)]))}
            if not late or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        stored[kind] = tuple(i for i in indices if i not in late)
        if late:
            skipped.setdefault(kind, {})["missing-on-a-rank"] = len(late)
    return replace(record, stored=stored, skipped=skipped)


@dataclass(frozen=True)
class CaptureReceipt:
    """What a batch of requests left in the store.

    Args:
        sequences: one record a request (a sample, where ``n`` > 1), in the order asked for.
        stored: kind -> chunks in the store.
        whole: chunks that the computed tokens fill, of one kind.
        skipped: ``kind:reason`` -> chunks that are not in the store; :data:`qcap.reasons.REASONS` says what each reason means.
    """

    sequences: tuple[SequenceRecord, ...]
    stored: dict[str, int]
    whole: int
    skipped: dict[str, int]

    def __repr__(self) -> str:
        stored = ", ".join(f"{kind} {count} of {self.whole}" for kind, count in self.stored.items()) or "nothing"
        skipped = ", ".join(f"{reason} {count}" for reason, count in self.skipped.items()) or "none"
        return f"CaptureReceipt({len(self.sequences)} sequences; whole chunks stored: {stored}; skipped: {skipped})"


def receipt(outputs: Sequence[Any], *, store: str | None = None, timeout_s: float = 60.0) -> CaptureReceipt:
    """Wait until everything that ``outputs`` (of ``LLM.generate``) left behind is visible in the store, and say what it is.

    Args:
        outputs: finished outputs of an engine with a ``transfer_config``.
        store: the store's URL, where the engine does not tell it (it holds credentials or options).
        timeout_s: seconds to wait for the last of it.

    Raises:
        CaptureEmpty: the engine ran without qcap, or not one chunk was stored although there were whole ones.
        StoreUnavailable: a receipt did not appear within ``timeout_s``.
        ConfigError: a timeout that is not a positive number of seconds, or the store's URL is not known.
    """
    parse_seconds("timeout_s", timeout_s)
    wanted: dict[str, set[tuple[str, str]]] = {}
    order: list[tuple[str, str]] = []
    ranks: dict[tuple[str, str], int] = {}
    for output in outputs:
        note = (getattr(output, "kv_transfer_params", None) or {}).get("qcap")
        if not note:
            raise CaptureEmpty(
                "these outputs carry no qcap receipt: start the engine with kv_transfer_config=qcap.vllm.transfer_config(...)"
            )
        samples = getattr(output, "outputs", None)
        for request_id in _sample_ids(note["request_id"], len(samples) if isinstance(samples, list) else 1):
            ident = (note["engine_id"], request_id)
            ranks[ident] = int(note.get("tp_size", 1))
            wanted.setdefault(store or note["store"], set()).add(ident)
            order.append(ident)
    found: dict[tuple[str, str], SequenceRecord] = {}
    deadline = time.monotonic() + timeout_s
    for url, idents in wanted.items():
        if not url:
            raise ConfigError(
                "the engine does not tell its store's URL, since it holds credentials or options: give receipt(..., store=URL)"
            )
        backend = open_backend(url)
        pause = 0.05
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
                time.sleep(pause)
                pause = min(1.5 * pause, 1.0)
            for ident in idents:
                if ranks[ident] > 1:
                    found[ident] = _on_all_ranks(backend, found[ident], ranks[ident], deadline)
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
        raise CaptureEmpty(f"not one of {whole} whole chunks was stored: {explain(skipped)}. The engine's log may say more")
    return CaptureReceipt(records, dict(stored), whole, dict(skipped))
