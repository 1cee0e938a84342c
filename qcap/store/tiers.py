"""The one interface that capture, the engine's worker and the SDK know of a store."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch

from qcap.geometry import Geometry
from qcap.kinds import CacheKind
from qcap.tokens import ChunkKey, ChunkRecord


class StoreOutcome(Enum):
    """What became of one chunk handed to a store."""

    STORED = "stored"
    EXISTS = "exists"
    """An object with this key was already there; nothing was written."""
    REFUSED = "refused"
    """``on_pressure="skip"``: too many bytes were waiting."""
    FAILED = "failed"
    """The write, the check or the publish failed; nothing is visible. The reason is in the log and the metrics."""


@dataclass(frozen=True)
class LoadedChunk:
    """One chunk read back and checked.

    Args:
        record: its header.
        tensor: ``[planes, L, CH, H]`` in the record's dtype, on the CPU, owned by the caller.
    """

    record: ChunkRecord
    tensor: torch.Tensor


class Lease(Protocol):
    """Memory that was lent, kept from being used again by all who hold it. Any thread."""

    @property
    def lent(self) -> bool:
        """Whether its owner will want it back. If not, it was made for one chunk alone, and is nobody else's."""

    @property
    def pinned(self) -> bool:
        """Whether it is page-locked, so that a device copies from it without a wait."""

    def hold(self) -> None:
        """One more needs it. Only while someone holds it."""

    def release(self) -> None:
        """One less needs it; the last one gives it back."""


@dataclass(frozen=True)
class Resting:
    """A stored chunk where it lies in this process's memory. Read only.

    Args:
        tensor: ``[planes, L, CH, H]``, each ``[CH, H]`` contiguous; chunks of one step of an engine may lie side by side.
        lease: held for whoever was given this: release it when nobody, no device either, reads the tensor any more.
    """

    tensor: torch.Tensor
    lease: Lease


class LayerReader(Protocol):
    """One stored chunk, to be read a layer at a time. May be used from any thread; holds nothing open."""

    def rest(self) -> Resting | None:
        """The chunk itself, if it lies in page-locked memory of this process, so that it need not be read; None if it does not."""

    @property
    def record(self) -> ChunkRecord:
        """Its header, checked."""

    def read(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """One layer, by one range read, checked against the header's checksum.

        Args:
            layer: index of the layer.
            out: ``[planes, CH, H]`` of the record's dtype on the CPU to read into; each plane contiguous, planes anywhere (so a slice
                ``[:, a:a + CH]`` of a buffer for many chunks will do). None makes a new tensor.

        Returns:
            ``out``, or the new tensor.

        Raises:
            ObjectCorrupt: the bytes are not those that the header speaks of: damaged, or the object was replaced or removed since
                :meth:`Backend.open_layers`. Two versions of an object are never mixed. ``out`` then holds anything.
            StoreUnavailable: the store cannot be reached.
            ShapeError: ``out`` is not what it should be.
            IndexError: no such layer.
        """


@dataclass(frozen=True)
class SequenceRecord:
    """What one served request left behind: its receipt.

    Args:
        model: base model name.
        request_id: the engine's id of the request.
        engine_id: of the engine that served it.
        salt: the request's cache salt, "" for none.
        token_ids: prompt and generated tokens, all ``N``.
        prompt_tokens: how many of them were the prompt.
        computed_tokens: tokens whose rows an engine has computed or read back: N - 1 for a request that ended by itself.
        chunk_size: CH of this capture.
        stored: kind -> indices of chunks that are in the store (stored now, or already there).
        skipped: kind -> reason -> number of whole chunks that are not.
        finished_at: seconds since the epoch.
    """

    model: str
    request_id: str
    engine_id: str
    salt: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    computed_tokens: int
    chunk_size: int
    stored: dict[str, tuple[int, ...]] = field(default_factory=dict)
    skipped: dict[str, dict[str, int]] = field(default_factory=dict)
    finished_at: float = 0.0


class Backend(Protocol):
    """Objects by key. Opened by :func:`qcap.backends.open_backend`; nothing above can tell which implementation it has.

    All methods may be called from any thread.
    """

    @property
    def cheap_contains(self) -> bool:
        """Whether :meth:`contains` costs no round trip, so that an engine's step may ask."""

    @property
    def keeps_leases(self) -> bool:
        """Whether chunks may rest in the memory that they came in: :meth:`LayerReader.rest`."""

    def has_room(self, nbytes: int) -> bool:
        """Whether :meth:`store` would take ``nbytes`` more at once, neither refuse them nor wait."""

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """For each key, whether a published object is there. No data is read."""

    def edit_of(self, key: ChunkKey) -> str | None:
        """The ``edit`` text of a stored chunk ("" for what an engine computed), None if there is no such object; only its header is read.

        Raises:
            ObjectCorrupt, StoreUnavailable: as :meth:`load`.
        """

    def lookup(self, keys: Sequence[ChunkKey]) -> int:
        """The prefix rule: how many of ``keys``, from the first on, are there without a hole. Stops asking at the first hole."""

    def store(
        self, record: ChunkRecord, source: torch.Tensor, event: Any = None, *, overwrite: bool = False, lease: Lease | None = None
    ) -> Future[StoreOutcome]:
        """Queue one chunk; returns at once (or waits for room, by the backend's ``on_pressure``).

        Args:
            record: header; its key names the object.
            source: ``[planes, L, CH, H]`` on the host, each ``[CH, H]`` contiguous, not written to by the caller until the future is done.
            event: a device event to wait for before ``source`` is read, or None.
            overwrite: replace an object that is there (only edits may).
            lease: of the memory that ``source`` lies in, held by the caller until the future is done. A backend may keep ``source`` itself
                rather than a copy of it, for as long as it holds the lease; without one it copies.

        Returns:
            A future that never raises: it ends as a :class:`StoreOutcome`. Writes are published in the order they were queued.
        """

    def load(self, key: ChunkKey) -> LoadedChunk | None:
        """One chunk, checked against its header and checksums; None if no such object.

        Raises:
            ObjectCorrupt: an object is there but does not verify.
            StoreUnavailable: the store cannot be reached.
        """

    def open_layers(self, key: ChunkKey) -> LayerReader | None:
        """One chunk to be read a layer at a time; reads and checks its header only. None if no such object.

        Raises:
            ObjectCorrupt, StoreUnavailable: as :meth:`load`.
        """

    def put_manifest(self, geometry: Geometry, kinds: Sequence[CacheKind], engine: dict[str, str]) -> None:
        """Publish what a reader must know of a model, once. ``engine``: versions and settings, for the reader's information.

        Raises:
            GeometryMismatch: the store holds another geometry under this model name, chunk size, dtype and tensor-parallel size.
        """

    def manifests(self, model: str | None = None) -> list[tuple[Geometry, tuple[CacheKind, ...], dict[str, str]]]:
        """The manifests of ``model`` (of all models if None), as published by :meth:`put_manifest` (rank 0's geometry)."""

    def put_sequence(self, record: SequenceRecord) -> Future[None]:
        """Queue a receipt; it becomes visible after every chunk queued before it."""

    def sequences(self, model: str | None = None) -> list[SequenceRecord]:
        """All receipts, oldest first."""

    def poll(self) -> int:
        """Chunks and receipts queued and not yet done."""

    def loaded(self, keys: Sequence[ChunkKey]) -> None:
        """An engine has loaded these chunks, in the order of a sequence. Of what lies in memory that may be wanted back, they are to stay
        longest, the first ones above all. Returns at once."""

    def relieve(self, nbytes: int) -> bool:
        """Memory that was given under leases is wanted back: ``nbytes`` of it are put on their way, if so many are held; returns at once.

        Returns:
            Whether some memory is on its way back.
        """

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is queued; False if ``timeout_s`` went by first."""

    def counters(self) -> dict[str, int]:
        """Counts since opening: ``stored``, ``exists``, ``refused``, ``failed``, ``bytes_stored``, ``loaded``, ``layers_loaded``,
        ``load_missing``, ``load_corrupt``, and so on. Keys are stable."""

    def close(self) -> None:
        """Drain, then release everything, leases too. Safe to call twice."""
