"""Which edits a store holds: from the headers of its objects, since nothing else tells them from what an engine computed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from qcap.kinds import CacheKind
from qcap.store.buckets import Entry
from qcap.store.chunkfile import ChunkHeader
from qcap.store.extents import json_object
from qcap.store.objects import ObjectTier, is_object_path

_THREADS = 16
"""Headers read at once: enough to hide an object store's latency."""


@dataclass(frozen=True)
class StoredEdit:
    """What one salt holds of one model's edits.

    Args:
        model: base model name.
        kind: what was edited.
        salt: to be given to a request.
        names: of the edits under it, sorted; more than one if several were stored under one salt.
        chunks: so many of them are there (of rank 0).
        chunk_size: CH.
    """

    model: str
    kind: CacheKind
    salt: str
    names: tuple[str, ...]
    chunks: int
    chunk_size: int

    @property
    def tokens(self) -> int:
        """Tokens in those chunks."""
        return self.chunks * self.chunk_size


def stored_edits(tier: ObjectTier, entries: Sequence[Entry], model: str | None = None) -> tuple[list[StoredEdit], int]:
    """The edits among ``entries`` (of :meth:`ObjectTier.list_objects`), by model, kind and salt; one look at each object's first bytes.

    Args:
        tier: that they are of.
        entries: its objects.
        model: only this one's, by its base name.

    Returns:
        Sorted by model, kind and salt; and how many objects could not be read.
    """
    found: dict[tuple[str, str, str, int], tuple[set[str], int]] = {}
    unreadable = 0
    paths = [entry.path for entry in entries if is_object_path(entry.path)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="qcap-list") as pool:
        for header in pool.map(lambda path: _salted(tier, path), paths):
            if header is None:
                continue
            if isinstance(header, Exception):
                unreadable += 1
                continue
            record = header.record
            geometry = record.geometry
            if not record.edit or model not in (None, geometry.model):
                continue
            key = (geometry.model, record.kind.value, record.salt, geometry.chunk_size)
            names, chunks = found.setdefault(key, (set(), 0))
            names.add(_edit_name(record.edit))
            found[key] = (names, chunks + (geometry.tp_rank == 0))
    edits = [
        StoredEdit(name, CacheKind(kind), salt, tuple(sorted(names)), chunks, size)
        for (name, kind, salt, size), (names, chunks) in sorted(found.items())
    ]
    return edits, unreadable


def _salted(tier: ObjectTier, path: str) -> ChunkHeader | Exception | None:
    try:
        return tier.salted_header(path)
    except Exception as error:  # damaged, or a file that this user may not read: the others are listed all the same
        return error


def _edit_name(text: str) -> str:
    """The name in an edit's description; its beginning, if it is none of qcap's own."""
    name = (json_object(text) or {}).get("name")
    return name if isinstance(name, str) and name else text[:40]
