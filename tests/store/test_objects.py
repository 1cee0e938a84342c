"""The object tier on a local disk: publish, dedup, staging, and the ways in which a disk fails."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
import torch
from store_makers import SMALL, chunk, equal_bits, object_store
from store_suite import receipt

from qcap.backends import open_backend
from qcap.errors import ObjectCorrupt, StoreUnavailable
from qcap.kinds import CacheKind
from qcap.store import buckets, chunkfile
from qcap.store.engine import StoreEngine
from qcap.store.objects import object_path, slug
from qcap.store.tiers import StoreOutcome
from qcap.store.urls import open_tier
from qcap.store.verify import verify_store

T_S = 30.0


@pytest.fixture
def backend(tmp_path):
    backend = open_backend(str(tmp_path))
    yield backend
    backend.close()


def files(root) -> list[str]:
    return sorted(os.path.relpath(os.path.join(d, f), root) for d, _, names in os.walk(root) for f in names)


def test_path_is_the_keys_fingerprint(tmp_path, backend) -> None:
    record, tensor = chunk(1)
    backend.store(record, tensor).result(T_S)
    name = record.key.fingerprint()
    assert files(tmp_path) == [f"objects/{name[:2]}/{name}.safetensors"]
    data = (tmp_path / object_path(record.key)).read_bytes()
    assert equal_bits(chunkfile.decode(data).tensor, tensor)


def test_dedup_does_not_touch_the_file(tmp_path, backend) -> None:
    record, tensor = chunk(1)
    backend.store(record, tensor).result(T_S)
    path = tmp_path / object_path(record.key)
    os.utime(path, ns=(1, 1))
    before = path.stat()
    assert backend.store(record, torch.zeros_like(tensor)).result(T_S) is StoreOutcome.EXISTS
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (1, before.st_ino)
    assert len(files(tmp_path)) == 1


def test_the_loser_of_a_race_to_publish_leaves_nothing(tmp_path) -> None:
    tier, (record, tensor) = open_tier(str(tmp_path)), chunk(1)
    first, second = tier.prepare(record, tensor), tier.prepare(record, torch.zeros_like(tensor))
    assert len(files(tmp_path)) == 2 and not tier.exists(record.key)
    assert first.publish() is True
    assert second.publish() is False
    assert files(tmp_path) == [object_path(record.key)]
    assert equal_bits(tier.load(record.key).tensor, tensor)
    third = tier.prepare(record, torch.zeros_like(tensor))
    assert third.publish(overwrite=True) is True
    assert files(tmp_path) == [object_path(record.key)] and not tier.load(record.key).tensor.any()
    with pytest.raises(RuntimeError, match="already published"):
        third.publish()


def test_discard_leaves_nothing(tmp_path) -> None:
    tier = open_tier(str(tmp_path))
    tier.prepare(*chunk(1)).discard()
    assert files(tmp_path) == []


@pytest.mark.parametrize("call", ["writev", "link", "open", "readv"])
def test_a_disk_error_leaves_nothing_and_a_retry_works(tmp_path, backend, monkeypatch, caplog, call: str) -> None:  # S42
    record, tensor = chunk(1)
    backend.store(*chunk(2)).result(T_S)  # folders are there
    before = files(tmp_path)

    def fails(*_args: object, **_kw: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(buckets.os, call, fails)
        if call == "link":
            patch.setattr(buckets.os, "rename", fails)
        assert backend.store(record, tensor).result(T_S) is StoreOutcome.FAILED
    assert files(tmp_path) == before
    assert backend.contains([record.key]) == [False]
    assert "No space left" in caplog.text
    assert backend.drain(T_S) and backend.counters()["failed"] == 1 and backend._queue.bytes == 0
    assert backend.store(record, tensor).result(T_S) is StoreOutcome.STORED
    assert equal_bits(backend.load(record.key).tensor, tensor)


def test_half_a_write_is_finished(tmp_path, backend, monkeypatch) -> None:
    """writev and readv may do less than they were asked."""
    writev, readv = os.writev, os.readv
    monkeypatch.setattr(buckets.os, "writev", lambda fd, bufs: writev(fd, [bufs[0][:1000]]))
    monkeypatch.setattr(buckets.os, "readv", lambda fd, bufs: readv(fd, [bufs[0][:700]]))
    record, tensor = chunk(1)
    assert backend.store(record, tensor).result(T_S) is StoreOutcome.STORED
    assert equal_bits(backend.load(record.key).tensor, tensor)


@pytest.mark.parametrize("lie", ["flip", "short"])
def test_what_is_read_back_is_checked_before_it_is_visible(tmp_path, backend, monkeypatch, caplog, lie: str) -> None:
    writev = os.writev

    def wrong(fd: int, bufs: list[memoryview]) -> int:
        whole = bytearray(b"".join(bufs))
        whole[-1] ^= 1
        return writev(fd, [whole]) if lie == "flip" else writev(fd, [whole[:-1]]) + 1

    record, tensor = chunk(1)
    with monkeypatch.context() as patch:
        patch.setattr(buckets.os, "writev", wrong)
        assert backend.store(record, tensor).result(T_S) is StoreOutcome.FAILED
    assert files(tmp_path) == []
    assert ("checksum of layer 11" if lie == "flip" else "read back") in caplog.text


def test_a_source_changed_while_it_is_written_is_not_published(tmp_path, backend, monkeypatch) -> None:
    record, tensor = chunk(1)
    writev = os.writev

    def slow(fd: int, bufs: list[memoryview]) -> int:
        tensor.view(torch.uint8).fill_(0)
        return writev(fd, bufs)

    with monkeypatch.context() as patch:
        patch.setattr(buckets.os, "writev", slow)
        assert backend.store(record, tensor).result(T_S) is StoreOutcome.FAILED
    assert files(tmp_path) == []


def test_a_file_system_without_hard_links(tmp_path, backend, monkeypatch) -> None:
    def no_links(*_args: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(buckets.os, "link", no_links)
    record, tensor = chunk(1)
    assert backend.store(record, tensor).result(T_S) is StoreOutcome.STORED
    tier = open_tier(str(tmp_path))
    assert tier.prepare(record, torch.zeros_like(tensor)).publish() is False
    assert files(tmp_path) == [object_path(record.key)]
    assert equal_bits(backend.load(record.key).tensor, tensor)


def test_a_file_stays_readable_while_it_is_replaced(tmp_path, backend) -> None:  # E60
    record, tensor = chunk(1)
    backend.store(record, tensor).result(T_S)
    tier = open_tier(str(tmp_path))
    reader = tier.bucket.open(object_path(record.key))
    backend.store(record, torch.zeros_like(tensor), overwrite=True).result(T_S)
    tier.delete(record.key)
    data = bytearray(reader.nbytes)
    assert reader.readinto([memoryview(data)]) == len(data)
    reader.close()
    assert equal_bits(chunkfile.decode(data).tensor, tensor)
    assert backend.load(record.key) is None


def test_a_corrupt_object_is_told_then_replaced(tmp_path, backend) -> None:
    record, tensor = chunk(1)
    backend.store(record, tensor).result(T_S)
    path = tmp_path / object_path(record.key)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert backend.contains([record.key]) == [True]  # nobody has looked yet
    with pytest.raises(ObjectCorrupt, match="checksum of layer 11"):
        backend.load(record.key)
    assert backend.counters()["load_corrupt"] == 1
    assert backend.contains([record.key]) == [False]
    assert backend.store(record, tensor).result(T_S) is StoreOutcome.STORED
    assert backend.contains([record.key]) == [True]
    assert equal_bits(backend.load(record.key).tensor, tensor)


def test_an_object_moved_by_hand_is_not_taken_for_another(tmp_path, backend) -> None:
    (one, tensor), (two, _) = chunk(1), chunk(1, salt="other")
    backend.store(one, tensor).result(T_S)
    target = tmp_path / object_path(two.key)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(tmp_path / object_path(one.key), target)
    with pytest.raises(ObjectCorrupt, match="another key"):
        backend.load(two.key)


def test_reading_from_a_store_that_has_gone_away(tmp_path, backend, monkeypatch) -> None:
    def gone(*_args: object, **_kw: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(buckets.os, "open", gone)
    with pytest.raises(StoreUnavailable, match=r"cannot be reached: .*Input/output error"):
        backend.load(chunk(1)[0].key)


def test_clean_staging(tmp_path) -> None:
    tier = open_tier(str(tmp_path))
    old, new = tier.prepare(*chunk(1)), tier.prepare(*chunk(2))
    os.utime(old.staged._path, (0, 0))
    assert verify_store(str(tmp_path)).stale_staging == [os.path.relpath(old.staged._path, tmp_path)]
    open_backend(str(tmp_path)).close()  # opening cleans
    assert [e.path for e in tier.list_staging()] == [os.path.relpath(new.staged._path, tmp_path)]
    assert tier.clean_staging(older_than_s=3600) == 0
    assert tier.clean_staging(older_than_s=0) == 1
    assert files(tmp_path) == []


def test_verify_names_what_is_bad(tmp_path, backend) -> None:
    chunks = [chunk(seed) for seed in range(3)]
    for c in chunks:
        backend.store(*c).result(T_S)
    backend.put_manifest(SMALL, [CacheKind.KV], {})
    backend.put_sequence(receipt("r")).result(T_S)
    steps: list[tuple[int, int]] = []
    report = verify_store(str(tmp_path), lambda done, total: steps.append((done, total)))
    assert (report.ok, report.objects, report.manifests, report.sequences) == (True, 3, 1, 1)
    assert report.nbytes == sum((tmp_path / object_path(r.key)).stat().st_size for r, _ in chunks)
    assert steps == [(1, 3), (2, 3), (3, 3)]

    first, second = (tmp_path / object_path(r.key) for r, _ in chunks[:2])
    first.write_bytes(first.read_bytes()[:-1])
    moved = tmp_path / "objects/00" / ("0" * 64 + ".safetensors")
    moved.parent.mkdir(exist_ok=True)
    second.rename(moved)
    (tmp_path / "objects/readme.txt").write_text("hello")
    next((tmp_path / "models").rglob("*.json")).write_text("{}")
    next((tmp_path / "sequences").rglob("*.json")).write_text('{"format":1,"sequence":{"model":3}}')
    bad = {b.path: b.reason for b in verify_store(str(tmp_path)).bad}
    assert len(bad) == 5
    reasons = " | ".join(bad.values())
    for part in ("truncated", "another key", "not the name of an object", "format None", "not a receipt"):
        assert part in reasons
    assert backend.sequences() == [] and backend.counters()["sequences_corrupt"] == 1
    with pytest.raises(ObjectCorrupt, match="format None"):
        backend.manifests()


def test_log_storms_are_held_back(tmp_path, caplog) -> None:  # O14
    backend = StoreEngine(open_tier(str(tmp_path)), on_pressure="skip")
    record, _ = chunk(1)
    for _ in range(1000):
        assert backend.store(record, None).result(T_S) is StoreOutcome.FAILED
    backend.close()
    assert backend.counters()["failed"] == 1000
    assert len([r for r in caplog.records if r.name == "qcap.store"]) == 1


def test_answers_of_a_remote_store_are_remembered() -> None:
    """One where each look costs a round trip."""
    opened = object_store()
    backend, (record, tensor) = StoreEngine(opened()), chunk(1)
    asked = []
    exists = backend._tier.exists
    backend._tier.exists = lambda key: asked.append(key) or exists(key)
    assert backend.contains([record.key]) == [False] and len(asked) == 1
    backend.store(record, tensor).result(T_S)
    asked.clear()
    assert backend.lookup([record.key] * 5) == 5 and asked == []
    opened().delete(record.key)
    assert backend.load(record.key) is None  # and forgets
    assert backend.contains([record.key]) == [False]
    backend.close()


def test_slug_keeps_apart_what_it_makes_alike() -> None:
    texts = ["org/model", "org-model", "org\\model", "", "..", "../..", "a" * 300, "é", "A b\n", "##query"]
    slugs = [slug(t) for t in texts]
    assert len(set(slugs)) == len(texts)
    for s in slugs:
        assert "/" not in s and s not in (".", "..") and len(s) < 80 and not s.startswith(".")
