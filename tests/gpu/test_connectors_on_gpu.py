"""On a CUDA GPU: layers move exactly, in the right order between streams, and the host never waits."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from connector_makers import HIDDEN, B, D, L, N, dull_load, empty_objects, objects, pages, planes_of, row
from test_connectors_buffered import ROPES, Case

from qcap.connectors import BufferedConnector, LayerFormat, PagedConnector, SGLangConnector
from qcap.kernels import PageTable

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LATE = 50_000_000  # device clock cycles, tens of milliseconds: long enough for anything that does not wait to be seen too early


@contextmanager
def no_host_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_gpu(layout="B2NHD", **kwargs):
    """Pages on the device with the strides of :func:`pages`; and a table of the same on the CPU for the reference."""
    table, whole = pages(layout, **kwargs)
    moved = [t.cuda() for t in whole]
    views = []
    for layer, t in zip(table.views, moved, strict=True):
        views.append([torch.as_strided(t, v.shape, v.stride(), v.storage_offset()) for v in layer])
    return PageTable(views), moved, table, whole


def pinned(made):
    for obj in itertools.chain(*made):
        obj.tensor = obj.tensor.pin_memory()
    return made


@pytest.fixture(params=["blocks", "rows", "dropped", "device", "none on device"])
def slots(request):
    g = torch.Generator().manual_seed(5)
    blocks = torch.randperm(B, generator=g)[:8]
    found = (blocks[:, None] * N + torch.arange(N)).flatten()
    if request.param != "blocks":
        found = torch.randperm(B * N, generator=g)[: 8 * N]
    if request.param in ("dropped", "device"):
        found[torch.rand(8 * N, generator=g) < 0.3] = -1
    if "none" in request.param:
        found[:] = -1
    return found.cuda() if "device" in request.param else found


SPANS = [(0, 8), (8, 16), (16, 24), (25, 32)]
STARTS, ENDS = [a for a, _ in SPANS], [b for _, b in SPANS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("staging", [0, 16, 64])
@pytest.mark.parametrize("fmt", [LayerFormat.KV_T2D, LayerFormat.KV_2TD])
@pytest.mark.parametrize("layout", ["B2NHD", "2BNHD", "BH(Kt,V)", "pool"])
def test_there_and_back(layout, fmt, staging, dtype, slots):  # L44 L17 L13
    if layout == "pool":
        table, whole, wanted, wanted_whole = on_gpu("B2NHD", n=1, blocks=B * N, dtype=dtype)
        connector = SGLangConnector(table, staging_tokens=staging, format=fmt)
    else:
        table, whole, wanted, wanted_whole = on_gpu(layout, dtype=dtype)
        connector = PagedConnector(table, staging_tokens=staging, format=fmt)
    made, back = pinned(objects(SPANS, fmt, dtype=dtype)), pinned(empty_objects(SPANS, fmt, dtype=dtype))
    torch.cuda.synchronize()
    with no_host_wait():
        steps = connector.batched_to_gpu(STARTS, ENDS, slot_mapping=slots, sync=True)
        next(steps)
        for layer in made:
            steps.send(layer)
        assert len(list(steps)) == 1
        assert len(list(connector.batched_from_gpu(back, STARTS, ENDS, slot_mapping=slots, sync=True))) == L + 1
    connector.store_event().synchronize()
    dull_load(wanted, made, SPANS, slots.cpu())
    assert all(torch.equal(a.cpu(), b) for a, b in zip(whole, wanted_whole, strict=True))
    for got, sent in zip(back, made, strict=True):
        for (a, b), x, y in zip(SPANS, got, sent, strict=True):
            assert torch.equal(planes_of(x), planes_of(y) * (slots[a:b].cpu() >= 0)[None, :, None])
    assert connector.objects_held == 0


@pytest.mark.parametrize("staging", [0, 16])
def test_compute_waits_for_its_layer(staging):  # L15: the load stream is held back, and compute still reads what was loaded
    table, _, wanted, _ = on_gpu()
    connector = PagedConnector(table, staging_tokens=staging, format=LayerFormat.KV_2TD)
    spans, slots, seen = [(0, 8), (8, 16)], torch.arange(16), []
    made = pinned(objects(spans, LayerFormat.KV_2TD))
    steps = connector.batched_to_gpu([0, 8], [8, 16], slot_mapping=slots, sync=True)
    next(steps)
    steps.send(made[0])
    for layer in range(L):
        with torch.cuda.stream(connector.load_stream):
            torch.cuda._sleep(LATE)
        if layer + 1 < L:
            steps.send(made[layer + 1])
        else:
            next(steps)
        seen.append([view.clone() for view in table.views[layer]])
    dull_load(wanted, made, spans, slots)
    for layer, views in enumerate(seen):
        assert all(torch.equal(v.cpu(), w) for v, w in zip(views, wanted.views[layer], strict=True)), layer


def test_a_store_reads_what_compute_wrote():  # L16; and with sync, compute does not write over pages that are not read yet
    table, _, _, _ = on_gpu()
    connector = PagedConnector(table, staging_tokens=16, format=LayerFormat.KV_2TD)
    spans = [(0, 16)]
    back = pinned(empty_objects(spans, LayerFormat.KV_2TD))
    steps = connector.batched_from_gpu(back, [0], [16], slot_mapping=torch.arange(16), sync=True)
    for layer in range(L):
        torch.cuda._sleep(LATE)
        for view in table.views[layer]:
            view.fill_(float(layer))
        next(steps)
    with torch.cuda.stream(connector.store_stream):
        torch.cuda._sleep(LATE)
    next(steps)
    for layer in table.views:
        for view in layer:
            view.fill_(float("nan"))
    connector.store_event().synchronize()
    for layer in range(L):
        assert (back[layer][0].tensor == float(layer)).all()


def test_a_load_does_not_overwrite_what_compute_still_reads():
    table, _, _, _ = on_gpu()
    connector = PagedConnector(table, staging_tokens=16, format=LayerFormat.KV_2TD)
    made = pinned(objects([(0, 16)], LayerFormat.KV_2TD))
    torch.cuda._sleep(LATE)
    before = [view.clone() for layer in table.views for view in layer]  # late: an earlier step's attention
    steps = connector.batched_to_gpu([0], [16], slot_mapping=torch.arange(16), sync=False)
    next(steps)
    for layer in made:
        steps.send(layer)
    list(steps)
    torch.cuda.synchronize()
    assert all((view == -77.0).all() for view in before)


@pytest.mark.parametrize("rope", ["neox", "pairs", "partial"])
def test_through_two_buffers(rope):  # B5 B7 B8 B23: and compute's late repair of a layer reaches the pages
    layers = 5
    table, _, _, _ = on_gpu(layers=layers)
    connector = BufferedConnector(table, staging_tokens=40, rope=ROPES[rope])
    case = Case([(4, 12), (15, 20), (22, 30)], [100, 7, 22], ROPES[rope], layers=layers)
    pinned(case.objects)
    seen = []
    slots = case.slots
    torch.cuda.synchronize()
    with no_host_wait():
        steps = connector.batched_to_gpu(case.starts, case.ends, slot_mapping=slots, sync=True)
        next(steps)
        for layer in range(layers):
            if layer:
                with torch.cuda.stream(connector.load_stream):
                    torch.cuda._sleep(LATE // 5)
            steps.send(case.objects[layer])
            keys, values = connector.get_kv(layer)
            seen.append((keys.clone(), values.clone()))
            torch.cuda._sleep(LATE)
            keys[8:11] = 3.0 + layer
            values[8:11] = -5.0 - layer
        list(steps)
        after = [[view.clone() for view in layer] for layer in table.views]
    for layer in range(layers):
        keys, values = (t.cpu() for t in seen[layer])
        torch.testing.assert_close(keys, case.keys[layer], rtol=1e-5, atol=1e-5)
        assert torch.equal(values, case.values[layer])
        for token in range(4, 30):
            slot = int(slots[token])
            k, v = (view[slot // N, :, slot % N].flatten().cpu() for view in after[layer])
            if 12 <= token < 15:
                assert (k == 3.0 + layer).all() and (v == -5.0 - layer).all()
            else:
                assert torch.equal(k, keys[token - 4]) and torch.equal(v, values[token - 4])


def test_steps_by_block():
    table, whole, wanted, wanted_whole = on_gpu()
    connector = PagedConnector(table, staging_tokens=8)
    source = torch.randn(2, L, 6 * N, HIDDEN).pin_memory()
    ids = [5, 2, -1, 11, 0, 7]
    target = torch.full((2, 2 * N, HIDDEN), float("nan")).pin_memory()
    with no_host_wait():
        blocks = connector.prepare(ids)
        for layer in range(L):
            connector.to_device(layer, source[:, layer], blocks)
        connector.from_device(1, blocks[3:5], [target])
    torch.cuda.synchronize()
    for layer in range(L):
        for i, block in enumerate(ids):
            for token in range(N * (block >= 0)):
                for plane in range(2):
                    row(wanted, layer, plane, block * N + token).copy_(source[plane, layer, i * N + token].view(-1, D))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(whole, wanted_whole, strict=True))
    assert torch.equal(target, source[:, 1, 3 * N : 5 * N])
