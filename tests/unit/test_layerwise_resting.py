"""Loads from where chunks lie: merged runs, order, waits, leases. Memory is spoiled the moment its lease goes."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from layerwise_kit import CH, H, N, SimConnector, SimStreams, geometry, pages, rows_of

from qcap.attribution import LoadRequest
from qcap.backends import open_backend
from qcap.connectors import PagedConnector, streams
from qcap.errors import ConfigError, QcapError, ShapeError, StepOrderError
from qcap.kinds import CacheKind
from qcap.layerwise import EarlyCopies, LazyReader, NullStreams, RestingPipe, RestingSpan, merged, resting
from qcap.layerwise.parts import joined, pieces_of
from qcap.store.tiers import Resting
from qcap.tokens import ChunkedTokenDatabase, ChunkRecord, chunk_key
from qcap.vllm import loading
from qcap.vllm.loading import LayerLoads

NAN = float("nan")


class FakeLease:
    """Held once for each chunk that was given out, and by the store."""

    pinned = lent = True

    def __init__(self, block: torch.Tensor) -> None:
        self.block, self.holders, self.least = block, 1, 1

    def hold(self) -> None:
        assert self.holders > 0
        self.holders += 1

    def release(self) -> None:
        self.holders -= 1
        self.least = min(self.least, self.holders)
        if self.holders == 0:
            self.block.fill_(NAN)


class Shelf:
    """Chunks of random rows, those of one block side by side. ``sizes``: chunks a block."""

    def __init__(self, layers: int, sizes: list[int], seed: int = 0, planes: int = 2) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.blocks = [torch.randn((planes, layers, count * CH, H), generator=rng) for count in sizes]
        self.rows = torch.cat(self.blocks, dim=2).clone()
        self.leases = [FakeLease(block) for block in self.blocks]
        self.chunks: list[tuple[torch.Tensor, FakeLease]] = [
            (block[:, :, i * CH : (i + 1) * CH], lease)
            for block, lease, count in zip(self.blocks, self.leases, sizes, strict=True)
            for i in range(count)
        ]

    def give(self, first: int, last: int) -> list[Resting]:
        for _, lease in self.chunks[first:last]:
            lease.hold()
        return [Resting(tensor, lease) for tensor, lease in self.chunks[first:last]]

    def forget(self) -> None:
        """The store needs them no longer."""
        for lease in self.leases:
            lease.release()

    @property
    def gone(self) -> bool:
        return all(lease.holders == 0 for lease in self.leases) and all(lease.least == 0 for lease in self.leases)

    def lent(self) -> int:
        """Holders beside the store."""
        return sum(lease.holders - 1 for lease in self.leases)


class Bench:
    def __init__(
        self, layers: int = 4, sizes: tuple[int, ...] = (2, 1), *, staging: int = 2 * N, slots: int = 2, ahead: int = 1, seed: int = 0
    ) -> None:
        self.layers, self.rng = layers, random.Random(seed)
        self.streams, self.table = SimStreams(seed), pages(layers, seed=seed)
        self.streams.slow = [None, "load", "load twin", "pages", "compute"][seed % 5]
        self.connector = SimConnector(self.table, self.streams)
        self.pipe = RestingPipe(self.streams, self.connector, staging_tokens=staging, slots=slots, ahead=ahead)
        self.shelf = Shelf(layers, list(sizes), seed)
        self.blocks = self.rng.sample(range(40), len(self.shelf.chunks) * CH // N)

    def span(self, start: int = 0, end: int | None = None) -> RestingSpan:
        """Positions start..end of all chunks."""
        end = len(self.shelf.chunks) * CH if end is None else end
        return RestingSpan(self.shelf.give(start // CH, -(-end // CH)), start % CH, self.blocks[start // N : end // N])

    def compute(self, layer: int, seen: list[torch.Tensor]) -> None:
        self.streams.push(lambda: seen.append(rows_of(self.table, self.blocks, layer)))

    def run(self, spans: list[RestingSpan], *, steps: int = 6) -> list[torch.Tensor]:
        """One step: what each layer's computation saw. Between layers the device does less than ``steps`` things."""
        seen: list[torch.Tensor] = []
        self.pipe.begin(spans)
        for layer in range(self.layers):
            self.pipe.layer(layer)
            self.compute(layer, seen)
            for _ in range(self.rng.randrange(steps)):
                self.streams.step()
        self.pipe.end()
        return seen

    def check(self, bounds: list[tuple[int, int]], before: list[torch.Tensor], seen: list[torch.Tensor]) -> None:
        """Positions ``bounds`` hold the chunks' rows, the others what was there ``before``; so each layer's computation ``seen`` it."""
        for layer in range(self.layers):
            wanted = before[layer].clone()
            for start, end in bounds:
                wanted[:, start:end] = self.shelf.rows[:, layer, start:end]
            assert torch.equal(seen[layer], wanted), f"layer {layer} was computed before its rows were there"
            assert torch.equal(rows_of(self.table, self.blocks, layer), wanted)


def copies(bench: Bench) -> int:
    return sum(entry[0] == "copy" for entry in bench.streams.trace) // 2


@pytest.fixture(params=[1, streams.TURN_BYTES], ids=["a turn a copy", "long turns"])
def turns(request, monkeypatch) -> None:
    """How much a load stream is given before the other one's turn."""
    monkeypatch.setattr(streams, "TURN_BYTES", request.param)


# ---- runs ---------------------------------------------------------------------------------------------------------------------------


def test_neighbours_are_one_run() -> None:
    a, b = torch.randn((2, 3, 5 * CH, H)), torch.randn((2, 3, 2 * CH, H))
    cut = [x[:, :, i : i + CH] for x in (a, b) for i in range(0, x.shape[2], CH)]
    runs = merged(cut)
    assert [run.shape[2] for run in runs] == [5 * CH, 2 * CH] and runs[0].data_ptr() == a.data_ptr()
    assert torch.equal(runs[0], a) and torch.equal(runs[1], b)
    for order, wanted in (([0, 1, 3, 4], [2, 2]), ([1, 0], [1, 1]), ([4, 5], [1, 1]), ([2], [1]), ([], []), ([3, 3], [1, 1])):
        runs = merged([cut[i] for i in order])
        assert [run.shape[2] // CH for run in runs] == wanted
        assert not order or torch.equal(torch.cat(runs, dim=2), torch.cat([cut[i] for i in order], dim=2))


@pytest.mark.parametrize("seed", range(8))
def test_pieces_that_follow_each_other_are_one(seed: int) -> None:
    rng = random.Random(seed)
    shelf = Shelf(2, [rng.randrange(1, 4) for _ in range(4)], seed)
    total = len(shelf.chunks) * CH
    pieces, at, first = [], rng.randrange(CH), 0
    first = at
    while at < total:  # told of a few tokens at a time
        upto = min(total, at + rng.randrange(1, 2 * CH))
        tensors = [tensor for tensor, _ in shelf.chunks[at // CH : -(-upto // CH)]]
        pieces += list(pieces_of(tensors, at % CH, upto - at))
        at = upto
    fewer = joined(pieces)
    assert len(fewer) <= len(shelf.blocks) and sum(last - start for _, start, last in fewer) == total - first
    assert torch.equal(torch.cat([run[:, :, start:last] for run, start, last in fewer], dim=2), shelf.rows[:, :, first:])
    assert joined(fewer) == fewer or all(a is b for (a, *_), (b, *_) in zip(joined(fewer), fewer, strict=True))


def test_what_is_no_neighbour() -> None:
    alone = [torch.randn((2, 3, CH, H)) for _ in range(3)]
    assert len(merged(alone)) == 3
    block = torch.randn(3, 2, 3, CH, H)  # each whole, one behind the other: the token axis does not go on
    assert len(merged(list(block))) == 3
    ends = torch.randn((2, 1, 2 * CH, H))
    assert len(merged([ends[:, :, :CH], ends[:, :, CH:].as_strided((2, 1, CH, H), (H, H, H, 1), CH * H)])) == 2, "other strides"
    single = torch.randn((4, 1, 1, CH, H))
    runs = merged(list(single))  # with one plane and one layer it does
    assert len(runs) == 1 and torch.equal(runs[0], single.view(1, 1, 4 * CH, H))


# ---- order --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("turns")
@pytest.mark.parametrize("seed", range(16))
def test_equals_a_plain_scatter(seed: int) -> None:  # L17 L42 L47
    """Random chunks, spans and staging, several steps; the device works late and in any order; staging is spoiled when it was scattered,
    memory when its lease is released."""
    rng = random.Random(seed)
    layers, sizes = rng.randrange(1, 6), tuple(rng.randrange(1, 4) for _ in range(rng.randrange(1, 4)))
    bench = Bench(layers, sizes, staging=rng.choice([1, N, 3 * N, 5 * N, 1000]), ahead=rng.randrange(4), seed=seed)
    total = len(bench.shelf.chunks) * CH
    for _ in range(3):
        cut = sorted(rng.sample(range(0, total + 1, N), min(4, total // N + 1)))
        bounds = list(zip(cut[::2], cut[1::2], strict=False))
        before = [rows_of(bench.table, bench.blocks, layer) for layer in range(layers)]
        seen = bench.run([bench.span(*bound) for bound in bounds])
        bench.streams.run()
        assert bench.pipe.failure is None
        bench.check(bounds, before, seen)
    bench.pipe.poll()
    assert bench.shelf.lent() == 0 and bench.pipe.leases_held == 0
    bench.shelf.forget()
    assert bench.shelf.gone


@pytest.mark.parametrize("slots", [2, 3, 7, 40])
def test_copies_go_on_where_there_is_room(slots: int) -> None:
    """In the order in which layers need them, whether or not the layer before has been scattered."""
    bench = Bench(5, (3,), staging=CH, slots=slots, ahead=0)
    bench.streams.busy_while_asked = False
    bench.pipe.begin([bench.span()])
    counts = [copies(bench)]
    for layer in range(5):
        bench.pipe.layer(layer)
        counts.append(copies(bench))
    bench.pipe.end()
    if slots < 6:  # not two layers: scattered ahead of compute
        assert counts == [min(3 * (i + 1) + slots, 15) for i in range(6)]
    else:
        assert counts == [min(3 * i + slots, 9 * (i + 1), 15) for i in range(6)]
    order = [entry[0] for entry in bench.streams.trace if entry[0] in ("copy", "write")]
    assert order[:2] == ["copy", "copy"] and order.count("write") == 15
    bench.streams.run()
    assert all(torch.equal(rows_of(bench.table, bench.blocks, i), bench.shelf.rows[:, i]) for i in range(5))


@pytest.mark.usefixtures("turns")
@pytest.mark.parametrize("seed", range(8))
def test_a_store_that_lets_go_at_once(seed: int) -> None:  # L42
    """From begin on, the load alone keeps the memory."""
    bench = Bench(5, (3, 1), staging=3 * N, seed=seed)
    span = bench.span()
    bench.shelf.forget()
    seen = bench.run([span])
    bench.streams.run()
    assert all(torch.equal(seen[layer], bench.shelf.rows[:, layer]) for layer in range(5))
    bench.pipe.poll()
    assert bench.shelf.gone


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
@pytest.mark.parametrize("slots", [2, 40], ids=["not two layers", "room"])
def test_layers_are_queued_ahead_and_nothing_is_waited_for(ahead: int, slots: int) -> None:
    bench = Bench(ahead=ahead, slots=slots)
    bench.streams.busy_while_asked = False  # nothing happens on the device before the end

    def written() -> list[int]:
        return sorted({layer for what, layer, *_ in bench.streams.trace if what == "write"})

    bench.pipe.begin([bench.span()])
    (cut,) = bench.pipe._cuts
    parts = len(cut.parts)
    assert written() == (list(range(min(ahead + 1, 4))) if slots < 2 * parts else [])
    assert copies(bench) >= min(3 * (ahead + 1), 4) * parts if slots == 40 else copies(bench) >= min(ahead + 1, 4) * parts
    for layer in range(4):
        bench.pipe.layer(layer)
        assert written() == list(range(min(layer + ahead + 2, 4) if slots < 2 * parts else layer + 1))
    bench.pipe.end()
    assert not bench.pipe.poll() or bench.shelf.lent() == 3
    bench.streams.run()
    assert torch.equal(rows_of(bench.table, bench.blocks, 3), bench.shelf.rows[:, 3])


def test_a_run_is_one_copy_where_its_planes_lie_side_by_side() -> None:
    """Else, and for a part of a run, one a plane; one scatter a piece."""
    bench = Bench(1, (6, 1), staging=5 * CH)
    bench.pipe.begin([bench.span()])
    bench.pipe.layer(0)
    copies = [entry[1] // H for entry in bench.streams.trace if entry[0] == "copy"]
    assert copies == [5 * CH] * 2 + [CH] * 2 + [2 * CH] and bench.streams.trace.count(("write", 0)) == 3
    bench.pipe.close()


@pytest.mark.parametrize("staging", [N, 2 * CH, 100])
def test_layers_whose_planes_lie_side_by_side(staging: int) -> None:
    """As an engine's chunks come: contiguous as [L, planes, T, H]."""
    bench = Bench(3, (2, 3), staging=staging)
    for i, block in enumerate(bench.shelf.blocks):
        other = block.transpose(0, 1).contiguous().transpose(0, 1)
        lease, first = bench.shelf.leases[i], sum(b.shape[2] for b in bench.shelf.blocks[:i]) // CH
        lease.block = other
        for c in range(block.shape[2] // CH):
            bench.shelf.chunks[first + c] = (other[:, :, c * CH : (c + 1) * CH], lease)
        block.fill_(NAN)
    for start in (0, N, CH, 2 * CH + N):
        before = rows_of(bench.table, bench.blocks, 0)
        seen = bench.run([bench.span(start)])
        bench.streams.run()
        assert bench.pipe.failure is None
        assert all(torch.equal(seen[layer][:, start:], bench.shelf.rows[:, layer, start:]) for layer in range(3))
        assert torch.equal(seen[0][:, :start], before[:, :start])
    copies = [entry[1] // H for entry in bench.streams.trace if entry[0] == "copy"]
    assert (max(copies) == 2 * 3 * CH) == (staging == 100), "a run in one"


@pytest.mark.parametrize("skip", [0, N, CH - N, CH, CH + N, 2 * CH])
def test_tokens_at_the_beginning_may_be_left_out(skip: int) -> None:
    bench = Bench(2, (1, 1, 1))
    seen = bench.run([RestingSpan(bench.shelf.give(0, 3), skip, bench.blocks[skip // N :])])
    bench.streams.run()
    assert bench.pipe.failure is None
    assert all(torch.equal(seen[layer][:, skip:], bench.shelf.rows[:, layer, skip:]) for layer in range(2))


def test_who_waits_where_two_layers_do_not_fit() -> None:  # L15
    bench = Bench(4, (2,), staging=CH, ahead=1)
    trace = bench.streams.trace
    bench.pipe.begin([bench.span()])
    assert trace.count(("wait", "pages", "compute")) == 1 and ("wait", "load", "compute") not in trace
    assert trace.count(("wait", "pages", "load")) == 4
    assert copies(bench) == 6 and trace.count(("wait", "load", "pages")) == 4, "the first two are free; copies go on where there is room"
    for layer in range(4):
        bench.pipe.layer(layer)
        assert trace.count(("wait", "compute", "pages")) == layer + 1
    bench.pipe.end()
    assert trace.count(("wait", "compute", "pages")) == 4, "once a layer, for all loads"
    bench.streams.run()


def test_each_step_scatters_where_its_own_size_says() -> None:
    bench = Bench(3, (3,), staging=CH, slots=4, ahead=1)
    for chunks, aside in ((3, True), (1, False), (3, True), (2, False)):
        bench.streams.trace.clear()
        seen = bench.run([bench.span(0, chunks * CH)])
        bench.streams.run()
        assert (("record", "pages") in bench.streams.trace) == aside
        assert all(torch.equal(seen[layer][:, : chunks * CH], bench.shelf.rows[:, layer, : chunks * CH]) for layer in range(3))


def test_a_step_whose_end_cannot_be_ordered_has_failed(monkeypatch) -> None:
    """Two layers are queued, and compute cannot be made to wait for them: nobody knows what their pages hold."""
    bench = Bench(4, (2,), staging=CH, ahead=1)
    bench.pipe.begin([bench.span()])
    bench.pipe.layer(0)
    wait = bench.streams.wait

    def refused(stream: str, event: object) -> None:
        if stream == "compute":
            raise RuntimeError("device lost")
        wait(stream, event)

    monkeypatch.setattr(bench.streams, "wait", refused)
    bench.pipe.end()
    assert "device lost" in str(bench.pipe.failure)
    bench.streams.run()
    assert not bench.pipe.poll() and bench.shelf.lent() == 0


def test_who_waits() -> None:  # L14 L15
    bench = Bench(4, (2,), staging=CH, ahead=1, slots=4)
    trace = bench.streams.trace
    bench.pipe.begin([bench.span()])
    assert copies(bench) == 4 and not any(entry[0] == "wait" for entry in trace), "buffers are free, and compute waits for nothing yet"
    for layer in range(4):
        bench.pipe.layer(layer)
        assert trace.count(("wait", "compute", "load")) == layer + 1, "once a layer, for all loads"
        assert trace.count(("wait", "load", "compute")) == min(2 * (layer + 1), 4), "for the scatters out of the buffers that come next"
    bench.pipe.end()
    assert copies(bench) == 8 and sum(entry[0] == "wait" for entry in trace) == 8 and not bench.streams.queues["pages"]
    bench.streams.run()


@pytest.mark.usefixtures("turns")
def test_compute_waits_for_the_last_copy_of_a_layer() -> None:
    """Parts of several loads, of which some were copied early: whichever copy was queued last is behind all of them."""
    for seed in range(20):
        bench = Bench(4, (3, 2, 1), staging=CH, slots=bench_slots(seed), ahead=seed % 3, seed=seed)
        before = [rows_of(bench.table, bench.blocks, layer) for layer in range(4)]
        early = bench.pipe.early()
        first = 2 * CH
        spans = [RestingSpan(bench.shelf.give(2, 6), 0, bench.blocks[first // N :])]
        if early is None:
            spans.insert(0, RestingSpan(bench.shelf.give(0, 2), 0, bench.blocks[: first // N]))
        else:
            bench.pipe.more(early, bench.shelf.give(0, 2), 0, first)
            spans.append(RestingSpan((), 0, bench.blocks[: first // N], early))
        seen = bench.run(spans, steps=3)
        bench.streams.run()
        bench.check([(0, 6 * CH)], before, seen)


def bench_slots(seed: int) -> int:
    return [2, 3, 5, 9][seed % 4]


def test_events_are_used_again() -> None:
    bench = Bench(6, (3,), ahead=2)
    made = []
    for _ in range(4):
        bench.run([bench.span()])
        bench.streams.run()
        made.append(bench.streams.events_made)
    assert made[1] - made[0] == made[2] - made[1] == made[3] - made[2] <= 1, "one to see the end of the copies"


def test_steps_before_this_one_have_read_the_pages() -> None:
    bench = Bench(2, (1,))
    before, seen = rows_of(bench.table, bench.blocks, 0), []
    bench.compute(0, seen)
    bench.run([bench.span()])
    bench.streams.run()
    assert torch.equal(seen[0], before)


# ---- leases -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", ["load", "load twin"])
def test_memory_is_held_until_both_load_streams_are_through(monkeypatch, slow: str) -> None:  # L42 L43
    """The last copy may be over on one of them while the other one has not begun: an engine's own copies may hold it up."""
    monkeypatch.setattr(streams, "TURN_BYTES", 1)
    bench = Bench(1, (1, 1), staging=CH, slots=4)
    bench.streams.busy_while_asked, bench.streams.slow = False, slow
    bench.pipe.begin([bench.span()])
    bench.pipe.layer(0)
    bench.pipe.end()
    assert {entry[1] for entry in bench.streams.trace if entry[0] == "record"} >= {"load", "load twin"}
    while bench.streams.can_go_without(slow):
        bench.streams.step()
    assert bench.pipe.poll() and bench.shelf.lent() == 2
    bench.streams.run()
    assert not bench.pipe.poll() and bench.shelf.lent() == 0


@pytest.mark.usefixtures("turns")
@pytest.mark.parametrize("layers", range(5))
@pytest.mark.parametrize("seed", range(3))
def test_ended_early(layers: int, seed: int) -> None:  # L43
    """Whatever was queued still reads the memory, and no late row reaches the next owner of a block."""
    bench = Bench(4, (2, 2), seed=seed)
    bench.streams.busy_while_asked = False
    bench.pipe.begin([bench.span()])
    for layer in range(layers):
        bench.pipe.layer(layer)
    bench.pipe.end()
    assert bench.pipe.failure is None

    def write() -> None:
        for layer in bench.table.views:
            for view in layer:
                view.fill_(7)

    bench.streams.push(write)  # of the next step
    bench.shelf.forget()
    assert bench.pipe.poll() and bench.pipe.leases_held == 4 and not bench.shelf.gone, "copies are under way"
    bench.pipe.layer(layers)  # nothing
    bench.streams.run()
    assert all((view == 7).all() for layer in bench.table.views for view in layer)
    assert not bench.pipe.poll() and bench.pipe.leases_held == 0 and bench.shelf.gone


@pytest.mark.parametrize("what", ["copy", "write", "prepare", "record", "wait", "plan"])
@pytest.mark.parametrize("after", [0, 1, 5, 9])
def test_a_failure_of_the_device(what: str, after: int, monkeypatch) -> None:
    bench = Bench(4, (2, 1), seed=after)
    bench.streams.busy_while_asked = False
    where, calls = bench.streams if what in ("record", "wait") else bench.connector, 0
    real = getattr(where, what, None)

    def fails(*args, **kw):
        nonlocal calls
        calls += 1
        if calls > after:
            raise RuntimeError("device lost")
        return real(*args, **kw)

    if what == "plan":
        bench.shelf.chunks[1] = (torch.zeros(2, 4, CH, H, dtype=torch.float64), bench.shelf.leases[0])
    else:
        monkeypatch.setattr(where, what, fails)
    bench.pipe.begin([bench.span()])
    for layer in range(4):
        bench.pipe.layer(layer)
    bench.pipe.end()
    if what in ("prepare",) and after:
        assert bench.pipe.failure is None
    else:
        assert isinstance(bench.pipe.failure, ShapeError if what == "plan" else RuntimeError)
    touched = what == "copy" or any(entry[0] == "copy" for entry in bench.streams.trace)
    bench.shelf.forget()
    bench.pipe.poll()
    assert bench.pipe.leases_held == (3 if touched else 0), "released early, or kept for nothing"
    if what != "wait":  # without it nothing is in order any more
        bench.streams.run()
    monkeypatch.undo()
    bench.streams.busy_while_asked = True
    bench.pipe.close()
    assert bench.shelf.gone and bench.pipe.leases_held == 0


def test_a_device_that_cannot_be_asked_keeps_its_memory_until_the_end(monkeypatch) -> None:
    bench = Bench()
    bench.pipe.begin([bench.span()])
    for layer in range(4):
        bench.pipe.layer(layer)
    for _, leases in bench.pipe._late:
        assert len(leases) == 3
    monkeypatch.setattr("layerwise_kit.SimEvent.query", lambda self: 1 / 0)
    bench.pipe.end()
    assert bench.pipe.poll() and bench.shelf.lent() == 3
    bench.pipe.close()
    assert bench.shelf.lent() == 0


def test_close_waits_for_the_copies() -> None:  # L43
    bench = Bench()
    bench.streams.busy_while_asked = False
    bench.pipe.begin([bench.span()])
    closed = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        job = executor.submit(lambda: (bench.pipe.close(), closed.set()))
        time.sleep(0.05)
        assert not closed.is_set() and bench.shelf.lent() == 3
        bench.streams.run()
        job.result(20)
    assert bench.shelf.lent() == 0
    bench.pipe.close()


def test_the_next_step_and_any_thread_may_see_the_end() -> None:
    bench = Bench()
    bench.streams.busy_while_asked = False
    bench.run([bench.span(0, CH)], steps=1)
    assert bench.shelf.lent() == 1
    bench.streams.run()
    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(bench.pipe.poll).result() is False
    assert bench.shelf.lent() == 0
    bench.run([bench.span(0, CH)], steps=1)
    bench.streams.run()
    bench.pipe.begin([bench.span(CH, 2 * CH)])
    assert bench.shelf.lent() == 1
    bench.streams.busy_while_asked = True
    bench.pipe.close()


def test_memory_comes_back_before_the_step_ends() -> None:
    """When the last copy is over, not when the engine has computed its last layer."""
    bench = Bench(4, ahead=3, slots=40)
    bench.streams.busy_while_asked = False
    bench.pipe.begin([bench.span()])
    bench.streams.run()
    assert bench.pipe.poll() is False and bench.shelf.lent() == 0
    for layer in range(4):
        bench.pipe.layer(layer)
    bench.pipe.end()
    bench.streams.run()


def test_wrong_use() -> None:
    bench = Bench()
    with pytest.raises(ConfigError, match="ahead"):
        RestingPipe(bench.streams, bench.connector, staging_tokens=4, ahead=-1)
    bench.pipe.layer(3)  # nothing is under way
    bench.pipe.end()
    bench.pipe.begin([bench.span()])
    with pytest.raises(StepOrderError, match="another step"):
        bench.pipe.begin([])
    with pytest.raises(StepOrderError, match=r"next is layer\(0\)"):
        bench.pipe.layer(1)
    bench.pipe.close()
    for chunks, skip, blocks in ((1, 0, [1, 2, 3]), (1, N, [1, 2]), (0, 0, [1])):
        bench.pipe.begin([RestingSpan(bench.shelf.give(0, chunks), skip, blocks)])
        assert isinstance(bench.pipe.failure, ShapeError)
        bench.streams.run()
        assert not bench.pipe.poll() and bench.shelf.lent() == 0


# ---- before there are pages ---------------------------------------------------------------------------------------------------------


def tell(bench: Bench, start: int, end: int, steps: int, rng: random.Random) -> EarlyCopies | None:
    """Tokens ``start..end`` in chunks or more at a time; None if there was no room for any."""
    early = bench.pipe.early()
    if early is None:
        return None
    at = start
    while at < end:
        upto = min(end, (at // CH + rng.randrange(1, 3)) * CH)
        bench.pipe.more(early, bench.shelf.give(at // CH, -(-upto // CH)), at % CH, upto - at)
        at = upto
        for _ in range(rng.randrange(steps)):
            bench.streams.step()
    if rng.random() < 0.7:
        bench.pipe.fill(early)
    return early


@pytest.mark.usefixtures("turns")
@pytest.mark.parametrize("seed", range(24))
def test_copies_that_begin_early(monkeypatch, seed: int) -> None:  # L14 L17 L42
    """Random loads, of which some are told of before, between the steps and in the middle of others', and some of those never come."""
    rng = random.Random(seed)
    monkeypatch.setattr(resting, "EARLY_LAYERS", rng.choice([1, 2, 5, 9]))
    monkeypatch.setattr(resting, "EARLY_PARTS", rng.choice([1, 1, 2, 6]))
    layers, sizes = rng.randrange(1, 6), tuple(rng.randrange(1, 4) for _ in range(rng.randrange(2, 5)))
    bench = Bench(layers, sizes, staging=rng.choice([N, 3 * N, 1000]), slots=rng.choice([2, 3, 5, 12]), ahead=rng.randrange(4), seed=seed)
    total, came = len(bench.shelf.chunks) * CH, 0
    for _ in range(6):
        cut = sorted(rng.sample(range(0, total + 1, N), min(6, total // N + 1)))
        bounds = list(zip(cut[::2], cut[1::2], strict=False))
        early = {b: tell(bench, *b, 4, rng) for b in bounds if rng.random() < 0.6}
        unwanted = [tell(bench, *rng.choice(bounds), 4, rng) for _ in range(rng.randrange(2))]
        for one in unwanted:
            if one is not None and rng.random() < 0.7:
                bench.pipe.drop(one)
        before = [rows_of(bench.table, bench.blocks, layer) for layer in range(layers)]
        spans = [
            bench.span(*b) if (begun := early.get(b)) is None else RestingSpan((), 0, bench.blocks[b[0] // N : b[1] // N], begun)
            for b in bounds
        ]
        came += sum(span.early is not None for span in spans)
        rng.shuffle(spans)
        seen = bench.run(spans)
        for one in unwanted:
            if one is not None:
                bench.pipe.drop(one)
        bench.streams.run()
        assert bench.pipe.failure is None
        bench.check(bounds, before, seen)
        assert len(bench.pipe._free) == len(bench.pipe._slots) == len(set(map(id, bench.pipe._free))), "every buffer is free again"
    assert came > 0 or len(bench.pipe._slots) == 2
    bench.pipe.poll()
    assert bench.shelf.lent() == 0 and bench.pipe.leases_held == 0


@pytest.fixture
def three_early(monkeypatch) -> None:
    monkeypatch.setattr(resting, "EARLY_LAYERS", 3)
    monkeypatch.setattr(resting, "EARLY_PARTS", 1)


@pytest.mark.parametrize(("slots", "layers"), [(3, 1), (7, 1), (8, 2), (25, 7), (26, 8), (90, 8)])
def test_the_first_layer_of_a_long_load_comes_before_deeper_ones(slots: int, layers: int) -> None:
    bench = Bench(8, (1,) * 6, staging=CH, slots=slots)
    early = bench.pipe.early()
    for at in range(6):
        bench.pipe.more(early, bench.shelf.give(at, at + 1), 0, CH)
    assert early.cuts[0].layers == range(layers)
    assert [layer for layer, _ in early.cuts[0].copied].count(0) >= min(resting.EARLY_PARTS, slots - 2)


@pytest.mark.usefixtures("three_early")
def test_early_copies_leave_room_and_wait_for_nothing() -> None:
    bench = Bench(4, (4,), staging=CH, slots=11)
    bench.streams.busy_while_asked = False
    early = bench.pipe.early()
    bench.pipe.more(early, bench.shelf.give(0, 1), 0, CH)
    assert copies(bench) == 3 and sorted(early.cuts[0].copied) == [(0, 0), (1, 0), (2, 0)], "its first layer, and work until more is known"
    bench.pipe.more(early, bench.shelf.give(1, 4), 0, 3 * CH)
    assert copies(bench) == 9 and {(0, i) for i in range(4)} <= set(early.cuts[0].copied), "two buffers are left to others"
    bench.pipe.fill(early)
    assert copies(bench) == 9 and bench.pipe.early() is None
    assert not any(entry[0] == "wait" for entry in bench.streams.trace)
    bench.pipe.begin([RestingSpan((), 0, bench.blocks, early)])
    assert copies(bench) == 11, "all there is room for, nothing twice"
    for layer in range(4):
        bench.pipe.layer(layer)
    bench.pipe.end()
    assert copies(bench) == 16
    bench.streams.run()
    assert all(torch.equal(rows_of(bench.table, bench.blocks, i), bench.shelf.rows[:, i]) for i in range(4))


@pytest.mark.usefixtures("three_early")
def test_early_copies_are_as_many_as_there_is_room_for() -> None:
    bench = Bench(4, (1,), staging=CH, slots=9)
    early = bench.pipe.early()
    bench.pipe.more(early, bench.shelf.give(0, 1), 0, CH)
    assert copies(bench) == 3
    bench.pipe.fill(early)
    bench.pipe.fill(early)
    assert copies(bench) == 4, "all there is"
    bench.run([RestingSpan((), 0, bench.blocks, early)])
    bench.streams.run()
    assert torch.equal(rows_of(bench.table, bench.blocks, 3), bench.shelf.rows[:, 3])


@pytest.mark.usefixtures("three_early")
@pytest.mark.parametrize("filled", [True, False])
def test_what_was_told_piece_by_piece_is_cut_anew(filled: bool) -> None:
    """As it becomes known a layer is many copies; those of which nothing was copied are as few as its memory allows."""
    bench = Bench(6, (4, 2), staging=4 * CH, slots=30)
    early = bench.pipe.early()
    for at in range(6):
        bench.pipe.more(early, bench.shelf.give(at, at + 1), 0, CH)
    assert copies(bench) == 3 * 6
    if filled:
        bench.pipe.fill(early)
    bench.run([RestingSpan((), 0, bench.blocks, early)])
    bench.streams.run()
    assert copies(bench) == 3 * 6 + 3 * 2
    assert all(torch.equal(rows_of(bench.table, bench.blocks, i), bench.shelf.rows[:, i]) for i in range(6))
    assert len(bench.pipe._free) == 30


@pytest.mark.parametrize("slots", [4, 5, 9])
def test_layers_of_a_small_part_share_a_buffer(monkeypatch, slots: int) -> None:
    """Two layers of two chunks fill a buffer of four; it is free again when both were scattered."""
    monkeypatch.setattr(resting, "EARLY_PARTS", 1)
    bench = Bench(5, (2,), staging=4 * CH, slots=slots)
    early = bench.pipe.early()
    bench.pipe.more(early, bench.shelf.give(0, 2), 0, 2 * CH)
    bench.pipe.fill(early)
    assert copies(bench) == min(5, 2 * (slots - 2)) and len(bench.pipe._free) == max(2, slots - 3)
    bench.pipe.begin([RestingSpan((), 0, bench.blocks, early)])
    for layer in range(5):
        bench.pipe.layer(layer)
    bench.pipe.end()
    bench.streams.run()
    assert copies(bench) == 5 and len(bench.pipe._free) == slots == len(set(map(id, bench.pipe._free)))
    assert all(torch.equal(rows_of(bench.table, bench.blocks, i), bench.shelf.rows[:, i]) for i in range(5))


@pytest.mark.parametrize("layers", [4, 8])
def test_a_load_that_was_told_of_to_its_end_is_told_of_no_more(layers: int) -> None:
    bench = Bench(layers, (3,), staging=CH, slots=12)
    early = bench.pipe.early()
    bench.pipe.more(early, bench.shelf.give(0, 2), 0, 2 * CH)
    bench.pipe.fill(early)
    with pytest.raises(StepOrderError, match="to its end"):
        bench.pipe.more(early, bench.shelf.give(2, 3), 0, CH)
    bench.pipe.begin([RestingSpan((), 0, bench.blocks, early)])
    assert isinstance(bench.pipe.failure, ShapeError), "it has fewer tokens than there are blocks"
    bench.streams.run()
    bench.pipe.poll()
    assert bench.shelf.lent() == 0 and len(bench.pipe._free) == 12


def test_a_layer_waits_for_its_own_copies_alone(monkeypatch) -> None:
    """Also where its buffer holds others."""
    monkeypatch.setattr(resting, "EARLY_PARTS", 1)
    bench = Bench(5, (1,), staging=8 * CH, slots=7)
    bench.streams.busy_while_asked = False
    early = bench.pipe.early()
    bench.pipe.more(early, bench.shelf.give(0, 1), 0, CH)
    rooms = early.cuts[0].copied
    assert len(rooms) == 5 and len({id(room.slot) for room in rooms.values()}) == 1
    assert len({id(room.copied) for room in rooms.values()}) == 5
    bench.run([RestingSpan((), 0, bench.blocks, early)])
    bench.streams.run()
    assert all(torch.equal(rows_of(bench.table, bench.blocks, i), bench.shelf.rows[:, i]) for i in range(5))


def test_buffers_that_are_slices_of_one_block(monkeypatch) -> None:
    block, taken = torch.empty(64 * CH * H), 0

    def slice_of(connector: SimConnector, tokens: int) -> torch.Tensor:
        nonlocal taken
        taken += connector.num_planes * tokens * connector.hidden
        return block[taken - connector.num_planes * tokens * connector.hidden : taken]

    monkeypatch.setattr(SimConnector, "new_staging", slice_of)
    bench = Bench(4, (3,), slots=4, staging=CH)
    seen = bench.run([bench.span()])
    bench.streams.run()
    assert bench.pipe.failure is None and all(torch.equal(seen[i], bench.shelf.rows[:, i]) for i in range(4))


def test_early_copies_that_nobody_wants_keep_the_memory_until_they_are_over() -> None:  # L43
    bench = Bench(4, (2, 1), slots=6)
    bench.streams.busy_while_asked = False
    early = bench.pipe.early()
    bench.pipe.more(early, bench.shelf.give(0, 3), 0, 3 * CH)
    bench.shelf.forget()
    assert bench.pipe.leases_held == 3
    bench.pipe.drop(early)
    bench.pipe.drop(early)
    assert bench.pipe.poll() and bench.pipe.leases_held == 3 and not bench.shelf.gone
    bench.streams.run()
    assert not bench.pipe.poll() and bench.shelf.gone


def test_close_gives_up_early_copies() -> None:
    bench = Bench(4, (2, 1), slots=6)
    for _ in range(2):
        early = bench.pipe.early()
        if early is not None:
            bench.pipe.more(early, bench.shelf.give(0, 1), 0, CH)
    bench.pipe.close()
    assert bench.shelf.lent() == 0 and bench.pipe.leases_held == 0 and len(bench.pipe._free) == 6


@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("what", ["copy", "record"])
def test_a_device_that_fails_early(what: str, after: int, monkeypatch) -> None:
    bench = Bench(4, (2, 1), slots=8, seed=after)
    where, calls = bench.streams if what == "record" else bench.connector, 0
    real = getattr(where, what)

    def fails(*args, **kw):
        nonlocal calls
        calls += 1
        if calls > after:
            raise RuntimeError("device lost")
        return real(*args, **kw)

    monkeypatch.setattr(where, what, fails)
    early = bench.pipe.early()
    try:
        bench.pipe.more(early, bench.shelf.give(0, 2), 0, 2 * CH)
        bench.pipe.fill(early)
    except RuntimeError:
        pass
    else:
        assert after > 3
    monkeypatch.undo()
    bench.pipe.drop(early)
    assert len(bench.pipe._free) == 8
    bench.streams.run()
    seen = bench.run([bench.span()])
    bench.streams.run()
    assert bench.pipe.failure is None and all(torch.equal(seen[i], bench.shelf.rows[:, i]) for i in range(4))
    bench.pipe.poll()
    assert bench.shelf.lent() == 0


def test_pages_for_other_tokens_than_were_told() -> None:
    bench = Bench(4, (2, 1), slots=6)
    early = bench.pipe.early()
    bench.pipe.more(early, bench.shelf.give(0, 2), 0, 2 * CH)
    bench.pipe.begin([RestingSpan((), 0, bench.blocks[:1], early)])
    assert isinstance(bench.pipe.failure, ShapeError) and len(bench.pipe._free) == 6
    bench.streams.run()
    bench.pipe.poll()
    assert bench.shelf.lent() == 0
    with pytest.raises(ShapeError, match="more than"):
        bench.pipe.more(bench.pipe.early(), bench.shelf.give(0, 1), N, CH)
    bench.pipe.close()
    assert bench.shelf.lent() == 0
    with pytest.raises(ConfigError, match="2 staging buffers"):
        RestingPipe(bench.streams, bench.connector, staging_tokens=4, slots=1)


class Trouble:
    """A device that fails at random, while ``share`` is more than 0."""

    def __init__(self, monkeypatch, rng: random.Random) -> None:
        self.share = 0.0
        for name in ("copy", "write"):
            real = getattr(SimConnector, name)

            def call(connector, *args, real=real) -> None:
                if rng.random() < self.share:
                    raise RuntimeError("the device failed")
                real(connector, *args)

            monkeypatch.setattr(SimConnector, name, call)


class Steps:
    """Random steps of random loads, some of which began early, by a device that may fail; and what each layer's computation saw."""

    def __init__(self, seed: int, monkeypatch) -> None:
        rng = self.rng = random.Random(seed)
        monkeypatch.setattr(streams, "TURN_BYTES", rng.choice([1, 200, 2000, 32 << 20]))
        sizes = tuple(rng.randrange(1, 4) for _ in range(rng.randrange(1, 4)))
        staging, slots = rng.choice([N, 2 * N, 3 * N, 5 * N, 1000]), rng.choice([2, 3, 4, 7, 9, 20])
        self.bench = Bench(rng.randrange(1, 7), sizes, staging=staging, slots=slots, ahead=rng.randrange(4), seed=seed)
        self.bench.streams.busy_while_asked = rng.random() < 0.5
        self.trouble = Trouble(monkeypatch, rng)
        self.total = len(self.bench.shelf.chunks) * CH
        self.unused: list[EarlyCopies] = []
        self.seen: list[tuple[list[tuple[int, int]], list[torch.Tensor], int, torch.Tensor]] = []  # loaded, before it, layer, rows

    def tell(self, start: int, end: int) -> EarlyCopies | None:
        early, at = self.bench.pipe.early(), start
        if early is None:
            return None
        try:
            while at < end:
                upto = min(end, at + N * self.rng.randrange(1, 5))
                self.bench.pipe.more(early, self.bench.shelf.give(at // CH, -(-upto // CH)), at % CH, upto - at)
                at = upto
            if self.rng.random() < 0.5:
                self.bench.pipe.fill(early)
        except RuntimeError:
            self.bench.pipe.drop(early)
            return None
        return early

    def go_on(self, most: int) -> None:
        for _ in range(self.rng.randrange(most)):
            self.bench.streams.step()

    def owned_by_others(self) -> list[torch.Tensor]:
        """The blocks' former owners write them; what they hold then."""
        bench, rows = self.bench, []
        noise = torch.Generator().manual_seed(self.rng.randrange(1 << 30))

        @torch.inference_mode()
        def write() -> None:
            blocks = torch.as_tensor(bench.blocks)
            for view in (view for views in bench.table.views for view in views):
                view[blocks] = torch.randn(view[blocks].shape, generator=noise)
            rows.extend(rows_of(bench.table, bench.blocks, layer) for layer in range(bench.layers))

        bench.streams.push(write)
        return rows

    def step(self) -> None:
        rng, bench, pipe = self.rng, self.bench, self.bench.pipe
        self.trouble.share = rng.choice([0, 0, 0, 0.05])
        ends = sorted(rng.sample(range(0, self.total + 1, N), min(2 * rng.randrange(1, 4), (self.total // N + 1) // 2 * 2)))
        bounds, spans = list(zip(ends[::2], ends[1::2], strict=True)), []
        for start, end in bounds:
            early = self.tell(start, end) if rng.random() < 0.6 else None
            span = bench.span(start, end) if early is None else RestingSpan((), 0, bench.blocks[start // N : end // N], early)
            spans.append(span)
            self.go_on(6)
        while self.unused:
            pipe.drop(self.unused.pop())
        rng.shuffle(spans)
        before = self.owned_by_others()
        pipe.begin(spans)
        for layer in range(bench.layers if rng.random() < 0.8 else rng.randrange(bench.layers)):
            pipe.layer(layer)
            if pipe.failure is None:
                bench.streams.push(lambda layer=layer: self.seen.append((bounds, before, layer, rows_of(bench.table, bench.blocks, layer))))
            self.go_on(rng.choice([1, 3, 12]))
            if rng.random() < 0.15 and (early := self.tell(0, self.total)) is not None:
                self.unused.append(early)
        pipe.end()
        assert pipe.failure is None or self.trouble.share

    def check(self) -> None:
        bench, pipe = self.bench, self.bench.pipe
        for bounds, before, layer, rows in self.seen:
            wanted = before[layer].clone()
            for start, end in bounds:
                wanted[:, start:end] = bench.shelf.rows[:, layer, start:end]
            assert torch.equal(rows, wanted), f"layer {layer} was computed of other rows"
        assert pipe.poll() is False and bench.shelf.lent() == 0 and pipe.leases_held == 0
        assert {id(slot) for slot in pipe._free} == {id(slot) for slot in pipe._slots} and len(pipe._free) == len(pipe._slots)
        assert not any(slot.used for slot in pipe._slots)


@pytest.mark.parametrize("seed", range(60))
def test_random_steps_of_a_device_that_fails_now_and_then(seed: int, monkeypatch) -> None:
    """No wrong row, and in the end every buffer is free and all memory has gone back."""
    steps = Steps(seed, monkeypatch)
    for _ in range(steps.rng.randrange(2, 6)):
        steps.step()
    steps.trouble.share = 0.0
    while steps.unused:
        steps.bench.pipe.drop(steps.unused.pop())
    steps.bench.streams.run()
    steps.check()


# ---- an engine's loads --------------------------------------------------------------------------------------------------------------


class Reader:
    def __init__(self, store: Store, record: ChunkRecord, index: int) -> None:
        self.store, self.record, self.index = store, record, index

    def rest(self) -> Resting | None:
        if self.index in self.store.rest_fails:
            raise OSError("gone")
        return None if self.index in self.store.elsewhere else self.store.shelf.give(self.index, self.index + 1)[0]

    def read(self, layer: int, out: torch.Tensor) -> torch.Tensor:
        self.store.reads.append((self.index, layer))
        return out.copy_(self.store.shelf.rows[:, layer, self.index * CH : (self.index + 1) * CH])


class Store:
    keeps_leases = True

    def __init__(self, shelf: Shelf, cheap: bool) -> None:
        self.shelf, self.cheap_contains = shelf, cheap
        self.opened = 0
        self.readers: dict[object, Reader] = {}
        self.elsewhere: set[int] = set()
        self.rest_fails: set[int] = set()
        self.reads: list[tuple[int, int]] = []
        self.loaded_keys: list[list[object]] = []

    def loaded(self, keys) -> None:
        self.loaded_keys.append(list(keys))

    def open_layers(self, key):
        self.opened += 1
        return self.readers.get(key)


class Rig:
    """Two sequences of three chunks each; of each, positions ``start..end`` are loaded."""

    def __init__(
        self,
        monkeypatch=None,
        *,
        cheap: bool = True,
        seed: int = 0,
        host_bytes: int = 1 << 16,
        layered: bool = True,
        slots: int = 2,
        salt: str = "",
    ) -> None:
        self.layers, self.g, self.table = 4, geometry(4), pages(4, seed=seed)
        self.shelf = Shelf(4, [2, 1, 3], seed)
        self.store = Store(self.shelf, cheap)
        self.streams = NullStreams() if monkeypatch is None else SimStreams(seed)
        if monkeypatch is not None:
            monkeypatch.setattr(loading, "build", lambda table, **_: SimConnector(table, self.streams))
        self.wholes: list[LoadRequest] = []
        self.lowest = list
        self.loads = LayerLoads(
            self.g, self.store, self.table, device=torch.device("cpu"), host_bytes=host_bytes, lowest=lambda values: self.lowest(values),
            whole=self.wholes.append, streams=self.streams, resting_bytes=3 * N * 2 * H * 4, layered=layered,
            ahead_bytes=slots * 3 * N * 2 * H * 4,
        )  # fmt: skip
        self.salt = salt
        self.blocks = random.Random(seed).sample(range(40), 6 * CH // N)
        self.tokens = [tuple(range(100 * i, 100 * i + 3 * CH)) for i in (1, 2)]
        for i, ids in enumerate(self.tokens):
            for c in ChunkedTokenDatabase(CH).chunks(ids):
                record = ChunkRecord(CacheKind.KV, self.g, c.start, ids[c.start : c.end], c.digest, c.parent, salt)
                self.store.readers[record.key] = Reader(self.store, record, 3 * i + c.index)

    def load(self, which: int, start: int = 0, end: int = 3 * CH) -> LoadRequest:
        ids = self.tokens[which]
        digests = tuple(c.digest for c in ChunkedTokenDatabase(CH).chunks(ids))[: -(-end // CH)]
        blocks = self.blocks[which * 3 * CH // N :][: end // N]
        return LoadRequest(which, f"r{which}", self.salt, start, end, tuple(blocks), digests, ids[: -(-end // CH) * CH])

    def tell(self, which: int, start: int = 0, end: int = 3 * CH, *, told: bool = True) -> bool:
        """The load is to come: in two pieces, if it is of more than one chunk."""
        chunks, first = ChunkedTokenDatabase(CH).chunks(self.tokens[which]), min((start // CH + 1) * CH, end)
        good = self.loads.early(which, self.salt, start, first, chunks, list(self.tokens[which]))
        if good and first < end:
            good = self.loads.early(which, self.salt, first, end, chunks, list(self.tokens[which]))
        if good and told:
            self.loads.early_told(which)
        return good

    def run(self, *loads: LoadRequest, layers: int = 4):
        self.loads.begin(loads)
        for layer in range(layers):
            self.loads.layer(layer)
        return self.loads.end()

    def is_loaded(self, which: int, start: int = 0, end: int = 3 * CH) -> bool:
        first = which * 3 * CH
        blocks = self.blocks[(first + start) // N : (first + end) // N]
        return all(
            torch.equal(rows_of(self.table, blocks, i), self.shelf.rows[:, i, first + start : first + end]) for i in range(self.layers)
        )


@pytest.fixture
def rig():
    made: list[Rig] = []

    def make(*args, **kw) -> Rig:
        made.append(Rig(*args, **kw))
        return made[-1]

    yield make
    for one in made:
        one.streams.busy_while_asked = True
        one.loads.close()
        one.loads.close()
        assert one.shelf.lent() == 0 and one.loads.arena.outstanding == 0


def test_the_store_is_told_what_was_loaded(rig) -> None:
    r = rig()
    r.store.elsewhere = {4}  # read, not copied from where it lies
    r.tell(0, N, 3 * CH)
    outcomes = r.run(r.load(0, N), r.load(1))
    keys = [[reader.record.key for reader in r.store.readers.values() if reader.index // 3 == i] for i in range(2)]
    assert [(o.problem, o.resting) for o in outcomes] == [(None, True), (None, False)] and r.store.loaded_keys == keys
    r.store.readers[keys[1][1]].record = r.store.readers[keys[0][1]].record  # another's chunk
    (outcome,) = r.run(r.load(1))
    assert outcome.problem is not None and r.store.loaded_keys == keys


@pytest.mark.parametrize("cheap", [True, False])
@pytest.mark.parametrize(("start", "end"), [(0, 3 * CH), (N, 3 * CH), (0, 3 * CH - N), (CH, 2 * CH), (CH + N, 3 * CH - N)])
def test_chunks_in_memory_are_loaded_from_there(rig, cheap: bool, start: int, end: int) -> None:
    r = rig(cheap=cheap)
    before = rows_of(r.table, r.blocks, 0)
    outcomes = r.run(r.load(0, start, end), r.load(1))
    assert [(o.problem, o.layerwise, o.resting) for o in outcomes] == [(None, True, True)] * 2
    assert r.is_loaded(0, start, end) and r.is_loaded(1)
    assert torch.equal(rows_of(r.table, r.blocks, 0)[:, :start], before[:, :start]), "the engine's own blocks are left alone"
    assert torch.equal(rows_of(r.table, r.blocks, 0)[:, end : 3 * CH], before[:, end : 3 * CH])
    assert not r.store.reads and not r.wholes and r.loads.arena.high_water == 0, "nothing is fetched, no host memory is taken"
    assert r.shelf.lent() == 0
    threads = [t.name for t in threading.enumerate() if t in set(r.loads._readers._threads)]
    assert bool(threads) == (not cheap), "headers that cost no round trip are read on the engine's thread"


@pytest.mark.parametrize("elsewhere", [{0}, {2}, {0, 1, 2}])
def test_a_load_of_which_some_chunks_lie_elsewhere_is_fetched(rig, elsewhere: set[int]) -> None:
    r = rig()
    r.store.elsewhere = elsewhere
    r.loads.begin([r.load(0), r.load(1)])
    assert sum(lease.holders - 1 for lease in r.shelf.leases[:2]) == 0, "what is not used is given back at once"
    for layer in range(4):
        r.loads.layer(layer)
    outcomes = r.loads.end()
    assert [(o.problem, o.layerwise, o.resting) for o in outcomes] == [(None, True, False), (None, True, True)]
    assert r.is_loaded(0) and r.is_loaded(1)
    assert sorted(r.store.reads) == [(chunk, layer) for chunk in range(3) for layer in range(4)]


def test_an_engine_without_layers_loads_at_once_from_there(rig) -> None:
    r = rig(layered=False)
    outcomes = r.loads.at_once([r.load(0, N, 3 * CH - N), r.load(1)])
    assert [(o.problem, o.resting) for o in outcomes] == [(None, True)] * 2 and not r.loads.active and not r.loads.unseen
    assert r.is_loaded(0, N, 3 * CH - N) and r.is_loaded(1) and not r.store.reads and not r.wholes and r.shelf.lent() == 0


def test_an_engine_without_layers_reads_whole_what_lies_elsewhere(rig) -> None:
    r = rig(layered=False)
    r.store.elsewhere = {0}
    first = r.load(0)
    outcomes = r.loads.at_once([first, r.load(1)])
    assert [(o.problem, o.layerwise, o.resting) for o in outcomes] == [(None, False, False), (None, True, True)]
    assert r.wholes == [first] and r.is_loaded(1) and not r.store.reads and r.loads.arena.high_water == 0


def test_what_is_loaded_at_once_is_waited_for(rig, monkeypatch) -> None:
    for seed in range(8):
        r = rig(monkeypatch, layered=False, seed=seed)
        assert [o.problem for o in r.loads.at_once([r.load(0), r.load(1)])] == [None] * 2
        found: list[bool] = []
        r.streams.push(lambda r=r, found=found: found.append(r.is_loaded(0) and r.is_loaded(1)))
        r.streams.run()
        assert found == [True]


def test_chunks_that_cannot_be_held(rig) -> None:
    r = rig()
    r.store.rest_fails = {1}
    outcomes = r.run(r.load(0), r.load(1))
    assert isinstance(outcomes[0].problem, OSError) and outcomes[1].problem is None and r.is_loaded(1)
    assert r.shelf.lent() == 0


def test_ranks_that_do_not_agree_hold_nothing(rig) -> None:
    r = rig()
    r.lowest = lambda values: [0] * len(values)
    r.loads.begin([r.load(0), r.load(1)])
    assert r.shelf.lent() == 0
    for layer in range(4):
        r.loads.layer(layer)
    assert all(isinstance(o.problem, QcapError) for o in r.loads.end())


@pytest.mark.usefixtures("turns")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mixed", [False, True])
def test_a_late_device(rig, monkeypatch, seed: int, mixed: bool) -> None:  # L15 L42 L47
    """Loads of both kinds in one step: each layer is there when it is computed, and memory goes only when nothing reads it."""
    r = rig(monkeypatch, seed=seed)
    r.streams.busy_while_asked = mixed  # what is fetched needs memory again
    if mixed:
        r.store.elsewhere = {4}
    r.loads.begin([r.load(0), r.load(1)])
    lent = 3 if mixed else 6
    assert r.shelf.lent() == lent
    seen: list[torch.Tensor] = []
    for layer in range(4):
        r.loads.layer(layer)
        r.streams.push(lambda layer=layer: seen.append(rows_of(r.table, r.blocks, layer)))
        r.streams.step()
    outcomes = r.loads.end()
    assert [o.problem for o in outcomes] == [None] * 2 and [o.resting for o in outcomes] == [True, not mixed]
    assert mixed or r.shelf.lent() == lent, "the device has done next to nothing yet"
    r.streams.run()
    assert all(torch.equal(seen[layer], r.shelf.rows[:, layer]) for layer in range(4))
    assert r.loads.poll() is False and r.shelf.lent() == 0


@pytest.mark.parametrize("layers", range(4))
def test_a_step_that_was_given_up(rig, monkeypatch, layers: int) -> None:  # L43
    r = rig(monkeypatch)
    r.streams.busy_while_asked = False
    r.loads.begin([r.load(0)])
    for layer in range(layers):
        r.loads.layer(layer)
    (outcome,) = r.loads.end(lost=True)
    assert "did not ask for layers" in str(outcome.problem) and not r.loads.unseen
    assert r.shelf.lent() == 3
    r.loads.begin([r.load(1)])  # the next step
    for layer in range(4):
        r.loads.layer(layer)
    assert [o.problem for o in r.loads.end()] == [None]
    r.streams.run()
    assert r.is_loaded(1) and r.loads.poll() is False and r.shelf.lent() == 0


def test_begun_twice_and_closed_in_the_middle(rig) -> None:  # L43
    r = rig()
    r.loads.begin([r.load(0)])
    r.loads.begin([r.load(1)])
    r.loads.layer(0)
    r.loads.close()
    assert r.shelf.lent() == 0 and not r.loads.active and r.loads.end() == []


def test_an_engine_that_does_not_ask(rig) -> None:
    r = rig()
    (outcome,) = r.run(r.load(0), layers=0)
    assert "did not ask for layers 0..3" in str(outcome.problem) and r.loads.unseen and r.shelf.lent() == 0


@pytest.mark.parametrize("layer", range(4))
def test_a_device_that_fails_fails_the_loads_from_memory(rig, monkeypatch, layer: int) -> None:
    r = rig(monkeypatch)
    r.store.elsewhere = {4}
    real = SimConnector.write

    def write(self, index, staged, blocks):
        if index >= layer:
            raise RuntimeError("device lost")
        real(self, index, staged, blocks)

    monkeypatch.setattr(SimConnector, "write", write)
    outcomes = r.run(r.load(0), r.load(1))
    assert str(outcomes[0].problem) == "device lost" and outcomes[1].problem is None
    r.streams.run()
    r.loads.poll()
    assert r.is_loaded(1) and r.shelf.lent() == 0


# ---- loads that are told of before -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layered", [True, False])
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(("start", "end"), [(0, 3 * CH), (N, 3 * CH), (0, 3 * CH - N), (CH, 2 * CH), (CH + N, 3 * CH - N)])
def test_a_load_that_was_told_of_before(rig, start: int, end: int, told: bool, layered: bool) -> None:
    r = rig(slots=9, layered=layered)
    before = rows_of(r.table, r.blocks, 0)
    assert r.tell(1, start, end, told=told)
    assert torch.equal(rows_of(r.table, r.blocks, 0), before), "no page is written before its blocks are known"
    opened = r.store.opened
    loads = [r.load(0, N, 2 * CH), r.load(1, start, end)]
    outcomes = r.run(*loads) if layered else r.loads.at_once(loads)
    assert [(o.problem, o.resting, o.early) for o in outcomes] == [(None, True, False), (None, True, True)]
    assert r.is_loaded(0, N, 2 * CH) and r.is_loaded(1, start, end)
    assert r.store.opened - opened == 2, "what was checked once is not looked at again"
    wanted = rows_of(r.table, r.blocks, 0)[:, 3 * CH :]
    assert torch.equal(wanted[:, :start], before[:, 3 * CH :][:, :start]) and torch.equal(wanted[:, end:], before[:, 3 * CH :][:, end:])
    assert r.shelf.lent() == 0 and r.loads._pipe.leases_held == 0


@pytest.mark.usefixtures("turns")
@pytest.mark.parametrize("seed", range(8))
def test_early_loads_on_a_device_that_is_late(rig, monkeypatch, seed: int) -> None:  # L14 L42
    r = rig(monkeypatch, slots=7, seed=seed)
    for _ in range(3):
        r.tell(1)
        for _ in range(seed):
            r.streams.step()
        assert [(o.problem, o.early) for o in r.run(r.load(0), r.load(1))] == [(None, False), (None, True)]
        r.streams.run()
        assert r.is_loaded(0) and r.is_loaded(1)
    r.loads.poll()
    assert r.shelf.lent() == 0


@pytest.mark.parametrize(("start", "end", "why"), [(N, 3 * CH, "start"), (0, 2 * CH, "end"), (0, 3 * CH, "salt")])
def test_a_load_that_is_not_what_was_told_of_comes_as_any(rig, start: int, end: int, why: str) -> None:
    r = rig(slots=9)
    assert r.tell(0)
    if why == "salt":  # the same request, with other chunks by now
        r.loads._early[0].digests[1] = "another"
    (outcome,) = r.run(r.load(0, start, end))
    assert outcome.problem is None and outcome.resting and not outcome.early and r.is_loaded(0, start, end)
    assert r.shelf.lent() == 0 and len(r.loads._pipe._free) == 9


def test_a_load_that_was_told_of_and_never_comes(rig) -> None:
    r = rig(slots=30)
    assert r.tell(0, told=False) and r.tell(1)
    assert [o.problem for o in r.run(r.load(1))] == [None] and r.is_loaded(1)
    assert r.shelf.lent() == 0 and not r.loads._early, "the step that brought another is the one that it would have come with"
    assert r.tell(0)
    r.loads.forget_early()
    assert r.shelf.lent() == 0 and len(r.loads._pipe._free) == 30
    assert r.tell(0)  # and closed


def test_what_cannot_begin_early(rig, monkeypatch) -> None:
    assert not rig(slots=2).tell(0), "no buffers to spare"
    assert not rig(slots=9, cheap=False).tell(0), "a store that is asked over a wire"
    r = rig(slots=9)
    r.store.keeps_leases = False
    assert not r.tell(0)
    r = rig(slots=9)
    r.store.elsewhere = {1}
    assert not r.tell(0) and r.shelf.lent() == 0 and not r.loads._early, "begun with the first chunk, given up with the second"
    assert [(o.problem, o.resting) for o in r.run(r.load(0))] == [(None, False)] and r.is_loaded(0)
    r = rig(slots=9)
    chunks = ChunkedTokenDatabase(CH).chunks(r.tokens[0])
    assert r.loads.early(0, "", 0, CH, chunks, r.tokens[0]) and not r.loads.early(0, "", 2 * CH, 3 * CH, chunks, r.tokens[0]), "a hole"
    assert not r.loads.early(1, "", 0, CH, chunks, r.tokens[1]), "other tokens than the chunk's"
    assert r.shelf.lent() == 0 and len(r.loads._pipe._free) == 9
    r = rig(slots=9)
    monkeypatch.setattr(r.loads._pipe, "fill", lambda early: 1 / 0)
    assert r.tell(0) and not r.loads._early and r.shelf.lent() == 0
    r.loads.early_told(5)  # nobody knows of it


def test_chunks_of_two_edits_do_not_begin_early_as_one(rig) -> None:
    """The chunk before the first that is loaded is looked at too, as for any load."""
    r = rig(slots=9, salt="s")
    keys = list(r.store.readers)
    for index in (1, 2):
        reader = r.store.readers[keys[index]]
        reader.record = replace(reader.record, edit='{"name": "b"}')
    assert r.tell(0, CH, 3 * CH)
    (outcome,) = r.run(r.load(0, CH, 3 * CH))
    assert isinstance(outcome.problem, QcapError) and "of an edit" in str(outcome.problem) and r.shelf.lent() == 0
    del r.store.readers[keys[0]]  # it may be missing
    assert r.tell(0, CH, 3 * CH)
    (outcome,) = r.run(r.load(0, CH, 3 * CH))
    assert outcome.problem is None and outcome.early and r.is_loaded(0, CH, 3 * CH)


def test_ranks_that_disagree_drop_what_began_early(rig) -> None:
    r = rig(slots=9)
    assert r.tell(0)
    r.lowest = lambda values: [0] * len(values)
    before = rows_of(r.table, r.blocks, 0)
    (outcome,) = r.run(r.load(0))
    assert outcome.problem is not None and r.shelf.lent() == 0 and len(r.loads._pipe._free) == 9
    assert torch.equal(rows_of(r.table, r.blocks, 0), before)
    r.lowest = lambda values: 1 / 0
    assert r.tell(0)
    (outcome,) = r.run(r.load(0))
    assert outcome.problem is not None and r.shelf.lent() == 0 and len(r.loads._pipe._free) == 9


def test_a_mistake_of_ours_fails_loads_and_nothing_else(rig, monkeypatch) -> None:
    r = rig()
    monkeypatch.setattr(r.loads._pipe, "layer", lambda index: 1 / 0)
    outcomes = r.run(r.load(0))
    assert isinstance(outcomes[0].problem, ZeroDivisionError) and r.shelf.lent() == 0


def test_loads_that_cannot_even_be_given_up_raise_nothing(rig, monkeypatch) -> None:
    r = rig()
    r.store.elsewhere = {0}  # load 0 is fetched
    r.loads.begin([r.load(0), r.load(1)])
    jobs = [entry.job for entry in r.loads._entries if entry.job is not None]
    assert len(jobs) == 1
    real = jobs[0].close

    def close() -> None:
        real()
        raise RuntimeError("device lost")

    monkeypatch.setattr(jobs[0], "close", close)
    monkeypatch.setattr(jobs[0], "layer", lambda index: 1 / 0)
    for layer in range(4):
        r.loads.layer(layer)
    outcomes = r.loads.end()
    assert isinstance(outcomes[0].problem, ZeroDivisionError) and outcomes[1].problem is not None
    r.loads.close()
    assert r.shelf.lent() == 0


def test_how_much_device_memory() -> None:
    g, table = geometry(2), pages(2, blocks=10)
    loads = LayerLoads(g, None, table, device=torch.device("cpu"), host_bytes=4096, lowest=list, whole=print)  # type: ignore[arg-type]
    assert loads.device_bytes == loads._pipe.nbytes == 2 * 10 * N * 2 * H * 4, "no more than the pages"
    loads.close()
    loads = LayerLoads(g, None, table, device=torch.device("cpu"), host_bytes=4096, lowest=list, whole=print, resting_bytes=1)  # type: ignore[arg-type]
    assert loads.device_bytes == 2 * N * 2 * H * 4, "at least a block"
    loads.close()
    row, more = 2 * H * 4, 1 << 30
    loads = LayerLoads(
        g, None, table, device=torch.device("cpu"), host_bytes=4096, lowest=list, whole=print, resting_bytes=3 * N * row, ahead_bytes=more,  # type: ignore[arg-type]
    )  # fmt: skip
    assert loads.device_bytes == 2 * 10 // 3 * 3 * N * row, "no more than all layers of the pages, whatever may be used"
    loads.close()


def test_a_store_in_memory() -> None:
    """The real one: chunks that came with a lease are loaded from where they came in; without one they are read."""
    g, table, shelf = geometry(4), pages(4), Shelf(4, [3])
    backend = open_backend("memory://resting-loads")
    ids = tuple(range(3 * CH))
    chunks = ChunkedTokenDatabase(CH).chunks(ids)
    for c, (tensor, lease) in zip(chunks, shelf.chunks, strict=True):
        lease.hold()
        record = ChunkRecord(CacheKind.KV, g, c.start, ids[c.start : c.end], c.digest, c.parent)
        backend.store(record, tensor, lease=lease).add_done_callback(lambda _, lease=lease: lease.release())
    assert backend.drain(20)
    loads = LayerLoads(g, backend, table, device=torch.device("cpu"), host_bytes=1 << 16, lowest=list, whole=print)  # type: ignore[arg-type]
    load = LoadRequest(1, "r", "", 0, 3 * CH, tuple(range(3 * CH // N)), tuple(c.digest for c in chunks), ids)
    loads.begin([load])
    for layer in range(4):
        loads.layer(layer)
    (outcome,) = loads.end()
    assert outcome.problem is None and outcome.resting and backend.counters()["layers_loaded"] == 0
    assert all(torch.equal(rows_of(table, range(3 * CH // N), i), shelf.rows[:, i]) for i in range(4))
    loads.close()
    backend.close()
    assert chunk_key(CacheKind.KV, g, chunks[0].digest) and isinstance(loads._gear.connector, PagedConnector)


def test_a_lazy_reader_asks_its_object() -> None:
    shelf = Shelf(4, [1])
    store = Store(shelf, True)
    store.readers["key"] = Reader(store, None, 0)  # type: ignore[arg-type]
    chunk = LazyReader(store, "key").rest()  # type: ignore[arg-type]
    assert chunk is not None and chunk.tensor is shelf.chunks[0][0]
    chunk.lease.release()
    store.elsewhere = {0}
    assert LazyReader(store, "key").rest() is None  # type: ignore[arg-type]
