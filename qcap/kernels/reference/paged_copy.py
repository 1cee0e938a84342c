"""Reference of :mod:`qcap.kernels.paged_copy`; the contract is there."""

from __future__ import annotations

import torch

from qcap.kernels.page_table import PageTable


def gather_pages(table: PageTable, block_ids: torch.Tensor, out: torch.Tensor, first_layer: int = 0) -> None:
    """``out[p, l, i*N + n, h*D + d] = views[first_layer + l][p][block_ids[i], h, n, d]``; rows of an id out of range stay as they are."""
    keep = (block_ids >= 0) & (block_ids < table.num_blocks)
    chosen = block_ids[keep]
    blocks = out.unflatten(3, (table.heads, table.head_size)).unflatten(2, (block_ids.numel(), table.block_size))
    for layer, planes in enumerate(table.views[first_layer : first_layer + out.shape[1]]):
        for plane, view in enumerate(planes):
            blocks[plane, layer][keep.to(out.device)] = view[chosen].permute(0, 2, 1, 3).to(out.device)


def scatter_pages(table: PageTable, block_ids: torch.Tensor, source: torch.Tensor, first_layer: int = 0) -> None:
    """``views[first_layer + l][p][block_ids[i], h, n, d] = source[p, l, i*N + n, h*D + d]``; an id out of range is dropped."""
    keep = (block_ids >= 0) & (block_ids < table.num_blocks)
    chosen = block_ids[keep]
    blocks = source.unflatten(3, (table.heads, table.head_size)).unflatten(2, (block_ids.numel(), table.block_size))
    for layer, planes in enumerate(table.views[first_layer : first_layer + source.shape[1]]):
        for plane, view in enumerate(planes):
            view[chosen] = blocks[plane, layer][keep.to(source.device)].permute(0, 2, 1, 3).to(view.device)
