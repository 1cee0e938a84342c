"""Rows into the pages of one layer and out of them, by slot: which way is cheapest is decided once, before the first layer.

A slot is ``block * N + token``. A negative one is a token without a place: writing drops its row, reading gives zeros for it. Of a slot
that is named twice, one of the two rows is written; which one is not defined.

- :class:`BlockPlan`   the slots are whole blocks in order: the page kernels.
- :class:`RowPlan`     any slots, known to the host: index operations over the rows that have a place.
- :class:`MaskedPlan`  any slots, known only to the device, which is not asked: index operations that change nothing for rows without one.

Each has ``write(table, layer, rows)`` and ``read(table, layer, out)``; rows and out are ``[planes, T, H]`` of the table's dtype and device
(for a BlockPlan, contiguous rows may also lie in pinned host memory beside CUDA pages). Nothing here makes the host wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qcap import kernels
from qcap.connectors.transfer import to_device
from qcap.errors import ShapeError
from qcap.kernels import PageTable

_KERNEL_DEVICES = ("cuda", "cpu")  # elsewhere the kernels' reference runs, which asks the device which ids are in range


def _by_head(table: PageTable, rows: torch.Tensor) -> torch.Tensor:
    return rows.view(*rows.shape[:-1], table.heads, table.head_size)


def has_kernels(table: PageTable) -> bool:
    """Whether the page kernels move whole blocks of ``table``, without asking the device."""
    return table.device.type in _KERNEL_DEVICES


def in_reach(table: PageTable, rows: torch.Tensor) -> bool:
    """Whether the kernels can reach ``rows`` where they lie."""
    return has_kernels(table) and (rows.device == table.device or rows.is_pinned())


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Whole blocks in order: ``block_ids`` int64 ``[T / N]`` on the pages' device."""

    block_ids: torch.Tensor

    def takes(self, table: PageTable, rows: torch.Tensor) -> bool:
        """Whether the kernels can use ``rows`` where they lie."""
        return rows.is_contiguous() and in_reach(table, rows)

    def write(self, table: PageTable, layer: int, rows: torch.Tensor) -> None:
        """Copy ``rows`` into the blocks of ``layer``."""
        if self.takes(table, rows):
            kernels.scatter_pages(table, self.block_ids, rows.unsqueeze(1), first_layer=layer)
            return
        for view, plane in zip(table.views[layer], rows, strict=True):
            view[self.block_ids] = _by_head(table, plane).unflatten(0, (-1, table.block_size)).transpose(1, 2)

    def read(self, table: PageTable, layer: int, out: torch.Tensor) -> None:
        """Copy the blocks of ``layer`` to ``out``."""
        if self.takes(table, out):
            kernels.gather_pages(table, self.block_ids, out.unsqueeze(1), first_layer=layer)
            return
        for view, plane in zip(table.views[layer], out, strict=True):
            _by_head(table, plane).unflatten(0, (-1, table.block_size)).transpose(1, 2).copy_(view[self.block_ids])


@dataclass(frozen=True, eq=False)
class RowPlan:
    """Any slots: ``blocks`` and ``offsets`` int64 ``[R]``, and ``rows`` int64 ``[R]``, which rows they belong to; None for all of them."""

    blocks: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor | None

    def write(self, table: PageTable, layer: int, rows: torch.Tensor) -> None:
        """Copy the rows that have a place into the pages of ``layer``."""
        for view, plane in zip(table.views[layer], rows, strict=True):
            source = plane if self.rows is None else plane.index_select(0, self.rows)
            view.transpose(1, 2)[self.blocks, self.offsets] = _by_head(table, source)

    def read(self, table: PageTable, layer: int, out: torch.Tensor) -> None:
        """Copy the rows that have a place to ``out``, zeros to the others."""
        for view, plane in zip(table.views[layer], out, strict=True):
            found = view.transpose(1, 2)[self.blocks, self.offsets].flatten(1)
            if self.rows is None:
                plane.copy_(found)
            else:
                plane.zero_().index_copy_(0, self.rows, found)


@dataclass(frozen=True, eq=False)
class MaskedPlan:
    """Slots that only the device knows.

    A row without a place is written as a second copy of a row that has one; where none has one, the page's own content is written
    back. So no row is left out by a mask that the host would have to read.

    Args:
        blocks, offsets: int64 ``[T]``, in range for every row.
        source: int64 ``[T]``, the row whose content each row writes.
        placed: bool ``[T]``, the rows that have a place.
        any_placed: bool ``[]``.
    """

    blocks: torch.Tensor
    offsets: torch.Tensor
    source: torch.Tensor
    placed: torch.Tensor
    any_placed: torch.Tensor

    @classmethod
    def of(cls, slots: torch.Tensor, num_slots: int, block_size: int) -> MaskedPlan:
        """From int64 ``slots`` ``[T]`` on any device; T is at least 1."""
        placed = (slots >= 0) & (slots < num_slots)
        one = placed.to(torch.int8).argmax().expand_as(slots)  # a row that is placed; any row where none is
        source = torch.where(placed, torch.arange(len(slots), device=slots.device), one)
        target = slots.index_select(0, source).clamp(0, num_slots - 1)
        return cls(target // block_size, target % block_size, source, placed, placed.any())

    def write(self, table: PageTable, layer: int, rows: torch.Tensor) -> None:
        """Copy the rows that have a place into the pages of ``layer``."""
        for view, plane in zip(table.views[layer], rows, strict=True):
            tokens = view.transpose(1, 2)
            new = _by_head(table, plane.index_select(0, self.source))
            tokens[self.blocks, self.offsets] = torch.where(self.any_placed, new, tokens[self.blocks, self.offsets])

    def read(self, table: PageTable, layer: int, out: torch.Tensor) -> None:
        """Copy the rows that have a place to ``out``, zeros to the others."""
        for view, plane in zip(table.views[layer], out, strict=True):
            plane.copy_(view.transpose(1, 2)[self.blocks, self.offsets].flatten(1).masked_fill_(~self.placed[:, None], 0))


Plan = BlockPlan | RowPlan | MaskedPlan


def block_plan(blocks: torch.Tensor, table: PageTable) -> BlockPlan | MaskedPlan:
    """The way to whole blocks by their ids, int64 on the pages' device; an id out of range is left out without a look at it."""
    if has_kernels(table) or blocks.numel() == 0:
        return BlockPlan(blocks)
    n = table.block_size
    slots = (blocks[:, None] * n + torch.arange(n, device=blocks.device)).flatten()
    return MaskedPlan.of(slots, table.num_blocks * n, n)


def plan(slots: torch.Tensor, table: PageTable) -> Plan:
    """The cheapest way to the pages for ``slots``.

    Args:
        slots: integer ``[T]``, on the host (then whole blocks are seen) or on the pages' device (then it is not read here).
        table: the pages.

    Raises:
        ShapeError: a slot known to the host lies beyond the pages.
    """
    n, num_slots, device = table.block_size, table.num_blocks * table.block_size, table.device
    slots = slots.to(torch.int64)
    if slots.device.type != "cpu" and slots.numel():
        return MaskedPlan.of(slots, num_slots, n)
    if slots.numel() and int(slots.max()) >= num_slots:
        raise ShapeError(
            f"slot {int(slots.max())} lies beyond the {num_slots} slots of the pages: a slot mapping of another engine or group"
        )
    if n > 1 and slots.numel() and slots.numel() % n == 0:
        blocks = slots[::n] // n
        if int(blocks.min()) >= 0 and torch.equal(slots.view(-1, n), blocks[:, None] * n + torch.arange(n)):
            return BlockPlan(to_device(blocks, device))
    rows = (slots >= 0).nonzero().flatten()
    kept = slots[rows]
    everything = rows.numel() == slots.numel()
    return RowPlan(to_device(kept // n, device), to_device(kept % n, device), None if everything else to_device(rows, device))
