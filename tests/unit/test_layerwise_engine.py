"""The generators: yield counts, what they yield, gates, holes, and storing layer by layer."""

from __future__ import annotations

import logging
import random
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from layerwise_kit import CH, Bench, H, N, Pool, TracedLayers, geometry, moves, pages, rows_of

from qcap.backends import open_backend
from qcap.connectors import PagedConnector
from qcap.errors import ConfigError, ShapeError, StepOrderError, StoreUnavailable, TokenError
from qcap.kernels import PageTable
from qcap.kinds import CacheKind
from qcap.layerwise import (
    BackendLayers,
    LayerwiseEngine,
    LayerwiseLoad,
    LayerwiseStore,
    LoadGear,
    MemoryLayers,
    NullStreams,
    Span,
    layer_major,
    leading_mask,
    masked_tokens,
)

T_S = 30.0


def retrieve(bench: Bench, **options) -> list:
    return list(bench.engine.retrieve_layer(bench.tokens, bench.blocks, **options))


def store(bench: Bench, **options) -> list:
    return list(bench.engine.store_layer(bench.tokens, bench.blocks, **options))


def true_for(count: int, bench: Bench, start: int = 0) -> list[bool]:
    return [start <= i < count for i in range(len(bench.tokens))]


# -- retrieving


@pytest.mark.parametrize("stored", range(4))
def test_what_retrieving_yields(stored: int) -> None:  # L2 L5 L21 L37 W29
    """Total miss, partial hit, hit."""
    bench = Bench(stored=stored)
    got = retrieve(bench)
    assert len(got) == 5 and got[0] == stored * CH and got[1:4] == [None] * 3
    assert got[4].dtype == torch.bool and got[4].tolist() == true_for(stored * CH, bench)
    assert bench.clean()
    for layer in range(3):
        assert torch.equal(rows_of(bench.table, bench.blocks[: stored * CH // N], layer), bench.rows[:, layer, : stored * CH])
    assert bench.engine.counters["load.tokens"] == stored * CH


@pytest.mark.parametrize("layers", [1, 2, 7])
def test_yields_for_any_number_of_layers(layers: int) -> None:  # L2 L3
    bench = Bench(layers)
    assert len(retrieve(bench)) == layers + 2
    bench.tokens[0] += 1
    assert len(store(bench)) == layers + 1


def test_no_tokens_at_all() -> None:  # L37
    bench = Bench()
    got = list(bench.engine.retrieve_layer([], []))
    assert len(got) == 5 and got[0] == 0 and got[4].shape == (0,)
    assert len(list(bench.engine.store_layer([], []))) == 4


def test_unhealthy() -> None:  # L38 L39 W29
    bench = Bench()
    bench.engine.healthy = False
    got = retrieve(bench)
    assert len(got) == 5 and got[0] == 0 and not got[4].any()
    assert len(store(bench)) == 4
    assert bench.pool.takes == [] and bench.store.asked == [] and moves(bench.streams.trace) == []


def test_the_store_goes_away() -> None:  # L37 L39
    bench = Bench()

    def gone(_keys):
        raise StoreUnavailable("gone")

    bench.store.contains = gone
    got = retrieve(bench)
    assert len(got) == 5 and got[0] == 0 and not got[4].any()
    assert len(store(bench)) == 4
    assert bench.engine.counters["load.unavailable"] == bench.engine.counters["store.unavailable"] == 1


def test_order_of_the_generator() -> None:  # L4 L13
    bench = Bench()
    generator, seen = bench.engine.retrieve_layer(bench.tokens, bench.blocks), []
    for _ in range(5):
        bench.streams.trace.clear()
        next(generator)
        seen.append(moves(bench.streams.trace))
    assert seen == [[("get", 0)], [("get", 1), ("to_device", 0)], [("get", 2), ("to_device", 1)], [("to_device", 2)], []]
    with pytest.raises(StopIteration):
        next(generator)


def test_the_hit_check_looks_at_layer_0_alone() -> None:  # L19
    bench = Bench(stored=2)
    retrieve(bench)
    assert bench.store.asked == [r.key.layer(0) for r in bench.records]
    bench.store.asked.clear()
    store(bench)
    assert bench.store.asked == [r.key.layer(0) for r in bench.records]


@pytest.mark.parametrize("hole", [(1, 0), (2, 1), (1, 2)])
def test_a_hole_above_layer_0(hole: tuple[int, int]) -> None:  # L19
    layer, chunk = hole
    bench = Bench()
    bench.store.remove(bench.records[chunk].key.layer(layer))
    got = retrieve(bench)
    assert len(got) == 5 and got[0] == 3 * CH and got[4].tolist() == true_for(chunk * CH, bench)
    assert bench.engine.counters["load.holes"] == 1 and bench.engine.counters["load.tokens_invalid"] == (3 - chunk) * CH
    assert bench.clean()
    for i in range(3):
        assert torch.equal(rows_of(bench.table, bench.blocks[: chunk * CH // N], i), bench.rows[:, i, : chunk * CH])


def test_chunks_in_two_places() -> None:  # L20
    bench = Bench()
    bench.store.location = lambda key: "disk" if key.chunk == bench.records[2].key else "memory"
    got = retrieve(bench)
    assert got[0] == 2 * CH and got[4].tolist() == true_for(2 * CH, bench)
    assert bench.engine.counters["load.truncated_at_another_location"] == 1


def test_frozen() -> None:  # L40 L46
    bench = Bench(stored=2)
    bench.engine.frozen = True
    assert len(store(bench)) == 4 and bench.pool.takes == [] and bench.store.asked == []
    assert retrieve(bench)[0] == 2 * CH  # local
    bench.store.location = lambda key: "elsewhere"
    got = retrieve(bench)
    assert len(got) == 5 and got[0] == 0 and not got[4].any()


def test_passive() -> None:  # L46
    bench = Bench(stored=2)
    bench.engine.passive = True
    assert len(store(bench)) == 4 and bench.pool.takes == [] and moves(bench.streams.trace) == []
    assert retrieve(bench)[0] == 2 * CH


def test_tags_and_salts_are_part_of_the_keys() -> None:  # L45 W31
    bench = Bench()
    for options in ({"tags": [("lora", "a")]}, {"salt": "s"}):
        assert retrieve(bench, **options)[0] == 0
        store(bench, **options)
        bench.streams.run()
        assert retrieve(bench, **options)[0] == 3 * CH
    assert retrieve(bench, tags=[("lora", "b")])[0] == 0
    key = bench.records[0].key
    assert {k.chunk for k in bench.store._layers} > {key} and len({k.chunk.tags for k in bench.store._layers}) == 2


def test_keys_are_layer_major() -> None:  # L18
    keys = [r.key for r in Bench().records]
    major = layer_major(keys, 5)
    assert len(major) == 5 and all(major[i][c] == keys[c].layer(i) for i in range(5) for c in range(3))


def test_masks() -> None:  # L50 L51
    assert leading_mask(600, 300, 256).tolist() == [False] * 256 + [True] * 344
    assert leading_mask(512, 512, 256).sum() == 0 and leading_mask(100, 200, 64).tolist() == [False] * 64 + [True] * 36
    for make in (list, np.array, torch.tensor):
        assert masked_tokens(make([False] * 4 + [True] * 5), 9, 4) == 4
    assert masked_tokens(None, 9, 4) == 0 and masked_tokens([False] * 9, 9, 4) == 9
    for bad in ([True] * 4 + [False] * 4 + [True], [True] * 5 + [False] * 4, [False] * 3 + [True] * 6, [True] * 8, [1] * 9):
        with pytest.raises(TokenError):
            masked_tokens(bad, 9, 4)


def test_retrieving_behind_a_mask() -> None:  # L50
    bench = Bench()
    before = rows_of(bench.table, bench.blocks[: CH // N], 0)
    got = retrieve(bench, mask=leading_mask(len(bench.tokens), CH + 1, CH))
    assert got[0] == 2 * CH and got[4].tolist() == true_for(3 * CH, bench, CH)
    assert bench.clean() and len(bench.store.asked) == 2
    assert torch.equal(rows_of(bench.table, bench.blocks[: CH // N], 0), before)
    assert torch.equal(rows_of(bench.table, bench.blocks[CH // N : 3 * CH // N], 2), bench.rows[:, 2, CH:])
    assert retrieve(bench, mask=[False] * len(bench.tokens))[0] == 0


def test_what_cannot_be_used_is_refused_at_once() -> None:
    bench = Bench()
    for call in (bench.engine.retrieve_layer, bench.engine.store_layer):
        with pytest.raises(TokenError):
            call(bench.tokens, bench.blocks, mask=[True])
        with pytest.raises(ShapeError, match="need more than 2 blocks"):
            call(bench.tokens, bench.blocks[:2])
    with pytest.raises(ConfigError, match="in the geometry"):
        LayerwiseEngine(geometry(4), CacheKind.KV, bench.store, bench.gear)
    with pytest.raises(ConfigError, match="in the geometry"):
        LayerwiseEngine(bench.geometry, CacheKind.QUERY, bench.store, bench.gear)


@pytest.mark.parametrize("absent", [10**6, 40, -1, -2])
@pytest.mark.parametrize("place", [0, 3, 5])
def test_blocks_that_do_not_exist(absent: int, place: int) -> None:
    """A connector leaves such ids out, -1 on purpose: a load would call rows loaded, and a store would publish what no page held."""
    bench = Bench(stored=1)
    blocks = list(bench.blocks)
    blocks[place] = absent
    for call in (bench.engine.retrieve_layer, bench.engine.store_layer):
        with pytest.raises(ShapeError, match=rf"block {absent} does not exist.*0\.\.39"):
            call(bench.tokens, blocks)
    assert bench.pool.takes == [] and bench.store.asked == [] and bench.streams.trace == []
    assert bench.store.contains([r.key.layer(0) for r in bench.records]) == [True, False, False]


def test_blocks_that_are_not_moved_may_be_anything() -> None:
    """Those the engine has already, and those after the last whole chunk."""
    bench = Bench()
    blocks = [-1, 10**6, *bench.blocks[2:6], -1]
    mask = leading_mask(len(bench.tokens), CH, CH)
    got = list(bench.engine.retrieve_layer(bench.tokens, blocks, mask=mask))
    assert got[-1].tolist() == true_for(3 * CH, bench, CH) and bench.clean()
    assert torch.equal(rows_of(bench.table, blocks[2:6], 2), bench.rows[:, 2, CH:])
    assert len(list(bench.engine.store_layer(bench.tokens, blocks, mask=mask))) == 4


def test_a_load_fills_a_block_once() -> None:
    bench = Bench()
    with pytest.raises(ShapeError, match="block 3 is given twice"):
        bench.engine.retrieve_layer(bench.tokens, [3] * len(bench.blocks))
    assert len(list(bench.engine.store_layer(bench.tokens, [3] * len(bench.blocks)))) == 4  # reading one twice harms nobody


@pytest.mark.parametrize("blocks", [[0.0] * 7, ["0"] * 7, [[0]] * 7])
def test_block_ids_are_integers(blocks: list) -> None:
    bench = Bench()
    for call in (bench.engine.retrieve_layer, bench.engine.store_layer):
        with pytest.raises(ShapeError, match="flat sequence of integers"):
            call(bench.tokens, blocks)


@pytest.mark.parametrize("absent", [40, -1])
def test_the_steps_beneath_refuse_absent_blocks_too(absent: int) -> None:
    bench = Bench()
    keys = [r.key for r in bench.records[:1]]
    with pytest.raises(ShapeError, match=f"block {absent} does not exist"):
        LayerwiseLoad(bench.gear, bench.store.reader(keys), [0, absent], Span(CH, 0, CH, CH))
    with pytest.raises(ShapeError, match=f"block {absent} does not exist"):
        LayerwiseStore(bench.streams, bench.connector, bench.pool, bench.store.writer(bench.records), [[0, 1], [absent, 2]], CH)


@pytest.mark.parametrize("steps", range(6))
def test_closed_at_any_step(steps: int) -> None:  # L43 W30
    for call in ("retrieve_layer", "store_layer"):
        bench = Bench(stored=3 if call == "retrieve_layer" else 0, ahead=2)
        generator = getattr(bench.engine, call)(bench.tokens, bench.blocks)
        for _ in range(steps):
            next(generator, None)
        generator.close()
        assert bench.clean()
        if call == "store_layer":
            assert bench.store.contains([r.key.layer(0) for r in bench.records]) == [steps >= 4] * 3


@pytest.mark.parametrize("call", ["retrieve_layer", "store_layer"])
def test_memory_is_not_back_while_a_copy_runs(call: str) -> None:  # L42 L43
    bench = Bench(stored=3 if call == "retrieve_layer" else 0, ahead=0)
    bench.streams.busy_while_asked = False  # the device stands still
    generator = getattr(bench.engine, call)(bench.tokens, bench.blocks)
    next(generator)
    next(generator)
    generator.close()
    assert bench.pool.outstanding() == (1 if call == "retrieve_layer" else 3)
    assert bench.clean()


# -- storing


def test_order_of_storing() -> None:  # L3 L6 L7
    bench = Bench(stored=0)
    generator, seen = bench.engine.store_layer(bench.tokens, bench.blocks), []
    for _ in range(4):
        bench.streams.trace.clear()
        next(generator)
        seen.append(moves(bench.streams.trace))
        assert bench.pool.takes == [(2, 3, CH, H)] * 3  # all layers of all chunks, in the first step
    assert seen == [[("from_device", 0)], [("from_device", 1), ("put", 0)], [("from_device", 2), ("put", 1)], [("put", 2), ("publish", 3)]]
    with pytest.raises(StopIteration):
        next(generator)


def test_every_layer_waits_for_its_computation() -> None:  # L16
    bench = Bench(stored=0)
    generator = bench.engine.store_layer(bench.tokens, bench.blocks)
    for _ in range(3):
        bench.streams.trace.clear()
        next(generator)
        trace = bench.streams.trace
        at = next(i for i, entry in enumerate(trace) if entry[0] == "from_device")
        assert trace[:at].count(("wait", "store", "compute")) == 1


@pytest.mark.parametrize("seed", range(8))
def test_stored_is_what_was_computed(seed: int) -> None:  # L16 L47
    """Layers are computed late, and blocks get new owners right after the last step."""
    rng = random.Random(seed)
    layers, chunks = rng.randrange(1, 5), rng.randrange(1, 5)
    bench = Bench(layers, chunks, stored=0, seed=seed, staging_tokens=rng.choice([0, 2, 6, 64]))

    def write(layer: int, rows: torch.Tensor) -> None:
        ids = torch.tensor(bench.blocks[: chunks * CH // N])
        for plane, view in enumerate(bench.table.views[layer]):
            view[ids] = rows[plane].view(-1, N, 2, 3).transpose(1, 2)

    generator = bench.engine.store_layer(bench.tokens, bench.blocks)
    for layer in range(layers):
        bench.streams.push(lambda layer=layer: write(layer, bench.rows[:, layer]))
        next(generator)
        for _ in range(rng.randrange(4)):
            bench.streams.step()
    next(generator)
    for layer in range(layers):
        bench.streams.push(lambda layer=layer: write(layer, torch.full_like(bench.rows[:, layer], -1)))  # the next step
    bench.streams.run()
    assert bench.store.contains([r.key.layer(0) for r in bench.records]) == [True] * chunks
    for i, record in enumerate(bench.records):
        for layer, key in enumerate(record.key.split_layers(layers)):
            out = torch.empty((2, CH, H))
            bench.store.get(key, out)
            assert torch.equal(out, bench.rows[:, layer, i * CH : (i + 1) * CH])
    assert bench.clean()


def test_the_third_chunk_gets_no_memory(caplog) -> None:  # L22
    bench = Bench(chunks=4, stored=0, room=2)
    assert len(store(bench)) == 4
    bench.streams.run()
    keys = [key for record in bench.records for key in record.key.split_layers(3)]
    assert bench.store.contains(keys) == [True] * 6 + [False] * 6
    assert [r.levelno for r in caplog.records if "host memory" in r.message] == [logging.WARNING]
    assert bench.engine.counters["store.chunks_without_memory"] == 2 and bench.engine.counters["store.chunks"] == 2
    assert bench.clean()


def test_no_memory_for_any_chunk() -> None:  # L22
    bench = Bench(stored=0, room=0)
    assert len(store(bench)) == 4 and moves(bench.streams.trace) == []


def test_everything_is_there_already() -> None:  # L41
    bench = Bench()
    assert len(store(bench)) == 4
    assert bench.pool.takes == [] and moves(bench.streams.trace) == []


def test_only_what_is_missing_is_stored() -> None:  # L19
    bench = Bench(stored=1)
    store(bench)
    assert bench.pool.takes == [(2, 3, CH, H)] * 2 and bench.engine.counters["store.chunks"] == 2
    bench.streams.run()
    for i, record in enumerate(bench.records[1:], 1):
        out = torch.empty((2, CH, H))
        bench.store.get(record.key.layer(2), out)
        assert torch.equal(out, rows_of(bench.table, bench.blocks[i * CH // N : (i + 1) * CH // N], 2))


def test_leading_chunks_can_be_left_out() -> None:  # L51
    bench = Bench(stored=0)
    store(bench, mask=leading_mask(len(bench.tokens), CH + 1, CH))
    bench.streams.run()
    assert bench.store.contains([r.key.layer(0) for r in bench.records]) == [False, True, True]
    bench.pool.takes.clear()
    assert len(store(bench, mask=[False] * len(bench.tokens))) == 4 and bench.pool.takes == []


@pytest.mark.parametrize("what", ["prepare", "from_device", "put", "publish"])
def test_a_failure_while_storing_publishes_nothing(what: str, monkeypatch) -> None:
    bench = Bench(stored=0)

    def fails(*_args, **_kw):
        raise RuntimeError("device lost")

    if what in ("put", "publish"):
        sink = bench.store.writer(bench.records)
        monkeypatch.setattr(sink, what, fails)
        monkeypatch.setattr(bench.store, "writer", lambda records: sink)
    else:
        monkeypatch.setattr(bench.connector, what, fails)
    assert len(store(bench)) == 4
    assert bench.engine.counters["store.failed"] == 1 and bench.engine.counters["store.chunks"] == 0
    assert bench.clean() and bench.store.contains([r.key.layer(0) for r in bench.records]) == [False] * 3


def test_steps_of_a_store_out_of_order() -> None:
    bench = Bench(stored=0)
    per = CH // N
    sink = bench.store.writer(bench.records)
    ids = [bench.blocks[i * per : (i + 1) * per] for i in range(3)]
    step = LayerwiseStore(bench.streams, bench.connector, bench.pool, sink, ids, CH)
    for call in (lambda: step.layer(0), step.finish):
        with pytest.raises(StepOrderError, match="the store is new"):
            call()
    assert step.begin() == 3
    for call in (step.begin, lambda: step.layer(1), step.finish):
        with pytest.raises(StepOrderError, match=r"next is layer\(0\)"):
            call()
    for layer in range(3):
        step.layer(layer)
    with pytest.raises(StepOrderError, match=r"next is finish\(\)"):
        step.layer(3)
    assert step.finish() == 3
    with pytest.raises(StepOrderError, match="the store is finished"):
        step.layer(0)
    with pytest.raises(ShapeError):
        LayerwiseStore(bench.streams, bench.connector, bench.pool, sink, [[1]], CH)


# -- over real stores, on the CPU


def cpu_engine(url: str, executor, seed: int, loader=None, ahead: int = 1):
    geo, table, pool = geometry(6), pages(6, seed=seed), Pool()
    connector = PagedConnector(table, staging_tokens=2 * CH)
    backend = open_backend(url)
    layers = BackendLayers(backend, executor)
    gear = LoadGear(NullStreams(), connector, pool, loader=loader, ahead=ahead)
    return LayerwiseEngine(geo, CacheKind.KV, layers, gear), table, pool, backend


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    return str(tmp_path) if request.param == "file" else f"memory://{uuid.uuid4().hex}"


def test_from_pages_to_a_store_and_back(url) -> None:  # L4 L47
    tokens, blocks = list(range(5 * CH + 3)), random.Random(1).sample(range(40), 14)
    with ThreadPoolExecutor(3) as executor, ThreadPoolExecutor(1) as loader:
        one, pages_one, pool, backend = cpu_engine(url, executor, 1)
        assert len(list(one.store_layer(tokens, blocks))) == 7
        assert backend.drain(T_S) and backend.counters()["stored"] == 5 and pool.outstanding() == 0
        other_blocks = random.Random(2).sample(range(40), 14)
        two, pages_two, pool, backend = cpu_engine(url, executor, 2, loader, ahead=2)
        got = list(two.retrieve_layer(tokens, other_blocks))
        assert got[0] == 5 * CH and got[-1].tolist() == [True] * (5 * CH) + [False] * 3 and len(got) == 8
        for layer in range(6):
            wanted = rows_of(pages_one, blocks[: 5 * CH // N], layer)
            assert torch.equal(rows_of(pages_two, other_blocks[: 5 * CH // N], layer), wanted)
        counts = backend.counters()
        assert counts["layers_loaded"] == 30 and counts["bytes_loaded"] == 30 * 2 * CH * H * 4 and pool.outstanding() == 0
        assert next(two.retrieve_layer([9, *tokens], other_blocks)) == 0


def test_an_object_that_goes_away_or_is_damaged(url) -> None:  # L19
    tokens, blocks = list(range(3 * CH)), list(range(6))
    with ThreadPoolExecutor(2) as executor:
        one, _, _, backend = cpu_engine(url, executor, 1)
        list(one.store_layer(tokens, blocks))
        assert backend.drain(T_S)
        two, _, pool, backend = cpu_engine(url, executor, 2)
        records = two._records(tokens, blocks, None, "", ())[0]
        generator = two.retrieve_layer(tokens, blocks)
        assert next(generator) == 3 * CH
        next(generator)
        backend._tier.delete(records[1].key)
        got = list(generator)
        assert got[-1].tolist() == [i < CH for i in range(3 * CH)] and pool.outstanding() == 0
        assert two.counters["load.failed"] == 1 and backend.counters()["load_corrupt"] >= 1
        backend.contains = lambda keys: [True] * len(keys)  # an answer that is out of date by now
        got = list(two.retrieve_layer(tokens, blocks))
        assert got[0] == 3 * CH and got[-1].tolist() == [i < CH for i in range(3 * CH)]
        assert two.counters["load.holes"] == 1


def test_a_slow_store_is_read_ahead(monkeypatch) -> None:  # L47
    """50 ms a read. While layer i is being moved the next is on its way, chunks of a layer beside each other."""
    import threading
    import time

    url, tokens, blocks = f"memory://{uuid.uuid4().hex}", list(range(3 * CH)), list(range(6))
    running, most, lock = 0, 0, threading.Lock()
    with ThreadPoolExecutor(6) as executor, ThreadPoolExecutor(1) as loader:
        one, pages_one, _, backend = cpu_engine(url, executor, 1)
        list(one.store_layer(tokens, blocks))
        assert backend.drain(T_S)
        two, pages_two, _, backend = cpu_engine(url, executor, 2, loader, ahead=1)
        read = backend.read_layer

        def slow(key, header, layer, out):
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.05)
            read(key, header, layer, out)
            with lock:
                running -= 1

        monkeypatch.setattr(backend, "read_layer", slow)
        assert list(two.retrieve_layer(tokens, blocks))[-1].all()
    assert most > 3  # more than one layer's chunks
    for layer in range(6):
        assert torch.equal(rows_of(pages_two, range(6), layer), rows_of(pages_one, range(6), layer))


def test_layers_in_memory_read_by_threads() -> None:
    with ThreadPoolExecutor(2) as executor:
        bench = Bench()
        bench.store._executor = executor
        assert retrieve(bench)[-1].tolist() == true_for(3 * CH, bench)
        assert bench.clean()
    assert isinstance(bench.store, MemoryLayers) and isinstance(bench.store, TracedLayers)


def test_queries_have_one_plane() -> None:
    geo = geometry(2, num_q_heads=2)
    table = PageTable([[torch.randn((8, N, 1, H)).transpose(1, 2)] for _ in range(2)])
    connector, pool = PagedConnector(table, staging_tokens=CH), Pool()
    engine = LayerwiseEngine(geo, CacheKind.QUERY, MemoryLayers(2), LoadGear(NullStreams(), connector, pool))
    tokens, wanted = list(range(2 * CH)), [layer[0].clone() for layer in table.views]
    assert len(list(engine.store_layer(tokens, [0, 1, 2, 3]))) == 3
    assert list(engine.retrieve_layer(tokens, [7, 6, 5, 4]))[-1].all() and pool.outstanding() == 0
    for layer in range(2):
        assert torch.equal(table.views[layer][0][[7, 6, 5, 4]], wanted[layer][:4])
