"""The streaming ring's books and budget, by hand: whose rows are whose, what moves, what is let go."""

from __future__ import annotations

import random
import time
import weakref
from array import array
from collections import Counter

import numpy as np
import pytest
import torch

from qcap import kernels
from qcap.attribution import LoadRequest, RequestStep, Step, TokenUpdate, flatten, request_step, token_update
from qcap.capture import HostArena, PageStager, RequestTrack, StreamBudget, StreamingQueryFeature, stream_ledger
from qcap.capture.held import HeldQueries
from qcap.capture.staging import RowsMissing
from qcap.capture.step_rows import Keep, Mover, Piece, Place, StepRecord, StepRows, assemble, wrong_stamps
from qcap.capture.stream_ledger import StreamLedger
from qcap.errors import ConfigError, Unsupported
from qcap.geometry import Geometry, Rope

N, CH, L, H = 4, 8, 2, 3


def request(uid, start, end, blocks, *, first=0, admitted=None, skip=""):
    return RequestStep(uid, f"r{uid}", "", start, end, first, array("q", blocks), start == 0 if admitted is None else admitted, skip)


class Rig:
    """A ledger whose steps' rows hold (uid, position, step)."""

    def __init__(self):
        self.skipped = []
        self.ledger = StreamLedger(N, CH, 100, lambda *a: self.skipped.append(a))
        self.number = 0
        self.out = 0  # sources that nobody has given back

    def rows(self, requests):
        values = [(r.uid, p, self.number) for r in requests if not r.skip for p in range(r.start, r.end)]
        self.out += 1
        rows = torch.tensor(values, dtype=torch.float32).reshape(-1, 1, 3).expand(-1, L, 3).contiguous()

        def back(_):
            self.out -= 1

        return StepRows(self.number, rows, torch.full((len(values),), self.number), back)

    def begin(self, *requests, **more):
        self.number += 1
        step = Step(self.number, tuple(requests), **more)
        self.ledger.plan(step, np.zeros(1000, dtype=np.int64))
        source = self.rows(requests)
        self.ledger.open(step, source)
        return source

    def run(self, *requests, invalid=(), **more):
        source = self.begin(*requests, **more)
        record = self.ledger.commit(invalid)
        source.drop()
        return record

    def take(self, uid, final):
        """Chunk -> its rows ``[CH, 3]`` (uid, position, step)."""
        found = {}
        for chunk in self.ledger.complete(uid, final):
            host = torch.full((1, L, CH, H), -7.0)
            assert wrong_stamps(chunk.pieces) == 0
            assemble(chunk.pieces, host)
            assert torch.equal(host[0, 0], host[0, 1])
            found[chunk.index] = host[0, 0].int().tolist()
            self.ledger.release_chunk(uid, chunk.index)
            for piece in chunk.pieces:
                piece.drop()
        return found


def rows_of(uid, span, step):
    return [[uid, p, step] for p in span]


# ---- the plan ---------------------------------------------------------------------------------------------------------------------


def test_a_plan_names_requests_and_blocks():  # A2 A3 A5
    ledger = StreamLedger(N, CH, 100, lambda *a: None)
    out = np.full(60, -1, dtype=np.int64)
    step = Step(1, (request(1, 0, 6, [9, 4]), request(2, 5, 6, [7, 3]), request(3, 0, 8, [1, 2], skip="lora"), request(4, 4, 4, [5])))
    assert ledger.plan(step, out) == (2, 3, 7)
    assert out[:8].reshape(2, 4).tolist() == [[0, 0, 6, 0], [2, 5, 6, 6]]
    assert [(k >> 32, k & 0xFFFFFFFF) for k in out[8:11].tolist()] == [(3, 2), (4, 1), (9, 0)]
    assert out[11] == -1


def test_the_flat_form_of_a_step_is_what_its_requests_say():
    requests = (request(1, 0, 6, [9, 4]), request(2, 5, 6, [7, 3]), request(3, 0, 8, [1, 2], skip="lora"), request(4, 9, 9, [5]))
    flat = flatten(requests, N)
    assert (flat.start.tolist(), flat.end.tolist(), flat.block_ids.tolist()) == ([0, 5], [6, 6], [9, 4, 3])
    assert [len(a) for a in (flatten((), N).start, flatten((), N).block_ids)] == [0, 0]
    assert flat.table.tolist() == [[0, 0, 6, 0], [2, 5, 6, 6]] and (flat.blocks, flat.rows, flat.special) == (3, 7, True)


@pytest.mark.parametrize("seed", range(30))
def test_places_and_rows_count_on_from_one_request_to_the_next(seed):
    rng, n = random.Random(seed), random.Random(seed).choice([1, 3, 4, 16])
    requests, uids, table, blocks, rows, special = [], [], [], [], 0, False
    for uid in range(rng.randrange(6)):
        start = rng.randrange(60)
        end = start + rng.choice([0, 1, 1, rng.randrange(1, 90)])
        first = rng.choice([0, start // n, rng.randrange(start // n + 1)])
        ids = [rng.randrange(1 << 31) for _ in range(first, -(-end // n))]
        skip, admitted, kind = rng.choice(["", "", "lora"]), rng.random() < 0.2, rng.choice([tuple, list, lambda given: array("q", given)])
        requests.append(RequestStep(uid, str(uid), "", start, end, first, kind(ids), admitted, skip))
        special = special or admitted or bool(skip)
        if not skip and start < end:
            table.append([len(blocks), start, end, rows])
            blocks += [ids[p // n - first] for p in range(start, end) if p == start or p % n == 0]
            rows += end - start
            uids.append(uid)
    flat = flatten(requests, n)
    assert flat.uids == uids
    assert (flat.table.tolist(), flat.block_ids.tolist()) == (table, blocks) and flat.block_ids.dtype == flat.table.dtype == np.int64
    assert (flat.blocks, flat.rows, flat.special) == (len(blocks), rows, special)


def test_what_is_made_of_its_fields_is_what_the_constructor_makes():
    fields = (1, "r1", "salt", 3, 5, 0, array("q", [7, 8]), True, "lora")
    made, update = request_step(fields), token_update((1, 4, (9,), ()))
    assert type(made) is RequestStep and made == RequestStep(*fields) and made.skip == "lora"
    assert type(update) is TokenUpdate and update == TokenUpdate(1, 4, (9,)) and update.ids == (9,)


def test_block_ids_of_another_width_are_not_misread():
    for kind in (np.int32, np.int64, np.int16):
        wide = RequestStep(1, "r1", "", 0, 8, 0, np.array([9, 4], dtype=kind))
        assert flatten((wide,), N).block_ids.tolist() == [9, 4]


def test_a_block_table_that_does_not_fit_the_step_is_refused():  # A13
    ledger = StreamLedger(N, CH, 100, lambda *a: None)
    with pytest.raises(Unsupported, match="2 KV blocks and name 1"):
        ledger.plan(Step(1, (request(1, 0, 6, [9]),)), np.zeros(100, dtype=np.int64))


def test_a_plan_that_does_not_fit_writes_nothing():
    ledger, out = StreamLedger(N, CH, 100, lambda *a: None), np.full(5, -1, dtype=np.int64)
    assert ledger.plan(Step(1, (request(1, 0, 8, [1, 2]),)), out) == (1, 2, 8)
    assert out.tolist() == [-1] * 5


# ---- chunks -----------------------------------------------------------------------------------------------------------------------


def test_a_chunk_of_several_steps_comes_in_token_order():  # A29
    rig = Rig()
    rig.run(request(1, 0, 5, [1, 2]), request(2, 0, 8, [3, 4]))
    assert rig.take(1, 5) == {} and rig.take(2, 8) == {0: rows_of(2, range(8), 1)}
    rig.run(request(1, 5, 6, [1, 2]))
    rig.run(request(1, 6, 9, [1, 2, 5]))
    assert rig.take(1, 9) == {0: rows_of(1, range(5), 1) + rows_of(1, [5], 2) + rows_of(1, [6, 7], 3)}
    rig.ledger.release(1)
    rig.ledger.release(2)
    assert rig.out == 0


def test_rows_computed_anew_count():  # A30
    rig = Rig()
    rig.run(request(1, 0, 6, [1, 2]))
    rig.run(request(1, 2, 8, [3, 4], admitted=True))
    assert rig.take(1, 8) == {0: rows_of(1, [0, 1], 1) + rows_of(1, range(2, 8), 2)}


def test_rows_of_bad_data_count_as_missing_until_they_come_again():
    rig = Rig()
    rig.run(request(1, 0, 4, [1]))
    rig.run(request(1, 2, 8, [1, 2]), request(2, 0, 8, [3, 4]), invalid=[1])
    assert rig.take(1, 8) == {} and rig.take(2, 8) == {0: rows_of(2, range(8), 2)}
    rig.run(request(1, 2, 8, [1, 2]))
    assert rig.take(1, 8) == {0: rows_of(1, [0, 1], 1) + rows_of(1, range(2, 8), 3)}


def test_a_step_that_never_ends_takes_away_what_it_wrote_over():  # C35 W5
    rig = Rig()
    rig.run(request(1, 0, 6, [1, 2]))
    lost = rig.begin(request(1, 4, 8, [1, 2]))
    lost.drop()
    rig.run(request(2, 0, 1, [5]))
    assert rig.take(1, 8) == {}
    rig.run(request(1, 4, 8, [1, 2]))
    assert rig.take(1, 8) == {0: rows_of(1, range(4), 1) + rows_of(1, range(4, 8), 4)}
    rig.ledger.release_all()
    assert rig.out == 0


def needed_positions(ledger, record):
    """What of a record is needed, counted by hand."""
    needed = {(uid, p) for uid, first, last in record.shared for p in range(first, last)}
    for uid, begin, until in zip(record.uids, record.place.start, record.place.end, strict=True):
        rows = ledger._requests.get(uid)
        chunks = [] if rows is None else [c for c, entries in rows.chunks.items() if any(entry is record for entry in entries)]
        needed |= {(uid, p) for p in range(begin, until) if p // CH in chunks}
    return needed


@pytest.mark.parametrize("seed", range(20))
def test_the_short_ways_of_a_decode_step_are_the_long_one(seed, monkeypatch):
    """The chunk that grew last is added to without a look-up, and a record that is needed by half is not counted through."""
    rng, rig, seen, records = random.Random(seed), Rig(), Counter(), []
    at = dict.fromkeys(range(1, 7), 0)
    add = stream_ledger._Rows.add
    monkeypatch.setattr(stream_ledger._Rows, "add", lambda *a: seen.update(["looked up"]) or add(*a))
    for _ in range(150):
        some = rng.sample(sorted(at), rng.randrange(1, 6))
        requests = []
        for uid in some:
            if rng.random() < 0.1:
                at[uid] = max(0, at[uid] - rng.randrange(12))  # computed anew, perhaps from the middle of a chunk
            end = at[uid] + rng.choice([1, 1, 1, 1, 5, 11])
            requests.append(request(uid, at[uid], end, range(uid * 14, uid * 14 + -(-end // N)), admitted=rng.random() < 0.1))
            at[uid] = end % 40
        record = rig.run(*requests, invalid=[uid for uid in some if rng.random() < 0.05])
        records += [record] if record is not None and record.place.source is not None else []
        for uid in rng.sample(sorted(at), 2):
            what = rng.random()
            if what < 0.6:
                for chunk in rig.take(uid, at[uid]):
                    if rng.random() < 0.3:
                        rig.ledger.forget_staged(uid, chunk)
            elif what < 0.7:
                rig.ledger.release(uid)
                at[uid] = 0
            elif what < 0.9:  # whoever asked for them does not come back for them
                for chunk in rig.ledger.complete(uid, at[uid]):
                    seen.update(["left behind"])
                    for piece in chunk.pieces:
                        piece.drop()
        for rows in rig.ledger._requests.values():
            if rows.last:
                chunk = rows.first // CH
                assert rows.chunks[chunk] is rows.growing and rows.last == rows.first + CH and chunk not in rows.staged | rows.dead
        for uid, rows in rig.ledger._requests.items():
            for entries in rows.chunks.values():
                assert all(entry.refs > 0 and uid in entry.uids for entry in entries if isinstance(entry, StepRecord))
        records = [record for record in records if record.place is not None]
        for record in records:
            keep, wanted, count = rig.ledger.needed(record), needed_positions(rig.ledger, record), len(record.place.source.stamps)
            if keep is None:
                assert 2 * len(wanted) >= count
            else:
                assert {(record.uids[k.index], p) for k in keep for p in range(k.first, k.last)} >= wanted
            seen.update(["all" if keep is None else "some"])
    assert min(seen[what] for what in ("all", "some", "looked up", "left behind")) > 0
    rig.ledger.release_all()
    assert rig.out == 0


# ---- shared prefixes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner_first", [True, False])
def test_a_block_that_another_request_computes_in_this_very_step(owner_first):  # A26
    rig = Rig()
    a, b = request(1, 0, 5, [1, 2]), request(2, 4, 8, [1, 3], admitted=True)
    rig.run(*([a, b] if owner_first else [b, a]))
    assert rig.take(2, 8) == {0: rows_of(1, range(4), 1) + rows_of(2, range(4, 8), 1)}


def test_a_shared_block_outlives_its_owner_and_the_move_out_of_the_arena():
    rig, mover = Rig(), Mover()
    source = rig.begin(request(1, 0, 9, [1, 2, 5]), request(2, 4, 6, [1, 3], admitted=True))
    record = rig.ledger.commit()
    assert sorted(rig.take(1, 9)) == [0]  # its owner's chunk is whole, and gone from the books
    mover.move(record, source, rig.ledger.needed(record))
    source.drop()
    mover.close()
    assert rig.out == 0 and mover.bytes > 0
    rig.ledger.release(1)
    rig.run(request(2, 6, 8, [1, 3]))
    assert rig.take(2, 8) == {0: rows_of(1, range(4), 1) + rows_of(2, [4, 5], 1) + rows_of(2, [6, 7], 2)}
    rig.ledger.release(2)
    assert rig.out == 0 and mover.bytes == 0


@pytest.mark.parametrize("how", ["preempted", "resampled", "readmitted"])
def test_a_block_of_a_request_that_started_over_is_nobodys(how):
    """Its rows may be other tokens' by now, while the block, still in the engine's prefix cache, holds the old ones."""
    rig = Rig()
    rig.run(request(1, 0, 6, [1, 2]))
    more = {} if how == "readmitted" else {how: (1,)}
    if more:
        rig.run(**more)
    rig.run(request(1, 0, 6, [6, 7], admitted=True))  # other tokens at the same positions, in other blocks
    rig.run(request(2, 4, 8, [1, 3], admitted=True))  # a prefix hit on the old block
    assert rig.take(2, 8) == {}


@pytest.mark.parametrize("writer", ["load", "engine", "skipped request", "another request"])
def test_a_block_that_something_else_has_written_is_nobodys(writer):
    rig = Rig()
    rig.run(request(1, 0, 5, [1, 2]))
    load = LoadRequest(9, "r9", "", 0, 4, (1,), ("d",), (1, 2, 3, 4))
    if writer == "another request":
        rig.run(request(3, 4, 8, [8, 1], admitted=True))
    else:
        more = {"load": {"loads": (load,)}, "engine": {"overwritten": (1,)}, "skipped request": {}}[writer]
        rig.run(*([request(3, 0, 4, [1], skip="lora")] if writer == "skipped request" else []), **more)
    rig.run(request(2, 4, 8, [1, 3], admitted=True))
    assert rig.take(2, 8) == {}


def test_no_room_gives_up_the_chunks_of_the_step_alone():  # A20 A28
    rig = Rig()
    rig.run(request(1, 0, 9, [1, 2, 3]))
    assert list(rig.take(1, 9)) == [0]
    step = Step(2, (request(1, 9, 11, [3], first=2),))
    rig.ledger.plan(step, np.zeros(100, dtype=np.int64))
    rig.ledger.give_up(step, "host-full")
    assert rig.skipped == [(1, 1, "host-full")] and rig.out == 0
    rig.number = 2
    rig.run(request(1, 11, 24, [3, 4, 5, 6], first=2))
    assert list(rig.take(1, 24)) == [2]


def test_no_room_for_a_request_that_has_ended_leaves_nothing_behind():  # A20 A28
    rig = Rig()
    source = rig.begin(request(1, 0, 9, [1, 2, 3]), request(2, 0, 4, [4]))
    rig.ledger.release(1)
    rig.ledger.give_up(Step(1, (request(1, 0, 9, [1, 2, 3]), request(2, 0, 4, [4]))), "host-full")
    source.drop()
    assert rig.skipped == [(2, 0, "host-full")] and rig.out == 0 and list(rig.ledger._requests) == [2]


# ---- rows on the host -------------------------------------------------------------------------------------------------------------


def test_many_pieces_and_few_are_put_together_alike():
    rows = torch.arange(40 * L * H).reshape(40, L, H).bfloat16()
    source = StepRows(1, rows, torch.ones(40, dtype=torch.int64), lambda _: None)
    order = np.random.default_rng(0).permutation(32)
    for size in (1, 16):
        pieces = [Piece(source, int(order[a]) if size == 1 else a, size, a) for a in range(0, 32, size)]
        chunk = torch.full((1, L, 32, H), -7.0).bfloat16()
        assemble(pieces, chunk)
        wanted = rows[torch.from_numpy(order[:32]) if size == 1 else torch.arange(32)]
        assert torch.equal(chunk[0], wanted.transpose(0, 1))


def test_a_row_without_its_stamp_is_seen():  # A27 R37
    stamps = torch.full((6,), 5)
    stamps[3] = 4
    source = StepRows(5, torch.zeros(6, L, H), stamps, lambda _: None)
    assert wrong_stamps([Piece(source, 0, 3, 0)]) == 0 and wrong_stamps([Piece(source, 2, 4, 0), Piece(source, 3, 1, 4)]) == 2


def test_what_is_let_go_while_it_moves_comes_back_once():
    gone, mover = Counter(), Mover()
    for keep in (None, [Keep(0, 2, 4)]):
        source = StepRows(1, torch.zeros(20, L, H), torch.ones(20, dtype=torch.int64), lambda _: gone.update(["source"]))
        record = StepRecord([1], Place(source.hold(), [0], [20], [0]), frozenset())
        record.refs = 1
        mover.move(record, source, keep)
        source.drop()
        record.release()
    mover.close()
    assert gone["source"] == 2 and mover.bytes == 0


# ---- the budget -------------------------------------------------------------------------------------------------------------------


def geometry(layers=32, heads=32, size=128, dtype="bfloat16"):
    return Geometry(
        model="m", layer_names=tuple(f"l{i}" for i in range(layers)), num_q_heads=heads, num_kv_heads=8, head_size=size, dtype=dtype,
        block_size=16, chunk_size=256, rope=Rope(rotary_dim=size),
    )  # fmt: skip


def test_an_8b_model_at_8192_tokens_a_step_fits_into_half_a_gigabyte():  # P17 W33: the resident form takes 4.3 GB
    budget = StreamBudget.plan(geometry(), max_rows=8192, small_rows=512, ring_bytes=512 << 20)
    assert budget.nbytes <= 512 << 20 and budget.windows == 3
    assert budget.nbytes == 3 * 8192 * 8192 + 2 * 512 * 32 * 8192 + 8 * (2 * 512 + 8192)


def test_a_budget_that_is_too_small_says_what_is_needed():
    least = StreamBudget.least(geometry(), max_rows=8192, small_rows=512)
    with pytest.raises(ConfigError, match=f"needs {least.nbytes / 2**20:.0f} MiB and qcap.q.ring_bytes is 100 MiB"):
        StreamBudget.plan(geometry(), max_rows=8192, small_rows=512, ring_bytes=100 << 20)
    assert StreamBudget.plan(geometry(), max_rows=8192, small_rows=512, ring_bytes=least.nbytes) == least and least.windows == 1


def test_small_steps_alone_need_no_window():
    assert StreamBudget.plan(geometry(), max_rows=512, small_rows=512, ring_bytes=1 << 30).windows == 0


# ---- what can never become whole holds nothing ------------------------------------------------------------------------------------


def test_a_chunk_entered_in_the_middle_holds_nothing_until_it_is_computed_from_its_start():
    """A prefix hit in mid-chunk whose rows nobody has: its later rows would pin every step they came in, for the request's whole life."""
    rig = Rig()
    rig.run(request(1, 4, 6, [1, 2], admitted=True), request(2, 0, 1, [3]))
    for position in (6, 7, 8):
        rig.run(request(1, position, position + 1, [1, 2, 4][: position // N + 1]))
    assert rig.take(1, 9) == {}
    assert list(rig.ledger._requests[1].chunks) == [1], "the chunk that follows goes on as ever"
    rig.ledger.release(2)
    assert rig.out == 1
    rig.run(request(1, 0, 9, [5, 6, 7], admitted=True))
    assert rig.take(1, 9) == {0: rows_of(1, range(8), 5)}


def test_a_step_that_never_ended_holds_no_memory():
    rig = Rig()
    lost = rig.begin(request(1, 0, 6, [1, 2]))
    lost.drop()
    rig.ledger.abandon()
    assert rig.out == 0 and rig.ledger._requests[1].chunks
    rig.run(request(1, 0, 8, [1, 2]), invalid=[1])
    assert rig.out == 0 and rig.take(1, 8) == {}


# ---- a recorded graph -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3, 4, 6, 9])
@pytest.mark.parametrize("strides", ["one", "two"])
def test_a_graph_puts_several_layers_away_together(monkeypatch, layers, strides) -> None:
    launches: list[int] = []
    real = kernels.row_scatter_layers
    monkeypatch.setattr(kernels, "row_scatter_layers", lambda rows, *more: launches.append(len(rows)) or real(rows, *more))
    monkeypatch.setattr(kernels, "row_scatter", None)  # not in a graph
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    g = Geometry(
        model="m", layer_names=tuple(f"l{i}" for i in range(layers)), num_q_heads=1, num_kv_heads=1, head_size=4, dtype="float32",
        block_size=N, chunk_size=CH, rope=Rope(rotary_dim=4),
    )  # fmt: skip
    stager = PageStager(torch.device("cpu"), HostArena(1 << 20, pinned=False, waits=True))
    feature = StreamingQueryFeature(
        g, StreamBudget(8, 8, 0, 16, layers), num_kv_blocks=20, plan_blocks=16, plan_requests=4, padded_rows=10, stager=stager,
        counters=Counter(), host_bytes=1 << 20,
    )  # fmt: skip
    feature._recorded_layers = 4  # as on a GPU
    feature.begin(Step(1, (request(1, 0, 6, [7, 3]),)))
    feature.active = False  # as while a graph is recorded; a replay finds the plan of its step
    feature.resident.fill_(-7.0)
    slots = torch.tensor([28, 29, 30, 31, 12, 13, -1])
    queries = [torch.randn(7, 12)[:, :4] if strides == "one" or layer % 3 else torch.randn(7, 4) for layer in range(layers)]
    for layer, query in enumerate(queries):
        feature.on_layer(layer, query.view(7, 1, 4), slots)
    for layer, query in enumerate(queries):
        assert torch.equal(feature.resident[:6, layer], query[:6]), f"layer {layer}"
    assert (feature.resident[6:] == -7.0).all() and not feature._kept and sum(launches) == layers
    assert strides == "two" or launches == [4] * (layers // 4) + [layers % 4] * (layers % 4 > 0)
    feature.on_layer(0, queries[0].view(7, 1, 4), slots)  # a recording that is given up
    feature.on_layer(0, queries[0].view(7, 1, 4), slots)
    assert len(feature._kept) == (layers > 1)
    feature.quiet()
    feature.close()


# ---- the plan -------------------------------------------------------------------------------------------------------------------


def test_a_plan_is_written_again_only_when_the_device_has_read_it(monkeypatch):
    """The host is told by an event behind the last launch of its group, and waits for that before it writes to the group's first again."""
    from qcap import kernels
    from qcap.capture import plan as plan_module
    from qcap.capture.plan import PlanBuffer

    monkeypatch.setattr(plan_module, "_GROUP", 2)
    queue: list = []  # what the device has not done yet
    ran: list[int] = []

    class Event:
        def record(self):
            self.at = len(ran) + len(queue)

        def synchronize(self):
            while len(ran) < self.at:
                ran.append(queue.pop(0)())

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(kernels, "host_read", lambda source, target: queue.append(lambda: int(source[1])))
    plan = PlanBuffer(4, 2, torch.device("cpu"))
    plan._cuda, plan._events = True, [None] * 4
    plan._hosts = [torch.zeros_like(plan.device) for _ in range(8)]
    plan._arrays = [host.numpy() for host in plan._hosts]
    for step in range(100):
        plan.next()[0] = step
        plan.send(step, 1, 1)
    ran += [launch() for launch in queue]
    assert ran == list(range(100)), "each step's plan as it was sent"


# ---- a step of one request --------------------------------------------------------------------------------------------------------


class HeldRig:
    """A feature whose steps of one request leave from where they lie, on a CPU, where a copy is over when it is made."""

    def __init__(self, layers=3, windows=2, **more):
        g = Geometry(
            model="m", layer_names=tuple(f"l{i}" for i in range(layers)), num_q_heads=1, num_kv_heads=1, head_size=4, dtype="float32",
            block_size=N, chunk_size=CH, rope=Rope(rotary_dim=4),
        )  # fmt: skip
        self.layers, self.arena, self.counters = layers, HostArena(1 << 20, pinned=False, waits=True), Counter()
        stager = PageStager(torch.device("cpu"), self.arena)
        self.feature = StreamingQueryFeature(
            g, StreamBudget(40, 4, windows, 16, layers), num_kv_blocks=40, plan_blocks=40, plan_requests=4, padded_rows=50, stager=stager,
            counters=self.counters, host_bytes=1 << 20, **more,
        )  # fmt: skip
        self.feature._queries_stay, self.feature._held_rows = True, 8
        self.number, self.left = 0, 0
        real = self.feature._held.leave

        def leave(query, home):
            self.left += 1
            real(query, home)

        self.feature._held.leave = leave

    def run(self, *requests, rows=None, order=None, strided=(), padding=2, layers=None):
        """Rows hold (position, layer); ``order``: of the rows as the engine has them."""
        self.number += 1
        self.feature.begin(Step(self.number, tuple(requests)))
        at = [(r, p) for r in requests for p in range(r.start, r.end)]
        at = at if order is None else [at[i] for i in order]
        slots = torch.tensor([r.block_ids[p // N - r.first_block] * N + p % N for r, p in at] + [-1] * padding)
        for layer in range(self.layers if layers is None else layers):
            query = torch.full((len(slots), 4), -7.0)
            query[: len(at)] = torch.tensor([[float(p), layer, r.uid, 5.0] for r, p in at])
            if layer in strided:
                query = torch.cat([query, query], dim=1)[:, :4]
            query = query if rows is None else query[:rows]
            self.feature.on_layer(layer, query.view(-1, 1, 4), slots)
            self.feature.layer_done(layer)
        self.feature.commit(self.number, ())

    def chunks(self, uid, final):
        """Chunk -> positions of its rows, each checked in every layer; None if it is not whole."""
        track, found = RequestTrack(uid, str(uid), ""), {}
        for index, stage in self.feature.take(track, final):
            staged = stage()
            try:
                staged.ready.synchronize()
                rows = staged.host[0]
                assert all((rows[layer, :, 1] == layer).all() and (rows[layer, :, 2] == uid).all() for layer in range(self.layers))
                found[index] = rows[0, :, 0].int().tolist()
            except RowsMissing:
                found[index] = None
            staged.release()
        self.feature.end()
        return found

    def close(self):
        for uid in (1, 2):
            self.feature.release(RequestTrack(uid, str(uid), ""))
        self.feature.close()
        assert self.arena.outstanding == 0


@pytest.fixture
def held():
    made = []

    def make(*args, **more):
        made.append(HeldRig(*args, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("strided", [(), (1,), (2, 4)])
def test_a_step_of_one_request_leaves_from_where_it_lies(held, layers, strided):  # A31 C24
    rig = held(layers)
    rig.run(request(1, 0, 19, [9, 4, 7, 2, 5]), strided=strided)
    assert rig.left == layers
    assert rig.chunks(1, 19) == {0: list(range(8)), 1: list(range(8, 16))}
    rig.run(request(1, 19, 35, [9, 4, 7, 2, 5, 8, 3, 6, 1], admitted=False))  # the rest of a chunk comes from the step before
    assert rig.left == 2 * layers
    assert rig.chunks(1, 35) == {2: list(range(16, 24)), 3: list(range(24, 32))}
    assert rig.counters["query.rows_missing"] == 0


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("strided", [(), (1,), (0, 1)])
@pytest.mark.parametrize("layers", [1, 2, 3, 9])
def test_layers_of_a_step_that_is_not_that_large_are_scattered_together(held, monkeypatch, layers, strided, room):  # C24
    rig, launches = held(layers, windows=4), []
    rig.feature._held_rows = 40
    real = kernels.row_scatter_layers
    monkeypatch.setattr(kernels, "row_scatter_layers", lambda rows, *more: launches.append(len(rows)) or real(rows, *more))
    if not room:
        monkeypatch.setattr(rig.feature, "_can_spare", lambda query, count: False)
    first, other = request(1, 0, 11, [9, 4, 7]), request(2, 0, 9, [11, 12, 13])
    rig.run(first, other, order=[*range(11, 20), *range(11)], strided=strided)  # 160 rows of windows: two layers together, four such groups
    assert sum(launches) == layers * room and rig.left == 0 and not rig.feature._kept
    assert strided or not room or launches == [2] * (layers // 2) + [1] * (layers % 2)
    assert rig.chunks(1, 11) == {0: list(range(8))} and rig.chunks(2, 9) == {0: list(range(8))}
    rig.run(request(1, 11, 24, [9, 4, 7, 2, 5, 8], admitted=False), strided=strided)  # the rest of a chunk is in the step before
    assert rig.chunks(1, 24) == {1: list(range(8, 16)), 2: list(range(16, 24))}
    rig.run(request(2, 9, 24, [11, 12, 13, 14, 15, 16], admitted=False), layers=layers - 1)  # given up in the middle
    assert not rig.feature._kept and rig.counters["query.steps_incomplete"] == 1 and rig.chunks(2, 24) == {}
    assert rig.counters["query.rows_missing"] == 0


def test_what_is_kept_is_what_the_device_can_spare(held, monkeypatch):
    rig, room, asked = held(9, windows=4), [0], []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (room[0], 1 << 40))
    rig.feature._cuda = True
    fused = torch.zeros(10, 3 * 16)  # queries of 10 rows within something larger: that is what is kept
    queries = fused[:, :16]
    for free, layers, can, asks in (
        (2 * 4 * fused.nbytes - 1, 4, False, 1),
        (1 << 40, 4, False, 0),  # said no to as much before
        (2 * 3 * fused.nbytes, 3, True, 1),
        (0, 3, True, 0),  # said yes
        (2 * 3 * fused.nbytes, 2, True, 0),
    ):
        room[0] = free
        asked.clear()
        assert rig.feature._can_spare(queries, layers) is can and len(asked) == asks
    rig.feature._cuda = False


def test_a_step_with_many_rows_that_nothing_is_captured_of_keeps_nothing(held):
    rig, kept = held(9, windows=4), []
    rig.feature._held_rows = 40
    real = rig.feature._keep
    rig.feature._keep = lambda *args: kept.append(args) or real(*args)
    others = request(2, 0, 34, range(20, 29), skip="lora")
    rig.run(request(1, 0, 8, [9, 4]), others, order=[*range(8, 42), *range(8)])
    assert not kept and rig.chunks(1, 8) == {0: list(range(8))}
    rig.run(request(1, 8, 16, [9, 4, 7, 2], admitted=False))
    assert len(kept) == 9 and rig.chunks(1, 16) == {1: list(range(8, 16))}


def test_a_layer_that_is_left_out_costs_the_step_and_no_more(held):
    rig = held(9, windows=4)
    rig.feature._held_rows = 40
    for left_out in (3, 7, 8):
        first, second = request(1, 0, 11, [9, 4, 7]), request(2, 0, 9, [11, 12, 13])
        real, rig.feature.on_layer = rig.feature.on_layer, lambda layer, *more: real(layer, *more) if layer != left_out else None  # noqa: B023
        rig.run(first, second)
        rig.feature.on_layer = real
        assert rig.chunks(1, 11) == {} and not rig.feature._kept
    assert rig.counters["query.steps_incomplete"] == 3
    rig.run(request(1, 0, 11, [9, 4, 7]), request(2, 0, 9, [11, 12, 13]))
    assert rig.chunks(1, 11) == {0: list(range(8))} and rig.chunks(2, 9) == {0: list(range(8))}


@pytest.mark.parametrize("layers", [3, 5])
def test_a_step_that_finds_no_room_on_the_host_keeps_nothing(held, layers):
    rig = held(layers, windows=4)
    rig.feature._held_rows = 40
    rig.feature.resident.fill_(-7.0)
    rig.feature._arena.take = lambda *args: None
    rig.feature.layer_done = lambda layer: None  # nobody says that a layer is done
    rig.run(request(1, 0, 11, [9, 4, 7]), request(2, 0, 9, [11, 12, 13]))
    assert not rig.feature._kept and not rig.feature.active and (rig.feature.resident == -7.0).all()
    assert rig.counters["query.skipped.host-full"] == 4


def test_rows_that_do_not_lie_in_order_never_count(held):
    """What never happens: if it does, no row stands under another token, and the next steps go through the ring."""
    rig = held()
    order = [*range(8), 9, 8, *range(10, 19)]
    rig.run(request(1, 0, 19, [9, 4, 7, 2, 5]), order=order)
    assert rig.left == 3 and rig.chunks(1, 19) == {0: list(range(8)), 1: None} and rig.counters["query.rows_missing"] == 2
    rig.run(request(2, 0, 19, [11, 12, 13, 14, 15]), order=order)
    assert rig.left == 3 and rig.chunks(2, 19) == {0: list(range(8)), 1: list(range(8, 16))}


def test_rows_that_are_left_over_are_settled_before_they_move(held):
    rig = held()
    rig.run(request(1, 0, 20, [9, 4, 7, 2, 5]), order=[*range(17), 18, 17, 19])
    assert rig.chunks(1, 20) == {0: list(range(8)), 1: list(range(8, 16))}
    while rig.feature.mover.busy():
        time.sleep(0.001)
    rig.run(request(1, 20, 24, [9, 4, 7, 2, 5, 6], admitted=False))
    assert rig.chunks(1, 24) == {2: None}


@pytest.mark.parametrize("why", ["small", "two requests", "one that nothing is stored of", "strided", "too few rows", "no room"])
def test_what_goes_through_the_ring_all_the_same(held, monkeypatch, why):
    rig = held()
    one, other = request(1, 0, 19, [9, 4, 7, 2, 5]), request(2, 0, 9, [11, 12, 13])
    if why == "small":
        rig.feature._held_rows = 20
        rig.run(one)
    elif why == "two requests":
        rig.run(one, other, order=[*range(19, 28), *range(19)])
    elif why == "one that nothing is stored of":
        rig.run(one, request(2, 0, 9, [11, 12, 13], skip="lora"), order=[*range(19, 28), *range(19)])
    elif why == "strided":
        rig.run(one, strided=(0,))
    elif why == "too few rows":
        rig.run(one, rows=18)
    else:
        monkeypatch.setattr(rig.feature, "_can_spare", lambda query, layers: False)
        rig.run(one)
    assert rig.left == 0
    wanted = {0: list(range(8)), 1: list(range(8, 16))}
    assert rig.chunks(1, 19) == wanted
    if why == "two requests":
        assert rig.chunks(2, 9) == {0: list(range(8))}


@pytest.mark.parametrize("layers", [1, 2])
def test_a_step_that_ends_in_the_middle_holds_nothing(held, layers):
    rig = held()
    rig.run(request(1, 0, 19, [9, 4, 7, 2, 5]), layers=layers)
    assert rig.counters["query.steps_incomplete"] == 1 and rig.chunks(1, 19) == {}
    assert rig.feature._first is None and not rig.feature._held._held and not rig.feature._direct
    rig.run(request(2, 0, 19, [11, 12, 13, 14, 15]))
    assert rig.chunks(2, 19) == {0: list(range(8)), 1: list(range(8, 16))}


def test_queries_are_freed_behind_their_copy():
    """Two layers' queries are held; before the next ones are, the device is told to wait for the oldest copy, and only then are they
    free."""

    class Stager:
        def __init__(self):
            self.calls = []

        def copy_out(self, source, target, *, keep):
            assert keep
            self.calls.append(("copy", int(source[0, 0])))

        def copied_so_far(self, event):
            self.calls.append(("event", self.calls[-1][1], event is not None))
            return self.calls[-1][1]

        def wait_for(self, event):
            self.calls.append(("wait", event, [i for i, one in enumerate(alive) if one() is not None]))

        def keep_until_copied(self, source):
            self.calls.append(("keep", int(source[0, 0])))

    stager, alive = Stager(), []
    queries = HeldQueries(stager)
    for i in range(4):
        tensor = torch.full((2, 2), float(i))
        alive.append(weakref.ref(tensor))
        queries.leave(tensor, tensor)
        del tensor
    assert [i for i, one in enumerate(alive) if one() is not None] == [2, 3]
    queries.let_go()
    assert stager.calls == [
        ("copy", 0), ("event", 0, False), ("copy", 1), ("event", 1, False),
        ("wait", 0, [0, 1, 2]), ("copy", 2), ("event", 2, True), ("wait", 1, [1, 2, 3]), ("copy", 3), ("event", 3, True),
        ("keep", 2), ("keep", 3),
    ]  # fmt: skip
    assert all(one() is None for one in alive)
