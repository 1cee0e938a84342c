"""Layerwise loading and storing on a real GPU: three streams, page-locked memory, and a host that waits for nothing."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from qcap.connectors import PagedConnector
from qcap.geometry import Geometry, Rope
from qcap.kernels import PageTable
from qcap.kinds import CacheKind
from qcap.layerwise import LayerwiseEngine, LoadGear, MemoryLayers, streams_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

N, CH, HEADS, D, LAYERS, BLOCKS, CHUNKS = 16, 64, 2, 64, 6, 96, 5
GEO = Geometry(
    model="org/m", layer_names=tuple(f"l{i}" for i in range(LAYERS)), num_q_heads=4, num_kv_heads=HEADS, head_size=D, dtype="bfloat16",
    block_size=N, chunk_size=CH, rope=Rope(rotary_dim=D),
)  # fmt: skip


class PinnedPool:
    """Page-locked pieces; one that comes back is used again as soon as its event is over."""

    def __init__(self) -> None:
        self.late: list[tuple[object, torch.Tensor]] = []
        self.lent = 0

    def take(self, shape, dtype):
        self.lent += 1
        for i, (after, piece) in enumerate(self.late):
            if piece.shape == torch.Size(shape) and (after is None or after.query()):
                del self.late[i]
                return piece
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def give(self, piece, after=None):
        self.lent -= 1
        self.late.append((after, piece))


def make(seed: int, staging: int, loader=None):
    device = torch.device("cuda", 0)
    rng = torch.Generator(device).manual_seed(seed)
    pages = [torch.randn((2, BLOCKS, N, HEADS, D), generator=rng, device=device).bfloat16() for _ in range(LAYERS)]
    table = PageTable([[page[p].transpose(1, 2) for p in range(2)] for page in pages])
    pool, store = PinnedPool(), MemoryLayers(LAYERS)
    gear = LoadGear(streams_for(device), PagedConnector(table, staging_tokens=staging), pool, loader=loader, ahead=2)
    return LayerwiseEngine(GEO, CacheKind.KV, store, gear), pages, pool, store


def rows(page: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    return page[:, blocks].reshape(2, -1, HEADS * D)


def busy() -> None:
    """Enough device work that the host is far ahead."""
    a = torch.randn((4096, 4096), device="cuda")
    for _ in range(20):
        a = a @ a * 1e-3


@pytest.mark.parametrize("staging", [0, 48, 10_000])
@pytest.mark.parametrize("threads", [False, True])
def test_there_and_back(staging: int, threads: bool) -> None:  # L14 L17 L42 L47
    tokens = list(range(CHUNKS * CH + 5))
    blocks, others = (random.Random(s).sample(range(BLOCKS), CHUNKS * CH // N + 1) for s in (1, 2))
    used = CHUNKS * CH // N
    with ThreadPoolExecutor(1) as loader:
        engine, pages, pool, store = make(1, staging, loader if threads else None)
        new = [torch.randn((2, BLOCKS, N, HEADS, D), device="cuda").bfloat16() for _ in range(LAYERS)]
        for warm in (True, False):  # kernels are compiled and memory is locked in the first round
            generator = engine.store_layer(tokens, blocks, salt=f"w{warm}")
            busy()
            torch.cuda.set_sync_debug_mode("default" if warm else "error")
            for page, late in zip(pages, new, strict=True):
                page.copy_(late)  # the layer is computed, late
                next(generator)
            next(generator)
            for page in pages:
                page.zero_()  # the next step
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            store.poll()
        assert pool.lent == 0
        wanted = [rows(late, blocks[:used]) for late in new]
        for warm in (True, False):
            for page in pages:
                page.zero_()
            busy()
            torch.cuda.set_sync_debug_mode("default" if warm else "error")
            generator = engine.retrieve_layer(tokens, others, salt="wFalse")
            assert next(generator) == CHUNKS * CH
            seen = []
            for page in pages:
                next(generator)
                seen.append(page.clone())  # the layer computes
            mask = next(generator)
            torch.cuda.set_sync_debug_mode("default")
            assert mask.sum() == CHUNKS * CH
            assert all(torch.equal(rows(page, others[:used]), want) for page, want in zip(seen, wanted, strict=True))
        torch.cuda.synchronize()
        assert pool.lent == 0


def test_closed_in_the_middle() -> None:  # L43
    tokens, blocks = list(range(CHUNKS * CH)), list(range(CHUNKS * CH // N))
    engine, pages, pool, store = make(3, 48)
    list(engine.store_layer(tokens, blocks))
    torch.cuda.synchronize()
    store.poll()
    for steps in range(1, LAYERS + 2):
        generator = engine.retrieve_layer(tokens, blocks)
        busy()
        for _ in range(steps):
            next(generator)
        generator.close()
        for page in pages:
            page.fill_(7)  # new owners: no late copy may come after this
        torch.cuda.synchronize()
        assert all((page == 7).all() for page in pages) and pool.lent == 0
