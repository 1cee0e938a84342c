"""Whole chunks are handed to the store two steps later, or as soon as someone needs that; none is lost, late for ever, or out of order."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from test_capture import IDS, Bench, boom, request, slots_from_the_caller  # noqa: F401 (a fixture for all)

from qcap.attribution import FinishedRequest, RequestStep, Step, TokenUpdate
from qcap.backends import open_backend
from qcap.capture import Capture, HostArena, PageStager, StreamBudget, StreamingQueryFeature, handover
from qcap.capture.handover import Handover
from qcap.errors import StoreUnavailable
from qcap.geometry import Geometry, Rope
from qcap.kinds import CacheKind

CHUNK_BYTES = 1024 + 512  # keys and values, and queries
MORE = tuple(range(200, 260))


class Late(Bench):
    """Notes what the store is given, as (first token, kind); the timer sleeps."""

    def __init__(self, **options):
        super().__init__(**options)
        self.given = []
        real = self.store.store

        def store(record, *args, **kw):
            self.given.append((record.token_ids[0], record.kind.value))
            return real(record, *args, **kw)

        self.store.store = store

    def one_chunk(self, uid, ids, blocks, **kw):
        self.run(request(uid, 0, 8, blocks), tokens=[(uid, 0, ids[:8])], **kw)

    def close(self):
        self.capture._put_off.close()  # ends the timer
        super().close()


def both(ids):
    return [(ids[0], "query"), (ids[0], "kv")]


@pytest.fixture
def deadline(monkeypatch):
    monkeypatch.setattr(handover, "DEADLINE_S", 1000.0)


@pytest.fixture(params=["streaming", "resident"])
def bench(request, deadline):
    made = []

    def make(**options):
        made.append(Late(streaming=request.param == "streaming", **options))
        return made[-1]

    yield make
    for b in made:
        b.close()


# ---- in a capture -----------------------------------------------------------------------------------------------------------------


def test_the_store_is_given_a_chunk_two_steps_later(bench):  # C30
    b = bench()
    b.one_chunk(1, IDS, [5, 3])
    assert b.capture._tracks[1].in_flight == 2, "a receipt would not wait for it"
    b.one_chunk(2, MORE, [6, 4])
    assert not b.given and b.capture._put_off.nbytes == 2 * CHUNK_BYTES
    step = b.step()
    b.worker.begin(step)
    assert not b.given
    b.worker.end()
    assert b.given == both(IDS)
    b.run()
    assert b.given == both(IDS) + both(MORE) and b.capture._put_off.nbytes == 0
    for uid in (1, 2):
        b.finish(uid, 9)
    assert b.free() and b.counters["errors"] == 0


def test_a_step_that_ends_twice_counts_once(bench):  # C26
    b = bench()
    b.one_chunk(1, IDS, [5, 3])
    for _ in range(4):
        b.worker.end()
    assert not b.given


def test_in_a_speculative_engine_too(bench):  # what a step completed is seen when the next one begins
    b = bench(speculative=True)
    b.run(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:24])], speculative=True)
    b.run(request(1, 8, 16, [7, 2], first=2), speculative=True)
    b.run(speculative=True)
    assert not b.given
    b.run(speculative=True)
    assert b.given == both(IDS)
    b.finish(1, 25, computed=24, tokens=(24, IDS[24:25]))
    assert b.given == both(IDS) + both(IDS[8:])
    assert b.free()


def test_a_request_that_ends_waits_for_nothing(bench):  # D32: and its receipt comes after its chunks
    b = bench()
    b.one_chunk(1, IDS, [5, 3])
    b.one_chunk(2, MORE, [6, 4])
    b.worker.finish(None, FinishedRequest(2, 9, 9, 8))
    assert b.given == both(IDS) + both(MORE)
    b.finish(1, 9)
    assert [r.stored for r in b.store.sequences()] == [{"kv": (0,), "query": (0,)}] * 2
    assert b.free()


def test_nothing_is_put_off_when_the_engine_waits_for_the_store(bench):  # settle(): all is in the store when the last request is over
    b = bench()
    b.one_chunk(1, IDS, [5, 3])
    b.worker.settle()
    assert not b.given, "there is a request still"
    b.capture._tracks.clear()
    b.worker.settle()
    assert len(b.store.published) == 2


def test_closing_publishes_what_was_put_off(bench):  # D32
    b = bench()
    b.run(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:9])])
    b.worker.close()
    assert len(b.store.published) == 2 and b.store.sequences()[0].stored == {"kv": (0,), "query": (0,)}
    assert b.free()


def test_closing_publishes_even_if_a_feature_breaks(bench, monkeypatch):  # D33
    b = bench()
    b.one_chunk(1, IDS, [5, 3])
    monkeypatch.setattr(b.capture, "finish", boom)
    b.worker.close()
    assert len(b.store.published) == 2


def test_a_step_that_never_ended_delays_nothing(bench):  # C35
    b = bench()
    b.one_chunk(1, IDS, [5, 3])
    b.worker.begin(b.step(request(1, 8, 9, [9], first=2, admitted=False)))
    assert not b.given
    b.worker.begin(b.step())
    assert b.given == both(IDS)


@pytest.mark.timeout(60)
def test_memory_that_is_wanted_comes_back(bench):  # else the arena would go beyond its bound, or lose rows
    b = bench()
    arena = b.sim.arena
    b.one_chunk(1, IDS, [5, 3])
    rest = []
    while arena.used < arena.nbytes:
        rest.append(arena.take((4096,), torch.uint8))
    assert not b.given
    rest.append(arena.take((16,), torch.uint8))
    assert b.given == both(IDS) and arena.over_budget == 0
    for piece in rest:
        arena.give(piece)


@pytest.mark.timeout(60)
def test_where_nobody_waits_memory_comes_back_for_the_next(bench):
    b = bench(on_pressure="skip")
    arena = b.sim.arena
    b.one_chunk(1, IDS, [5, 3])
    rest = []
    while arena.used < arena.nbytes:
        rest.append(arena.take((4096,), torch.uint8))
    assert arena.take((16,), torch.uint8) is None and b.given == both(IDS)
    assert b.store.drain(10) and arena.take((16,), torch.uint8) is not None


def test_no_more_than_may_rest_is_put_off(bench):
    b = bench(arena_bytes=4096)
    b.run(request(1, 0, 8, [5, 3]), request(2, 0, 8, [6, 4]), tokens=[(1, 0, IDS[:8]), (2, 0, MORE[:8])])
    assert b.capture._put_off.nbytes <= b.sim.arena.may_rest == 2048
    assert b.given == both(IDS)[: len(b.given)] and b.given


def test_what_is_put_off_takes_room_in_the_store(bench, monkeypatch):  # O13: nothing is staged that would be refused then
    b = bench(on_pressure="skip")
    b.capture._may_wait = False
    monkeypatch.setattr(b.store, "has_room", lambda nbytes: nbytes <= CHUNK_BYTES)
    b.one_chunk(1, IDS, [5, 3])
    b.one_chunk(2, MORE, [6, 4])
    assert b.capture._put_off.nbytes == CHUNK_BYTES
    for uid in (1, 2):
        b.finish(uid, 9)
    assert [r.skipped for r in b.store.sequences()] == [{}, {"kv": {"store-busy": 1}, "query": {"store-busy": 1}}]
    assert b.free()


def test_a_store_with_nothing_in_it_is_not_taken_for_an_endless_one(bench, monkeypatch):
    """It takes one chunk of any size if it is empty: asked for what is put off and one more, it would say yes, and refuse the last."""
    b = bench(on_pressure="skip", real_store=True, host_bytes=2048)
    b.capture._may_wait, b.sim.arena.may_rest = False, 2048
    go = threading.Event()
    prepare = b.store._prepare
    monkeypatch.setattr(b.store, "_prepare", lambda *args: (go.wait(20), prepare(*args))[1])
    b.one_chunk(1, IDS, [5, 3])
    b.one_chunk(2, MORE, [6, 4])
    b.run()
    b.run()
    go.set()
    for uid in (1, 2):
        b.finish(uid, 9)
    assert b.store.counters()["refused"] == 0 and b.counters["query.stored"] == 2 and b.counters["kv.stored"] == 1
    assert b.counters["kv.skipped.store-busy"] == 1


def test_a_chunk_that_waits_for_its_token_ids_is_not_put_off(bench):  # R37: sampled anew, it is dropped; what is put off is not
    b = bench()
    b.one_chunk(2, MORE, [6, 4])
    b.run(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:7])])
    assert b.capture._put_off.nbytes == CHUNK_BYTES and b.capture._tracks[1].in_flight == 0
    b.run(preempted=[1, 2], resampled=[1, 2])
    b.run(request(1, 0, 7, [7, 8]), tokens=[(1, 7, (999,))])
    b.drain()
    assert b.given == both(MORE)
    for uid in (1, 2):
        b.finish(uid, 9, computed=8)
    assert b.free()


def test_a_chunk_whose_ids_come_late_is_put_off_then(bench):
    b = bench()
    b.run(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:7])])
    b.run(tokens=[(1, 7, IDS[7:8])])
    b.run()
    assert not b.given
    b.run()
    assert b.given == both(IDS)


def test_the_same_chunk_twice_within_two_steps(bench):  # D10: one is stored, the other is there; both receipts say so
    b = bench()
    b.one_chunk(1, IDS, [5, 3])
    b.one_chunk(2, IDS, [6, 4])
    assert b.capture._put_off.nbytes == 2 * CHUNK_BYTES
    for uid in (1, 2):
        b.finish(uid, 9)
    for kind in CacheKind:
        assert (b.counters[f"{kind.value}.stored"], b.counters[f"{kind.value}.exists"]) == (1, 1)
    assert [(r.stored, r.skipped) for r in b.store.sequences()] == [({"kv": (0,), "query": (0,)}, {})] * 2
    assert b.free()


def test_the_same_chunk_twice_in_a_real_store_that_skips(bench):
    b = bench(real_store=True, on_pressure="skip")
    b.capture._may_wait = False
    b.one_chunk(1, IDS, [5, 3])
    b.one_chunk(2, IDS, [6, 4])
    for uid in (1, 2):
        b.finish(uid, 9)
    assert [(b.counters[f"{k.value}.stored"], b.counters[f"{k.value}.exists"]) for k in CacheKind] == [(1, 1), (1, 1)]


def test_the_order_is_that_of_completion(bench):
    b = bench(num_blocks=40)
    put_off, real = [], b.capture._put_off.put_off

    def note(staged, publish):
        track, kind, chunk, _ = publish.args
        put_off.append((track.tokens[chunk.start], kind.value))
        real(staged, publish)

    b.capture._put_off.put_off = note
    for uid in range(1, 9):
        ids = tuple(range(uid * 1000, uid * 1000 + 16))
        b.run(request(uid, 0, 16, range(4 * uid, 4 * uid + 4)), tokens=[(uid, 0, ids)])
        if uid == 4:
            b.worker.finish(None, FinishedRequest(2, 17, 17, 16))
        if uid == 6:
            for _ in range(2):
                b.capture._put_off.publish_landed()
    assert 0 < len(b.given) < len(put_off)
    b.capture.flush()
    assert b.given == put_off and len(put_off) == 32


# ---- the timer --------------------------------------------------------------------------------------------------------------------


def until(true):
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def test_an_engine_that_rests_keeps_nothing(bench, monkeypatch):
    monkeypatch.setattr(handover, "DEADLINE_S", 0.01)
    b = bench()
    b.one_chunk(1, IDS, [5, 3])
    until(lambda: len(b.store.published) == 2)
    put_off = b.capture._put_off
    until(lambda: not put_off._some.is_set())  # the timer sleeps until there is something again
    timer = put_off._timer
    b.one_chunk(2, MORE, [6, 4])
    until(lambda: len(b.store.published) == 4)
    assert put_off._timer is timer and timer.is_alive() and timer.daemon
    b.worker.close()
    timer.join(20)
    assert not timer.is_alive()


class FakeReady:
    over = False

    def done(self):
        if self.over == "lost":
            raise RuntimeError("the device is lost")
        return self.over


def fake(nbytes=100):
    return SimpleNamespace(host=torch.empty(nbytes, dtype=torch.uint8), ready=FakeReady())


def make(most=10_000):
    return Handover(threading.RLock(), most)


@pytest.mark.parametrize("over", [True, "lost"])
def test_the_timer_waits_for_the_device(deadline, over):
    published, first, second = [], fake(), fake()
    late = make()
    second.ready.over = True
    late.put_off(first, lambda: published.append(0))
    late.put_off(second, lambda: published.append(1))
    for _ in range(3):
        assert late.publish_landed()
    assert not published, "a step that runs for long is no engine that rests"
    first.ready.over = over
    late.publish_landed()
    assert not published
    late.publish_landed()
    assert published == [0, 1]
    late.close()


def test_after_closing_nothing_is_put_off(deadline):
    published, late = [], make()
    late.put_off(fake(), lambda: published.append(0))
    late.close()
    assert published == [0] and not late.publish_landed()
    late.put_off(fake(), lambda: published.append(1))
    assert published == [0, 1] and late.nbytes == 0 and not late.flush()


def test_the_timer_keeps_nobody_alive(monkeypatch):
    monkeypatch.setattr(handover, "DEADLINE_S", 0.01)
    late = make()
    late.put_off(fake(), list)
    timer, gone = late._timer, weakref.ref(late)
    del late
    gc.collect()
    timer.join(20)
    assert gone() is None and not timer.is_alive()


def test_a_timer_that_sleeps_ends_with_its_capture(monkeypatch):
    monkeypatch.setattr(handover, "DEADLINE_S", 0.01)
    late = make()
    late.put_off(fake(), list)
    late.flush()
    some, timer = late._some, late._timer
    until(lambda: not some.is_set())
    del late
    gc.collect()
    timer.join(20)
    assert not timer.is_alive()


def test_an_arena_keeps_no_capture_alive(bench):  # chunks that rest in a store refer to the arena
    b = bench()
    b.one_chunk(1, IDS, [5, 3])
    b.finish(1, 9)
    arena, gone = b.sim.arena, weakref.ref(b.capture)
    b.capture._put_off.close()
    b.capture = b.worker.capture = b.sim.capture = None
    gc.collect()
    assert gone() is None
    while arena.used < arena.nbytes:
        arena.take((4096,), torch.uint8)
    assert arena.take((16,), torch.uint8) is not None  # its watcher is no trouble
    b.capture = SimpleNamespace(_put_off=SimpleNamespace(close=lambda: None))


def test_a_closed_capture_is_gone_at_once(bench):  # with the engine's pages: not when garbage is collected
    b = bench()
    b.one_chunk(1, IDS, [5, 3])
    b.capture.close()
    b.store._thread.join(20)
    gone, b.capture = weakref.ref(b.capture), SimpleNamespace(_put_off=b.capture._put_off)
    gc.disable()
    try:
        b.worker.capture = b.sim.capture = None
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.timeout(60)
def test_closing_while_the_timer_is_held_by_the_store(monkeypatch):  # D32
    monkeypatch.setattr(handover, "DEADLINE_S", 0.01)
    published, held, room = [], threading.Event(), threading.Event()

    def publish(number):
        held.set()
        assert room.wait(20)
        published.append(number)

    late, ready = make(), fake()
    ready.ready.over = True
    late.put_off(ready, lambda: publish(0))
    late.put_off(fake(), lambda: publish(1))
    assert held.wait(20)
    closing = threading.Thread(target=late.close)
    closing.start()
    room.set()
    closing.join(20)
    late._timer.join(20)
    assert not closing.is_alive() and not late._timer.is_alive() and published == [0, 1]


# ---- errors -----------------------------------------------------------------------------------------------------------------------


def away(*args, **kw):
    raise StoreUnavailable("away")


def test_a_chunk_that_the_store_does_not_take_is_counted(bench, monkeypatch):  # C31 D17: wherever it is handed over
    b = bench()
    b.one_chunk(1, IDS, [5, 3])
    with monkeypatch.context() as patch:
        patch.setattr(b.store, "store", away)
        for _ in range(2):
            b.capture._put_off.publish_landed()
    assert [b.counters[f"{k.value}.skipped.store-failed"] for k in CacheKind] == [1, 1]
    assert len(b.capture.features) == 2 and b.capture._tracks[1].in_flight == 0
    b.finish(1, 9)
    assert b.store.sequences()[0].skipped == {k.value: {"store-failed": 1} for k in CacheKind}
    assert b.free()


def test_any_other_error_turns_the_feature_off_on_the_engines_thread(bench, monkeypatch, caplog):  # C32
    b = bench()
    b.one_chunk(1, IDS, [5, 3])
    monkeypatch.setattr(b.store, "store", boom)
    for _ in range(2):
        b.capture._put_off.publish_landed()
    assert len(b.capture.features) == 2, "a step may be running"
    b.run()
    assert not b.capture.features and b.counters["errors"] == 2
    b.finish(1, 9)
    assert b.store.sequences()[0].skipped == {k.value: {"store-failed": 1} for k in CacheKind}
    assert b.free()


# ---- an exit, and memory that is short --------------------------------------------------------------------------------------------


ONE_STEP = """
import os, sys
import torch
from collections import Counter
from qcap.attribution import RequestStep, Step, TokenUpdate
from qcap.backends import open_backend
from qcap.capture import Capture, HostArena, PageStager, StreamBudget, StreamingQueryFeature, handover
from qcap.geometry import Geometry, Rope

handover.DEADLINE_S = 1000.0
N, CH, ROWS, L = 4, 8, 64, 2
g = Geometry(model="m", layer_names=("a", "b"), num_q_heads=1, num_kv_heads=1, head_size=4, dtype="float32", block_size=N, chunk_size=CH,
             rope=Rope(rotary_dim=4))
arena, counters = HostArena(1 << 22, pinned=False, waits=True), Counter()
feature = StreamingQueryFeature(g, StreamBudget(ROWS, 4, 2, 16, L), num_kv_blocks=40, plan_blocks=40, plan_requests=4, padded_rows=ROWS,
                                stager=PageStager(torch.device("cpu"), arena), counters=counters, host_bytes=arena.nbytes)
capture = Capture(g, open_backend(sys.argv[1], host_bytes=1 << 12), [feature], engine_id="e", write_receipts=True, arena=arena,
                  counters=counters)
capture.begin_step(Step(1, (RequestStep(1, "r", "", 0, ROWS, 0, tuple(range(ROWS // N)), True, ""),),
                        (TokenUpdate(1, 0, tuple(range(ROWS))),)))
for layer in range(L):
    feature.on_layer(layer, torch.randn(ROWS, 1, 4), torch.arange(ROWS))
capture.end_step()
assert capture._put_off.nbytes
if sys.argv[2] == "forked":
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print(sum(len(files) for _, _, files in os.walk(sys.argv[1].removeprefix("file://") + "/objects")))
if sys.argv[2] == "error":
    raise RuntimeError("a mistake in the user's script")
"""


@pytest.mark.parametrize("how", ["end", "error", "forked"])
def test_a_process_that_ends_in_the_middle_loses_nothing_of_what_was_whole(tmp_path, how):  # D33
    url = f"file://{tmp_path}"
    done = subprocess.run([sys.executable, "-c", ONE_STEP, url, how], capture_output=True, text=True, timeout=120)
    assert done.returncode == (how == "error"), done.stderr
    assert how != "forked" or done.stdout.split() == ["0"], "a child has nothing to write"
    assert sum(path.is_file() for path in (tmp_path / "objects").rglob("*")) == 8


def test_a_chunk_that_is_put_off_does_not_keep_its_steps_memory_from_the_next(deadline):
    """Where nobody waits: the last chunks of a large step would keep all of it, and the next step but one would find no room."""
    g = Geometry(
        model="m", layer_names=("a", "b"), num_q_heads=4, num_kv_heads=1, head_size=64, dtype="float32", block_size=4, chunk_size=8,
        rope=Rope(rotary_dim=4),
    )  # fmt: skip
    rows = 64
    step_bytes = 2 * rows * 4 * 64 * 4 + 8 * rows
    arena = HostArena(2 * (-(-step_bytes // 4096) * 4096), pinned=False, waits=False)  # two of the largest steps
    counters: Counter[str] = Counter()
    feature = StreamingQueryFeature(
        g, StreamBudget(rows, 4, 2, 4 * 64 * 4, 2), num_kv_blocks=400, plan_blocks=400, plan_requests=4, padded_rows=rows,
        stager=PageStager(torch.device("cpu"), arena), counters=counters, host_bytes=arena.nbytes,
    )  # fmt: skip
    store = open_backend("memory://put-off-and-short", on_pressure="skip", host_bytes=arena.nbytes)
    capture = Capture(g, store, [feature], engine_id="e", write_receipts=True, arena=arena, counters=counters, may_wait=False)
    for number in range(6):
        start, end = number * rows, (number + 1) * rows
        blocks = tuple(range(start // 4, end // 4))
        update = TokenUpdate(1, start, tuple(range(start, end)))
        capture.begin_step(Step(number + 1, (RequestStep(1, "r", "", start, end, start // 4, blocks, not number, ""),), (update,)))
        for layer in range(2):
            feature.on_layer(layer, torch.randn(rows, 4, 64), torch.arange(start, end))
        capture.end_step()
        assert store.drain(10)
        arena_is_free = time.monotonic() + 10
        while arena.used > arena.may_rest and time.monotonic() < arena_is_free:
            time.sleep(0.001)  # as the device runs a step
    assert counters["query.skipped.host-full"] == 0
    capture.close()
    assert counters["query.stored"] == 6 * rows // 8
