"""Which connector moves a layer where, and that it moves exactly that: against a dull reference, with poison and guards."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from connector_makers import (
    HIDDEN,
    POISON,
    B,
    D,
    FakeDevice,
    H,
    L,
    N,
    dull_load,
    empty_objects,
    objects,
    pages,
    planes_of,
    row,
    run_load,
    run_store,
)

from qcap import connectors
from qcap.connectors import (
    BatchConnector,
    BufferedConnector,
    ChunkConnector,
    Connector,
    LayerConnector,
    LayerFormat,
    LayerObject,
    MusaConnector,
    PagedConnector,
    SGLangConnector,
    UnknownPlatform,
    build,
    check_layerwise,
    choose,
    layer_format,
    pool_table,
    register,
)
from qcap.connectors.slots import BlockPlan, MaskedPlan, RowPlan, block_plan, plan
from qcap.errors import ConfigError, QcapError, ShapeError, Unsupported
from qcap.geometry import Rope
from qcap.layerwise import device_module, streams_for

T2D, TWO_TD, MLA = LayerFormat.KV_T2D, LayerFormat.KV_2TD, LayerFormat.KV_MLA

# ---- the table --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "xpu", "cpu"])
def test_vllm_layerwise(device):  # L24
    assert choose(engine="vllm", device=device, layerwise=True) is PagedConnector


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_vllm_blending(device):  # L25
    assert choose(engine="vllm", device=device, layerwise=True, blending=True) is BufferedConnector


@pytest.mark.parametrize("device", ["cuda", "xpu", "musa", "cpu"])
def test_sglang_layerwise(device):  # L26
    assert choose(engine="sglang", device=device, layerwise=True) is SGLangConnector


def test_musa_has_pages_only():  # L27
    assert choose(engine="vllm", device="musa", layerwise=True) is MusaConnector
    with pytest.raises(ConfigError, match="blending exists on cuda and xpu only, this is musa"):
        choose(engine="vllm", device="musa", layerwise=True, blending=True)


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_hpu_is_refused_by_name(engine, layerwise):  # L28
    with pytest.raises(ValueError, match="HPU"):
        choose(engine=engine, device="hpu", layerwise=layerwise)


@pytest.mark.parametrize("flag", ["blending", "v3"])
@pytest.mark.parametrize("device", ["musa", "cpu", "hpu"])
def test_blending_and_v3_off_cuda_and_xpu(device, flag):  # L29
    with pytest.raises(
        ValueError, match="HPU" if device == "hpu" else f"{flag} exists on cuda and xpu only, this is {device}: turn it off"
    ):
        choose(engine="vllm", device=device, layerwise=flag == "blending", **{flag: True})


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_whole_chunks(device):  # L30
    assert choose(engine="vllm", device=device, v3=True) is BatchConnector
    assert choose(engine="vllm", device=device, v3=False) is ChunkConnector


def test_unknown_platforms():  # L31
    for error in (RuntimeError, ValueError, QcapError):
        with pytest.raises(error, match="unknown device 'foo': known are cuda, xpu"):
            choose(engine="vllm", device="foo", layerwise=True)
        with pytest.raises(error, match="unknown engine 'foo': known are vllm"):
            choose(engine="foo", device="cuda")
    with pytest.raises(UnknownPlatform, match="did you mean 'sglang'"):
        choose(engine="sglan", device="cuda")


@pytest.mark.parametrize("layerwise", [True, False])
def test_tensorrt_is_refused(layerwise):  # L31
    with pytest.raises(ValueError, match="TensorRT-LLM: nothing is moved " + ("layer by layer" if layerwise else "into its pages")):
        choose(engine="trtllm", device="cuda", layerwise=layerwise)


@pytest.mark.parametrize(("flags", "message"), [
    ({"blending": True}, "a layer at a time: set qcap.layerwise too"),
    ({"layerwise": True, "v3": True}, "means nothing with layerwise"),
    ({"layerwise": True, "blending": True, "pd": True}, r"P/D"),  # L32
    ({"layerwise": True, "blending": True, "staging": False}, "use_gpu"),  # B3
    ({"engine": "sglang"}, "sglang on cuda has no connector for whole chunks; it has: layerwise"),
    ({"engine": "sglang", "layerwise": True, "blending": True}, r"no connector for layerwise\+blending"),
])  # fmt: skip
def test_what_does_not_go_together(flags, message):
    with pytest.raises(ConfigError, match=message):
        choose(**{"engine": "vllm", "device": "cuda", **flags})


def test_pd_has_no_staging():  # L32
    table, _ = pages()
    kwargs = {"engine": "vllm", "device": "cpu", "layerwise": True, "staging_tokens": 32}
    assert build(table, **kwargs).use_gpu is True
    connector = build(table, **kwargs, pd=True)
    assert connector.use_gpu is False and connector._load_buffer is None and connector._store_buffer is None
    with pytest.raises(ConfigError, match="P/D"):
        build(table, engine="vllm", device="cuda", layerwise=True, blending=True, pd=True, staging_tokens=32)
    with pytest.raises(ConfigError, match="use_gpu"):
        build(table, engine="vllm", device="cuda", layerwise=True, blending=True)


def test_the_check_asks_for_the_capability():  # L33
    for case, cls in connectors.table().items():
        assert cls.layerwise is case.layerwise and cls.blending is case.blending
        if case.layerwise:
            check_layerwise(cls)
        else:
            with pytest.raises(ConfigError, match=f"{cls.__name__} moves whole chunks"):
                check_layerwise(cls)
    with pytest.raises(ConfigError, match="ChunkConnector moves whole chunks"):
        check_layerwise(ChunkConnector(pages()[0]))


def test_every_case_has_an_answer():
    """All of engine x device x flags: a class of the table, or a message that says what to change."""
    flags = ("layerwise", "blending", "v3", "pd")
    seen = set()
    for engine, device in itertools.product(("vllm", "sglang", "trtllm"), ("cuda", "xpu", "cpu", "musa", "hpu")):
        for values in itertools.product((False, True), repeat=len(flags)):
            try:
                seen.add(choose(engine=engine, device=device, **dict(zip(flags, values, strict=True))))
            except ConfigError as error:
                assert len(str(error)) > 20
    assert seen == set(connectors.table().values())


def test_a_place_is_taken_once():
    with pytest.raises(ConfigError, match="PagedConnector's place already; MusaConnector cannot have it"):
        register("vllm", "cuda", layerwise=True)(MusaConnector)
    before = connectors.table()
    with pytest.raises(ConfigError, match="ChunkConnector says layerwise=False"):
        register("vllm", "hpu", layerwise=True)(ChunkConnector)
    assert connectors.table() == before


# ---- formats ------------------------------------------------------------------------------------------------------------------------


def test_formats():  # L36
    assert layer_format() is T2D and layer_format(blending=True) is TWO_TD and layer_format(mla=True) is MLA
    assert (T2D.shape(5, 3), TWO_TD.shape(5, 3), MLA.shape(5, 3)) == ((5, 2, 3), (2, 5, 3), (5, 3))
    with pytest.raises(ShapeError, match="turn blending off for this model"):
        layer_format(blending=True, mla=True)
    table, _ = pages()
    assert PagedConnector(table).format is T2D
    assert BufferedConnector(table, staging_tokens=8, rope=Rope(kind="none")).format is TWO_TD
    assert PagedConnector(pages("MLA")[0]).format is MLA
    with pytest.raises(ConfigError, match="KV_MLA has 1 planes, these pages have 2"):
        PagedConnector(table, format=MLA)
    with pytest.raises(ConfigError, match="KV_T2D has 2 planes, these pages have 1"):
        PagedConnector(pages("MLA")[0], format=T2D)


@pytest.mark.parametrize("staging", [0, 64])
@pytest.mark.parametrize(("wrong", "message"), [
    (lambda: LayerObject(torch.zeros(2, 8, HIDDEN), TWO_TD), "its format is KV_2TD, this connector takes KV_T2D"),
    (lambda: torch.zeros(2, 8, HIDDEN), r"layer 1, chunk 1: wanted KV_T2D \(8, 2, 16\) of torch.float32, got \(2, 8, 16\)"),
    (lambda: torch.zeros(8, HIDDEN), r"wanted KV_T2D"),
    (lambda: torch.zeros(4, 2, HIDDEN), r"got \(4, 2, 16\)"),
    (lambda: torch.zeros(8, 2, HIDDEN, dtype=torch.bfloat16), "of torch.bfloat16"),
    (lambda: torch.zeros(2, 8, HIDDEN).transpose(0, 1), r"in contiguous runs, got strides \(16, 128, 1\)"),
    (lambda: [1], "wanted a tensor or a LayerObject, got list"),
])  # fmt: skip
def test_the_format_is_checked(wrong, message, staging):  # L35
    table, whole = pages()
    connector = PagedConnector(table, staging_tokens=staging)
    spans = [(0, 8), (8, 16)]
    steps = connector.batched_to_gpu([0, 8], [8, 16], slot_mapping=torch.arange(16), sync=True)
    next(steps)
    made = objects(spans, T2D)
    steps.send(made[0])
    before = [t.clone() for t in whole]
    with pytest.raises(ValueError, match=message):
        steps.send([made[1][0], wrong()])
    assert all(torch.equal(a, b) for a, b in zip(whole, before, strict=True))  # checked before the first row is moved
    stored = [made[0], [made[1][0], wrong()], made[2]]
    store = connector.batched_from_gpu(stored, [0, 8], [8, 16], slot_mapping=torch.arange(16), sync=True)
    next(store)
    with pytest.raises(ValueError, match=message):
        next(store)


# ---- arguments ------------------------------------------------------------------------------------------------------------------------


def test_required_arguments():  # L34
    connector = PagedConnector(pages()[0])
    slots = torch.arange(8)
    made = empty_objects([(0, 8)], T2D)
    for missing, kwargs in (("slot_mapping", {"sync": True}), ("sync", {"slot_mapping": slots})):
        with pytest.raises(ValueError, match=f"^{missing} is missing"):
            connector.batched_to_gpu([0], [8], **kwargs)
        with pytest.raises(ValueError, match=f"^{missing} is missing"):
            connector.batched_from_gpu(made, [0], [8], **kwargs)


@pytest.mark.parametrize(("starts", "ends", "slots", "message"), [
    ([0, 8], [8], torch.arange(16), "no rising bounds"),
    ([0, 4], [8, 12], torch.arange(16), "no rising bounds"),
    ([8, 0], [16, 8], torch.arange(16), "no rising bounds"),
    ([0], [0], torch.arange(16), "no rising bounds"),
    ([-4], [4], torch.arange(16), "no rising bounds"),
    ([0], [17], torch.arange(16), "within 16 slots"),
    ([0], [8], torch.arange(16.0), r"wanted an integer tensor \[T\], got torch.float32"),
    ([0], [8], torch.zeros(2, 8, dtype=torch.int64), r"\(2, 8\)"),
    ([0], [8], [1, 2], "got list"),
    ([0], [8], torch.zeros(8, dtype=torch.int64, device="meta"), "slot_mapping is on meta"),
])  # fmt: skip
def test_bounds_and_slots(starts, ends, slots, message):
    connector = PagedConnector(pages()[0])
    with pytest.raises(ValueError, match=message):
        connector.batched_to_gpu(starts, ends, slot_mapping=slots, sync=True)


def test_other_wrong_arguments():
    table, _ = pages()
    connector = PagedConnector(table, staging_tokens=8)
    with pytest.raises(ConfigError, match="staging_tokens must be 0"):
        PagedConnector(table, staging_tokens=-1)
    with pytest.raises(ShapeError, match="wanted one list a layer, 3; got 1"):
        connector.batched_from_gpu([[]], [], [], slot_mapping=torch.arange(4), sync=True)
    with pytest.raises(ShapeError, match="slot 48 lies beyond the 48 slots"):
        next(connector.batched_to_gpu([0], [4], slot_mapping=torch.arange(45, 49), sync=True))
    with pytest.raises(ShapeError, match="a chunk of 12 tokens does not fit into staging_tokens=8"):
        next(connector.batched_to_gpu([0], [12], slot_mapping=torch.arange(12), sync=True))
    steps = connector.batched_to_gpu([0], [4], slot_mapping=torch.arange(4), sync=True)
    next(steps)
    with pytest.raises(ShapeError, match="layer 0: no host objects came"):
        next(steps)
    steps = connector.batched_to_gpu([0], [4], slot_mapping=torch.arange(4), sync=True)
    next(steps)
    with pytest.raises(ShapeError, match="layer 0: wanted one object a chunk, 1; got 0"):
        steps.send([])


# ---- moves, against the dull reference ---------------------------------------------------------------------------------------------


def cut(total, rng):
    """Rising chunk bounds within ``total`` tokens, with holes now and then."""
    spans, at = [], rng.choice([0, 0, N, 3])
    while at < total:
        end = min(total, at + rng.choice([N, 2 * N, 2 * N, 5, 1]))
        spans.append((at, end))
        at = end + rng.choice([0, 0, 0, 2])
    return spans


def mapping(kind, rng, dtype=torch.int64):
    """Slots of a request of up to B * N tokens."""
    blocks = rng.sample(range(B), rng.randint(2, 9))
    slots = [b * N + i for b in blocks for i in range(N)]
    if kind == "rows":
        slots = rng.sample(range(B * N), len(slots))
    if kind == "dropped":
        slots = [-1 if rng.random() < 0.3 else s for s in slots]
    if kind == "none":
        slots = [-1] * len(slots)
    return torch.tensor(slots, dtype=dtype)


KINDS = ("blocks", "rows", "dropped", "none")


@pytest.mark.parametrize("staging", [0, 8, 16, 200])
@pytest.mark.parametrize("fmt", [T2D, TWO_TD])
@pytest.mark.parametrize("layout", ["B2NHD", "2BNHD", "BH(Kt,V)"])
def test_any_slots_there_and_back(layout, fmt, staging):  # L44 L13 L2 L3: each chunk its own slots, staged or not; yields N+2 and N+1
    rng = random.Random(f"{layout}{fmt}{staging}")
    ways = set()
    for seed in range(24):
        kind = KINDS[seed % 4]
        slots = mapping(kind, rng, rng.choice([torch.int64, torch.int32]))
        spans = cut(len(slots), rng)
        table, whole = pages(layout)
        wanted, wanted_whole = pages(layout)
        made = objects(spans, fmt, seed=seed)
        connector = PagedConnector(table, staging_tokens=staging, format=fmt)
        ways |= {type(g.plan) for g in connector._groups(spans, slots, None)}
        assert run_load(connector, made, spans, slots) == L + 2
        dull_load(wanted, made, spans, slots)
        assert all(torch.equal(a, b) for a, b in zip(whole, wanted_whole, strict=True)), (seed, kind)  # guards included
        back = empty_objects(spans, fmt)
        assert run_store(connector, back, spans, slots) == L + 1
        for layer, (got, sent) in enumerate(zip(back, made, strict=True)):
            for (start, end), a, b in zip(spans, got, sent, strict=True):
                placed = slots[start:end] >= 0
                assert torch.equal(planes_of(a), planes_of(b) * placed[None, :, None]), (seed, layer)  # without a place: zeros
        assert all(torch.equal(a, b) for a, b in zip(whole, wanted_whole, strict=True))  # a store changes nothing
    assert ways == {BlockPlan, RowPlan}  # both branches ran


@pytest.mark.parametrize("staging", [0, 16])
def test_latent_rows(staging):  # L36 L35
    table, whole = pages("MLA")
    wanted, wanted_whole = pages("MLA")
    spans, slots = [(0, 8), (8, 13)], torch.randperm(B * N)[:13]
    connector = PagedConnector(table, staging_tokens=staging)
    made = objects(spans, MLA)
    assert run_load(connector, made, spans, slots) == L + 2
    for layer in range(L):
        for (start, end), obj in zip(spans, made[layer], strict=True):
            for token in range(start, end):
                row(wanted, layer, 0, int(slots[token])).view(-1).copy_(obj.tensor[token - start])
    assert all(torch.equal(a, b) for a, b in zip(whole, wanted_whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_are_kept(dtype):
    table, _ = pages(dtype=dtype)
    spans, slots = [(0, 8), (8, 16)], torch.arange(16).flip(0)
    made = objects(spans, T2D, dtype=dtype)
    made[1][0].tensor[0, 0, :3] = torch.tensor([float("inf"), -0.0, float("nan")], dtype=dtype)
    back = empty_objects(spans, T2D, dtype=dtype)
    connector = PagedConnector(table, staging_tokens=16)
    run_load(connector, made, spans, slots)
    run_store(connector, back, spans, slots)
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    for a, b in zip(itertools.chain(*made), itertools.chain(*back), strict=True):
        assert torch.equal(a.tensor.view(bits), b.tensor.view(bits))


def test_two_chunks_without_staging_by_hand():  # L44
    table, whole = pages(n=1)
    connector = PagedConnector(table)
    made = [[torch.full((2, 2, HIDDEN), 10.0 * layer + chunk) for chunk in (1, 2)] for layer in range(L)]
    run_load(connector, made, [(0, 2), (2, 4)], torch.tensor([7, 3, 0, 11]))
    for layer in range(L):
        found = [float(row(table, layer, 0, slot)[0, 0]) for slot in range(B)]
        assert found == [10.0 * layer + {7: 1, 3: 1, 0: 2, 11: 2}[s] if s in (0, 3, 7, 11) else POISON for s in range(B)]
    assert all((t[0] == POISON).all() and (t[-1] == POISON).all() for t in whole)


def test_nothing_to_move():  # L37: a miss is a load of no chunks, and yields as often
    table, whole = pages()
    connector = PagedConnector(table, staging_tokens=8)
    assert run_load(connector, [[]] * L, [], torch.arange(0)) == L + 2
    assert run_store(connector, [[]] * L, [], torch.arange(0)) == L + 1
    assert all((t == POISON).all() for t in whole)


def test_requests_side_by_side_share_the_buffer():
    table, whole = pages()
    wanted, wanted_whole = pages()
    connector = PagedConnector(table, staging_tokens=8)
    spans = [(0, 8)]
    slots = [torch.arange(8), torch.arange(20, 28), torch.randperm(16)[:8] + 30]
    made = [objects(spans, T2D, seed=i) for i in range(3)]
    steps = [connector.batched_to_gpu([0], [8], slot_mapping=s, sync=i == 2) for i, s in enumerate(slots)]
    for step in steps:
        next(step)
    for layer in range(L):
        for i, step in enumerate(steps):
            step.send(made[i][layer])
    for step in steps:
        assert len(list(step)) == 1
    for i, s in enumerate(slots):
        dull_load(wanted, made[i], spans, s)
    assert all(torch.equal(a, b) for a, b in zip(whole, wanted_whole, strict=True))


# ---- slots known to the device alone -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["B2NHD", "BH(Kt,V)"])
def test_masked_slots(layout):
    rng = random.Random(layout)
    for seed in range(24):
        slots = mapping(KINDS[seed % 4], rng)
        if seed % 3 == 0 and len(slots) > 3:
            slots[2] = B * N + 5  # out of range: no place
        table, whole = pages(layout)
        wanted, wanted_whole = pages(layout)
        way = MaskedPlan.of(slots, B * N, N)
        rows = torch.randn(2, len(slots), HIDDEN, generator=torch.Generator().manual_seed(seed))
        dull_load(wanted, [[LayerObject(rows, TWO_TD)]], [(0, len(slots))], slots)
        way.write(table, 0, rows)
        assert all(torch.equal(a, b) for a, b in zip(whole, wanted_whole, strict=True)), seed
        out = torch.full_like(rows, float("nan"))
        way.read(table, 0, out)
        assert torch.equal(out, rows * ((slots >= 0) & (slots < B * N))[None, :, None])


def test_which_way_is_taken():
    table, _ = pages()
    assert isinstance(plan(torch.tensor([8, 9, 10, 11, 0, 1, 2, 3]), table), BlockPlan)
    assert plan(torch.tensor([8, 9, 10, 11, 0, 1, 2, 3]), table).block_ids.tolist() == [2, 0]
    for slots in ([8, 9, 10], [8, 9, 11, 10], [1, 2, 3, 4], [-4, -3, -2, -1], []):
        assert isinstance(plan(torch.tensor(slots, dtype=torch.int32), table), RowPlan)
    assert isinstance(plan(torch.arange(4), pages(n=1)[0]), RowPlan)  # a token pool: one copy for all rows, not a program a row
    assert isinstance(block_plan(torch.tensor([1, 0]), table), BlockPlan)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("staging", [0, 2, 8, 64])
def test_steps_by_block(staging, kernels, monkeypatch):
    """``prepare``, ``to_device``, ``from_device``: whole blocks on the caller's stream; on a device without kernels too."""
    if not kernels:
        monkeypatch.setattr("qcap.connectors.slots._KERNEL_DEVICES", ())
    table, whole = pages()
    wanted, wanted_whole = pages()
    connector = PagedConnector(table, staging_tokens=staging)
    ids = [5, 2, -1, 11, 0, 7]
    source = torch.randn(2, L, len(ids) * N, HIDDEN)
    blocks = connector.prepare(ids)
    slots = torch.tensor([b * N + i if b >= 0 else -1 for b in ids for i in range(N)])
    for layer in range(L):
        connector.to_device(layer, source[:, layer], blocks)
    dull_load(wanted, [[LayerObject(source[:, i], TWO_TD)] for i in range(L)], [(0, len(slots))], slots)
    assert all(torch.equal(a, b) for a, b in zip(whole, wanted_whole, strict=True))
    targets = [torch.full((2, 2 * N, HIDDEN), float("nan")) for _ in range(2)]
    connector.from_device(1, blocks[2:][1:][:2].clone(), targets[:1])
    assert torch.equal(targets[0], source[:, 1, 3 * N : 5 * N]) and targets[1].isnan().all()
    connector.from_device(2, connector.prepare([5, 2, 11, 0]), targets)
    assert torch.equal(torch.cat(targets, 1), torch.cat([source[:, 2, : 2 * N], source[:, 2, 3 * N : 5 * N]], 1))
    connector.from_device(0, blocks[:0], [])
    with pytest.raises(ShapeError, match=r"a layer's rows are \(2, 24, 16\)"):
        connector.to_device(0, source[:, 0, 1:], blocks)
    with pytest.raises(ShapeError, match="do not fill 2 chunks of 8"):
        connector.from_device(0, blocks, targets)


def test_pages_made_in_inference_mode():
    with torch.inference_mode():
        table, _ = pages()
    spans, slots = [(0, 8), (8, 13)], torch.randperm(B * N)[:13]
    made, back = objects(spans, T2D), empty_objects(spans, T2D)
    connector = PagedConnector(table, staging_tokens=16)
    run_load(connector, made, spans, slots)
    run_store(connector, back, spans, slots)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(itertools.chain(*made), itertools.chain(*back), strict=True))
    assert not connector._load_buffer.is_inference()


@pytest.mark.parametrize("kernels", [True, False])
def test_warming_up_touches_no_page(kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr("qcap.connectors.slots._KERNEL_DEVICES", ())
    table, whole = pages()
    before, written = [t.clone() for t in whole], []
    connector = PagedConnector(table, staging_tokens=16)
    real = connector.write
    monkeypatch.setattr(connector, "write", lambda layer, rows, ids: (written.append(ids.tolist()), real(layer, rows, ids)))
    connector.warm_up()
    assert written == [[-1], [-1]] and all(torch.equal(a, b) for a, b in zip(whole, before, strict=True))


def test_staging_is_whole_blocks_and_for_stores_only_where_wanted():
    for staging, wanted in ((0, 0), (1, N), (N, N), (N + 1, 2 * N)):
        connector = PagedConnector(pages()[0], staging_tokens=staging)
        assert connector.staging_tokens == wanted and [b.numel() for b in connector.staging] == [2 * wanted * HIDDEN] * (
            2 if staging else 0
        )
    connector = PagedConnector(pages()[0], staging_tokens=N, store_staging=False)
    assert len(connector.staging) == 1
    target = torch.zeros(2, N, HIDDEN)
    connector.to_device(0, torch.ones(2, N, HIDDEN), connector.prepare([3]))
    connector.from_device(0, connector.prepare([3]), [target])
    assert (target == 1).all()


@pytest.mark.parametrize("contiguous", [True, False])
def test_copies_are_plain_memory_copies(contiguous, monkeypatch):
    """One where both sides are contiguous, else one a plane."""
    connector = PagedConnector(pages()[0], staging_tokens=4 * N)
    whole = torch.randn(2, 4 * N, HIDDEN)
    rows = whole if contiguous else whole[:, : 2 * N]
    copies = []
    real = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda a, b, **k: (copies.append((a.is_contiguous(), b.is_contiguous())), real(a, b, **k))[1]
    )
    ids = connector.prepare(range(rows.shape[1] // N))
    monkeypatch.setattr("qcap.connectors.slots.BlockPlan.write", lambda *a: None)
    connector.to_device(0, rows, ids)
    assert copies == [(True, True)] * (1 if contiguous else 2)
    copies.clear()
    monkeypatch.setattr("qcap.connectors.slots.BlockPlan.read", lambda *a: None)
    connector.from_device(0, ids, [rows])
    assert copies == [(True, True)] * (1 if contiguous else 2)


def test_threads_take_turns_in_a_staging_buffer():
    connector = PagedConnector(pages()[0], staging_tokens=N)
    rows = [torch.full((2, 4 * N, HIDDEN), float(i)) for i in range(3)]
    ids = [connector.prepare(range(4 * i, 4 * i + 4)) for i in range(3)]
    with ThreadPoolExecutor(3) as threads:
        for _ in range(40):
            list(threads.map(lambda i: connector.to_device(0, rows[i], ids[i]), range(3)))
            got = [torch.zeros(2, 4 * N, HIDDEN) for _ in range(3)]
            list(threads.map(lambda i, got: connector.from_device(0, ids[i], [got]), range(3), got))
            assert all(torch.equal(a, b) for a, b in zip(got, rows, strict=True))


# ---- streams ------------------------------------------------------------------------------------------------------------------------


def test_three_streams():  # L14
    fake = FakeDevice()
    connector = PagedConnector(pages()[0], device_module=fake)
    streams = [fake.compute, connector.load_stream, connector.store_stream]
    assert [s.name for s in streams] == ["compute", "load", "store"] and len({id(s) for s in streams}) == 3
    on_cpu = PagedConnector(pages()[0])
    assert on_cpu.load_stream is None and on_cpu.store_stream is None and on_cpu.load_event() is None and on_cpu.store_event() is None


def test_a_device_that_torch_does_not_know():
    assert device_module(torch.device("cpu")) is None and device_module(torch.device("cuda")) is torch.cuda
    with pytest.raises(ConfigError, match=r"no streams for device 'privateuseone' here: import its plug-in"):
        streams_for(torch.device("privateuseone"))


@pytest.mark.parametrize("cls", [PagedConnector, MusaConnector, SGLangConnector])
def test_the_last_request_makes_compute_wait(cls):  # L15 L17: once a layer, for its own event, and nobody else
    fake = FakeDevice()
    connector = cls(pages(n=1)[0], staging_tokens=8, device_module=fake)
    spans = [(0, 8)]
    steps = [connector.batched_to_gpu([0], [8], slot_mapping=torch.arange(8), sync=sync) for sync in (False, False, True)]
    for step in steps:
        next(step)
    assert [w[1] for w in fake.waits("load")] == ["compute"] * 3  # pages may still be read by an earlier step
    made, seen = objects(spans, T2D), []
    for layer in range(L):
        for step in steps:
            step.send(made[layer])
        seen.append(len(fake.waits("compute")))
    for step in steps:
        next(step)
        with pytest.raises(StopIteration):
            next(step)
    assert seen == [0, 1, 2]  # with layer i in flight compute waits for layer i - 1
    waits = fake.waits("compute")
    assert len(waits) == L and {w[1] for w in waits} == {"load"}
    assert [w[2] for w in waits] == sorted({w[2] for w in waits})
    assert fake.waits("store") == [] and ("on", "load") in fake.log and ("on", "store") not in fake.log


def test_without_sync_compute_does_not_wait():  # L15
    fake = FakeDevice()
    connector = PagedConnector(pages()[0], device_module=fake)
    run_load(connector, objects([(0, 8)], T2D), [(0, 8)], torch.arange(8), sync=False)
    assert fake.waits("compute") == []


@pytest.mark.parametrize("sync", [True, False])
def test_a_store_waits_for_compute(sync):  # L16: for every layer, by event; the host never
    fake = FakeDevice()
    connector = PagedConnector(pages()[0], staging_tokens=8, device_module=fake)
    steps = connector.batched_from_gpu(empty_objects([(0, 8)], T2D), [0], [8], slot_mapping=torch.arange(8), sync=sync)
    for layer in range(L):
        next(steps)
        waits = fake.waits("store")
        assert [w[1] for w in waits] == ["compute"] * (layer + 2)  # at the start, and each layer's own
        assert fake.log.index(waits[-1]) < len(fake.log) - 1 - fake.log[::-1].index(("on", "store"))
    assert fake.waits("compute") == []
    next(steps)
    assert [w[1] for w in fake.waits("compute")] == (["store"] if sync else [])
    assert fake.waits("load") == []


def test_objects_are_held_until_copied():  # L42
    fake = FakeDevice()
    connector = PagedConnector(pages()[0], staging_tokens=8, device_module=fake)
    spans = [(0, 8)]
    run_load(connector, objects(spans, T2D), spans, torch.arange(8))
    run_store(connector, empty_objects(spans, T2D), spans, torch.arange(8))
    assert connector.objects_held == 2 * L
    fake.over = True
    assert connector.objects_held == 0


def test_buffers_are_made_at_construction(monkeypatch):  # L23 L17: and never in a load or store
    made = []
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(a) or real(*a, **k))
    connector = PagedConnector(pages()[0], staging_tokens=16)
    assert made == [(2 * 16 * HIDDEN,)] * 2 and connector.use_gpu
    run_load(connector, objects([(0, 16)], T2D), [(0, 16)], torch.arange(16))
    run_store(connector, empty_objects([(0, 16)], T2D), [(0, 16)], torch.arange(16))
    assert len(made) == 2
    assert PagedConnector(pages()[0]).use_gpu is False


def test_closed_early():  # L43: nothing was taken that must be given back, and the next load is right
    table, whole = pages()
    wanted, wanted_whole = pages()
    connector = PagedConnector(table, staging_tokens=8)
    made = objects([(0, 8)], T2D)
    steps = connector.batched_to_gpu([0], [8], slot_mapping=torch.arange(8), sync=True)
    next(steps)
    steps.send(made[0])
    steps.close()
    run_load(connector, made, [(0, 8)], torch.arange(8))
    dull_load(wanted, made, [(0, 8)], torch.arange(8))
    assert all(torch.equal(a, b) for a, b in zip(whole, wanted_whole, strict=True))


# ---- SGLang's pool ---------------------------------------------------------------------------------------------------------------------


def synthetic_pool(slots=40, heads=H, head_size=D, layers=L, dtype=torch.float32, **more):
    """A pool with the attributes of SGLang's ``MHATokenToKVPool``."""
    k, v = ([torch.full((slots, heads, head_size), POISON, dtype=dtype) for _ in range(layers)] for _ in range(2))
    return SimpleNamespace(k_buffer=k, v_buffer=v, dtype=dtype, store_dtype=dtype, kv_cache_layout="nhd", k_scale_buffer=None, **more)


def sglang_pool():
    """SGLang's own, where it is installed."""
    module = pytest.importorskip("sglang.srt.mem_cache.memory_pool", exc_type=ImportError)
    pool = module.MHATokenToKVPool(
        size=39, page_size=1, dtype=torch.float32, head_num=H, head_dim=D, layer_num=L, device="cpu", enable_memory_saver=False
    )
    for t in (*pool.k_buffer, *pool.v_buffer):
        t.fill_(POISON)
    return pool


@pytest.mark.parametrize("staging", [0, 16])
@pytest.mark.parametrize("make", [synthetic_pool, sglang_pool])
@pytest.mark.parametrize("fmt", [T2D, TWO_TD])
def test_a_token_pool(make, fmt, staging):  # L26 L44
    rng = random.Random(f"{fmt}{staging}")
    for seed in range(8):
        pool = make()
        connector = SGLangConnector(pool, staging_tokens=staging, format=fmt)
        slots = torch.tensor([-1 if seed % 2 and rng.random() < 0.2 else s for s in rng.sample(range(39), 27)])
        slots[0] = 39
        spans = [(0, 8), (8, 16), (18, 27)]
        made, back = objects(spans, fmt, seed=seed), empty_objects(spans, fmt)
        assert run_load(connector, made, spans, slots) == L + 2
        for layer in range(L):
            wanted = torch.full((2, 40, H, D), POISON)
            for (start, end), obj in zip(spans, made[layer], strict=True):
                for token in range(start, end):
                    if slots[token] >= 0:
                        wanted[:, slots[token]] = planes_of(obj)[:, token - start].view(2, H, D)
            assert torch.equal(pool.k_buffer[layer], wanted[0]) and torch.equal(pool.v_buffer[layer], wanted[1])
        assert run_store(connector, back, spans, slots) == L + 1
        for a, b, (start, end) in zip(itertools.chain(*made), itertools.chain(*back), spans * L, strict=True):
            assert torch.equal(planes_of(b), planes_of(a) * (slots[start:end] >= 0)[None, :, None])


def test_a_pools_slots_are_blocks_of_one():
    pool = synthetic_pool()
    connector = SGLangConnector(pool)
    assert (connector.block_size, connector.num_layers, connector.hidden, connector.dtype) == (1, L, HIDDEN, torch.float32)
    source = torch.randn(2, 3, HIDDEN)
    connector.to_device(1, source, connector.prepare([4, -1, 0]))
    assert torch.equal(pool.k_buffer[1][[4, 0]].flatten(1), source[0, [0, 2]]) and (pool.k_buffer[0] == POISON).all()


@pytest.mark.parametrize(("change", "message"), [
    ({"k_buffer": None}, "no k_buffer and v_buffer"),
    ({"v_buffer": []}, "no k_buffer and v_buffer"),
    ({"kv_cache_layout": "hnd"}, "its layout is 'hnd'"),
    ({"k_buffer": [torch.zeros(4, D)] * L}, "only 'nhd'"),
    ({"store_dtype": torch.uint8}, "quantised"),
    ({"k_scale_buffer": [1]}, "quantised"),
    ({"v_buffer": [torch.zeros(40, H, 2 * D)] * L}, r"K \(40, 2, 8\) and V \(40, 2, 16\) differ"),
])  # fmt: skip
def test_pools_of_another_kind(change, message):
    pool = synthetic_pool()
    pool.__dict__.update(change)
    with pytest.raises(Unsupported, match=message):
        SGLangConnector(pool)
    with pytest.raises(Unsupported, match=message):
        pool_table(pool)


def test_pages_are_no_token_pool():
    with pytest.raises(ConfigError, match="these pages have 4: they are not SGLang's"):
        SGLangConnector(pages()[0])


# ---- whole chunks ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "staging"), [(ChunkConnector, 0), (BatchConnector, 0), (BatchConnector, 16), (BatchConnector, 200)])
def test_whole_chunks_there_and_back(cls, staging):  # L30
    rng = random.Random(staging)
    for seed in range(16):
        slots = mapping(KINDS[seed % 4], rng)
        spans = cut(len(slots), rng)
        table, whole = pages()
        wanted, wanted_whole = pages()
        connector = cls(table, staging_tokens=staging)
        assert connector.layerwise is False and isinstance(connector, Connector) and not isinstance(connector, LayerConnector)
        chunks = [torch.randn(2, L, end - start, HIDDEN) for start, end in spans]
        connector.to_gpu(chunks, [a for a, _ in spans], [b for _, b in spans], slot_mapping=slots)
        dull_load(wanted, [[LayerObject(c[:, i], TWO_TD) for c in chunks] for i in range(L)], spans, slots)
        assert all(torch.equal(a, b) for a, b in zip(whole, wanted_whole, strict=True))
        back = [torch.full_like(c, float("nan")) for c in chunks]
        connector.from_gpu(back, [a for a, _ in spans], [b for _, b in spans], slot_mapping=slots)
        for got, sent, (start, end) in zip(back, chunks, spans, strict=True):
            assert torch.equal(got, sent * (slots[start:end] >= 0)[None, None, :, None])


def test_whole_chunks_refuse():  # L34 L35
    connector = ChunkConnector(pages()[0])
    chunk = torch.zeros(2, L, 8, HIDDEN)
    for move in (connector.to_gpu, connector.from_gpu):
        with pytest.raises(ValueError, match="slot_mapping is missing"):
            move([chunk], [0], [8])
        with pytest.raises(ShapeError, match=r"chunk 0: wanted \(2, 3, 8, 16\)"):
            move([chunk[:, 1:]], [0], [8], slot_mapping=torch.arange(8))
        with pytest.raises(ShapeError, match="one object a chunk, 1; got 2"):
            move([chunk, chunk], [0], [8], slot_mapping=torch.arange(8))
