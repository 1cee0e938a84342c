"""Which row belongs to which token, and which chunks are whole: the row ledger, and the query feature on top of it."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from engine_sim import PoisonedArena

from qcap.attribution import LoadRequest, RequestStep, RowLedger, Step, ring_blocks_for, step_block_limit
from qcap.capture import PageStager, QueryFeature, RequestTrack, RowsMissing
from qcap.errors import ConfigError, Unsupported
from qcap.geometry import Geometry, Rope
from qcap.ring import QRingBuffer

L, HEADS, D = 2, 2, 4
H = HEADS * D
POISON = -7.0


def value(uid: int, position: int, layer: int, version: int = 0) -> torch.Tensor:
    return torch.arange(H).float() + 10 * position + 10_000 * uid + 0.25 * layer + 0.5 * version


class Rig:
    """A query feature with a device made of a dict: runs steps row by row, and takes what is whole."""

    def __init__(self, ring_blocks=16, *, n=4, chunk=8, never_lose=False, max_rows=1000, plan_blocks=64):
        self.n, self.chunk = n, chunk
        geometry = Geometry(
            model="m", layer_names=("l0", "l1"), num_q_heads=HEADS, num_kv_heads=HEADS, head_size=D, dtype="float32", block_size=n,
            chunk_size=chunk, rope=Rope(rotary_dim=D),
        )  # fmt: skip
        self.arena = PoisonedArena(1 << 20, pinned=False, waits=never_lose)
        self.counters: Counter[str] = Counter()
        self.feature = QueryFeature(
            geometry, device=torch.device("cpu"), dtype=torch.float32, ring_blocks=ring_blocks, max_rows=max_rows, plan_blocks=plan_blocks,
            never_lose=never_lose, stager=PageStager(torch.device("cpu"), self.arena), counters=self.counters,
        )  # fmt: skip
        self.ring, self.ledger = self.feature.ring, self.feature.ledger
        for layer in self.ring.layers:
            layer.fill_(POISON)
        self.number = 0

    def rows(self, requests, version=0):
        out = []
        for r in requests:
            for p in range(r.start, r.end):
                index = p // self.n - r.first_block
                if index < len(r.block_ids):
                    out.append((r.block_ids[index] * self.n + p % self.n, r.uid, p, version))
        return out

    def step(self, *requests, preempted=(), loads=(), number=None):
        self.number = number or self.number + 1
        return Step(self.number, tuple(requests), preempted=tuple(preempted), loads=tuple(loads))

    def launch(self, rows, *, mapping=None, layers=range(L)):
        slots = torch.tensor([r[0] for r in rows], dtype=torch.int64) if mapping is None else mapping
        for layer in layers:
            query = torch.stack([value(u, p, layer, v) for _, u, p, v in rows]) if rows else torch.empty(0, H)
            self.feature.on_layer(layer, query.view(-1, HEADS, D), slots)

    def run(self, *requests, rows=None, order=None, mapping=None, version=0, end=True, **kw):
        step = self.step(*requests, **kw)
        self.feature.begin(step)
        rows = self.rows(requests, version) if rows is None else rows
        if order is not None:
            rows = [rows[i] for i in order]
        self.launch(rows, mapping=mapping)
        if end:
            self.feature.commit(step.number, ())
        return step

    def take(self, uid, final):
        """Chunk index -> tensor ``[L, CH, H]``, or "rows-missing"."""
        found = {}
        for index, stage in self.feature.take(RequestTrack(uid, str(uid), ""), final):
            staged = stage()
            try:
                staged.ready.synchronize()
                found[index] = staged.host[0].clone()
            except RowsMissing:
                found[index] = "rows-missing"
            staged.release()
        return found

    def wanted(self, uid, chunk, version=0):
        span = range(chunk * self.chunk, (chunk + 1) * self.chunk)
        return torch.stack([torch.stack([value(uid, p, layer, version) for p in span]) for layer in range(L)])

    def exact(self, uid, final, chunks, version=0):
        found = self.take(uid, final)
        assert sorted(found) == sorted(chunks)
        for index in chunks:
            assert isinstance(found[index], torch.Tensor), f"chunk {index}: {found[index]}"
            assert torch.equal(found[index], self.wanted(uid, index, version)), f"chunk {index} of {uid}"


def request(uid, start, end, blocks, *, first=0, admitted=None, skip=""):
    return RequestStep(uid, f"r{uid}", "", start, end, first, tuple(blocks), start == 0 if admitted is None else admitted, skip)


# ---- rows to tokens ---------------------------------------------------------------------------------------------------------------


def test_rows_go_by_the_slot_they_write():  # A1 A2 A4 A21: blocks [7, 2], token 5 -> slot 2*4+1; rows in any order
    rig = Rig()
    r = request(1, 0, 8, [7, 2])
    assert rig.rows([r])[5][0] == 2 * 4 + 1
    order = list(range(8))
    random.Random(0).shuffle(order)
    rig.run(r, order=order)
    rig.exact(1, 8, [0])


def test_block_list_is_cut_at_first_block():  # A3: a decode step names only the blocks of its own chunk
    rig = Rig()
    rig.run(request(1, 0, 12, [3, 4, 5]))
    rig.exact(1, 12, [0])
    rig.run(request(1, 12, 16, [5, 9], first=2))
    rig.exact(1, 16, [1])


@pytest.mark.parametrize("seed", range(20))
def test_fuzz_of_many_requests(seed):  # A5 A6 A7 A8: 2-7 requests, mixed tails, rows in any order
    rng = random.Random(seed)
    rig = Rig(ring_blocks=80)
    free = list(range(1, 200))
    rng.shuffle(free)
    requests = []
    for uid in range(1, rng.randint(3, 8)):
        tokens = rng.randint(1, 37)
        requests.append(request(uid, 0, tokens, [free.pop() for _ in range(-(-tokens // 4))]))
    rows = rig.rows(requests)
    order = list(range(len(rows)))
    rng.shuffle(order)
    rig.run(*requests, order=order)
    for r in rng.sample(requests, len(requests)):
        rig.exact(r.uid, r.end, range(r.end // 8))


def test_tail_past_the_last_chunk_waits_and_shifts_nobody():  # A6 A7: 300 rows, chunks of 256; the neighbour is exact
    rig = Rig(ring_blocks=64, n=16, chunk=256)
    a = request(1, 0, 300, range(1, 20))
    b = request(2, 0, 256, range(30, 46))
    rig.run(a, b)
    rig.exact(1, 300, [0])
    rig.exact(2, 256, [0])
    assert rig.ring.usage().used == 3  # the 44 rows of A's tail, kept


def test_row_order_may_differ_from_the_schedulers():  # A8
    rig = Rig()
    a, b = request(1, 0, 8, [1, 2]), request(2, 0, 8, [3, 4])
    rig.run(a, b, rows=rig.rows([b, a]))
    rig.exact(1, 8, [0])
    rig.exact(2, 8, [0])


def test_a_partial_request_stops_nobody_and_is_completed_later():  # A9 A28 A29 A12: 200 of 256, then 56 more
    rig = Rig(ring_blocks=64, n=16, chunk=256)
    blocks = range(1, 17)
    rig.run(request(1, 0, 200, list(blocks)[:13]), request(2, 0, 256, range(30, 46)))
    assert rig.take(1, 200) == {}
    assert rig.ledger.missing_rows(1, 0) == 56
    rig.exact(2, 256, [0])
    rig.run(request(1, 200, 256, blocks, admitted=False))
    rig.exact(1, 256, [0])


def test_only_the_incomplete_chunk_waits():  # A28: 4 chunks, the first one starts behind a prefix hit
    rig = Rig()
    rig.run(request(1, 4, 32, range(1, 9), admitted=True))
    rig.exact(1, 32, [1, 2, 3])
    assert rig.ledger.missing_rows(1, 0) == 4


def test_requests_with_nothing_to_store_take_nothing():  # A10 A11 A17 A19
    rig = Rig()
    rig.run(request(1, 0, 8, [1, 2], skip="lora"), request(2, 5, 5, [3, 4]), request(3, 0, 8, [5, 6]))
    assert rig.ring.usage().used == 2
    rig.exact(3, 8, [0])
    rig.run(request(1, 8, 9, [7], first=2, skip="lora"))
    assert not rig.feature.active
    plan = rig.ledger.begin(rig.step())
    assert len(plan.block_ids) == len(plan.ring_blocks) == 0


def test_query_rows_past_the_mapping_are_dropped():  # A14 A16: 264 rows, 256 slots
    rig = Rig(ring_blocks=32, n=16, chunk=256)
    r = request(1, 0, 256, range(1, 17))
    rows = rig.rows([r])
    mapping = torch.tensor([x[0] for x in rows])
    rig.run(r, rows=rows + [(0, 9, p, 0) for p in range(8)], mapping=mapping)
    assert rig.feature._ring_slots[256:264].tolist() == [-1] * 8
    rig.exact(1, 256, [0])


def test_padding_rows_match_nothing():  # A15: -1 slots; block 0 is not hit
    rig = Rig()
    r = request(1, 0, 8, [0, 3])
    rows = rig.rows([r])
    mapping = torch.tensor([x[0] for x in rows] + [-1] * 4)
    rig.run(r, rows=rows + [(-1, 9, p, 0) for p in range(4)], mapping=mapping)
    assert rig.feature._ring_slots[8:12].tolist() == [-1] * 4
    rig.exact(1, 8, [0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_mapping_of_another_dtype_and_longer_than_the_query(dtype):  # A22 A23
    rig = Rig()
    r = request(1, 0, 8, [3, 4])
    mapping = torch.tensor([x[0] for x in rig.rows([r])] + [16 + i for i in range(8)], dtype=dtype)
    rig.run(r, rows=rig.rows([r]), mapping=mapping)
    rig.exact(1, 8, [0])


def test_a_full_ring_skips_one_request_only():  # A20: NB=34: A needs 32, B 16 does not fit, C needs 2
    rig = Rig(ring_blocks=34, n=16, chunk=32)
    a, b, c = request(1, 0, 512, range(1, 33)), request(2, 0, 256, range(40, 56)), request(3, 0, 32, range(60, 62))
    rig.run(a, b, c)
    rig.exact(1, 512, range(16))
    assert rig.take(2, 256) == {}
    rig.exact(3, 32, [0])
    assert rig.counters["query.skipped.ring-full"] == 8
    assert rig.feature.why_missing(RequestTrack(2, "b", ""), 3) == "ring-full"
    rig.feature.release(RequestTrack(2, "b", ""))
    assert rig.ring.num_free_blocks() == 34


def test_a_skipped_chunk_stays_skipped_and_the_next_one_is_taken():  # A20 A10: a partly kept chunk gives its blocks back at once
    rig = Rig(ring_blocks=3)
    rig.run(request(1, 0, 4, [1]), request(2, 0, 8, [2, 3]))
    rig.run(request(1, 4, 12, [1, 4, 5], admitted=False), request(2, 8, 9, [6], first=2))
    assert rig.ring.usage().used == 3  # request 1 holds nothing any more
    rig.exact(2, 9, [0])
    rig.run(request(1, 12, 16, [5, 7], first=2))
    assert rig.take(1, 16) == {}
    rig.run(request(1, 16, 24, [8, 9], first=4))
    rig.exact(1, 24, [2])


# ---- sharing, duplicates, recomputation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner_first", [True, False])
def test_two_requests_that_share_a_block_in_one_step(owner_first):  # A26 R37: B's prefix is computed by A in this very step
    rig = Rig()
    a = request(1, 0, 8, [1, 2])
    b = request(2, 4, 8, [1, 3])._replace(admitted=True)
    rows = [*rig.rows([a]), *[(3 * 4 + p % 4, 1, p, 0) for p in range(4, 8)]]  # the same tokens, so the same values
    rig.run(*([a, b] if owner_first else [b, a]), rows=rows)
    rig.exact(1, 8, [0])
    found = rig.take(2, 8)
    assert torch.equal(found[0], rig.wanted(1, 0))
    rig.feature.release(RequestTrack(1, "", ""))
    rig.feature.release(RequestTrack(2, "", ""))
    assert rig.ring.num_free_blocks() == 16


def test_a_block_of_a_still_running_request_is_shared_later():  # A26 A29
    rig = Rig()
    rig.run(request(1, 0, 6, [1, 2]))
    b = request(2, 4, 8, [1, 3], admitted=True)
    rig.run(request(1, 6, 7, [1, 2], admitted=False), b, rows=[(2 * 4 + 2, 1, 6, 0)] + [(3 * 4 + p % 4, 1, p, 0) for p in range(4, 8)])
    rig.ledger.release(1)  # A ends first; B keeps the shared rows
    assert torch.equal(rig.take(2, 8)[0], rig.wanted(1, 0))
    rig.ledger.release(2)
    assert rig.ring.num_free_blocks() == 16


def test_a_duplicate_slot_and_a_missing_token_are_found():  # A27 R37: slots of tokens [0, 0, 1, 2] for tokens 0..3
    rig = Rig()
    r = request(1, 0, 16, [1, 2, 3, 4])
    rows = rig.rows([r])
    rows[3], rows[2], rows[1] = (rows[2][0], 1, 2, 0), (rows[1][0], 1, 1, 0), (rows[0][0], 1, 0, 0)
    rig.run(r, rows=rows)
    found = rig.take(1, 16)
    assert found[0] == "rows-missing"
    assert torch.equal(found[1], rig.wanted(1, 1))
    assert rig.counters["query.rows_missing"] == 1


def test_a_step_whose_rows_never_come_is_found():  # A27 A18: the engine ran, Python and kernels did not (a micro-batched pass)
    rig = Rig()
    step = rig.step(request(1, 0, 8, [1, 2]))
    rig.feature.begin(step)
    rig.feature.commit(step.number, ())
    assert rig.take(1, 8) == {0: "rows-missing"}


def test_stale_rows_of_an_earlier_owner_are_never_taken():  # R37 A27: ring blocks are reused by a request whose rows do not come
    rig = Rig(ring_blocks=2)
    rig.run(request(1, 0, 8, [1, 2]))
    rig.exact(1, 8, [0])
    r = request(2, 0, 8, [3, 4])
    rig.run(r, rows=rig.rows([r])[:7])
    assert rig.take(2, 8) == {0: "rows-missing"}


def test_a_layer_that_never_arrives_drops_the_step(caplog):  # R37 O13
    rig = Rig()
    r = request(1, 0, 8, [1, 2])
    for start in range(50):
        step = rig.step(r._replace(start=0) if start == 0 else request(2 + start, 0, 8, [1, 2]))
        rig.feature.begin(step)
        rig.launch(rig.rows(step.requests), layers=[0])
        rig.feature.commit(step.number, ())
        uid = step.requests[0].uid
        assert rig.take(uid, 8) == {}
        rig.feature.release(RequestTrack(uid, "", ""))
    assert rig.counters["query.steps_incomplete"] == 50
    assert len([x for x in caplog.records if "layers brought queries" in x.message]) <= 1  # O14


def test_a_later_layer_with_fewer_rows_is_refused():  # R37: fast prefill of layers with shared KV
    rig = Rig()
    r = request(1, 0, 8, [1, 2])
    rig.feature.begin(rig.step(r))
    rows = rig.rows([r])
    rig.launch(rows, layers=[0])
    with pytest.raises(Unsupported, match="rows"):
        rig.launch(rows[-1:], layers=[1])


def test_a_block_seen_twice_takes_the_latest_rows():  # A30: the same positions in two steps
    rig = Rig()
    rig.run(request(1, 0, 6, [1, 2]), version=0)
    rig.run(request(1, 0, 8, [1, 2]), version=1)
    rig.exact(1, 8, [0], version=1)


def test_preempted_and_resumed_in_other_blocks():  # A30: rows of before count unless computed anew
    rig = Rig()
    rig.run(request(1, 0, 7, [1, 2]))
    other = request(2, 0, 8, [1, 2])  # the blocks are another request's in the very next step
    rig.run(other, preempted=[1])
    rig.exact(2, 8, [0])
    rig.run(request(1, 4, 8, [5, 6], admitted=True), version=0)
    rig.exact(1, 8, [0])


def test_rejected_rows_are_rewritten():  # A30: drafts at 6, 7 rejected; 6 and 7 come again
    rig = Rig()
    rig.run(request(1, 0, 5, [1, 2]))
    rig.run(request(1, 5, 8, [1, 2], admitted=False), version=1)
    rig.run(request(1, 6, 8, [1, 2], admitted=False), version=0)
    found = rig.take(1, 8)[0]
    assert torch.equal(found[:, 6:], rig.wanted(1, 0)[:, 6:])
    assert torch.equal(found[:, 5], rig.wanted(1, 0, version=1)[:, 5])


# ---- steps that end badly ---------------------------------------------------------------------------------------------------------


def test_a_step_that_never_ends_does_not_count():  # C35 W5: a new step with the old plan still present
    rig = Rig()
    rig.run(request(1, 0, 8, [1, 2]), version=1, end=False)
    rig.run(request(2, 0, 8, [3, 4]))
    assert rig.take(1, 8) == {}
    rig.exact(2, 8, [0])
    rig.run(request(1, 0, 8, [1, 2]))
    rig.exact(1, 8, [0])
    rig.ledger.release(1)
    assert rig.ring.num_free_blocks() == 16


def test_two_rows_of_a_block_that_were_given_up():  # C35 A28: the chunk is past, but not whole
    rig = Rig()
    rig.run(request(1, 0, 6, [1, 2]))
    rig.run(request(1, 6, 8, [1, 2], admitted=False), end=False)
    rig.run(request(1, 8, 16, [3, 4], first=2))
    rig.exact(1, 16, [1])
    assert rig.ledger.missing_rows(1, 0) == 2


def test_the_save_hook_of_another_step_changes_nothing():  # C35 W5
    rig = Rig()
    step = rig.step(request(1, 0, 8, [1, 2]))
    rig.feature.begin(step)
    rig.launch(rig.rows(step.requests))
    rig.feature.commit(step.number - 1, ())
    assert rig.take(1, 8) == {}
    rig.feature.commit(step.number, ())
    rig.exact(1, 8, [0])


def test_rows_of_invalid_requests_do_not_count():  # R37: computed on a failed load, then again
    rig = Rig()
    r = request(1, 0, 8, [1, 2])
    step = rig.step(r, request(2, 0, 8, [3, 4]))
    rig.feature.begin(step)
    rig.launch(rig.rows(step.requests, version=1))
    rig.feature.commit(step.number, [1])
    assert rig.take(1, 8) == {}
    rig.exact(2, 8, [0], version=1)
    rig.run(r)
    rig.exact(1, 8, [0])


def test_between_steps_the_plan_is_empty():  # R37: dummy runs with slots that look real
    rig = Rig()
    rig.run(request(1, 0, 6, [1, 2]))
    before = [layer.clone() for layer in rig.ring.layers]
    rig.launch([(4 + i, 9, i, 3) for i in range(8)])
    assert all(torch.equal(x, y) for x, y in zip(before, rig.ring.layers, strict=True))
    assert int(rig.feature._plan.device[0]) == 0
    rig.run(request(1, 6, 8, [1, 2], admitted=False))
    rig.exact(1, 8, [0])


def test_begin_reads_nothing_from_the_device(monkeypatch):  # A31: no .item(), .cpu(), .tolist(), .numpy() while a step is planned
    rig = Rig()
    rig.run(request(1, 0, 6, [1, 2]))

    def refuse(*args, **kwargs):
        raise AssertionError("a device read in begin")

    step = rig.step(request(1, 6, 8, [1, 2], admitted=False), request(2, 0, 20, range(5, 10)))
    with monkeypatch.context() as patch:
        for name in ("item", "cpu", "tolist", "numpy", "nonzero", "__bool__", "__int__"):
            patch.setattr(torch.Tensor, name, refuse)
        rig.feature.begin(step)
        rig.feature.commit(step.number, ())
    assert rig.ledger.missing_rows(2, 0) == 0


def test_the_plan_is_sorted_and_padded():  # A4 A31: what the kernel's binary search needs
    rig = Rig()
    plan = rig.ledger.begin(rig.step(request(1, 0, 12, [9, 3, 7]), request(2, 0, 4, [5])))
    assert plan.block_ids.tolist() == [3, 5, 7, 9] and plan.block_ids.dtype == np.int64
    assert len(set(plan.ring_blocks.tolist())) == 4


def test_more_blocks_than_the_plan_holds():
    rig = Rig(plan_blocks=2)
    with pytest.raises(Unsupported, match="3 KV blocks"):
        rig.feature.begin(rig.step(request(1, 0, 12, [1, 2, 3])))
    rig.feature.close()
    assert rig.ring.num_free_blocks() == 16


# ---- the ring's blocks ------------------------------------------------------------------------------------------------------------


def test_a_stale_kv_block_is_not_attached_to():  # R37 A26: A and B share, A is preempted, B ends; the KV block is then filled by a load
    rig = Rig()
    rig.run(request(1, 0, 6, [1, 2]))
    rig.run(request(2, 4, 6, [1, 3], admitted=True))
    rig.run(preempted=[1])
    rig.ledger.release(2)
    load = LoadRequest(3, "c", "", 0, 4, (1,), ("d",), (0,) * 8)
    rig.run(request(3, 4, 8, [1, 4], admitted=True), loads=[load])
    assert rig.take(3, 8) == {}
    rig.run(request(4, 4, 8, [1, 5], admitted=True))
    assert rig.take(4, 8) == {}, "rows of request 1's tokens were attached"


def test_a_skipped_request_takes_its_kv_blocks_from_older_rows():  # R37 A26: the same, written by a request that is not stored
    rig = Rig()
    rig.run(request(1, 0, 6, [1, 2]))
    rig.run(request(2, 4, 6, [1, 3], admitted=True))
    rig.run(preempted=[1])
    rig.ledger.release(2)
    rig.run(request(3, 0, 8, [1, 4], skip="multimodal"))
    rig.run(request(4, 4, 8, [1, 5], admitted=True))
    assert rig.take(4, 8) == {}


def test_spill_keeps_every_row():  # A20 A29: on_pressure="wait": partial chunks go to the host and come back
    rig = Rig(ring_blocks=4, chunk=16, never_lose=True)
    for uid in range(1, 7):
        rig.run(request(uid, 0, 10, [uid * 10 + i for i in range(3)]))
    assert rig.counters["query.blocks_spilled"] > 0
    for uid in range(1, 7):
        rig.run(request(uid, 10, 13, [uid * 10 + i for i in range(4)], admitted=False))
    for uid in range(1, 7):
        rig.run(request(uid, 13, 16, [uid * 10 + i for i in range(4)], admitted=False))
        rig.exact(uid, 16, [0])
        rig.ledger.release(uid)
    assert rig.ring.num_free_blocks() == 4


def test_a_spilled_block_that_is_computed_anew():  # A30: some rows on the host, newer ones in the ring
    rig = Rig(ring_blocks=2, never_lose=True)
    rig.run(request(1, 0, 6, [1, 2]), version=1)
    rig.run(request(2, 0, 8, [3, 4]))
    rig.exact(2, 8, [0])
    rig.run(request(1, 5, 8, [1, 2], admitted=False), version=0)
    found = rig.take(1, 8)[0]
    assert torch.equal(found[:, 5:], rig.wanted(1, 0)[:, 5:])
    assert torch.equal(found[:, :5], rig.wanted(1, 0, version=1)[:, :5])


def test_rows_missing_from_a_spilled_block_are_found():  # A27 R37
    rig = Rig(ring_blocks=2, never_lose=True)
    r = request(1, 0, 6, [1, 2])
    rig.run(r, rows=rig.rows([r])[1:])
    rig.run(request(2, 0, 8, [3, 4]))
    rig.exact(2, 8, [0])
    rig.run(request(1, 6, 8, [1, 2], admitted=False))
    assert rig.take(1, 8) == {0: "rows-missing"}


def test_a_step_larger_than_the_ring_is_skipped_even_when_waiting():
    rig = Rig(ring_blocks=2, never_lose=True)
    rig.run(request(1, 0, 12, [1, 2, 3]))
    assert rig.counters["query.skipped.ring-full"] == 2
    assert rig.ring.num_free_blocks() == 2


def test_release_gives_everything_back():  # D16
    rig = Rig(never_lose=True)
    rig.run(request(1, 0, 7, [1, 2]), request(2, 0, 30, range(5, 13)))
    rig.ledger.release(2)
    rig.ledger.release(99)
    assert rig.ring.usage().used == 2
    rig.ledger.release_all()
    ledger = rig.ledger
    assert rig.ring.num_free_blocks() == 16
    assert not (ledger._requests or ledger._owners or ledger._stamps or ledger._of_kv or ledger._kv_of)


def test_a_request_that_ends_between_its_step_and_the_save_hook():  # C35 D17
    rig = Rig()
    step = rig.step(request(1, 0, 8, [1, 2]), request(2, 0, 8, [3, 4]))
    rig.feature.begin(step)
    rig.launch(rig.rows(step.requests))
    rig.feature.release(RequestTrack(1, "", ""))
    rig.feature.commit(step.number, ())
    assert rig.take(1, 8) == {}
    rig.exact(2, 8, [0])
    assert rig.ring.num_free_blocks() == 16


def test_a_consumer_that_stops_in_the_middle_strands_no_block():  # C31
    rig = Rig()
    rig.run(request(1, 0, 24, range(1, 7)))
    with pytest.raises(RuntimeError, match="first"):
        for _index, _stage in rig.feature.take(RequestTrack(1, "", ""), 24):
            raise RuntimeError("first")
    rig.feature.release(RequestTrack(1, "", ""))
    assert rig.ring.num_free_blocks() == 16


def test_a_chunk_size_that_is_no_multiple_of_the_block():  # A12
    ring = QRingBuffer(1, 4, 16, 8, torch.float32, "cpu")
    with pytest.raises(ConfigError, match=r"20.*16"):
        RowLedger(ring, 20, spill=None, on_skip=lambda *a: None)


# ---- sizes ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "size", "depth", "blocks"), [(8192, 16, 2, 1024), (8192, 24, 2, 684), (1, 16, 1, 1)])
def test_ring_size(tokens, size, depth, blocks):  # C14
    assert ring_blocks_for(tokens, size, depth) == blocks


@pytest.mark.parametrize("missing", [None, 0])
def test_ring_size_without_a_batch_limit(missing):  # C13 C12: 8,192 tokens; a depth of 0 is 1
    assert ring_blocks_for(missing, 16, 1) == 512
    assert ring_blocks_for(missing, 16, 0) == 512


@pytest.mark.parametrize("seed", range(30))
def test_no_step_exceeds_the_block_limit(seed):
    rng = random.Random(seed)
    tokens, requests, n = rng.randint(1, 60), rng.randint(1, 9), rng.choice([1, 4, 16])
    used = left = 0
    for i in range(requests):
        count = min(tokens - left, 1 if i % 2 else rng.randint(1, 30))
        if count > 0:
            start = rng.randint(0, 100)
            used += -(-(start + count) // n) - start // n
            left += count
    assert used <= step_block_limit(tokens, requests, n)
