"""Which layers are put away beside the attention, and that the engine's stream comes back whatever happens."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from late_device import LateDevice, LateStream

from qcap.vllm import worker as worker_module
from qcap.vllm.branch import Branch
from qcap.vllm.worker import BRANCH_ROWS, WorkerSide


class Rig:
    """A worker with one feature, on a device that works late."""

    def __init__(self, monkeypatch, *, active=True, always=True, branch=True):
        self.device = LateDevice(0)
        self.device.install(monkeypatch)
        self.main, self.side = self.device.current, LateStream(self.device)
        self.recording, self.failed, self.calls, self.problem = False, [], [], None
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.recording)
        monkeypatch.setattr(worker_module, "slot_mapping_of", lambda name, metadata: metadata)
        self.feature = SimpleNamespace(active=active, dtype=torch.float32, on_layer=self.on_layer)
        self.worker = WorkerSide.__new__(WorkerSide)
        self.worker._query, self.worker._always_launch, self.worker.counters = self.feature, always, Counter()
        self.worker._branch = Branch(self.side) if branch else None
        self.worker.capture = SimpleNamespace(features=[self.feature], guard=self.guard)

    def on_layer(self, layer, query, slots):
        self.calls.append((layer, len(query), self.device.current is self.side))
        if self.problem is not None:
            raise self.problem

    def guard(self, what, feature):
        rig = self

        class Guard(nullcontext):
            def __exit__(self, kind, error, trace):
                rig.failed.append((what, feature, error))
                return isinstance(error, Exception)

        return Guard()

    def layer(self, rows, slots=True):
        return self.worker._on_query(0, "a", torch.zeros(rows, 2), torch.arange(rows) if slots else None)


@pytest.mark.parametrize(("rows", "recording", "active", "beside"), [
    (BRANCH_ROWS, False, True, True),
    (BRANCH_ROWS - 1, False, True, False),
    (1, True, False, True),
    (1, True, True, True),
    (BRANCH_ROWS, False, False, False),  # a profiling run
    (1, False, False, False),
])  # fmt: skip
def test_large_steps_and_recorded_graphs_go_beside_the_attention(monkeypatch, rows, recording, active, beside):
    rig = Rig(monkeypatch, active=active)
    rig.recording = recording
    join = rig.layer(rows)
    assert rig.calls == [(0, rows, beside)] and (join is not None) == beside and rig.device.current is rig.main and not rig.failed


def test_without_a_device_there_is_one_stream(monkeypatch):
    rig = Rig(monkeypatch, branch=False)
    rig.recording = True
    assert rig.layer(BRANCH_ROWS) is None and rig.calls == [(0, BRANCH_ROWS, False)]


def test_nothing_runs_when_nothing_is_planned(monkeypatch):
    rig = Rig(monkeypatch, active=False, always=False)
    assert rig.layer(BRANCH_ROWS) is None
    rig.feature.active, rig.worker.capture.features = True, []
    assert rig.layer(BRANCH_ROWS) is None and not rig.calls


def test_no_slots_no_rows(monkeypatch):
    rig = Rig(monkeypatch)
    assert rig.layer(BRANCH_ROWS, slots=False) is None
    assert not rig.calls and rig.worker.counters["query.steps_without_slots"] == 1


@pytest.mark.parametrize("rows", [1, BRANCH_ROWS])
def test_an_error_is_the_captures_business(monkeypatch, rows):  # C32: the stream is the engine's again, and waits for what was queued
    rig = Rig(monkeypatch)
    rig.problem = RuntimeError("boom")
    assert rig.layer(rows) is None
    assert rig.device.current is rig.main and rig.failed == [("capturing queries in a", rig.feature, rig.problem)]


def test_what_is_no_error_is_not_held_back(monkeypatch):
    rig = Rig(monkeypatch)
    rig.problem = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        rig.layer(BRANCH_ROWS)
    assert rig.device.current is rig.main and not rig.failed


@pytest.mark.parametrize("fails", [False, True])
def test_the_engine_waits_for_the_branch_and_the_branch_for_the_engine(monkeypatch, fails):
    rig, seen = Rig(monkeypatch), []
    branch = rig.worker._branch
    for number in range(20):

        def queue(number=number):
            rig.device.launch(lambda: seen.append(("beside", number)))
            if fails:
                raise ValueError

        rig.device.launch(lambda number=number: seen.append(("before", number)))
        try:
            branch.run(queue)()
        except ValueError:
            assert fails
        rig.device.launch(lambda number=number: seen.append(("after", number)))
    rig.device.finish()
    assert seen == [(what, number) for number in range(20) for what in ("before", "beside", "after")]


def test_a_query_of_another_dtype_is_refused(monkeypatch):  # C32
    rig = Rig(monkeypatch)
    rig.feature.dtype = torch.bfloat16
    assert rig.layer(BRANCH_ROWS) is None
    assert not rig.calls and "quantised queries are not stored yet" in str(rig.failed[0][2])
