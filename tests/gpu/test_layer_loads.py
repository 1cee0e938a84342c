"""On a CUDA GPU, without an engine: stored layers that arrive while the layers before them compute are there when they are read, and when
they leave again in the same step; nothing makes the host wait for the device.

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


class Reader:
    def __init__(self, record: ChunkRecord, tensor: torch.Tensor, dies_at: int) -> None:
        self.record, self.tensor, self.dies_at = record, tensor, dies_at

    def read(self, layer: int, out: torch.Tensor) -> torch.Tensor:
        time.sleep(random.random() * 0.002)
        if layer >= self.dies_at:
            raise OSError("the store has gone away")
        return out.copy_(self.tensor[:, layer])


class Store:
    def __init__(self) -> None:
        self.objects: dict[Any, Reader] = {}

    def open_layers(self, key: Any) -> Reader | None:
        return self.objects.get(key)


class Rig:
    def __init__(self, device: str, host_bytes: int) -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.g = Geometry(
            model="m", layer_names=tuple(f"l{i}" for i in range(L)), num_q_heads=HEADS, num_kv_heads=HEADS, head_size=D, dtype="float32",
            block_size=N, chunk_size=CH, rope=Rope(rotary_dim=D),
        )  # fmt: skip
        self.arena = HostArena(64 << 20, pinned=self.cuda, waits=True)
        self.pages = [torch.full((BLOCKS, 2, N, HEADS, D), -7.0, device=self.device) for _ in range(L)]
        s = self.pages[0].stride()
        planes = PlaneStrides(0, s[0], s[3], s[2], s[4]), PlaneStrides(s[1], s[0], s[3], s[2], s[4])
        layout = PagedLayout(name="B2NHD", blocks=BLOCKS, heads=HEADS, block_size=N, head_size=D, planes=planes)
        self.kv = KVFeature(self.g, self.pages, [layout] * L, PageStager(self.device, self.arena, slot_bytes=256 << 10))
        self.store, self.wholes = Store(), 0
        streams = SlowCopies(self.device) if self.cuda else NullStreams()
        self.loads = LayerLoads(
            self.g, self.store, self.kv.table, device=self.device, host_bytes=host_bytes, lowest=list, whole=self.whole, streams=streams,
        )  # type: ignore[arg-type]  # fmt: skip

    def whole(self, load: LoadRequest) -> None:
        self.wholes += 1
        for index in range(load.start // CH, -(-load.end // CH)):
            tensor = self.store.objects[chunk_key(CacheKind.KV, self.g, load.digests[index], "")].tensor
            first, last = max(load.start, index * CH), min(load.end, (index + 1) * CH)
            self.kv.put(load.block_ids[first // N : last // N], tensor[:, :, first - index * CH : last - index * CH])

    def sequence(self, rng: random.Random, uid: int, blocks: list[int], dies_at: int) -> tuple[torch.Tensor, LoadRequest, RequestStep]:
        """All chunks but the last block are stored, and loaded from a block of the first chunk on; the last block is computed."""
        ids = torch.randint(0, 1 << 14, (len(blocks) * N,))
        chunks, tokens = ChunkedTokenDatabase(CH).chunks(ids.tolist()), tuple(ids.tolist())
        rows = torch.stack([torch.stack([row_values(ids, layer, plane) for layer in range(L)]) for plane in range(2)])
        doomed = rng.randrange(len(chunks))
        for c in chunks:
            record = ChunkRecord(CacheKind.KV, self.g, c.start, tokens[c.start : c.end], c.digest, c.parent)
            dies = dies_at if c.index == doomed else L
            self.store.objects[record.key] = Reader(record, rows[:, :, c.start : c.end].contiguous(), dies)
        end, start = len(ids) - N, rng.choice([0, N])
        load = LoadRequest(uid, str(uid), "", start, end, tuple(blocks[:-1]), tuple(c.digest for c in chunks), tokens)
        return ids, load, RequestStep(uid, str(uid), "", end, end + N, 0, tuple(blocks), True)


def run(device: str, host_bytes: int, steps: int, seed: int) -> tuple[int, int, int]:
    rig, rng = Rig(device, host_bytes), random.Random(seed)
    good = failed = 0
    for number in range(steps):
        free = rng.sample(range(BLOCKS), BLOCKS)
        work = []
        for i in range(4):
            count = rng.randrange(1, 5) * (CH // N)
            blocks, free = free[:count], free[count:]
            work.append(rig.sequence(rng, 4 * number + i, blocks, rng.choice([L, L, rng.randrange(L)])))
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
            torch.cuda.set_sync_debug_mode("error" if host_bytes > 1 << 20 else "default")  # a whole load waits for its copy
        try:
            rig.kv.begin(step, [(tracks[r.uid], r.end // CH - 1) for _, _, r in work])
            with torch.inference_mode() if number % 2 else nullcontext():
                if rig.cuda:
                    torch.cuda._sleep(SLOW)  # steps before this one still write to these blocks
                for page in rig.pages:
                    page[written] = -7.0
                rig.loads.begin(step.loads)
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
            failed += outcome.problem is not None
            if outcome.problem is None:
                good += 1
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
    rig.loads.close()
    rig.kv.close()
    if rig.cuda:
        torch.cuda.synchronize()
    assert rig.arena.outstanding == 0 and rig.loads.arena.outstanding == 0
    rig.arena.close()
    return good, failed, rig.wholes


@pytest.mark.parametrize("host_bytes", [64 << 20, 600 << 10], ids=["room", "little room"])
def test_loaded_layers_are_there_when_they_are_read(host_bytes: int) -> None:  # L9 L15 L47
    good, failed, wholes = run("cuda", host_bytes, 25, 1)
    assert good > 30 and failed > 5 and (wholes > 5) == (host_bytes < 1 << 20)
