"""How far an edit goes: what the headers of its chunks tell of the others, so that one that was lost is missed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qcap.tokens import TokenChunk

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
