"""A step fanned out to the features, and what they bring handed to the store.

Knows a :class:`~qcap.store.tiers.Backend`; nothing of transport or files, and nothing of vLLM. In the engine's process nothing here raises
into a forward pass: :meth:`Capture.guard` records an error, says it once, and turns the feature off.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType

import torch

from qcap.attribution import FinishedRequest, RequestStep, Step, TokenUpdate
from qcap.capture.features import Feature, RequestTrack
from qcap.capture.handover import Handover
from qcap.capture.staging import HostArena, Staged
from qcap.errors import StoreError, TokenError
from qcap.geometry import Geometry
from qcap.kinds import CacheKind
from qcap.store.metrics import RateLimitedLog
from qcap.store.tiers import Backend, SequenceRecord, StoreOutcome
from qcap.tokens import ChunkedTokenDatabase, ChunkRecord, TokenChunk, chunk_key

logger = logging.getLogger("qcap.capture")
often = RateLimitedLog(logger)

START_AFTER = 4
"""What may wait does so for a quarter of the layers: by then the host is ahead of the device, which at first waits for every call."""


class _Guard:
    """What :meth:`Capture.guard` returns: a generator would cost several times as much, and some are entered for every layer."""

    __slots__ = ("_capture", "_feature", "_what")

    def __init__(self, capture: Capture, what: str, feature: Feature | None) -> None:
        self._capture, self._what, self._feature = capture, what, feature

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self._capture.failed(self._what, error, self._feature)
        return True


class Capture:
    """The features of one rank, the requests they follow, and the way to the store.

    Args:
        geometry: of this rank.
        backend: where chunks go.
        features: what to capture; none is legal (loading alone).
        engine_id: goes into receipts.
        write_receipts: one rank does.
        arena: host memory of the features; given up when the capture is closed.
        may_wait: the engine may be held back until the store has room (``on_pressure="wait"``).
        refused: kinds that were asked for and cannot be captured here, with the reason that receipts give.
    """

    def __init__(
        self,
        geometry: Geometry,
        backend: Backend,
        features: Sequence[Feature],
        *,
        engine_id: str,
        write_receipts: bool,
        arena: HostArena,
        counters: Counter[str],
        refused: Mapping[CacheKind, str] | None = None,
        may_wait: bool = True,
    ) -> None:
        self.geometry, self.backend = geometry, backend
        self._refused = dict(refused or {})
        self._may_wait = may_wait
        self.features: list[Feature] = list(features)
        self.counters = counters
        self._engine_id, self._write_receipts, self._arena = engine_id, write_receipts, arena
        self._lock = threading.RLock()  # steps and ends; may be held while the store makes the engine wait
        self._put_off = Handover(self._lock, arena.may_rest)
        flush = weakref.WeakMethod(self._put_off.flush)  # a chunk that rests in a store refers to the arena, and shall not keep all this
        arena.watch(lambda: (hurry := flush()) is not None and hurry())
        arena.watch(lambda: backend.poll() > 0)
        arena.watch(lambda: backend.relieve(arena.nbytes // 2))
        self._database = ChunkedTokenDatabase(geometry.chunk_size)
        self._tracks: dict[int, RequestTrack] = {}
        self._step: Step | None = None
        self._ripe: list[RequestStep] = []  # of the step's requests, those that may have a chunk that becomes whole
        self._invalid: set[int] = set()
        self._speculative = False
        self._book = threading.Lock()  # what the writer's thread notes; never held while calling the store
        self._absent: set[tuple[int, CacheKind, int]] = set()  # (uid, kind, chunk): asked for in this step, and not in the store
        self._later: list[TokenUpdate] = []  # token ids of requests that came with this step: looked at while it runs
        self._started = True  # what of this step may wait until the device has work has been done
        self._behind: set[int] = set()  # requests of steps that never ended, until they have another one
        self._broken: list[tuple[CacheKind, Exception]] = []  # what went wrong with publishing, on any thread: the engine's sees to it
        self._off: set[str] = set()
        self._told: set[str] = set()
        self._tainted: set[int] = set()  # KV blocks that hold what was computed on a failed load, until they are computed anew

    # ---- posture ------------------------------------------------------------------------------------------------------------------

    def guard(self, what: str, feature: Feature | None = None) -> _Guard:
        """Nothing raises into the engine: the error is counted and logged, and the feature (or all of them) is turned off for good."""
        return _Guard(self, what, feature)

    def failed(self, what: str, error: Exception, feature: Feature | None = None) -> None:
        """What :meth:`guard` does with an error."""
        self.counters["errors"] += 1
        names = [feature] if feature is not None else list(self.features)
        if what not in self._told:
            self._told.add(what)
            logger.error(
                "qcap: %s failed; %s is turned off, the engine goes on", what, ", ".join(f.kind.value for f in names) or "nothing",
                exc_info=error,
            )  # fmt: skip
        for broken in names:
            self.turn_off(broken)

    def turn_off(self, feature: Feature) -> None:
        """Capture nothing of this kind from now on, and give back what it held."""
        if feature in self.features:
            self.features.remove(feature)
            self._off.add(feature.kind.value)
            self.counters[f"{feature.kind.value}.turned_off"] += 1
            try:
                feature.close()
            except Exception:
                logger.exception("qcap: closing %s failed", feature.kind.value)

    # ---- the step -----------------------------------------------------------------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        """Before the forward pass: token ids that became known, requests that ended, the plan of this step.

        The device has nothing to do meanwhile, so what may come later does: :meth:`_start`.
        """
        with self._lock:
            self._learn_new()  # of a step that was begun and never ended
            if self._step is not None:  # it was begun and never ended
                self.flush()
                if not self._speculative:  # what it completed has not been looked at
                    self._behind.update(request.uid for request in self._step.requests)
            self._step, self._invalid, self._speculative, self._ripe = step, set(), step.speculative, []
            tracks = self._tracks
            gone = set(step.overwritten)
            for uid in (*(done.uid for done in step.finished), *step.preempted) if gone else ():
                track = self._tracks.get(uid)
                if track is not None:
                    del track.block_ids[next((i for i, block in enumerate(track.block_ids) if block in gone), len(track.block_ids)) :]
            new: set[int] = set()
            for request in step.requests:
                if request.uid not in tracks:
                    tracks[request.uid] = RequestTrack(request.uid, request.request_id, request.salt)
                    new.add(request.uid)
            if new and not step.speculative:
                new.difference_update([done.uid for done in step.finished], step.preempted, step.resampled)
                self._later = [update for update in step.tokens if update.uid in new]
            self._learn([update for update in step.tokens if update.uid not in new] if self._later else step.tokens)
            for done in step.finished:
                self.finish(done)
            for uid in step.preempted:
                if uid in self._tracks:
                    if step.speculative:  # its pages are still what they were: the forward pass that may write over them comes after
                        self._collect(self._tracks[uid], min(self._tracks[uid].end, len(self._tracks[uid].tokens) - 1))
                    del self._tracks[uid].block_ids[:]
            for uid in step.resampled:
                if uid in self._tracks:
                    self._drop_waiting(self._tracks[uid], "token-ids-changed", again=True)
                    if not step.speculative:
                        self._behind.add(uid)
            size, behind = self.geometry.chunk_size, self._behind
            for request in step.requests:
                uid, _, _, start, end, first, blocks, admitted, skip = request  # unpacked: this is run for every request of every step
                track = tracks[uid]
                track.block_ids[first:] = blocks if type(blocks) is array else array("q", blocks)
                track.end = end
                if skip:
                    track.barred = track.barred or skip
                if admitted:
                    track.cached_until = max(track.cached_until, start)
                elif step.speculative:
                    self._collect(track, min(start, len(track.tokens) - 1))
                # Only a step that passes a chunk's end can make it whole, or the first one after admission, for what others computed.
                if admitted or end // size != start // size or uid in behind:
                    self._ripe.append(request)
            if self._tainted:
                for load in step.loads:  # about to be filled; tainted again if that fails
                    self._tainted.difference_update(load.block_ids[load.start // self.geometry.block_size :])
                self._spread_taint(step)
            self._absent = set()
            for feature in list(self.features):
                with self.guard("planning a step", feature):
                    feature.begin(step)
            self._started = False

    def _learn_new(self) -> None:
        later, self._later = self._later, []
        self._learn(later)

    def _start(self) -> None:
        """The part of a step's beginning that nothing on the device depends on: done once it has work to do, at the latest at the end."""
        if self._started:
            return
        self._started = True
        self._learn_new()
        step = self._step
        if step is None or step.speculative:
            return
        for feature in list(self.features):
            if feature.starts_early:
                with self.guard("planning a step", feature):
                    feature.start(self._due(step, feature.kind))

    def _due(self, step: Step, kind: CacheKind) -> list[tuple[RequestTrack, int]]:
        """Chunks that become whole in this step, are not in the store yet, and will find room there."""
        size = self.geometry.chunk_size
        due: list[tuple[RequestTrack, int]] = []
        for request in self._ripe:
            track = self._tracks.get(request.uid)  # None if it ended since the step began
            if track is None or track.barred or request.end // size == request.start // size:
                continue
            staged = track.staged.get(kind, ())
            for index in range(request.start // size, request.end // size):
                if index in staged or len(track.block_ids) * self.geometry.block_size < (index + 1) * size:
                    continue
                if self.backend.cheap_contains and self._stored_of(track, kind, [index]):
                    continue
                if not self._may_wait and not self._has_room((len(due) + 1) * self.geometry.chunk_bytes(kind)):
                    return due
                self._absent.add((request.uid, kind, index))
                due.append((track, index))
        return due

    def layer_done(self, layer: int) -> None:
        """Between two layers of a forward pass: all that layers up to ``layer`` write has been queued."""
        if self._step is not None:
            if not self._started and layer >= self.geometry.num_layers // START_AFTER:
                with self._lock:
                    self._start()
            for feature in tuple(self.features):
                try:
                    feature.layer_done(layer)
                except Exception as error:  # without a guard: this is run for every layer
                    self.failed("moving a layer", error, feature)

    def mark_invalid(self, block_ids: set[int], reason: str) -> None:
        """These KV blocks hold garbage (a load failed): every request of this step that uses one is computed on it, and is stored no more.

        What it computes is garbage too, and stays in the engine's blocks until it is computed anew; see :meth:`_spread_taint`.
        """
        with self._lock:
            self._tainted |= block_ids
            if self._step is not None:
                self._spread_taint(self._step, reason, loading=True)

    def _spread_taint(self, step: Step, reason: str = "load-failed", *, loading: bool = False) -> None:
        """Requests that read a tainted block are invalid in this step, and so is what they write; blocks that a good request writes from
        their first row on are good again."""
        n = self.geometry.block_size
        pending = {r.uid: r for r in step.requests if r.uid in self._tracks}
        while True:  # a request may read in this very step what another one computes anew in it
            good = [r for r in pending.values() if not self._tainted.intersection(self._tracks[r.uid].block_ids[: -(-r.start // n)])]
            if not good:
                break
            for request in good:
                del pending[request.uid]
                if not loading:
                    self._tainted.difference_update(self._tracks[request.uid].block_ids[-(-request.start // n) :])
        for uid, request in pending.items():
            track = self._tracks[uid]
            self._invalid.add(uid)
            track.barred = track.barred or reason
            self._tainted.update(track.block_ids[request.start // n :])

    def end_step(self) -> None:
        """After the forward pass was queued: take what became whole."""
        with self._lock:
            self._start()
            step, self._step = self._step, None
            if step is None:
                return
            for feature in list(self.features):
                with self.guard("closing a step", feature):
                    feature.commit(step.number, sorted(self._invalid))
            if not step.speculative:
                for request in self._ripe:
                    track = self._tracks.get(request.uid)
                    if track is not None:  # else it ended between its step and this
                        self._collect(track, request.end)
                if self._behind:
                    self._behind.difference_update(request.uid for request in step.requests)
            for feature in list(self.features):
                with self.guard("closing a step", feature):
                    feature.end()
            self.counters["steps"] += 1
            self._put_off.step_ended()
            self._turn_off_broken()
            over = self._arena.used - self._arena.may_rest
            if over > 0:  # before a step finds no room
                if not self._may_wait:
                    self.flush()  # a chunk may keep all of its step's memory
                self.backend.relieve(over)

    def _collect(self, track: RequestTrack, final_tokens: int) -> None:
        """Stage every chunk of ``track`` that is whole below ``final_tokens``; those whose token ids are known are published soon."""
        for feature in list(self.features):
            with self.guard("taking chunks", feature):
                staged = track.staged.setdefault(feature.kind, set())
                there: set[int] | None = None
                for index, stage in feature.take(track, final_tokens):
                    if index in staged:
                        continue
                    staged.add(index)
                    if track.barred:
                        track.reasons.setdefault(feature.kind, {})[index] = track.barred
                        continue
                    if there is None:  # of all at once: a prefix that was loaded or cached is many chunks, and the engine waits
                        there = self._there(track, feature.kind, index, final_tokens)
                    if index in there:
                        self._exists(track, feature.kind, index)
                        continue
                    if not self._may_wait and not self._has_room(self.geometry.chunk_bytes(feature.kind)):
                        self._lose(track, feature.kind, index, "store-busy")  # before it costs device and host memory
                        continue
                    try:
                        ready = stage()
                        if ready is None:
                            self._lose(track, feature.kind, index, "store-busy")
                        else:
                            self._hand_over(track, feature.kind, index, ready)
                    except torch.OutOfMemoryError:
                        self._lose(track, feature.kind, index, "no-device-memory")

    def _lose(self, track: RequestTrack, kind: CacheKind, index: int, reason: str) -> None:
        with self._book:
            self.counters[f"{kind.value}.skipped.{reason}"] += 1
            track.reasons.setdefault(kind, {})[index] = reason

    def _there(self, track: RequestTrack, kind: CacheKind, first: int, final_tokens: int) -> set[int]:
        """Those chunks from ``first`` on that are whole below ``final_tokens``, were not staged before or asked for in this step, and are
        in the store; none where asking costs a round trip."""
        if not self.backend.cheap_contains:
            return set()
        uid, absent, staged = track.uid, self._absent, track.staged[kind]
        rest = range(first + 1, final_tokens // self.geometry.chunk_size)
        wanted = [first, *(i for i in rest if i not in staged)]
        return self._stored_of(track, kind, [i for i in wanted if (uid, kind, i) not in absent])

    def _stored_of(self, track: RequestTrack, kind: CacheKind, indices: Sequence[int]) -> set[int]:
        """Those of the chunks that are in the store, as far as their token ids are known and the store can be asked."""
        indices = [index for index in indices if index < len(track.chunks)]
        if not indices:
            return set()
        key = chunk_key(kind, self.geometry, track.chunks[indices[0]].digest, track.salt)
        try:
            found = self.backend.contains([key.sibling(track.chunks[index].digest) for index in indices])
        except StoreError as error:
            self.counters["store.unavailable"] += 1
            often.warning("the store cannot be asked: %s", error)
            return set()
        return {index for index, there in zip(indices, found, strict=True) if there}

    def _exists(self, track: RequestTrack, kind: CacheKind, index: int) -> None:
        """A chunk that is in the store counts as stored by this request."""
        with self._book:
            track.stored.setdefault(kind, set()).add(index)
            self.counters[f"{kind.value}.exists"] += 1

    def _claim(self, track: RequestTrack, kind: CacheKind, indices: Sequence[int]) -> set[int]:
        """:meth:`_stored_of`; they count as stored by this request."""
        found = self._stored_of(track, kind, indices)
        for index in found:
            self._exists(track, kind, index)
        return found

    def _has_room(self, nbytes: int) -> bool:
        """Whether the store would take ``nbytes`` more once it has been given all that was put off."""
        if self._put_off.nbytes + nbytes > self._arena.may_rest:
            self._put_off.flush()  # a store with nothing in it takes a chunk of any size, but then no other
        return self.backend.has_room(self._put_off.nbytes + nbytes)

    def _hand_over(self, track: RequestTrack, kind: CacheKind, index: int, staged: Staged) -> None:
        if index >= len(track.chunks):
            track.waiting.setdefault(kind, {})[index] = staged
            return
        with self._book:
            track.in_flight += 1
        self._put_off.put_off(staged, partial(self._publish, track, kind, track.chunks[index], staged))

    def _publish(self, track: RequestTrack, kind: CacheKind, chunk: TokenChunk, staged: Staged) -> None:
        """Give a chunk to the store. Under the lock, on any thread; never raises."""
        try:
            token_ids = tuple(track.tokens[chunk.start : chunk.end])  # what is known does not change
            record = ChunkRecord(kind, self.geometry, chunk.start, token_ids, chunk.digest, chunk.parent, track.salt)
            future = self.backend.store(record, staged.host, staged.ready, lease=staged)
        except Exception as error:
            if isinstance(error, (StoreError, TokenError)):  # one chunk's fault, not the feature's
                often.error("a chunk is not stored: %s", error)
            else:
                self._broken.append((kind, error))
            self._lose(track, kind, chunk.index, "store-failed")
            with self._book:
                track.in_flight -= 1
            staged.release()
            return
        future.add_done_callback(lambda done: self._written(track, kind, chunk.index, staged, done))

    def flush(self) -> None:
        """Give the store everything that was put off. On the engine's thread."""
        with self._lock:
            self._put_off.flush()
            self._turn_off_broken()

    def _turn_off_broken(self) -> None:
        """Not where it happened: in the middle of a step's chunks, perhaps, or beside the engine's thread."""
        broken, self._broken = self._broken, []
        for kind, error in broken:
            for feature in [f for f in self.features if f.kind is kind]:
                self.failed("giving a chunk to the store", error, feature)

    def _written(self, track: RequestTrack, kind: CacheKind, index: int, staged: Staged, future: Future[StoreOutcome]) -> None:
        outcome = StoreOutcome.FAILED if future.cancelled() or future.exception() else future.result()
        with self._book:
            self.counters[f"{kind.value}.{outcome.value}"] += 1
            if outcome in (StoreOutcome.STORED, StoreOutcome.EXISTS):
                track.stored.setdefault(kind, set()).add(index)
            else:
                busy = "store-busy" if outcome is StoreOutcome.REFUSED else "store-failed"
                track.reasons.setdefault(kind, {})[index] = staged.ready.failure or busy
            track.in_flight -= 1
        staged.release()
        self._maybe_receipt(track)

    def _drop_waiting(self, track: RequestTrack, reason: str, *, again: bool = False) -> None:
        """Chunks that wait for their token ids will not get them. ``again``: their tokens will be sampled and computed anew."""
        for kind, waiting in track.waiting.items():
            for index, staged in waiting.items():
                track.reasons.setdefault(kind, {})[index] = reason
                staged.release()
                if again:
                    track.staged[kind].discard(index)
                    for feature in self.features:
                        if feature.kind is kind:
                            feature.forget(track, index)
            waiting.clear()

    # ---- token ids and ends -------------------------------------------------------------------------------------------------------

    def _learn(self, updates: Iterable[TokenUpdate]) -> None:
        tracks, size = self._tracks, self.geometry.chunk_size
        for uid, offset, ids, chunks in updates:
            track = tracks.get(uid)
            if track is None:
                continue
            known = len(track.tokens)
            if offset > known:
                track.barred = track.barred or "token-ids-unknown"
                continue
            if offset < known:
                if track.tokens[offset : offset + len(ids)] != list(ids[: known - offset]):
                    track.barred = track.barred or "token-ids-changed"
                    continue
                ids = ids[known - offset :]
            track.tokens.extend(ids)
            if len(track.tokens) // size > len(track.chunks):
                self._extend(track, chunks)

    def _extend(self, track: RequestTrack, known: Sequence[TokenChunk] = ()) -> None:
        """More whole chunks of token ids are known: those that waited for that are published soon. ``known``: the first of them."""
        track.chunks = self._database.extend(track.chunks or known, track.tokens)
        for kind, waiting in track.waiting.items():
            for index in [i for i in waiting if i < len(track.chunks)]:
                staged = waiting.pop(index)
                if self._claim(track, kind, [index]):
                    staged.release()
                else:
                    self._hand_over(track, kind, index, staged)

    def finished(self, update: TokenUpdate | None, done: FinishedRequest) -> None:
        """A request ended between steps; ``update`` brings its last token ids."""
        with self._lock:
            self._learn_new()
            if update is not None:
                self._learn([update])
            self.finish(done)

    def finish(self, done: FinishedRequest) -> None:
        """A request ended (by itself, by abort, or by failure): take its last chunks, give everything back, write its receipt."""
        with self._lock:
            self._behind.discard(done.uid)
            track = self._tracks.pop(done.uid, None)
            if track is None:
                return
            if self._speculative:
                self._collect(track, done.computed_tokens)
            self._drop_waiting(track, "token-ids-unknown")
            for feature in list(self.features):
                whole = done.computed_tokens // self.geometry.chunk_size
                staged_now = track.staged.get(feature.kind, set())
                for index in set(range(whole)) - staged_now:
                    track.reasons.setdefault(feature.kind, {}).setdefault(index, track.barred or feature.why_missing(track, index))
                with self.guard("releasing a request", feature):
                    feature.release(track)
            self.flush()
            with self._book:
                track.finished = done
        self._maybe_receipt(track)

    def _maybe_receipt(self, track: RequestTrack) -> None:
        with self._book:
            done = track.finished
            if done is None or track.in_flight or track.receipt_written or not self._write_receipts:
                return
            track.receipt_written = True
        g = self.geometry
        whole = done.computed_tokens // g.chunk_size
        stored: dict[str, tuple[int, ...]] = {}
        skipped: dict[str, dict[str, int]] = {}
        for kind in CacheKind:
            if all(f.kind is not kind for f in self.features) and kind.value not in self._off and kind not in self._refused:
                continue
            have = {i for i in track.stored.get(kind, set()) if i < whole}
            if not track.barred:  # an earlier run may have left the others there
                have |= self._claim(track, kind, [i for i in range(whole) if i not in have])
            stored[kind.value] = tuple(sorted(have))
            reasons = Counter(
                track.reasons.get(kind, {}).get(i, track.barred or self._refused.get(kind, "turned-off"))
                for i in range(whole)
                if i not in have
            )
            if reasons:
                skipped[kind.value] = dict(reasons)
                with self._book:
                    for reason, count in reasons.items():
                        self.counters[f"{kind.value}.lost.{reason}"] += count
        self.backend.put_sequence(
            SequenceRecord(
                model=g.model,
                request_id=track.request_id,
                engine_id=self._engine_id,
                salt=track.salt,
                token_ids=tuple(track.tokens[: done.num_tokens]),
                prompt_tokens=done.prompt_tokens,
                computed_tokens=done.computed_tokens,
                chunk_size=g.chunk_size,
                stored=stored,
                skipped=skipped,
                finished_at=time.time(),
            )
        )
        self.counters["requests"] += 1

    def idle(self) -> bool:
        """Whether no request is being followed; then the store has been given everything, too."""
        with self._lock:
            if not self._tracks:
                self.flush()
            return not self._tracks

    def close(self) -> None:
        """Give everything back and wait for the store. Requests that are still being served are cut off, and counted."""
        try:
            with self._lock:
                self._learn_new()
                size = self.geometry.block_size
                for uid, track in list(self._tracks.items()):
                    self.counters["requests_cut_off"] += 1
                    known = len(track.tokens)
                    computed = max(0, min(known - 1, track.end, len(track.block_ids) * size))
                    self.finish(FinishedRequest(uid, known, known, computed))
                for feature in list(self.features):
                    with self.guard(f"closing {feature.kind.value}", feature):
                        feature.close()
        finally:
            self._put_off.close()
            self.backend.close()
            self._arena.close()
