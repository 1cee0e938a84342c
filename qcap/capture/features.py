"""What a feature of a capture is, and what is known of one request."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from qcap.attribution import FinishedRequest, Step
from qcap.capture.staging import Staged
from qcap.geometry import Geometry
from qcap.kinds import CacheKind
from qcap.tokens import TokenChunk


@dataclass
class RequestTrack:
    """What the worker knows of one request."""

    uid: int
    request_id: str
    salt: str
    tokens: list[int] = field(default_factory=list)
    chunks: list[TokenChunk] = field(default_factory=list)
    block_ids: array[int] = field(default_factory=lambda: array("q"))
    end: int = 0  # of the last step
    cached_until: int = 0  # positions that were in the engine's cache when the request was admitted (the most, if more than once)
    barred: str = ""  # why nothing of this request may be stored
    staged: dict[CacheKind, set[int]] = field(default_factory=dict)
    waiting: dict[CacheKind, dict[int, Staged]] = field(default_factory=dict)  # whole, but token ids are not known yet
    stored: dict[CacheKind, set[int]] = field(default_factory=dict)
    reasons: dict[CacheKind, dict[int, str]] = field(default_factory=dict)
    in_flight: int = 0
    finished: FinishedRequest | None = None
    receipt_written: bool = False


Stage = Callable[[], Staged | None]
"""Puts one chunk on its way to the host; None if there is no host memory for it."""


class Feature(Protocol):
    """One tensor kind's part in a step. A new kind is a new class with these methods, given to :class:`Capture` beside the others.

    A step: :meth:`begin`, :meth:`start`, then :meth:`layer_done` after each layer if the engine runs Python between layers (a replayed
    graph does not), :meth:`commit`, :meth:`take` for each request, :meth:`end`.
    """

    kind: CacheKind
    on_device_bytes: int
    """Device memory of its own."""

    starts_early: bool
    """Whether :meth:`start` is wanted."""

    def begin(self, step: Step) -> None:
        """The step is about to run, and the device waits for it: only what must be done before its first kernel."""

    def start(self, due: Sequence[tuple[RequestTrack, int]]) -> None:
        """The device has work: ``due`` become whole in this step and should be stored. Not called in speculative steps."""

    def layer_done(self, layer: int) -> None:
        """All that layers up to ``layer`` write in this step has been queued on the current stream."""

    def commit(self, step_number: int, invalid: Sequence[int]) -> None:
        """The step's device work has been queued."""

    def take(self, track: RequestTrack, final_tokens: int) -> Iterator[tuple[int, Stage]]:
        """Chunks of a request that are whole now: (index, how to stage it)."""

    def end(self) -> None:
        """What was whole has been taken."""

    def forget(self, track: RequestTrack, chunk: int) -> None:
        """A taken chunk could not be used: it may be taken again, if it is computed again."""

    def release(self, track: RequestTrack) -> None:
        """The request is over."""

    def why_missing(self, track: RequestTrack, chunk: int) -> str:
        """Why a chunk of computed tokens was never staged."""

    def close(self) -> None:
        """Give everything back."""


class QueryLedger(Protocol):
    """What both forms of the query ring keep books with."""

    def forget_staged(self, uid: int, chunk: int) -> None:
        """A staged chunk may be taken again."""

    def release(self, uid: int) -> None:
        """The request is over."""


class QueryBooks:
    """What both forms of the query ring say of a request: which of its chunks were left out, and why others never came.

    Attributes:
        ledger: set by the form.
    """

    kind = CacheKind.QUERY
    starts_early = False
    ledger: QueryLedger

    def __init__(self, geometry: Geometry, counters: Counter[str]) -> None:
        self._geometry, self._counters = geometry, counters
        self._skips: dict[int, dict[int, str]] = {}

    def _on_skip(self, uid: int, chunk: int, reason: str) -> None:
        self._skips.setdefault(uid, {})[chunk] = reason
        self._counters[f"query.skipped.{reason}"] += 1

    def start(self, due: Sequence[tuple[RequestTrack, int]]) -> None:
        """Queries leave as they come, whatever becomes whole."""

    def forget(self, track: RequestTrack, chunk: int) -> None:
        """The chunk's rows may be taken again, if they come again."""
        self.ledger.forget_staged(track.uid, chunk)

    def release(self, track: RequestTrack) -> None:
        """Let go of what the request holds."""
        self.ledger.release(track.uid)
        self._skips.pop(track.uid, None)

    def why_missing(self, track: RequestTrack, chunk: int) -> str:
        """What it was left out for (``ring-full``, ``host-full``), ``prefix-cached`` or ``not-captured``."""
        reason = self._skips.get(track.uid, {}).get(chunk)
        if reason:
            return reason
        return "prefix-cached" if chunk * self._geometry.chunk_size < track.cached_until else "not-captured"
