"""A layer is one byte range: what is asked of the medium, and what happens when it is damaged or goes away."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import obstore
import pytest
from store_makers import SMALL, chunk, equal_bits, object_store

from qcap.errors import ObjectCorrupt, StoreUnavailable
from qcap.store import buckets, objects
from qcap.store.engine import StoreEngine
from qcap.store.objects import ObjectTier, object_path
from qcap.store.urls import open_tier

T_S = 30.0


@pytest.fixture(params=["file", "object store"])
def opened(request, tmp_path):
    return in_folder(tmp_path) if request.param == "file" else object_store()


def in_folder(path) -> Callable[[], ObjectTier]:
    return lambda: open_tier(str(path))


def stored(opened: Callable[[], ObjectTier], **fields: object):
    backend, (record, tensor) = StoreEngine(opened()), chunk(1, **fields)
    backend.store(record, tensor).result(T_S)
    return backend, record, tensor


def spoil(opened: Callable[[], ObjectTier], path: str, change) -> None:
    """Put other bytes in the object's place."""
    bucket = opened().bucket
    reader = bucket.open(path)
    data = bytearray(reader.nbytes)
    reader.readinto([memoryview(data)])
    reader.close()
    assert bucket.stage([change(data)]).publish(path, overwrite=True)


def flip_last(data: bytearray) -> bytearray:
    data[-1] ^= 1
    return data


def test_one_range_a_layer(opened, monkeypatch) -> None:
    backend, record, tensor = stored(opened)
    asked: list[tuple[int, int]] = []
    bucket, header, reader = backend._tier.bucket, opened().header(record.key), backend.open_layers(record.key)
    ranged = bucket.read_range
    monkeypatch.setattr(bucket, "read_range", lambda p, at, b: asked.append((at, sum(x.nbytes for x in b))) or ranged(p, at, b))
    monkeypatch.setattr(bucket, "open", None)  # nothing but ranges from here on
    for layer in (2, 9):
        assert equal_bits(reader.read(layer), tensor[:, layer])
    size = tensor[:, 0].nbytes
    assert asked == [(header.data_start + layer * size, size) for layer in (2, 9)]


def test_only_the_head_is_fetched_for_a_header(monkeypatch) -> None:
    backend, record, _ = stored(object_store(), edit="e" * 5000)
    gets: list[object] = []
    get = obstore.get
    monkeypatch.setattr(buckets.obstore, "get", lambda store, path, **kw: gets.append(kw["options"]["range"]) or get(store, path, **kw))
    assert backend.open_layers(record.key).record == record and backend.edit_of(record.key) == "e" * 5000
    assert gets == [(0, objects.HEAD_BYTES)] * 2
    monkeypatch.setattr(objects, "HEAD_BYTES", 512)
    assert backend.open_layers(record.key).record == record
    assert len(gets) == 4 and gets[2] == (0, 512) and gets[3][1] > 5000  # a longer header costs a second request


def test_a_damaged_layer(opened) -> None:
    backend, record, tensor = stored(opened)
    spoil(opened, object_path(record.key), flip_last)
    reader = backend.open_layers(record.key)
    assert equal_bits(reader.read(10), tensor[:, 10])
    with pytest.raises(ObjectCorrupt, match="checksum of layer 11"):
        reader.read(11)
    assert backend.contains([record.key]) == [False] and backend.counters()["load_corrupt"] == 1


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_cut_object(opened, cut: int) -> None:
    backend, record, _ = stored(opened)
    reader = backend.open_layers(record.key)
    spoil(opened, object_path(record.key), lambda data: data[:cut])
    with pytest.raises(ObjectCorrupt):
        backend.open_layers(record.key)
    with pytest.raises(ObjectCorrupt):
        reader.read(11)
    assert backend.contains([record.key]) == [False]


def test_an_object_removed_between_two_layers(opened) -> None:
    backend, record, _ = stored(opened)
    reader = backend.open_layers(record.key)
    opened().delete(record.key)
    with pytest.raises(ObjectCorrupt, match="replaced or removed"):
        reader.read(0)


def test_an_object_of_another_key(opened) -> None:
    backend, record, _ = stored(opened)
    other = chunk(2)[0]
    bucket = opened().bucket
    reader = bucket.open(object_path(record.key))
    data = bytearray(reader.nbytes)
    reader.readinto([memoryview(data)])
    bucket.stage([data]).publish(object_path(other.key))
    with pytest.raises(ObjectCorrupt, match="another key"):
        backend.open_layers(other.key)


def test_a_store_that_goes_away(opened, monkeypatch) -> None:
    backend, record, _ = stored(opened)
    reader = backend.open_layers(record.key)

    def fails(*_args: object, **_kw: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        for module, name in ((buckets.os, "preadv"), (buckets.os, "readv"), (buckets.obstore, "get_range"), (buckets.obstore, "get")):
            patch.setattr(module, name, fails)
        patch.setattr(buckets.obstore, "head", fails)
        for call in (lambda: reader.read(0), lambda: backend.open_layers(record.key)):
            with pytest.raises(StoreUnavailable, match="Input/output error"):
                call()
    assert backend.contains([record.key]) == [True]
    reader.read(0)


def test_half_a_read_is_finished(tmp_path, monkeypatch) -> None:
    backend, record, tensor = stored(in_folder(tmp_path))
    preadv = os.preadv
    monkeypatch.setattr(buckets.os, "preadv", lambda fd, bufs, at: preadv(fd, [bufs[0][:100]], at))
    assert equal_bits(backend.open_layers(record.key).read(4), tensor[:, 4])
    monkeypatch.delattr(buckets.os, "preadv")
    assert equal_bits(backend.open_layers(record.key).read(4), tensor[:, 4])


def test_nothing_stays_open(tmp_path) -> None:
    backend, record, _ = stored(in_folder(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    readers = [backend.open_layers(record.key) for _ in range(50)]
    for reader in readers:
        reader.read(1)
    assert len(os.listdir("/proc/self/fd")) == before
    assert readers[0].record.geometry == SMALL
