"""The worker's half with ``qcap.layerwise``, driven by hand as vLLM drives it: order, memory, failures, ends."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine_sim import NAMES, POISON, H, L, N
from layerwise_kit import SimStreams
from test_capture import CH, IDS, Bench, request, slots_from_the_caller  # noqa: F401 (a fixture for all)

from qcap.attribution import LoadRequest
from qcap.config import CaptureConfig
from qcap.kinds import CacheKind
from qcap.tokens import ChunkedTokenDatabase, behind_rows, chunk_key
from qcap.vllm import worker as worker_module
from qcap.vllm.hooks import why_layers_pass_unseen
from qcap.vllm.loading import LayerLoads, pool_bytes

MORE = tuple(range(200, 260))


class Reads:
    """Watches a store: every header and every layer that is read; layers of some chunks can be made to fail, or held back."""

    def __init__(self, bench):
        self.seen: list[tuple[str, int]] = []
        self.opened: Counter[str] = Counter()
        self.fails: dict[str, int] = {}  # digest -> first layer that fails
        self.hold = threading.Event()
        self.hold.set()
        inner = bench.store.open_layers

        def open_layers(key):
            self.opened[key.digest] += 1
            found = inner(key)
            return (
                None
                if found is None
                else SimpleNamespace(record=found.record, rest=found.rest, read=lambda layer, out: self._read(key, found, layer, out))
            )

        bench.store.open_layers = open_layers

    def _read(self, key, found, layer, out):
        self.seen.append((key.digest, layer))
        assert self.hold.wait(20)
        if layer >= self.fails.get(key.digest, L):
            raise OSError("the store has gone away")
        return found.read(layer, out)

    def layers(self, digest):
        return sorted(layer for d, layer in self.seen if d == digest)


class LayerBench(Bench):
    """Requests 1 and 2 have stored two chunks each, ``IDS[:16]`` and ``MORE[:16]``."""

    def __init__(self, **options):
        super().__init__(layerwise=True, **{"load_bytes": 1 << 16, **options})
        self.loads = self.worker._layer_loads
        self.run(
            request(1, 0, 16, [1, 2, 3, 4]), request(2, 0, 16, [5, 6, 7, 8]), tokens=[(1, 0, IDS[:17]), (2, 0, MORE[:17])],
        )  # fmt: skip
        for uid in (1, 2):
            self.finish(uid, 17)
        self.stored = len(self.store.published)
        for page in self.sim.pages:
            page[9:] = POISON
        self.reads = Reads(self)

    def load(self, uid, ids, blocks, start=0, end=16, salt=""):
        chunks = ChunkedTokenDatabase(CH).chunks(ids[: -(-end // CH) * CH])
        return LoadRequest(
            uid, f"r{uid}", salt, start, end, tuple(blocks[: end // N]), tuple(c.digest for c in chunks), tuple(ids[: chunks[-1].end])
        )

    def two(self, *, end=18, salt=""):
        """A step in which 3 and 4 load what 1 and 2 stored and compute two tokens more."""
        a, b = [9, 10, 11, 12, 13, 19], [14, 15, 16, 17, 18, 20]
        count = -(-end // N)
        return self.step(
            request(3, 16, end, a[:count], admitted=True, salt=salt),
            request(4, 16, end, b[:count], admitted=True, salt=salt),
            tokens=[(3, 0, IDS[: end + 1]), (4, 0, MORE[: end + 1])],
            loads=[self.load(3, IDS, a, salt=salt), self.load(4, MORE, b, salt=salt)],
        )

    def forward(self, step, layers=range(L), mapping=True):
        for layer in layers:
            self.worker.layer_needed(NAMES[layer])
            super().forward(step, [layer], mapping)
            self.worker.layer_done(NAMES[layer])

    def rows_in(self, layer, blocks):
        return torch.stack([self.sim.pages[layer][list(blocks), plane].reshape(-1, H) for plane in range(2)])

    def is_loaded(self, layer, blocks, of, first=0):
        source = [1, 2, 3, 4] if of == 1 else [5, 6, 7, 8]
        return torch.equal(self.rows_in(layer, blocks), self.rows_in(layer, source)[:, first : first + len(blocks) * N])

    def untouched(self, layer, blocks):
        return bool((self.rows_in(layer, blocks) == POISON).all())

    def pool_is_back(self):
        for _ in range(200):
            if not self.loads.arena.outstanding:
                return True
            time.sleep(0.01)
        return False

    def settle_reads(self):
        for _ in range(200):
            if all(fetch[1].done() for entry in self.loads._entries for fetch in entry.job._flight.fetches.values()):
                return
            time.sleep(0.01)


@pytest.fixture
def bench():
    made = []

    def make(**options):
        made.append(LayerBench(**options))
        return made[-1]

    yield make
    for b in made:
        b.reads.hold.set()
        b.close()


def digests(ids):
    return [c.digest for c in ChunkedTokenDatabase(CH).chunks(ids[:16])]


A, B = [9, 10, 11, 12], [14, 15, 16, 17]


# ---- order --------------------------------------------------------------------------------------------------------------------------


def test_start_reads_headers_and_layer_0_of_every_load(bench):  # L8
    b = bench()
    b.worker.begin(b.two())
    assert not b.loads.active
    b.worker.load()
    assert [entry.load.request_id for entry in b.loads._entries] == ["r3", "r4"]
    b.settle_reads()
    for digest in digests(IDS) + digests(MORE):
        assert b.reads.opened[digest] == 1 and b.reads.layers(digest) == [0]
    assert all(b.untouched(layer, A + B) for layer in range(L)), "no page is written before its layer's turn"


def test_each_layer_is_moved_once_when_it_is_needed(bench):  # L9
    b = bench()
    step = b.two()
    b.worker.begin(step)
    b.worker.load()
    b.worker.layer_needed("a layer of a draft model")
    assert b.untouched(0, A + B)
    for layer in range(L):
        assert b.untouched(layer, A + B)
        for _ in range(3):  # a layer asked for again is there
            b.worker.layer_needed(NAMES[layer])
        assert b.is_loaded(layer, A, 1) and b.is_loaded(layer, B, 2)
    b.worker.layer_needed(NAMES[0])
    assert all(b.reads.layers(digest) == list(range(L)) for digest in digests(IDS) + digests(MORE))
    b.worker.end()
    assert b.counters["load.layerwise"] == 2 and b.counters["load.tokens"] == 32 and not b.worker.take_failed_blocks()
    assert b.pool_is_back()


def test_a_layer_left_out_is_caught_up_with(bench):  # L9
    b = bench()
    b.worker.begin(b.two())
    b.worker.load()
    b.worker.layer_needed(NAMES[L - 1])
    assert all(b.is_loaded(layer, A, 1) for layer in range(L))
    b.worker.end()
    assert b.counters["load.layerwise"] == 2


def test_compute_waits_once_a_layer_for_the_last_load(bench):  # L15
    b = bench()
    b.loads._gear = replace(b.loads._gear, streams=SimStreams())
    trace = b.loads._gear.streams.trace
    step = b.two()
    b.worker.begin(step)
    b.worker.load()
    assert trace.count(("wait", "load", "compute")) == 2, "each load waits for the steps before it"
    for layer in range(L):
        b.worker.layer_needed(NAMES[layer])
        b.worker.layer_needed(NAMES[layer])
        assert trace.count(("wait", "compute", "load")) == layer + 1
    b.worker.end()
    assert trace.count(("wait", "compute", "load")) == L
    assert b.pool_is_back()


def test_saving_goes_a_layer_at_a_time_and_ends_once(bench, monkeypatch):  # L10 L11
    b = bench()
    started, moved = [], []
    stager = b.sim.kv._stager
    start, pack = stager.start, stager.pack
    monkeypatch.setattr(stager, "layers_at_once", lambda host: 1)  # as for a large step on a GPU
    monkeypatch.setattr(stager, "start", lambda *a, **k: (started.append(a), start(*a, **k))[1])
    monkeypatch.setattr(
        stager, "pack", lambda table, ids, host, first, last: (moved.append((first, last)), pack(table, ids, host, first, last))[1]
    )
    step = b.step(request(5, 0, 8, [9, 10]), tokens=[(5, 0, IDS[30:38])])
    b.worker.begin(step)
    b.worker.load()
    b.forward(step)
    kv_jobs = [a for a in started if a[0] is b.sim.kv.table]
    assert len(kv_jobs) == 1, "made once for the step, when it begins"
    assert [m for m in moved if m != (0, L)] == [(layer, layer + 1) for layer in range(L)]
    b.worker.end()
    count, steps = len(moved), b.counters["steps"]
    b.worker.end()
    b.worker.layer_done(NAMES[0])
    assert len(moved) == count and b.counters["steps"] == steps, "a second call does nothing"
    assert len(b.objects(CacheKind.KV)) == b.stored // 2 + 1


def test_tokens_that_the_engine_has_are_left_alone(bench):  # L50: cached 4 with chunks of 8: the first block is the engine's
    b = bench()
    step = b.step(request(3, 16, 17, [*A, 13], admitted=True), tokens=[(3, 0, IDS[:18])], loads=[b.load(3, IDS, A, start=N)])
    b.worker.begin(step)
    b.worker.load()
    b.forward(step)
    b.worker.end()
    for layer in range(L):
        assert b.untouched(layer, A[:1]) and b.is_loaded(layer, A[1:], 1, first=N)
    assert b.counters["load.tokens"] == 12


def test_a_last_chunk_is_loaded_up_to_where_the_engine_goes_on(bench):  # L50: at least one token is computed
    b = bench()
    step = b.step(request(3, 12, 16, A, admitted=True), tokens=[(3, 0, IDS[:16])], loads=[b.load(3, IDS, A, end=12)])
    b.worker.begin(step)
    b.worker.load()
    for layer in range(L):
        b.worker.layer_needed(NAMES[layer])
        assert b.is_loaded(layer, A[:3], 1) and b.untouched(layer, A[3:])
    b.worker.end()


def test_what_was_loaded_is_not_stored_again(bench):  # L51: 16 of 24 tokens are there: the first stored token is 16
    b = bench()
    stores = []
    real = b.store.store
    b.store.store = lambda record, *a, **k: (stores.append((record.kind, record.start)), real(record, *a, **k))[1]
    step = b.two(end=24)
    b.worker.begin(step)
    b.worker.load()
    b.forward(step)
    b.worker.end()
    b.capture.flush()
    assert sorted({start for _, start in stores}) == [16] and len(stores) == 4
    for uid in (3, 4):
        b.finish(uid, 25)
    stores.clear()
    b.run(request(5, 16, 17, [*A, 13], admitted=True), tokens=[(5, 0, IDS[:17])], loads=[b.load(5, IDS, A)])
    b.finish(5, 18)
    assert not stores, "nothing is left: nothing is made"


def test_a_chunk_that_is_loaded_and_completed_in_one_step_leaves_whole(bench):
    """Its first block is loaded, its last computed; its pages leave layer by layer, each after that layer was loaded."""
    b = bench()
    ids = (*IDS[:12], *MORE[40:50])
    chunks = ChunkedTokenDatabase(CH).chunks(ids[:16])
    salted = b.sim.geometry
    b.run(request(5, 0, 16, [1, 2, 3, 4], salt="s"), tokens=[(5, 0, ids[:17])])
    b.finish(5, 17)
    wanted = {r.start: t for r, t in b.objects(CacheKind.KV) if r.salt == "s"}[8]
    del b.store.objects[chunk_key(CacheKind.KV, salted, chunks[1].digest, "s")]
    b.store.published.clear()
    for page in b.sim.pages:
        page[9:] = POISON
    blocks = [9, 10, 11, 12]
    step = b.step(
        request(5, 8, 16, blocks, admitted=True, salt="s"), tokens=[(5, 0, ids[:17])], loads=[b.load(5, ids, blocks, end=8, salt="s")]
    )
    b.worker.begin(step)
    b.worker.load()
    b.forward(step, [0])
    assert b.sim.kv._early, "this chunk is due in this step"
    b.forward(step, range(1, L))
    b.worker.end()
    ((_, got),) = [(r, t) for r, t in b.objects(CacheKind.KV) if r.start == 8]
    assert torch.equal(got, wanted)


# ---- failures -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", range(L))
@pytest.mark.parametrize("chunk", [0, 1])
def test_one_of_two_loads_fails_at_a_layer(bench, layer, chunk):
    b = bench()
    b.reads.fails[digests(MORE)[chunk]] = layer
    step = b.two(end=24)
    b.worker.begin(step)
    b.worker.load()
    b.forward(step, [0])
    assert b.sim.kv._early, "chunks 2 of both are due, and leave early"
    b.forward(step, range(1, L))
    assert all(b.is_loaded(i, A, 1) for i in range(L)), "the other load is not affected"
    b.worker.end()
    assert b.worker.take_failed_blocks() == set(B) and b.worker.take_failed_blocks() == set()
    assert (b.counters["load.failed"], b.counters["load.layerwise"], b.counters["load.tokens"]) == (1, 1, 16)
    new = {(r.kind, r.token_ids) for r, _ in (*b.objects(CacheKind.KV), *b.objects(CacheKind.QUERY)) if r.start == 16}
    assert new == {(kind, IDS[16:24]) for kind in CacheKind}, "nothing computed on garbage is stored"
    for uid in (3, 4):
        b.finish(uid, 25)
    told = {r.request_id: r.skipped for r in b.store.sequences()}
    assert told["r3"] == {} and set(told["r4"]["kv"]) == {"load-failed"}
    assert b.counters["errors"] == 0 and b.pool_is_back() and b.free()


def test_failed_blocks_are_told_before_the_save_hook(bench):
    """With drafts, vLLM asks for failed blocks before it says that the forward pass is over."""
    b = bench()
    b.reads.fails[digests(IDS)[1]] = 1
    step = b.two(end=24)
    b.worker.begin(step)
    b.worker.load()
    b.forward(step)
    assert b.worker.take_failed_blocks() == set(A)
    b.worker.end()
    assert {r.token_ids for r, _ in b.objects(CacheKind.KV) if r.start == 16} == {MORE[16:24]}


def test_a_chunk_that_is_not_there_or_is_another_is_seen_before_a_page_is_written(bench):
    b = bench()
    (_, second), g = digests(IDS), b.sim.geometry
    del b.store.objects[chunk_key(CacheKind.KV, g, second)]
    wrong, tensor = b.store.objects[chunk_key(CacheKind.KV, g, digests(MORE)[0])]
    b.store.objects[wrong.key] = (replace(wrong, token_ids=IDS[:8], start=0), tensor)
    step = b.two()
    b.worker.begin(step)
    b.worker.load()
    b.forward(step)
    assert all(b.untouched(layer, A + B) for layer in range(L)) and not b.reads.seen
    b.worker.end()
    assert b.worker.take_failed_blocks() == {*A, *B} and b.counters["load.failed"] == 2


@pytest.mark.parametrize(("edits", "fails"), [(("e", "e"), False), (("e", ""), False), (("", "e"), True), (("e", "f"), True)])
@pytest.mark.parametrize("start", [0, 8])
def test_edits_are_not_mixed(bench, edits, fails, start):
    """The chunk before the first that is loaded counts too, if it is there."""
    b = bench()
    for digest, edit in zip(digests(IDS), edits, strict=True):
        record, tensor = b.store.objects[chunk_key(CacheKind.KV, b.sim.geometry, digest)]
        edited = replace(record, salt="s", edit=edit)
        b.store.objects[edited.key] = (edited, tensor)
    step = b.step(
        request(3, 16, 17, [*A, 13], admitted=True, salt="s"), tokens=[(3, 0, IDS[:18])], loads=[b.load(3, IDS, A, start=start, salt="s")]
    )
    b.worker.begin(step)
    b.worker.load()
    b.forward(step)
    b.worker.end()
    assert b.worker.take_failed_blocks() == (set(A[start // N :]) if fails else set())
    assert all(b.untouched(layer, A) == fails for layer in range(L))


@pytest.mark.parametrize("layered", [True, False])
@pytest.mark.parametrize("replaced", [False, True])
def test_an_edit_that_was_replaced_since_it_was_matched_is_not_gone_on_from(bench, layered, replaced):
    """What is computed next would be stored as of the rows that were there then."""
    b = bench()
    for digest in digests(IDS):
        record, tensor = b.store.objects[chunk_key(CacheKind.KV, b.sim.geometry, digest)]
        edited = replace(record, salt="s", edit="e", rows="two" if replaced else "one")
        b.store.objects[edited.key] = (edited, tensor)
    load = replace(b.load(3, IDS, A, salt="s"), behind=behind_rows(digests(IDS)[1], "one"))
    step = b.step(request(3, 16, 17, [*A, 13], admitted=True, salt="s"), tokens=[(3, 0, IDS[:18])], loads=[load])
    loads = b.worker._layer_loads
    b.worker._layer_loads = loads if layered else None
    b.worker.begin(step)
    b.worker.load()
    b.forward(step)
    b.worker.end()
    assert b.worker.take_failed_blocks() == (set(A) if replaced else set())
    assert all(b.untouched(layer, A) == replaced for layer in range(L))
    b.worker._layer_loads = loads


@pytest.mark.parametrize("when", ["headers", "edits", "layers"])
def test_ranks_agree(bench, when):
    """Another rank that cannot load makes this one give up the same load, and store nothing that was computed on it."""
    b = bench()
    calls = []

    def lowest(values):
        calls.append(list(values))
        values = list(values)
        if when == "headers" and len(calls) == 1:
            values[3] = 0
        elif when == "edits" and len(calls) == 1:
            values[4] -= 1
        elif when == "layers" and len(calls) == 2:
            values[1] = 0
        return values

    b.loads._lowest = lowest
    step = b.two(end=24)
    b.worker.begin(step)
    b.worker.load()
    b.forward(step)
    b.worker.end()
    assert [len(call) for call in calls] == [6, 2], "each rank asks as often, whatever happens on it"
    assert b.worker.take_failed_blocks() == set(B) and b.is_loaded(L - 1, A, 1)
    assert {r.token_ids for r, _ in b.objects(CacheKind.KV) if r.start == 16} == {IDS[16:24]}


def test_a_rank_that_fails_asks_the_others_as_often(bench):
    b = bench()
    calls = []
    b.loads._lowest = lambda values: (calls.append(len(values)), values)[1]
    b.reads.fails[digests(IDS)[0]] = 0
    b.store.objects.pop(chunk_key(CacheKind.KV, b.sim.geometry, digests(MORE)[0]))
    step = b.two()
    b.worker.begin(step)
    b.worker.load()
    b.forward(step)
    b.worker.end()
    assert calls == [6, 2] and b.counters["load.failed"] == 2


def test_an_engine_that_does_not_ask_is_loaded_whole_from_then_on(bench, caplog):
    """A replayed graph runs no Python between layers: such a step is told as failed, and the next one is loaded before it."""
    b = bench()
    step = b.two()
    b.worker.begin(step)
    b.worker.load()
    b.worker.end()
    assert b.worker.take_failed_blocks() == {*A, *B} and b.counters["load.failed"] == 2
    assert len([r for r in caplog.records if "without asking for its layers" in r.message]) == 1
    step = b.step(request(3, 16, 17, [*A, 13], admitted=False), loads=[b.load(3, IDS, A)])
    b.worker.begin(step)
    b.worker.load()
    assert all(b.is_loaded(layer, A, 1) for layer in range(L)), "whole, before the forward pass"
    b.worker.end()
    assert not b.worker.take_failed_blocks() and b.counters["load.layerwise"] == 0


# ---- memory and ends ----------------------------------------------------------------------------------------------------------------


def test_a_pool_with_no_room_loads_whole(bench):
    b = bench(load_bytes=4096)  # one piece
    step = b.two()
    b.worker.begin(step)
    b.worker.load()
    assert [entry.job is not None for entry in b.loads._entries] == [True, False]
    assert all(b.is_loaded(layer, B, 2) for layer in range(L))
    b.forward(step)
    b.worker.end()
    assert all(b.is_loaded(layer, A, 1) for layer in range(L))
    assert (b.counters["load.layerwise"], b.counters["load.tokens"], b.counters["load.failed"]) == (1, 32, 0)
    assert b.loads.arena.over_budget == 0 and b.pool_is_back()


def test_loads_never_wait_for_what_is_being_captured(bench):
    b = bench(arena_bytes=1 << 14)
    kept = []
    while b.sim.arena.used < b.sim.arena.nbytes:
        kept.append(b.sim.arena.take((4096,), torch.uint8))
    step = b.two()
    b.worker.begin(step)
    b.worker.load()
    b.forward(step)
    b.worker._end_loads()
    assert b.counters["load.layerwise"] == 2
    for piece in kept:
        b.sim.arena.give(piece)


def test_how_much_host_memory(bench):
    g = bench().sim.geometry
    row = 2 * H * 4
    assert pool_bytes(g, cache_tokens=100, max_seqs=2, max_len=1000, available=1 << 40) == 2 * (100 + 2 * CH * 2) * row
    assert pool_bytes(g, cache_tokens=1 << 40, max_seqs=2, max_len=1000, available=1 << 40) == 2 * (2000 + 2 * CH * 2) * row
    assert pool_bytes(g, cache_tokens=1 << 40, max_seqs=256, max_len=1 << 20, available=1 << 40) == 1 << 30
    assert pool_bytes(g, cache_tokens=1 << 40, max_seqs=256, max_len=1 << 20, available=8) == CH * row


@pytest.mark.parametrize("layers", range(L + 1))
def test_closed_in_the_middle(bench, layers):
    b = bench()
    step = b.two()
    b.worker.begin(step)
    b.worker.load()
    for layer in range(layers):
        b.worker.layer_needed(NAMES[layer])
    b.worker.close()
    assert b.pool_is_back() and not b.loads.active
    b.worker.layer_needed(NAMES[0])
    b.worker.end()
    b.worker.close()
    b.loads.close()


def test_closed_while_the_store_is_slow(bench):
    b = bench()
    b.reads.hold.clear()
    b.worker.begin(b.two())
    b.worker.load()
    threading.Timer(0.1, b.reads.hold.set).start()
    b.worker.close()
    assert b.pool_is_back()


def test_a_request_that_is_aborted_while_it_loads(bench):
    b = bench()
    step = b.two(end=24)
    b.worker.begin(step)
    b.worker.load()
    b.worker.layer_needed(NAMES[0])
    b.finish(4, 17, computed=0)
    b.forward(step)
    b.worker.end()
    assert all(b.is_loaded(layer, A, 1) for layer in range(L)) and not b.worker.take_failed_blocks()
    assert {r.token_ids for r, _ in b.objects(CacheKind.KV) if r.start == 16} == {IDS[16:24]}
    assert b.pool_is_back() and b.counters["errors"] == 0


def test_a_step_whose_end_never_came(bench):
    """The next step's begin ends its loads: whole ones count, half ones are told as failed; the pipeline goes on."""
    b = bench()
    step = b.two()
    b.worker.begin(step)
    b.worker.load()
    b.forward(step)
    b.worker.begin(b.step())
    assert b.counters["load.layerwise"] == 2 and not b.worker.take_failed_blocks() and b.pool_is_back()
    b.worker.begin(b.two())
    b.worker.load()
    b.worker.layer_needed(NAMES[0])
    b.worker.begin(b.step())
    assert b.worker.take_failed_blocks() == {*A, *B} and b.pool_is_back()
    assert b.worker._layer_loads is b.loads and not b.loads.unseen
    step = b.two()
    b.worker.begin(step)
    b.worker.load()
    b.forward(step)
    b.worker.end()
    assert b.counters["load.layerwise"] == 4


def test_a_mistake_of_ours_fails_loads_and_nothing_else(bench, monkeypatch):
    b = bench()
    step = b.two()
    b.worker.begin(step)
    b.worker.load()
    monkeypatch.setattr(b.loads._entries[0].job, "layer", lambda index: 1 / 0)
    b.forward(step)
    b.worker.end()
    assert b.worker.take_failed_blocks() == {*A, *B} and b.counters["errors"] == 0 and b.pool_is_back()


# ---- start --------------------------------------------------------------------------------------------------------------------------


class Mode:
    name = "FULL_AND_PIECEWISE"

    def __init__(self, full):
        self.has_full_cudagraphs = lambda: full


@pytest.mark.parametrize(("mode", "parallel", "reason"), [
    (None, {}, ""), (Mode(False), {}, ""), (Mode(True), {}, "FULL_AND_PIECEWISE"), (None, {"enable_dbo": True}, "micro-batches"),
    (None, {"enable_dbo": False, "ubatch_size": 2}, "micro-batches"),
])  # fmt: skip
def test_engines_that_do_not_run_python_between_layers(mode, parallel, reason):
    config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode), parallel_config=SimpleNamespace(**parallel))
    why = why_layers_pass_unseen(config)
    assert reason in why and bool(why) == bool(reason)


@pytest.mark.parametrize(("full", "load", "made"), [(False, "all", True), (True, "all", False), (False, "off", False)])
def test_what_the_worker_makes(bench, caplog, full, load, made):
    b = bench()
    worker, device = b.worker, torch.device("cpu")
    worker._config = replace(worker._config, layerwise=True, load=load)
    worker._vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=Mode(full)), parallel_config=SimpleNamespace(),
        scheduler_config=SimpleNamespace(max_num_seqs=4), model_config=SimpleNamespace(max_model_len=64),
    )  # fmt: skip
    loads = worker._make_layer_loads(b.sim.geometry, b.store, device, b.sim.arena)
    assert (loads is not None) == made
    assert len([r for r in caplog.records if "loaded whole" in r.message]) == full
    if loads is not None:
        assert isinstance(loads, LayerLoads)
        loads.close()
    worker._config = replace(worker._config, layerwise=False)
    assert worker._make_layer_loads(b.sim.geometry, b.store, device, b.sim.arena) is None, "without the setting nothing changes"


# ---- all layers at once --------------------------------------------------------------------------------------------------------------


def at_once(b):
    """An engine that asks for no layers, with a store whose chunks could rest in memory; here they do not."""
    b.loads.close()
    b.loads = b.worker._layer_loads = LayerLoads(
        b.sim.geometry,
        b.store,
        b.sim.kv.table,
        device=torch.device("cpu"),
        host_bytes=1,
        lowest=list,
        whole=b.worker._load_whole,
        layered=False,
    )
    return b


def test_a_worker_without_layers_loads_at_once(bench):
    b = at_once(bench())
    step = b.two()
    b.worker.begin(step)
    b.worker.load()
    assert all(b.is_loaded(layer, A, 1) and b.is_loaded(layer, B, 2) for layer in range(L)), "before the forward pass"
    b.forward(step)
    b.worker.end()
    assert b.worker.take_failed_blocks() == set() and b.worker._layer_loads is b.loads and not b.loads.unseen
    assert (b.counters["load.tokens"], b.counters["load.layerwise"], b.counters["load.failed"], b.counters["errors"]) == (32, 0, 0, 0)


def test_a_chunk_that_is_gone_fails_its_load_alone(bench):
    b = at_once(bench())
    step = b.two()
    gone = next(key for key, (record, _) in b.store.objects.items() if record.kind is CacheKind.KV and record.token_ids == tuple(IDS[8:16]))
    del b.store.objects[gone]
    b.worker.begin(step)
    b.worker.load()
    assert b.worker.take_failed_blocks() == set(A) and all(b.is_loaded(layer, B, 2) for layer in range(L))
    b.forward(step)
    b.worker.end()
    assert (b.counters["load.tokens"], b.counters["load.failed"], b.counters["errors"]) == (16, 1, 0)


# ---- loads that are told of before ---------------------------------------------------------------------------------------------------


class Told:
    """In place of a worker's loads."""

    layered, active, unseen = True, False, False

    def __init__(self):
        self.calls = []

    def early(self, *args):
        self.calls.append(("early", *args[:4]))
        return True

    def early_told(self, uid):
        self.calls.append(("told", uid))

    def forget_early(self):
        self.calls.append(("forgotten",))

    def begin(self, loads):
        self.calls.append(("begun", len(loads)))

    def poll(self):
        return False

    def close(self):
        pass


def test_the_scheduler_tells_the_worker_of_its_process(bench, monkeypatch):
    b, told = bench(), Told()
    b.loads.close()
    b.loads = b.worker._layer_loads = told
    monkeypatch.setitem(worker_module._local, "engine-x", b.worker)
    early, nobody = worker_module.EarlyInProcess("engine-x"), worker_module.EarlyInProcess("engine-y")
    b.run(request(9, 0, 4, [23]), tokens=[(9, 0, IDS[:5])])
    assert told.calls == [("forgotten",)], "a step without loads"
    assert early.more(3, "s", 0, 16, [], []) and not nobody.more(3, "s", 0, 16, [], [])
    early.told(3)
    nobody.told(3)
    step = b.two()
    b.worker.begin(step)
    b.worker.load()
    assert told.calls[1:] == [("early", 3, "s", 0, 16), ("told", 3), ("begun", 2)]
    with ThreadPoolExecutor(1) as other:  # its loads are for the thread that runs its steps alone
        assert other.submit(early.more, 3, "s", 0, 16, [], []).result() is False
        other.submit(early.told, 3).result()
    assert len(told.calls) == 4
    b.worker._layer_loads = None
    assert not early.more(3, "s", 0, 16, [], [])


def test_how_much_device_memory_loads_may_have_early(monkeypatch):
    config = CaptureConfig(store="memory://x")
    cuda, here, elsewhere = torch.device("cuda"), SimpleNamespace(keeps_leases=True), SimpleNamespace(keeps_leases=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))
    assert worker_module._ahead_bytes(config, cuda, here) == 128 << 20, "an eighth of what is left"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (17 << 30, 80 << 30))
    assert worker_module._ahead_bytes(config, cuda, here) == 256 << 20, "edits come one at a time"
    assert worker_module._ahead_bytes(replace(config, load="all"), cuda, here) == 2 << 30
    assert worker_module._ahead_bytes(replace(config, load_ahead_bytes=0), cuda, here) == 0
    assert worker_module._ahead_bytes(replace(config, load_ahead_bytes=5), cuda, here) == 5
    assert worker_module._ahead_bytes(config, cuda, elsewhere) == worker_module._ahead_bytes(config, torch.device("cpu"), here) == 0
