"""The words of receipts: one table, whole, and used where nothing was stored."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import qcap.vllm
from qcap.backends import open_backend
from qcap.errors import CaptureEmpty
from qcap.reasons import REASONS, explain
from qcap.store.tiers import SequenceRecord

PACKAGE = Path(qcap.vllm.__file__).parents[1]
_numbers = itertools.count()


def test_every_reason_is_in_the_table():
    files = [*(PACKAGE / "capture").glob("*.py"), PACKAGE / "attribution.py", PACKAGE / "vllm/scheduler.py", PACKAGE / "vllm/__init__.py"]
    said = {word for file in files for word in re.findall(r'"([a-z]+(?:-[a-z]+)+)"', file.read_text())}
    said = {word for word in said if not word.startswith("qcap-")}  # names of threads
    assert len(said) > 12 and not said - REASONS.keys()
    why_not = (PACKAGE / "vllm/scheduler.py").read_text().split("def _why_not")[1]
    assert set(re.findall(r'return "([a-z-]+)"', why_not)) - {""} <= REASONS.keys()
    assert list(REASONS) == sorted(REASONS)


def test_reasons_in_words():
    text = explain({"kv:load-failed": 4, "query:load-failed": 4, "query:ring-full": 1, "query:drafts: of a kind": 2})
    assert text.startswith("kv:load-failed 4, query:load-failed 4, query:ring-full 1, query:drafts: of a kind 2. load-failed: stored KV")
    assert text.count("load-failed:") == 1 and f"ring-full: {REASONS['ring-full']}" in text
    assert explain({}) == "no reason is known"


def test_a_receipt_of_nothing_says_why():
    url = f"memory://reasons-{next(_numbers)}"
    backend = open_backend(url)
    skipped = {"kv": {"edit-not-loaded": 2}, "query": {"edit-not-loaded": 1, "prefix-cached": 1}}
    backend.put_sequence(SequenceRecord("m", "r", "e", "s", tuple(range(9)), 8, 8, 4, {"kv": (), "query": ()}, skipped)).result(20)
    output = SimpleNamespace(kv_transfer_params={"qcap": {"store": url, "engine_id": "e", "request_id": "r"}}, outputs=[None])
    with pytest.raises(CaptureEmpty) as error:
        qcap.vllm.receipt([output])
    for said in ("not one of 2 whole chunks", "kv:edit-not-loaded 2", "query:prefix-cached 1", "qcap verify", "loaded from the store"):
        assert said in str(error.value)
    backend.close()
