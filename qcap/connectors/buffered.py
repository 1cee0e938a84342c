"""vLLM's pages through two buffers in which keys are moved to new positions: what blending loads through.

Cached segments of a prompt stand at the positions they were stored at, and between them lie tokens that were never cached (gaps). Layer by
layer the segments go into a buffer, their keys are rotated to where they stand now, gaps are zeroed, compute reads and repairs the
buffer, and then it goes to the pages. Two buffers take turns, so that layer i + 1 comes in while compute works on layer i.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from qcap import kernels
from qcap.connectors.base import Objects, Spans
from qcap.connectors.formats import LayerFormat, LayerObject
from qcap.connectors.layer import LayerConnector, LoadSteps
from qcap.connectors.registry import register
from qcap.connectors.slots import plan
from qcap.connectors.transfer import to_device
from qcap.errors import ConfigError, ShapeError, StepOrderError
from qcap.geometry import Rope
from qcap.kernels import PageTable


@register("vllm", "cuda", "xpu", layerwise=True, blending=True)
class BufferedConnector(LayerConnector):
    """Layer by layer through two buffers ``[2, staging_tokens, H]``.

    One load at a time. Step i of it (of L + 2) puts layer i's objects into a buffer, rotates layer i - 1's keys and shows it to
    :meth:`get_kv`, and copies layer i - 2 to the pages, gaps included, once compute is done with it. All of it is queued on the load
    stream. Compute waits for a layer's rotation whatever ``sync`` says, since it reads that very buffer; ``sync`` decides whether it
    waits for the last pages too.

    Args:
        table: the pages, K and V; dtype and device come from it.
        staging_tokens: tokens from the first segment's begin to the last one's end that a load may have; required.
        rope: how the model rotates its keys.
        format, device_module: as for every connector; the format must be ``KV_2TD``.

    Raises:
        ConfigError: no staging, no rope, another format, or a rope that cannot be re-rotated.
    """

    blending = True

    def __init__(
        self,
        table: PageTable,
        *,
        staging_tokens: int = 0,
        rope: Rope | None = None,
        format: LayerFormat | None = None,
        device_module: Any = None,
    ) -> None:
        if staging_tokens < 1:
            raise ConfigError("blending needs buffers on the device (use_gpu): give staging_tokens, the longest prompt to blend")
        if rope is None:
            raise ConfigError("blending re-rotates keys: give rope=, as in the model's geometry")
        if table.num_planes != 2 or format not in (None, LayerFormat.KV_2TD):
            raise ConfigError(f"blending takes keys and values as KV_2TD; got {table.num_planes} planes, format {format}")
        staging_tokens = -(-staging_tokens // table.block_size) * table.block_size
        device, shape = table.device, (2, staging_tokens, table.heads * table.head_size)
        with torch.inference_mode(False):  # compute writes to them, in whatever mode
            self._buffers = tuple(torch.empty(shape, dtype=table.dtype, device=device) for _ in range(2))
            self._old, self._new = (torch.empty(staging_tokens, dtype=torch.int64, device=device) for _ in range(2))
        self._inv_freq = rope.inv_freq().to(device)
        self._interleaved = rope.interleaved
        self._busy = False
        self.loaded: dict[int, torch.Tensor] = {}  # layer -> [2, T, H], what compute may read now
        super().__init__(table, staging_tokens=staging_tokens, format=format, device_module=device_module)

    def _new_load_buffer(self) -> torch.Tensor | None:
        return None  # loads have the two buffers

    def get_kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[T, H]`` of a loaded layer, from the first segment's begin to the last one's end; a view of the buffer.

        The compute stream already waits for them. What compute writes to them before the next step goes to the pages.

        Raises:
            ShapeError: the layer is not loaded, or already in the pages.
        """
        if layer not in self.loaded:
            raise ShapeError(f"layer {layer} is not in a buffer: loaded now are {sorted(self.loaded) or 'none'}")
        keys, values = self.loaded[layer]
        return keys, values

    @torch.inference_mode()
    def _load(self, spans: Spans, slots: torch.Tensor, sync: bool) -> LoadSteps:
        if self._busy:
            raise StepOrderError("another load is in the two buffers: run it to its end, or close it")
        self._busy = True
        try:
            yield from self._steps(spans, slots, sync)
        finally:
            self._busy = False
            self.loaded.clear()

    def _steps(self, spans: Spans, slots: torch.Tensor, sync: bool) -> LoadSteps:
        first, last = (spans[0][0], spans[-1][1]) if spans else (0, 0)
        tokens = last - first
        if tokens > self.staging_tokens:
            raise ShapeError(f"a load of {tokens} tokens does not fit into staging_tokens={self.staging_tokens}: make that larger")
        segments = [(start - first, end - first) for start, end in spans]
        gaps = [(end, start) for (_, end), (start, _) in pairwise(segments) if end < start]
        stream, streams = self.load_stream, self.streams
        self._on_stream(stream, slots)
        with streams.on(stream):
            way = plan(slots[first:last], self.table)
            torch.arange(first, last, out=self._new[:tokens])
            self._old[:tokens].copy_(self._new[:tokens])
        buffers = [b.flatten()[: 2 * tokens * self.hidden].view(2, tokens, self.hidden) for b in self._buffers]
        for step in range(self.num_layers + 2):
            computed = streams.record(streams.compute())  # compute has been given its work on layer step - 2
            if 1 <= step <= self.num_layers:
                buffer = buffers[(step - 1) % 2]
                with streams.on(stream):
                    self._rotate(buffer[0], tokens)
                    for a, b in gaps:
                        buffer[:, a:b].zero_()
                streams.wait(streams.compute(), self.load_event())
                self.loaded[step - 1] = buffer
            if step > 1:
                streams.wait(stream, computed)
                with streams.on(stream):
                    way.write(self.table, step - 2, self.loaded.pop(step - 2))
            if step < self.num_layers:
                objects = yield
                rows = self._rows(objects, spans, step)
                with streams.on(stream):
                    if step == 0:
                        self._note_positions(objects or (), segments)
                    for source, (a, b) in zip(rows, segments, strict=True):
                        self._copy(source, buffers[step % 2][:, a:b])
                self._hold(stream, objects)
            elif step == self.num_layers:
                yield
        if self.loaded:
            raise StepOrderError(f"layers {sorted(self.loaded)} are still in the buffer map at the end of a load")
        if sync:
            streams.wait(streams.compute(), self.load_event())
        yield

    def _rotate(self, keys: torch.Tensor, tokens: int) -> None:
        """Keys ``[T, H]`` from their stored positions to the new ones, in place; gaps have the same position twice and do not change."""
        if self._inv_freq.numel():
            by_head = keys.view(tokens, self.table.heads, self.table.head_size)
            kernels.rope_shift_(by_head, self._old[:tokens], self._new[:tokens], self._inv_freq, self._interleaved)

    def _note_positions(self, objects: Objects, segments: Spans) -> None:
        for index, (value, (a, b)) in enumerate(zip(objects, segments, strict=True)):
            positions = value.positions if isinstance(value, LayerObject) else None
            if positions is None or tuple(positions.shape) != (b - a,) or positions.dtype != torch.int64:
                got = "none" if positions is None else f"{positions.dtype} {tuple(positions.shape)}"
                raise ShapeError(f"chunk {index}: wanted the {b - a} int64 positions its keys stand at, in a LayerObject; got {got}")
            self._old[a:b].copy_(to_device(positions, self.table.device))

    def _stored(self, objects: Objects, spans: Spans) -> None:
        for value, (start, end) in zip(objects, spans, strict=True):
            if isinstance(value, LayerObject) and value.positions is None:
                with torch.inference_mode(False):
                    value.positions = torch.arange(start, end, dtype=torch.int64)
