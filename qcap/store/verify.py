"""Read every object of a store and report what is not right. ``qcap verify URL`` prints it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from qcap.errors import ObjectCorrupt
from qcap.store.buckets import LocalBucket
from qcap.store.objects import ObjectTier, is_object_path
from qcap.store.urls import open_tier

STALE_STAGING_S = 3600.0


@dataclass(frozen=True)
class BadFile:
    """One file that is not what it should be, and why."""

    path: str
    reason: str


@dataclass
class VerifyReport:
    """What a store holds.

    Args:
        objects: object files looked at, good and bad.
        nbytes: bytes of them.
        manifests, sequences: files of each sort, good and bad.
        bad: files that do not verify, of any sort.
        stale_staging: files under ``staging/`` that nobody has written to for an hour: left by killed processes, safe to remove.
    """

    objects: int = 0
    nbytes: int = 0
    manifests: int = 0
    sequences: int = 0
    bad: list[BadFile] = field(default_factory=list)
    stale_staging: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing is bad. Stale staging files are not: nobody sees them."""
        return not self.bad

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
    entries = sorted(tier.list_objects(), key=lambda e: e.path)
    for done, entry in enumerate(entries, 1):
        report.objects += 1
        report.nbytes += entry.nbytes
        if is_object_path(entry.path):
            _check(report, entry.path, tier.load_path)
        else:
            report.bad.append(BadFile(entry.path, "not the name of an object"))
        if progress is not None:
            progress(done, len(entries))
    manifests, sequences = tier.list_manifests(), tier.list_sequences()
    report.manifests, report.sequences = len(manifests), len(sequences)
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
