"""What is checked of a load's chunks before a page is written: an edit's stand together, and what was computed on it stands behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from layerwise_kit import geometry

from qcap.attribution import NO_EDIT
from qcap.errors import ObjectCorrupt, QcapError
from qcap.kinds import CacheKind
from qcap.tokens import ChunkedTokenDatabase, ChunkRecord, TokenChunk
from qcap.vllm.loading import check_edits, edits_digest

G = geometry(2)
CH = G.chunk_size
IDS = tuple(range(4 * CH))


def record(chunk: TokenChunk, edit: str = "", rows: str = "") -> ChunkRecord:
    ids = IDS[chunk.start : chunk.end]
    return ChunkRecord(CacheKind.KV, G, chunk.start, ids, chunk.digest, chunk.parent, "salt", edit=edit, rows=rows)


def load(rows: str = "one", behind: str = "one") -> list[ChunkRecord]:
    """An edit of two chunks with these rows (those of its first are "start"), and two that were computed behind the rows named last."""
    rows, behind = (f"start.{text}" if text else "" for text in (rows, behind))
    database = ChunkedTokenDatabase(CH)
    first, second, *_ = database.chunks(IDS)
    edit = [record(first, "x", ".start" if rows else ""), record(second, "x", rows)]
    ends = TokenChunk(second.start, second.end, second.digest, second.parent, record(second, "x", behind).behind)
    return edit + [record(chunk) for chunk in database.extend([first, ends], IDS)[2:]]


def test_what_was_computed_on_an_edits_rows_stands_behind_them():
    check_edits(load(), "")
    check_edits(load(), load()[1].behind)
    check_edits(load()[2:], "whatever: nothing of the edit is among them")
    check_edits(load("", ""), "")  # an edit that says nothing of its rows
    with pytest.raises(ObjectCorrupt, match=rf"token {2 * CH} was computed behind other rows"):
        check_edits(load("two", "one"), "")
    with pytest.raises(ObjectCorrupt, match="behind other rows"):
        check_edits(load("one", ""), "")
    with pytest.raises(ObjectCorrupt, match="behind other rows"):
        check_edits(load("two", "one")[1:], "")  # the chunk before a load is looked at for that


def test_an_edit_that_was_replaced_after_it_was_matched_is_not_gone_on_from():
    with pytest.raises(QcapError, match="replaced under its salt while the request was waiting"):
        check_edits(load("two", "two")[:2], load("one")[1].behind)
    check_edits(load("two", "two")[:2], "")
    with pytest.raises(QcapError, match="replaced under its salt while"):
        check_edits(load("", "")[:2], load("one")[1].behind)
    with pytest.raises(QcapError, match="an edit was stored under its salt while"):
        check_edits(load()[:2], NO_EDIT)
    check_edits(load()[2:], NO_EDIT)


def test_an_edit_that_is_being_stored_over_another_is_not_loaded():
    """Its last chunks are there first, and its text may be the other's."""
    whole = load()[:2]
    for mixed in (replace(whole[0], rows=".other"), replace(whole[0], rows="")):
        with pytest.raises(ObjectCorrupt, match="two were mixed"):
            check_edits([mixed, whole[1]], "")
    assert edits_digest(whole) != edits_digest([replace(whole[0], rows=".other"), whole[1]])
