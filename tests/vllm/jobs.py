"""What runs inside a fresh process with one engine. Parents call these through ``qcap.testing.engine.run_in_process``."""

from __future__ import annotations

import gc
import random
from typing import Any


def make_prompts(lengths: list[int], vocab: int, seed: int = 0, shared: int = 0) -> list[list[int]]:
    """Random token ids; the first ``shared`` of each prompt are the same."""
    rng = random.Random(seed)
    head = [rng.randrange(3, vocab) for _ in range(shared)]
    return [(head + [rng.randrange(3, vocab) for _ in range(n)])[:n] for n in lengths]


def build(p: dict[str, Any]) -> Any:
    """An engine with the connector, from a job's description."""
    import qcap.vllm
    from qcap.testing.engine import build_llm

    config = qcap.vllm.transfer_config(p["store"], **{"query": True, "chunk_size": 32, **p.get("qcap", {})})
    engine = {"block_size": 32, "enable_prefix_caching": False, **p.get("engine", {})}
    return build_llm(p["model"], kv_transfer_config=config, **engine)


def worker_of(llm: Any) -> Any:
    """This process's WorkerSide."""
    from qcap.vllm import worker

    (side,) = list(worker._local.values())
    return side


def state(llm: Any) -> dict[str, Any]:
    """What must be back where it was once nothing is served."""
    side = worker_of(llm)
    ring = side._query.ring if side._query is not None else None
    return {
        "counters": dict(side.counters),
        "store": side.capture.backend.counters(),
        "ring_free": ring.num_free_blocks() if ring else None,
        "ring_total": ring.num_blocks if ring else None,
        "tracks": len(side.capture._tracks),
        "buffers_out": side.capture._buffers.outstanding,
        "refused": dict(side.refused),
        "followed": len(_scheduler(llm)._followed),
    }


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler


def sampling(n: int, **more: Any) -> Any:
    """Greedy, ``n`` tokens whatever they are."""
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "max_tokens": n, "ignore_eos": True, "detokenize": False, **more})


def generate(llm: Any, requests: list[dict[str, Any]]) -> list[Any]:
    """Requests: ``ids``, ``n``, optional ``salt`` and further sampling parameters under ``params``."""
    import qcap.vllm

    prompts = [qcap.vllm.prompt(r["ids"], r.get("salt", "")) for r in requests]
    params = [sampling(r["n"], **r.get("params", {})) for r in requests]
    return llm.generate(prompts, params, use_tqdm=False)


def told(outputs: list[Any]) -> list[dict[str, Any]]:
    """The parts of vLLM's outputs that tests look at."""
    return [
        {
            "tokens": list(o.outputs[0].token_ids),
            "cached": o.num_cached_tokens,
            "finish": o.outputs[0].finish_reason,
            "params": o.kv_transfer_params,
        }
        for o in outputs
    ]


def close(llm: Any) -> None:
    """End the engine as a user's process would."""
    llm.llm_engine.engine_core.shutdown()
    gc.collect()


def serve(p: dict[str, Any]) -> dict[str, Any]:
    """One engine; each of ``p["batches"]`` (lists of requests) is served at once, one after the other."""
    import qcap.vllm

    llm = build(p)
    rounds = []
    for batch in p["batches"]:
        outputs = generate(llm, batch)
        receipt = qcap.vllm.receipt(outputs)
        rounds.append({"outputs": told(outputs), "stored": receipt.stored, "skipped": receipt.skipped, "whole": receipt.whole})
    left = state(llm)
    close(llm)
    return {"rounds": rounds, "state": left}
