"""A made-up report that is as it must be, and a stage's results that fit it."""

from __future__ import annotations


def good_report() -> dict:
    """One prompt of 70 tokens, everything covered, loaded and equal."""
    policies = {}
    for name, stored, top1, kl in (("full", 64, 1.0, 0.0), ("snapkv", 32, 0.9, 0.25), ("random", 32, 0.5, 1.5)):
        policies[name] = {
            "keep": 1.0 if name == "full" else 0.5, "kept": stored / 64, "loaded_tokens": [stored], "stored_tokens": [stored],
            "top1_agreement": top1,
            "logit_kl": kl,
            "positions": 40, "text": f"text of {name} [bold]", "texts": [f"text of {name} <b>"],
            "per_prompt": [{"top1_agreement": top1, "logit_kl": kl}],
        }  # fmt: skip
    policies["full"]["same_tokens_as_capture"] = True
    return {
        "coverage": {"kv": 1.0, "query": 1.0},
        "skipped": {},
        "policies": policies,
        "reference": {"loaded_tokens": [0], "vocabulary": 100},
        "prompts": [
            {
                "name": "one", "tokens": 110, "prompt_tokens": 70, "new_tokens": 40, "computed_tokens": 109, "text": "captured <text>",
                "coverage": {"kv": {"stored": 96, "whole": 96}, "query": {"stored": 96, "whole": 96}},
                "shapes": {"kv": [2, 2, 96, 16], "query": [1, 2, 96, 32]}, "pictures": {"attention": "attention-one.png"},
            }
        ],
        "geometry": {"model": "org/tiny", "layers": 2},
        "seconds": {"capture": 1.0, "total": 3.0, "inside": {"capture": {"start": 0.5}}},
        "engine": {"capture": {"vllm": "0.32.0", "device": "cpu", "dtype": "float32", "step_tokens": 256}},
        "analysed_without_vllm": True,
        "versions": {"qcap": "0"},
        "finished": "2026-01-01",
    }  # fmt: skip


def analysed() -> dict:
    """What the second stage leaves for that report's page."""
    pieces = [f"<{i}>" for i in range(70)]
    edits = {
        "full": {"kept": list(range(64)), "of": 64, "stored_tokens": 64, "resent_tokens": 6},
        "snapkv": {"kept": list(range(0, 64, 2)), "of": 64, "stored_tokens": 32, "resent_tokens": 6},
        "random": {"kept": list(range(32)), "of": 64, "stored_tokens": 32, "resent_tokens": 6},
    }
    return {"prompts": [{"pieces": pieces, "edits": edits}]}
