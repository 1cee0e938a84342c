"""Several processes on one store, and processes that end badly."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store_makers import SMALL, chunk, equal_bits

from qcap.backends import open_backend
from qcap.kinds import CacheKind
from qcap.store.tiers import StoreOutcome
from qcap.store.urls import open_tier
from qcap.store.verify import verify_store

HERE = Path(__file__).parent
COMMON = """
import sys
sys.path.insert(0, {here!r})
from store_makers import chunk, equal_bits
from qcap.backends import open_backend
url = sys.argv[1]
"""


def start(code: str, *args: str, **env: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", COMMON.format(here=str(HERE)) + code, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env},
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


WRITER = """
from qcap.store.urls import open_tier
backend, tier = open_backend(url), open_tier(url)
chunks = [chunk(seed) for seed in range(60)]
sys.stdin.readline()
futures = [backend.store(*c) for c in chunks]
print(*(sum(f.result().value == outcome for f in futures) for outcome in ("stored", "exists")), flush=True)
sys.stdin.readline()
for i in range(400):  # publish a few keys over and over, by either way, under the reader's eyes
    record, tensor = chunks[i % 3]
    if i % 2:
        tier.delete(record.key)
    backend.store(record, tensor, overwrite=not i % 2).result()
backend.close()
"""


def go(writers: list[subprocess.Popen[str]]) -> None:
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()


def test_two_writers_and_a_reader(tmp_path) -> None:
    """The same keys from two processes at once, while a third (this one) reads: each is written once, and never seen half."""
    writers = [start(WRITER, str(tmp_path)) for _ in range(2)]
    chunks = [chunk(seed) for seed in range(60)]
    backend = open_backend(str(tmp_path))
    backend.put_manifest(SMALL, [CacheKind.KV], {})

    def read(seeds: range) -> set[int]:
        seen = set()
        for seed in seeds:
            loaded = backend.load(chunks[seed][0].key)  # ObjectCorrupt here would be a half object
            if loaded is not None:
                assert equal_bits(loaded.tensor, chunks[seed][1])
                seen.add(seed)
        return seen

    go(writers)
    seen: set[int] = set()
    deadline = time.monotonic() + 90
    while len(seen) < 60 and time.monotonic() < deadline:
        seen |= read(range(60))
    counts = [tuple(map(int, writer.stdout.readline().split())) for writer in writers]
    assert len(seen) == 60
    assert [sum(column) for column in zip(*counts, strict=True)] == [60, 60]
    go(writers)
    reads = 0
    while any(writer.poll() is None for writer in writers):
        reads += len(read(range(3)))
    assert reads > 100
    for writer in writers:
        finish(writer)
    assert list(open_tier(str(tmp_path)).list_staging()) == [] and verify_store(str(tmp_path)).ok


KILLED = """
import itertools, os
for first in range(0, 240, 40):  # importing is slow: children of one process, forked before it has threads
    if (pid := os.fork()) == 0:
        break
    print(pid, flush=True)
else:
    sys.stdin.read()
    os._exit(0)
backend = open_backend(url)
chunks = [chunk(seed) for seed in range(first, first + 40)]
for i in itertools.count():
    record, tensor = chunks[i % 40]
    backend.store(record, tensor, overwrite=i % 3 == 0)
"""


def test_kill_9_leaves_whole_objects(tmp_path) -> None:
    """Six writers at once, killed one after the other; what can be seen is whole after each."""
    rng = random.Random(0)
    open_tier(str(tmp_path)).put_manifest(SMALL, [CacheKind.KV], {})
    parent = start(KILLED, str(tmp_path))
    pids = [int(parent.stdout.readline() or pytest.fail(parent.communicate()[1])) for _ in range(6)]
    try:
        deadline = time.monotonic() + 60
        while verify_store(str(tmp_path)).objects < 20:
            assert time.monotonic() < deadline
        while pids:
            time.sleep(rng.uniform(0.0, 0.1))
            os.kill(pids.pop(), signal.SIGKILL)
            report = verify_store(str(tmp_path))
            assert report.ok, report.bad
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        parent.communicate(timeout=30)
    tier = open_tier(str(tmp_path))
    time.sleep(0.1)
    tier.clean_staging(older_than_s=0)
    backend = open_backend(str(tmp_path))
    outcomes = set()
    for seed in range(0, 260, 7):  # rewriting works, both what is there and what is not
        record, tensor = chunk(seed)
        outcomes.add(backend.store(record, tensor).result(30))
        assert equal_bits(backend.load(record.key).tensor, tensor)
    assert outcomes == {StoreOutcome.STORED, StoreOutcome.EXISTS}
    backend.close()
    assert verify_store(str(tmp_path)).ok and tier.list_staging() == []


EXITS = """
import time
class Event:
    def synchronize(self): time.sleep(0.3)
backend = open_backend(url)
for seed in range(10):
    backend.store(*chunk(seed), Event() if seed == 0 else None)
{last}
"""


def test_queued_chunks_land_when_the_interpreter_exits(tmp_path) -> None:
    folders = tmp_path / "end", tmp_path / "error"
    processes = [
        start(EXITS.replace("{last}", last), str(f)) for f, last in zip(folders, ("del backend", "raise KeyError('boom')"), strict=True)
    ]
    finish(processes[0])
    assert "boom" in processes[1].communicate(timeout=120)[1]
    for folder in folders:
        assert open_backend(str(folder)).lookup([chunk(seed)[0].key for seed in range(10)]) == 10


KEYS = """
from qcap.kinds import CacheKind
for kind in CacheKind:
    print(chunk(5, kind, index=2, salt="s", tags=(("b", "x"), ("a", "y")))[0].key.fingerprint())
print(hash("seeded"))
"""


def test_two_processes_agree_on_keys() -> None:  # K31
    processes = [start(KEYS, "-", PYTHONHASHSEED=seed) for seed in ("1", "2")]
    one, two = (finish(p).splitlines() for p in processes)
    assert one[:2] == two[:2] and one[0] != one[1]
    assert one[2] != two[2]  # the seeds did differ
