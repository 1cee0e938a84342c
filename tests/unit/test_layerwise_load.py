"""Loading layer by layer: order, waits, memory, failures."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from layerwise_kit import CH, Bench, H, N, Pool, SimConnector, SimStreams, moves, pages, rows_of

from qcap.connectors import PagedConnector
from qcap.errors import ConfigError, ObjectCorrupt, ShapeError, StepOrderError
from qcap.layerwise import ChunkFailed, LayerwiseLoad, LoadBatch, LoadGear, NullStreams, Span, streams_for

T_S = 30.0


class Inline:
    """An executor that runs what it is given when :meth:`turn` says so, in order."""

    def __init__(self) -> None:
        self.jobs: list = []

    def submit(self, call, *args):
        self.jobs.append(lambda: call(*args))
        return Future()

    def turn(self) -> bool:
        if self.jobs:
            self.jobs.pop(0)()
        return bool(self.jobs)


def make(bench: Bench, *, start: int = 0, end: int | None = None, first: int = 0, **options) -> LayerwiseLoad:
    """A load of positions start..end, over the bench's first chunks."""
    end = len(bench.records) * CH if end is None else end
    span = Span(len(bench.tokens), start, end, CH)
    keys = [r.key for r in bench.records[span.first_chunk : span.first_chunk + span.chunks]]
    return LayerwiseLoad(bench.gear, bench.store.reader(keys), bench.blocks[start // N : end // N], span, **options)


def step_through(bench: Bench, load: LayerwiseLoad) -> torch.Tensor:
    load.begin()
    for layer in range(bench.geometry.num_layers):
        load.layer(layer)
    return load.finish()


def test_order_of_one_load() -> None:  # L4 L12 L47
    bench = Bench()
    load = make(bench)
    assert load.begin() == 3 * CH
    assert moves(bench.streams.trace) == [("get", 0)]
    load.layer(0)
    assert moves(bench.streams.trace) == [("get", 0), ("get", 1), ("to_device", 0)]
    load.layer(1)
    load.layer(2)
    assert moves(bench.streams.trace)[3:] == [("get", 2), ("to_device", 1), ("to_device", 2)]
    assert load.finish().tolist() == [True] * (3 * CH) + [False]
    assert len(bench.store.futures) == 3  # one a layer
    assert bench.clean()


def test_more_ahead() -> None:  # L47
    bench = Bench(layers=5, ahead=3)
    load = make(bench)
    load.begin()
    load.layer(0)
    assert moves(bench.streams.trace) == [("get", 0), ("get", 1), ("get", 2), ("get", 3), ("to_device", 0)]
    load.close()
    with pytest.raises(ConfigError, match="ahead"):
        Bench(ahead=-1)


@pytest.mark.parametrize("seed", range(12))
def test_equals_a_plain_scatter(seed: int) -> None:  # L17 L42 W10 W27
    """Random blocks, spans and staging; the device works late and in any order; memory is spoiled as soon as it is back."""
    rng = random.Random(seed)
    layers, chunks = rng.randrange(1, 5), rng.randrange(1, 6)
    staging, room = rng.choice([0, 1, 6, 1000]), rng.choice([None, 1, 2])
    bench = Bench(layers, chunks, seed=seed, ahead=rng.randrange(4), staging_tokens=staging, room=room)
    start = rng.randrange(0, chunks * CH, N)
    end = rng.randrange(start + N, chunks * CH + 1, N)
    wanted = [[view.clone() for view in layer] for layer in bench.table.views]
    for i in range(start // N, end // N):
        for layer in range(layers):
            for plane in range(2):
                rows = bench.rows[plane, layer, i * N : (i + 1) * N]
                wanted[layer][plane][bench.blocks[i]] = rows.view(N, -1, 3).transpose(0, 1)
    seen: list[torch.Tensor] = []
    load = make(bench, start=start, end=end)
    load.begin()
    for layer in range(layers):
        load.layer(layer)
        bench.streams.push(lambda layer=layer: seen.append(rows_of(bench.table, bench.blocks[start // N : end // N], layer)))  # it computes
        for _ in range(rng.randrange(4)):
            bench.streams.step()
    mask = load.finish()
    assert mask.tolist() == [start <= i < end for i in range(len(bench.tokens))]
    assert bench.clean()
    for layer in range(layers):
        assert torch.equal(seen[layer], bench.rows[:, layer, start:end]), "computed before its rows were there"
        for plane in range(2):
            assert torch.equal(bench.table.views[layer][plane], wanted[layer][plane])


def test_streams_are_three() -> None:  # L14
    streams = SimStreams()
    assert len({streams.compute(), streams.load, streams.store}) == 3
    assert isinstance(streams_for(torch.device("cpu")), NullStreams)
    assert NullStreams().record(None) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_streams_are_three() -> None:  # L14
    streams = streams_for(torch.device("cuda", 0))
    assert len({s.cuda_stream for s in (streams.compute(), streams.load, streams.store)}) == 3


def test_the_load_stream_waits_for_what_was_queued_before() -> None:
    """Blocks that are new to a request may still be read by the step before."""
    bench = Bench(1, 1)
    bench.streams.push(lambda: seen.append(rows_of(bench.table, bench.blocks[:2], 0)))
    seen, before = [], rows_of(bench.table, bench.blocks[:2], 0)
    step_through(bench, make(bench))
    bench.streams.run()
    assert torch.equal(seen[0], before)


def test_only_the_last_of_a_batch_waits() -> None:  # L15 L16
    bench, batch = Bench(), LoadBatch()
    loads = [make(bench, batch=batch, last=last) for last in (False, False, True)]
    for load in loads:
        load.begin()
    for layer in range(3):
        for load in loads:
            bench.streams.trace.clear()
            load.layer(layer)
            waits = [entry for entry in bench.streams.trace if entry[:2] == ("wait", "compute")]
            assert waits == ([("wait", "compute", "load")] if load is loads[2] else [])
    bench.streams.trace.clear()
    assert all(load.finish().sum() == 3 * CH for load in loads)
    assert not [entry for entry in bench.streams.trace if entry[0] == "wait"]
    assert bench.clean()


@pytest.mark.parametrize("seed", range(4))
def test_the_last_waits_for_all(seed: int) -> None:  # L15
    """Two loads of other chunks to other blocks; the one that waits is not the one that is looked at."""
    bench, batch = Bench(3, 4, seed=seed), LoadBatch()
    first, second = make(bench, end=2 * CH, batch=batch, last=False), make(bench, start=2 * CH, batch=batch)
    seen: list[torch.Tensor] = []
    for load in (first, second):
        load.begin()
    for layer in range(3):
        first.layer(layer)
        second.layer(layer)
        bench.streams.push(lambda layer=layer: seen.append(rows_of(bench.table, bench.blocks[: 4 * CH // N], layer)))
    assert first.finish().tolist()[: 2 * CH] == [True] * (2 * CH) and second.finish().sum() == 2 * CH
    assert bench.clean()
    assert all(torch.equal(seen[layer], bench.rows[:, layer]) for layer in range(3))


def test_the_last_waits_even_if_it_loads_nothing_itself() -> None:  # L15
    bench, batch = Bench(), LoadBatch()
    first, empty = make(bench, batch=batch, last=False), LayerwiseLoad(bench.gear, None, [], Span(5, 0, 0, CH), batch=batch)
    assert (first.begin(), empty.begin()) == (3 * CH, 0)
    first.layer(0)
    bench.streams.trace.clear()
    empty.layer(0)
    assert bench.streams.trace == [("wait", "compute", "load")]
    for load in (first, empty):
        load.close()


def test_steps_out_of_order() -> None:
    bench = Bench()
    load = make(bench)
    for call, wrong in ((lambda: load.layer(0), "the load is new"), (load.finish, "the load is new")):
        with pytest.raises(StepOrderError, match=wrong):
            call()
    load.begin()
    for call, wrong in ((load.begin, r"next is layer\(0\)"), (lambda: load.layer(1), r"next is layer\(0\)"), (load.finish, r"layer\(0\)")):
        with pytest.raises(StepOrderError, match=wrong):
            call()
    for layer in range(3):
        load.layer(layer)
    for call in (lambda: load.layer(3), lambda: load.layer(2)):
        with pytest.raises(StepOrderError, match=r"next is finish\(\)"):
            call()
    load.finish()
    load.close()
    for call in (load.finish, lambda: load.layer(0), load.begin):
        with pytest.raises(StepOrderError, match="the load is finished"):
            call()
    assert bench.clean()


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("threads", [False, True])
def test_closed_early(steps: int, threads: bool) -> None:  # L43
    with ThreadPoolExecutor(1) as loader:
        bench = Bench(ahead=2, loader=loader if threads else None)
        load = make(bench)
        for layer in range(-1, steps - 1):
            load.begin() if layer < 0 else load.layer(layer)
        load.close()
        load.close()
        queued = len([entry for entry in bench.streams.trace if entry[0] == "to_device"])
        with pytest.raises(StepOrderError, match="the load is closed"):
            load.layer(steps)
    assert len([entry for entry in bench.streams.trace if entry[0] == "to_device"]) == queued
    assert bench.clean()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("end", ["closed", "failed"])
def test_no_late_copy_reaches_the_next_owner_of_a_block(end: str, seed: int) -> None:  # L43
    """The loader is far ahead of the engine, which has waited for nothing yet."""
    loader = Inline()
    bench = Bench(loader=loader, seed=seed)
    fetch = FailingFetch(bench, 2 if end == "failed" else -1, 0, ObjectCorrupt("wrong checksum"))
    load = LayerwiseLoad(bench.gear, fetch, bench.blocks[: 3 * CH // N], Span(3 * CH, 0, 3 * CH, CH), last=False)
    load.begin()
    while loader.turn():
        pass
    if end == "closed":
        load.close()
    else:
        for layer in range(3):
            load.layer(layer)
        assert not load.finish().any()

    def write() -> None:
        for layer in bench.table.views:
            for view in layer:
                view.fill_(7)

    bench.streams.push(write)  # of the next step
    assert bench.clean()
    assert all((view == 7).all() for layer in bench.table.views for view in layer)


class SlowFetch:
    """Futures that the test ends."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, torch.Tensor, Future[None]]] = []

    def fetch(self, layer, out, chunks):
        self.asked.append((layer, out, Future()))
        return self.asked[-1][2]


def test_memory_of_a_fetch_in_flight_comes_back_when_it_is_over() -> None:  # L43
    bench, fetch = Bench(), SlowFetch()
    load = LayerwiseLoad(bench.gear, fetch, bench.blocks[: CH // N], Span(CH, 0, CH, CH))
    load.begin()
    load.close()
    assert bench.pool.outstanding() == 1
    fetch.asked[0][1].fill_(1)  # still being written
    fetch.asked[0][2].set_exception(OSError("late"))
    assert bench.pool.outstanding() == 0


def test_the_next_fetch_is_started_before_this_one_is_waited_for() -> None:  # L47
    fetch = SlowFetch()
    with ThreadPoolExecutor(1) as loader:
        bench = Bench(loader=loader)
        load = LayerwiseLoad(bench.gear, fetch, bench.blocks[: CH // N], Span(CH, 0, CH, CH))
        load.begin()
        for layer in range(3):
            while len(fetch.asked) < min(layer + 2, 3):  # the loader starts layer + 1 although nothing of layer has come
                threading.Event().wait(0.001)
            asked, out, future = fetch.asked[layer]
            assert asked == layer and not future.done()
            out.fill_(layer)
            future.set_result(None)
            load.layer(layer)
        assert load.finish().all()
    assert bench.clean()
    assert [rows_of(bench.table, bench.blocks[: CH // N], layer).unique().tolist() for layer in range(3)] == [[0], [1], [2]]


class FailingFetch:
    """The bench's chunks, but chunk ``chunk`` of layer ``layer`` fails."""

    def __init__(self, bench: Bench, layer: int, chunk: int, error: Exception) -> None:
        self._inner, self._at, self._chunk, self._error = bench.store.reader([r.key for r in bench.records]), layer, chunk, error

    def fetch(self, layer, out, chunks):
        future = self._inner.fetch(layer, out, chunks)
        if layer != self._at or self._chunk >= chunks:
            return future
        out[:, self._chunk * CH : (self._chunk + 1) * CH] = -1
        failed: Future[None] = Future()
        failed.set_exception(ChunkFailed(self._chunk, self._error))
        return failed


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("threads", [False, True])
def test_a_failure_in_the_middle_invalidates_the_load(at: int, threads: bool) -> None:
    with ThreadPoolExecutor(1) as loader:
        bench = Bench(loader=loader if threads else None)
        fetch = FailingFetch(bench, at, 1, ObjectCorrupt("wrong checksum"))
        load = LayerwiseLoad(bench.gear, fetch, bench.blocks[: 3 * CH // N], Span(3 * CH, 0, 3 * CH, CH))
        load.begin()
        for layer in range(3):
            load.layer(layer)  # steps on, raises nothing
        assert not load.finish().any()
    assert load.invalid == range(3 * CH) and "wrong checksum" in str(load.failure)
    assert [entry for entry in bench.streams.trace if entry[0] == "to_device"] == [("to_device", i) for i in range(at)]
    assert bench.clean()


@pytest.mark.parametrize("chunk", range(3))
def test_a_failure_may_cut_the_load_instead(chunk: int) -> None:
    bench = Bench(layers=4, staging_tokens=6)
    fetch = FailingFetch(bench, 2, chunk, ObjectCorrupt("wrong checksum"))
    blocks = bench.blocks[: 3 * CH // N]
    before = rows_of(bench.table, blocks, 2)
    load = LayerwiseLoad(bench.gear, fetch, blocks, Span(3 * CH, 0, 3 * CH, CH), keep_prefix=True)
    load.begin()
    for layer in range(4):
        load.layer(layer)
    assert load.finish().tolist() == [i < chunk * CH for i in range(3 * CH)]
    assert load.invalid == range(chunk * CH, 3 * CH) and load.failure is not None
    assert bench.clean()
    for layer in range(4):
        assert torch.equal(rows_of(bench.table, blocks, layer)[:, : chunk * CH], bench.rows[:, layer, : chunk * CH])
    assert torch.equal(rows_of(bench.table, blocks, 2)[:, chunk * CH :], before[:, chunk * CH :])


@pytest.mark.parametrize("what", ["prepare", "to_device", "fetch", "loader"])
def test_nothing_raises_into_the_steps(what: str, monkeypatch) -> None:
    with ThreadPoolExecutor(1) as loader:
        bench = Bench(loader=loader if what == "loader" else None)
        load = make(bench)

        def fails(*_args, **_kw):
            raise RuntimeError("device lost")

        if what == "fetch":
            monkeypatch.setattr(load._fetch, "fetch", fails)
        elif what != "loader":
            monkeypatch.setattr(bench.connector, what, fails)
        else:
            loader.shutdown()
        load.begin()
        for layer in range(3):
            load.layer(layer)
        assert not load.finish().any() and isinstance(load.failure, RuntimeError)
        assert bench.clean()


def test_a_store_that_is_too_slow_is_given_up() -> None:
    fetch = SlowFetch()
    with ThreadPoolExecutor(1) as loader:
        bench = Bench(loader=loader, timeout_s=0.05)
        load = LayerwiseLoad(bench.gear, fetch, bench.blocks[: CH // N], Span(CH, 0, CH, CH))
        load.begin()
        for layer in range(3):
            load.layer(layer)
        assert not load.finish().any() and isinstance(load.failure, TimeoutError)
        for _, _, future in fetch.asked:
            future.set_result(None)
    assert bench.clean()


def test_memory_is_taken_layer_by_layer() -> None:  # L7
    bench = Bench(layers=4, ahead=0)
    load = make(bench)
    taken = [len(bench.pool.takes)]
    load.begin()
    for layer in range(4):
        taken.append(len(bench.pool.takes))
        load.layer(layer)
    assert taken == [0, 1, 1, 2, 3] and bench.pool.takes == [(2, 3 * CH, H)] * 4
    load.finish()
    assert bench.clean()


def test_memory_for_one_layer_is_enough() -> None:  # L42
    bench = Bench(layers=6, room=1, ahead=3)
    assert step_through(bench, make(bench)).sum() == 3 * CH and bench.pool.high_water == 1
    assert bench.clean()
    assert all(torch.equal(rows_of(bench.table, bench.blocks[: 3 * CH // N], i), bench.rows[:, i]) for i in range(6))


def test_no_memory_at_all() -> None:
    bench = Bench(room=0)
    load = make(bench)
    assert not step_through(bench, load).any()
    assert "no host memory for layer 0" in str(load.failure) and load.invalid == range(3 * CH)


def test_many_loads_share_little_memory_and_one_thread() -> None:
    with ThreadPoolExecutor(1) as loader:
        bench, batch = Bench(layers=5, chunks=4, room=2, ahead=2, loader=loader), LoadBatch()
        loads = [make(bench, start=i * CH, end=(i + 1) * CH, batch=batch, last=i == 3) for i in range(4)]
        for load in loads:
            load.begin()
        for layer in range(5):
            for load in loads:
                load.layer(layer)
        assert [load.failure for load in loads] == [None] * 4
        assert sum(load.finish() for load in loads).tolist() == [1] * (4 * CH) + [0]
    assert bench.clean() and bench.pool.high_water == 2
    assert all(torch.equal(rows_of(bench.table, bench.blocks[: 4 * CH // N], i), bench.rows[:, i]) for i in range(5))


def test_a_loader_goes_layer_by_layer_over_a_batch() -> None:
    loader = Inline()
    bench, batch = Bench(loader=loader), LoadBatch()
    loads = [make(bench, batch=batch, last=last) for last in (False, True)]
    for load in loads:
        load.begin()
    while loader.turn():
        pass
    assert [entry for entry in bench.streams.trace if entry[0] == "to_device"] == [("to_device", i) for i in (0, 0, 1, 1, 2, 2)]
    for layer in range(3):
        for load in loads:
            load.layer(layer)  # nothing left to do but to wait on the device
    assert [load.finish().sum().item() for load in loads] == [3 * CH] * 2
    assert bench.clean()


@pytest.mark.parametrize("span", [(0, 3), (0, 1, 1), (2, 6), (4, 4, 0)])
def test_blocks_and_span_must_fit(span: tuple[int, ...]) -> None:
    bench = Bench()
    start, end, *rest = span
    count = rest[0] if rest else (end - start) // N + 1
    with pytest.raises(ShapeError, match=r"blocks of 2, got"):
        LayerwiseLoad(bench.gear, SlowFetch(), list(range(count + (start == end))), Span(20, start, end, CH))


def test_spans() -> None:
    assert (Span(20, 6, 14, CH).slab_start, Span(20, 6, 14, CH).chunks, Span(20, 6, 14, CH).first_chunk) == (4, 3, 1)
    assert Span(20, 6, 6, CH).chunks == 0
    for bad in ((20, -1, 4), (20, 5, 4), (20, 0, 21)):
        with pytest.raises(ConfigError):
            Span(*bad, CH)


def test_connectors_are_told_apart_by_what_they_can() -> None:  # L33 W31
    class Own:
        """No relation of PagedConnector."""

        layerwise, block_size, num_layers = True, N, 1

    assert LoadGear(NullStreams(), Own(), Pool()).connector.layerwise
    Own.layerwise = False
    for connector in (Own(), object()):
        with pytest.raises(ConfigError, match="does not move single layers"):
            LoadGear(NullStreams(), connector, Pool())


@pytest.mark.parametrize("staging", [0, 1, 5, 100])
def test_staging_is_made_at_the_start_and_only_there(staging: int, monkeypatch) -> None:  # L23 L44 W28
    table = pages(3)
    connector = PagedConnector(table, staging_tokens=staging)
    assert len(connector.staging) == (2 if staging else 0) and connector.staging_tokens == -(-staging // N) * N
    source = torch.randn((2, 3 * CH, H))
    ids = [5, 0, -1, 9, 2, 30]
    blocks, out = connector.prepare(ids), torch.zeros((3, 2, CH, H))
    made: list[object] = []
    for name in ("empty", "zeros", "empty_like"):
        monkeypatch.setattr(torch, name, lambda *a, **k: made.append(a))
    connector.to_device(1, source, blocks)
    connector.to_device(1, source[:, : 2 * CH], blocks[: 2 * CH // N])  # planes lie apart
    kept = [5, 0, 9, 2, 30]
    assert torch.equal(rows_of(table, kept, 1), torch.cat([source[:, :4], source[:, 6:]], dim=1))
    good = connector.prepare([30, 2, 9, 0, 5, 1])
    connector.from_device(1, good, list(out))
    assert torch.equal(torch.cat(list(out), dim=1), rows_of(table, good, 1))
    assert made == []
    for bad in (source[:1], source[:, 1:], source.double(), source.transpose(1, 2).contiguous().transpose(1, 2)):
        with pytest.raises(ShapeError, match="a layer's rows are"):  # L35
            connector.to_device(1, bad, blocks)
    with pytest.raises(ShapeError, match="do not fill 2 chunks"):
        connector.from_device(1, good, list(out[:2]))


def test_pages_of_inference_mode_are_written_by_any_thread() -> None:
    with torch.inference_mode():
        table = pages(2)
    connector = PagedConnector(table, staging_tokens=4)
    source = torch.randn((2, CH, H))
    connector.to_device(1, source, connector.prepare([3, 4]))
    assert torch.equal(rows_of(table, [3, 4], 1), source)


def test_a_connector_of_its_own_streams() -> None:
    """The simulated connector checks what the real one would."""
    streams = SimStreams()
    with pytest.raises(ShapeError):
        SimConnector(pages(1), streams).to_device(0, torch.zeros(2, 3, H), torch.zeros(2, dtype=torch.int64))
