"""The streaming ring and the pages' way to the host on a device that works late and in random order: only the waits keep rows apart."""

from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest
import torch
from late_device import LateDevice

from qcap import kernels
from qcap.attribution import RequestStep, Step, step_block_limit
from qcap.capture import HostArena, KVFeature, PageStager, RequestTrack, StreamBudget, StreamingQueryFeature
from qcap.capture.held import HELD, HeldQueries
from qcap.geometry import Geometry, PagedLayout, PlaneStrides, Rope
from qcap.kinds import CacheKind

L, HEADS, D, N, CH = 8, 1, 4, 4, 8
H, BLOCKS, MAX_ROWS, SMALL = HEADS * D, 60, 40, 5


def row_values(ids: torch.Tensor, layer: int, plane: int) -> torch.Tensor:
    return (ids[:, None].float() * 64 + layer * 8 + plane) + torch.arange(H) / 64


class Rig:
    """Both features on a late device, and steps as an engine queues them."""

    def __init__(self, monkeypatch, seed, windows, grouped=False):
        self.g = Geometry(
            model="m", layer_names=tuple(f"l{i}" for i in range(L)), num_q_heads=HEADS, num_kv_heads=HEADS, head_size=D, dtype="float32",
            block_size=N, chunk_size=CH, rope=Rope(rotary_dim=D),
        )  # fmt: skip
        self.device = LateDevice(seed)
        self.arena = HostArena(1 << 18, pinned=False, waits=True)
        self.stager = PageStager(torch.device("cpu"), self.arena)
        self.counters: Counter[str] = Counter()
        self.query = StreamingQueryFeature(
            self.g, StreamBudget(MAX_ROWS, SMALL, windows, H * 4, L), num_kv_blocks=BLOCKS, plan_blocks=step_block_limit(MAX_ROWS, 8, N),
            plan_requests=8, padded_rows=MAX_ROWS, stager=self.stager, counters=self.counters, host_bytes=1 << 20,
        )  # fmt: skip
        self.pages = [torch.full((BLOCKS, 2, N, HEADS, D), -7.0) for _ in range(L)]
        s = self.pages[0].stride()
        planes = PlaneStrides(0, s[0], s[3], s[2], s[4]), PlaneStrides(s[1], s[0], s[3], s[2], s[4])
        layout = PagedLayout(name="B2NHD", blocks=BLOCKS, heads=HEADS, block_size=N, head_size=D, planes=planes)
        self.kv = KVFeature(self.g, self.pages, [layout] * L, self.stager)
        self.device.own(self.query, self.stager, 2 * CH * H * 4)  # a slot holds one chunk's layer
        self.device.install(monkeypatch)
        self.query._queries_stay, self.query._held_rows = grouped, MAX_ROWS + 1  # several layers of a step are scattered together
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 30, 1 << 30))
        self.tracks: dict[int, RequestTrack] = {}
        self.number = 0

    def staged(self, uid, kind):
        return self.tracks[uid].staged.setdefault(kind, set())

    def step(self, work, ids, blocks, replay, hooks):
        self.number += 1
        requests = []
        for uid, start, end in work:
            track = self.tracks.setdefault(uid, RequestTrack(uid, str(uid), ""))
            track.block_ids[:] = array("q", blocks[uid][: -(-end // N)])
            requests.append(RequestStep(uid, str(uid), "", start, end, 0, track.block_ids[:], start == 0))
        step = Step(self.number, tuple(requests))
        order = random.Random(self.number).sample(work, len(work))
        at = torch.cat([torch.arange(s, e) for _, s, e in order])
        token = torch.cat([ids[uid][s:e] for uid, s, e in order])
        slots = torch.cat([torch.tensor(blocks[uid])[torch.arange(s, e) // N] * N for uid, s, e in order]) + at % N
        block, offset = slots // N, slots % N
        whole = [(uid, index) for uid, s, e in work for index in range(s // CH, e // CH)]
        due = [(self.tracks[uid], index) for uid, index in whole if index not in self.staged(uid, CacheKind.KV)]
        self.query.begin(step)
        self.kv.begin(step)
        self.kv.start(due)
        buffers: list[torch.Tensor] = []
        for layer in range(L):  # one buffer for all layers, as an engine's allocator gives it: others only where that is still referred to
            kept = {query.data_ptr() for query in self.query._kept}
            buffers += [torch.full((len(token), H), -9.0)] * all(buffer.data_ptr() in kept for buffer in buffers)
            query = next(buffer for buffer in buffers if buffer.data_ptr() not in kept)

            def write(layer=layer, query=query):
                self.pages[layer][block, 0, offset] = row_values(token, layer, 0).view(-1, HEADS, D)
                self.pages[layer][block, 1, offset] = row_values(token, layer, 1).view(-1, HEADS, D)
                query[:] = row_values(token, layer, 2)

            self.device.launch(write)
            self.query.on_layer(layer, query.view(-1, HEADS, D), slots)
            if hooks and not replay:
                self.query.layer_done(layer)
                self.kv.layer_done(layer)
        if replay:
            self.query._calls = 0  # a replayed graph: the same kernels, no Python
        found = []
        for feature in (self.query, self.kv):
            feature.commit(step.number, ())
        for uid, _, end in work:
            for feature in (self.query, self.kv):
                for index, stage in feature.take(self.tracks[uid], end):
                    if index not in self.staged(uid, feature.kind):
                        self.staged(uid, feature.kind).add(index)
                        found.append((uid, index, feature.kind, stage(), ids[uid]))
        for feature in (self.query, self.kv):
            feature.end()
        return found

    @staticmethod
    def check(uid, index, kind, staged, ids):
        staged.ready.synchronize()
        token = ids[index * CH : (index + 1) * CH]
        for plane in range(kind.planes):
            for layer in range(L):
                wanted = row_values(token, layer, plane if kind is CacheKind.KV else 2)
                assert torch.equal(staged.host[plane, layer], wanted), f"{kind.value} chunk {index} of {uid}, layer {layer}"
        staged.release()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("windows", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("grouped", [False, True])
def test_nothing_leaves_too_early_or_is_written_over_too_soon(monkeypatch, seed, windows, grouped):  # A31 C36 D21 W4
    rig, rng, launches = Rig(monkeypatch, seed, windows + 4 * grouped, grouped), random.Random(seed), []
    late = kernels.row_scatter_layers
    monkeypatch.setattr(kernels, "row_scatter_layers", lambda rows, *more: launches.append(len(rows)) or late(rows, *more))
    rig.query.mover.move = lambda *a: None  # rows may stay where they are: its thread would run the device from two sides
    free = list(range(1, BLOCKS))
    pending, ids, blocks, done, checked = [], {}, {}, {}, Counter()
    for number in range(60):
        if len(ids) < 3:
            need = rng.randrange(4, 14)
            if need <= len(free):
                ids[number], blocks[number], free, done[number] = torch.randint(0, 1000, (need * N,)), free[:need], free[need:], 0
        large, work = number % 3 == 0, []
        room = MAX_ROWS if large else SMALL
        for uid in list(ids):
            count = min(len(ids[uid]) - done[uid], rng.randrange(6, 30) if large else rng.choice([1, 1, 2]), room)
            if count > 0:
                work.append((uid, done[uid], done[uid] + count))
                room -= count
        if not work:
            continue
        small = sum(e - s for _, s, e in work) <= SMALL
        pending += rig.step(work, ids, blocks, replay=small and rng.random() < 0.6, hooks=rng.random() < 0.7)
        for uid, _, end in work:
            done[uid] = end
            if end == len(ids[uid]):  # over: its blocks are another request's in the very next step
                rig.query.release(rig.tracks[uid])
                rig.kv.release(rig.tracks[uid])
                free = blocks.pop(uid) + free
                del ids[uid], done[uid], rig.tracks[uid]
        while len(pending) > 12:
            item = pending.pop(rng.randrange(len(pending)))
            rig.check(*item)
            checked[item[2]] += 1
    for item in pending:
        rig.check(*item)
        checked[item[2]] += 1
    rig.device.finish()
    assert checked[CacheKind.QUERY] > 10 and checked[CacheKind.KV] >= checked[CacheKind.QUERY]
    assert rig.counters["query.rows_missing"] == rig.counters["query.steps_incomplete"] == 0
    assert max(launches, default=0) > 1 if grouped else not launches
    for uid in list(rig.tracks):
        rig.query.release(rig.tracks[uid])
    rig.query.close()
    rig.kv.close()
    rig.device.finish()
    assert rig.arena.outstanding == 0


@pytest.mark.parametrize("seed", range(20))
def test_queries_that_leave_from_where_they_lie_are_not_written_over(monkeypatch, seed):
    """An allocator gives a layer's memory to a later one as soon as nobody refers to it, and waits only for streams it was told of."""
    rng, device = random.Random(seed), LateDevice(seed)
    stager = PageStager(torch.device("cpu"), HostArena(1 << 16, pinned=False, waits=True))
    device.own(None, stager, 1 << 12)
    device.install(monkeypatch)
    told: dict[int, list] = {}  # address -> streams that still use what lies there
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: told.setdefault(tensor.data_ptr(), []).append(stream.mark()))
    memory = [torch.zeros(8, H) for _ in range(HELD + 1)]  # one more than are held: the engine computes into it
    queries, left, number = HeldQueries(stager), [], 0
    for _ in range(6):
        for piece in memory:
            for marker in told.pop(piece.data_ptr(), []):
                while not marker.done:
                    assert device.run(1)
        for layer in range(rng.randrange(1, 8)):
            number += 1
            piece, home = memory[layer % len(memory)], torch.full((8, H), -1.0)
            device.launch(lambda piece=piece, number=number: piece.fill_(number))
            queries.leave(piece, home)
            left.append((home, number))
            device.run(rng.randrange(3))
            if rng.random() < 0.3:
                stager.copy_out(torch.ones(H), torch.ones(H), keep=True)  # stamps, say
        queries.let_go()
        device.run(rng.randrange(8))
    device.finish()
    assert all((home == number).all() for home, number in left)
