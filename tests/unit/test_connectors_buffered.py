"""Loads through two buffers: keys rotated to new positions, gaps zeroed, the buffer repaired by compute, then the pages."""

from __future__ import annotations

import pytest
import torch
from connector_makers import HIDDEN, POISON, B, D, FakeDevice, H, L, N, empty_objects, pages, row, run_store

from qcap.connectors import BufferedConnector, LayerFormat, LayerObject
from qcap.errors import ConfigError, QcapError, ShapeError, StepOrderError
from qcap.geometry import Rope

TWO_TD = LayerFormat.KV_2TD
ROPES = {
    "neox": Rope(rotary_dim=D),
    "pairs": Rope(rotary_dim=D, interleaved=True),
    "partial": Rope(rotary_dim=D // 2),
    "none": Rope(kind="none"),
}


def rotated(raw, positions, rope):
    """Keys ``[T, H, D]`` before rope, rotated to ``positions``, in float64, pair by pair."""
    out = raw.double().clone()
    half = rope.rotary_dim // 2 if rope.kind != "none" else 0
    for i, freq in enumerate(rope.inv_freq().double().tolist()):
        a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + half)
        cos, sin = (positions.double() * freq).cos()[:, None], (positions.double() * freq).sin()[:, None]
        x, y = raw[..., a].double(), raw[..., b].double()
        out[..., a], out[..., b] = x * cos - y * sin, y * cos + x * sin
    return out


class Case:
    """Segments cached at ``old`` positions, wanted at ``starts``; what keys and values must be there."""

    def __init__(self, spans, old, rope, *, layers=L, tokens=None, dtype=torch.float32, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.spans, self.rope, self.layers = spans, rope, layers
        self.first, self.last = spans[0][0], spans[-1][1]
        self.starts, self.ends = [a for a, _ in spans], [b for _, b in spans]
        self.slots = torch.randperm(B * N, generator=g)[: tokens or self.last]
        self.objects, self.keys, self.values = [], [], []
        for _ in range(layers):
            chunk, k, v = [], torch.zeros(self.last - self.first, HIDDEN), torch.zeros(self.last - self.first, HIDDEN)
            for (a, b), at in zip(spans, old, strict=True):
                raw = torch.randn(b - a, H, D, generator=g)
                values = torch.randn(b - a, HIDDEN, generator=g)
                positions = torch.arange(at, at + b - a)
                stored = rotated(raw, positions, rope).float().flatten(1)
                chunk.append(LayerObject(torch.stack([stored, values]).to(dtype), TWO_TD, positions))
                k[a - self.first : b - self.first] = rotated(raw, torch.arange(a, b), rope).float().flatten(1)
                v[a - self.first : b - self.first] = values
            self.objects.append(chunk)
            self.keys.append(k)
            self.values.append(v)


def connector_for(table, rope, staging=48, **more):
    return BufferedConnector(table, staging_tokens=staging, rope=rope, **more)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("layout", ["B2NHD", "BH(Kt,V)"])
def test_load(layout, rope):  # B5 B7 B8 L13 L25: counts and data
    table, whole = pages(layout)
    connector = connector_for(table, ROPES[rope])
    for buffer in connector._buffers:
        buffer.fill_(float("nan"))
    case = Case([(4, 12), (15, 20), (20, 27), (30, 31)], [100, 7, 20, 0], ROPES[rope], tokens=36)
    steps = connector.batched_to_gpu(case.starts, case.ends, slot_mapping=case.slots, sync=True)
    next(steps)
    yields = 1
    for layer in range(L):
        steps.send(case.objects[layer])
        yields += 1
        keys, values = connector.get_kv(layer)
        torch.testing.assert_close(keys, case.keys[layer], rtol=1e-5, atol=1e-5)
        assert torch.equal(values, case.values[layer])
        for a, b in ((8, 11), (23, 26)):  # gaps, counted from token 4
            assert (keys[a:b] == 0).all() and (values[a:b] == 0).all()
        if rope == "none":
            assert torch.equal(keys, case.keys[layer])
        still = case.objects[layer][2].tensor[0]  # it stands where it stood: not a bit changes
        assert torch.equal(keys[16:23], still)
        if layer > 0:
            with pytest.raises(ValueError, match=f"layer {layer - 1} is not in a buffer"):
                connector.get_kv(layer - 1)
    for _ in steps:
        yields += 1
    assert yields == L + 2
    assert connector.loaded == {}  # B10
    for layer in range(L):
        for token in range(36):
            slot = int(case.slots[token])
            k, v = row(table, layer, 0, slot).flatten(), row(table, layer, 1, slot).flatten()
            if case.first <= token < case.last:
                torch.testing.assert_close(k, case.keys[layer][token - case.first], rtol=1e-5, atol=1e-5)
                assert torch.equal(v, case.values[layer][token - case.first])
            else:
                assert (k == POISON).all() and (v == POISON).all()
    used = 27 * HIDDEN * 2  # 27 tokens from the first segment to the last, and nothing else: guards too
    assert sum(int((t != POISON).sum()) for t in whole) == used * L


def test_a_step_does_three_things():  # B5: layer i comes in, i-1 is rotated, i-2 goes to the pages
    table, _ = pages(layers=4)
    connector = connector_for(table, ROPES["neox"])
    case = Case([(0, 8)], [16], ROPES["neox"], layers=4)
    steps = connector.batched_to_gpu([0], [8], slot_mapping=case.slots, sync=True)

    def in_pages():
        return [i for i in range(4) if (row(table, i, 0, int(case.slots[0])) != POISON).all()]

    next(steps)
    for layer in range(4):
        steps.send(case.objects[layer])
        assert list(connector.loaded) == [layer] and in_pages() == list(range(layer))
    next(steps)
    assert list(connector.loaded) == [] and in_pages() == [0, 1, 2, 3]


def test_stored_at_100_used_at_0():  # B8
    case = Case([(0, 5)], [100], ROPES["neox"])
    connector = connector_for(pages()[0], ROPES["neox"])
    steps = connector.batched_to_gpu([0], [5], slot_mapping=case.slots, sync=True)
    next(steps)
    steps.send(case.objects[0])
    torch.testing.assert_close(connector.get_kv(0)[0], case.keys[0], rtol=1e-5, atol=1e-5)
    assert (connector.get_kv(0)[0] - case.objects[0][0].tensor[0]).abs().max() > 0.1  # it did move


def test_two_buffers(monkeypatch):  # B6: made at construction, and what get_kv shows takes turns in them
    made = []
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(tuple(a[0]) if isinstance(a[0], tuple) else a) or real(*a, **k))
    table, _ = pages()
    connector = connector_for(table, ROPES["neox"], staging=40)
    assert made.count((2, 40, 16)) == 2 and HIDDEN == 16
    before = len(made)
    case = Case([(0, 40)], [0], ROPES["neox"])
    steps = connector.batched_to_gpu([0], [40], slot_mapping=case.slots, sync=True)
    next(steps)
    seen = []
    for layer in range(L):
        steps.send(case.objects[layer])
        seen.append(connector.get_kv(layer)[0].data_ptr())
    list(steps)
    assert seen == [b.data_ptr() for b in (*connector._buffers, connector._buffers[0])] and seen[0] != seen[1]
    assert len(made) == before


def test_what_compute_repairs_goes_to_the_pages():  # B15's place: rows written to the buffer are the rows that are kept
    table, _ = pages()
    case = Case([(0, 4), (6, 10)], [0, 50], ROPES["neox"])
    connector = connector_for(table, ROPES["neox"])
    steps = connector.batched_to_gpu(case.starts, case.ends, slot_mapping=case.slots, sync=True)
    next(steps)
    for layer in range(L):
        steps.send(case.objects[layer])
        keys, values = connector.get_kv(layer)
        keys[4:6], values[4:6] = 3.0 + layer, 5.0
    list(steps)
    for layer in range(L):
        for token in (4, 5):
            slot = int(case.slots[token])
            assert (row(table, layer, 0, slot) == 3.0 + layer).all() and (row(table, layer, 1, slot) == 5.0).all()


def test_get_kv_before_a_load():  # B9
    connector = connector_for(pages()[0], ROPES["neox"])
    with pytest.raises(ValueError, match="layer 0 is not in a buffer: loaded now are none"):
        connector.get_kv(0)


def test_a_layer_left_in_the_map():  # B10
    case = Case([(0, 8)], [0], ROPES["neox"])
    connector = connector_for(pages()[0], ROPES["neox"])
    steps = connector.batched_to_gpu([0], [8], slot_mapping=case.slots, sync=True)
    next(steps)
    for layer in range(L):
        steps.send(case.objects[layer])
    connector.loaded[7] = torch.zeros(2, 8, HIDDEN)
    with pytest.raises(StepOrderError, match=r"layers \[7\] are still in the buffer map"):
        next(steps)
    assert connector.loaded == {}


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"rope": ROPES["neox"]}, "use_gpu"),  # B3
    ({"rope": ROPES["neox"], "staging_tokens": -1}, "use_gpu"),
    ({"staging_tokens": 8}, "give rope="),
    ({"staging_tokens": 8, "rope": ROPES["neox"], "format": LayerFormat.KV_T2D}, "as KV_2TD"),  # L36
    ({"staging_tokens": 8, "rope": Rope(kind="longrope", rotary_dim=D)}, "cannot be re-rotated exactly"),  # B20's spirit: at the start
])  # fmt: skip
def test_what_cannot_be_made(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        BufferedConnector(pages()[0], **kwargs)
    if "format" not in kwargs and kwargs.get("staging_tokens") == 8 and "rope" not in kwargs:
        with pytest.raises(ConfigError, match="1 planes"):
            BufferedConnector(pages("MLA")[0], staging_tokens=8, rope=ROPES["neox"])


def test_wrong_objects():  # L35 L34
    connector = connector_for(pages()[0], ROPES["neox"], staging=16)
    slots = torch.arange(20)

    def start(starts=(0,), ends=(8,)):
        steps = connector.batched_to_gpu(starts, ends, slot_mapping=slots, sync=True)
        next(steps)
        return steps

    tensor = torch.zeros(2, 8, HIDDEN)
    for bad in (
        tensor,
        LayerObject(tensor, TWO_TD),
        LayerObject(tensor, TWO_TD, torch.arange(7)),
        LayerObject(tensor, TWO_TD, torch.arange(8.0)),
    ):
        with pytest.raises(ShapeError, match="chunk 0: wanted the 8 int64 positions its keys stand at"):
            start().send([bad])
    with pytest.raises(ValueError, match="its format is KV_T2D, this connector takes KV_2TD"):
        start().send([LayerObject(torch.zeros(8, 2, HIDDEN), LayerFormat.KV_T2D, torch.arange(8))])
    with pytest.raises(ShapeError, match="a load of 17 tokens does not fit into staging_tokens=16"):
        start((0, 15), (2, 17))
    for name, kwargs in (("slot_mapping", {"sync": True}), ("sync", {"slot_mapping": slots})):
        with pytest.raises(ValueError, match=f"{name} is missing"):
            connector.batched_to_gpu([0], [8], **kwargs)
    assert start() is not None  # after all these, the buffers are free again


def test_one_load_at_a_time():  # L43: and a closed one gives the buffers back
    case = Case([(0, 8)], [3], ROPES["neox"])
    connector = connector_for(pages()[0], ROPES["neox"])
    first = connector.batched_to_gpu([0], [8], slot_mapping=case.slots, sync=True)
    next(first)
    first.send(case.objects[0])
    second = connector.batched_to_gpu([0], [8], slot_mapping=case.slots, sync=True)
    with pytest.raises(QcapError, match="another load is in the two buffers"):
        next(second)
    assert list(connector.loaded) == [0]  # and the first one did not notice
    first.close()
    assert connector.loaded == {}
    third = connector.batched_to_gpu([0], [8], slot_mapping=case.slots, sync=True)
    next(third)
    third.send(case.objects[0])
    torch.testing.assert_close(connector.get_kv(0)[0], case.keys[0], rtol=1e-5, atol=1e-5)


def test_nothing_cached():  # B25 L37
    connector = connector_for(pages()[0], ROPES["neox"])
    steps = connector.batched_to_gpu([], [], slot_mapping=torch.arange(0), sync=True)
    next(steps)
    for _ in range(L):
        steps.send([])
    assert len(list(steps)) == 1


@pytest.mark.parametrize("sync", [True, False])
def test_who_waits_for_whom(sync):  # B1 B23 L14: loads run ahead of compute by one layer; the host never waits
    fake = FakeDevice()
    connector = connector_for(pages()[0], ROPES["neox"], device_module=fake)
    case = Case([(0, 8)], [3], ROPES["neox"])
    steps = connector.batched_to_gpu([0], [8], slot_mapping=case.slots, sync=sync)
    next(steps)
    for layer in range(L):
        before = len(fake.waits("load"))
        steps.send(case.objects[layer])
        assert [w[1] for w in fake.waits("compute")] == ["load"] * (layer + 1)  # for this layer's rotation
        waited = fake.waits("load")[before:]
        assert [w[1] for w in waited] == ["compute"] * (layer > 0)  # the buffer of layer - 1 is compute's until then
        if layer:  # compute's mark was made before it was told to wait for this layer: else the two layers would run one by one
            assert waited[0][2] < fake.waits("compute")[-1][2]
    list(steps)
    assert len(fake.waits("compute")) == L + sync


def test_positions_are_stored():  # B8 B28: with the object, at store time; one gather a layer for all segments
    table, _ = pages()
    for layer in range(L):
        for plane in range(2):
            for slot in range(B * N):
                row(table, layer, plane, slot).fill_(1000 * layer + 500 * plane + slot)
    connector = connector_for(table, ROPES["neox"])
    spans = [(4, 12), (12, 20)]
    made = empty_objects(spans, TWO_TD)
    made[1][0].positions = torch.arange(90, 98)
    slots = torch.arange(40, 20, -1)
    assert len(connector._groups(spans, slots, None)) == 1
    assert run_store(connector, made, spans, slots) == L + 1
    for layer, chunks in enumerate(made):
        for (a, b), obj in zip(spans, chunks, strict=True):
            assert obj.positions.tolist() == list(range(90, 98) if layer == 1 and a == 4 else range(a, b))
            for plane in range(2):
                assert obj.tensor[plane, :, 0].tolist() == [1000 * layer + 500 * plane + int(slots[t]) for t in range(a, b)]
