"""On a CUDA GPU, without an engine: stored layers that arrive while the layers before them compute are there when they are read, and when
they leave again in the same step; nothing makes the host wait for the device. Some chunks lie in page-locked memory and are loaded from
there; that memory is spoiled the moment its lease goes.

Rows are numbers made from (token, layer, plane). Copies and computation are made slow on the device, so that a missing wait is seen.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from qcap.attribution import LoadRequest, RequestStep, Step
from qcap.capture import HostArena, KVFeature, PageStager, RequestTrack
from qcap.geometry import Geometry, PagedLayout, PlaneStrides, Rope
from qcap.kinds import CacheKind
from qcap.layerwise import CudaStreams, NullStreams
from qcap.store.tiers import Resting
from qcap.tokens import ChunkedTokenDatabase, ChunkRecord, chunk_key
from qcap.vllm.loading import LayerLoads

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

L, HEADS, D, N, CH = 6, 8, 64, 16, 64
H = HEADS * D
BLOCKS = 200
SLOW = 2_000_000
"""Device cycles, about a millisecond."""


def row_values(ids: torch.Tensor, layer: int, plane: int) -> torch.Tensor:
    """float32 ``[n, H]``, exact: ids are below 2**14."""
    return (ids[:, None].float() * 64 + layer * 8 + plane) + torch.arange(H, device=ids.device) / 1024


class SlowCopies(CudaStreams):
    """What goes to the load stream starts late."""

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        with super().on(stream):
            torch.cuda._sleep(SLOW // 8)
            yield


class Lease:
    """Of one piece of an arena; the store holds it until it forgets the chunks."""

    pinned = lent = True

    def __init__(self, arena: HostArena, block: torch.Tensor) -> None:
        self.arena, self.block, self.holders = arena, block, 1

    def hold(self) -> None:
        assert self.holders > 0
        self.holders += 1

    def release(self) -> None:
        self.holders -= 1
        if self.holders == 0:
            self.block.fill_(float("nan"))
            self.arena.give(self.block)


class Reader:
    def __init__(self, record: ChunkRecord, tensor: torch.Tensor, dies_at: int = L, lease: Lease | None = None) -> None:
        self.record, self.tensor, self.dies_at, self.lease = record, tensor, dies_at, lease

    def rest(self) -> Resting | None:
        if self.lease is None:
            return None
        self.lease.hold()
        return Resting(self.tensor, self.lease)

    def read(self, layer: int, out: torch.Tensor) -> torch.Tensor:
        time.sleep(random.random() * 0.002)
        if layer >= self.dies_at:
            raise OSError("the store has gone away")
        return out.copy_(self.tensor[:, layer])


class Store:
    keeps_leases = True

    def __init__(self, cheap: bool) -> None:
        self.cheap_contains = cheap
        self.objects: dict[Any, Reader] = {}
        self.leases: list[Lease] = []

    def loaded(self, keys: Any) -> None:
        pass

    def open_layers(self, key: Any) -> Reader | None:
        return self.objects.get(key)

    def let_go(self) -> None:
        """What is being loaded is kept by those who load it, and by nobody else."""
        for lease in self.leases:
            lease.release()
        self.leases.clear()


class Rig:
    def __init__(self, device: str, host_bytes: int, resting_bytes: int | None = None, ahead_bytes: int = 0) -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.g = Geometry(
            model="m", layer_names=tuple(f"l{i}" for i in range(L)), num_q_heads=HEADS, num_kv_heads=HEADS, head_size=D, dtype="float32",
            block_size=N, chunk_size=CH, rope=Rope(rotary_dim=D),
        )  # fmt: skip
        self.arena = HostArena(64 << 20, pinned=self.cuda, waits=True)
        self.kept = HostArena(128 << 20, pinned=self.cuda, waits=False)  # chunks that lie in memory
        self.pages = [torch.full((BLOCKS, 2, N, HEADS, D), -7.0, device=self.device) for _ in range(L)]
        s = self.pages[0].stride()
        planes = PlaneStrides(0, s[0], s[3], s[2], s[4]), PlaneStrides(s[1], s[0], s[3], s[2], s[4])
        layout = PagedLayout(name="B2NHD", blocks=BLOCKS, heads=HEADS, block_size=N, head_size=D, planes=planes)
        self.kv = KVFeature(self.g, self.pages, [layout] * L, PageStager(self.device, self.arena, slot_bytes=256 << 10))
        self.store, self.wholes = Store(cheap=ahead_bytes > 0), 0
        self.streams = SlowCopies(self.device) if self.cuda else NullStreams()
        self.loads = LayerLoads(
            self.g, self.store, self.kv.table, device=self.device, host_bytes=host_bytes, lowest=list, whole=self.whole,
            streams=self.streams, resting_bytes=resting_bytes, ahead_bytes=ahead_bytes,
        )  # type: ignore[arg-type]  # fmt: skip

    def whole(self, load: LoadRequest) -> None:
        self.wholes += 1
        for index in range(load.start // CH, -(-load.end // CH)):
            tensor = self.store.objects[chunk_key(CacheKind.KV, self.g, load.digests[index], "")].tensor
            first, last = max(load.start, index * CH), min(load.end, (index + 1) * CH)
            self.kv.put(load.block_ids[first // N : last // N], tensor[:, :, first - index * CH : last - index * CH])

    def tell(self, load: LoadRequest) -> bool:
        """That the load is to come, a chunk or two at a time; True if it was begun."""
        chunks, at = ChunkedTokenDatabase(CH).chunks(load.token_ids), load.start
        while at < load.end:
            upto = min((at // CH + random.randrange(1, 3)) * CH, load.end)
            if not self.loads.early(load.uid, load.salt, at, upto, chunks, load.token_ids):
                return False
            at = upto
        self.loads.early_told(load.uid)
        return True

    def close(self) -> None:
        """Unlock all memory that was locked, also when a test failed."""
        if self.cuda:
            torch.cuda.synchronize()
        self.loads.close()
        self.kv.close()
        if self.cuda:
            torch.cuda.synchronize()
        self.store.let_go()
        self.left = self.arena.outstanding, self.loads.arena.outstanding, self.kept.outstanding
        for arena in (self.arena, self.kept):
            arena.close()

    def sequence(
        self, rng: random.Random, uid: int, blocks: list[int], dies_at: int, rests: bool = False
    ) -> tuple[torch.Tensor, LoadRequest, RequestStep]:
        """All chunks but the last block are stored, and loaded from a block of the first chunk on; the last block is computed.

        ``rests``: the chunks lie in memory, those before some chunk side by side, and those from there on.
        """
        ids = torch.randint(0, 1 << 14, (len(blocks) * N,))
        chunks, tokens = ChunkedTokenDatabase(CH).chunks(ids.tolist()), tuple(ids.tolist())
        rows = torch.stack([torch.stack([row_values(ids, layer, plane) for layer in range(L)]) for plane in range(2)])
        doomed = rng.randrange(len(chunks))
        records = [ChunkRecord(CacheKind.KV, self.g, c.start, tokens[c.start : c.end], c.digest, c.parent) for c in chunks]
        if rests:
            for part in filter(None, (records[:doomed], records[doomed:])):
                first, size = part[0].start, len(part) * CH
                block = self.kept.take((2, L, size, H), torch.float32)
                assert block is not None
                lease = Lease(self.kept, block.copy_(rows[:, :, first : first + size]))
                self.store.leases.append(lease)
                for record in part:
                    at = record.start - first
                    self.store.objects[record.key] = Reader(record, block[:, :, at : at + CH], lease=lease)
        else:
            for record in records:
                dies = dies_at if record.start == doomed * CH else L
                self.store.objects[record.key] = Reader(record, rows[:, :, record.start : record.start + CH].contiguous(), dies)
        end, start = len(ids) - N, rng.choice([0, N])
        load = LoadRequest(uid, str(uid), "", start, end, tuple(blocks[:-1]), tuple(c.digest for c in chunks), tokens)
        return ids, load, RequestStep(uid, str(uid), "", end, end + N, 0, tuple(blocks), True)


def run(
    device: str,
    host_bytes: int,
    steps: int,
    seed: int,
    *,
    rests: float = 0.0,
    resting_bytes: int | None = None,
    ahead_bytes: int = 0,
) -> dict[str, int]:
    rig = Rig(device, host_bytes, resting_bytes, ahead_bytes)
    try:
        return work_through(rig, host_bytes, steps, random.Random(seed), rests, tells=ahead_bytes > 0)
    finally:
        rig.close()
        assert rig.left == (0, 0, 0)


def work_through(rig: Rig, host_bytes: int, steps: int, rng: random.Random, rests: float, tells: bool = False) -> dict[str, int]:
    count = dict.fromkeys(("good", "failed", "resting", "early", "wholes"), 0)
    for number in range(steps):
        free = rng.sample(range(BLOCKS), BLOCKS)
        work = []
        for i in range(4):
            length = rng.randrange(1, 5) * (CH // N)
            blocks, free = free[:length], free[length:]
            work.append(rig.sequence(rng, 4 * number + i, blocks, rng.choice([L, L, rng.randrange(L)]), rng.random() < rests))
        tracks = {
            request.uid: RequestTrack(request.uid, request.request_id, "", block_ids=list(request.block_ids)) for _, _, request in work
        }
        step = Step(number + 1, tuple(r for _, _, r in work), loads=tuple(load for _, load, _ in work))
        written = torch.tensor([b for _, _, r in work for b in r.block_ids], device=rig.device)
        last = torch.tensor([r.block_ids[-1] for _, _, r in work], device=rig.device)
        computed = [
            torch.stack(
                [torch.stack([row_values(ids[-N:], layer, plane).view(N, HEADS, D) for plane in range(2)]) for ids, _, _ in work]
            ).to(rig.device)
            for layer in range(L)
        ]
        where = [torch.tensor(load.block_ids[load.start // N :], device=rig.device) for _, load, _ in work]
        seen: list[list[torch.Tensor]] = []
        if rig.cuda:
            torch.cuda.synchronize()
            # A whole load waits for its copy. In the first step kernels are compiled and memory is locked.
            torch.cuda.set_sync_debug_mode("error" if number and host_bytes > 1 << 20 else "default")
        try:
            rig.kv.begin(step)
            rig.kv.start([(tracks[r.uid], r.end // CH - 1) for _, _, r in work])
            with torch.inference_mode() if number % 2 else nullcontext():
                if rig.cuda:
                    torch.cuda._sleep(SLOW)  # steps before this one still write to these blocks
                told = [load.uid for _, load, _ in work if tells and rng.random() < 0.7 and rig.tell(load)]
                for page in rig.pages:
                    page.index_fill_(0, written, -7.0)  # indexing with a number would copy the number to the device and wait
                if told and rng.random() < 0.2:
                    rig.loads.forget_early()  # a step without loads came between
                    told = []
                rig.loads.begin(step.loads)
                rig.store.let_go()
                for layer in range(L):
                    rig.loads.layer(layer)
                    seen.append([rig.pages[layer][blocks] for blocks in where])
                    rig.pages[layer][last] = computed[layer]
                    rig.kv.layer_done(layer)
                    if rig.cuda and layer == 1:
                        torch.cuda._sleep(SLOW)
                outcomes = rig.loads.end()
            rig.kv.commit(step.number, ())
            staged = {r.uid: [stage for _, stage in rig.kv.take(tracks[r.uid], r.end)][-1]() for _, _, r in work}
            rig.kv.end()
        finally:
            if rig.cuda:
                torch.cuda.set_sync_debug_mode("default")
        for i, ((ids, load, request), outcome) in enumerate(zip(work, outcomes, strict=True)):
            piece = staged[request.uid]
            assert piece is not None
            piece.ready.synchronize()
            doomed = min(rig.store.objects[chunk_key(CacheKind.KV, rig.g, d, "")].dies_at for d in load.digests) < L
            assert (outcome.problem is not None) == (doomed and outcome.layerwise), outcome.problem
            count["failed"] += outcome.problem is not None
            count["resting"] += outcome.resting
            assert outcome.early == (load.uid in told)
            count["early"] += outcome.early
            if outcome.problem is None:
                count["good"] += 1
                for layer in range(L):
                    for plane in range(2):
                        rows = seen[layer][i][:, plane].reshape(-1, H).cpu()
                        assert torch.equal(rows, row_values(ids[load.start : load.end], layer, plane)), f"read too early: layer {layer}"
                        whole = row_values(ids[-CH:], layer, plane)
                        skipped = max(0, load.start - (len(ids) - CH))  # blocks of the engine's own, which hold nothing here
                        assert torch.equal(piece.host[plane, layer, skipped:], whole[skipped:]), f"left too early: layer {layer}"
            piece.release()
            rig.kv.release(tracks[request.uid])
        rig.store.objects.clear()
    return {**count, "wholes": rig.wholes}


@pytest.mark.parametrize("host_bytes", [64 << 20, 600 << 10], ids=["room", "little room"])
def test_loaded_layers_are_there_when_they_are_read(host_bytes: int) -> None:  # L9 L15 L47
    count = run("cuda", host_bytes, 25, 1)
    assert count["good"] > 30 and count["failed"] > 5 and count["resting"] == 0 and (count["wholes"] > 5) == (host_bytes < 1 << 20)


@pytest.mark.parametrize("resting_bytes", [None, 100 << 10], ids=["one part a layer", "many parts"])
@pytest.mark.parametrize("rests", [1.0, 0.5], ids=["all in memory", "some in memory"])
def test_loads_from_where_chunks_lie(rests: float, resting_bytes: int | None) -> None:  # L15 L17 L42 L47
    count = run("cuda", 64 << 20, 25, 2, rests=rests, resting_bytes=resting_bytes)
    assert count["good"] > 60 and count["wholes"] == 0
    assert count["resting"] == 100 if rests == 1 else 20 < count["resting"] < 80


@pytest.mark.parametrize("resting_bytes", [None, 100 << 10], ids=["one part a layer", "many parts"])
@pytest.mark.parametrize("rests", [1.0, 0.5], ids=["all in memory", "some in memory"])
def test_loads_that_begin_before_their_blocks_are_known(rests: float, resting_bytes: int | None) -> None:  # L14 L15 L17 L42 L47
    count = run("cuda", 64 << 20, 25, 3, rests=rests, resting_bytes=resting_bytes, ahead_bytes=12 * (resting_bytes or 32 << 20))
    assert count["good"] > 60 and count["wholes"] == 0 and count["early"] > 10


@pytest.mark.parametrize("layers", [0, 2, L])
def test_memory_is_let_go_when_the_copies_are_over_and_not_before(layers: int) -> None:  # L42 L43
    """Also of a load that was given up: what it had queued still reads the memory."""
    rig = Rig("cuda", 1 << 20)
    try:
        ids, load, _ = rig.sequence(random.Random(5), 1, list(range(20, 36)), L, rests=True)
        for slow in (False, True):  # kernels are compiled in the first round
            for page in rig.pages:
                page.fill_(-7.0)
            torch.cuda.synchronize()
            held = [lease.holders for lease in rig.store.leases]
            torch.cuda.set_sync_debug_mode("error" if slow else "default")
            try:
                if slow:
                    with torch.cuda.stream(rig.streams.load):
                        torch.cuda._sleep(300 * SLOW)
                rig.loads.begin([load])
                for layer in range(layers):
                    rig.loads.layer(layer)
                (outcome,) = rig.loads.end(lost=True)
                waits = rig.loads.poll()
                now = [lease.holders for lease in rig.store.leases]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert outcome.resting and (outcome.problem is None) == (layers == L)
            if slow:
                assert waits and all(a > b for a, b in zip(now, held, strict=True)), "let go while the device had copies to make"
            torch.cuda.synchronize()
            assert not rig.loads.poll() and [lease.holders for lease in rig.store.leases] == held
            for layer in range(layers):
                for plane in range(2):
                    rows = rig.pages[layer][list(load.block_ids[load.start // N :]), plane].reshape(-1, H).cpu()
                    assert torch.equal(rows, row_values(ids[load.start : load.end], layer, plane))
        with torch.cuda.stream(rig.streams.load):
            torch.cuda._sleep(100 * SLOW)
        rig.loads.begin([load])
        rig.store.let_go()
        rig.loads.close()  # waits
        assert rig.kept.outstanding == 0
    finally:
        rig.close()
        assert rig.left == (0, 0, 0)
