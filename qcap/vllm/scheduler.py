"""The scheduler's half: says what each step computes, which stored chunks to load, which token ids became known, and who finished."""

from __future__ import annotations

import itertools
import logging
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from qcap.attribution import NO_EDIT, FinishedRequest, LoadRequest, RequestStep, Step, TokenUpdate, flatten, request_step, token_update
from qcap.config import CaptureConfig
from qcap.errors import QcapError, TokenError
from qcap.kinds import CacheKind
from qcap.store.extents import end_of_edit, extent_of
from qcap.store.metrics import RateLimitedLog
from qcap.store.tiers import Backend
from qcap.tokens import ChunkedTokenDatabase, ChunkKey, TokenChunk, check_salt

logger = RateLimitedLog(logging.getLogger("qcap.vllm"))


_uids = itertools.count(1)  # of the process: two engines in it never use one number twice

RETRY_LOAD_S = 60.0
"""A chunk whose load failed is not offered again for this long: each failure costs the request a recompute."""
MAX_BAD = 1 << 16
MAX_PUT_OFF = 64
"""How often in a row a request is put off because vLLM's own blocks hold other rows than the edit of its salt has now."""
MATCH_FIRST, MATCH_CHUNKS = (6, 12, 20, 32), 32
"""A worker that may begin early is told when so many chunks are known, then of so many at a time: the fewer they are, the sooner it begins,
and their copies last until the next ones are known."""
PROBES_CHEAP, PROBES = 32, 4
"""Where a salt's first chunk is missing, so many chunks are asked for one by one, then every 2nd, 4th, ..., and the last: a round trip
each."""


class EarlyLoads(Protocol):
    """A worker that may begin a load before it has blocks."""

    def more(self, uid: int, salt: str, start: int, end: int, chunks: Sequence[TokenChunk], token_ids: Sequence[int]) -> bool:
        """See :meth:`~qcap.vllm.loading.LayerLoads.early`."""

    def told(self, uid: int) -> None:
        """See :meth:`~qcap.vllm.loading.LayerLoads.early_told`."""


@dataclass(frozen=True)
class KeyParts:
    """What a key needs beside a digest and a salt."""

    model: str
    tp_size: int
    dtype: str

    def keys(self, kind: CacheKind, digest: str, salt: str) -> list[ChunkKey]:
        """The key of one chunk on every rank: a chunk is there only if all ranks' objects are."""
        return [ChunkKey(kind.model_name(self.model), self.tp_size, rank, self.dtype, digest, salt) for rank in range(self.tp_size)]


@dataclass(slots=True)
class _Followed:
    uid: int
    request: Any
    salt: str
    skip: str
    block_ids: array[int] = field(default_factory=lambda: array("q"))
    told: int = 0  # token ids sent to the worker
    chunks: list[TokenChunk] = field(default_factory=list)
    local: int = 0  # tokens in vLLM's own prefix cache at the last look
    load: tuple[int, int] | None = None
    is_edit: bool | None = None  # its salt is an edit's; None: not asked yet
    edit: str = ""  # the text of its first stored chunk, "" if it could not be read
    edit_from: int = 0  # that chunk's number
    whole: int = 0  # tokens of the edit, if at the last look they were all there to be loaded
    loaded_in: int = -1  # the step of its last load, if that was of the whole edit
    loaded_at: int = 0  # its tokens then
    bar: str = ""  # why what it computes may not be stored, though it may load
    end: TokenChunk | None = None  # the last chunk of its edit, as it was when the request was matched
    plain: list[TokenChunk] = field(default_factory=list)  # its chunks then, all hashed as token ids alone, as those of an edit are
    marked: int = 0  # of its blocks, the first so many are in _marks or were vLLM's own
    put_off: int = 0  # times in a row
    loading: tuple[str, ...] = ()  # digests of the chunks of its last load
    computed: int = 0  # the furthest position ever scheduled: vLLM's own count is 0 while a request is preempted
    admitted: bool = False  # scheduled at least once, so the worker knows it
    arrived_in: int = -1  # the step that had been planned when it arrived, and what vLLM had cached under its salt was forgotten
    told_early: bool = False  # of its load; if there are no blocks for it then, copying in vain again and again would do no good

    @property
    def follows_from(self) -> str:
        """The rows that what it computes follows from, as its edit's last chunk tells them (:attr:`TokenChunk.behind`): "" if they are not
        known, NO_EDIT if there is no edit."""
        return NO_EDIT if not self.is_edit else "" if self.end is None else self.end.behind


class SchedulerSide:
    """Follows every request from admission to end.

    Args:
        config: the connector's settings.
        parts: for keys.
        group: index of the captured KV cache group.
        block_size: of that group.
        backend: opened on first use; only presence is asked for here.
        speculative: the engine drafts tokens.
        finish_now: hands (token update, finished request) to a worker in this process and says whether there is one.
        note: what :meth:`finished` tells of where things are.
        early: the worker, if it may begin loads early.
    """

    def __init__(
        self,
        config: CaptureConfig,
        parts: KeyParts,
        *,
        group: int,
        block_size: int,
        backend: Callable[[], Backend],
        speculative: bool,
        finish_now: Callable[[TokenUpdate | None, FinishedRequest], bool],
        note: dict[str, str],
        early: EarlyLoads | None = None,
    ) -> None:
        self._config, self._parts = config, parts
        self._group, self._block_size = group, block_size
        self._open_backend = backend
        self._backend: Backend | None = None
        self._speculative, self._finish_now, self._note = speculative, finish_now, note
        self._early = early
        self._database = ChunkedTokenDatabase(config.chunk_size)
        self._followed: dict[str, _Followed] = {}
        self._number = 0
        self._finished: list[FinishedRequest] = []
        self._last_tokens: list[TokenUpdate] = []
        self._load_failed: set[str] = set()
        self._failed_salts: dict[str, int] = {}  # salt -> the last step that a load of its edit may have failed in
        self._block_pool: Any = None
        self._discards_counted = False  # by this engine, as async_tokens_to_discard of a request
        self._bad: dict[tuple[str, str], float] = {}  # (salt, digest) -> when a load of it failed
        self._in_place: dict[str, int] = {}  # salt of an edit -> the last step that computed something in its place
        self._edited: set[str] = set()  # salts under which an edit was seen
        # Block of a salted request -> the rows that what it holds follows from (TokenChunk.behind), NO_EDIT, or "" if that is not known.
        self._marks: dict[int, str] = {}

    # ---- edits --------------------------------------------------------------------------------------------------------------------

    def bind_block_pool(self, pool: Any) -> None:
        """vLLM's block pool, whose prefix cache must not stand in for an edit."""
        self._block_pool = pool

    def arrived(self, request: Any) -> None:
        """A request was added. If its salt is an edit's, what vLLM's own prefix cache holds under that salt is forgotten: it may be from
        before the edit was stored, from an older one, or computed after a load that failed. The store has the edit."""
        followed = self._follow(request)
        if followed.skip or not followed.salt:
            return
        followed.arrived_in = self._number
        followed.is_edit = self._is_edit(followed)
        if not followed.is_edit:
            return
        if followed.salt in self._failed_salts:
            followed.bar = "load-failed"
        elif self._config.load == "off":
            followed.bar = "edit-not-loaded"
        if self._block_pool is not None:
            cached = (self._block_pool.get_cached_block(h, [self._group]) for h in request.block_hashes)
            self._block_pool.evict_blocks({block.block_id for blocks in cached if blocks for block in blocks})

    def _is_edit(self, followed: _Followed) -> bool:
        """Whether the first stored chunk of this sequence under its salt is an edit's; True if that cannot be told. If none is stored, the
        salt is a tenant's."""
        try:
            for number in self._probes(followed):
                if number >= len(followed.chunks):
                    self._chunks(followed, 2 * number + 1)
                chunk = followed.chunks[number]
                keys = self._parts.keys(CacheKind.KV, chunk.digest, followed.salt)
                text = self._store().edit_of(keys[0]) if number == 0 else None  # most often that is all there is to ask
                if text is None:
                    others = keys if number else keys[1:]
                    there = self._store().contains(others)
                    text = self._store().edit_of(others[there.index(True)]) if any(there) else None
                if text is not None:
                    followed.edit, followed.edit_from = text, number
                    if text:
                        self._edited.add(followed.salt)
                    return bool(text)
        except QcapError:
            return True
        return False

    def _probes(self, followed: _Followed) -> Iterator[int]:
        """Numbers of the chunks to ask for. An edit's first chunk may be lost; where its storing was cut off, its last ones are there."""
        number, whole = 0, len(followed.request.all_token_ids) // self._config.chunk_size
        singly = PROBES_CHEAP if self._store().cheap_contains else PROBES
        while number < whole:
            yield number
            last, number = number, number + (1 if number < singly else number)
        if whole and last < whole - 1:
            yield whole - 1

    def _bar_half_edits(self, followed: _Followed, matched: int, limit: int) -> None:
        """What is computed between, or instead of, an edit's chunks is not the edit's: it must not be stored under its salt. What is
        computed behind all of them may.

        Args:
            matched: chunks that are stored, from the first on.
            limit: tokens that can be loaded at most: vLLM computes the last one, and its block.
        """
        size = self._config.chunk_size
        chunks, extent = followed.plain or self._chunks(followed), extent_of(followed.edit)
        covered = extent.covered(chunks)
        wanted = max(followed.edit_from + 1, covered or 0)  # one of them has been seen, whatever the text says
        first = matched if followed.end is None else followed.end.index + 1
        rest = [key for chunk in chunks[first:] for key in self._parts.keys(CacheKind.KV, chunk.digest, followed.salt)]
        there = [key for key, is_there in zip(rest, self._store().contains(rest), strict=True) if is_there]
        holed = any(self._store().edit_of(key) != "" for key in there)
        short = not followed.edit or min(matched * size, limit) < wanted * size  # without a text nothing is known of how far it goes
        if short or holed or not self._is_edits(followed, chunks[wanted - 1]):
            followed.bar, followed.whole = followed.bar or "edit-not-loaded", 0
        else:
            followed.whole = wanted * size if wanted == extent.count(size) else 0

    def _bar_what_follows(self, followed: _Followed) -> None:
        """A request goes on from vLLM's own blocks. What was there under its salt was forgotten when it arrived; since then someone may
        have computed rows in the edit's place."""
        if followed.is_edit and followed.local and self._in_place.get(followed.salt, -2) >= followed.arrived_in:
            followed.bar = followed.bar or "edit-not-loaded"

    def _go_on_from_rows(self, followed: _Followed) -> None:
        """What is computed behind an edit is keyed by its rows too: chunks are hashed anew from the edit's last one on."""
        token_ids, before = followed.request.all_token_ids, followed.follows_from
        chunks = self._chunks(followed) if followed.end is None else self._database.chunks(token_ids[:])
        end = end_of_edit(self._store(), partial(self._key, followed), followed.edit, chunks)
        followed.chunks = chunks if end is None else self._database.extend([*chunks[: end.index], end], token_ids)
        followed.end, followed.plain = end, chunks
        if followed.admitted and followed.follows_from != before:
            followed.bar = followed.bar or "edit-not-loaded"  # the worker was told of other rows

    def _of_other_rows(self, followed: _Followed) -> set[int]:
        """vLLM's own blocks that the request would go on from, and that hold, or follow from, other rows than its edit has now (or from an
        edit's at all, if it has none): they came there after it had arrived."""
        pool, behind = self._block_pool, followed.follows_from
        if pool is None or not behind:
            return set()
        hashes = followed.request.block_hashes[: followed.local // self._block_size]
        cached = (pool.get_cached_block(one, [self._group]) for one in hashes)
        found = {block.block_id for blocks in cached if blocks for block in blocks}
        return {block for block in found if self._marks.get(block, behind if behind == NO_EDIT else "") != behind}

    def _mark(self, followed: _Followed, block_ids: Sequence[int]) -> None:
        """Note of which rows the blocks are that a salted request was given."""
        mark = "" if followed.is_edit and followed.bar else followed.follows_from
        self._marks.update(dict.fromkeys(block_ids[followed.marked :], mark))
        followed.marked = len(block_ids)

    def _computes_in_place(self, followed: _Followed, block_ids: Iterable[int], step: int) -> None:
        """A request of an edit's salt computes what is not the edit's. vLLM puts its blocks into its prefix cache as it schedules
        it: they are taken out again, and who got some meanwhile is barred when it is matched."""
        self._in_place[followed.salt] = step
        if self._block_pool is not None:
            self._block_pool.evict_blocks(set(block_ids))
        if len(self._in_place) > MAX_BAD:
            alive = {f.salt for f in self._followed.values()}
            self._in_place = {salt: last for salt, last in self._in_place.items() if salt in alive}

    def _is_edits(self, followed: _Followed, chunk: TokenChunk) -> bool:
        """Whether ``chunk``, which is stored, is the edit's own: an engine may have filled the place of one that was lost."""
        if chunk.index in (followed.edit_from, None if followed.end is None else followed.end.index):
            return True
        return self._store().edit_of(self._key(followed, chunk)) != ""

    def _key(self, followed: _Followed, chunk: TokenChunk) -> ChunkKey:
        """Of a chunk's keys and values, on rank 0."""
        return self._parts.keys(CacheKind.KV, chunk.digest, followed.salt)[0]

    def _forgive(self, followed: _Followed) -> None:
        """A request ended. If it went on from the whole edit, loaded after loads of that edit had failed, later ones are believed again:
        unless rows that were computed in the edit's place can still get into vLLM's prefix cache after a later request's arrival."""
        failed = self._failed_salts.get(followed.salt)
        if failed is None or self._block_pool is None:  # without arrivals nothing forgets what is in the prefix cache
            return
        if followed.loaded_in <= failed or len(followed.request.all_token_ids) <= followed.loaded_at:
            return  # not loaded, or ended before the outcome was known
        if all(f.loaded_in > failed for f in self._followed.values() if f.salt == followed.salt and f.admitted):
            del self._failed_salts[followed.salt]

    def _store(self) -> Backend:
        if self._backend is None:
            self._backend = self._open_backend()
        return self._backend

    def _chunks(self, followed: _Followed, upto: int | None = None) -> list[TokenChunk]:
        """The request's whole chunks so far, the first ``upto`` at least; hashes only what is new."""
        size, token_ids = self._config.chunk_size, followed.request.all_token_ids
        whole = len(token_ids) // size
        upto = whole if upto is None else min(upto, whole)
        if upto > len(followed.chunks):
            followed.chunks = self._database.extend(followed.chunks, token_ids, upto * size)
        return followed.chunks

    # ---- matching -----------------------------------------------------------------------------------------------------------------

    def matched_tokens(self, request: Any, local_tokens: int) -> int | None:
        """Stored tokens beyond ``local_tokens`` that the worker can load, block aligned; at least one token is left to compute. None to be
        asked again in the next step: vLLM found blocks of its own that hold other rows than the edit of the request's salt."""
        followed = self._follow(request)
        followed.local, followed.load, followed.whole = local_tokens, None, 0
        if local_tokens:
            followed.loaded_in = -1  # it goes on from vLLM's blocks, whoever computed them
        if followed.salt and not followed.skip and (followed.is_edit is None or (followed.is_edit and not followed.edit)):
            followed.is_edit = self._is_edit(followed)  # not told of its arrival, or the store was away
            if followed.is_edit and followed.salt in self._failed_salts:
                followed.bar = followed.bar or "load-failed"
        self._bar_what_follows(followed)
        policy = self._config.load
        if policy == "off" or followed.skip or (policy == "salted" and not followed.salt) or request.request_id in self._load_failed:
            return 0
        limit = (len(request.all_token_ids) - 1) // self._block_size * self._block_size
        try:
            if followed.salt in self._edited and not followed.is_edit and self._of_other_rows(followed):
                followed.is_edit = self._is_edit(followed)  # stored after the request had arrived, and in vLLM's own blocks since
            if followed.is_edit and followed.edit:
                self._go_on_from_rows(followed)
            if followed.salt in self._edited and (others := self._of_other_rows(followed)):
                self._block_pool.evict_blocks(others)
                followed.put_off += 1
                if followed.put_off <= MAX_PUT_OFF:
                    return None
                followed.bar = followed.bar or "edit-not-loaded"
                return 0
            if limit <= local_tokens and not followed.is_edit:
                return 0
            stored = self._match(followed, local_tokens, limit)
            if followed.is_edit:
                self._bar_half_edits(followed, stored, limit)
        except QcapError as error:
            logger.warning("the store cannot be asked, request %s is computed in full: %s", request.request_id, error)
            if followed.is_edit:
                followed.bar = followed.bar or "edit-not-loaded"
            return 0
        return max(0, min(stored * self._config.chunk_size, limit) - local_tokens)

    def _match(self, followed: _Followed, local_tokens: int, limit: int) -> int:
        """How many chunks are stored, from the first on, of those that hold tokens below ``limit``."""
        size, early = self._config.chunk_size, None if followed.told_early else self._early
        wanted, stored, told = -(-limit // size), 0, local_tokens
        first = local_tokens // size
        while stored < wanted:
            ends = MATCH_FIRST if early is not None else ()
            upto = min(next((first + n for n in ends if stored < first + n), stored + MATCH_CHUNKS), wanted)
            chunks = self._chunks(followed, upto)
            stored += self._stored_chunks(chunks[stored:upto], followed.salt)
            end = min(stored * size, limit)
            if early is not None and end > told:
                followed.told_early = True
                if not early.more(followed.uid, followed.salt, told, end, chunks, followed.request.all_token_ids):
                    early = None
                told = end
            if stored < upto:
                break
        if early is not None and told > local_tokens:
            early.told(followed.uid)
        return stored

    def _stored_chunks(self, chunks: Sequence[TokenChunk], salt: str) -> int:
        """How many of ``chunks`` are stored, from the first on; nothing is asked of those behind a hole."""
        kinds = [CacheKind.KV]
        if self._config.load == "all" and self._config.query and not salt:
            kinds.append(CacheKind.QUERY)  # a chunk whose queries are not stored yet is computed, so that they are captured
        if self._bad:
            now = time.monotonic()
            bad = (i for i, c in enumerate(chunks) if now - self._bad.get((salt, c.digest), -RETRY_LOAD_S) < RETRY_LOAD_S)
            chunks = chunks[: next(bad, len(chunks))]
        if not chunks:
            return 0
        first = [key for kind in kinds for key in self._parts.keys(kind, chunks[0].digest, salt)]
        keys = [key.sibling(chunk.digest) for chunk in chunks for key in first]
        return self._store().lookup(keys) // len(first)

    def _follow(self, request: Any) -> _Followed:
        followed = self._followed.get(request.request_id)
        if followed is None or followed.request is not request:
            skip = _why_not(request)
            salt = "" if skip == "salt" else getattr(request, "cache_salt", None) or ""
            followed = self._followed[request.request_id] = _Followed(next(_uids), request, salt, skip)
            self._discards_counted = self._discards_counted or hasattr(request, "async_tokens_to_discard")
        return followed

    def allocated(self, request: Any, external_tokens: int, blocks: Any = None) -> None:
        """vLLM gave the request ``blocks`` (its KVCacheBlocks); ``external_tokens`` of them are ours to fill."""
        followed = self._follow(request)
        followed.put_off = 0
        if external_tokens > 0:
            followed.load = (followed.local, followed.local + external_tokens)
        elif followed.is_edit and not followed.local:
            followed.bar = followed.bar or "edit-not-loaded"  # vLLM refused the load: the request wants all of it computed
        if followed.salt and blocks is not None:
            followed.marked = followed.local // self._block_size
            self._mark(followed, blocks.get_block_ids()[self._group])
        if followed.is_edit and followed.bar:  # the next request may be matched before this step is planned
            self._computes_in_place(followed, () if blocks is None else blocks.get_block_ids()[self._group], self._number + 1)

    # ---- one step -----------------------------------------------------------------------------------------------------------------

    def step(self, output: Any) -> Step:
        """What the worker must know of the step that ``output`` (vLLM's SchedulerOutput) describes."""
        self._number += 1
        scheduled = self._scheduled(output)
        requests, loads = self._plan(scheduled, output.num_scheduled_tokens)
        tokens = [*self._last_tokens, *_learned(self._followed.values())]
        finished, self._finished, self._last_tokens = self._finished, [], []
        preempted = {f.uid: f for i in (output.preempted_req_ids or ()) if (f := self._followed.get(i)) is not None}
        if preempted:
            again = {followed.uid for _, followed, _, _ in scheduled}
            for uid, followed in preempted.items():
                if uid not in again:
                    followed.block_ids = array("q")
        return Step(
            self._number,
            tuple(requests),
            tuple(tokens),
            tuple(finished),
            tuple(preempted),
            tuple(loads),
            speculative=self._speculative,
            resampled=tuple(self._resampled(preempted)),
            overwritten=_overwritten(output),
            flat=flatten(requests, self._block_size) if self._config.query else None,
        )

    def _scheduled(self, output: Any) -> list[tuple[str, _Followed, int, bool]]:
        """(id, request, first position, whether it was just admitted) of those that the step computes; their block tables are brought up
        to date."""
        found: list[tuple[str, _Followed, int, bool]] = []
        followed_ids, group, cached = self._followed, self._group, output.scheduled_cached_reqs
        resumed = set(getattr(cached, "resumed_req_ids", ()) or ())
        for request_id, new, start in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            followed = followed_ids.get(request_id)
            if followed is None:
                continue
            again = request_id in resumed
            if again:
                followed.block_ids = array("q")
            if new is not None:
                followed.block_ids.extend(new[group])
            found.append((request_id, followed, start, again))
        for data in output.scheduled_new_reqs:
            followed = followed_ids.get(data.req_id)
            if followed is not None:
                followed.block_ids = array("q", data.block_ids[group])
                found.append((data.req_id, followed, data.num_computed_tokens, True))
        return found

    def _plan(
        self, scheduled: Sequence[tuple[str, _Followed, int, bool]], counts: Mapping[str, int]
    ) -> tuple[list[RequestStep], list[LoadRequest]]:
        """What each request computes and loads. One loop: it is run for every request of every step."""
        requests: list[RequestStep] = []
        loads: list[LoadRequest] = []
        n, size = self._block_size, self._config.chunk_size
        per_chunk = size // n
        for request_id, followed, start, admitted in scheduled:
            end = start + counts.get(request_id, 0)
            followed.admitted, followed.told_early = True, False
            if end > followed.computed:
                followed.computed = end
            if followed.salt and len(followed.block_ids) != followed.marked:
                self._mark(followed, followed.block_ids)
            first, last = 0 if admitted else start // size * per_chunk, -(-end // n)
            blocks = followed.block_ids[first:last]
            skip = followed.skip or followed.bar
            if followed.bar and followed.is_edit:
                self._computes_in_place(followed, followed.block_ids, self._number)
            if not skip and len(blocks) != last - first:
                skip = "block-table-unknown"
            requests.append(request_step((followed.uid, request_id, followed.salt, start, end, first, blocks, admitted, skip)))
            if followed.load is not None:
                loads.append(self._load_request(followed, *followed.load))
                followed.load = None
        return requests, loads

    def _load_request(self, followed: _Followed, start: int, end: int) -> LoadRequest:
        chunks = followed.chunks[: -(-end // self._config.chunk_size)]
        followed.loading = tuple(c.digest for c in chunks)
        followed.loaded_in = self._number if start == 0 and 0 < followed.whole <= end else -1
        followed.loaded_at = len(followed.request.all_token_ids)
        whole = followed.end is None or followed.end.index < len(chunks)  # else something of the edit is lost
        return LoadRequest(
            followed.uid,
            followed.request.request_id,
            followed.salt,
            start,
            end,
            tuple(followed.block_ids[: end // self._block_size]),
            followed.loading,
            tuple(followed.request.all_token_ids[: chunks[-1].end]),
            followed.follows_from if followed.salt and whole else "",
        )

    def _resampled(self, preempted: Mapping[int, _Followed]) -> list[int]:
        """Requests whose tokens in flight are thrown away: 0.24 counts them, 0.32 has a flag."""
        if not (preempted or self._discards_counted):
            return []
        return [
            f.uid
            for f in self._followed.values()
            if getattr(f.request, "async_tokens_to_discard", 0) or (f.uid in preempted and getattr(f.request, "drop_stale_output", False))
        ]

    # ---- ends ---------------------------------------------------------------------------------------------------------------------

    def finished(self, request: Any) -> dict[str, Any] | None:
        """A request ended. A worker in this process is told at once (the engine may never step again); others in the next step."""
        followed = self._followed.pop(request.request_id, None)
        self._load_failed.discard(request.request_id)
        if followed is None or not followed.admitted:
            return None
        if self._failed_salts:
            self._forgive(followed)
        update = next(iter(_learned([followed])), None)
        total = len(request.all_token_ids)
        fed = total if getattr(request, "pooling_params", None) is not None else total - 1  # a sampled last token is never fed
        done = FinishedRequest(
            followed.uid, total, request.num_prompt_tokens, max(0, min(fed, max(request.num_computed_tokens, followed.computed)))
        )
        if not self._finish_now(update, done):
            if update is not None:
                self._last_tokens.append(update)
            self._finished.append(done)
        if not (self._config.kv or self._config.query):
            return None  # an engine that only loads leaves no receipts
        return {"qcap": {**self._note, "request_id": request.request_id, "tp_size": self._parts.tp_size}}

    def load_failed(self, block_ids: set[int]) -> None:
        """The worker could not fill these blocks: whoever uses them is not offered the store again."""
        hit = {i: f for i, f in self._followed.items() if block_ids.intersection(f.block_ids)}
        self._load_failed.update(hit)
        self._failed_salts.update({f.salt: self._number for f in hit.values() if f.is_edit})
        for followed in self._followed.values():
            if followed.salt in self._failed_salts:
                followed.bar = followed.bar or "load-failed"  # it may be using what was computed in the edit's place
        for followed in hit.values():
            self._marks.update(dict.fromkeys(followed.block_ids, ""))
            self._bad.update(dict.fromkeys(((followed.salt, digest) for digest in followed.loading), time.monotonic()))
        while len(self._bad) > MAX_BAD:
            del self._bad[next(iter(self._bad))]

    def close(self) -> None:
        """Let go of the store."""
        if self._backend is not None:
            self._backend.close()


def _learned(followed: Iterable[_Followed]) -> list[TokenUpdate]:
    """Token ids since the last time. Placeholders of asynchronous scheduling are not among a request's ids."""
    updates: list[TokenUpdate] = []
    for f in followed:
        if f.admitted and not f.skip:
            told = f.told
            ids = tuple(f.request.all_token_ids[told:])
            if ids:
                f.told = told + len(ids)
                updates.append(token_update((f.uid, told, ids, () if told else _of_prompt(f))))
    return updates


def _of_prompt(followed: _Followed) -> tuple[TokenChunk, ...]:
    """The chunks that were cut of a request's prompt, which stays what it is."""
    prompt = followed.request.num_prompt_tokens
    return tuple(chunk for chunk in followed.chunks if chunk.end <= prompt)


def _overwritten(output: Any) -> tuple[int, ...]:
    """Blocks that vLLM zeroes, or copies others to, before the workers learn of the step."""
    blocks = set(getattr(output, "new_block_ids_to_zero", None) or ())
    for copy in getattr(output, "kv_cache_block_copies", None) or ():
        blocks.add(int(copy[-1]))  # (from, to)
    return tuple(sorted(blocks))


def _why_not(request: Any) -> str:
    """Why nothing of a request may be stored: what it computed does not follow from its token ids alone."""
    if getattr(request, "prompt_token_ids", None) is None or getattr(request, "prompt_embeds", None) is not None:
        return "no-token-ids"
    if getattr(request, "mm_features", None):
        return "multimodal"
    if getattr(request, "lora_request", None) is not None:
        return "lora"
    if getattr(request, "resumable", False):
        return "streaming"  # its last sampled token may be taken back
    try:
        check_salt(getattr(request, "cache_salt", None) or "")
    except TokenError:
        return "salt"
    return ""
