"""On a CUDA GPU: capture with CUDA graphs on, proved by values. Decode rows come from replayed graphs, in which no Python of ours runs.

The same token ids are computed three ways: decoded under graphs, decoded by an eager engine, and prefilled by an eager engine. The rows of
the first must agree with the third as closely as the second does: that much is the engine's own bf16 noise.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))
import jobs
from compare import captured, row_errors

from qcap.testing.engine import run_in_process

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CHUNK = 64


def engine(eager: bool) -> dict[str, Any]:
    return {
        "dtype": "bfloat16",
        "block_size": 16,
        "enforce_eager": eager,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 0.3,
        "max_model_len": 1024,
    }


@pytest.fixture(scope="module")
def model() -> str:
    given = os.environ.get("QCAP_TEST_MODEL")
    if given:
        return given
    from qcap.testing.tiny import tiny_model_path

    return str(tiny_model_path("llama", "bfloat16"))


@pytest.mark.parametrize("recorded_layers", [1, 4, 8])
def test_rows_under_graphs(model: str, tmp_path: Path, recorded_layers: int) -> None:
    """Acceptance 9: prefill (piecewise) and decode (full graphs) rows of Q and KV. # C36 A31"""
    prompts = jobs.make_prompts([37, 301, 120, 64, 511, 18, 90, 200], 1000, seed=13)
    requests = [{"ids": ids, "n": 130} for ids in prompts]
    job = {"model": model, "qcap": {"chunk_size": CHUNK, "q_recorded_layers": recorded_layers}}
    env = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    graphs, eager = f"file://{tmp_path}/graphs", f"file://{tmp_path}/eager"
    first = run_in_process(jobs.serve, {**job, "store": graphs, "engine": engine(False), "batches": [requests]}, timeout_s=400, env=env)
    (served,) = first["rounds"]
    print(json.dumps(first["state"]["counters"]))
    assert first["state"]["counters"].get("query.steps_replayed", 0) > 50, "no decode step was replayed: the test shows nothing"
    assert served["skipped"] == {} and served["stored"] == {"kv": served["whole"], "query": served["whole"]}
    assert first["state"]["ring_held"] == 0 and first["state"]["counters"].get("errors", 0) == 0

    sequences = [r["ids"] + o["tokens"] for r, o in zip(requests, served["outputs"], strict=True)]
    whole_prompt = [{"ids": ids, "n": 1} for ids in sequences]
    decoded = [{**r, "salt": "decoded"} for r in requests]
    second = run_in_process(
        jobs.serve, {**job, "store": eager, "engine": engine(True), "batches": [whole_prompt, decoded]}, timeout_s=400, env=env
    )
    assert second["state"]["counters"].get("query.steps_replayed", 0) == 0

    table: dict[str, list[torch.Tensor]] = {"graphs": [], "eager": []}
    for i, ids in enumerate(sequences):
        wanted = captured(eager, model, ids)
        got = captured(graphs, model, ids[:-1])
        for mine, theirs in zip(got, wanted, strict=True):
            assert mine.shape[2] == (len(ids) - 1) // CHUNK * CHUNK
            table["graphs"].append(row_errors(mine, theirs[:, :, : mine.shape[2]]).flatten())
        own = requests[i]["ids"] + second["rounds"][1]["outputs"][i]["tokens"]
        same = next((n for n, (a, b) in enumerate(zip(own, ids, strict=True)) if a != b), len(ids) - 1) // CHUNK * CHUNK
        if same:
            for mine, theirs in zip(captured(eager, model, ids[:same], salt="decoded"), wanted, strict=True):
                table["eager"].append(row_errors(mine[:, :, :same], theirs[:, :, :same]).flatten())
    noise, seen = torch.cat(table["eager"]), torch.cat(table["graphs"])
    for name, errors in (
        ("eager decode vs eager prefill", noise),
        ("graph replay vs eager prefill", seen),
    ):
        print(f"{name}: rows {errors.numel()}, median {errors.median():.2e}, 99.9 % {errors.quantile(0.999):.2e}, max {errors.max():.2e}")
    assert seen.max() < max(2 * float(noise.max()), 0.05), "a row of another token differs by about 1"
    assert seen.quantile(0.999) < 2 * noise.quantile(0.999), "rows differ by more than the engine's own rounding does"


def test_rows_of_large_steps(model: str, tmp_path: Path) -> None:
    """A prompt's rows leave from where the engine computed them, under torch.compile; the same prompts, computed in small steps by an eager
    engine, say what they are. # C24 A31"""
    prompts = jobs.make_prompts([2500, 3900, 2048], 1000, seed=17)
    requests = [{"ids": ids, "n": 2} for ids in prompts]
    qcap = {"chunk_size": CHUNK}
    env = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    large = {**engine(False), "max_num_batched_tokens": 4096, "max_model_len": 4096}
    stores = f"file://{tmp_path}/large", f"file://{tmp_path}/small"
    one_by_one = [[request] for request in requests]
    job = {"model": model, "qcap": qcap, "store": stores[0], "engine": large, "batches": one_by_one}
    first = run_in_process(jobs.serve, job, timeout_s=400, env=env)
    assert first["state"]["counters"].get("query.steps_held", 0) == len(prompts), "no step left from where it lies: the test shows nothing"
    for served in first["rounds"]:
        assert served["skipped"] == {} and served["stored"] == {"kv": served["whole"], "query": served["whole"]}
    small = {**engine(True), "max_model_len": 4096}
    run_in_process(jobs.serve, {**job, "store": stores[1], "engine": small}, timeout_s=400, env=env)
    for ids in prompts:
        for mine, theirs in zip(captured(stores[0], model, ids), captured(stores[1], model, ids), strict=True):
            assert mine.shape[2] == len(ids) // CHUNK * CHUNK
            errors = row_errors(mine, theirs)
            print(f"{len(ids)} tokens: median {errors.median():.2e}, 99.9 % {errors.flatten().quantile(0.999):.2e}, max {errors.max():.2e}")
            assert errors.max() < 0.05, "a row of another token differs by about 1"
