"""Real vLLM with ``qcap.layerwise``: stored KV arrives while the forward pass runs, and what comes out is what a cold run gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import pytest
from test_engine_capture import assert_nothing_left

from qcap.testing.engine import run_in_process
from qcap.testing.tiny import tiny_model_path

pytestmark = pytest.mark.vllm

CH = 32
LENGTHS = [
    33,
    40 * CH + 1,
    64,
    5 * CH + 9,
    8 * CH,
    21 * CH + 2,
    11 * CH + 7,
    97,
    2 * CH + 1,
    30 * CH + 31,
    16 * CH,
    7 * CH + 30,
    129,
    500,
    3 * CH,
    26 * CH,
]
DYING, DAMAGED = [3, 6, 9], 5
ENGINE = {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}


def loadable(length: int) -> int:
    """At least one token is left to compute."""
    return (length - 1) // CH * CH


def job_of(store: str, ways: list[str]) -> dict[str, Any]:
    return {
        "model": str(tiny_model_path("llama")), "store": store, "prompts": jobs.make_prompts(LENGTHS, 1000, seed=5), "n": 6,
        "engine": ENGINE, "qcap": {"chunk_size": CH, "query": False, "load": "all", "layerwise": True},
        "ways": ways, "slow_s": 0.05, "dying": DYING, "dies_at": 2, "damaged": DAMAGED,
    }  # fmt: skip


def check(found: dict[str, Any], failing: dict[str, list[int]], *, rests: bool = False) -> None:
    """``rests``: the store keeps chunks in the memory that they came in."""
    cold = found["rounds"]["cold"]
    assert all(o["cached"] == 0 for o in cold["outputs"]) and "load.tokens" not in cold["counters"]
    for name, got in found["rounds"].items():
        if name == "cold":
            continue
        bad, counters = failing.get(name, []), got["counters"]
        good = [i for i in range(len(LENGTHS)) if i not in bad]
        assert [o["tokens"] for o in got["outputs"]] == [o["tokens"] for o in cold["outputs"]], name
        for i in good:
            assert got["outputs"][i]["cached"] == loadable(LENGTHS[i]), (name, i)
        if name.startswith("not offered"):
            assert [got["outputs"][i]["cached"] for i in bad] == [0] * len(bad)
        assert counters.get("load.tokens", 0) == sum(loadable(LENGTHS[i]) for i in good), name
        assert counters.get("load.layerwise", 0) == len(good), name
        assert counters.get("load.failed", 0) == (0 if name.startswith("not offered") else len(bad)), name
        assert got["layers_asked"] > 0
        assert counters["steps"] <= found["rounds"]["loaded"]["counters"]["steps"] + 3, "a failed load costs its recompute, and no more"
    assert_nothing_left({**found["state"], "buffers_out": 0} if rests else found["state"])
    assert found["pool_out"] == 0 and found["state"]["memory"]["load_arena_high_water"] > 0


@pytest.fixture(scope="module")
def over_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    store = f"file://{tmp_path_factory.mktemp('layerwise')}"
    return store, run_in_process(jobs.layerwise, job_of(store, ["slow", "dying", "damaged"]), timeout_s=400)


def test_what_is_loaded_layer_by_layer_is_what_was_computed(over_files: tuple[str, dict[str, Any]]) -> None:
    """16 requests at once, 1 to 40 chunks: over files, with reads of 50 ms, with a layer damaged in the middle of the store, with a store
    that dies between two layers for some requests; failed loads are computed, told, and not offered again. # L8 L9 L47"""
    check(over_files[1], {"dying": DYING, "not offered for a while": DYING, "damaged": [DAMAGED]})


def test_over_a_store_in_memory_compiled(tmp_path: Path) -> None:
    """The same in memory, where the engine compiles its model."""
    store = f"memory://layerwise-{tmp_path.name}"
    job = job_of(store, ["dying"])
    job["engine"] = {**ENGINE, "enforce_eager": False}
    found = run_in_process(jobs.layerwise, job, timeout_s=400)
    check(found, {"dying": DYING, "not offered for a while": DYING}, rests=True)


def test_a_consumer_loads_and_stores_nothing(over_files: tuple[str, dict[str, Any]]) -> None:
    """Role ``kv_consumer``; a step without metadata is one warning; piecewise graphs are asked for with ``qcap.layerwise``. # L52 P2"""
    store, cold = over_files
    job = {**job_of(store, []), "layer": "model.layers.0.self_attn.attn"}
    job["qcap"], job["engine"] = {**job["qcap"], "query": True}, {**ENGINE, "block_size": CH}
    found = run_in_process(jobs.consumer, job)
    assert [o["tokens"] for o in found["outputs"]] == [o["tokens"] for o in cold["rounds"]["cold"]["outputs"]]
    assert [o["cached"] for o in found["outputs"]] == [loadable(n) for n in LENGTHS]
    assert found["counters"]["load.layerwise"] == len(LENGTHS) and found["features"] == found["stores"] == 0
    assert len(found["warnings"]) == 1 and "metadata" in found["warnings"][0]
    assert found["piecewise"] == [False, True, True, False, "ConfigError"]
