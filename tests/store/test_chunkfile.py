"""The file format: what is written is what any safetensors reader reads, and what is malformed fails cleanly."""

from __future__ import annotations

import dataclasses
import json

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
from qcap.tokens import chain_digest

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
    more = {"edit": '{"name":"keep"}', "rows": "of ü"}
    record, tensor = chunk(2, CacheKind.QUERY, index=2, salt="edit-1", tags=(("b", "%@"), ("a", "ü")), **more)
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
    rope = dataclasses.replace(SMALL.rope, theta="big")
    for changes in (
        {"positions": (-1,) * 16}, {"positions": (2**32,) * 16}, {"start": -4}, {"start": True}, {"edit": 7}, {"edit": "\ud800"},
        {"tags": (("a", 1),)}, {"tags": (("a", "b", "c"),)}, {"geometry": geometry(softcap="x")}, {"geometry": geometry(rope=rope)},
    ):  # fmt: skip
        with pytest.raises(TokenError, match="cannot be stored"):
            chunkfile.encode(dataclasses.replace(record, **changes), tensor)
    short = dataclasses.replace(record, parent="00", digest=chain_digest("00", record.token_ids))
    with pytest.raises(TokenError, match="cannot be stored"):
        chunkfile.encode(short, tensor)
    with pytest.raises(TokenError, match="holds NUL"):
        chunkfile.encode(dataclasses.replace(record, geometry=geometry(model="a\0")), tensor)


def test_encode_refuses_a_header_longer_than_a_reader_takes(monkeypatch) -> None:
    record, tensor = chunk(1, edit="e" * 5000)
    monkeypatch.setattr(chunkfile, "MAX_HEADER_BYTES", 5000)
    with pytest.raises(TokenError, match="more than the 5000"):
        chunkfile.encode(record, tensor)


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "salt": st.text(max_size=9),
        "edit": st.text() | st.integers(),
        "rows": st.text() | st.integers(1),
        "tags": st.lists(st.tuples(st.text(), st.text() | st.integers()), max_size=3).map(tuple),
        "start": st.integers(-1, 2**40),
        "positions": st.lists(st.integers(-1, 2**32), min_size=16, max_size=16).map(tuple),
    },
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(FIELDS)
def test_what_is_written_can_be_read(fields: dict) -> None:
    """``encode`` does not read its header back: it must refuse all that ``read_header`` would."""
    record, tensor = chunk(1)
    try:
        record = dataclasses.replace(record, **fields)
        data = bytes(chunkfile.encode(record, tensor))
    except TokenError:
        return
    read = chunkfile.read_header(data).record
    assert read == dataclasses.replace(record, tags=tuple(sorted(record.tags)))


def test_the_header_is_compact_json_padded_with_spaces() -> None:
    for layers in (1, 12):
        record, tensor = chunk(1, geo=geometry(layer_names=SMALL.layer_names[:layers], model='q"é'), edit='{"name":"é"}')
        header = chunkfile.encode(record, tensor).header
        text = header[8:].decode().rstrip(" ")
        assert text == json.dumps(json.loads(text), separators=(",", ":")) and len(header) % 64 == 0 and len(header) - 8 - len(text) < 64


def test_each_chunk_has_its_own_geometry() -> None:
    """The last geometry's text is kept, by identity."""
    other = geometry(scale=0.5)
    for geo in (SMALL, other, SMALL, other):
        assert chunkfile.read_header(bytes(chunkfile.encode(*chunk(1, geo=geo)))).record.geometry == geo
    other.rope.params["factor"] = 4.0
    try:
        assert chunkfile.read_header(bytes(chunkfile.encode(*chunk(1, geo=other)))).record.geometry.rope.params == {"factor": 4.0}
    finally:
        other.rope.params["factor"] = 2.0


def test_reading_is_not_led_astray_by_a_default_device() -> None:
    """An engine sets one while it builds its model."""
    record, tensor = chunk(1)
    data = bytes(chunkfile.encode(record, tensor))
    with torch.device("meta"):
        loaded = chunkfile.decode(data)
        layer = chunkfile.empty_layer(chunkfile.read_header(data))
    assert equal_bits(loaded.tensor, tensor) and loaded.tensor.is_contiguous()
    assert layer.device.type == "cpu" and layer.shape == tensor[:, 0].shape and layer.dtype == tensor.dtype


def test_pieces_of_a_slot_of_a_larger_arena() -> None:
    record, tensor = chunk(1)
    arena = torch.zeros((12, 3, 2, 16, 16), dtype=tensor.dtype)
    slot = arena[:, 1].transpose(0, 1)
    slot.copy_(tensor)
    assert not slot.is_contiguous()
    assert bytes(chunkfile.encode(record, slot)) == bytes(chunkfile.encode(record, tensor))


def test_key_fields_stay_readable_in_the_header() -> None:
    metadata = split(GOOD)[0]["__metadata__"]
    assert (metadata["kind"], metadata["model"], metadata["salt"], metadata["tags"]) == ("kv", SMALL.model, "s", '[["lora","x"]]')
