"""``verify`` on edits that are not whole: on a real store, edits written by the SDK, damage by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import qcap
from qcap.backends import open_backend
from qcap.geometry import Geometry, Rope
from qcap.kinds import CacheKind
from qcap.store.objects import object_path
from qcap.store.verify import delete_bad, verify_store
from qcap.tokens import ChunkedTokenDatabase, ChunkRecord, chunk_key

_numbers = itertools.count()
IDS = list(range(100, 116))  # 4 chunks of 4
CHUNKS = ChunkedTokenDatabase(4).chunks(IDS)
GEOMETRY = Geometry(
    model="org/tiny", layer_names=("0", "1"), num_q_heads=4, num_kv_heads=2, head_size=8, dtype="float32", block_size=2, chunk_size=4,
    rope=Rope(rotary_dim=8), scale=8**-0.5, total_num_kv_heads=2,
)  # fmt: skip


class Place:
    """A store with one edit of four chunks, under salt ``s``."""

    def __init__(self, folder, *, geometry=GEOMETRY):
        self.url, self.folder, self.geometry = folder.as_uri(), folder, geometry
        self.backend = open_backend(self.url)
        self.backend.put_manifest(geometry, [CacheKind.KV], {})
        self.rows = torch.randn(2, 2, 16, 16)
        with qcap.connect(self.url) as ctx:
            assert ctx.store(self.rows, IDS, salt="s", edit={"name": "mine"})

    def path(self, number, rank=0):
        key = chunk_key(CacheKind.KV, self.geometry.for_rank(rank), CHUNKS[number].digest, "s")
        return self.folder / object_path(key)

    def put(self, number, edit=""):
        """What an engine stores, or an older qcap."""
        chunk = CHUNKS[number]
        ids = tuple(IDS[chunk.start : chunk.end])
        record = ChunkRecord(CacheKind.KV, self.geometry, chunk.start, ids, chunk.digest, chunk.parent, "s", edit=edit)
        self.path(number).unlink(missing_ok=True)
        self.backend.store(record, self.rows[:, :, chunk.start : chunk.end].contiguous()).result(20)

    def found(self):
        return verify_store(self.url).broken_edits


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path / "store")
    yield place
    place.backend.close()


def test_a_whole_edit_is_sound(place):
    assert verify_store(place.url).ok


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("text", [None, '{"kept": 18}', '{"name": "unnamed"}'])
def test_a_lost_chunk_is_reported(place, number, text):
    for each in range(4) if text else ():
        place.put(each, text)
    assert not place.found()
    place.path(number).unlink()
    if text == '{"name": "unnamed"}' and number == 3:  # it does not say how far it goes
        assert not place.found()
        return
    (edit,) = place.found()
    assert (edit.salt, edit.model, edit.kind) == ("s", "org/tiny", "kv")
    assert edit.reason.startswith(f"chunk {number} (tokens {4 * number}..{4 * number + 3})") and "not there" in edit.reason
    assert "edit.store(ctx)" in edit.reason
    if text is None:
        with qcap.connect(place.url) as ctx:
            assert ctx.store(place.rows, IDS, salt="s", edit={"name": "mine"})
        assert verify_store(place.url).ok, "which is what it says to do"


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("text", [None, '{"kept": 18}', '{"name": "unnamed"}'])
def test_a_chunk_that_an_engine_computed_in_the_edits_place_is_reported(place, number, text):
    for each in range(4) if text else ():
        place.put(each, text)
    place.put(number)
    if text == '{"name": "unnamed"}' and number == 3:  # behind the edit, as far as it says
        assert not place.found()
        return
    (edit,) = place.found()
    assert edit.reason.startswith(f"chunk {number} ") and "computed by an engine in the edit's place" in edit.reason
    assert "overwrite=True" in edit.reason and "not there" not in edit.reason
    with qcap.connect(place.url) as ctx:
        ctx.store(place.rows, IDS, salt="s", edit={"name": "mine"}, overwrite=True)
    assert verify_store(place.url).ok


def test_what_an_engine_stored_behind_an_edit_is_no_fault(place):
    with qcap.connect(place.url) as ctx:
        ctx.store(place.rows[:, :, :8], IDS[:8], salt="s", edit={"name": "shorter"}, overwrite=True)
    for number in (2, 3):
        place.put(number)
    assert verify_store(place.url).ok


def test_a_tenants_salt_may_have_holes(place):
    for number in range(4):
        place.put(number)
    place.path(1).unlink()
    assert verify_store(place.url).ok


def test_a_damaged_chunk_is_reported_before_and_after_it_is_deleted(place):
    data = bytearray(place.path(3).read_bytes())
    data[-1] ^= 1
    place.path(3).write_bytes(data)
    report = verify_store(place.url)
    (edit,) = report.broken_edits
    assert len(report.bad) == 1 and "chunk 3 (tokens 12..15) of 4: not there" in edit.reason
    assert delete_bad(place.url, report) == 1
    report = verify_store(place.url)
    assert not report.bad and report.broken_edits == [edit] and not report.ok


def test_every_rank_has_its_chunks(tmp_path):
    geometry = replace(GEOMETRY, num_q_heads=2, num_kv_heads=1, tp_size=2)
    place = Place(tmp_path / "store", geometry=geometry)
    assert not place.found()
    place.path(2, rank=1).unlink()
    (edit,) = place.found()
    assert edit.reason.startswith("chunk 2 ")
    for number in range(4):
        place.path(number, rank=1).unlink(missing_ok=True)
    (edit,) = place.found()
    assert edit.reason.startswith("chunks 0 (tokens 0..3), 1 (tokens 4..7), 2 ")
    place.backend.close()


def test_edits_of_both_kinds(place):
    with qcap.connect(place.url) as ctx:
        place.backend.put_manifest(GEOMETRY, [CacheKind.QUERY], {})
        with qcap.connect(place.url, kind="query") as q:
            assert q.store(torch.randn(1, 2, 16, 32), IDS, salt="s") and ctx.store(place.rows[:, :, :8], IDS[:8], salt="t")
    assert not place.found()
    for path in place.folder.glob("objects/*/*"):
        if place.backend._tier.load_path(str(path.relative_to(place.folder))).record.start == 4:
            path.unlink()
    assert [(edit.kind, edit.salt) for edit in place.found()] == [("kv", "s"), ("kv", "t"), ("query", "s")]


def test_sequences_that_begin_alike_are_whole_and_then_not(place):
    other = [*IDS[:4], *range(8)]
    with qcap.connect(place.url) as ctx:
        ctx.store(place.rows[:, :, :12], other, salt="s", edit={"name": "mine"})
    assert verify_store(place.url).ok
    chunks = ChunkedTokenDatabase(4).chunks(other)
    (place.folder / object_path(chunk_key(CacheKind.KV, GEOMETRY, chunks[1].digest, "s"))).unlink()
    (edit,) = place.found()
    assert edit.reason.startswith("chunk 1 ")
