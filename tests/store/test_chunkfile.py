"""The file format: what is written is what any safetensors reader reads, and what is malformed fails cleanly."""

from __future__ import annotations

import dataclasses

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from malformed import malformed, split
from store_makers import SMALL, chunk, equal_bits, geometry

from qcap.errors import ObjectCorrupt, ShapeError, TokenError
from qcap.geometry import DTYPES
from qcap.kinds import CacheKind
from qcap.store import chunkfile
from qcap.store.objects import object_path
from qcap.store.urls import open_tier
from qcap.store.verify import verify_tier

GOOD = bytes(chunkfile.encode(*chunk(3, salt="s", tags=(("lora", "x"),))))
MALFORMED = list(malformed(GOOD))


def test_round_trip_of_every_dtype_and_kind() -> None:
    for dtype in DTYPES:
        for kind in CacheKind:
            for changes in ({}, {"chunk_size": 4, "layer_names": ("one",)}, {"num_kv_heads": 1, "head_size": 3}):
                record, tensor = chunk(1, kind, geometry(dtype=dtype, **changes))
                loaded = chunkfile.decode(bytes(chunkfile.encode(record, tensor)))
                assert loaded.record == record
                assert equal_bits(loaded.tensor, tensor), (dtype, kind, changes)


def test_encoding_copies_nothing() -> None:
    record, tensor = chunk(1)
    encoded = chunkfile.encode(record, tensor)
    tensor.view(torch.uint8).fill_(7)
    assert set(bytes(encoded)[len(encoded.header) :]) == {7}


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_the_safetensors_library_reads_it(tmp_path, dtype: str) -> None:
    record, tensor = chunk(2, geo=geometry(dtype=dtype))
    data = bytes(chunkfile.encode(record, tensor))
    (tmp_path / "x.safetensors").write_bytes(data)
    tensors = safetensors.torch.load(data)
    assert sorted(tensors) == sorted(f"layers.{i}" for i in range(12))
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata()["digest"] == record.digest and file.metadata()["format"] == "1"
        for i in range(12):
            assert equal_bits(file.get_tensor(f"layers.{i}"), tensor[:, i])
            assert equal_bits(tensors[f"layers.{i}"], tensor[:, i])


def test_a_layer_is_one_byte_range() -> None:
    record, tensor = chunk(2)
    data = bytes(chunkfile.encode(record, tensor))
    header = chunkfile.read_header(data[: chunkfile.header_length(data[:8], len(data))], len(data))
    assert header.data_start % chunkfile.ALIGNMENT == 0
    ends = header.data_start
    for i in range(12):
        offset, length = chunkfile.layer_range(header, i)
        assert offset == ends
        ends += length
        layer = torch.frombuffer(bytearray(data[offset : offset + length]), dtype=torch.bfloat16).reshape(2, 16, 16)
        assert equal_bits(layer, tensor[:, i])
        chunkfile.check_layer(i, header.layer_checksums[i], [data[offset : offset + length]])
    assert ends == len(data)
    for bad in (-1, 12):
        with pytest.raises(IndexError):
            chunkfile.layer_range(header, bad)


def test_header_tells_everything() -> None:
    record, tensor = chunk(2, CacheKind.QUERY, index=2, salt="edit-1", edit='{"name":"keep"}', tags=(("b", "%@"), ("a", "ü")))
    header = chunkfile.read_header(bytes(chunkfile.encode(record, tensor)))
    assert header.record.tags == (("a", "ü"), ("b", "%@"))
    assert header.record.key == record.key
    assert dataclasses.replace(header.record, tags=record.tags) == record
    assert header.record.start == 32 and header.record.positions == tuple(range(32, 48))


def test_positions_need_not_be_a_range() -> None:
    record, tensor = chunk(2, positions=tuple(range(0, 32, 2)))
    assert chunkfile.decode(bytes(chunkfile.encode(record, tensor))).record.positions == tuple(range(0, 32, 2))


@pytest.mark.parametrize(("name", "data", "message"), MALFORMED, ids=[m[0] for m in MALFORMED])
def test_malformed(name: str, data: bytes, message: str) -> None:
    with pytest.raises(ObjectCorrupt, match=message):
        chunkfile.decode(data)


def test_corpus_names_are_unique_and_the_good_one_is_good() -> None:
    assert len({name for name, _, _ in MALFORMED}) == len(MALFORMED) > 100
    chunkfile.decode(GOOD)


def test_malformed_folder(tmp_path) -> None:
    """The same corpus as files of a store: load() says the same, and verify names each file."""
    tier = open_tier(str(tmp_path))
    path = tmp_path / object_path(chunk(3, salt="s", tags=(("lora", "x"),))[0].key)
    path.parent.mkdir(parents=True)
    for name, data, message in MALFORMED:
        path.write_bytes(data)
        with pytest.raises(ObjectCorrupt, match=message) as caught:
            tier.load_path(str(path.relative_to(tmp_path)))
        assert path.name in str(caught.value), name
    report = verify_tier(tier)
    assert not report.ok and report.objects == 1


def test_unverified_decode_still_checks_the_header() -> None:
    by_name = {name: data for name, data, _ in MALFORMED}
    chunkfile.decode(by_name["bit-last"], verify=False)
    with pytest.raises(ObjectCorrupt):
        chunkfile.decode(by_name["tokens-swapped"], verify=False)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_damage_is_noticed(data: st.DataObject) -> None:
    """Bytes changed, cut out or put in anywhere: ObjectCorrupt, or (padding, JSON spelling) the very same chunk."""
    header_end = len(GOOD) - len(split(GOOD)[1])
    where = st.one_of(st.integers(0, header_end), st.integers(0, len(GOOD) - 1))
    at, drop, insert = data.draw(where), data.draw(st.integers(0, 9)), data.draw(st.binary(max_size=9))
    damaged = GOOD[:at] + insert + GOOD[at + drop :]
    good = chunkfile.decode(GOOD)
    try:
        loaded = chunkfile.decode(damaged)
    except ObjectCorrupt:
        return
    assert loaded.record == good.record and equal_bits(loaded.tensor, good.tensor)


def test_encode_refuses_what_it_cannot_write() -> None:
    record, tensor = chunk(1)
    for bad in (tensor[:, :-1], tensor.view(torch.float16), tensor.transpose(2, 3).contiguous().transpose(2, 3), tensor.to("meta")):
        with pytest.raises(ShapeError, match="got"):
            chunkfile.encode(record, bad)
    with pytest.raises(TokenError, match="digest"):
        chunkfile.encode(dataclasses.replace(record, token_ids=(1,) * 16), tensor)
    for spoiled in (dataclasses.replace(record, positions=(-1,) * 16), dataclasses.replace(record, start=-4)):
        with pytest.raises(TokenError, match="cannot be stored"):
            chunkfile.encode(spoiled, tensor)


def test_key_fields_stay_readable_in_the_header() -> None:
    metadata = split(GOOD)[0]["__metadata__"]
    assert (metadata["kind"], metadata["model"], metadata["salt"], metadata["tags"]) == ("kv", SMALL.model, "s", '[["lora","x"]]')
