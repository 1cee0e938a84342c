"""On a CUDA GPU, without an engine: what leaves a device over three streams is what was there, and nothing makes the host wait.

Rows are numbers made from (request, position, layer), so a row that left too early, too late, or from another token's place is seen.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest
import torch

from qcap.attribution import RequestStep, Step, step_block_limit
from qcap.capture import HostArena, KVFeature, PageStager, QueryFeature, RequestTrack, StreamBudget, StreamingQueryFeature
from qcap.geometry import Geometry, PagedLayout, PlaneStrides, Rope
from qcap.kinds import CacheKind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

L, HEADS, D, N, CH = 6, 8, 64, 16, 64
H = HEADS * D
BLOCKS, MAX_ROWS, SMALL = 600, 4096, 32


def geometry() -> Geometry:
    return Geometry(
        model="m", layer_names=tuple(f"l{i}" for i in range(L)), num_q_heads=HEADS, num_kv_heads=HEADS, head_size=D, dtype="float32",
        block_size=N, chunk_size=CH, rope=Rope(rotary_dim=D),
    )  # fmt: skip


def row_values(ids: torch.Tensor, layer: int, plane: int) -> torch.Tensor:
    """float32 ``[n, H]``, exact: ids are below 2**14."""
    return (ids[:, None].float() * 64 + layer * 8 + plane) + torch.arange(H, device=ids.device) / 1024


class Rig:
    """Both features on a device, and the pages and queries of steps written by hand."""

    def __init__(self, form: str, windows: int = 2) -> None:
        self.g, self.device = geometry(), torch.device("cuda")
        self.arena = HostArena(1 << 30, pinned=True, waits=True)
        self.stager = PageStager(self.device, self.arena, slot_bytes=256 << 10)  # a chunk's layer is 32 KiB: several rounds a step
        self.counters: Counter[str] = Counter()
        limit = step_block_limit(MAX_ROWS, 64, N)
        if form != "resident":
            self.query: StreamingQueryFeature | QueryFeature = StreamingQueryFeature(
                self.g, StreamBudget(MAX_ROWS, SMALL, windows, H * 4, L), num_kv_blocks=BLOCKS, plan_blocks=limit,
                plan_requests=64, padded_rows=MAX_ROWS + 8,
                stager=self.stager, counters=self.counters, host_bytes=1 << 30, recorded_layers=4,
                queries_stay=form in ("held", "grouped"),
            )  # fmt: skip
            self.query._held_rows = SMALL + 1 if form == "held" else MAX_ROWS + 1
        else:
            self.query = QueryFeature(
                self.g, device=self.device, dtype=torch.float32, ring_blocks=2 * limit, max_rows=MAX_ROWS + 8, plan_blocks=limit,
                never_lose=True, stager=self.stager, counters=self.counters,
            )  # fmt: skip
        self.pages = [torch.full((BLOCKS, 2, N, HEADS, D), -7.0, device=self.device) for _ in range(L)]
        s = self.pages[0].stride()
        planes = PlaneStrides(0, s[0], s[3], s[2], s[4]), PlaneStrides(s[1], s[0], s[3], s[2], s[4])
        layout = PagedLayout(name="B2NHD", blocks=BLOCKS, heads=HEADS, block_size=N, head_size=D, planes=planes)
        self.kv = KVFeature(self.g, self.pages, [layout] * L, self.stager)
        self.tracks: dict[int, RequestTrack] = {}
        self.number = 0
        self.static_query = torch.zeros((L, SMALL, 3 * H), device=self.device)
        self.static_slots = torch.full((SMALL,), -1, dtype=torch.int64, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def record(self) -> None:
        """The small step as a graph, as an engine records it: nothing is planned then."""

        def forward() -> None:
            for layer in range(L):
                self.query.on_layer(layer, self.static_query[layer, :, :H].view(SMALL, HEADS, D), self.static_slots)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            forward()

    def step(self, work: list[tuple[int, int, int]], ids: dict[int, torch.Tensor], blocks: dict[int, list[int]], replay: bool) -> list:
        """Run one step of ``work`` = [(uid, start, end)]; what became whole, staged."""
        self.number += 1
        requests = []
        for uid, start, end in work:
            track = self.tracks.setdefault(uid, RequestTrack(uid, str(uid), ""))
            track.block_ids[:] = array("q", blocks[uid][: -(-end // N)])
            requests.append(RequestStep(uid, str(uid), "", start, end, 0, tuple(track.block_ids), start == 0))
        step = Step(self.number, tuple(requests))
        order = random.Random(self.number).sample(work, len(work))  # rows come in the engine's order, not the scheduler's
        at = torch.cat([torch.arange(s, e) for _, s, e in order])
        token = torch.cat([ids[uid][s:e] for uid, s, e in order]).to(self.device)
        slots = torch.cat([torch.tensor(blocks[uid])[torch.arange(s, e) // N] * N for uid, s, e in order]) + at % N
        slots = slots.to(self.device)
        queries = [row_values(token, layer, 2) for layer in range(L)]
        keys = [row_values(token, layer, 0).view(-1, HEADS, D) for layer in range(L)]
        values = [row_values(token, layer, 1).view(-1, HEADS, D) for layer in range(L)]
        block, offset = slots // N, slots % N
        whole = [(uid, index) for uid, s, e in work for index in range(s // CH, e // CH)]
        due = [(self.tracks[uid], index) for uid, index in whole if index not in self.staged(uid, CacheKind.KV)]
        torch.cuda.synchronize()
        stay = isinstance(self.query, StreamingQueryFeature) and self.query._queries_stay and len(slots) > SMALL
        held = stay and (len(work) == 1 or len(slots) < self.query._held_rows)
        if held:
            with torch.cuda.stream(self.stager.copy):
                torch.cuda._sleep(20_000_000)  # copies are late: nothing may take the memory of queries that are still leaving
        torch.cuda.set_sync_debug_mode("error")
        try:
            for feature in (self.query, self.kv):
                feature.begin(step)
                feature.start(due if feature is self.kv else [])
            if replay:
                assert self.graph is not None
                self.static_slots.fill_(-1)
                self.static_slots[: len(slots)].copy_(slots)
                for layer in range(L):
                    self.static_query[layer, : len(slots), :H].copy_(queries[layer])
                    self.pages[layer][block, 0, offset], self.pages[layer][block, 1, offset] = keys[layer], values[layer]
                self.graph.replay()
            else:
                for layer in range(L):
                    self.pages[layer][block, 0, offset], self.pages[layer][block, 1, offset] = keys[layer], values[layer]
                    self.query.on_layer(layer, queries[layer].view(-1, HEADS, D), slots)
                    if held:  # the engine frees them, and uses the memory for something else if it gets it
                        shape, queries[layer] = queries[layer].shape, None  # type: ignore[call-overload]
                        spoilt = [torch.full(shape, -9.0, device=self.device) for _ in range(3)]
                        del spoilt
                    else:
                        queries[layer].fill_(-9.0)  # the engine reuses the memory
                    for feature in (self.query, self.kv):
                        feature.layer_done(layer)
            for feature in (self.query, self.kv):
                feature.commit(step.number, ())
            found = []
            for uid, _, end in work:
                for feature in (self.query, self.kv):
                    for index, stage in feature.take(self.tracks[uid], end):
                        if index not in self.staged(uid, feature.kind):
                            self.staged(uid, feature.kind).add(index)
                            found.append((uid, index, feature.kind, stage()))
            for feature in (self.query, self.kv):
                feature.end()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return found

    def staged(self, uid: int, kind: CacheKind) -> set[int]:
        return self.tracks[uid].staged.setdefault(kind, set())

    def check(self, uid: int, index: int, kind: CacheKind, staged, ids: torch.Tensor) -> None:
        staged.ready.synchronize()
        token = ids[index * CH : (index + 1) * CH]
        for plane in range(kind.planes):
            for layer in range(L):
                wanted = row_values(token, layer, plane if kind is CacheKind.KV else 2)
                assert torch.equal(staged.host[plane, layer], wanted), f"{kind.value} chunk {index} of {uid}, layer {layer}"
        staged.release()


@pytest.mark.parametrize("windows", [1, 2, 4])
@pytest.mark.parametrize("form", ["streaming", "resident", "held", "grouped"])
def test_what_leaves_is_what_was_there(form: str, windows: int) -> None:  # A31 C24 C36 D21: sync debug mode "error" around each step
    rig = Rig(form, windows * (12 if form == "grouped" else 1))  # so that several layers of its largest steps go together
    rig.record()
    left = kept = 0
    if isinstance(rig.query, StreamingQueryFeature):
        real = rig.query._held.leave

        def leave(query: torch.Tensor, home: torch.Tensor) -> None:
            nonlocal left
            left += 1
            real(query, home)

        rig.query._held.leave = leave  # type: ignore[method-assign]
        real_keep = rig.query._keep

        def keep(layer: int, query: torch.Tensor, together: int, large: bool) -> None:
            nonlocal kept
            kept += large and together > 1
            real_keep(layer, query, together, large)

        rig.query._keep = keep  # type: ignore[method-assign]
    rng = random.Random(windows)
    free = list(range(1, BLOCKS))
    rng.shuffle(free)
    pending: list = []
    ids: dict[int, torch.Tensor] = {}
    blocks: dict[int, list[int]] = {}
    done: dict[int, int] = {}
    checked: Counter[CacheKind] = Counter()
    for number in range(120):
        if len(ids) < 6 or (number % 20 == 0 and len(free) > 200):
            uid = number + 1
            length = rng.choice([700, 1500, 2600]) + rng.randrange(200)
            need = -(-(length + 150) // N)
            if need < len(free):
                ids[uid] = torch.randint(0, 1 << 14, (need * N,))
                blocks[uid], free = free[:need], free[need:]
                done[uid] = 0
        large = number % 5 == 0
        work, room = [], MAX_ROWS if large else SMALL
        for uid in list(ids)[: 1 if form == "held" and number % 10 == 0 else None]:
            start, total = done[uid], len(ids[uid]) - N
            count = min(total - start, rng.randrange(200, 2000) if large else rng.choice([1, 1, 1, 3]), room)
            if count > 0:
                work.append((uid, start, start + count))
                room -= count
        if not work:
            break
        rows = sum(e - s for _, s, e in work)
        replay = rows <= SMALL and number % 3 != 1
        for uid, index, kind, staged in rig.step(work, ids, blocks, replay):
            pending.append((uid, index, kind, staged, ids[uid]))
        for uid, _, end in work:
            done[uid] = end
            if end >= len(ids[uid]) - N:  # over: its blocks are another request's in the very next step
                rig.query.release(rig.tracks[uid])
                rig.kv.release(rig.tracks[uid])
                free = blocks.pop(uid) + free
                del ids[uid], done[uid], rig.tracks[uid]
        while len(pending) > 40:
            uid, index, kind, staged, tokens = pending.pop(rng.randrange(len(pending)))
            rig.check(uid, index, kind, staged, tokens)
            checked[kind] += 1
    for uid, index, kind, staged, tokens in pending:
        rig.check(uid, index, kind, staged, tokens)
        checked[kind] += 1
    assert checked[CacheKind.QUERY] > 50 and checked[CacheKind.KV] >= checked[CacheKind.QUERY]
    assert (
        rig.counters["query.steps_replayed"] > 20
        and rig.counters["query.rows_missing"] == 0
        and rig.counters["query.steps_incomplete"] == 0
    )
    assert (left >= 5 * L) == (form == "held") and (kept >= 5 * L) == (form == "grouped")
    for uid in list(rig.tracks):
        rig.query.release(rig.tracks[uid])
    rig.query.close()
    rig.kv.close()
    torch.cuda.synchronize()
    assert rig.arena.outstanding == 0
    rig.arena.close()
