"""The whole demo on the real model, as a user starts it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qcap
from qcap.errors import Unsupported
from qcap.testing.smollm2 import gguf_path

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1800),  # whichever test comes first waits for the whole demo
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """(finished process, folder) of one run."""
    try:
        gguf_path()
    except Unsupported as error:
        pytest.skip(str(error))
    out = tmp_path_factory.mktemp("demo")
    search = os.pathsep.join(filter(None, (str(Path(qcap.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "qcap.cli", "demo", "--out", str(out)],
        capture_output=True, text=True, timeout=1700, check=False, env={**os.environ, "PYTHONPATH": search, "COLUMNS": "160"},
    )  # fmt: skip
    return done, out


@pytest.fixture(scope="module")
def report(demo):
    done, out = demo
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "report.json").read_text())


def test_everything_was_captured(report):
    assert report["coverage"] == {"kv": 1.0, "query": 1.0}
    assert report["skipped"] == {}
    assert report["analysed_without_vllm"] is True
    geometry = report["geometry"]
    assert (geometry["layers"], geometry["query_heads"], geometry["kv_heads"], geometry["head_size"]) == (30, 9, 3, 64)
    lengths = [p["prompt_tokens"] for p in report["prompts"]]
    assert len(set(lengths)) == 3 and max(lengths) > report["engine"]["capture"]["step_tokens"], "one prefill must be chunked"
    for prompt in report["prompts"]:
        assert prompt["new_tokens"] == 40 and prompt["tokens"] == prompt["prompt_tokens"] + 40 == prompt["computed_tokens"] + 1
        whole = prompt["computed_tokens"] // 32 * 32
        assert prompt["coverage"] == {kind: {"stored": whole, "whole": whole} for kind in ("kv", "query")}
        assert prompt["shapes"] == {"kv": [2, 30, whole, 192], "query": [1, 30, whole, 576]}


def test_all_three_caches_were_gone_on_from(report):
    assert set(report["policies"]) == {"full", "snapkv", "random"}
    rows = [(p["prompt_tokens"] - 1) // 32 * 32 for p in report["prompts"]]
    for name, policy in report["policies"].items():
        stored = rows if name == "full" else [r // 2 // 32 * 32 for r in rows]
        assert policy["stored_tokens"] == stored and policy["loaded_tokens"] == stored
        assert policy["kept"] == sum(stored) / sum(rows)
        assert policy["text"] and policy["text"] == policy["texts"][0] and len(policy["texts"]) == 3
        assert policy["positions"] == 120 and 0 <= policy["top1_agreement"] <= 1 and policy["logit_kl"] >= 0
    assert report["reference"]["loaded_tokens"] == [0, 0, 0]
    assert report["reference"]["top1_is_captured_token"] == [1.0, 1.0, 1.0], "teacher forcing follows the captured run"


def test_the_full_cache_changes_nothing_and_less_changes_something(report):
    full, others = report["policies"]["full"], [report["policies"][name] for name in ("snapkv", "random")]
    assert full["same_tokens_as_capture"] is True
    assert full["top1_agreement"] == 1.0 and full["logit_kl"] < 1e-6
    assert full["texts"] == [p["text"] for p in report["prompts"]]
    for policy in others:
        assert policy["logit_kl"] > 1e-3 and policy["top1_agreement"] < 1.0 and policy["texts"] != full["texts"]


def test_what_people_see(demo, report):
    done, out = demo
    for name in ("full", "snapkv", "random", "kv 100%, query 100%"):
        assert name in done.stdout
    assert report["seconds"]["total"] >= sum(report["seconds"][stage] for stage in ("capture", "analyse", "resume")) - 1
    text = (out / "report.html").read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)|@import|url\(|<script|<link""", text), "the page loads something"
    pictures = sorted(p.name for p in out.glob("*.png"))
    assert pictures == sorted(name for p in report["prompts"] for name in p["pictures"].values()) and len(pictures) == 6
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert text.count("data:image/png;base64,") == 6
