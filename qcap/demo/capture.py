"""First stage: a stock vLLM serves three prompts at once, and qcap captures queries, keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import qcap.vllm
from qcap.demo.progress import Clock, Reporter, stage_main
from qcap.demo.prompts import TEXTS, prompt_ids, readable
from qcap.demo.settings import DemoSettings
from qcap.testing.engine import build_llm

STEPS = 100.0


def run(settings: DemoSettings, reporter: Reporter) -> None:
    """Serve, wait for the store, and leave ``work/capture.json``."""
    clock = Clock()
    reporter.step(0, "starting vLLM")
    llm = build_llm(
        Path(settings.model),
        dtype=settings.dtype,
        block_size=settings.chunk_size,
        max_num_batched_tokens=settings.step_tokens,
        kv_transfer_config=qcap.vllm.transfer_config(
            settings.store_url, query=True, chunk_size=settings.chunk_size, on_pressure="wait", model_name=settings.model_name
        ),
    )
    from vllm import SamplingParams

    clock.lap("start")
    tokenizer = llm.get_tokenizer()
    prompts = [prompt_ids(tokenizer, text) for _, text in TEXTS]
    reporter.step(55, "serving three prompts")
    outputs = llm.generate(
        [qcap.vllm.prompt(ids) for ids in prompts],
        SamplingParams(temperature=0.0, max_tokens=settings.new_tokens, ignore_eos=True, detokenize=False),
        use_tqdm=reporter.bar(39, "serving three prompts"),
    )
    clock.lap("serve")
    receipt = qcap.vllm.receipt(outputs)
    generated = [[int(t) for t in output.outputs[0].token_ids] for output in outputs]
    settings.put(
        "capture",
        {
            "prompts": [
                {"name": name, "prompt_ids": ids, "new_ids": new, "text": readable(tokenizer, new)}
                for (name, _), ids, new in zip(TEXTS, prompts, generated, strict=True)
            ],
            "receipt": {"stored": receipt.stored, "whole": receipt.whole, "skipped": receipt.skipped},
            "engine": engine_facts(llm),
            "seconds": {**clock.seconds},
        },
    )
    llm.llm_engine.engine_core.shutdown()
    reporter.step(6, "done")


def engine_facts(llm: Any) -> dict[str, str | int]:
    """What a reader of the report may want to know of an engine."""
    import vllm

    config = llm.llm_engine.vllm_config
    return {
        "vllm": vllm.__version__,
        "device": str(config.device_config.device_type),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "block_size": int(config.cache_config.block_size),
        "step_tokens": int(config.scheduler_config.max_num_batched_tokens),
        "max_num_seqs": int(config.scheduler_config.max_num_seqs),
        "eager": bool(config.model_config.enforce_eager),
    }


if __name__ == "__main__":
    stage_main(STEPS, run)
