"""vLLM's pages, whole chunks: all layers of a chunk at a time, on the current stream. What there is without layerwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from qcap import kernels
from qcap.connectors.base import Connector, Group
from qcap.connectors.formats import LayerFormat
from qcap.connectors.registry import register
from qcap.connectors.slots import BlockPlan
from qcap.errors import ShapeError
from qcap.kernels import PageTable


@register("vllm", "cuda", "xpu", "cpu", "musa")
class ChunkConnector(Connector):
    """A chunk at a time, without staging. Host objects are ``[planes, L, CH, H]``, as they are stored."""

    @torch.inference_mode()  # pages made in inference mode cannot be written outside of it; others can be inside
    def to_gpu(
        self, objects: Sequence[torch.Tensor], starts: Sequence[int], ends: Sequence[int], *, slot_mapping: torch.Tensor | None = None
    ) -> None:
        """Copy chunks ``[starts[i], ends[i])`` to the pages.

        Raises:
            ShapeError: ``slot_mapping`` is missing or wrong, or an object has another shape or dtype.
        """
        for group, rows in self._moves(objects, starts, ends, slot_mapping):
            if isinstance(group.plan, BlockPlan) and len(rows) == 1 and group.plan.takes(self.table, rows[0]):
                kernels.scatter_pages(self.table, group.plan.block_ids, rows[0])
                continue
            staged = self._staged(group.tokens)
            for source, begin in zip(rows, group.begins, strict=True):
                staged[:, :, begin : begin + source.shape[2]].copy_(source, non_blocking=True)
            if isinstance(group.plan, BlockPlan) and group.plan.takes(self.table, staged):
                kernels.scatter_pages(self.table, group.plan.block_ids, staged)
                continue
            for layer in range(self.num_layers):
                group.plan.write(self.table, layer, staged[:, layer])

    @torch.inference_mode()
    def from_gpu(
        self, objects: Sequence[torch.Tensor], starts: Sequence[int], ends: Sequence[int], *, slot_mapping: torch.Tensor | None = None
    ) -> None:
        """Copy chunks ``[starts[i], ends[i])`` from the pages; objects are whole once the current stream is done.

        Raises:
            ShapeError: as for :meth:`to_gpu`.
        """
        for group, rows in self._moves(objects, starts, ends, slot_mapping):
            staged = self._staged(group.tokens)
            if isinstance(group.plan, BlockPlan) and group.plan.takes(self.table, staged):
                kernels.gather_pages(self.table, group.plan.block_ids, staged)
            else:
                for layer in range(self.num_layers):
                    group.plan.read(self.table, layer, staged[:, layer])
            for target, begin in zip(rows, group.begins, strict=True):
                target.copy_(staged[:, :, begin : begin + target.shape[2]], non_blocking=True)

    @property
    def together(self) -> int:
        """0: a chunk by itself."""
        return 0

    def _staged(self, tokens: int) -> torch.Tensor:
        shape = (self.table.num_planes, self.num_layers, tokens, self.hidden)
        return torch.empty(shape, dtype=self.table.dtype, device=self.table.device)

    def _moves(
        self, objects: Sequence[torch.Tensor], starts: Sequence[int], ends: Sequence[int], slot_mapping: torch.Tensor | None
    ) -> list[tuple[Group, list[torch.Tensor]]]:
        """Groups of chunks with their objects, all checked before the first is moved."""
        spans, slots = self._spans(starts, ends, slot_mapping)
        if len(objects) != len(spans):
            raise ShapeError(f"wanted one object a chunk, {len(spans)}; got {len(objects)}")
        for index, (value, (start, end)) in enumerate(zip(objects, spans, strict=True)):
            shape = (self.table.num_planes, self.num_layers, end - start, self.hidden)
            if tuple(value.shape) != shape or value.dtype != self.table.dtype:
                raise ShapeError(f"chunk {index}: wanted {shape} of {self.table.dtype}, got {tuple(value.shape)} of {value.dtype}")
        return [(group, [objects[i] for i in group.chunks]) for group in self._groups(spans, slots, self.streams.compute())]


@register("vllm", "cuda", "xpu", v3=True)
class BatchConnector(ChunkConnector):
    """As many chunks at a time as ``staging_tokens`` takes; without staging, a chunk at a time."""

    def __init__(self, table: PageTable, *, staging_tokens: int = 0, format: LayerFormat | None = None, device_module: Any = None) -> None:
        super().__init__(table, staging_tokens=staging_tokens, format=format, device_module=device_module)
        with torch.inference_mode(False):
            self._buffer = super()._staged(staging_tokens).flatten()

    @property
    def together(self) -> int:
        """What the staging buffer takes."""
        return self.staging_tokens

    def _staged(self, tokens: int) -> torch.Tensor:
        if not self.use_gpu:
            return super()._staged(tokens)
        shape = (self.table.num_planes, self.num_layers, tokens, self.hidden)
        return self._buffer[: math.prod(shape)].view(shape)
