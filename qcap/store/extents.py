"""How far an edit goes: what the headers of its chunks tell of the others, so that one that was lost is missed, and of what lies behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qcap.geometry import Geometry
from qcap.kinds import CacheKind
from qcap.store.tiers import Backend
from qcap.tokens import ChunkedTokenDatabase, ChunkKey, ChunkRecord, TokenChunk, TokenIds, chunk_key

CHUNKS_NAME, MARK_CHARS = "qcap_chunks", 8


@dataclass(frozen=True)
class Extent:
    """What one text says of its edit.

    Args:
        marks: the first 8 digits of the digest of each of the edit's chunks, from token 0 on; empty if the text does not list them.
        kept: tokens that the edit keeps; None if the text does not say.
    """

    marks: tuple[str, ...] = ()
    kept: int | None = None

    def count(self, chunk_size: int) -> int | None:
        """How many whole chunks the edit has; None if that is not known."""
        return len(self.marks) or (None if self.kept is None else self.kept // chunk_size)

    def covered(self, chunks: Sequence[TokenChunk]) -> int | None:
        """How many of a sequence's ``chunks``, from the first on, are the edit's; None if that is not known. Without marks the sequence is
        taken to follow the edit as far as both go."""
        if self.marks:
            both = min(len(self.marks), len(chunks))
            return next((i for i in range(both) if chunks[i].digest[:MARK_CHARS] != self.marks[i]), both)
        if self.kept is None:
            return None
        return min(self.kept // (chunks[0].end - chunks[0].start), len(chunks)) if chunks else 0


def with_extent(text: str, chunks: Sequence[TokenChunk]) -> str:
    """``text`` (see ``ChunkRecord.edit``), if it is a JSON object, with the list of the edit's chunks; any other text as it is."""
    told = json_object(text)
    if told is None:
        return text
    return json.dumps({**told, CHUNKS_NAME: "".join(chunk.digest[:MARK_CHARS] for chunk in chunks)}, sort_keys=True)


def extent_of(text: str) -> Extent:
    """What ``text`` says; nothing, if it is not what qcap writes."""
    told = json_object(text) or {}
    marks, kept = told.get(CHUNKS_NAME), told.get("kept")
    if not isinstance(marks, str) or len(marks) % MARK_CHARS:
        marks = ""
    return Extent(
        tuple(marks[at : at + MARK_CHARS] for at in range(0, len(marks), MARK_CHARS)),
        kept if isinstance(kept, int) and not isinstance(kept, bool) and kept >= 0 else None,
    )


def same_edit(one: str, other: str) -> bool:
    """Whether two texts tell of the same edit, whatever they say of how far it goes."""
    return one == other or (bool(one) and bool(other) and _without(one) == _without(other))


def end_of_edit(backend: Backend, key_of: Callable[[TokenChunk], ChunkKey], text: str, chunks: Sequence[TokenChunk]) -> TokenChunk | None:
    """The last chunk that a sequence has of an edit, with what it says of the edit's rows (:attr:`TokenChunk.behind`); None if the chunk is
    not there that should be the last.

    Args:
        key_of: of a chunk of keys and values, under the edit's salt.
        text: the edit's. It may be that of another sequence that begins alike: then this one's edit goes on behind what the text lists, in
            chunks that have the same text and follow one another.
        chunks: of the sequence, hashed as token ids alone.

    Raises:
        ObjectCorrupt, StoreUnavailable: its header cannot be read.
    """
    last: TokenChunk | None = None
    before: ChunkRecord | None = None
    for chunk in chunks[max((extent_of(text).covered(chunks) or 1) - 1, 0) :]:
        found = backend.open_layers(key_of(chunk))
        if found is None or found.record.edit != text or (before is not None and not found.record.follows(before)):
            break
        last, before = replace(chunk, behind=found.record.behind), found.record
    return last


def sequence_chunks(
    backend: Backend, geometry: Geometry, token_ids: TokenIds, salt: str, kind: CacheKind = CacheKind.KV
) -> list[TokenChunk]:
    """The whole chunks of a sequence, as they are stored under ``salt``: behind an edit of keys and values, keys tell of its rows too.

    Args:
        geometry: of any rank.
        kind: of what is stored: an edit of queries may be longer than that of keys and values, and is keyed by token ids alone.

    Raises:
        TokenError: as :func:`qcap.tokens.as_token_array`.
        ObjectCorrupt, StoreUnavailable: a header cannot be read.
    """
    database = ChunkedTokenDatabase(geometry.chunk_size)
    chunks = database.chunks(token_ids)
    if not salt or not chunks:
        return chunks

    def key_of(chunk: TokenChunk, kind: CacheKind = CacheKind.KV) -> ChunkKey:
        return chunk_key(kind, geometry.for_rank(0), chunk.digest, salt)

    text = backend.edit_of(key_of(chunks[0]))
    if text is None:  # lost, or nothing is stored
        there = backend.contains([key_of(chunk) for chunk in chunks])
        text = backend.edit_of(key_of(chunks[there.index(True)])) if True in there else None
    end = end_of_edit(backend, key_of, text, chunks) if text else None
    if end is None or not end.behind:
        return chunks
    behind, own = database.extend([*chunks[: end.index], end], token_ids), end.index + 1
    while kind is not CacheKind.KV and own < len(chunks) and backend.edit_of(key_of(chunks[own], kind)):
        own += 1
    return [*chunks[:own], *behind[own:]]


def _without(text: str) -> Any:
    told = json_object(text)
    return text if told is None else {name: value for name, value in told.items() if name != CHUNKS_NAME}


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that ``text`` is, if it is one."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None
