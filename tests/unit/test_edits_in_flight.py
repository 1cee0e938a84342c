"""An edit is stored again and again under one salt while an engine serves it: the scheduler's half against a model of vLLM's scheduler,
prefix cache and pages, in which each row knows what it was computed on."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from layerwise_kit import geometry

from qcap.config import CaptureConfig
from qcap.errors import QcapError
from qcap.kinds import CacheKind
from qcap.store.extents import with_extent
from qcap.tokens import ChunkedTokenDatabase, ChunkRecord
from qcap.vllm import scheduler
from qcap.vllm.loading import check_edits, first_to_check
from qcap.vllm.scheduler import KeyParts, SchedulerSide

N, CH, SALT = 4, 8, "salt"
G = replace(geometry(2), block_size=N, chunk_size=CH)
CUT = ChunkedTokenDatabase(CH)
EDITED = list(range(24))
LEAVES = [*range(16), *range(300, 324)]  # the edit in its midst
Row = tuple[str, Any]


def computed(before: list[Row], token: int) -> Row:
    """What a model makes of a token behind these rows."""
    return "computed", hash((tuple(before), token))


class Store:
    """Records and rows by key."""

    cheap_contains = True

    def __init__(self) -> None:
        self.objects: dict[Any, tuple[ChunkRecord, list[Row]]] = {}

    def edit_of(self, key):
        return self.objects[key][0].edit if key in self.objects else None

    def open_layers(self, key):
        return SimpleNamespace(record=self.objects[key][0]) if key in self.objects else None

    def contains(self, keys):
        return [key in self.objects for key in keys]

    def lookup(self, keys):
        return next((i for i, key in enumerate(keys) if key not in self.objects), len(keys))


class Pool:
    """vLLM's blocks, and those of them that a prefix finds."""

    def __init__(self) -> None:
        self.cached: dict[tuple[int, ...], int] = {}
        self.rows: list[list[Row | None]] = []

    def new(self) -> int:
        self.rows.append([None] * N)
        return len(self.rows) - 1

    def get_cached_block(self, prefix, group_ids):
        return [SimpleNamespace(block_id=self.cached[prefix])] if prefix in self.cached else None

    def evict_blocks(self, block_ids):
        self.cached = {prefix: block for prefix, block in self.cached.items() if block not in block_ids}


class World:
    """An engine, its store and its requests. ``wrong`` lists what should never be."""

    def __init__(self, seed: int, early: bool, restless: float) -> None:
        self.restless = restless  # how likely the edit is stored anew at each of three moments of a step
        self.rng, self.store, self.pool = random.Random(seed), Store(), Pool()
        self.parts = KeyParts(G.model, 1, G.dtype)
        self.leases: dict[int, dict[int, tuple[ChunkRecord, list[Row]]]] = {}
        worker = SimpleNamespace(more=self.begin_early, told=lambda uid: None) if early else None
        self.side = SchedulerSide(
            CaptureConfig(store="memory://s", query=False, chunk_size=CH, load="salted"), self.parts, group=0, block_size=N,
            backend=lambda: self.store, speculative=False, finish_now=lambda update, done: True, note={}, early=worker,
        )  # fmt: skip
        self.side.bind_block_pool(self.pool)
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.tracks: dict[int, Any] = {}
        self.made, self.version, self.of = 0, 0, {}  # behind -> (version, tokens of the edit before it)
        self.wrong: list[str] = []
        self.seen: Counter[str] = Counter()

    def key(self, digest: str) -> Any:
        return self.parts.keys(CacheKind.KV, digest, SALT)[0]

    # -- the user

    def store_edit(self, version: int, numbers: range = range(len(EDITED) // CH)) -> None:
        """All chunks of a version of the edit, or those that a writer got to; the last one comes first."""
        chunks, before = CUT.chunks(EDITED), ""
        for chunk in chunks:
            now = f"{version}/{chunk.index}"
            ids = tuple(EDITED[chunk.start : chunk.end])
            record = ChunkRecord(
                CacheKind.KV, G, chunk.start, ids, chunk.digest, chunk.parent, SALT, edit=with_extent('{"name": "x"}', chunks),
                rows=f"{before}.{now}",
            )  # fmt: skip
            before = now
            self.of[record.behind] = version, chunk.end
            if chunk.index in numbers:
                self.store.objects[self.key(chunk.digest)] = record, [("edit", (version, at)) for at in range(chunk.start, chunk.end)]

    def overwrite(self) -> None:
        self.version = self.rng.choice([1, 2, 3])
        self.store_edit(self.version, range(self.rng.choice([0] * 9 + [2]), 3))  # or the writer is cut off

    def add(self) -> None:
        self.made += 1
        end = self.rng.choice([[100 + i for i in range(self.rng.choice([3, 20, 40]))], [200 + i for i in range(20)]])
        ids = self.rng.choice([[*EDITED, *end]] * 4 + [LEAVES])
        request = SimpleNamespace(
            request_id=f"r{self.made}", prompt_token_ids=list(ids), all_token_ids=list(ids), num_prompt_tokens=len(ids),
            num_computed_tokens=0, cache_salt=SALT, mm_features=[], lora_request=None, prompt_embeds=None, pooling_params=None,
            block_hashes=[tuple(ids[:end]) for end in range(N, len(ids) + 1, N)], left=self.rng.choice([0, 2, 12]), blocks=[], new=True,
            in_cache=0,
        )  # fmt: skip
        self.side.arrived(request)
        self.waiting.append(request)

    # -- vLLM's scheduler

    def step(self) -> None:
        budget, counts = self.rng.choice([8, 16, 40]), {}
        new, cached, resumed, preempted, put_off = [], [], set(), set(), []
        for request in [r for r in self.running if self.rng.random() < 0.08]:
            self.running.remove(request)
            self.waiting.insert(0, request)
            request.blocks, request.in_cache, request.num_computed_tokens = [], 0, 0
            preempted.add(request.request_id)
        for request in self.running:
            count = min(budget, len(request.all_token_ids) - request.num_computed_tokens)
            if count > 0:
                before = len(request.blocks)
                self.give_blocks(request, request.num_computed_tokens + count)
                cached.append((request, request.blocks[before:], request.num_computed_tokens))
                counts[request.request_id], budget = count, budget - count
        while self.waiting and budget > 0 and self.waiting[0].request_id not in preempted:
            request = self.waiting.pop(0)
            own: list[int] = []
            while (at := tuple(request.all_token_ids[: (len(own) + 1) * N])) in self.pool.cached and len(at) < len(request.all_token_ids):
                own.append(self.pool.cached[at])
            external = self.side.matched_tokens(request, len(own) * N)
            if external is None:
                self.seen["put off"] += 1
                put_off.append(request)
                continue
            if self.rng.random() < self.restless:
                self.overwrite()
            start = len(own) * N + external
            count = min(budget, len(request.all_token_ids) - start)
            request.blocks, request.in_cache = own, len(own)
            self.give_blocks(request, start + count)
            self.side.allocated(request, external, SimpleNamespace(get_block_ids=lambda blocks=tuple(request.blocks): (list(blocks),)))
            request.num_computed_tokens = start
            counts[request.request_id], budget = count, budget - count
            if request.new:
                new.append(SimpleNamespace(req_id=request.request_id, block_ids=(list(request.blocks),), num_computed_tokens=start))
                request.new = False
            else:
                cached.append((request, list(request.blocks), start))
                resumed.add(request.request_id)
            self.running.append(request)
        self.waiting[:0] = put_off
        if self.rng.random() < self.restless:
            self.overwrite()
        names, blocks, starts = [r.request_id for r, _, _ in cached], [(b,) for _, b, _ in cached], [start for _, _, start in cached]
        step = self.side.step(
            SimpleNamespace(
                scheduled_new_reqs=new, num_scheduled_tokens=counts, preempted_req_ids=preempted,
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=names, resumed_req_ids=resumed, new_block_ids=blocks, num_computed_tokens=starts
                ),
            )
        )  # fmt: skip
        if self.rng.random() < self.restless:
            self.overwrite()
        self.work(step)

    def give_blocks(self, request: Any, end: int) -> None:
        while len(request.blocks) * N < end:
            request.blocks.append(self.pool.new())
        for number in range(request.in_cache, end // N):
            self.pool.cached.setdefault(tuple(request.all_token_ids[: (number + 1) * N]), request.blocks[number])
        request.in_cache = max(request.in_cache, end // N)

    # -- the worker

    def begin_early(self, uid, salt, start, end, chunks, token_ids) -> bool:
        for number in range(max(start // CH - 1, 0), -(-end // CH)):
            found = self.store.objects.get(self.key(chunks[number].digest))
            if found is not None:
                self.leases.setdefault(uid, {}).setdefault(number, found)
        return True

    def work(self, step: Any) -> None:
        by_id = {request.request_id: request for request in self.running}
        for planned in step.requests:
            self.tracks.setdefault(planned.uid, SimpleNamespace(tokens=[], chunks=[], barred=""))
        for uid, offset, ids, chunks in step.tokens:
            track = self.tracks[uid]
            track.tokens[offset:] = ids
            track.chunks = CUT.extend(track.chunks or chunks, track.tokens)
        failed: set[int] = set()
        for load in step.loads:
            try:
                self.load(load)
            except QcapError as error:
                self.seen[f"failed: {type(error).__name__}"] += 1
                failed.update(load.block_ids[load.start // N :])
        self.leases.clear()
        todo = [planned for planned in step.requests if not failed.intersection(by_id[planned.request_id].blocks)]
        while todo:  # one may read what another computes in the same step
            ready = [p for p in todo if None not in self.rows_of(by_id[p.request_id], p.start)]
            if not ready:
                self.wrong.append("rows that nobody computes")
                break
            for planned in ready:
                todo.remove(planned)
                self.compute(planned, by_id[planned.request_id])
        if failed:
            self.side.load_failed(failed)
            hit = [request for request in self.running if failed.intersection(request.blocks)]
            self.pool.evict_blocks({block for request in hit for block in request.blocks})
            for request in hit:
                self.finish(request)

    def load(self, load: Any) -> None:
        found: dict[int, tuple[ChunkRecord, list[Row]]] = {}
        for number in range(first_to_check(load, CH), -(-load.end // CH)):
            kept = self.leases.get(load.uid, {}).get(number) or self.store.objects.get(self.key(load.digests[number]))
            if kept is not None:
                found[number] = kept
            elif number >= load.start // CH:
                raise QcapError("a chunk is no longer in the store")
        check_edits([record for record, _ in found.values()], load.behind)
        for at in range(load.start, load.end):
            self.pool.rows[load.block_ids[at // N]][at % N] = found[at // CH][1][at % CH]
        self.seen["loaded"] += 1

    def rows_of(self, request: Any, end: int) -> list[Any]:
        return [self.pool.rows[request.blocks[at // N]][at % N] for at in range(end)]

    def compute(self, planned: Any, request: Any) -> None:
        track, rows = self.tracks[planned.uid], self.rows_of(request, planned.start)
        track.barred = track.barred or planned.skip
        self.seen[track.barred or "computed"] += 1
        if len({told[0] for what, told in rows if what == "edit"}) > 1:
            self.wrong.append(f"{request.request_id} ({track.barred}) goes on from rows of two edits")
        for at, row in enumerate(rows):
            if row[0] == "computed" and row != computed(rows[:at], request.all_token_ids[at]):
                self.wrong.append(f"{request.request_id} ({track.barred}) goes on from a row that was computed behind others")
        for at in range(planned.start, planned.end):
            rows.append(computed(rows, request.all_token_ids[at]))
            self.pool.rows[request.blocks[at // N]][at % N] = rows[-1]
        for chunk in track.chunks[planned.start // CH : planned.end // CH]:
            if not track.barred and self.key(chunk.digest) not in self.store.objects:
                self.store_computed(track, chunk, rows)
        request.num_computed_tokens = planned.end
        if planned.end >= len(request.all_token_ids):
            if not request.left:
                self.finish(request)
                return
            request.left -= 1
            request.all_token_ids.append(1000 + len(request.all_token_ids) % 7)
            if len(request.all_token_ids) % N == 0:
                request.block_hashes.append(tuple(request.all_token_ids))

    def store_computed(self, track: Any, chunk: Any, rows: list[Row]) -> None:
        """As capture does; what the key says of the rows before is compared with them."""
        behind = next((other.behind for other in track.chunks[: chunk.index] if other.behind), "")
        version, end = self.of.get(behind, (0, 0))
        if [row for row in rows[: chunk.end] if row[0] == "edit"] != [("edit", (version, at)) for at in range(end)]:
            self.wrong.append(f"chunk {chunk.index} is stored as of version {version} of the edit")
        ids = tuple(track.tokens[chunk.start : chunk.end])
        record = ChunkRecord(CacheKind.KV, G, chunk.start, ids, chunk.digest, chunk.parent, SALT)
        self.store.objects[self.key(chunk.digest)] = record, rows[chunk.start : chunk.end]
        self.seen["stored"] += 1

    def finish(self, request: Any) -> None:
        self.running.remove(request)
        self.side.finished(request)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_no_row_is_served_or_stored_behind_rows_that_it_was_not_computed_on(monkeypatch, seed, early):
    monkeypatch.setattr(scheduler, "RETRY_LOAD_S", 0.0)
    total: Counter[str] = Counter()
    for run in range(4):
        world = World(100 * run + seed, early, 0.05 * (run % 2))
        world.overwrite()
        for number in range(40):
            if number < 30 and world.rng.random() < 0.35:
                for _ in range(world.rng.choice([1, 2, 3])):
                    world.add()
            if world.rng.random() < 0.15:
                world.overwrite()
            world.step()
            assert world.wrong == [], f"run {run}, step {number}"
        total += world.seen
    assert total["loaded"] > 10 and total["stored"] > 10 and total["put off"] > 0 and total["computed"] > 40, total
