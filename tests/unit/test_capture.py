"""Features over a step, the way to the store, receipts; and hundreds of runs of a simulated engine with every value checked."""

from __future__ import annotations

import logging
import re
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from engine_sim import HEADS, MODEL, NAMES, D, L, N, Options, Sim, simulate

import qcap.sdk
from qcap import kernels
from qcap.attribution import FinishedRequest, LoadRequest, RequestStep, Step, TokenUpdate
from qcap.capture import HostArena
from qcap.errors import StoreUnavailable
from qcap.kinds import CacheKind
from qcap.store.tiers import StoreOutcome
from qcap.tokens import ChunkedTokenDatabase, chunk_key
from qcap.vllm import worker as worker_module

CH = 8


@pytest.fixture(autouse=True)
def slots_from_the_caller(monkeypatch):
    monkeypatch.setattr(worker_module, "slot_mapping_of", lambda name, metadata: metadata)


class Bench:
    """A worker driven by hand: one row a token, values by (uid, position)."""

    def __init__(self, **options):
        self.sim = Sim(Options(seed=0, budget=64, **options))
        self.worker, self.capture = self.sim.worker, self.sim.capture
        self.store, self.counters = self.sim.store, self.sim.counters
        self.store._keep = False  # whether memory comes back is asked at once
        self.number = 0

    def step(self, *requests, tokens=(), finished=(), preempted=(), loads=(), speculative=False, resampled=()):
        self.number += 1
        updates = tuple(TokenUpdate(*t) for t in tokens)
        return Step(self.number, tuple(requests), updates, tuple(finished), tuple(preempted), tuple(loads), speculative, tuple(resampled))

    @staticmethod
    def rows(uid, positions, layer, plane):
        p = torch.tensor(list(positions)).float()
        return (p[:, None] * 100 + torch.arange(HEADS * D) + uid * 10_000 + layer * 0.5 + plane * 0.25).view(-1, HEADS, D)

    def forward(self, step, layers=range(L), mapping=True):
        slots, parts = [], []
        for r in step.requests:
            span = range(r.start, r.end)
            slots += [r.block_ids[p // N - r.first_block] * N + p % N for p in span]
            parts.append((r.uid, span))
        s = torch.tensor(slots, dtype=torch.int64)
        for layer in layers:
            for plane in range(2):
                if parts:
                    self.sim.pages[layer][s // N, plane, s % N] = torch.cat([self.rows(u, p, layer, plane) for u, p in parts])
            query = torch.cat([self.rows(u, p, layer, 2) for u, p in parts]) if parts else torch.empty(0, HEADS, D)
            self.worker._on_query(layer, NAMES[layer], query, s if mapping else None)

    def run(self, *requests, **kw):
        step = self.step(*requests, **kw)
        self.worker.begin(step)
        self.worker.load()
        self.forward(step)
        self.worker.end()
        return step

    def finish(self, uid, total, computed=None, tokens=None):
        update = TokenUpdate(uid, *tokens) if tokens else None
        self.worker.finish(update, FinishedRequest(uid, total, total, total - 1 if computed is None else computed))
        assert self.store.drain(10)

    def wanted(self, uid, chunk, kind):
        planes = (0, 1) if kind is CacheKind.KV else (2,)
        span = range(chunk * CH, (chunk + 1) * CH)
        return torch.stack([torch.stack([self.rows(uid, span, layer, p).view(CH, -1) for layer in range(L)]) for p in planes])

    def drain(self):
        self.capture.flush()  # what was put off is not the store's yet
        assert self.store.drain(10)

    def objects(self, kind):
        self.drain()
        return [(r, t) for r, t in self.store.published if r.kind is kind]

    def free(self):
        return self.ring_free() and self.sim.arena.outstanding == 0

    @property
    def planning(self):
        return "plan" if self.sim.streaming else "begin"

    def ring_free(self):
        if self.sim.streaming:
            self.sim.query.mover.close()
            return not self.sim.query.ledger._requests and self.sim.query.mover.bytes == 0
        ring = self.sim.query.ring
        return ring.num_free_blocks() == ring.num_blocks

    def close(self):
        self.sim.close()


@pytest.fixture(params=["streaming", "resident"])
def bench(request):
    made = []

    def make(**options):
        made.append(Bench(streaming=request.param == "streaming", **options))
        return made[-1]

    yield make
    for b in made:
        b.close()


def request(uid, start, end, blocks, *, first=0, admitted=None, skip="", salt=""):
    return RequestStep(uid, f"r{uid}", salt, start, end, first, tuple(blocks), start == 0 if admitted is None else admitted, skip)


IDS = tuple(range(100, 160))


def test_chunks_that_came_with_the_ids_are_not_hashed_again(bench, monkeypatch):  # A25
    b, hashed = bench(), []
    database = b.capture._database
    extend = database.extend
    monkeypatch.setattr(database, "extend", lambda known, tokens: hashed.append(len(known)) or extend(known, tokens))
    told = tuple(ChunkedTokenDatabase(CH).chunks(IDS[:17]))
    b.run(request(1, 0, 17, range(1, 6)), tokens=[(1, 0, IDS[:17], told)])
    b.run(request(1, 17, 24, [5, 6], first=4), tokens=[(1, 17, IDS[17:25])])
    assert hashed == [2, 2]  # what was known each time: of the prompt's chunks none was left to hash
    b.finish(1, 25)
    found = {record.start: record.digest for record, _ in b.objects(CacheKind.KV)}
    assert found == {chunk.start: chunk.digest for chunk in ChunkedTokenDatabase(CH).chunks(IDS[:24])}


def test_a_cached_prefix_is_looked_up_at_once(bench, monkeypatch):  # by chunk it took the engine's thread 2 ms of a prompt of 32 thousand
    b, asked = bench(), []
    contains = b.store.contains
    b.run(request(1, 0, 32, range(1, 9)), tokens=[(1, 0, IDS[:33])])
    b.finish(1, 33)
    monkeypatch.setattr(b.store, "contains", lambda keys: asked.append(len(keys)) or contains(keys))
    b.run(request(2, 32, 40, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], admitted=True), tokens=[(2, 0, IDS[:41])])
    b.drain()
    assert sorted(asked) == [1, 1, 4]  # the four before, and what became whole: keys and values, and queries
    assert b.counters["kv.exists"] == 4
    b.finish(2, 41)
    assert b.store.receipts[-1].stored["kv"] == (0, 1, 2, 3, 4)
    assert len(b.objects(CacheKind.KV)) == 5


# ---- one step ---------------------------------------------------------------------------------------------------------------------


def test_what_a_stored_chunk_says(bench):  # C29 A25 D12 A24: one object a chunk and kind, with tokens, positions, salt and parent
    b = bench()
    b.run(request(1, 0, 17, [5, 3, 9, 2, 7], salt="u1"), tokens=[(1, 0, IDS[:17])])
    chunks = ChunkedTokenDatabase(CH).chunks(IDS[:16])
    for kind in CacheKind:
        found = b.objects(kind)
        assert [r.start for r, _ in found] == [0, 8]
        for (record, tensor), chunk in zip(found, chunks, strict=True):
            assert (record.token_ids, record.digest, record.parent) == (IDS[chunk.start : chunk.end], chunk.digest, chunk.parent)
            assert record.positions == tuple(range(chunk.start, chunk.end)) and record.salt == "u1"
            assert torch.equal(tensor, b.wanted(1, chunk.index, kind))
    kv, q = (chunk_key(kind, b.sim.geometry, chunks[0].digest, "u1") for kind in (CacheKind.KV, CacheKind.QUERY))
    assert (q.model, kv.model) == (MODEL + "##query", MODEL)
    assert (q.digest, q.salt, q.tp_size, q.tp_rank, q.dtype) == (kv.digest, kv.salt, kv.tp_size, kv.tp_rank, kv.dtype)
    b.finish(1, 17)
    receipt = b.store.sequences()[0]
    assert (receipt.request_id, receipt.salt, receipt.stored) == ("r1", "u1", {"kv": (0, 1), "query": (0, 1)})
    assert b.free()


def test_rows_are_attributed_once_a_step(bench, monkeypatch):  # C24: every layer uses the same slots
    b, calls = bench(), []
    real = kernels.slot_attribution
    monkeypatch.setattr(kernels, "slot_attribution", lambda *a: (calls.append(a[3]), real(*a)))
    b.run(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:8])])
    assert len(calls) == 1
    b.run(request(1, 8, 9, [4], first=2), tokens=[(1, 8, IDS[8:9])])
    b.run(request(2, 0, 8, [6, 7]), tokens=[(2, 0, IDS[:8])])
    b.run(request(2, 8, 9, [8], first=2), tokens=[(2, 8, IDS[8:9])])
    assert len(calls) == 4 and [c.data_ptr() for c in calls[:2]] == [c.data_ptr() for c in calls[2:]], "into memory that stays"


def test_nothing_leaves_before_the_save_hook(bench):  # C30
    b = bench()
    step = b.step(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:8])])
    b.worker.begin(step)
    b.forward(step)
    assert not b.store.published and not b.store.poll() and not b.capture._put_off.nbytes
    b.worker.end()
    assert b.capture._put_off.nbytes
    assert len(b.objects(CacheKind.KV)) == len(b.objects(CacheKind.QUERY)) == 1


def test_the_save_hook_twice_or_alone_does_nothing(bench):  # C26 C27
    b = bench()
    b.worker.end()
    b.run(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:8])])
    b.worker.end()
    assert len(b.objects(CacheKind.QUERY)) == 1 and b.counters["steps"] == 1
    b.run()  # a step with nothing in it
    assert b.counters["errors"] == 0


def test_no_slot_mapping_drops_the_step_and_says_so_once(bench, caplog):  # A18 C21 C25 C34 O13 O14: 200 steps, one line
    b = bench()
    worker_module.often._seen.clear()  # what another test has said
    for i in range(200):
        step = b.step(request(1, i, i + 1, [5 + i // N], first=i // N, admitted=i == 0), tokens=[(1, i, (i,))])
        b.worker.begin(step)
        b.forward(step, mapping=False)
        b.worker.end()
        if i == 20:
            break
    assert b.counters["query.steps_without_slots"] == 21
    assert len([r for r in caplog.records if "no slot mapping" in r.message]) == 1
    assert not b.objects(CacheKind.QUERY) and len(b.objects(CacheKind.KV)) == 2
    b.finish(1, 21)
    assert b.store.sequences()[0].skipped == {"query": {"rows-missing": 2}}
    assert b.free() and len(b.capture.features) == 2


def test_layer_0_without_slots_and_layer_1_with(bench):  # C21: no plan was made for this step, so nothing of it may be stored
    b = bench()
    b.run(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:8])])
    step = b.step(request(2, 0, 8, [6, 4]), tokens=[(2, 0, IDS[10:18])])
    b.worker.begin(step)
    b.forward(step, layers=[0], mapping=False)
    b.forward(step, layers=[1])
    b.worker.end()
    assert [r.token_ids for r, _ in b.objects(CacheKind.QUERY)] == [IDS[:8]]
    for uid in (1, 2):
        b.finish(uid, 9)
    assert b.free()


def test_a_feature_that_is_off_is_left_alone(bench, monkeypatch):  # C19
    b = bench()
    b.capture.turn_off(b.sim.query)
    monkeypatch.setattr(b.sim.query, "on_layer", lambda *a: pytest.fail("called"))
    b.run(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:8])])
    assert len(b.objects(CacheKind.KV)) == 1
    b.finish(1, 9)
    assert b.store.sequences()[0].skipped == {"query": {"turned-off": 1}}
    assert b.free()


def test_decode_fills_a_chunk_row_by_row(bench):  # A29
    b = bench()
    blocks = [5, 3, 9]
    b.run(request(1, 0, 3, blocks[:1]), tokens=[(1, 0, IDS[:4])])
    for p in range(3, 9):
        b.run(
            request(1, p, p + 1, blocks[: p // N + 1] if p < 8 else blocks[2:], first=0 if p < 8 else 2, admitted=False),
            tokens=[(1, p + 1, IDS[p + 1 : p + 2])],
        )
    ((record, tensor),) = b.objects(CacheKind.QUERY)
    assert record.token_ids == IDS[:8] and torch.equal(tensor, b.wanted(1, 0, CacheKind.QUERY))


def test_token_ids_that_come_a_step_late(bench):  # asynchronous scheduling: staged, then published when the ids are known
    b = bench()
    b.run(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:7])])
    assert not b.objects(CacheKind.KV) and b.sim.arena.outstanding
    b.run(request(2, 0, 8, [5, 3]), tokens=[(2, 0, IDS[20:28]), (1, 7, IDS[7:8])])  # the pages are another request's by now
    for kind in CacheKind:
        (first, tensor), _ = sorted(b.objects(kind), key=lambda o: o[0].token_ids)
        assert first.token_ids == IDS[:8] and torch.equal(tensor, b.wanted(1, 0, kind))
    b.finish(1, 9)
    b.finish(2, 9)
    assert b.free()


def test_token_ids_that_never_come(bench):  # D11: buffers and blocks go back, the reason is told
    b = bench()
    b.run(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:7])])
    b.finish(1, 9)
    assert not b.objects(CacheKind.KV)
    assert b.store.sequences()[0].skipped == {k.value: {"token-ids-unknown": 1} for k in CacheKind}
    assert b.free()


def test_token_ids_that_change_are_not_believed(bench):  # R37
    b = bench()
    b.run(request(1, 0, 6, [5, 3]), tokens=[(1, 0, IDS[:7])])
    b.run(request(1, 6, 8, [5, 3], admitted=False), tokens=[(1, 6, (IDS[6] + 1, IDS[7]))])
    assert not b.objects(CacheKind.KV)
    b.finish(1, 9)
    assert b.store.sequences()[0].skipped == {k.value: {"token-ids-changed": 1} for k in CacheKind}
    assert b.free()


def test_tokens_sampled_anew_after_a_reset(bench):  # R37: a waiting chunk holds the row of a token that was thrown away
    b = bench()
    b.run(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:7])])
    b.run(preempted=[1], resampled=[1])
    b.run(request(1, 0, 7, [6, 4]), tokens=[(1, 7, (999,))])
    assert not b.objects(CacheKind.KV) and not b.objects(CacheKind.QUERY)
    b.finish(1, 9, computed=8)
    assert b.free()


def test_a_barred_request_claims_nothing_that_others_stored(bench):  # D11
    b = bench()
    b.run(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:8])])
    b.finish(1, 8)
    b.run(request(2, 0, 8, [6, 4], skip="lora"), tokens=[(2, 0, IDS[:8])])  # the same ids, and another model's rows
    b.finish(2, 9)
    receipt = b.store.receipts[-1]
    assert receipt.stored == {k.value: () for k in CacheKind} and receipt.skipped == {k.value: {"lora": 1} for k in CacheKind}


def test_a_step_asks_a_remote_store_for_nothing(bench, monkeypatch):  # a round trip in the engine's way
    b, asked = bench(), []
    monkeypatch.setattr(b.store, "cheap_contains", False)
    monkeypatch.setattr(b.store, "contains", lambda keys: asked.append(keys) or [False] * len(keys))
    b.run(request(1, 0, 16, [5, 3, 7, 2]), tokens=[(1, 0, IDS[:17])])
    b.run(request(2, 8, 16, [5, 3, 7, 4], admitted=True), tokens=[(2, 0, IDS[:17])])
    assert asked == []


@pytest.mark.parametrize("skip", ["lora", "multimodal", "no-token-ids", "salt"])
def test_barred_requests_store_nothing_and_hold_nothing(bench, skip):  # D11 A11
    b = bench()
    b.run(request(1, 0, 8, [5, 3], skip=skip), request(2, 0, 8, [6, 4]), tokens=[(2, 0, IDS[:8])])
    assert [r.token_ids for r, _ in b.objects(CacheKind.KV)] == [IDS[:8]]
    b.finish(1, 9)
    assert b.store.sequences()[0].skipped == {k.value: {skip: 1} for k in CacheKind}
    b.finish(2, 9)
    assert b.free()


def test_chunked_prefill_in_a_speculative_engine(bench):  # R37: pages of this very step are not read before they are computed
    b = bench(speculative=True)
    b.run(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:24])], speculative=True)
    b.run(request(1, 8, 16, [7, 2], first=2), speculative=True)
    b.run(request(1, 16, 24, [8, 9], first=4), speculative=True)
    for kind in CacheKind:
        assert [r.start for r, _ in b.objects(kind)] == [0, 8]
        assert all(torch.equal(t, b.wanted(1, r.start // CH, kind)) for r, t in b.objects(kind))
    b.finish(1, 25, computed=24, tokens=(24, IDS[24:25]))
    assert [r.start for r, _ in b.objects(CacheKind.KV)] == [0, 8, 16]
    assert b.free()


def test_preempted_before_a_speculative_chunk_was_taken(bench):
    b = bench(speculative=True)
    b.run(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:8])], speculative=True)
    b.run(preempted=[1], tokens=[(1, 8, IDS[8:9])], speculative=True)
    b.finish(1, 9)
    assert [r.start for r, _ in b.objects(CacheKind.KV)] == [0]


# ---- failures ---------------------------------------------------------------------------------------------------------------------


def test_one_write_that_fails_strands_no_other(bench, monkeypatch):  # C31 D10 D17
    b = bench()
    outcomes = iter([StoreOutcome.FAILED, StoreOutcome.REFUSED])
    real = b.store.store

    def store(record, source, event=None, **kw):
        outcome = next(outcomes, None)
        if outcome is None:
            return real(record, source, event, **kw)
        future: Future[StoreOutcome] = Future()
        future.set_result(outcome)
        return future

    monkeypatch.setattr(b.store, "store", store)
    b.run(request(1, 0, 16, [5, 3, 9, 2]), tokens=[(1, 0, IDS[:16])])
    b.capture.flush()
    assert len(b.store.published) + b.store.poll()
    assert b.sim.streaming or b.ring_free()  # streamed rows are held until they have been written
    b.finish(1, 17, computed=16)
    receipt = b.store.sequences()[0]
    assert sum(map(len, receipt.stored.values())) == 2
    assert sorted(r for reasons in receipt.skipped.values() for r in reasons) == ["store-busy", "store-failed"]
    assert b.free()


def boom(*args, **kwargs):
    raise RuntimeError("boom")


PLACES = {
    "planning": lambda b, patch: patch.setattr(b.sim.query.ledger, b.planning, boom),
    "planning-kv": lambda b, patch: patch.setattr(b.sim.kv, "begin", boom),
    "attribution": lambda b, patch: patch.setattr(kernels, "slot_attribution", boom),
    "scatter": lambda b, patch: patch.setattr(kernels, "row_scatter", boom),
    "slots": lambda b, patch: patch.setattr(worker_module, "slot_mapping_of", boom),
    "commit": lambda b, patch: patch.setattr(b.sim.query.ledger, "commit", boom),
    "complete": lambda b, patch: patch.setattr(b.sim.query.ledger, "complete", boom),
    "gather": lambda b, patch: patch.setattr(kernels, "gather_pages", boom),
    "buffers": lambda b, patch: patch.setattr(b.sim.arena, "take", boom),
    "store": lambda b, patch: patch.setattr(b.store, "store", boom),
    "contains": lambda b, patch: patch.setattr(b.store, "contains", boom),
    "receipt": lambda b, patch: patch.setattr(b.store, "put_sequence", boom),
    "release": lambda b, patch: patch.setattr(b.sim.query, "release", boom),
    "why": lambda b, patch: patch.setattr(b.sim.query, "why_missing", boom),
    "drain": lambda b, patch: patch.setattr(b.store, "drain", boom),
    "closing": lambda b, patch: (patch.setattr(b.sim.query, "close", boom), patch.setattr(b.sim.query.ledger, b.planning, boom)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_error_of_capture_reaches_the_engine(bench, monkeypatch, caplog, place):  # C32 C28 O14: every hook returns, blocks go back
    b = bench()
    b.run(request(9, 0, 6, [10, 11]), tokens=[(9, 0, IDS[40:46])])  # holds ring blocks when it breaks
    with monkeypatch.context() as patch:
        PLACES[place](b, patch)
        for i in range(30):
            uid = i + 1
            b.run(request(uid, 0, 16, [5, 3, 9, 2]), tokens=[(uid, 0, tuple(range(i * 16, i * 16 + 16)))])
            b.worker.take_failed_blocks()
            b.worker.finish(None, FinishedRequest(uid, 17, 17, 16))
            b.worker.settle()
        b.worker.finish(None, FinishedRequest(9, 7, 7, 6))
    loud = [r for r in caplog.records if r.levelno >= logging.ERROR and r.name.startswith("qcap")]
    assert len(loud) <= 4, [r.message for r in loud]
    if place not in ("closing",):
        assert b.ring_free()
    assert not b.capture._tracks
    if b.sim.query not in b.capture.features:
        assert b.counters["query.turned_off"] == 1


def test_a_query_of_the_wrong_width_turns_queries_off_once(bench, caplog):  # C32: a warning once, capture off, the forward pass unaffected
    b = bench()
    step = b.step(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:8])])
    b.worker.begin(step)
    for layer in range(L):
        b.worker._on_query(layer, NAMES[layer], torch.zeros(8, HEADS, D * 2), torch.arange(20, 28))
    b.worker.end()
    assert b.capture.features == [b.sim.kv] and b.ring_free()
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1


def test_a_query_of_another_dtype_is_not_stored(bench):  # C32
    b = bench()
    step = b.step(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:8])])
    b.worker.begin(step)
    b.worker._on_query(0, NAMES[0], torch.zeros(8, HEADS, D).bfloat16(), torch.arange(20, 28))
    assert b.capture.features == [b.sim.kv]


def test_a_store_that_is_away_for_a_while(bench, monkeypatch):  # D10: capture goes on, and the receipt is written
    b = bench()

    def away(keys):
        raise StoreUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(b.store, "contains", away)
        b.run(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:8])])
        b.finish(1, 9)
    assert len(b.capture.features) == 2 and len(b.store.sequences()) == 1
    b.run(request(2, 0, 8, [5, 3]), tokens=[(2, 0, IDS[8:16])])
    assert len(b.objects(CacheKind.QUERY)) == 2
    b.finish(2, 9)
    assert b.free()


def test_a_refused_chunk_gives_all_its_buffers_back(bench):  # D17: the stamps too
    b = bench(refuse=1.0, on_pressure="skip")
    b.run(request(1, 0, 16, [5, 3, 9, 2]), tokens=[(1, 0, IDS[:16])])
    b.finish(1, 17, computed=16)
    assert b.store.sequences()[0].skipped == {k.value: {"store-busy": 2} for k in CacheKind}
    assert b.free()


# ---- loads ------------------------------------------------------------------------------------------------------------------------


def load_of(b, uid, ids, blocks, end=8):
    chunks = ChunkedTokenDatabase(CH).chunks(ids)
    return LoadRequest(uid, f"r{uid}", "", 0, end, tuple(blocks), tuple(c.digest for c in chunks), tuple(ids))


def test_a_load_fills_the_pages(bench):
    b = bench()
    b.run(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:8])])
    b.drain()
    b.run(request(2, 8, 9, [6, 4, 7], admitted=True), tokens=[(2, 0, IDS[:9])], loads=[load_of(b, 2, IDS[:8], [6, 4])])
    for layer in range(L):
        assert torch.equal(b.sim.pages[layer][[6, 4]], b.sim.pages[layer][[5, 3]])
    assert b.worker.take_failed_blocks() == set()
    b.finish(2, 10)
    assert b.store.sequences()[0].skipped == {}  # its chunk's queries are there already


def failed_load(b, uid=2, blocks=(6, 4)):
    step = b.run(request(uid, 8, 9, [*blocks, 7], admitted=True), tokens=[(uid, 0, IDS[:9])], loads=[load_of(b, uid, IDS[:8], blocks)])
    assert b.worker.take_failed_blocks() == set(blocks)
    return step


def test_a_failed_load_is_reported_and_nothing_of_it_is_stored(bench):  # R37
    b = bench()
    failed_load(b)
    b.run(request(2, 0, 9, [6, 4, 7], admitted=False))
    b.finish(2, 10)
    assert not b.store.published
    assert b.store.sequences()[0].skipped == {k.value: {"load-failed": 1} for k in CacheKind}
    assert b.free()


def test_who_reads_tainted_blocks_is_not_stored(
    bench,
):  # R37: vLLM keeps the blocks of a failed load in its prefix cache until they are recomputed
    b = bench()
    failed_load(b)
    b.run(request(3, 8, 16, [6, 4, 9, 2], admitted=True), tokens=[(3, 0, IDS[:16])])
    assert not b.objects(CacheKind.KV)
    b.run(request(4, 16, 24, [6, 4, 9, 2, 10, 11], admitted=True), tokens=[(4, 0, IDS[:24])])  # what 3 wrote is garbage as well
    assert not b.objects(CacheKind.KV)
    for uid, total in ((2, 9), (3, 17), (4, 25)):
        b.finish(uid, total)
    assert b.free()


def test_recomputed_blocks_are_good_again(bench):
    b = bench()
    failed_load(b)
    b.finish(2, 9)
    b.run(request(3, 0, 8, [6, 4]), tokens=[(3, 0, IDS[:8])])
    assert len(b.objects(CacheKind.KV)) == 1
    b.run(request(4, 8, 16, [6, 4, 9, 2], admitted=True), tokens=[(4, 0, IDS[:16])])
    assert len(b.objects(CacheKind.KV)) == 2
    assert not b.capture._tainted - {7}


def test_good_load_clears_taint(bench):
    b = bench()
    failed_load(b)
    b.finish(2, 9)
    b.run(request(1, 0, 8, [12, 13]), tokens=[(1, 0, IDS[:8])])
    b.drain()
    b.run(request(3, 8, 16, [6, 4, 9, 2], admitted=True), tokens=[(3, 0, IDS[:16])], loads=[load_of(b, 3, IDS[:8], [6, 4])])
    b.finish(3, 17, computed=16)
    assert b.worker.take_failed_blocks() == set()
    assert b.store.sequences()[-1].skipped == {}


# ---- ends -------------------------------------------------------------------------------------------------------------------------


def test_a_request_that_ends_between_begin_and_the_save_hook(bench):  # C35 C32: structured output with asynchronous scheduling
    b = bench()
    step = b.step(request(1, 0, 8, [5, 3]), request(2, 0, 8, [6, 4]), tokens=[(1, 0, IDS[:8]), (2, 0, IDS[8:16])])
    b.worker.begin(step)
    b.forward(step)
    b.finish(1, 9, computed=0)
    b.worker.end()
    assert b.counters["errors"] == 0
    assert [r.token_ids for r, _ in b.objects(CacheKind.QUERY)] == [IDS[8:16]]
    b.finish(2, 9)
    assert b.free()


def test_close_waits_for_what_is_on_its_way(bench):  # D32
    b = bench()
    slow = b.store.contains
    b.store.contains = lambda keys: (time.sleep(0.01), slow(keys))[1]
    b.run(request(1, 0, 24, [5, 3, 9, 2, 7, 8]), request(2, 0, 5, [10, 11]), tokens=[(1, 0, IDS[:24]), (2, 0, IDS[30:36])])
    b.worker.close()
    assert len(b.store.published) == 6 and b.counters["requests_cut_off"] == 2
    assert {r.request_id for r in b.store.sequences()} == {"r1", "r2"}
    assert b.free()
    b.worker.close()  # twice is fine


def test_an_error_while_closing_does_not_skip_the_store(bench, monkeypatch):  # D33
    b = bench()
    closed = []
    monkeypatch.setattr(b.sim.query, "close", boom)
    monkeypatch.setattr(b.capture.backend._inner, "close", lambda: closed.append(True))
    b.worker.close()
    assert closed == [True]
    monkeypatch.undo()


def test_a_new_kind_is_a_feature_and_nothing_else(bench):  # D34
    b = bench()
    seen = []

    class Dummy:
        kind = CacheKind.QUERY
        on_device_bytes = 0
        starts_early = True
        begin = staticmethod(lambda step: seen.append("begin"))
        start = staticmethod(lambda due: seen.append("start"))
        layer_done = staticmethod(lambda layer: seen.append("layer"))
        end = staticmethod(lambda: seen.append("end"))
        commit = staticmethod(lambda number, invalid: seen.append("commit"))
        take = staticmethod(lambda track, final: iter(()))
        release = staticmethod(lambda track: seen.append("release"))
        why_missing = staticmethod(lambda track, chunk: "because")
        close = staticmethod(lambda: seen.append("close"))

    b.capture.features[:] = [Dummy()]
    b.run(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:8])])
    b.finish(1, 9)
    assert seen == ["begin", "start", "commit", "end", "release"]
    assert b.store.sequences()[0].skipped == {"query": {"because": 1}}
    b.worker.close()
    assert seen[-1] == "close"


def test_only_one_rank_writes_receipts(bench):
    b = bench()
    b.capture._write_receipts = False
    b.run(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:8])])
    b.finish(1, 9)
    assert not b.store.sequences() and len(b.objects(CacheKind.KV)) == 1


def test_a_prefix_hit_is_told_as_such(bench):  # O13: the receipt says why queries are missing
    b = bench()
    b.sim.pages[0].fill_(1.0)
    b.run(request(1, 8, 17, [5, 3, 9, 2, 7], admitted=True), tokens=[(1, 0, IDS[:17])])
    b.finish(1, 18, computed=17)
    receipt = b.store.sequences()[0]
    assert receipt.stored == {"kv": (0, 1), "query": (1,)} and receipt.skipped == {"query": {"prefix-cached": 1}}
    assert b.counters["query.lost.prefix-cached"] == 1


def test_each_loss_is_counted_once(bench):  # O13
    b = bench(on_pressure="skip", ring_blocks=3)
    b.run(request(1, 0, 16, [5, 3, 9, 2]), request(2, 0, 8, [6, 4]), tokens=[(1, 0, IDS[:16]), (2, 0, IDS[20:28])])
    b.finish(1, 17, computed=16)
    b.finish(2, 9)
    assert b.counters["query.skipped.ring-full"] == b.counters["query.lost.ring-full"] == 2
    assert b.counters["query.stored"] == 1 and b.counters["kv.stored"] == 3


def test_the_sdk_never_imports_capture():  # C33
    for file in Path(qcap.sdk.__file__).parent.rglob("*.py"):
        assert not re.search(r"^\s*(from|import) qcap\.(capture|attribution|ring|vllm)", file.read_text(), re.M), file


def test_the_arena_lends_what_it_has_and_no_more():
    arena = HostArena(3 * 4096, pinned=False, waits=False)
    a, b = arena.take((5, 4), torch.float32), arena.take((4096,), torch.uint8)
    pointer = a.data_ptr()
    assert arena.outstanding == 2 and arena.used == arena.high_water == 2 * 4096
    assert arena.take((2 * 4096,), torch.uint8) is None, "two pages are not there"
    arena.give(a)
    assert arena.take((5, 4), torch.int64).data_ptr() == pointer
    last = arena.take((4096,), torch.uint8)
    assert arena.take((1,), torch.uint8) is None
    arena.give(b)
    arena.give(last)
    assert arena.take((2 * 4096,), torch.uint8) is not None, "neighbours join"
    assert arena.over_budget == 0


class Later:
    done = False

    def query(self):
        return self.done


def test_the_arena_lends_nothing_that_a_copy_may_still_write_to():  # D21
    arena = HostArena(4096, pinned=False, waits=False)
    event = Later()
    arena.give(arena.take((10,), torch.uint8), after=event)
    assert arena.take((10,), torch.uint8) is None and arena.outstanding == 1
    event.done = True
    assert arena.outstanding == 0 and arena.take((10,), torch.uint8) is not None


def test_an_arena_that_waits_waits_while_something_comes_back_and_then_goes_beyond():
    arena = HostArena(4096, pinned=False, waits=True)
    piece, busy = arena.take((10,), torch.uint8), [True] * 3
    arena.watch(lambda: bool(busy) and busy.pop())
    own = arena.take((10,), torch.uint8)  # nothing came: beyond the bound, and counted, rather than lost or stuck
    assert not busy and own is not None and arena.over_budget == 10
    arena.give(own)
    threading.Timer(0.1, arena.give, [piece]).start()
    busy += [True] * 10_000
    assert arena.take((10,), torch.uint8).data_ptr() == piece.data_ptr()
    assert arena.over_budget == 10


def test_one_step_larger_than_the_arena_is_taken_when_nothing_else_is_lent():
    arena = HostArena(4096, pinned=False, waits=False)
    large = arena.take((10_000,), torch.uint8)
    assert large is not None and arena.take((10_000,), torch.uint8) is None and arena.over_budget == 10_000


def test_an_arena_without_room_asks_for_some_for_the_next_time():
    arena, asked = HostArena(4096, pinned=False, waits=False), []
    piece = arena.take((10,), torch.uint8)
    arena.watch(lambda: bool(asked.append(1)) or bool(arena.give(piece)))
    assert arena.take((10,), torch.uint8) is None and asked
    assert arena.take((10,), torch.uint8) is not None


def test_cut_off_in_the_middle_of_a_block_only_what_was_computed_is_taken(bench):  # R37: the rest of its last page is another's
    b = bench(speculative=True)
    b.run(request(1, 0, 13, [5, 3, 9, 2]), tokens=[(1, 0, IDS[:40])], speculative=True)
    b.capture.close()
    for kind in CacheKind:
        assert [r.start for r, _ in b.store.published if r.kind is kind] == [0]


def test_a_step_that_never_ended_is_forgotten_with_its_requests(bench):
    b = bench()
    step = b.step(request(1, 0, 8, [5, 3]), tokens=[(1, 0, IDS[:8])])
    b.worker.begin(step)
    b.run(request(2, 0, 8, [6, 4]), tokens=[(2, 0, IDS[10:18])])
    assert b.capture._behind == {1}
    for uid in (1, 2):
        b.finish(uid, 9)
    assert not b.capture._behind and b.free()


def test_a_large_step_that_runs_its_layers_twice_is_dropped(bench):
    b = bench()
    if not b.sim.streaming:
        pytest.skip("a resident ring takes the later rows")
    step = b.step(request(1, 0, 16, [5, 3, 9, 2]), tokens=[(1, 0, IDS[:16])])
    b.worker.begin(step)
    b.forward(step)
    b.forward(step)
    b.worker.end()
    assert b.counters["query.steps_incomplete"] == 1 and not b.objects(CacheKind.QUERY)
    b.finish(1, 17, computed=16)
    assert b.free()


def test_chunks_that_are_found_and_not_asked_for_hold_nothing(bench):
    b = bench()
    if not b.sim.streaming:
        pytest.skip("about held rows")
    step = b.step(request(1, 0, 24, [5, 3, 9, 2, 8, 7]), tokens=[(1, 0, IDS[:24])])
    b.worker.begin(step)
    b.forward(step)
    b.sim.query.commit(step.number, ())
    found = b.sim.query.take(b.capture._tracks[1], 24)
    next(found)
    found.close()
    b.sim.query.end()
    b.sim.query.ledger.release(1)
    b.sim.query.mover.close()
    assert b.sim.arena.outstanding == (b.sim.kv._job is not None)


# ---- a simulated engine -----------------------------------------------------------------------------------------------------------

TIGHT = {"num_blocks": 13, "max_prompt": 24}
MEDIUM = {"num_blocks": 14, "max_prompt": 24}
LOADING = {**MEDIUM, "requests": 14, "families": 1, "salts": ("blue",), "load": "salted"}
SPILLING = {"max_running": 6, "budget": 8, "chunk": 16, "ring_blocks": 9, "max_prompt": 40, "max_outputs": 20}
SCENARIOS = {
    "plain": {},
    "one request at a time": {"max_running": 1, "requests": 14, "max_prompt": 70, "num_blocks": 40},
    "one request at a time, preemption and resets": {**TIGHT, "max_running": 1, "asynchronous": True, "resets": 0.1, "aborts": 0.1},
    "preemption": TIGHT,
    "resumed as new (second runner)": {**TIGHT, "v2": True},
    "worker in another process": {**MEDIUM, "in_process": False, "aborts": 0.2},
    "asynchronous": {**TIGHT, "asynchronous": True},
    "asynchronous, other process": {**TIGHT, "asynchronous": True, "in_process": False},
    "three steps in flight": {"asynchronous": True, "depth": 3, "resets": 0.1, "num_blocks": 16, "aborts": 0.05},
    "three in flight, other process": {"asynchronous": True, "depth": 3, "resets": 0.1, "num_blocks": 16, "in_process": False},
    "save hook after the last step's outputs": {"asynchronous": True, "deferred_end": True, "aborts": 0.1},
    "drafts": {**MEDIUM, "speculative": True},
    "drafts, other process": {**MEDIUM, "speculative": True, "in_process": False, "aborts": 0.1},
    "drafts, lost save hooks": {**MEDIUM, "speculative": True, "lost_ends": 0.1},
    "loads": {**MEDIUM, "requests": 14, "families": 1, "load": "all"},
    "loads without prefix cache": {**LOADING, "prefix_caching": False},
    "loads and drafts": {**LOADING, "speculative": True},
    "failed loads": {**LOADING, "load_failures": 0.4, "requests": 20},
    "failed loads without prefix cache": {**LOADING, "load_failures": 0.4, "prefix_caching": False},
    "failed loads, small budget": {**LOADING, "load_failures": 0.5, "num_blocks": 20, "max_prompt": 40, "budget": 8},
    "layerwise loads": {**MEDIUM, "requests": 14, "families": 1, "load": "all", "layerwise": True},
    "layerwise loads without prefix cache": {**LOADING, "prefix_caching": False, "layerwise": True, "load_bytes": 4096},
    "layerwise loads and drafts": {**LOADING, "speculative": True, "layerwise": True},
    "layerwise loads, asynchronous": {**LOADING, "asynchronous": True, "aborts": 0.05, "in_process": False, "layerwise": True},
    "layerwise loads that fail": {**LOADING, "load_failures": 0.3, "requests": 20, "layerwise": True},
    "layerwise loads that fail, without prefix cache": {**LOADING, "load_failures": 0.3, "prefix_caching": False, "layerwise": True},
    "layerwise loads that fail, small budget": {
        **LOADING, "load_failures": 0.3, "num_blocks": 20, "max_prompt": 40, "budget": 8, "layerwise": True,
    },
    "layerwise loads, lost save hooks": {**LOADING, "load_failures": 0.2, "lost_ends": 0.15, "layerwise": True},
    "layerwise loads, steps run again": {**LOADING, "redone_steps": 0.15, "layerwise": True},
    "lost save hooks": {"lost_ends": 0.15},
    "steps given up and run again": {**MEDIUM, "redone_steps": 0.15},
    "rows that never come": {**MEDIUM, "dropped_rows": 0.2},
    "ring full": {**MEDIUM, "on_pressure": "skip", "ring_blocks": 7},
    "host memory full": {**MEDIUM, "on_pressure": "skip", "arena_bytes": 9000, "requests": 12},
    "store refuses and fails": {"on_pressure": "skip", "refuse": 0.3, "fail": 0.1},
    "room for one chunk": {"room": 600},
    "spilling": {**SPILLING, "requests": 14, "num_blocks": 40},
    "spilling, asynchronous": {**SPILLING, "requests": 10, "num_blocks": 30, "asynchronous": True, "aborts": 0.05},
    "chunk of one block": {**TIGHT, "chunk": 4},
    "chunk of four blocks": {"chunk": 16, "num_blocks": 16, "max_prompt": 40, "max_outputs": 20, "max_running": 6, "budget": 8},
    "requests that may not be stored": {**MEDIUM, "odd": 0.3, "requests": 12, "families": 1},
    "the same, with loads": {**MEDIUM, "odd": 0.2, "load": "all", "requests": 16, "families": 1},
    "request ids used again": {"reuse_ids": True, "aborts": 0.1},
    "no prefix cache": {**TIGHT, "prefix_caching": False},
    "prefix cache not read": {**MEDIUM, "skip_reading": 0.4},
    "outside inference mode": {**MEDIUM, "inference": False},
    "hooks silent between steps": {**MEDIUM, "always_launch": False},
    "the real store, one chunk of room": {**MEDIUM, "real_store": True, "host_bytes": 1024},
    "the real store, skipping": {**MEDIUM, "real_store": True, "host_bytes": 1024, "on_pressure": "skip"},
}  # fmt: skip
SEEDS = 6
MUST_HAPPEN = {  # that a scenario really meets what it is about
    "preemption": ["preempted", "resumed", "not_admitted", "prefix_hits"],
    "loads without prefix cache": ["loads"],
    "failed loads without prefix cache": ["failed_loads", "kv:load-failed"],
    "layerwise loads": ["loads_layerwise"],
    "layerwise loads without prefix cache": ["loads_layerwise", "loads_whole"],
    "layerwise loads that fail": ["loads_layerwise", "loads_that_die", "failed_loads"],
    "layerwise loads that fail, without prefix cache": ["loads_that_die", "failed_loads", "kv:load-failed"],
    "drafts": ["rejected"],
    "rows that never come": ["query:rows-missing"],
    "ring full": ["query:ring-full"],
    "store refuses and fails": ["kv:store-busy", "query:store-failed"],
    "steps given up and run again": ["redone"],
    "lost save hooks": ["query:not-captured"],
    "spilling": ["spilled"],
    "three steps in flight": ["resets", "aborted"],
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("form", ["streaming", "resident"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_simulated_engine(name, form):  # R37 A5 A8 A26 A27 A29 A30 C28 C31 C35 W1-W5 W12: values, receipts, nothing held
    if form == "streaming" and "ring_blocks" in SCENARIOS[name]:
        pytest.skip("about the size of a resident ring")
    streaming = form == "streaming"
    events = sum((simulate(Options(seed=s, streaming=streaming, **SCENARIOS[name])).events for s in range(SEEDS)), start=Sim.no_events())
    assert events["objects"] > 0
    for event in MUST_HAPPEN.get(name, ()):
        assert events[event] > 0, f"{event} never happened: {dict(events)}"


def test_a_request_finished_while_preempted_tells_what_it_computed():
    events = sum((simulate(Options(seed=seed, asynchronous=True, **TIGHT)).events for seed in range(12)), start=Sim.no_events())
    assert events["ended_preempted"] > 0


def test_the_simulator_itself_finds_wrong_rows():  # seen red: a ring row changed behind capture's back
    sim = Sim(Options(seed=3))
    real = sim.query._stage

    def corrupt(chunk):
        staged = real(chunk)
        staged.host[0, 1, 3] += 1
        return staged

    sim.query._stage = corrupt
    try:
        sim.run()
        with pytest.raises(AssertionError, match="wrong rows"):
            sim.check()
    finally:
        sim.close()


def test_the_simulator_itself_finds_leaks():
    sim = Sim(Options(seed=3))
    sim.query.ledger.release = lambda uid: None
    try:
        sim.run()
        with pytest.raises(AssertionError, match="leaked"):
            sim.check()
    finally:
        sim.close()
