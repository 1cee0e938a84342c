"""What a bucket copies, and what it lets lie: the bytes of a large object are moved once, and never while other threads must wait."""

from __future__ import annotations

import errno
import os
import threading

import numpy as np
import pytest
from store_makers import chunk, equal_bits, object_store

from qcap.backends import open_backend
from qcap.store import buckets, chunkfile
from qcap.store.objects import object_path
from qcap.store.tiers import StoreOutcome
from qcap.store.urls import open_tier


def address(data: memoryview) -> int:
    return np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0]


@pytest.fixture(params=["file", "object store"])
def tier(request, tmp_path):
    return open_tier(str(tmp_path)) if request.param == "file" else object_store()()


def test_copy_bytes() -> None:
    source, target = bytes(range(200)), bytearray(250)
    chunkfile.copy_bytes(memoryview(target)[10:210], source)
    assert target == bytes(10) + source + bytes(40)
    chunkfile.copy_bytes(memoryview(target)[:0], b"")
    with pytest.raises(ValueError, match="broadcast"):
        chunkfile.copy_bytes(memoryview(target)[:9], source)


def test_take_goes_through_a_file_piece_by_piece(tier) -> None:
    data, scratch = bytes(range(250)) * 10, memoryview(bytearray(900))
    for finish in (lambda s: s.open(), lambda s: s.publish("a/b") and tier.bucket.open("a/b")):
        reader = finish(tier.bucket.stage([data[:7], memoryview(data)[7:]]))
        assert reader.nbytes == 2500
        assert [bytes(reader.take(scratch)) for _ in range(4)] == [data[:900], data[900:1800], data[1800:], b""]
        reader.close()


def test_nothing_staged_is_nothing_stored(tier) -> None:
    for parts in ([], [b""]):
        assert tier.bucket.stage(parts).publish("empty", overwrite=True)
        reader = tier.bucket.open("empty")
        assert reader.nbytes == 0
        reader.close()


@pytest.mark.parametrize("hard_links", [True, False])
def test_an_empty_file_is_nothing_and_is_replaced(tmp_path, monkeypatch, hard_links) -> None:  # what a power cut leaves
    if not hard_links:

        def refuse(source: object, target: object) -> None:
            raise OSError(errno.EOPNOTSUPP, "no hard links on this file system")

        monkeypatch.setattr(os, "link", refuse)
    backend, (record, tensor) = open_backend(tmp_path.as_uri()), chunk(1)
    path = tmp_path / object_path(record.key)
    for left in (b"", b"half"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(left)
        assert backend.contains([record.key]) == [bool(left)]
        assert backend.store(record, tensor).result(20) is (StoreOutcome.EXISTS if left else StoreOutcome.STORED)
    backend.close()


def test_an_object_store_in_memory_holds_the_one_copy_that_staging_made() -> None:
    tier, (record, tensor) = object_store()(), chunk(1)
    prepared = tier.prepare(record, tensor)
    staged = address(prepared.staged._data)
    wanted = tensor.clone()
    tensor.zero_()  # the source is free again
    assert prepared.publish()
    reader, size = tier.bucket.open(object_path(record.key)), prepared.nbytes
    assert address(reader.take(memoryview(bytearray(size)))) == staged
    reader.close()
    assert equal_bits(tier.load(record.key).tensor, wanted)


def test_large_copies_go_where_the_gil_is_not_held(monkeypatch) -> None:
    """Every byte of a chunk that is copied in memory is copied by ``copy_bytes``."""
    copied: list[int] = []
    real = chunkfile.copy_bytes
    for module in (chunkfile, buckets):
        monkeypatch.setattr(module, "copy_bytes", lambda target, source: copied.append(target.nbytes) or real(target, source))
    tier, (record, tensor) = object_store()(), chunk(1)
    prepared = tier.prepare(record, tensor)
    assert sum(copied) >= prepared.nbytes and sum(copied) - prepared.nbytes < len(chunkfile.encode(record, tensor).header) + 1
    prepared.publish()
    header = tier.header(record.key)
    for read, nbytes in (
        (lambda: tier.load(record.key), tensor.nbytes),
        (lambda: tier.read_layer(header, 3, tensor[:, 3]), header.layer_bytes),
    ):
        copied.clear()
        read()
        assert sum(copied) >= nbytes


def test_a_staged_object_is_not_changed_by_its_readers() -> None:
    staged = object_store()().bucket.stage([b"abc"])
    reader = staged.open()
    with pytest.raises(TypeError, match="read-only"):
        reader.take(memoryview(bytearray(3)))[0] = 1
    reader.close()
    again = staged.open()  # closing one reader closes no other
    assert bytes(again.take(memoryview(bytearray(3)))) == b"abc"


def test_objects_outlive_their_removal_while_they_are_read() -> None:  # E60
    tier, (record, tensor) = object_store()(), chunk(1)
    tier.prepare(record, tensor).publish()
    reader = tier.bucket.open(object_path(record.key))
    tier.prepare(record, tensor.clone().zero_()).publish(overwrite=True)
    tier.delete(record.key)
    data = bytearray(reader.nbytes)
    done = threading.Thread(target=lambda: reader.readinto([memoryview(data)]))
    done.start()
    done.join()
    reader.close()
    assert equal_bits(chunkfile.decode(data).tensor, tensor)
