"""Ways to bring KV of all layers from pages to chunk objects in pinned host memory, and back; 8,192 tokens of a Llama 8B's shape.

Timed by the host's clock from end to end, against a pinned copy of as many bytes. Each way's result is compared once, bit by bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks import cudart
from benchmarks.bench_paged_copy import HEADS, LAYERS, SIZE, N, pages
from benchmarks.harness import Case, Context, benchmark
from qcap import kernels

TOKENS, CHUNK, BLOCKS = 8192, 256, 1024
SLOTS = 2  # of one chunk, which is 32 MiB


@dataclass
class Setting:
    """Pages, and the chunks of a request in them: block ids on the device, and pinned objects ``[2, L, CH, H]``."""

    layout: str
    views: list[list[torch.Tensor]]
    table: kernels.PageTable
    host_ids: torch.Tensor
    ids: list[torch.Tensor]
    objects: list[torch.Tensor]
    slots: list[torch.Tensor]
    streams: list[torch.cuda.Stream]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.objects)


def setting(layout: str) -> Setting:
    """About 3 GiB on the device, 1 GiB of it pages in use, and 1 GiB pinned."""
    views = pages(layout, BLOCKS)
    host_ids = torch.randperm(BLOCKS)[: TOKENS // N]
    ids = [part.cuda() for part in host_ids.split(CHUNK // N)]
    shape = (2, LAYERS, CHUNK, HEADS * SIZE)
    objects = [torch.empty(shape, dtype=torch.bfloat16, pin_memory=True) for _ in ids]
    slots = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(SLOTS)]
    streams = [torch.cuda.Stream() for _ in range(SLOTS)]
    return Setting(layout, views, kernels.PageTable(views), host_ids, ids, objects, slots, streams)


def to_host_ways(s: Setting) -> Iterator[tuple[str, Callable[[], None]]]:
    """(what, how): all chunks from pages to their objects."""
    (first, *_), (slot, *_) = s.streams, s.slots

    def layer_copies() -> None:
        with torch.cuda.stream(first):
            for ids, item in zip(s.ids, s.objects, strict=True):
                kernels.gather_pages(s.table, ids, slot)
                for plane in range(2):
                    for layer in range(LAYERS):
                        item[plane, layer].copy_(slot[plane, layer], non_blocking=True)

    def chunk_copies(streams: int) -> None:
        for number, (ids, item) in enumerate(zip(s.ids, s.objects, strict=True)):
            with torch.cuda.stream(s.streams[number % streams]):
                kernels.gather_pages(s.table, ids, s.slots[number % streams])
                item.copy_(s.slots[number % streams], non_blocking=True)

    def straight() -> None:
        for ids, item in zip(s.ids, s.objects, strict=True):
            kernels.gather_pages(s.table, ids, item)

    yield "gather, a copy a plane and layer, 1 stream", layer_copies
    yield "gather, a copy a chunk, 1 stream", lambda: chunk_copies(1)
    yield "gather, a copy a chunk, 2 streams", lambda: chunk_copies(2)
    yield "gather kernel writes to pinned memory", straight
    yield from plain_copies(s, to_host=True)


def from_host_ways(s: Setting) -> Iterator[tuple[str, Callable[[], None]]]:
    """(what, how): all chunks from their objects to pages."""
    tables = [kernels.PageTable([layer]) for layer in s.views]
    all_ids = torch.cat(s.ids)
    layer_slots = [s.slots[0].new_empty(2, 1, TOKENS, HEADS * SIZE) for _ in range(SLOTS)]

    def layer_slot() -> None:
        for layer, table in enumerate(tables):
            slot = layer_slots[layer % SLOTS]
            with torch.cuda.stream(s.streams[layer % SLOTS]):
                for number, item in enumerate(s.objects):
                    for plane in range(2):
                        slot[plane, 0, number * CHUNK : (number + 1) * CHUNK].copy_(item[plane, layer], non_blocking=True)
                kernels.scatter_pages(table, all_ids, slot)

    def chunk_slot(streams: int) -> None:
        for number, (ids, item) in enumerate(zip(s.ids, s.objects, strict=True)):
            with torch.cuda.stream(s.streams[number % streams]):
                s.slots[number % streams].copy_(item, non_blocking=True)
                kernels.scatter_pages(s.table, ids, s.slots[number % streams])

    def straight() -> None:
        for ids, item in zip(s.ids, s.objects, strict=True):
            kernels.scatter_pages(s.table, ids, item)

    yield "a copy a plane and chunk, scatter a layer, 2 streams", layer_slot
    yield "a copy a chunk, scatter, 1 stream", lambda: chunk_slot(1)
    yield "a copy a chunk, scatter, 2 streams", lambda: chunk_slot(2)
    yield "scatter kernel reads pinned memory", straight
    yield from plain_copies(s, to_host=False)


def plain_copies(s: Setting, *, to_host: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Without a kernel: a copy for each run of bytes that is contiguous on both sides; in NHD that is a plane of a block."""
    view = s.views[0][0]
    run_bytes = N * HEADS * SIZE * view.element_size()
    if view.stride()[1:] != (SIZE, HEADS * SIZE, 1):
        print(f"{s.layout}: runs of {SIZE * view.element_size()} bytes: not copied run by run", file=sys.stderr)
        return
    blocks = s.host_ids.view(len(s.objects), -1).numpy()  # [chunk, block of it]
    starts = np.array([[layer[plane].data_ptr() for layer in s.views] for plane in range(2)])  # [plane, layer]
    at_pages = starts[None, :, :, None] + blocks[:, None, None, :] * (view.stride(0) * view.element_size())
    inside = np.arange(at_pages[0].size).reshape(at_pages[0].shape) * run_bytes  # an object's planes, layers and blocks follow each other
    at_host = np.array([item.data_ptr() for item in s.objects])[:, None, None, None] + inside
    targets, sources = (at_host, at_pages) if to_host else (at_pages, at_host)
    whole = cudart.Copies(targets.ravel(), sources.ravel(), run_bytes, to_host=to_host)
    stream = s.streams[0]
    yield f"{at_pages.size} plain copies of {run_bytes >> 10} KiB", lambda: whole.one_by_one(stream)
    missing = cudart.why_no_batches()
    if missing:
        print(missing, file=sys.stderr)
        return
    by_chunk = [cudart.Copies(t.ravel(), f.ravel(), run_bytes, to_host=to_host) for t, f in zip(targets, sources, strict=True)]

    def batches() -> None:
        for copies in by_chunk:
            copies.batch(stream)

    yield f"a batch of {at_pages[0].size} copies a chunk", batches
    yield "one batch of all copies", lambda: whole.batch(stream)


def check_to_host(s: Setting, run: Callable[[], None]) -> None:
    """Every object is written, and holds what a gather to the device gives."""
    for item in s.objects:
        item.fill_(float("nan"))
    torch.cuda.synchronize()
    run()
    torch.cuda.synchronize()
    for ids, item in zip(s.ids, s.objects, strict=True):
        kernels.gather_pages(s.table, ids, s.slots[0])
        assert torch.equal(item.to(s.slots[0].device), s.slots[0]), "a chunk on the host differs from its pages"


def check_from_host(s: Setting, run: Callable[[], None]) -> None:
    """Every page is written, and holds its object's rows."""
    for item in s.objects:
        item.copy_(torch.randn(item.shape, device=s.slots[0].device, dtype=item.dtype))
    for layer in s.views:
        for plane in layer:
            plane.fill_(float("nan"))
    torch.cuda.synchronize()
    run()
    torch.cuda.synchronize()
    for ids, item in zip(s.ids, s.objects, strict=True):
        kernels.gather_pages(s.table, ids, s.slots[0])
        assert torch.equal(item.to(s.slots[0].device), s.slots[0]), "a chunk's pages differ from what lies on the host"


@benchmark(tests=("tests/kernels/test_paged_copy.py",))
def cases(context: Context) -> Iterator[Case]:
    """Both layouts, both directions."""
    for layout in ("NHD", "K|V"):
        s = setting(layout)
        ways = (("pinned", "to host", to_host_ways, check_to_host), ("from_pinned", "from host", from_host_ways, check_from_host))
        for rate, direction, each, check in ways:
            floor = context.copy_us(s.nbytes, rate)
            for what, how in each(s):
                yield Case(
                    "to_host",
                    f"{direction} {layout}: {what}",
                    how,
                    s.nbytes,
                    rate=rate,
                    clock="host",
                    floor=floor,
                    floor_name="pinned copy",
                    check=lambda s=s, how=how, check=check: check(s, how),  # type: ignore[misc]
                    repeats=10,
                )
