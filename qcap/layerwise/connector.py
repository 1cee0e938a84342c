"""What moves one layer between host memory and an engine's pages."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from qcap import kernels
from qcap.errors import ConfigError, ShapeError
from qcap.kernels import PageTable


class LayerConnector(Protocol):
    """Moves a layer's rows between host memory and pages, on whatever stream is current. It never makes the host wait.

    Whether an object is one is asked by ``layerwise``, not by its class.
    """

    layerwise: bool
    num_layers: int
    num_planes: int
    block_size: int
    hidden: int
    """H, elements of a token's row in one plane."""
    dtype: torch.dtype

    def prepare(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Block ids where :meth:`to_device` and :meth:`from_device` want them; a slice of it is good too. -1: leave this block out."""

    def to_device(self, layer: int, source: torch.Tensor, blocks: torch.Tensor) -> None:
        """Rows of one layer into its pages.

        Args:
            layer: index of the layer.
            source: host ``[planes, T, H]``, each plane contiguous; not given back before what was queued here is over.
            blocks: of :meth:`prepare`, ``T / block_size`` of them.
        """

    def from_device(self, layer: int, blocks: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        """Rows of one layer out of its pages, to ``targets``: host ``[planes, CH, H]`` each, one after the other over ``blocks``."""


class HostPool(Protocol):
    """Host memory, lent."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """An uninitialised contiguous tensor, page-locked where the device is a GPU; None if there is no room."""

    def give(self, piece: torch.Tensor, after: Any = None) -> None:
        """``piece`` may be used again once ``after`` (an event, or None) is over."""


class PagedLayerConnector:
    """Plain paged caches, through :func:`qcap.kernels.gather_pages` and :func:`~qcap.kernels.scatter_pages`.

    A layer is one copy (a plane each, where the host's planes lie apart) and one launch for every ``staging_tokens`` of it.

    Args:
        table: the pages of all layers.
        staging_tokens: tokens that the device buffers hold, rounded up to whole blocks. They are made here, one for loading and one for
            storing, and never in a forward pass. 0 makes none: rows then go straight between pages and (page-locked) host memory.
    """

    layerwise = True

    def __init__(self, table: PageTable, staging_tokens: int = 0) -> None:
        if staging_tokens < 0:
            raise ConfigError(f"staging_tokens must be 0 or more, got {staging_tokens}")
        self.table = table
        self.num_layers, self.num_planes, self.block_size = table.num_layers, table.num_planes, table.block_size
        self.hidden, self.dtype = table.heads * table.head_size, table.dtype
        self.staging_tokens = -(-staging_tokens // table.block_size) * table.block_size
        elements = table.num_planes * self.staging_tokens * self.hidden
        with torch.inference_mode(False):
            self.staging = tuple(torch.empty(elements, dtype=table.dtype, device=table.device) for _ in range(2)) if elements else ()
        self._planes = [PageTable([[layer[p]] for layer in table.views]) for p in range(table.num_planes)]
        self._load_lock, self._store_lock = threading.Lock(), threading.Lock()  # one thread in a staging buffer at a time

    def prepare(self, block_ids: Sequence[int]) -> torch.Tensor:
        """int64 on the pages' device; the copy is queued on the current stream, so use it there."""
        host = torch.from_numpy(np.asarray(block_ids, dtype=np.int64))
        return host if self.table.device.type != "cuda" else host.pin_memory().to(self.table.device, non_blocking=True)

    @torch.inference_mode()  # pages made in inference mode cannot be written outside of it; others can be inside
    def to_device(self, layer: int, source: torch.Tensor, blocks: torch.Tensor) -> None:
        """See :class:`LayerConnector`. Raises ``ShapeError``."""
        tokens = blocks.numel() * self.block_size
        self._check(source, tokens)
        if not self.staging:
            for plane, table in enumerate(self._planes):
                kernels.scatter_pages(table, blocks, source[plane][None, None], layer)
            return
        with self._load_lock:
            for start, part, buffer in self._parts(self.staging[0], blocks):
                _copy_planes(buffer, source[:, start : start + buffer.shape[1]])
                kernels.scatter_pages(self.table, part, buffer[:, None], layer)

    @torch.inference_mode()
    def from_device(self, layer: int, blocks: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        """See :class:`LayerConnector`. Raises ``ShapeError``."""
        if not targets:
            return
        size = targets[0].shape[1]
        for target in targets:
            self._check(target, size)
        if blocks.numel() * self.block_size != size * len(targets):
            raise ShapeError(f"{blocks.numel()} blocks of {self.block_size} tokens do not fill {len(targets)} chunks of {size}")
        if not self.staging:
            per_chunk = size // self.block_size
            for i, target in enumerate(targets):
                for plane, table in enumerate(self._planes):
                    kernels.gather_pages(table, blocks[i * per_chunk : (i + 1) * per_chunk], target[plane][None, None], layer)
            return
        with self._store_lock:
            for start, part, buffer in self._parts(self.staging[1], blocks):
                kernels.gather_pages(self.table, part, buffer[:, None], layer)
                end = start + buffer.shape[1]
                for i in range(start // size, -(-end // size)):
                    first, last = max(start, i * size), min(end, (i + 1) * size)
                    _copy_planes(targets[i][:, first - i * size : last - i * size], buffer[:, first - start : last - start])

    def _parts(self, staging: torch.Tensor, blocks: torch.Tensor) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """(first token, block ids, buffer ``[planes, t, H]``) for each part that the staging buffer can hold."""
        per_part, parts = self.staging_tokens // self.block_size, []
        for first in range(0, blocks.numel(), per_part):
            part = blocks[first : first + per_part]
            tokens = part.numel() * self.block_size
            buffer = staging[: self.num_planes * tokens * self.hidden].view(self.num_planes, tokens, self.hidden)
            parts.append((first * self.block_size, part, buffer))
        return parts

    def _check(self, rows: torch.Tensor, tokens: int) -> None:
        wanted = (self.num_planes, tokens, self.hidden)
        if tuple(rows.shape) != wanted or rows.dtype != self.dtype or not all(plane.is_contiguous() for plane in rows):
            raise ShapeError(
                f"a layer's rows are {wanted} of {self.dtype}, each plane contiguous; got {tuple(rows.shape)} of {rows.dtype}, "
                f"strides {rows.stride()}"
            )


def _copy_planes(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)`` as plain memory copies: one, or one a plane. A strided copy to the host would make the host wait."""
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source, non_blocking=True)
        return
    for plane in range(target.shape[0]):
        target[plane].copy_(source[plane], non_blocking=True)
