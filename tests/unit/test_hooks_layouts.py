"""Hooks on attention layers, proof of page layouts, the cache group, the worker's start: on fakes with vLLM's names and shapes."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qcap.attribution import FinishedRequest, RequestStep, Step, TokenUpdate
from qcap.config import CaptureConfig
from qcap.errors import ConfigError, Unsupported
from qcap.kinds import CacheKind
from qcap.vllm import worker as worker_module
from qcap.vllm.hooks import QueryHooks, attention_layers, queries_outlive_their_layer, refusal
from qcap.vllm.layouts import CacheGroup, candidates, certify, layer_number, pick_group
from qcap.vllm.worker import WorkerSide

B, N, H, D = 6, 4, 2, 8


# ---- fakes with vLLM's class names ------------------------------------------------------------------------------------------------


class FakeImpl:
    scale = 0.25

    def __init__(self):
        self.seen = []

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output=None, output_scale=None, output_block_scale=None):
        self.seen.append((layer, query, attn_metadata, output, output_scale))
        return output


class Attention:
    def __init__(self, impl=None):
        self.impl = impl or FakeImpl()


class MLAAttention(Attention):
    pass


class MambaMixer:
    def __init__(self):
        self.impl = FakeImpl()


class KVCacheSpec:
    def __init__(self, block_size=N, num_kv_heads=H, head_size=D, **more):
        self.block_size, self.num_kv_heads, self.head_size = block_size, num_kv_heads, head_size
        self.__dict__.update(more)


AttentionSpec = type("AttentionSpec", (KVCacheSpec,), {})
FullAttentionSpec = type("FullAttentionSpec", (AttentionSpec,), {})
MLAAttentionSpec = type("MLAAttentionSpec", (FullAttentionSpec,), {})
HiddenStateCacheSpec = type("HiddenStateCacheSpec", (MLAAttentionSpec,), {})
SlidingWindowSpec = type("SlidingWindowSpec", (AttentionSpec,), {})
ChunkedLocalAttentionSpec = type("ChunkedLocalAttentionSpec", (AttentionSpec,), {})
CrossAttentionSpec = type("CrossAttentionSpec", (AttentionSpec,), {})
EncoderOnlyAttentionSpec = type("EncoderOnlyAttentionSpec", (AttentionSpec,), {})
SinkFullAttentionSpec = type("SinkFullAttentionSpec", (FullAttentionSpec,), {})
RSWASpec = type("RSWASpec", (FullAttentionSpec,), {})
CircularBufferSpec = type("CircularBufferSpec", (AttentionSpec,), {})
MambaSpec = type("MambaSpec", (KVCacheSpec,), {})


class UniformTypeKVCacheSpecs(KVCacheSpec):
    def __init__(self, specs):
        super().__init__()
        self.kv_cache_specs = specs


def name(i):
    return f"model.layers.{i}.self_attn.attn"


def group(spec, *layers):
    return SimpleNamespace(kv_cache_spec=spec, layer_names=[x if isinstance(x, str) else name(x) for x in layers])


def cache_config(*groups, num_blocks=B):
    return SimpleNamespace(kv_cache_groups=list(groups), num_blocks=num_blocks)


# ---- the choice of a group ----------------------------------------------------------------------------------------------------------


def test_layers_of_a_hybrid_model():  # C1: attention layers only, others named with the reason
    config = cache_config(group(MambaSpec(), 1, 3), group(FullAttentionSpec(), 0, 2, 4), group(SlidingWindowSpec(), 5))
    found = pick_group(config, 6)
    assert (found.index, list(found.specs), found.block_size, found.num_blocks) == (1, [name(0), name(2), name(4)], N, B)
    assert found.left_out == {
        name(1): "MambaSpec is not attention", name(3): "MambaSpec is not attention", name(5): "SlidingWindowSpec",
    }  # fmt: skip


def test_layers_are_in_model_order_not_in_the_groups():  # C3: 10 comes after 2
    assert list(pick_group(cache_config(group(FullAttentionSpec(), 10, 2, 0)), None).specs) == [name(0), name(2), name(10)]


def test_the_larger_attention_group_is_taken():  # C1
    config = cache_config(group(FullAttentionSpec(), 0), group(FullAttentionSpec(block_size=8), 1, 2), group(FullAttentionSpec(), 3))
    found = pick_group(config, 4)
    assert (found.index, found.block_size) == (1, 8)
    assert set(found.left_out) == {name(0), name(3)}


def test_a_draft_models_layers_are_left_out():  # C23
    found = pick_group(cache_config(group(FullAttentionSpec(), 0, 1, 2)), 2)
    assert list(found.specs) == [name(0), name(1)] and found.left_out == {name(2): "draft-model layer"}


def test_layers_with_their_own_specs_in_one_group():  # C1
    specs = UniformTypeKVCacheSpecs({name(0): FullAttentionSpec(), name(1): SlidingWindowSpec(), name(2): FullAttentionSpec()})
    assert list(pick_group(cache_config(group(specs, 0, 1, 2)), 3).specs) == [name(0), name(2)]


@pytest.mark.parametrize("spec", [
    MambaSpec(), MLAAttentionSpec(), HiddenStateCacheSpec(), SlidingWindowSpec(), ChunkedLocalAttentionSpec(), CrossAttentionSpec(),
    EncoderOnlyAttentionSpec(), SinkFullAttentionSpec(), RSWASpec(), CircularBufferSpec(), FullAttentionSpec(head_size_v=D // 2),
])  # fmt: skip
def test_kinds_that_are_not_captured_are_named(spec):  # C1 C5
    with pytest.raises(Unsupported, match=type(spec).__name__):
        pick_group(cache_config(group(spec, 0, 1)), 2)


@pytest.mark.parametrize("config", [None, SimpleNamespace(kv_cache_groups=[], num_blocks=3), cache_config(group(FullAttentionSpec()))])
def test_no_groups(config):  # C2 C5: what is missing is said; nothing is guessed from the list of caches
    with pytest.raises(Unsupported, match="no full-attention cache group"):
        pick_group(config, 2)


def test_layer_numbers():
    assert layer_number("model.layers.12.self_attn.attn") == 12
    assert layer_number("language_model.model.layers.3.attn") == 3
    assert layer_number("attn") == -1


# ---- layouts ------------------------------------------------------------------------------------------------------------------------


def empty(shape, order=None, dtype=torch.float32):
    """Pages of ``shape`` whose physical order of dims is ``order``."""
    if order is None:
        return torch.randn(shape).to(dtype)
    back = [order.index(i) for i in range(len(shape))]
    return torch.randn([shape[i] for i in order]).to(dtype).permute(back)


def write_kv_last(pages, k, v, b, o):
    pages[b, :, o, : k.shape[-1]], pages[b, :, o, k.shape[-1] :] = k, v


def halves(pages):
    b, h, n, d2 = pages.shape
    return pages.view(b, h, 2 * n, d2 // 2)


def write_cpu(pages, k, v, b, o):
    x = halves(pages)
    x[:, :, :N].view(B, -1, D, N)[b, :, :, o] = k
    x[:, :, N:][b, :, o] = v


def write_planes(pages, k, v, b, o):
    x = halves(pages)
    x[:, :, :N][b, :, o], x[:, :, N:][b, :, o] = k, v


def write_b2(pages, k, v, b, o):
    pages[b, 0, o], pages[b, 1, o] = k, v


def write_2b(pages, k, v, b, o):
    pages[0, b, o], pages[1, b, o] = k, v


def write_2bh(pages, k, v, b, o):
    pages[0, b, :, o], pages[1, b, :, o] = k, v


def write_2bh_t(pages, k, v, b, o):
    pages[0].view(B, -1, D, N)[b, :, :, o] = k
    pages[1, b, :, o] = v


def backend(write):
    """An impl whose cache write goes row by row through ``write``."""

    class Impl(FakeImpl):
        def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
            for k, v, slot in zip(key, value, slot_mapping.tolist(), strict=True):
                if slot >= 0:
                    write(kv_cache, k, v, slot // N, slot % N)

    return Attention(Impl())


LAYOUTS = {
    "BHN(K|V)": ((B, H, N, 2 * D), None, write_kv_last),
    "BHN(K|V), tokens outside": ((B, H, N, 2 * D), (0, 2, 1, 3), write_kv_last),
    "BH(Kt,V)": ((B, H, N, 2 * D), None, write_cpu),
    "BH(K,V)": ((B, H, N, 2 * D), None, write_planes),
    "B2NHD": ((B, 2, N, H, D), None, write_b2),
    "B2NHD, heads outside": ((B, 2, N, H, D), (0, 1, 3, 2, 4), write_b2),
    "2BNHD": ((2, B, N, H, D), None, write_2b),
    "2BNHD, heads outside": ((2, B, N, H, D), (0, 1, 3, 2, 4), write_2b),
    "2BHND": ((2, B, H, N, D), None, write_2bh),
    "2BH(Kt)": ((2, B, H, N, D), None, write_2bh_t),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", LAYOUTS)
def test_each_known_layout_is_certified(case, dtype):  # C32: by what the engine writes, not by shape; pages are as they were
    shape, order, write = LAYOUTS[case]
    pages = empty(shape, order, dtype)
    before = pages.clone()
    layer = backend(write)
    layout = certify("l", layer, pages, FullAttentionSpec(), B)
    assert layout.name == case.split(",")[0] if "outside" in case else layout.name == case
    assert torch.equal(pages, before)
    k, v = torch.randn(N, H, D).to(dtype), torch.randn(N, H, D).to(dtype)
    layer.impl.do_kv_cache_update(layer, k, v, pages, torch.arange(3 * N, 4 * N))
    for view, rows in zip(layout.views(pages), (k, v), strict=True):
        assert torch.equal(view[3].transpose(0, 1), rows)


@pytest.mark.parametrize("case", ["BHN(K|V)", "B2NHD"])
def test_layers_interleaved_in_one_allocation(case):  # block-outermost layouts: a view with a storage offset and wide strides
    shape, _, write = LAYOUTS[case]
    whole = torch.randn(shape[0], 3, *shape[1:])
    before = whole.clone()
    pages = whole[:, 1]
    layout = certify("l", backend(write), pages, FullAttentionSpec(), B)
    assert torch.equal(whole, before) and layout.name == case
    layout.views(pages)[0][2].fill_(5.0)
    changed = (whole != before).nonzero()[:, 1].unique().tolist()
    assert changed == [1]


def test_square_shapes_are_told_apart():  # H == N: [2, B, N, H, D] and [2, B, H, N, D] are of one shape
    for write, wanted in ((write_2b, "2BNHD"), (write_2bh, "2BHND")):
        pages = torch.randn(2, B, 4, 4, D)
        assert len(candidates(pages, blocks=B, block_size=4, heads=4, head_size=D)) == 3
        assert certify("l", backend(write), pages, FullAttentionSpec(num_kv_heads=4), B).name == wanted


def swapped(pages, k, v, b, o):
    write_b2(pages, v, k, b, o)


def scaled(pages, k, v, b, o):
    write_b2(pages, k * 2, v, b, o)


def shifted(pages, k, v, b, o):
    write_b2(pages, k, v, b, (o + 1) % N)


def nothing(pages, k, v, b, o):
    pass


@pytest.mark.parametrize("write", [swapped, scaled, shifted, nothing])
def test_an_unknown_write_is_refused_and_pages_restored(write):
    pages = empty((B, 2, N, H, D))
    before = pages.clone()
    with pytest.raises(Unsupported, match=r"l7: pages .*0 of the layouts \['B2NHD'\]"):
        certify("l7", backend(write), pages, FullAttentionSpec(), B)
    assert torch.equal(pages, before)


def test_a_write_by_row_order_instead_of_slots_is_found_out():
    class Impl(FakeImpl):
        def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
            for i, slot in enumerate(sorted(slot_mapping.tolist())):
                write_b2(kv_cache, key[i], value[i], slot // N, slot % N)

    pages = empty((B, 2, N, H, D))
    before = pages.clone()
    with pytest.raises(Unsupported, match="0 of the layouts"):
        certify("l", Attention(Impl()), pages, FullAttentionSpec(), B)
    assert torch.equal(pages, before)


def test_an_ambiguous_layout_is_refused():  # one token a block: K|V, planes, and transposed planes read alike
    pages = torch.randn(B, H, 1, 2 * D)
    before = pages.clone()

    class Impl(FakeImpl):
        def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
            for k, v, slot in zip(key, value, slot_mapping.tolist(), strict=True):
                write_kv_last(kv_cache, k, v, slot, 0)

    with pytest.raises(Unsupported, match="3 of the layouts"):
        certify("l", Attention(Impl()), pages, FullAttentionSpec(block_size=1), B)
    assert torch.equal(pages, before)


def test_a_write_that_raises_restores_the_pages():  # C32
    def half(pages, k, v, b, o):
        write_b2(pages, k, v, b, o)
        if b == B - 1:
            raise RuntimeError("device lost")

    pages = empty((B, 2, N, H, D))
    before = pages.clone()
    with pytest.raises(Unsupported, match="RuntimeError: device lost"):
        certify("l", backend(half), pages, FullAttentionSpec(), B)
    assert torch.equal(pages, before)


@pytest.mark.parametrize(("pages", "spec", "blocks", "message"), [
    ([torch.zeros(1)], FullAttentionSpec(), B, "list"),
    (torch.zeros(B, 2, N, H, D, dtype=torch.uint8), FullAttentionSpec(), B, "quantised"),
    (torch.zeros(2, 2, N, H, D), FullAttentionSpec(), 2, "2 blocks"),
    (torch.zeros(B, N, H, D), FullAttentionSpec(), B, "no known layout"),
    (torch.zeros(B, 2, N, H, D + 1), FullAttentionSpec(), B, "no known layout"),
    (torch.zeros(B + 1, 2, N, H, D), FullAttentionSpec(), B, "no known layout"),
])  # fmt: skip
def test_pages_that_cannot_be_certified(pages, spec, blocks, message):
    with pytest.raises(Unsupported, match=message):
        certify("l", backend(write_b2), pages, spec, blocks)


def test_a_backend_without_a_cache_write():
    with pytest.raises(Unsupported, match="offers no cache write"):
        certify("l", Attention(), torch.zeros(B, 2, N, H, D), FullAttentionSpec(), B)


# ---- hooks --------------------------------------------------------------------------------------------------------------------------


def test_hooks_go_in_and_out():  # C24: arguments and result pass through, queries come first
    layers = {name(i): Attention() for i in range(3)}
    seen = []
    hooks = QueryHooks(layers, lambda *a: seen.append(a))
    own = [layer.impl.forward for layer in layers.values()]
    hooks.install()
    assert hooks.hooked == list(layers) and not hooks.refused
    q, out = torch.zeros(3, H, D), object()
    for layer in layers.values():
        assert layer.impl.forward(layer, q, None, None, "cache", "metadata", output=out, output_scale=2.0) is out
        assert layer.impl.forward(layer, q, key=None, value=None, kv_cache="cache", attn_metadata="by name", output=out) is out
    assert [(a[0], a[1], a[3]) for a in seen] == [(i, name(i), m) for i in range(3) for m in ("metadata", "by name")]
    assert all(a[2] is q for a in seen)
    first = layers[name(0)]
    assert first.impl.seen[0] == (first, q, "metadata", out, 2.0)
    hooks.remove()
    assert hooks.hooked == []
    for layer, before in zip(layers.values(), own, strict=True):
        assert layer.impl.forward == before and "forward" not in layer.impl.__dict__
    hooks.remove()


def test_another_tools_override_survives():
    layer = Attention()

    def theirs(layer, query, key, value, kv_cache, attn_metadata, output=None):
        return "theirs"

    layer.impl.forward = theirs
    hooks = QueryHooks({"l": layer}, lambda *a: None)
    hooks.install()
    assert layer.impl.forward(layer, None, None, None, None, None) == "theirs"
    hooks.remove()
    assert layer.impl.forward is theirs


def test_an_override_put_over_ours_is_left_alone():
    layer = Attention()
    hooks = QueryHooks({"l": layer}, lambda *a: None)
    hooks.install()
    ours = layer.impl.forward

    def later(*args, **kwargs):
        return ours(*args, **kwargs)

    layer.impl.forward = later
    hooks.remove()
    assert layer.impl.forward is later


class OtherSignature(FakeImpl):
    def forward(self, layer, query, kv_cache, output):  # minimax
        return output


class NoForward:
    pass


@pytest.mark.parametrize(("layer", "reason"), [
    (MLAAttention(), "latent attention"),
    (MambaMixer(), "MambaMixer is not vLLM's Attention"),
    (Attention(OtherSignature()), "OtherSignature.forward takes"),
    (Attention(NoForward()), "NoForward has no forward"),
])  # fmt: skip
def test_refused_layers_are_named_and_not_touched(layer, reason):
    hooks = QueryHooks({"good": Attention(), "bad": layer}, lambda *a: None)
    assert list(hooks.refused) == ["bad"] and reason in hooks.refused["bad"] and reason in refusal(layer)
    hooks.install()
    assert hooks.hooked == ["good"]
    assert "forward" not in layer.impl.__dict__


def test_a_decorated_forward_is_seen_through():  # eager_break_during_capture and the like
    import functools

    def decorate(f):
        @functools.wraps(f)
        def wrapper(*args, **kwargs):
            return f(*args, **kwargs)

        return wrapper

    decorated = type("Impl", (FakeImpl,), {"forward": decorate(FakeImpl.forward)})
    assert refusal(Attention(decorated())) == ""


def test_attention_layers_of_a_config():  # C23
    context = {"a": Attention(), "moe": SimpleNamespace(), "b": Attention()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    assert list(attention_layers(config)) == ["a", "b"]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllms_own_backends_have_the_expected_signature():
    import ast

    root = next(iter(importlib.util.find_spec("vllm").submodule_search_locations))
    for path in ("flash_attn", "triton_attn", "cpu_attn", "flashinfer"):
        tree = ast.parse(Path(root, "v1", "attention", "backends", f"{path}.py").read_text())
        impls = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name.endswith("Impl")]
        assert impls, path
        for impl in impls:
            methods = {f.name: [a.arg for a in f.args.args] for f in impl.body if isinstance(f, ast.FunctionDef)}
            if "forward" in methods:
                assert methods["forward"][:7] == ["self", "layer", "query", "key", "value", "kv_cache", "attn_metadata"], (path, impl.name)
            if "do_kv_cache_update" in methods:
                assert methods["do_kv_cache_update"][:6] == ["self", "layer", "key", "value", "kv_cache", "slot_mapping"], (path, impl.name)


# ---- the worker's start ---------------------------------------------------------------------------------------------------------------


def vllm_config(layers, **changes):
    values = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "dtype": torch.float32, "tp": 1, "q_heads": 4, **changes}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id=values.get("engine_id", "hooks-layouts")),
        compilation_config=SimpleNamespace(static_forward_context=layers, cudagraph_capture_sizes=None),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=values["max_num_batched_tokens"], max_num_seqs=values["max_num_seqs"]),
        parallel_config=SimpleNamespace(tensor_parallel_size=values["tp"], rank=0),
        model_config=SimpleNamespace(
            dtype=values["dtype"], hf_config=SimpleNamespace(), hf_text_config=SimpleNamespace(rope_theta=10000.0, head_dim=D),
            get_num_attention_heads=lambda parallel: values["q_heads"] // parallel.tensor_parallel_size,
            get_total_num_kv_heads=lambda: H,
        ),
    )  # fmt: skip


class Engine:
    """Two fake layers with real pages, and a worker on them."""

    def __init__(self, monkeypatch, *, store="memory://hooks-layouts", layers=None, names=None, caches=None, extra=None, **changes):
        monkeypatch.setattr(WorkerSide, "_engine_info", lambda self, caches, rope: {})
        monkeypatch.setattr(worker_module, "_rank", lambda parallel: 0)
        monkeypatch.setattr(worker_module, "engine_ropes", list)
        monkeypatch.setattr(worker_module, "slot_mapping_of", lambda name, metadata: metadata)
        self.layers = {name(i): backend(write_b2) for i in range(2)} if layers is None else layers
        names = [name(0), name(1)] if names is None else names
        self.specs = {n: FullAttentionSpec() for n in names}
        settings = {"qcap.store": store, "qcap.transfer_intermediate_tensors": True, "qcap.chunk_size": 8, "qcap.on_pressure": "wait"}
        self.config = CaptureConfig.from_extra({**settings, **(extra or {})})
        self.caches = {n: torch.randn(B, 2, N, H, D) for n in names} if caches is None else caches
        self.worker = WorkerSide(vllm_config(self.layers, **changes), self.config, CacheGroup(0, self.specs, N, B), "fake")

    def start(self):
        self.worker.register(self.caches)
        return self

    def forward(self, step, rows, extra_layers=()):
        for layer_name in [*self.caches, *extra_layers]:
            layer = self.layers[layer_name]
            r = step.requests[0]
            slots = torch.tensor([r.block_ids[p // N] * N + p % N for p in range(r.start, r.end)])
            layer.impl.forward(layer, rows, None, None, None, slots, output=None)


@pytest.fixture
def engine(monkeypatch):
    made = []

    def make(**options):
        made.append(Engine(monkeypatch, **options))
        return made[-1]

    yield make
    for e in made:
        e.worker.close()


def test_start_with_two_layers(engine):  # C6 C7 C9 C12 C14 C15 C16
    e = engine(store="memory://start").start()
    worker = e.worker
    assert [f.kind for f in worker.capture.features] == [CacheKind.QUERY, CacheKind.KV]
    g = worker.capture.geometry
    assert (g.num_q_heads, g.num_kv_heads, g.head_size, g.dtype, g.block_size, g.chunk_size) == (4, H, D, "float32", N, 8)
    assert g.layer_names == (name(0), name(1)) and g.scale == 0.25
    budget = worker._query.budget  # without graphs: half of the largest step is small
    assert (budget.max_rows, budget.small_rows, budget.windows, budget.row_bytes, budget.num_layers) == (32, 16, 2, 4 * D * 4, 2)
    assert worker._query.resident.shape == (32, 2, 4 * D) and worker._query.resident.device.type == "cpu"
    assert worker.hooks.hooked == [name(0), name(1)]
    assert worker.capture.backend.manifests("fake")[0][0] == g


def test_heads_are_those_of_this_rank(engine):  # C6: 4 heads, TP 2 -> 2
    assert engine(store="memory://tp", tp=2, q_heads=4).start().worker.capture.geometry.num_q_heads == 2


@pytest.mark.parametrize("dtype", [torch.float32, "float32", "torch.float32"])
def test_dtype_as_a_value_or_a_name(engine, dtype):  # C8
    e = engine(store="memory://dtype", dtype=dtype).start()
    assert e.worker._query.dtype == torch.float32


@pytest.mark.parametrize(("key", "value", "blocks"), [
    ("qcap.q.ring_blocks", "12", 12), ("qcap.q.ring_blocks", 0, 1), ("qcap.q.ring_blocks", -5, 1),
    ("qcap.q.ring_depth", 0, 17), ("qcap.q.ring_depth", "3", 24),
])  # fmt: skip
def test_ring_size_from_settings(engine, key, value, blocks):  # C11 C12
    extra = {key: value, "qcap.on_pressure": "skip"}
    assert engine(store="memory://ring", extra=extra).start().worker._query.ring.num_blocks == blocks


def test_a_ring_that_a_step_does_not_fit_into_is_refused_where_no_row_may_be_lost(engine):  # C11 C14
    with pytest.raises(ConfigError, match=r"ring_blocks is 16 and one step can write 17 blocks.*17 or more.*skip"):
        engine(store="memory://ring", extra={"qcap.q.ring_blocks": 16, "qcap.on_pressure": "wait"}).start()
    least = {"qcap.q.ring_blocks": 17, "qcap.on_pressure": "wait"}
    assert engine(store="memory://ring", extra=least).start().worker._query.ring.num_blocks == 17


@pytest.mark.parametrize("missing", [None, 0])
def test_no_limit_on_batched_tokens(engine, missing):  # C13: 8,192
    e = engine(store="memory://limit", max_num_batched_tokens=missing, extra={"qcap.q.ring_depth": 2})
    assert e.start().worker._query.ring.num_blocks == 8192 // N * 2


def test_a_resident_ring_holds_the_steps_it_is_told_to(engine):  # C7 C12 C14 C15
    ring = engine(store="memory://resident", extra={"qcap.q.ring_depth": 2}).start().worker._query.ring
    assert ring.block_size == N and ring.hidden_dim == 4 * D and ring.layers[0].device.type == "cpu"
    assert ring.num_blocks == max(32 // N * 2, 32 // N + 2 * 4 + 1)


def test_the_ring_is_budgeted_before_it_is_allocated(engine, caplog):  # P17: said, bounded, and an error names what is needed
    with pytest.raises(ConfigError, match=r"qcap\.q\.ring_bytes is 0 MiB.*Raise"):
        engine(store="memory://budget", extra={"qcap.q.ring_bytes": 1000}).start()
    row = 4 * D * 4
    needed = 2 * 512 * 2 * row + 2 * 8192 * row + 8 * (2 * 512 + 8192)  # two small steps of two layers, a window for each of the two layers
    with caplog.at_level(logging.INFO, logger="qcap.vllm"):
        e = engine(store="memory://budget3", max_num_batched_tokens=8192, extra={"qcap.q.ring_bytes": 2 * needed}).start()
    query = e.worker._query
    assert query.budget.nbytes == needed and query.budget.windows * 8192 == len(query.windows) == 2 * 8192, "no more windows than layers"
    assert e.worker.memory_report()["ring_bytes"] == query.on_device_bytes
    assert any("query ring" in r.message and "2 layers of 8192 tokens" in r.message for r in caplog.records)


@pytest.mark.parametrize(("options", "message"), [
    ({"caches": {}}, "no KV caches"), ({"layers": {}}, "no attention layers"), ({"layers": {"x": Attention()}}, "no attention layers"),
])  # fmt: skip
def test_nothing_to_capture(engine, caplog, options, message):  # C4 C5: one warning, nothing registered, every hook still works
    worker = engine(store="memory://none", **options).start().worker
    assert worker.capture is None and worker.hooks is None
    assert [message in r.message for r in caplog.records if r.levelno == logging.WARNING] == [True]
    worker.begin(Step(1))
    worker.load()
    worker.end()
    worker.settle()
    worker.finish(None, FinishedRequest(1, 2, 2, 1))
    assert worker.take_failed_blocks() == set()


def test_layers_outside_the_group_are_not_hooked(engine):  # C23: a draft model's layer runs with metadata bound, and is ignored
    layers = {name(i): backend(write_b2) for i in range(2)} | {"mtp.0": backend(write_b2)}
    e = engine(store="memory://mtp", layers=layers).start()
    step = Step(1, (RequestStep(1, "a", "", 0, 8, 0, (1, 2), True),), (TokenUpdate(1, 0, tuple(range(8))),))
    e.worker.begin(step)
    e.forward(step, torch.ones(8, 4, D), extra_layers=["mtp.0"])
    e.worker.end()
    assert e.worker.counters["query.steps_incomplete"] == 0
    e.worker.finish(None, FinishedRequest(1, 9, 9, 8))
    assert e.worker.capture.backend.counters()["stored_query"] == 1
    assert "forward" not in layers["mtp.0"].impl.__dict__


def test_queries_that_cannot_be_taken_leave_kv_alone(engine, caplog):  # C32: named, and keys and values go on
    layers = {name(0): backend(write_b2), name(1): MLAAttention(backend(write_b2).impl)}
    worker = engine(store="memory://mla", layers=layers).start().worker
    assert [f.kind for f in worker.capture.features] == [CacheKind.KV]
    assert "latent" in worker.refused[name(1)] and worker.hooks is None
    assert any("latent" in r.message for r in caplog.records)


def test_pages_that_cannot_be_certified_leave_queries_alone(engine):  # C32
    layers = {name(i): backend(swapped) for i in range(2)}
    worker = engine(store="memory://pages", layers=layers).start().worker
    assert [f.kind for f in worker.capture.features] == [CacheKind.QUERY]
    assert "0 of the layouts" in worker.refused["kv"] and worker.counters["kv.refused"] == 1


def test_a_quantised_cache_is_refused(engine):
    caches = {name(i): torch.zeros(B, 2, N, H, D, dtype=torch.uint8) for i in range(2)}
    worker = engine(store="memory://fp8", caches=caches).start().worker
    assert "quantised" in worker.refused["kv"]


def test_close_unhooks(engine):
    e = engine(store="memory://close").start()
    e.worker.close()
    assert all("forward" not in layer.impl.__dict__ for layer in e.layers.values())
    e.worker.close()


def test_an_error_in_a_hook_never_leaves_forward(engine, monkeypatch):  # C32
    e = engine(store="memory://error").start()
    step = Step(1, (RequestStep(1, "a", "", 0, 8, 0, (1, 2), True),), (TokenUpdate(1, 0, tuple(range(8))),))
    e.worker.begin(step)
    e.forward(step, torch.ones(8, 4, D + 1))
    e.worker.end()
    assert [f.kind for f in e.worker.capture.features] == [CacheKind.KV]
    assert not e.worker._query.ledger._requests
    assert all(len(layer.impl.seen) == 1 for layer in e.layers.values())


def test_start_twice(engine):  # C17: only the new layers; each query is seen once
    e = engine(store="memory://twice").start()
    old = e.worker.hooks
    e.worker.register(e.caches)
    assert old.hooked == []
    step = Step(1, (RequestStep(1, "a", "", 0, 8, 0, (1, 2), True),), (TokenUpdate(1, 0, tuple(range(8))),))
    e.worker.begin(step)
    e.forward(step, torch.ones(8, 4, D))
    assert e.worker._query._calls == 2
    e.worker.end()


def test_the_connector_says_what_is_wrong_with_its_settings():  # C10: an unknown or impossible setting, before anything starts
    with pytest.raises(ConfigError, match=r"qcap\.chunk_size"):
        CaptureConfig.from_extra({"qcap.store": "memory://x", "qcap.chunksize": 8})
    with pytest.raises(ConfigError, match=r"qcap\.store"):
        CaptureConfig.from_extra({})


def test_drafts_with_asynchronous_scheduling_refuse_queries(engine):  # a rejected draft's row could pass for the right one
    e = engine(store="memory://drafts")
    e.worker._vllm_config.speculative_config = object()
    e.worker._vllm_config.scheduler_config.async_scheduling = True
    worker = e.start().worker
    assert [f.kind for f in worker.capture.features] == [CacheKind.KV] and "async_scheduling" in worker.refused[name(0)]


def test_only_a_group_with_all_layers_may_be_loaded():
    spec = {name(0): FullAttentionSpec()}
    assert CacheGroup(0, spec, N, B).whole
    assert CacheGroup(0, spec, N, B, {name(9): "draft-model layer"}).whole
    assert not CacheGroup(0, spec, N, B, {name(1): "SlidingWindowSpec"}).whole


def test_a_draft_models_layers_are_known_by_name():
    group = SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=[name(0), f"draft_model.{name(0)}"])
    found = pick_group(SimpleNamespace(kv_cache_groups=[group], num_blocks=B), 4)
    assert list(found.specs) == [name(0)] and found.left_out == {f"draft_model.{name(0)}": "draft-model layer"}


# ---- how long queries last ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "last"), [
    ({"mode": 0}, True),
    ({"mode": 3, "splitting_ops": ["vllm::unified_attention_with_output"], "use_inductor_graph_partition": False}, True),
    ({"mode": 3, "splitting_ops": ["vllm.unified_attention"], "use_inductor_graph_partition": False}, True),
    ({"mode": 3, "splitting_ops": ["vllm::unified_attention_with_output"], "use_inductor_graph_partition": True}, False),
    ({"mode": 3, "splitting_ops": ["vllm::unified_attention_with_output"]}, False),
    ({"mode": 3, "splitting_ops": [], "use_inductor_graph_partition": False}, False),
    ({"mode": 3, "splitting_ops": None, "use_inductor_graph_partition": False}, False),
    ({"mode": 3, "splitting_ops": ["vllm::mamba_mixer"], "use_inductor_graph_partition": False}, False),
    ({"mode": 1, "splitting_ops": ["vllm::unified_attention_with_output"], "use_inductor_graph_partition": False}, False),
    ({}, False),
])  # fmt: skip
def test_queries_of_several_layers_are_kept_only_where_nobody_plans_their_memory(config, last):
    assert queries_outlive_their_layer(SimpleNamespace(compilation_config=SimpleNamespace(**config))) is last
