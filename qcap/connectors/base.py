"""What all connectors share: checked bounds, the way to the pages, and which chunks go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from qcap.connectors.formats import LayerFormat, LayerObject, layer_format
from qcap.connectors.slots import Plan, plan
from qcap.connectors.streams import streams_for
from qcap.errors import ConfigError, ShapeError
from qcap.kernels import PageTable

Objects = Sequence[LayerObject | torch.Tensor]
Spans = list[tuple[int, int]]
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class Group:
    """Chunks that are moved together: which ones, where their rows begin in the staging buffer, and the way to the pages."""

    chunks: range
    begins: tuple[int, ...]
    tokens: int
    plan: Plan


class Connector:
    """Moves cache between host objects and the pages of ``table``.

    Args:
        table: the pages.
        staging_tokens: tokens of a staging buffer on the device; 0 for none. It is allocated here, never during a move.
        format: of a layer of a host object; None takes :func:`layer_format`'s for these pages.
        device_module: stands in for ``torch.cuda`` and its like.

    Raises:
        ConfigError: the format does not fit the pages, or a size is negative.
    """

    layerwise: bool = False  # whether it moves one layer at a time; the engine's check asks this, not the class's name
    blending: bool = False

    def __init__(self, table: PageTable, *, staging_tokens: int = 0, format: LayerFormat | None = None, device_module: Any = None) -> None:
        if staging_tokens < 0:
            raise ConfigError(f"staging_tokens must be 0 (none) or more, got {staging_tokens}")
        self.table = table
        self.staging_tokens = staging_tokens
        self.format = layer_format(blending=self.blending, mla=table.num_planes == 1) if format is None else format
        if self.format.planes != table.num_planes:
            raise ConfigError(f"{self.format.value} has {self.format.planes} planes, these pages have {table.num_planes}: another format")
        self.num_layers, self.num_planes, self.block_size = table.num_layers, table.num_planes, table.block_size  # block_size: 1 in a pool
        self.num_blocks = table.num_blocks
        self.hidden, self.dtype = table.heads * table.head_size, table.dtype
        self.streams = streams_for(table.device, device_module)

    @property
    def use_gpu(self) -> bool:
        """Whether objects go through a buffer on the device."""
        return self.staging_tokens > 0

    @property
    def together(self) -> int:
        """Tokens of several chunks that are moved together; 0 if each chunk is moved by itself."""
        return self.staging_tokens

    def _spans(self, starts: Sequence[int], ends: Sequence[int], slots: torch.Tensor | None) -> tuple[Spans, torch.Tensor]:
        """Checked chunk bounds, and the slot mapping."""
        if slots is None:
            raise ShapeError("slot_mapping is missing: give the slot of every token of the request, slot_mapping=...")
        if not isinstance(slots, torch.Tensor) or slots.dim() != 1 or slots.dtype not in _INTEGERS:
            got = f"{slots.dtype} {tuple(slots.shape)}" if isinstance(slots, torch.Tensor) else type(slots).__name__
            raise ShapeError(f"slot_mapping: wanted an integer tensor [T], got {got}")
        if slots.device.type != "cpu" and slots.device != self.table.device:
            raise ShapeError(f"slot_mapping is on {slots.device}: wanted the host or {self.table.device}")
        spans = list(zip(starts, ends, strict=True)) if len(starts) == len(ends) else []
        flat = [bound for span in spans for bound in span]
        ordered = all(a <= b for a, b in pairwise([0, *flat, len(slots)])) and all(a < b for a, b in spans)
        if len(starts) != len(ends) or not ordered:
            raise ShapeError(f"starts {list(starts)} and ends {list(ends)} are no rising bounds of chunks within {len(slots)} slots")
        return spans, slots

    def _on_stream(self, stream: Any, slots: torch.Tensor) -> None:
        """``stream`` starts after what is queued now, and may read ``slots``."""
        self.streams.wait(stream, self.streams.record(self.streams.compute()))
        if stream is not None and slots.device.type != "cpu":
            slots.record_stream(stream)

    def _groups(self, spans: Spans, slots: torch.Tensor, stream: Any) -> list[Group]:
        """Chunks by staging buffer, as many as go into one; without staging each by itself, with its own slots."""
        groups: list[Group] = []
        first = 0
        while first < len(spans):
            last, tokens, begins = first, 0, []
            while last < len(spans) and (last == first or tokens + _length(spans[last]) <= self.together):
                begins.append(tokens)
                tokens += _length(spans[last])
                last += 1
            if self.together and tokens > self.together:
                raise ShapeError(f"a chunk of {tokens} tokens does not fit into staging_tokens={self.together}: make that larger")
            with self.streams.on(stream):  # its buffers belong to this stream, so they are not given out again while it still reads them
                way = plan(torch.cat([slots[start:end] for start, end in spans[first:last]]), self.table)
            groups.append(Group(range(first, last), tuple(begins), tokens, way))
            first = last
        return groups


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]
