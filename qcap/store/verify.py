"""Read every object of a store and report what is not right. ``qcap verify URL`` prints it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from qcap.errors import ObjectCorrupt
from qcap.store.buckets import LocalBucket
from qcap.store.extents import MARK_CHARS, extent_of
from qcap.store.objects import ObjectTier, is_object_path, manifest_path
from qcap.store.tiers import LoadedChunk
from qcap.store.urls import open_tier

STALE_STAGING_S = 3600.0


@dataclass(frozen=True)
class BadFile:
    """One file that is not what it should be, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class BrokenEdit:
    """An edit of which not every chunk is there, or in whose place an engine's lie.

    Args:
        salt: the edit's.
        model, kind: whose cache it is of.
        reason: which chunks, and what to do next.
    """

    salt: str
    model: str
    kind: str
    reason: str


@dataclass
class VerifyReport:
    """What a store holds.

    Args:
        objects: object files looked at, good and bad.
        nbytes: bytes of them.
        manifests, sequences: files of each sort, good and bad.
        bad: files that do not verify, of any sort.
        broken_edits: edits that are not whole; a bad object counts as not there. One that is being stored right now looks like this too.
        unlisted: "model, kind" -> how many sound objects of it have no manifest (``models/`` was removed): nobody can connect to them.
        stale_staging: files under ``staging/`` that nobody has written to for an hour: left by killed processes, safe to remove.
    """

    objects: int = 0
    nbytes: int = 0
    manifests: int = 0
    sequences: int = 0
    bad: list[BadFile] = field(default_factory=list)
    broken_edits: list[BrokenEdit] = field(default_factory=list)
    unlisted: dict[str, int] = field(default_factory=dict)
    stale_staging: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing is bad, every edit whole, and every object of a model that the store says it has. Stale staging files are not bad: nobody
        sees them."""
        return not (self.bad or self.broken_edits or self.unlisted)

    @property
    def empty(self) -> bool:
        """There was nothing to verify: no object, no manifest, no receipt. Then ``ok`` says nothing; was it the right URL?"""
        return not (self.objects or self.manifests or self.sequences)


@dataclass(frozen=True)
class Nothing:
    """A URL under which nothing of qcap lies.

    Args:
        exists: the folder is there; True also where there are no folders (``s3://``, ``memory://``).
        reason: one line for a person.
    """

    exists: bool
    reason: str


def nothing_at(url: str) -> Nothing | None:
    """Why there is nothing of qcap at ``url``; None if an object, a manifest or a receipt is there.

    Raises:
        ConfigError, StoreUnavailable: the store cannot be opened.
    """
    tier = open_tier(url)
    if any(True for _ in tier.list_objects()) or tier.list_manifests() or tier.list_sequences():
        return None
    what = f"nothing of qcap is at {url} (no objects, no manifests, no receipts)"
    if not isinstance(tier.bucket, LocalBucket):
        return Nothing(True, f"{what}: is it the URL that the engine was given?")
    folder = tier.bucket.root
    if not folder.exists():
        return Nothing(False, f"{what}: the folder {folder} does not exist")
    return Nothing(True, f"{what}: the folder {folder} exists; is it the one that the engine was given?")


def delete_bad(url: str, report: VerifyReport) -> int:
    """Remove the damaged files of ``report`` (they can then be captured or stored again) and what killed processes left; how many."""
    tier = open_tier(url)
    paths = [bad.path for bad in report.bad] + report.stale_staging
    for path in paths:
        tier.bucket.delete(path)
    return len(paths)


def verify_store(url: str, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Check every object (header, checksums, and that its path is its key's), manifest and receipt of a store.

    Args:
        url: the store's URL or path.
        progress: called with (objects done, objects in all) after each object.

    Raises:
        ConfigError, StoreUnavailable: the store cannot be opened. What is wrong inside it is in the report.
    """
    return verify_tier(open_tier(url), progress)


def verify_tier(tier: ObjectTier, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """As :func:`verify_store`, of an open tier."""
    report = VerifyReport()
    salted: dict[_Cache, dict[str, _Salted]] = defaultdict(dict)
    needed: dict[str, tuple[str, int]] = {}  # path of a manifest -> of what, of how many objects

    def look(path: str) -> None:
        loaded = tier.load_path(path)
        _note(salted, loaded)
        if loaded is not None:
            r = loaded.record
            wanted = manifest_path(r.geometry, r.kind)
            needed[wanted] = f"{r.geometry.model}, {r.kind.value}", needed.get(wanted, ("", 0))[1] + 1

    entries = sorted(tier.list_objects(), key=lambda e: e.path)
    for done, entry in enumerate(entries, 1):
        report.objects += 1
        report.nbytes += entry.nbytes
        if is_object_path(entry.path):
            _check(report, entry.path, look)
        else:
            report.bad.append(BadFile(entry.path, "not the name of an object"))
        if progress is not None:
            progress(done, len(entries))
    report.broken_edits = sorted(_broken_edits(salted), key=lambda e: (e.model, e.kind, e.salt, e.reason))
    manifests, sequences = tier.list_manifests(), tier.list_sequences()
    report.manifests, report.sequences = len(manifests), len(sequences)
    for path, (name, count) in needed.items():
        if path not in manifests:
            report.unlisted[name] = report.unlisted.get(name, 0) + count
    for path in manifests:
        _check(report, path, tier.read_manifest)
    for path in sequences:
        _check(report, path, tier.read_sequence)
    report.stale_staging = sorted(e.path for e in tier.list_staging(STALE_STAGING_S))
    return report


def _check(report: VerifyReport, path: str, read: Callable[[str], object]) -> None:
    """A file that went away since it was listed is not bad."""
    try:
        read(path)
    except ObjectCorrupt as error:
        report.bad.append(BadFile(path, str(error).removeprefix(f"{path}: ")))
    except OSError as error:
        report.bad.append(BadFile(path, f"cannot be read: {error}"))


# -- edits that are not whole -----------------------------------------------------------------------------------------


class _Cache(NamedTuple):
    """One rank's cache under one salt."""

    model: str
    kind: str
    dtype: str
    chunk_size: int
    tp_size: int
    rank: int
    salt: str
    tags: tuple[tuple[str, str], ...]


class _Salted(NamedTuple):
    """What is kept of a chunk: its number, its parent's digest, the text of its edit."""

    number: int
    parent: str
    edit: str


def _note(salted: dict[_Cache, dict[str, _Salted]], loaded: LoadedChunk | None) -> None:
    if loaded is None or not loaded.record.salt:
        return
    r = loaded.record
    g = r.geometry
    cache = _Cache(g.model, r.kind.value, g.dtype, g.chunk_size, g.tp_size, g.tp_rank, r.salt, r.tags)
    salted[cache][r.digest] = _Salted(r.start // g.chunk_size, r.parent, r.edit)


def _broken_edits(salted: dict[_Cache, dict[str, _Salted]]) -> Iterator[BrokenEdit]:
    edited = {cache for cache, chunks in salted.items() if any(chunk.edit for chunk in chunks.values())}
    for cache in sorted({c._replace(rank=0) for c in edited}):
        ranks = [salted.get(cache._replace(rank=rank), {}) for rank in range(cache.tp_size)]
        texts = {chunk.edit for chunks in ranks for chunk in chunks.values() if chunk.edit}
        for text in sorted(texts):
            lost: set[int] = set()
            filled: set[int] = set()
            for chunks in ranks:
                one_lost, one_filled = _holes(chunks, text, cache.chunk_size)
                lost, filled = lost | one_lost, filled | one_filled
            reason = _reason(lost, filled, extent_of(text).count(cache.chunk_size), cache.chunk_size)
            if reason:
                yield BrokenEdit(cache.salt, cache.model, cache.kind, reason)


def _holes(chunks: dict[str, _Salted], text: str, chunk_size: int) -> tuple[set[int], set[int]]:
    """Numbers of the chunks of the edit of ``text`` that are not there, and of those that an engine computed in its place."""
    extent = extent_of(text)
    own = [chunk for chunk in chunks.values() if chunk.edit == text]
    lost: set[int] = set()
    filled: set[int] = set()
    if extent.marks:
        listed = {(chunk.number, digest[:MARK_CHARS]): chunk for digest, chunk in chunks.items()}
        for place in enumerate(extent.marks):
            if (found := listed.get(place)) is None or not found.edit:
                (lost if found is None else filled).add(place[0])
    else:
        lost = set(range(extent.count(chunk_size) or 0)) - {chunk.number for chunk in own}
    for chunk in own:  # the text may be that of another sequence that begins alike, or list nothing: each follows a chunk of the edit
        before = chunks.get(chunk.parent)
        if chunk.number and (before is None or not before.edit):
            (lost if before is None else filled).add(chunk.number - 1)
    if not extent.marks:
        filled |= {c.number for c in chunks.values() if not c.edit and c.number in lost and _behind(chunks, c.parent, text)}
    return lost - filled, filled


def _behind(chunks: dict[str, _Salted], digest: str, text: str) -> bool:
    """Whether the chunk of ``digest``, or one before it, is of the edit of ``text``."""
    while (chunk := chunks.get(digest)) is not None:
        if chunk.edit == text:
            return True
        digest = chunk.parent
    return False


def _reason(lost: set[int], filled: set[int], count: int | None, chunk_size: int) -> str:
    def named(numbers: set[int]) -> str:
        first = ", ".join(f"{at} (tokens {at * chunk_size}..{(at + 1) * chunk_size - 1})" for at in sorted(numbers)[:4])
        more = f" and {len(numbers) - 4} more" if len(numbers) > 4 else ""
        return f"chunk{'s' if len(numbers) > 1 else ''} {first}{more}"

    of = f" of {count}" if count else ""
    if filled:
        also = f"; {named(lost)} not there" if lost else ""
        return (
            f"{named(filled)}{of}: computed by an engine in the edit's place{also}. Store the edit again under a fresh salt, or with "
            "edit.store(ctx, overwrite=True)"
        )
    if lost:
        return f"{named(lost)}{of}: not there. Store the edit again: edit.store(ctx) writes what is missing"
    return ""
