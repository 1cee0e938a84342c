"""A layer at a time: device staging, the streams' order, and the two generators. What every layerwise connector is made of."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from qcap import kernels
from qcap.connectors.base import Connector, Group, Objects, Spans
from qcap.connectors.formats import LayerFormat, rows_of
from qcap.connectors.slots import BlockPlan, block_plan, has_kernels, in_reach
from qcap.connectors.transfer import to_device
from qcap.errors import ShapeError
from qcap.kernels import PageTable

LoadSteps = Generator[None, Objects | None, None]
StoreSteps = Generator[None, None, None]


class LayerConnector(Connector):
    """Moves one layer at a time, on streams of its own.

    Two generators do it, for any slots. ``batched_to_gpu`` is given layer i's host objects by ``send`` and yields L + 2 times;
    ``batched_from_gpu`` yields L + 1 times. The host never waits: a stream waits for an event. Host objects are held until their copy
    is done. Loads of several requests may run side by side, and so may stores: each layer of each goes through the one buffer in the
    stream's order.

    The two plain steps beneath, for whole blocks and for a caller with streams and an order of its own: ``to_device`` and ``from_device``.
    Several threads may call them. A caller with staging of its own too takes them apart: ``new_staging``, ``copy``, ``write``.

    Args:
        table: the pages.
        staging_tokens: as for every connector, rounded up to whole blocks: for a buffer for loads and one for stores.
        format, device_module: as for every connector.
        store_staging: False makes no buffer for stores: for pages that are only loaded into.
    """

    layerwise = True

    def __init__(
        self,
        table: PageTable,
        *,
        staging_tokens: int = 0,
        format: LayerFormat | None = None,
        device_module: Any = None,
        store_staging: bool = True,
    ) -> None:
        super().__init__(table, staging_tokens=staging_tokens, format=format, device_module=device_module)
        self.staging_tokens = -(-staging_tokens // table.block_size) * table.block_size
        self._kernels = has_kernels(table)
        self._held: deque[tuple[Any, Any]] = deque()
        self._load_buffer = self._new_load_buffer()
        self._store_buffer = self._new_buffer() if store_staging else None
        self._load_lock, self._store_lock = threading.Lock(), threading.Lock()  # one thread in a staging buffer at a time
        self._planes = [PageTable([[layer[p]] for layer in table.views]) for p in range(table.num_planes)]  # rows of one plane lie together

    def _new_load_buffer(self) -> torch.Tensor | None:
        return self._new_buffer()

    def _new_buffer(self) -> torch.Tensor | None:
        return self.new_staging(self.staging_tokens) if self.use_gpu else None

    def new_staging(self, tokens: int) -> torch.Tensor:
        """A staging buffer, flat, so that any number of tokens up to its size is one contiguous tensor of either format."""
        with torch.inference_mode(False):
            return torch.empty(self.num_planes * tokens * self.hidden, dtype=self.dtype, device=self.table.device)

    @property
    def staging(self) -> tuple[torch.Tensor, ...]:
        """The buffers on the device: those of loads and of stores, as far as there are any."""
        return tuple(buffer for buffer in (self._load_buffer, self._store_buffer) if buffer is not None)

    @property
    def load_stream(self) -> Any:
        """What loads run on; None on the CPU."""
        return self.streams.load

    @property
    def store_stream(self) -> Any:
        """What stores run on; None on the CPU."""
        return self.streams.store

    @property
    def objects_held(self) -> int:
        """Layers of host objects whose copies are not known to be done."""
        self._let_go()
        return len(self._held)

    def batched_to_gpu(
        self, starts: Sequence[int], ends: Sequence[int], *, slot_mapping: torch.Tensor | None = None, sync: bool | None = None
    ) -> LoadSteps:
        """Load chunks ``[starts[i], ends[i])`` of a request, a layer at a time.

        Args:
            starts, ends: the chunks' bounds in tokens of the request.
            slot_mapping: integer ``[T]``, the slot of each token of the request; on the host (there whole blocks are seen) or the device.
            sync: True for the last request of a batch: the compute stream then waits for each layer before it is told to go on.

        Returns:
            A generator of L + 2 yields. ``next`` sets it up; ``send(objects of layer i)`` queues layer i, after making compute wait for
            layer i - 1; one ``next`` more makes compute wait for the last layer.

        Raises:
            ShapeError: an argument is missing (it is named) or wrong; while running, an object of another format, shape or dtype.
        """
        spans, slots = self._spans(starts, ends, slot_mapping)
        return self._load(spans, slots, _sync(sync))

    def batched_from_gpu(
        self,
        memory_objs: Sequence[Objects],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        slot_mapping: torch.Tensor | None = None,
        sync: bool | None = None,
    ) -> StoreSteps:
        """Store chunks ``[starts[i], ends[i])`` of a request to ``memory_objs[layer][chunk]``, a layer at a time.

        Args:
            memory_objs: L lists of one object a chunk, written.
            starts, ends, slot_mapping: as for :meth:`batched_to_gpu`.
            sync: True for the first request of a batch: at the end compute waits until the stores queued so far have read the pages.

        Returns:
            A generator of L + 1 yields: step i queues layer i, the last one ends the store. The objects are whole once an event of
            ``store_event()`` is done.

        Raises:
            ShapeError: as for :meth:`batched_to_gpu`.
        """
        spans, slots = self._spans(starts, ends, slot_mapping)
        if len(memory_objs) != self.num_layers:
            raise ShapeError(f"memory_objs: wanted one list a layer, {self.num_layers}; got {len(memory_objs)}")
        return self._store(memory_objs, spans, slots, _sync(sync))

    def prepare(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Block ids, int64 on the pages' device, for :meth:`to_device` and :meth:`from_device`; a slice is good too. -1: leave it out.

        The copy is queued on the current stream.
        """
        return to_device(torch.from_numpy(np.array(block_ids, dtype=np.int64)), self.table.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue ``target.copy_(source)`` on the current stream; both contiguous, on the host (page-locked for a GPU) or the device."""
        target.copy_(source, non_blocking=True)

    def write(self, layer: int, staged: torch.Tensor, blocks: torch.Tensor) -> None:
        """Queue rows ``[planes, T, H]``, contiguous on the device, into the pages of one layer, on the current stream."""
        if self._kernels and torch.is_inference_mode_enabled():  # a load's many calls, the engine's thread waits for each
            kernels.scatter_pages(self.table, blocks, staged.unsqueeze(1), layer)
        else:  # pages made in inference mode cannot be written outside of it; others can be inside
            with torch.inference_mode():
                block_plan(blocks, self.table).write(self.table, layer, staged)

    def warm_up(self) -> None:
        """Compile what loads of whole blocks launch, so that no load waits for it. No page is touched; the work is queued as any other."""
        rows = self.new_staging(self.block_size).view(self.num_planes, self.block_size, self.hidden)
        ids = self.prepare([-1, -1])
        for part in (ids[:1], ids[1:]):  # kernels are compiled for pointers that are multiples of 16 bytes, and for others
            self.write(0, rows, part)

    @torch.inference_mode()
    def to_device(self, layer: int, source: torch.Tensor, blocks: torch.Tensor) -> None:
        """Queue rows of one layer into its pages, on the current stream: through staging, or straight from where they lie without.

        Args:
            layer: its index.
            source: ``[planes, T, H]`` on the host, whatever the connector's format is; held by the caller until the copy is done.
            blocks: of :meth:`prepare`, ``T / N`` of them.

        Raises:
            ShapeError: rows of another shape or dtype.
        """
        self._check_blocks(source, blocks.numel() * self.block_size)
        if self._load_buffer is None and in_reach(self.table, source):
            for table, plane in zip(self._planes, source, strict=True):
                kernels.scatter_pages(table, blocks, plane[None, None], layer)
            return
        with self._load_lock:
            for start, part, staged in self._parts(self._load_buffer, blocks):
                copy_planes(staged, source[:, start : start + staged.shape[1]])
                block_plan(part, self.table).write(self.table, layer, staged)

    @torch.inference_mode()
    def from_device(self, layer: int, blocks: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        """Queue rows of one layer out of its pages, on the current stream, to ``targets``: ``[planes, CH, H]`` each, one after the other.

        Raises:
            ShapeError: rows of another shape or dtype, or blocks that do not fill them.
        """
        if not targets:
            return
        size = targets[0].shape[1]
        for target in targets:
            self._check_blocks(target, size)
        if blocks.numel() * self.block_size != size * len(targets):
            raise ShapeError(f"{blocks.numel()} blocks of {self.block_size} tokens do not fill {len(targets)} chunks of {size}")
        if self._store_buffer is None and all(in_reach(self.table, target) for target in targets):
            per_chunk = size // self.block_size
            for index, target in enumerate(targets):
                part = blocks[index * per_chunk : (index + 1) * per_chunk]
                for table, plane in zip(self._planes, target, strict=True):
                    kernels.gather_pages(table, part, plane[None, None], layer)
            return
        with self._store_lock:
            for start, part, staged in self._parts(self._store_buffer, blocks):
                block_plan(part, self.table).read(self.table, layer, staged)
                end = start + staged.shape[1]
                for index in range(start // size, -(-end // size)):
                    first, last = max(start, index * size), min(end, (index + 1) * size)
                    copy_planes(targets[index][:, first - index * size : last - index * size], staged[:, first - start : last - start])

    def _parts(self, buffer: torch.Tensor | None, blocks: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(first token, block ids, ``[planes, t, H]`` on the device), as many blocks at a time as the staging buffer takes."""
        n = self.block_size
        at_once = max(blocks.numel(), 1) if buffer is None else self.staging_tokens // n
        for first in range(0, blocks.numel(), at_once):
            part = blocks[first : first + at_once]
            shape = (self.num_planes, part.numel() * n, self.hidden)
            if buffer is None:
                yield first * n, part, torch.empty(shape, dtype=self.dtype, device=self.table.device)
            else:
                yield first * n, part, buffer[: math.prod(shape)].view(shape)

    def _check_blocks(self, rows: torch.Tensor, tokens: int) -> None:
        wanted = (self.num_planes, tokens, self.hidden)
        if tuple(rows.shape) != wanted or rows.dtype != self.dtype or not all(plane.is_contiguous() for plane in rows):
            got = f"{tuple(rows.shape)} of {rows.dtype}, strides {rows.stride()}"
            raise ShapeError(f"a layer's rows are {wanted} of {self.dtype}, each plane contiguous; got {got}")

    def load_event(self) -> Any:
        """An event after all loads queued so far; None on the CPU, where they are done."""
        return self.streams.record(self.load_stream)

    def store_event(self) -> Any:
        """An event after all stores queued so far; None on the CPU, where they are done."""
        return self.streams.record(self.store_stream)

    @torch.inference_mode()  # pages made in inference mode cannot be written outside of it; others can be inside
    def _load(self, spans: Spans, slots: torch.Tensor, sync: bool) -> LoadSteps:
        stream = self.load_stream
        self._on_stream(stream, slots)  # an earlier step may still read the pages that are filled now
        groups = self._groups(spans, slots, stream)
        done: Any = None
        for layer in range(self.num_layers):
            objects = yield
            if sync:
                self.streams.wait(self.streams.compute(), done)
            rows = self._rows(objects, spans, layer)
            with self.streams.on(stream):
                for group in groups:
                    self._put(group, rows, layer)
            done = self._hold(stream, objects)
        yield
        if sync:
            self.streams.wait(self.streams.compute(), done)
        yield

    @torch.inference_mode()
    def _store(self, memory_objs: Sequence[Objects], spans: Spans, slots: torch.Tensor, sync: bool) -> StoreSteps:
        stream = self.store_stream
        self._on_stream(stream, slots)
        groups = self._groups(spans, slots, stream)
        for layer in range(self.num_layers):
            rows = self._rows(memory_objs[layer], spans, layer)
            self.streams.wait(stream, self.streams.record(self.streams.compute()))
            with self.streams.on(stream):
                for group in groups:
                    self._take(group, rows, layer)
            self._hold(stream, memory_objs[layer])
            self._stored(memory_objs[layer], spans)
            yield
        if sync:
            self.streams.wait(self.streams.compute(), self.store_event())
        yield

    def _stored(self, objects: Objects, spans: Spans) -> None:
        """One layer has been queued."""

    def _rows(self, objects: Objects | None, spans: Spans, layer: int) -> list[torch.Tensor]:
        if objects is None:
            raise ShapeError(f"layer {layer}: no host objects came: send() them, next() sends none")
        if len(objects) != len(spans):
            raise ShapeError(f"layer {layer}: wanted one object a chunk, {len(spans)}; got {len(objects)}")
        return [
            rows_of(value, self.format, end - start, self.hidden, self.table.dtype, f"layer {layer}, chunk {index}")
            for index, (value, (start, end)) in enumerate(zip(objects, spans, strict=True))
        ]

    def _staged(self, buffer: torch.Tensor | None, tokens: int) -> torch.Tensor:
        """``[planes, tokens, H]`` on the device, the way round that objects are: over the beginning of a staging buffer, or for once."""
        shape = self.format.shape(tokens, self.hidden)
        if buffer is None:
            return self.format.rows(torch.empty(shape, dtype=self.dtype, device=self.table.device))
        return self.format.rows(buffer[: math.prod(shape)].view(shape))

    def _put(self, group: Group, rows: list[torch.Tensor], layer: int) -> None:
        """Objects of one group to the pages of ``layer``, on the current stream."""
        if self._load_buffer is None and self._reachable(group, rows):
            group.plan.write(self.table, layer, rows[group.chunks.start])
            return
        staged = self._staged(self._load_buffer, group.tokens)
        for index, begin in zip(group.chunks, group.begins, strict=True):
            self._copy(rows[index], staged[:, begin : begin + rows[index].shape[1]])
        group.plan.write(self.table, layer, staged)

    def _take(self, group: Group, rows: list[torch.Tensor], layer: int) -> None:
        """The pages of ``layer`` to the objects of one group, on the current stream."""
        if self._store_buffer is None and self._reachable(group, rows):
            group.plan.read(self.table, layer, rows[group.chunks.start])
            return
        staged = self._staged(self._store_buffer, group.tokens)
        group.plan.read(self.table, layer, staged)
        for index, begin in zip(group.chunks, group.begins, strict=True):
            self._copy(staged[:, begin : begin + rows[index].shape[1]], rows[index])

    def _reachable(self, group: Group, rows: list[torch.Tensor]) -> bool:
        """Whether the one chunk of a group without staging can be moved where it lies."""
        one = rows[group.chunks.start]
        return one.device == self.table.device or (isinstance(group.plan, BlockPlan) and group.plan.takes(self.table, one))

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Between host and device, each copy one run of bytes: token-major rows at once, plane-major ones a plane at a time."""
        if self.format is LayerFormat.KV_2TD:
            for plane, into in zip(source, target, strict=True):
                into.copy_(plane, non_blocking=True)
        else:
            target.transpose(0, 1).copy_(source.transpose(0, 1), non_blocking=True)

    def _hold(self, stream: Any, objects: Any) -> Any:
        """Keep ``objects`` until what ``stream`` has been given so far is done; returns that event."""
        self._let_go()
        event = self.streams.record(stream)
        if event is not None:
            self._held.append((event, objects))
        return event

    def _let_go(self) -> None:
        while self._held and self._held[0][0].query():
            self._held.popleft()


def copy_planes(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)`` as plain memory copies: one, or one a plane. A strided copy to the host would make the host wait."""
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source, non_blocking=True)
        return
    for into, plane in zip(target, source, strict=True):
        into.copy_(plane, non_blocking=True)


def _sync(sync: bool | None) -> bool:
    if sync is None:
        raise ShapeError("sync is missing: say whether compute waits for this request, sync=True or sync=False")
    return bool(sync)
