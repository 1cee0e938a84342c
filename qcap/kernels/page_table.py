"""Where the pages of all layers lie: built once when the pages are known, read by ``gather_pages`` and ``scatter_pages``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, eq=False)
class PageTable:
    """Strided views of every layer's pages, and their addresses on the device.

    It keeps the views, and so the memory that ``pointers`` points into, alive. Building it copies the addresses to the device once and
    may wait for that; using it never does.

    Args:
        views: ``[L][planes]`` of tensors ``[B, heads, N, D]``, any strides. Of one plane the strides are the same in all layers; shape,
            dtype and device are the same everywhere. A query ring is 1 plane with ``heads=1`` and ``D=H``.

    Raises:
        ValueError: no layers or planes, or the views differ where they must not.
    """

    views: Sequence[Sequence[torch.Tensor]]
    num_layers: int = field(init=False)  # L
    num_planes: int = field(init=False)  # 2 for K and V, 1 for queries
    num_blocks: int = field(init=False)  # B
    heads: int = field(init=False)  # of a token
    block_size: int = field(init=False)  # N
    head_size: int = field(init=False)  # D
    dtype: torch.dtype = field(init=False)  # of the pages
    device: torch.device = field(init=False)  # of the pages and of ``pointers``
    strides: tuple[tuple[int, ...], ...] = field(init=False, repr=False)  # (block, head, token, dim) of each plane, in elements
    one_stride: bool = field(init=False, repr=False)  # whether those of all planes agree
    pointers: torch.Tensor = field(init=False, repr=False)  # int64 [planes, L], on the views' device
    aligned: bool = field(init=False, repr=False)  # every view starts at a multiple of 16 bytes, so the kernel may use wide loads

    def __post_init__(self) -> None:
        views = tuple(tuple(layer) for layer in self.views)
        if not views or not views[0]:
            raise ValueError(
                "PageTable: wanted views[L][planes], at least one of each; got none. Likely cause: no attention layer was found"
            )
        first = views[0]
        for index, layer in enumerate(views):
            if len(layer) != len(first):
                raise ValueError(
                    f"PageTable: layer {index}: wanted {len(first)} planes; got {len(layer)}. Likely cause: layers of two kinds"
                )
            for plane, view in enumerate(layer):
                wanted = (first[0].shape, first[plane].stride(), first[0].dtype, first[0].device)
                got = (view.shape, view.stride(), view.dtype, view.device)
                if got != wanted or view.dim() != 4:
                    raise ValueError(
                        f"PageTable: layer {index} plane {plane}: wanted [B, heads, N, D] with shape, stride, dtype, device {wanted}; "
                        f"got {got}. "
                        "Likely cause: layers of different KV cache groups need a table each"
                    )
        addresses = [[layer[plane].data_ptr() for layer in views] for plane in range(len(first))]
        blocks, heads, block_size, head_size = first[0].shape
        strides = tuple(tuple(view.stride()) for view in first)
        known = {  # once, not whenever it is asked for: an engine waits for every launch
            "views": views,
            "num_layers": len(views),
            "num_planes": len(first),
            "num_blocks": blocks,
            "heads": heads,
            "block_size": block_size,
            "head_size": head_size,
            "dtype": first[0].dtype,
            "device": first[0].device,
            "strides": strides,
            "one_stride": len(set(strides)) == 1,
            "pointers": torch.tensor(addresses, dtype=torch.int64, device=first[0].device),
            "aligned": all(address % 16 == 0 for row in addresses for address in row),
        }
        for name, value in known.items():
            object.__setattr__(self, name, value)

    def rows_shape(self, num_block_ids: int, num_layers: int | None = None) -> tuple[int, int, int, int]:
        """``[planes, l, nb*N, heads*D]``: the shape that ``num_block_ids`` blocks of ``num_layers`` layers (None: all) gather to."""
        layers = self.num_layers if num_layers is None else num_layers
        return (self.num_planes, layers, num_block_ids * self.block_size, self.heads * self.head_size)
