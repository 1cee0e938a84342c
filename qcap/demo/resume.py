"""Third stage: a fresh vLLM goes on from the full and from the edited caches, and measures how far they are from a run without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import qcap.vllm
from qcap.demo.capture import engine_facts
from qcap.demo.fidelity import Fidelity, average, fidelity
from qcap.demo.progress import Clock, Reporter, stage_main
from qcap.demo.prompts import readable
from qcap.demo.settings import POLICIES, DemoSettings
from qcap.testing.engine import build_llm

STEPS = 100.0
REFERENCE = "reference"
"""The run that the others are compared with: no salt, nothing loaded, the engine computes the whole prompt again."""


def run(settings: DemoSettings, reporter: Reporter) -> None:
    """Go on freely for the texts, then forced along the captured tokens for the figures; leave ``work/resume.json``."""
    clock = Clock()
    reporter.step(0, "starting vLLM")
    asked, analysed = settings.get("capture")["prompts"], settings.get("analyse")["prompts"]
    from qcap.demo.forcing import TeacherForcing, forced, recorded

    llm = build_llm(
        Path(settings.model),
        dtype=settings.dtype,
        block_size=settings.chunk_size,
        max_num_seqs=len(asked) * (2 * len(POLICIES) + 1),
        # vLLM's own prefix cache is off: every token that is reported as cached has come from the store.
        enable_prefix_caching=False,
        logits_processors=[TeacherForcing],
        kv_transfer_config=qcap.vllm.transfer_config(
            settings.store_url, kv=False, query=False, chunk_size=settings.chunk_size, load="salted", model_name=settings.model_name
        ),
    )
    from vllm import SamplingParams

    clock.lap("start")
    tokenizer = llm.get_tokenizer()
    reporter.step(50, "going on")
    plain = {"temperature": 0.0, "max_tokens": settings.new_tokens, "ignore_eos": True, "detokenize": False}
    requests: list[tuple[str, int, Path | None]] = []  # (policy, prompt, where its logits go if it is forced)
    prompts, params = [], []
    for number, prompt in enumerate(asked):
        for policy in (*POLICIES, REFERENCE):
            edit = analysed[number]["edits"].get(policy)
            ids, salt = (edit["prompt_ids"], edit["salt"]) if edit else (prompt["prompt_ids"], "")
            path = settings.work / f"logits-{policy}-{number}.safetensors"
            for target in (None, path) if edit else (path,):
                requests.append((policy, number, target))
                prompts.append(qcap.vllm.prompt(ids, salt))
                params.append(SamplingParams(**plain, extra_args=forced(prompt["new_ids"], target) if target else None))
    outputs = llm.generate(prompts, params, use_tqdm=reporter.bar(40, "going on"))
    clock.lap("serve")
    loaded: dict[str, list[int]] = {policy: [0] * len(asked) for policy in (*POLICIES, REFERENCE)}
    free: dict[str, list[list[int]]] = {policy: [[] for _ in asked] for policy in POLICIES}
    logits: dict[tuple[str, int], Any] = {}
    for (policy, number, target), output in zip(requests, outputs, strict=True):
        said = [int(t) for t in output.outputs[0].token_ids]
        if target is None:
            free[policy][number], loaded[policy][number] = said, int(output.num_cached_tokens or 0)
            continue
        assert said == asked[number]["new_ids"], f"{policy}: the engine did not say the tokens that it was forced to say"
        logits[policy, number] = recorded(target)
        target.unlink()
        if policy == REFERENCE:
            loaded[policy][number] = int(output.num_cached_tokens or 0)
    reporter.step(5, "comparing")
    result: dict[str, Any] = {"policies": {}, "engine": engine_facts(llm)}
    for policy in POLICIES:
        parts = [fidelity(logits[REFERENCE, number], logits[policy, number]) for number in range(len(asked))]
        result["policies"][policy] = _figures(parts, free[policy], tokenizer) | {
            "loaded_tokens": loaded[policy],
            "stored_tokens": [a["edits"][policy]["stored_tokens"] for a in analysed],
        }
    captured = [prompt["new_ids"] for prompt in asked]
    result["policies"]["full"]["same_tokens_as_capture"] = free["full"] == captured
    result["reference"] = {
        "what": "the same prompts without a salt: nothing is loaded, the engine computes the whole prompt again",
        "loaded_tokens": loaded[REFERENCE],
        "top1_is_captured_token": [
            float((logits[REFERENCE, n].argmax(-1) == _tensor(ids)).double().mean()) for n, ids in enumerate(captured)
        ],
        "vocabulary": int(logits[REFERENCE, 0].shape[1]),
    }
    clock.lap("compare")
    result["seconds"] = clock.seconds
    settings.put("resume", result)
    llm.llm_engine.engine_core.shutdown()
    reporter.step(5, "done")


def _figures(parts: list[Fidelity], tokens: list[list[int]], tokenizer: Any) -> dict[str, Any]:
    top1, kl = average(parts)
    texts = [readable(tokenizer, ids) for ids in tokens]
    return {
        "top1_agreement": top1,
        "logit_kl": kl,
        "logit_kl_unit": "nats",
        "positions": sum(len(part.kl) for part in parts),
        "text": texts[0],
        "texts": texts,
        "new_ids": tokens,
        "per_prompt": [{"top1_agreement": t, "logit_kl": k} for t, k in (average([part]) for part in parts)],
    }


def _tensor(ids: list[int]) -> Any:
    import torch

    return torch.tensor(ids)


if __name__ == "__main__":
    stage_main(STEPS, run)
