"""Real vLLM where rows get lost or mixed up in other tools: preemption, shared prefixes, one-token requests, aborts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from compare import NOISE, row_errors
from test_engine_capture import assert_nothing_left

from qcap.backends import open_backend
from qcap.geometry import Geometry
from qcap.kinds import CacheKind
from qcap.store.verify import verify_store
from qcap.testing.engine import ProcessFailed, hf_forward, run_in_process
from qcap.testing.tiny import tiny_model_path
from qcap.tokens import ChunkedTokenDatabase, chunk_key

pytestmark = pytest.mark.vllm


def assert_every_object_is_right(store: str, model: str) -> dict[CacheKind, int]:
    """Every object of the store equals what transformers computes for its token ids, and every receipt tells the truth."""
    backend = open_backend(store)
    ((geometry, _, _),) = backend.manifests(model)
    assert isinstance(geometry, Geometry)
    checked: dict[CacheKind, set[tuple[str, str]]] = {CacheKind.KV: set(), CacheKind.QUERY: set()}
    for record in backend.sequences(model):
        chunks = ChunkedTokenDatabase(record.chunk_size).chunks(record.token_ids)
        whole = record.computed_tokens // record.chunk_size
        rows = hf_forward(model, record.token_ids[: len(chunks) * record.chunk_size]) if chunks else {}
        for kind in CacheKind:
            there = [i for i, c in enumerate(chunks) if backend.contains([chunk_key(kind, geometry, c.digest, record.salt)])[0]]
            assert set(record.stored[kind.value]) <= set(there)
            assert len(record.stored[kind.value]) + sum(record.skipped.get(kind.value, {}).values()) == whole
            for i in there:
                loaded = backend.load(chunk_key(kind, geometry, chunks[i].digest, record.salt))
                assert loaded is not None
                span = slice(chunks[i].start, chunks[i].end)
                assert loaded.record.token_ids == record.token_ids[span]
                planes = [rows["q"]] if kind is CacheKind.QUERY else [rows["k"], rows["v"]]
                wanted = torch.stack([plane[:, span] for plane in planes])
                assert row_errors(loaded.tensor, wanted).max() < NOISE, (kind, record.request_id, i)
                checked[kind].add((record.salt, chunks[i].digest))
    backend.close()
    report = verify_store(store)
    assert not report.bad and report.objects == sum(map(len, checked.values())), "an object that no receipt accounts for"
    return {kind: len(digests) for kind, digests in checked.items()}


def test_preemption_and_shared_prefixes(tmp_path: Path) -> None:
    """Acceptance 6: little KV space, prefix caching, shared prefixes, max_tokens=1, aborts: nothing wrong, no leak. # A26 A30 R37"""
    model, store = str(tiny_model_path("llama")), f"file://{tmp_path}"
    shared = jobs.make_prompts([150, 150, 180, 90, 150, 97, 210, 64], 1000, seed=21, shared=80)
    own = jobs.make_prompts([33, 200, 120, 31], 1000, seed=22)
    requests: list[dict[str, Any]] = [{"ids": ids, "n": 60} for ids in shared] + [{"ids": ids, "n": 90} for ids in own]
    requests[3]["n"] = requests[9]["n"] = 1
    requests[1]["abort_after"], requests[10]["abort_after"] = 20, 45
    requests.append({"ids": shared[0], "n": 60})  # the whole prompt again
    requests.append({"ids": shared[0], "n": 40, "params": {"skip_reading_prefix_cache": True}})
    requests.append({"ids": shared[2], "n": 40, "salt": "tenant-7"})
    for i, request in enumerate(requests):
        request["after"] = i // 2
    engine = {
        "max_num_batched_tokens": 96,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 26,
        "enable_prefix_caching": True,
        "max_model_len": 512,
    }
    result = run_in_process(jobs.hard, {"model": model, "store": store, "engine": engine, "requests": requests}, timeout_s=500)
    assert result["preemptions"] > 0, "this test needs a preemption to show anything"
    assert sorted(result["aborted"]) == [1, 10]
    assert_nothing_left(result["state"])
    counts = assert_every_object_is_right(store, model)
    assert counts[CacheKind.KV] >= counts[CacheKind.QUERY] > 0
    assert set(result["skipped"]) <= {"query:prefix-cached"}, (
        "what a prefix hit served has no queries to capture; nothing else may be missing"
    )


def test_little_ring_never_loses_a_row(tmp_path: Path) -> None:
    """A ring of one step's blocks: partial chunks move to the host and come back whole (``wait``). # A20 R36"""
    model, store = str(tiny_model_path("llama")), f"file://{tmp_path}"
    requests = [{"ids": ids, "n": 80, "after": i} for i, ids in enumerate(jobs.make_prompts([50, 90, 130, 40, 77, 61], 1000, seed=2))]
    job = {
        "model": model,
        "store": store,
        "engine": {"max_num_batched_tokens": 64, "max_num_seqs": 6},
        "qcap": {"chunk_size": 128, "q_ring_blocks": 15},  # fewer are refused: 6 requests may each begin and end in a block
        "requests": requests,
    }
    result = run_in_process(jobs.staggered, job, timeout_s=500)
    assert result["state"]["counters"]["query.blocks_spilled"] > 0, "the ring was large enough: the test shows nothing"
    assert result["skipped"] == {} and result["stored"] == {"kv": result["whole"], "query": result["whole"]}
    assert_nothing_left(result["state"])
    assert_every_object_is_right(store, model)


def test_draft_tokens_that_are_rejected(tmp_path: Path) -> None:
    """n-gram speculation: rejected rows are written over before a chunk counts as whole. # A30"""
    model, store = str(tiny_model_path("llama")), f"file://{tmp_path}"
    (piece,) = jobs.make_prompts([24], 1000, seed=4)
    prompts = [piece * 3 + [5], (piece * 4)[:90], jobs.make_prompts([70], 1000, seed=6)[0]]
    job = {
        "model": model,
        "store": store,
        "engine": {
            "max_num_batched_tokens": 128,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        },
        "requests": [{"ids": ids, "n": 90, "after": i} for i, ids in enumerate(prompts)],
    }
    result = run_in_process(jobs.staggered, job, timeout_s=500)
    assert result["steps"] < 90 + len(prompts), "no draft was accepted: the test shows nothing"
    assert result["skipped"] == {} and result["stored"] == {"kv": result["whole"], "query": result["whole"]}
    assert_nothing_left(result["state"])
    assert_every_object_is_right(store, model)


@pytest.mark.parametrize("form", ["resident", "streaming"])
def test_skip_never_waits_and_counts(tmp_path: Path, form: str) -> None:
    """``on_pressure="skip"`` with a ring and a write queue far too small: what is left out is counted. # A20 O13"""
    model, store = str(tiny_model_path("llama")), f"file://{tmp_path}"
    requests = [{"ids": ids, "n": 40, "after": i} for i, ids in enumerate(jobs.make_prompts([200, 90, 330, 150], 1000, seed=8))]
    job = {
        "model": model,
        "store": store,
        "engine": {"max_num_batched_tokens": 128, "max_num_seqs": 4},
        "qcap": {"on_pressure": "skip", "host_bytes": 200_000, **({"q_ring_blocks": 4} if form == "resident" else {})},
        "requests": requests,
    }
    result = run_in_process(jobs.staggered, job, timeout_s=500)
    assert result["skipped"].get("query:ring-full" if form == "resident" else "query:host-full", 0) > 0
    missing = sum(count for reason, count in result["skipped"].items() if reason.startswith("query:"))
    assert result["stored"]["query"] + missing == result["whole"]
    state = result["state"]
    assert state["ring_held"] == 0 and state["tracks"] == state["buffers_out"] == 0
    assert_every_object_is_right(store, model)


def test_another_configuration_of_the_model_is_refused(tmp_path: Path) -> None:
    """Same name, same shapes, other rows: none of them is served, and none is written among those that are there."""
    model, store = str(tiny_model_path("llama")), f"file://{tmp_path}"
    (ids, new) = jobs.make_prompts([150, 120], 1000, seed=5)
    job = {"model": model, "store": store, "engine": {}, "batches": [[{"ids": ids, "n": 4}]]}
    run_in_process(jobs.serve, job, timeout_s=300)
    objects = verify_store(store).objects
    other = {**job, "engine": {"hf_overrides": {"rms_norm_eps": 0.5}}, "batches": [[{"ids": new, "n": 4}]]}
    with pytest.raises(ProcessFailed, match=r"rms_norm_eps: 0\.5 here, \S+ there\. Give another store, or model_name="):
        run_in_process(jobs.serve, {**other, "qcap": {"on_pressure": "skip"}}, timeout_s=300)
    with pytest.raises(ProcessFailed, match="kv:turned-off 3, query:turned-off 3"):  # the engine serves, and its receipt says so
        run_in_process(jobs.serve, {**other, "qcap": {"on_pressure": "skip", "load": "off"}}, timeout_s=300)
    assert verify_store(store).objects == objects
    own = run_in_process(jobs.serve, {**other, "qcap": {"model_name": "other"}}, timeout_s=300)
    assert own["rounds"][0]["skipped"] == {} and verify_store(store).ok
