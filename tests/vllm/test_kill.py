"""Acceptance 7: an engine that dies in the middle of storing leaves nothing but whole objects."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jobs
import pytest

from qcap.store.verify import verify_store
from qcap.testing.tiny import tiny_model_path

pytestmark = pytest.mark.vllm

SERVE_FOR_EVER = """
import pickle, sys
sys.path.insert(0, {here!r})
import jobs
p = pickle.load(open({job!r}, "rb"))
llm = jobs.build(p)
number = 0
while True:
    number += 1
    jobs.generate(llm, [{{"ids": ids, "n": 40}} for ids in jobs.make_prompts([700, 650, 500, 333], 1000, seed=number)])
"""


def test_every_visible_object_verifies(tmp_path: Path) -> None:
    """``kill -9`` at some moment while objects are being written; then again over the same store, which must go on. # E60"""
    store = tmp_path / "store"
    job = {"model": str(tiny_model_path("llama")), "store": store.as_uri(), "engine": {"max_num_batched_tokens": 512}}
    (tmp_path / "job").write_bytes(pickle.dumps(job))
    script = SERVE_FOR_EVER.format(here=str(Path(jobs.__file__).parent), job=str(tmp_path / "job"))
    rng = random.Random(1)
    seen = 0
    for _ in range(2):
        with (tmp_path / "log").open("wb") as log:
            child = subprocess.Popen([sys.executable, "-c", script], stdout=log, stderr=log, start_new_session=True)
            try:
                deadline = time.monotonic() + 200
                while len(list(store.glob("objects/*/*"))) < seen + 60:
                    assert child.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
                    time.sleep(0.002)
                time.sleep(rng.uniform(0, 0.2))
            finally:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        report = verify_store(store.as_uri())
        assert report.bad == [] and report.objects >= seen + 60
        seen = report.objects
