"""Real vLLM: what is captured is what transformers computes, for every layer and token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import jobs
import pytest
from compare import NOISE, assert_equals_transformers, captured, row_errors

import qcap
from qcap.testing.engine import run_in_process
from qcap.testing.smollm2 import smollm2_path
from qcap.testing.tiny import tiny_model_path

pytestmark = pytest.mark.vllm


def assert_nothing_left(state: dict[str, Any]) -> None:
    """No ring block, no followed request, no buffer, no error."""
    assert state["ring_held"] == 0
    assert state["tracks"] == state["followed"] == state["buffers_out"] == 0
    assert state["counters"].get("errors", 0) == 0 and not state["refused"]
    assert state["store"]["failed"] == state["store"]["refused"] == 0


@pytest.mark.parametrize(
    ("model", "eager"),
    [("smollm2", True), ("smollm2", False), ("qwen3", True), ("phi3", True), ("llama3", False)],
    ids=["smollm2-eager", "smollm2-compiled", "qwen3-eager", "phi3-eager", "llama3-compiled"],
)
def test_equals_transformers(model: str, eager: bool, tmp_path: Path) -> None:
    """Acceptance 1: Q, K and V of every layer and token within float32 rounding of transformers. # A1 A4"""
    path = str(smollm2_path("float32") if model == "smollm2" else tiny_model_path(model))
    prompts = jobs.make_prompts([6, 150, 70], 1000, seed=3)
    store = f"file://{tmp_path}"
    job = {
        "model": path,
        "store": store,
        "engine": {"enforce_eager": eager, "max_num_batched_tokens": 64},
        "batches": [[{"ids": p, "n": 30} for p in prompts]],
    }
    result = run_in_process(jobs.serve, job, timeout_s=500)
    (served,) = result["rounds"]
    assert served["skipped"] == {} and served["stored"] == {"kv": served["whole"], "query": served["whole"]}
    assert_nothing_left(result["state"])
    for prompt, output in zip(prompts, served["outputs"], strict=True):
        assert_equals_transformers(store, path, prompt + output["tokens"])


def test_thirty_two_at_once(tmp_path: Path) -> None:
    """Acceptance 2: 32 requests of 17 to 700 tokens in shuffled arrival, budget 256: all chunks, as each served alone. # A5 A28 A29"""
    path = str(tiny_model_path("llama"))
    rng = random.Random(5)
    lengths = [17, 700, *(rng.randrange(17, 701) for _ in range(30))]
    rng.shuffle(lengths)
    requests: list[dict[str, Any]] = [{"ids": ids, "n": 24} for ids in jobs.make_prompts(lengths, 1000, seed=11)]
    arrival = 0
    for request in requests:
        request["after"] = arrival = arrival + rng.choice((0, 0, 0, 1, 2))
    engine = {"max_num_batched_tokens": 256, "max_num_seqs": 32}
    together, alone = f"file://{tmp_path}/together", f"file://{tmp_path}/alone"
    result = run_in_process(jobs.staggered, {"model": path, "store": together, "engine": engine, "requests": requests}, timeout_s=500)
    assert result["skipped"] == {}
    assert result["stored"] == {"kv": result["whole"], "query": result["whole"]}
    assert result["whole"] == sum((n + 23) // 32 for n in lengths)
    assert_nothing_left(result["state"])

    single = run_in_process(jobs.serve, {"model": path, "store": alone, "batches": [[r] for r in requests]}, timeout_s=500)
    for i, request in enumerate(requests):
        ids = request["ids"] + single["rounds"][i]["outputs"][0]["tokens"]
        assert result["outputs"][i]["tokens"] == ids[len(request["ids"]) :], "the same greedy tokens alone and among others"
        for got, wanted in zip(captured(together, path, ids[:-1]), captured(alone, path, ids[:-1]), strict=True):
            assert got.shape == wanted.shape and got.shape[2] == (len(ids) - 1) // 32 * 32
            assert row_errors(got, wanted).max() < NOISE


def test_as_users_start_it(tmp_path: Path) -> None:
    """Engine core and worker in processes of their own (vLLM's default), a chunk of two blocks, decode filling chunks. # D43 D44 D45 D46"""
    path = str(tiny_model_path("llama"))
    prompts = jobs.make_prompts([40, 130, 64], 1000, seed=9)
    store = f"file://{tmp_path}"
    job = {"model": path, "store": store, "prompts": prompts, "n": 70}
    outputs = run_in_process(jobs.separate_processes, job, timeout_s=500, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert outputs["skipped"] == {} and outputs["stored"] == {"kv": outputs["whole"], "query": outputs["whole"]}
    for prompt, tokens in zip(prompts, outputs["tokens"], strict=True):
        assert_equals_transformers(store, path, prompt + tokens, chunk_size=64)
    with qcap.connect(store, model=path) as ctx:
        assert sorted(r.prompt_tokens for r in ctx.sequences()) == [40, 64, 130]
