"""Geometry, its JSON form, rope frequencies, paged layouts."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from qcap.errors import ConfigError, GeometryMismatch
from qcap.geometry import DTYPES, Geometry, PagedLayout, PlaneStrides, Rope, dtype_name, parse_dtype
from qcap.kinds import CacheKind

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096.0}
GEO = Geometry(
    model="org/m",
    layer_names=("l0", "l1", "l2"),
    num_q_heads=8,
    num_kv_heads=2,
    head_size=16,
    dtype="bfloat16",
    block_size=16,
    chunk_size=256,
    rope=Rope(kind="llama3", theta=5e5, rotary_dim=16, max_position=131072, params=LLAMA3),
    tp_size=2,
    tp_rank=1,
    scale=0.25,
)


def test_shapes() -> None:
    assert GEO.chunk_shape(CacheKind.KV) == (2, 3, 256, 32)
    assert GEO.chunk_shape(CacheKind.QUERY) == (1, 3, 256, 128)
    assert GEO.chunk_bytes(CacheKind.KV) == 2 * 3 * 256 * 32 * 2
    assert (GEO.num_layers, GEO.torch_dtype, GEO.hidden(CacheKind.QUERY)) == (3, torch.bfloat16, 128)
    assert GEO.for_rank(0).tp_rank == 0 and GEO.tp_rank == 1


@pytest.mark.parametrize(("chunk", "block", "good"), [(256, 16, True), (250, 16, False), (16, 16, True), (8, 16, False), (1, 1, True)])
def test_chunk_is_a_multiple_of_the_block(chunk: int, block: int, good: bool) -> None:  # P12
    if good:
        assert dataclasses.replace(GEO, chunk_size=chunk, block_size=block).chunk_size == chunk
    else:
        with pytest.raises(ConfigError, match=rf"chunk_size {chunk} .*block_size {block}"):
            dataclasses.replace(GEO, chunk_size=chunk, block_size=block)


@pytest.mark.parametrize("name", ["num_q_heads", "num_kv_heads", "head_size", "block_size", "chunk_size", "tp_size"])
@pytest.mark.parametrize("value", [0, -16])
def test_sizes_are_positive(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be positive"):
        dataclasses.replace(GEO, **{name: value})


def test_no_layers() -> None:
    with pytest.raises(ConfigError, match="no attention layers"):
        dataclasses.replace(GEO, layer_names=())


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_dtypes(dtype: str) -> None:  # K19 C8
    assert parse_dtype(dtype) is DTYPES[dtype] is parse_dtype(f"torch.{dtype}") is parse_dtype(DTYPES[dtype])
    assert dtype_name(DTYPES[dtype]) == dtype


@pytest.mark.parametrize("dtype", ["foo", "int8", "bf16", torch.int64, ""])
def test_unknown_dtypes(dtype: object) -> None:  # K19
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        parse_dtype(dtype)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        dataclasses.replace(GEO, dtype="foo")


def test_json_round_trip() -> None:
    back = Geometry.from_dict(json.loads(json.dumps(GEO.to_dict())))
    assert back == GEO and isinstance(back.layer_names, tuple) and isinstance(back.rope, Rope)


def test_from_dict_of_another_version() -> None:
    good = GEO.to_dict()
    for bad in ({**good, "colour": 1}, {k: v for k, v in good.items() if k != "rope"}, {**good, "rope": {"colour": 1}}, {}):
        with pytest.raises(ConfigError, match="another qcap version"):
            Geometry.from_dict(bad)


def test_check_same() -> None:
    GEO.check_same(dataclasses.replace(GEO, block_size=32, tp_rank=0), "x")
    other = dataclasses.replace(GEO, num_kv_heads=4, rope=Rope())
    with pytest.raises(GeometryMismatch, match=r"what is there does not fit 'org/m': num_kv_heads: 2 here, 4 there; rope: .*llama3.* here"):
        GEO.check_same(other, "what is there")


def test_rope_default_and_partial() -> None:
    inv = Rope(theta=1e4, rotary_dim=8).inv_freq()
    assert inv.dtype == torch.float32
    assert torch.allclose(inv, torch.tensor([1.0, 0.1, 0.01, 0.001]), rtol=1e-6, atol=0)
    assert Rope(kind="none", rotary_dim=8).inv_freq().shape == (0,)


def test_rope_linear_and_dynamic() -> None:
    base = Rope(theta=1e4, rotary_dim=16, max_position=1024)
    linear = dataclasses.replace(base, kind="linear", params={"factor": 4.0})
    assert torch.equal(linear.inv_freq(), base.inv_freq() / 4.0)
    dynamic = dataclasses.replace(base, kind="dynamic", params={"factor": 2.0, "max_trained_positions": 512.0}).inv_freq()
    assert torch.allclose(dynamic, dataclasses.replace(base, theta=1e4 * 3.0 ** (16 / 14)).inv_freq(), rtol=1e-6, atol=0)


def test_rope_llama3_bands() -> None:
    base = Rope(theta=5e5, rotary_dim=128, max_position=131072).inv_freq()
    scaled = Rope(kind="llama3", theta=5e5, rotary_dim=128, max_position=131072, params=LLAMA3).inv_freq()
    wavelength = 2 * math.pi / base
    short, long = wavelength < 8192 / 4, wavelength > 8192 / 1
    assert short.any() and long.any() and (~short & ~long).any()
    assert torch.equal(scaled[short], base[short])
    assert torch.equal(scaled[long], base[long] / 8)
    between = scaled[~short & ~long]
    assert (between < base[~short & ~long]).all() and (between > base[~short & ~long] / 8).all()


def test_rope_yarn_ends() -> None:
    base = Rope(theta=1e4, rotary_dim=64).inv_freq()
    scaled = Rope(kind="yarn", theta=1e4, rotary_dim=64, max_position=16384, params=YARN).inv_freq()
    assert torch.allclose(scaled[0], base[0], rtol=1e-6, atol=0) and torch.allclose(scaled[-1], base[-1] / 4, rtol=1e-6, atol=0)
    assert (scaled[:-1] > scaled[1:]).all()


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (Rope(kind="longrope", rotary_dim=8), "'longrope' cannot be re-rotated exactly; known: none, default"),
        (Rope(kind="linear", rotary_dim=8), "'linear' needs parameter 'factor'"),
        (Rope(kind="yarn", rotary_dim=8, params={"factor": 2.0}), "original_max_position_embeddings"),
        (Rope(), "even rotary_dim > 0, got 0"),
        (Rope(rotary_dim=7), "even rotary_dim > 0, got 7"),
    ],
)
def test_rope_that_cannot_be_computed(rope: Rope, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rope.inv_freq()


def test_paged_layout_views_write_through() -> None:
    """Pages [B, 2, N, heads, D]: K and V of a block side by side, in a page tensor that is itself a slice."""
    blocks, n, heads, d = 3, 4, 2, 8
    whole = torch.zeros(blocks + 1, 2, n, heads, d)
    pages = whole[1:]
    strides = [PlaneStrides(plane * n * heads * d, 2 * n * heads * d, d, heads * d, 1) for plane in range(2)]
    layout = PagedLayout(name="test", blocks=blocks, heads=heads, block_size=n, head_size=d, planes=tuple(strides))
    keys, values = layout.views(pages)
    assert keys.shape == values.shape == (blocks, heads, n, d)
    keys[2, 1, 3] = 5.0
    values[0, 0, 1] = 7.0
    assert (pages[2, 0, 3, 1] == 5.0).all() and (pages[0, 1, 1, 0] == 7.0).all()
    assert whole.sum() == (5.0 + 7.0) * d
