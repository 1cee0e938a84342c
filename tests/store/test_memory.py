"""``memory://``: chunks rest as tensors, and become files when somebody lists them."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
import uuid

import pytest
import torch
from store_makers import SMALL, chunk, equal_bits, geometry
from store_suite import receipt

from qcap.backends import open_backend
from qcap.errors import ObjectCorrupt, ShapeError, TokenError
from qcap.kinds import CacheKind
from qcap.store import chunkfile, memory
from qcap.store.memory import MemoryTier
from qcap.store.objects import LayerReplaced, object_path
from qcap.store.tiers import StoreOutcome
from qcap.store.urls import open_tier
from qcap.store.verify import nothing_at, verify_store, verify_tier

T_S = 30.0


@pytest.fixture
def name():
    name = uuid.uuid4().hex
    yield name
    memory.forget(name)


@pytest.fixture
def tier(name) -> MemoryTier:
    tier = open_tier(f"memory://{name}")
    assert isinstance(tier, MemoryTier)
    return tier


@pytest.fixture
def backend(name):
    backend = open_backend(f"memory://{name}")
    yield backend
    backend.close()


def files(tier: MemoryTier) -> list[str]:
    """What lies in the bucket, without a listing of the tier, which would write out what rests."""
    return sorted(entry.path for entry in tier.bucket.list("objects"))


def zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor)


def is_zero(tensor: torch.Tensor) -> bool:
    return not tensor.contiguous().view(torch.uint8).any()


# ---- resting


def test_a_stored_chunk_rests(tier, backend) -> None:
    chunks = [chunk(1, kind, index=i) for kind in CacheKind for i in range(2)]
    for c in chunks:
        assert backend.store(*c).result(T_S) is StoreOutcome.STORED
    keys = [record.key for record, _ in chunks]
    assert backend.contains(keys) == [True] * 4 and backend.lookup(keys) == 4 and backend.lookup([*keys[:2], chunk(2)[0].key]) == 2
    assert all(tier.exists(key) for key in keys) and not tier.exists(chunk(2)[0].key)
    for record, tensor in chunks:
        loaded = backend.load(record.key)
        assert loaded is not None and loaded.record == record and equal_bits(loaded.tensor, tensor)
        assert backend.edit_of(record.key) == ""
    assert files(tier) == []
    assert tier.list_staging() == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_bits_of_every_dtype(tier, dtype: str) -> None:
    record, tensor = chunk(3, geo=geometry(dtype=dtype))
    assert tier.prepare(record, tensor).publish()
    assert equal_bits(tier.load(record.key).tensor, tensor)
    out = torch.empty_like(tensor[:, 4])
    tier.read_layer(tier.header(record.key), 4, out)
    assert equal_bits(out, tensor[:, 4])


def test_what_is_stored_is_a_copy(tier, backend) -> None:
    record, tensor = chunk(1)
    wanted = tensor.clone()
    backend.store(record, tensor).result(T_S)
    tensor.zero_()
    loaded = backend.load(record.key)
    assert equal_bits(loaded.tensor, wanted)
    loaded.tensor.zero_()
    assert equal_bits(backend.load(record.key).tensor, wanted)
    layer = backend.open_layers(record.key).read(2)
    layer.zero_()
    assert equal_bits(backend.open_layers(record.key).read(2), wanted[:, 2])
    list(tier.list_objects())
    assert equal_bits(backend.load(record.key).tensor, wanted)


def test_a_source_with_strided_layers(tier) -> None:
    """Rows of a bigger buffer, layers outermost: ``[CH, H]`` is contiguous and nothing else."""
    record, tensor = chunk(1)
    planes, layers, rows, hidden = tensor.shape
    buffer = torch.zeros((layers, 3, planes + 1, rows + 5, hidden), dtype=tensor.dtype)
    source = buffer[:, 1, 1:, 2 : 2 + rows].transpose(0, 1)
    source.copy_(tensor)
    assert not source.is_contiguous() and source[0, 0].is_contiguous() and equal_bits(source, tensor)
    assert tier.prepare(record, source).publish()
    buffer.zero_()
    assert equal_bits(tier.load(record.key).tensor, tensor)
    out = torch.empty_like(tensor[:, 0])
    tier.read_layer(tier.header(record.key), 11, out)
    assert equal_bits(out, tensor[:, 11])
    tier.put_manifest(SMALL, [CacheKind.KV], {})
    assert verify_tier(tier).ok and equal_bits(tier.load(record.key).tensor, tensor)


def test_counters(backend) -> None:
    chunks = [chunk(1, CacheKind.KV), chunk(1, CacheKind.QUERY)]
    size = sum(tensor.nbytes for _, tensor in chunks)
    for c in chunks:
        backend.store(*c).result(T_S)
    backend.store(*chunks[0]).result(T_S)
    for record, _ in chunks:
        backend.load(record.key)
    backend.open_layers(chunks[0][0].key).read(0)
    counts = backend.counters()
    assert (counts["stored"], counts["stored_kv"], counts["stored_query"], counts["exists"], counts["failed"]) == (2, 1, 1, 1, 0)
    assert counts["bytes_stored"] == size and counts["tokens_stored"] == 2 * SMALL.chunk_size
    assert (counts["loaded"], counts["layers_loaded"]) == (2, 1)
    assert counts["bytes_loaded"] == size + chunks[0][1][:, 0].nbytes


# ---- publish, overwrite, delete


@pytest.mark.parametrize("written_out", [False, True])
def test_publish_is_exclusive(tier, written_out: bool) -> None:
    record, tensor = chunk(1)
    first, second, third = (tier.prepare(record, t) for t in (tensor, zeros(tensor), zeros(tensor)))
    assert not tier.exists(record.key) and tier.load(record.key) is None and tier.header(record.key) is None
    assert first.publish() is True
    if written_out:
        assert len(list(tier.list_objects())) == 1
    assert second.publish() is False
    assert equal_bits(tier.load(record.key).tensor, tensor)
    assert files(tier) == ([object_path(record.key)] if written_out else [])
    assert third.publish(overwrite=True) is True
    assert is_zero(tier.load(record.key).tensor) and files(tier) == []
    for done in (first, second, third):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="already published"):
                done.publish(overwrite=True)
            done.discard()
    assert is_zero(tier.load(record.key).tensor)


def test_discard(tier) -> None:
    record, tensor = chunk(1)
    prepared = tier.prepare(record, tensor)
    prepared.discard()
    prepared.discard()
    with pytest.raises(RuntimeError, match="discarded"):
        prepared.publish()
    assert not tier.exists(record.key) and nothing_at(tier.url) is not None


@pytest.mark.parametrize("written_out", [False, True])
def test_delete(tier, written_out: bool) -> None:
    (record, tensor), other = chunk(1), chunk(2)
    for c in ((record, tensor), other):
        tier.prepare(*c).publish()
    if written_out:
        list(tier.list_objects())
    tier.delete(record.key)
    tier.delete(record.key)
    assert not tier.exists(record.key) and tier.load(record.key) is None and tier.header(record.key) is None
    assert equal_bits(tier.load(other[0].key).tensor, other[1])
    assert [e.path for e in tier.list_objects()] == [object_path(other[0].key)]
    assert tier.prepare(record, tensor).publish() and equal_bits(tier.load(record.key).tensor, tensor)


def test_openers_of_one_name_share_it(name, backend) -> None:
    record, tensor = chunk(1)
    backend.store(record, tensor).result(T_S)
    for url in (f"memory://{name}", f"memory://{name}/", f"MEMORY://{name}"):
        other = open_backend(url)
        assert other.contains([record.key]) == [True] and equal_bits(other.load(record.key).tensor, tensor), url
        assert other.store(record, zeros(tensor)).result(T_S) is StoreOutcome.EXISTS
        other.close()
    stranger = open_backend(f"memory://{name}x")
    assert stranger.contains([record.key]) == [False] and stranger.load(record.key) is None
    stranger.close()
    backend.close()
    assert equal_bits(open_tier(f"memory://{name}").load(record.key).tensor, tensor)  # closing an opener lets go of nothing


def test_forget(name, tier) -> None:
    chunks, kept = [chunk(seed) for seed in range(3)], chunk(4)
    other = MemoryTier(f"{name}x")
    other.prepare(*kept).publish()
    for c in chunks:
        tier.prepare(*c).publish()
    header = tier.header(chunks[0][0].key)
    memory.forget(name)
    memory.forget(f"{name}-never-opened")
    assert not any(tier.exists(record.key) for record, _ in chunks) and list(tier.list_objects()) == []
    with pytest.raises(LayerReplaced):
        tier.read_layer(header, 0, torch.empty_like(chunks[0][1][:, 0]))
    assert equal_bits(other.load(kept[0].key).tensor, kept[1])
    assert tier.prepare(*chunks[0]).publish() and equal_bits(MemoryTier(name).load(chunks[0][0].key).tensor, chunks[0][1])
    memory.forget(f"{name}x")


# ---- layers


@pytest.mark.parametrize("kind", list(CacheKind))
def test_layers(tier, backend, kind: CacheKind) -> None:
    record, tensor = chunk(1, kind)
    backend.store(record, tensor).result(T_S)
    reader = backend.open_layers(record.key)
    assert reader.record == record
    rows = tensor.shape[2]
    buffer = torch.zeros((tensor.shape[0], 2 * rows, tensor.shape[3]), dtype=tensor.dtype)
    for layer in (11, 0, 5):
        assert equal_bits(reader.read(layer), tensor[:, layer])
        out = buffer[:, 3 : 3 + rows]
        assert reader.read(layer, out) is out and equal_bits(out, tensor[:, layer])
    assert is_zero(buffer[:, :3]) and is_zero(buffer[:, 3 + rows :])
    out = torch.empty_like(tensor[:, 0])
    for layer in (-1, 12):
        with pytest.raises(IndexError, match="of 12"):
            reader.read(layer)
        with pytest.raises(IndexError, match="of 12"):
            tier.read_layer(tier.header(record.key), layer, out)
    assert files(tier) == []


def test_layers_into_what_does_not_fit(tier) -> None:
    record, tensor = chunk(1)
    tier.prepare(record, tensor).publish()
    header, good = tier.header(record.key), torch.zeros_like(tensor[:, 0])
    bad = (good[:1], good[:, 1:], good.view(torch.float16), good.transpose(1, 2).contiguous().transpose(1, 2), good.to("meta"))
    for out in (*bad, torch.zeros((1, *good.shape), dtype=good.dtype)):
        with pytest.raises(ShapeError, match="a layer of this object is"):
            tier.read_layer(header, 0, out)
    assert is_zero(good)
    tier.read_layer(header, 0, good)
    assert equal_bits(good, tensor[:, 0])


def _replaced(tier: MemoryTier, record, tensor) -> None:
    assert tier.prepare(record, zeros(tensor)).publish(overwrite=True)


def _same_again(tier: MemoryTier, record, tensor) -> None:
    assert tier.prepare(record, tensor).publish(overwrite=True)


def _deleted(tier: MemoryTier, record, tensor) -> None:
    tier.delete(record.key)


def _written_out(tier: MemoryTier, record, tensor) -> None:
    assert [e.path for e in tier.list_objects()] == [object_path(record.key)]


def _forgotten(tier: MemoryTier, record, tensor) -> None:
    memory.forget(tier.url.removeprefix("memory://"))


@pytest.mark.parametrize("change", [_replaced, _same_again, _deleted, _written_out, _forgotten])
def test_what_rested_is_gone_between_two_layers(tier, backend, caplog, change) -> None:
    """Not damage: the chunk stays a hit for the engine, which loads it anew."""
    assert issubclass(LayerReplaced, ObjectCorrupt)
    record, tensor = chunk(1)
    backend.store(record, tensor).result(T_S)
    reader = backend.open_layers(record.key)
    assert equal_bits(reader.read(0), tensor[:, 0])
    change(tier, record, tensor)
    out = zeros(tensor[:, 1])
    for _ in range(2):
        with pytest.raises(LayerReplaced, match="replaced, removed or written out"):
            reader.read(1, out)
    assert is_zero(out)
    assert backend.counters()["load_corrupt"] == 2 and "load it anew" in caplog.text
    assert not [r for r in caplog.records if r.levelname == "ERROR"]
    assert record.key not in backend._corrupt and backend.contains([record.key]) == [change not in (_deleted, _forgotten)]
    again = backend.open_layers(record.key)
    if change in (_deleted, _forgotten):
        assert again is None and backend.load(record.key) is None
    else:
        wanted = zeros(tensor) if change is _replaced else tensor
        assert equal_bits(again.read(1), wanted[:, 1]) and equal_bits(backend.load(record.key).tensor, wanted)


@pytest.mark.parametrize("change", [_replaced, _same_again, _deleted])
def test_what_was_written_out_is_gone_between_two_layers(tier, backend, change) -> None:
    record, tensor = chunk(1)
    backend.store(record, tensor).result(T_S)
    list(tier.list_objects())
    reader = backend.open_layers(record.key)
    assert equal_bits(reader.read(0), tensor[:, 0])
    change(tier, record, tensor)
    with pytest.raises(LayerReplaced, match="replaced"):
        reader.read(1)
    assert backend.contains([record.key]) == [change is not _deleted]


# ---- written out


def test_a_listing_writes_out(name, tier, backend) -> None:
    chunks = [chunk(seed, kind, salt="s", tags=(("lora", "a@%b"),), edit='{"name":"é"}') for seed in range(3) for kind in CacheKind]
    for c in chunks:
        backend.store(*c).result(T_S)
    backend.put_manifest(SMALL, [CacheKind.KV], {})
    backend.put_sequence(receipt("r")).result(T_S)
    wanted = {object_path(record.key): len(bytes(chunkfile.encode(record, tensor))) for record, tensor in chunks}
    assert nothing_at(tier.url) is None
    assert {e.path: e.nbytes for e in tier.list_objects()} == wanted
    assert files(tier) == sorted(wanted)
    report = verify_store(f"memory://{name}")
    assert report.unlisted == {f"{SMALL.model}, query": 3} and not (report.bad or report.broken_edits)
    assert (report.objects, report.manifests, report.sequences) == (6, 1, 1)
    assert report.nbytes == sum(wanted.values()) and report.stale_staging == []
    for record, tensor in chunks:
        loaded = backend.load(record.key)
        assert loaded.record == record and equal_bits(loaded.tensor, tensor)
        assert equal_bits(backend.open_layers(record.key).read(7), tensor[:, 7])
        assert backend.store(record, zeros(tensor)).result(T_S) is StoreOutcome.EXISTS
    assert backend.edit_of(chunks[0][0].key) == '{"name":"é"}'


def test_the_file_is_the_one_that_a_folder_gets(tier, tmp_path) -> None:
    record, tensor = chunk(1)
    folder = open_tier(str(tmp_path))
    for t in (tier, folder):
        t.prepare(record, tensor).publish()
    list(tier.list_objects())
    reader = tier.bucket.open(object_path(record.key))
    data = bytearray(reader.nbytes)
    reader.readinto([memoryview(data)])
    reader.close()
    assert data == (tmp_path / object_path(record.key)).read_bytes()


def test_damage_to_what_was_written_out(tier, backend) -> None:
    record, tensor = chunk(1)
    backend.store(record, tensor).result(T_S)
    list(tier.list_objects())
    data = bytearray(bytes(chunkfile.encode(record, tensor)))
    data[-1] ^= 1
    assert tier.bucket.stage([data]).publish(object_path(record.key), overwrite=True)
    report = verify_tier(tier)
    assert [bad.path for bad in report.bad] == [object_path(record.key)] and "layer 11" in report.bad[0].reason
    with pytest.raises(ObjectCorrupt, match="checksum of layer 11"):
        backend.load(record.key)
    assert backend.contains([record.key]) == [False]
    assert backend.store(record, tensor).result(T_S) is StoreOutcome.STORED
    assert files(tier) == [] and equal_bits(backend.load(record.key).tensor, tensor)
    tier.put_manifest(SMALL, [CacheKind.KV], {})
    assert verify_tier(tier).ok


# ---- refused


BAD_RECORDS = {
    "digest": {"digest": "0" * 64},
    "parent": {"parent": "0" * 64},
    "token": {"token_ids": (-1,) * SMALL.chunk_size},
    "position": {"positions": (-1,) * SMALL.chunk_size},
    "start": {"start": -1},
    "edit that is no Unicode": {"edit": "\ud800"},
    "edit that is no text": {"edit": 5},
    "tag that is no Unicode": {"tags": (("a", "\ud800"),)},
    "geometry": {"geometry": geometry(scale="x")},
}


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize("spoil", list(BAD_RECORDS))
def test_a_record_that_no_file_could_hold_is_refused_at_once(tier, tmp_path, where: str, spoil: str) -> None:
    """Or it would rest here, and fail whoever lists the store."""
    record, tensor = chunk(1)
    refusing = tier if where == "memory" else open_tier(str(tmp_path))
    with pytest.raises(TokenError):
        refusing.prepare(dataclasses.replace(record, **BAD_RECORDS[spoil]), tensor)
    assert not refusing.exists(record.key) and list(refusing.list_objects()) == []


def test_a_tensor_that_is_not_the_records_is_refused(tier, tmp_path) -> None:
    record, tensor = chunk(1)
    bad = [
        tensor[:, :-1], tensor[:1], tensor[0], tensor.view(torch.float16), tensor.to("meta"),
        tensor.transpose(-1, -2).contiguous().transpose(-1, -2),
    ]  # fmt: skip
    for refusing in (tier, open_tier(str(tmp_path))):
        for other in bad:
            with pytest.raises(ShapeError):
                refusing.prepare(record, other)
        assert not refusing.exists(record.key)


# ---- many at once


def test_a_chunk_is_never_missing_while_it_moves(tier) -> None:
    """It goes from tensor to file (a listing) and from file to tensor (an overwrite); at no time is there none, nor half of each."""
    record, ones = chunk(1)
    tensors = [ones, zeros(ones)]
    tier.prepare(record, ones).publish()
    stop, wrong = threading.Event(), []

    def move() -> None:
        for i in range(150):
            tier.prepare(record, tensors[i % 2]).publish(overwrite=True)
            if i % 3:
                list(tier.list_objects())
        stop.set()

    def look(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            what = rng.randrange(3)
            if what == 0 and not tier.exists(record.key):
                wrong.append("exists")
            elif what == 1:
                loaded = tier.load(record.key)
                if loaded is None or not any(equal_bits(loaded.tensor, t) for t in tensors):
                    wrong.append("load")
            elif what == 2 and tier.header(record.key) is None:
                wrong.append("header")

    _together([move, *(lambda seed=seed: look(seed) for seed in range(3))])
    assert stop.is_set() and wrong == []


@pytest.mark.parametrize("asked", ["exists", "load", "header"])
def test_a_chunk_that_moves_between_two_looks(tier, monkeypatch, asked: str) -> None:
    """No tensor was there, then it was overwritten, so that no file is there any more."""
    record, tensor = chunk(1)
    tier.prepare(record, tensor).publish()
    list(tier.list_objects())
    call = "exists" if asked == "exists" else "open"
    real, looks = getattr(tier.bucket, call), []

    def late(*args: object) -> object:
        if not looks:
            looks.append(args)
            assert tier.prepare(record, zeros(tensor)).publish(overwrite=True)
        return real(*args)

    monkeypatch.setattr(tier.bucket, call, late)
    found = getattr(tier, asked)(record.key)
    assert looks and found
    if asked == "load":
        assert is_zero(found.tensor)


def test_writers_and_readers_while_others_list(tier, backend) -> None:
    chunks = [chunk(seed) for seed in range(10)]
    outcomes: list[StoreOutcome] = []
    wrong: list[object] = []
    stop = threading.Event()

    def write(seed: int) -> None:
        order = random.Random(seed).sample(range(10), 10)
        outcomes.extend(f.result(T_S) for f in [backend.store(*chunks[i]) for i in order])

    def read(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            record, tensor = rng.choice(chunks)
            loaded = backend.load(record.key)
            if loaded is not None and not (loaded.record == record and equal_bits(loaded.tensor, tensor)):
                wrong.append(record)
            reader, layer = backend.open_layers(record.key), rng.randrange(12)
            try:
                if reader is not None and not equal_bits(reader.read(layer), tensor[:, layer]):
                    wrong.append((record, layer))
            except LayerReplaced:
                pass  # written out between the two

    def listing() -> None:
        while not stop.is_set():
            wrong.extend(verify_tier(tier).bad)

    others = [threading.Thread(target=t) for t in (lambda: read(1), lambda: read(2), listing)]
    for thread in others:
        thread.start()
    _together([lambda seed=seed: write(seed) for seed in range(3)])
    stop.set()
    for thread in others:
        thread.join(T_S)
        assert not thread.is_alive()
    assert wrong == [] and sorted(o.value for o in outcomes) == ["exists"] * 20 + ["stored"] * 10
    for record, tensor in chunks:
        assert equal_bits(backend.load(record.key).tensor, tensor)
    assert verify_tier(tier).objects == 10


def _together(works) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(T_S)
    assert not any(thread.is_alive() for thread in threads)


# ---- chunks that stay where they came in


class Lent:
    """Memory under a lease; scribbled over as soon as nobody holds it."""

    def __init__(self, tensor: torch.Tensor, *, pinned: bool = True, lent: bool = True) -> None:
        self.tensor, self.pinned, self.lent, self.holders, self.returned = tensor.clone(), pinned, lent, 1, 0
        self._lock = threading.Lock()

    def hold(self) -> None:
        with self._lock:
            assert self.holders, "held after it was given back"
            self.holders += 1

    def release(self) -> None:
        with self._lock:
            self.holders -= 1
            assert self.holders >= 0
            if not self.holders:
                self.returned += 1
                if self.lent:
                    self.tensor.zero_()


def lend(backend, seed: int = 1, *, pinned: bool = True, lent: bool = True, overwrite: bool = False, **changes) -> tuple:
    record, tensor = chunk(seed, **changes)
    lease = Lent(tensor, pinned=pinned, lent=lent)
    outcome = backend.store(record, lease.tensor, lease=lease, overwrite=overwrite).result(T_S)
    lease.release()  # the caller's own
    return record, tensor, lease, outcome


def reader_of(backend, record):
    reader = backend.open_layers(record.key)
    assert reader is not None
    return reader


def test_a_lent_chunk_is_not_copied(backend) -> None:
    record, tensor, lease, outcome = lend(backend)
    assert outcome is StoreOutcome.STORED and lease.holders == 1
    resting = reader_of(backend, record).rest()
    assert resting is not None and resting.lease is lease and lease.holders == 2
    assert resting.tensor.data_ptr() == lease.tensor.data_ptr() and equal_bits(resting.tensor, tensor)
    resting.lease.release()
    loaded = backend.load(record.key)
    assert equal_bits(loaded.tensor, tensor) and loaded.tensor.data_ptr() != lease.tensor.data_ptr()
    assert equal_bits(reader_of(backend, record).read(1), tensor[:, 1]) and lease.holders == 1


def test_only_page_locked_memory_is_shown(backend) -> None:
    record, _, lease, _ = lend(backend, pinned=False)
    assert reader_of(backend, record).rest() is None and lease.holders == 1
    other, copied = chunk(2)
    backend.store(other, copied).result(T_S)
    assert reader_of(backend, other).rest() is None


def test_memory_that_is_wanted_back_comes_back(backend) -> None:
    lent = [lend(backend, index=i) for i in range(4)]
    readers = [reader_of(backend, record) for record, *_ in lent]
    nbytes = lent[0][1].nbytes
    assert backend.relieve(nbytes + 1)
    until(lambda: lent[1][2].returned)
    assert [lease.returned for *_, lease, _ in lent] == [1, 1, 0, 0]  # the oldest, and no more than was asked for
    for reader, (record, tensor, lease, _) in zip(readers, lent, strict=True):
        assert equal_bits(backend.load(record.key).tensor, tensor) and equal_bits(reader.read(0), tensor[:, 0])
        resting = reader.rest()
        assert (resting is None) == bool(lease.returned)
        if resting is not None:
            resting.lease.release()
    while backend.relieve(1 << 40):
        time.sleep(0.001)
    assert all(lease.returned == 1 for *_, lease, _ in lent) and not backend.relieve(1)


@pytest.mark.parametrize("own", [True, False], ids=["its own engine", "another engine"])
def test_what_is_loaded_again_and_again_stays_where_it_lies(name, backend, own) -> None:
    """A prefix that many prompts share came first, and would be the first to go."""
    engine = backend if own else open_backend(f"memory://{name}")
    prefix = [lend(backend, index=i) for i in range(2)]
    for i in range(2, 8):
        other = lend(backend, index=i)
        engine.loaded([record.key for record, *_ in prefix])
        assert backend.relieve(other[1].nbytes)
        until(lambda lease=other[2]: lease.returned and not backend._tier._moving)
    assert [lease.returned for *_, lease, _ in prefix] == [0, 0]
    engine.close()


def test_the_beginning_of_a_sequence_stays_longest(backend) -> None:
    """Whoever shares any of it needs that."""
    lent = [lend(backend, index=i) for i in range(4)]
    backend.loaded([record.key for record, *_ in lent[:3]])
    for lease in [lease for *_, lease, _ in reversed(lent)]:
        assert not lease.returned
        assert backend.relieve(1)
        until(lambda lease=lease: lease.returned and not backend._tier._moving)


def test_what_is_being_loaded_is_not_the_first_to_move(backend) -> None:
    """Nothing is gained by moving it: who reads it keeps its memory."""
    first, second = lend(backend, index=0), lend(backend, index=1)
    resting = reader_of(backend, first[0]).rest()
    assert backend.relieve(1)
    until(lambda: second[2].returned)
    assert reader_of(backend, first[0]).rest().lease.release() is None and not first[2].returned
    resting.lease.release()


def test_chunks_on_their_way_out_or_gone_are_not_kept_in_line(tier, backend) -> None:
    first = lend(backend, index=0)
    resting = reader_of(backend, first[0]).rest()
    assert backend.relieve(1)  # it moves, while its old memory is read
    until(lambda: not backend._tier._moving)
    second = lend(backend, index=1)
    assert reader_of(backend, first[0]).rest() is None
    backend.loaded([first[0].key, second[0].key, chunk(9)[0].key])
    assert len(backend._tier._lent) == 1
    resting.lease.release()
    for _ in range(20):
        lend(backend, index=1, overwrite=True)
    assert len(backend._tier._lent) == 1
    tier.delete(second[0].key)
    lend(backend, index=3)
    assert len(list(backend._tier.list_objects())) == 2 and len(backend._tier._lent) == 0


def test_a_chunk_that_cannot_be_moved_for_want_of_threads_is_the_next(backend, monkeypatch) -> None:
    lent = [lend(backend, index=i) for i in range(3)]

    class NoThreads:
        def __init__(self, *args: object, **kwargs: object) -> None:
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(memory, "ThreadPoolExecutor", NoThreads)
        assert not backend.relieve(1)
    assert backend.relieve(1)
    until(lambda: lent[0][2].returned)
    assert [lease.returned for *_, lease, _ in lent] == [1, 0, 0]


def test_who_reads_a_lent_chunk_keeps_it(backend) -> None:
    record, tensor, lease, _ = lend(backend)
    resting = reader_of(backend, record).rest()
    while backend.relieve(1 << 40):
        time.sleep(0.001)
    assert not lease.returned and equal_bits(resting.tensor, tensor)
    resting.lease.release()
    assert lease.returned == 1 and equal_bits(backend.load(record.key).tensor, tensor)


@pytest.mark.parametrize("how", ["delete", "forget", "overwrite", "list", "close", "exists"])
def test_a_lease_ends_once_however_the_chunk_goes(name, tier, backend, how) -> None:
    record, tensor, lease, _ = lend(backend)
    reader = reader_of(backend, record)
    if how == "delete":
        tier.delete(record.key)
    elif how == "forget":
        memory.forget(name)
    elif how == "overwrite":
        assert backend.store(record, zeros(tensor), overwrite=True).result(T_S) is StoreOutcome.STORED
    elif how == "list":
        assert len(list(tier.list_objects())) == 1
    elif how == "exists":
        again = lend(backend)
        assert again[3] is StoreOutcome.EXISTS and again[2].returned == 1 and lease.holders == 1
        return
    else:
        backend.close()
    assert lease.returned == 1
    if how == "close":
        assert equal_bits(reader.read(0), tensor[:, 0])
    else:
        with pytest.raises(LayerReplaced):
            reader.read(0)
    assert reader.rest() is None
    loaded = backend.load(record.key)
    assert (loaded is None) == (how in ("delete", "forget"))
    assert loaded is None or (is_zero(loaded.tensor) if how == "overwrite" else equal_bits(loaded.tensor, tensor))
    while backend.relieve(1 << 40):
        time.sleep(0.001)
    assert lease.returned == 1


def test_readers_while_memory_is_taken_back(name, backend) -> None:
    lent = [lend(backend, index=i) for i in range(12)]
    wrong, stop = [], threading.Event()

    def read(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            record, tensor, _, _ = rng.choice(lent)
            resting = reader_of(backend, record).rest()
            if resting is not None:
                wrong.append(equal_bits(resting.tensor, tensor))
                resting.lease.release()
            wrong.append(equal_bits(backend.load(record.key).tensor, tensor))
            wrong.append(equal_bits(reader_of(backend, record).read(0), tensor[:, 0]))

    threads = [threading.Thread(target=read, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    while backend.relieve(lent[0][1].nbytes):
        time.sleep(0.005)
    stop.set()
    for thread in threads:
        thread.join(T_S)
    assert wrong and all(wrong) and all(lease.returned == 1 for *_, lease, _ in lent)


def test_memory_of_its_own_is_kept_and_not_counted(backend) -> None:
    own = [lend(backend, index=i, lent=False) for i in range(3)]
    assert all(lease.returned == 1 for *_, lease, _ in own), "nobody needs to hold it"
    for record, tensor, lease, _ in own:
        assert backend._tier._shelf.chunks[object_path(record.key)]._tensor.data_ptr() == lease.tensor.data_ptr()
        assert equal_bits(backend.load(record.key).tensor, tensor) and reader_of(backend, record).rest() is None
    assert not backend.relieve(1 << 40)
    _, _, lease, _ = lend(backend, index=7)
    assert backend.relieve(1)
    until(lambda: lease.returned)


def test_what_is_gone_gives_nothing_back_and_is_not_counted(tier, backend) -> None:
    gone = [lend(backend, index=i) for i in range(4)]
    for record, *_ in gone[:2]:
        tier.delete(record.key)
    lend(backend, index=2, overwrite=True)
    _, _, lease, _ = lend(backend, index=9)
    assert backend.relieve(gone[0][1].nbytes)
    until(lambda: gone[3][2].returned)
    assert not lease.returned and len(backend._tier._lent) == 2


def test_a_move_that_fails_does_not_keep_those_waiting_who_ask(backend, monkeypatch) -> None:
    record, tensor, lease, _ = lend(backend)
    copy = chunkfile.copy_chunk
    monkeypatch.setattr(chunkfile, "copy_chunk", lambda tensor: (_ for _ in ()).throw(MemoryError()))
    assert backend.relieve(1)
    until(lambda: not backend.relieve(1))
    assert lease.holders == 1 and not lease.returned
    monkeypatch.setattr(chunkfile, "copy_chunk", copy)
    backend.close()
    assert lease.returned == 1 and equal_bits(backend.load(record.key).tensor, tensor)


def test_no_thread_for_a_move(backend, monkeypatch) -> None:
    record, tensor, lease, _ = lend(backend)

    class NoThreads:
        def submit(self, *args):
            raise RuntimeError("can't start new thread")

        def shutdown(self):
            pass

    backend._tier._movers = NoThreads()
    assert not backend.relieve(1) and not backend.relieve(1) and lease.holders == 1
    backend._tier._movers = None
    assert backend.relieve(1)
    until(lambda: lease.returned)
    assert equal_bits(backend.load(record.key).tensor, tensor)


def test_one_chunk_that_cannot_be_moved_keeps_only_itself_at_the_end(backend, monkeypatch) -> None:
    lent = [lend(backend, index=i) for i in range(3)]
    copy = chunkfile.copy_chunk
    bad = lent[1][2].tensor.data_ptr()

    def sometimes(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() == bad:
            raise MemoryError
        return copy(tensor)

    monkeypatch.setattr(chunkfile, "copy_chunk", sometimes)
    with pytest.raises(MemoryError):
        backend.close()
    assert [lease.returned for *_, lease, _ in lent] == [1, 0, 1]
    monkeypatch.setattr(chunkfile, "copy_chunk", copy)
    backend.close()
    assert lent[1][2].returned == 1


def until(done) -> None:
    end = time.monotonic() + T_S
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)
