"""Second stage, without vLLM: what was captured, where the attention went, and two caches with half of the prompt's tokens."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import qcap
from qcap.demo.progress import Clock, Reporter, stage_main
from qcap.demo.prompts import picture_names
from qcap.demo.settings import POLICIES, DemoSettings
from qcap.errors import CaptureEmpty
from qcap.geometry import Geometry
from qcap.sdk import edits, plots, policies
from qcap.sdk.context import CacheContext
from qcap.sdk.edits import Edit
from qcap.store.tiers import SequenceRecord

STEPS = 100.0
PARAMS: Mapping[str, Mapping[str, Any]] = {"snapkv": {"window": 32}}


def run(settings: DemoSettings, reporter: Reporter) -> None:
    """Read, draw, edit, write back, and leave ``work/analyse.json`` and the pictures."""
    clock = Clock()
    reporter.step(0, "opening the store")
    asked = settings.get("capture")["prompts"]
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(settings.model)
    clock.lap("start")
    with (
        qcap.connect(settings.store_url, model=settings.model_name) as kv,
        qcap.connect(settings.store_url, model=settings.model_name, kind=qcap.CacheKind.QUERY) as query,
    ):
        found = captured(kv.sequences(), [p["prompt_ids"] + p["new_ids"] for p in asked])
        reporter.step(10, "counting chunks")
        results = []
        for prompt, record in zip(asked, found, strict=True):
            results.append(_one_prompt(settings, reporter, kv, query, tokenizer, prompt, record))
        clock.lap("prompts")
        geometry = kv.geometry
    settings.put(
        "analyse",
        {
            "prompts": results,
            "coverage": {kind: fraction([r["coverage"][kind] for r in results]) for kind in ("kv", "query")},
            "skipped": skipped(found),
            "geometry": {
                "model": geometry.model,
                "layers": geometry.num_layers,
                "query_heads": geometry.num_q_heads,
                "kv_heads": geometry.num_kv_heads,
                "head_size": geometry.head_size,
                "dtype": geometry.dtype,
                "chunk_size": geometry.chunk_size,
                "block_size": geometry.block_size,
                "rope": geometry.rope.kind,
                "rope_theta": geometry.rope.theta,
            },
            "vllm_imported": "vllm" in sys.modules,
            "seconds": clock.seconds,
        },
    )
    assert "vllm" not in sys.modules, "this stage must do without vLLM"
    reporter.step(3, "done")


def captured(records: Sequence[SequenceRecord], wanted: Sequence[Sequence[int]]) -> list[SequenceRecord]:
    """The receipts of the sequences ``wanted`` (prompt and generated ids), in that order.

    Raises:
        CaptureEmpty: one of them is not in the store.
    """
    by_ids = {record.token_ids: record for record in records if not record.salt}
    missing = [i for i, ids in enumerate(wanted) if tuple(ids) not in by_ids]
    if missing:
        raise CaptureEmpty(f"the store has no receipt of prompt(s) {missing}, only {len(by_ids)} others: look into work/capture.log")
    return [by_ids[tuple(ids)] for ids in wanted]


def fraction(parts: Sequence[Mapping[str, int]]) -> float:
    """Stored tokens over whole-chunk tokens of all prompts, 0..1.

    Raises:
        CaptureEmpty: there is not one whole chunk, so there is nothing to be a fraction of.
    """
    whole = sum(part["whole"] for part in parts)
    if not whole:
        raise CaptureEmpty("no prompt fills a single chunk: use a smaller chunk size")
    return sum(part["stored"] for part in parts) / whole


def skipped(records: Sequence[SequenceRecord]) -> dict[str, int]:
    """``kind:reason`` -> chunks that are not in the store, over all receipts."""
    counts: Counter[str] = Counter()
    for record in records:
        for kind, reasons in record.skipped.items():
            for reason, count in reasons.items():
                counts[f"{kind}:{reason}"] += count
    return {reason: count for reason, count in sorted(counts.items()) if count}


def prompt_rows(prompt_tokens: int, chunk_size: int) -> int:
    """How many of the prompt's rows can be edited: its whole chunks, leaving at least one token for the engine to compute."""
    return (prompt_tokens - 1) // chunk_size * chunk_size


def make_edits(
    settings: DemoSettings, kv: torch.Tensor, query: torch.Tensor, prompt: Sequence[int], geometry: Geometry
) -> dict[str, tuple[Edit, list[int]]]:
    """For each of ``POLICIES`` an edit of the prompt's whole chunks and the positions it keeps; the rest of the prompt is the edit's tail.

    Args:
        kv, query: ``[2, L, T, H]`` and ``[1, L, T, HQ * D]``, the prompt's first T rows.
        prompt: all its ids.
        geometry: of the whole model.
    """
    rows = kv.shape[2]
    whole = Edit(
        tensor=kv,
        token_ids=tuple(prompt[:rows]),
        positions=tuple(range(rows)),
        salt=edits.salt_for("full", parent="demo"),
        description={"name": "full", "kept": rows, "of": rows},
        tail=tuple(prompt[rows:]),
    )
    made = {"full": (whole, list(range(rows)))}
    for name in POLICIES[1:]:
        params: dict[str, Any] = {"seed": settings.seed} if name == "random" else dict(PARAMS.get(name, {}))
        marks = policies.scores(name, kv, query, geometry, **params)
        index = policies.select(marks, settings.keep, multiple_of=geometry.chunk_size)  # whole chunks: no kept row is left unstored
        edit = edits.keep_tokens(kv, prompt, index, name=name, params={**params, "keep": settings.keep}, geometry=geometry)
        made[name] = (edit, index.tolist())
    return made


def _one_prompt(
    settings: DemoSettings,
    reporter: Reporter,
    kv: CacheContext,
    query: CacheContext,
    tokenizer: Any,
    prompt: Mapping[str, Any],
    record: SequenceRecord,
) -> dict[str, Any]:
    name, ids, prompt_ids = prompt["name"], list(record.token_ids), list(prompt["prompt_ids"])
    contexts = {"kv": kv, "query": query}
    coverages = {kind: context.coverage(ids, computed_tokens=len(ids) - 1) for kind, context in contexts.items()}
    tensors = {kind: context.retrieve(ids[:-1]) for kind, context in contexts.items()}
    reporter.step(7, f"{name}: drawing")
    pictures = picture_names(name)
    _save(plots.coverage_bar(*coverages.values()), settings, pictures["coverage"])
    result: dict[str, Any] = {
        "name": name,
        "tokens": len(ids),
        "prompt_tokens": record.prompt_tokens,
        "computed_tokens": len(ids) - 1,
        "coverage": {kind: {"stored": c.stored_tokens, "whole": c.whole_tokens} for kind, c in coverages.items()},
        "shapes": {kind: list(t.shape) if t is not None else None for kind, t in tensors.items()},
        "pictures": pictures,
    }
    rows = prompt_rows(len(prompt_ids), kv.chunk_size)
    if tensors["kv"] is None or tensors["query"] is None or min(t.shape[2] for t in tensors.values() if t is not None) < rows or not rows:
        there = "; ".join(map(repr, coverages.values()))
        raise CaptureEmpty(f"prompt {name!r}: its {rows} rows of whole chunks are not all in the store: {there}")
    keys_values, queries = (tensors[kind][:, :, :rows] for kind in ("kv", "query"))  # type: ignore[index]
    made = make_edits(settings, keys_values, queries, prompt_ids, kv.geometry)
    reporter.step(8, f"{name}: writing edits back")
    result["edits"] = {}
    for policy, (edit, index) in made.items():
        edit.store(kv)
        result["edits"][policy] = {
            "salt": edit.salt,
            "prompt_ids": edit.prompt(),
            "stored_tokens": len(edit.token_ids),
            "of": rows,
            "resent_tokens": len(edit.tail),
            "kept": index,
            "stored_fraction": kv.coverage(edit.token_ids, edit.salt).fraction,
        }
        reporter.step(2)
    reporter.step(3, f"{name}: drawing attention")
    figure = plots.attention_mass(queries, keys_values, kv.geometry, prompt_ids[:rows], tokenizer, kept=result["edits"]["snapkv"]["kept"])
    _save(figure, settings, pictures["attention"])
    result["pieces"] = [str(tokenizer.decode([t])) for t in prompt_ids]
    reporter.step(5)
    return result


def _save(figure: Any, settings: DemoSettings, name: str) -> None:
    figure.savefig(settings.folder / name, dpi=110)


if __name__ == "__main__":
    stage_main(STEPS, run)
