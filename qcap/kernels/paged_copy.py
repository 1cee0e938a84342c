"""Blocks of all layers out of an engine's pages, and back into them.

``gather_pages(table, block_ids, out, first_layer=0) -> None``
``scatter_pages(table, block_ids, source, first_layer=0) -> None``

- table      :class:`~qcap.kernels.page_table.PageTable` over ``views[L][planes]``, each ``[B, heads, N, D]`` with any strides. Read by
             gather, written by scatter.
- block_ids  [nb]  int64, contiguous, on the table's device, read. An id that is negative or >= B is left out: gather leaves its rows
             of ``out`` as they are, scatter drops its rows of ``source``. An id that scatter gets twice: one of the two is written,
             token by token, which one is not defined.
- out/source [planes, l, nb*N, heads*D]  the table's dtype, on the table's device or in pinned host memory; contiguous, or with the planes
             of a layer side by side: contiguous as ``[l, planes, nb*N, heads*D]``. For the layers first_layer..first_layer+l-1, l >= 1,
             all of them the table's.
             Pinned memory is addressed by its host address, which CUDA knows as its own (unified addressing).
             ``out[p, k, i*N + n, h*D + d] = views[first_layer + k][p][block_ids[i], h, n, d]``, bit for bit. There is no cast.

Graph-safe: the grid comes from shapes, nothing is allocated and nothing waits. Elements are addressed with 64 bits. All layers go in one
launch, and all planes too where their strides agree. One program does a tile [BLOCK_N, BLOCK_D] of one head of one block, plane and
layer. Reference: ``reference/paged_copy.py``. Raises ValueError on a wrong shape, dtype, stride or device.
"""
# mypy: disable-error-code="import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from qcap.kernels import checks
from qcap.kernels.launch import Launch
from qcap.kernels.page_table import PageTable

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WARPS = 4


# Not specialised: one kernel for any number of blocks and layers.
@triton.jit(
    do_not_specialize=[
        "first_plane", "first_layer", "table_layers", "num_layers", "plane_rows", "layer_rows", "num_blocks",
    ]
)  # fmt: skip
def paged_copy_kernel(
    pages_ptr,  # int64 [planes, L]: addresses
    block_ids_ptr,  # [nb]
    rows_ptr,  # [planes, l, nb * N, heads * D], each [nb * N, heads * D] contiguous
    first_plane,  # of this launch
    first_layer,
    table_layers,  # L
    num_layers,  # l
    plane_rows,  # rows from a plane to the next; in rows, so that addresses are known to be aligned
    layer_rows,  # and from a layer to the next
    num_blocks,  # B
    stride_block: tl.int64,
    stride_head: tl.int64,
    stride_token: tl.int64,
    stride_dim,  # not annotated, so that 1 becomes a constant and loads are wide
    HEADS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    GATHER: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    TILES_D: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N * TILES_D
    index = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    head = tl.program_id(1).to(tl.int64)
    plane = first_plane + (tl.program_id(2) // num_layers).to(tl.int64)
    layer = tl.program_id(2) % num_layers
    token = (tile // TILES_D * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    dim = (tile % TILES_D * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)

    block = tl.load(block_ids_ptr + index)
    if (block >= 0) & (block < num_blocks):
        inside = (token < N)[:, None] & (dim < D)[None, :]
        view_ptr = tl.load(pages_ptr + plane * table_layers + first_layer + layer).to(tl.pointer_type(rows_ptr.dtype.element_ty))
        if ALIGNED:
            view_ptr = tl.multiple_of(view_ptr, 16)
        view_ptr += block * stride_block + head * stride_head
        view_ptrs = view_ptr + token[:, None] * stride_token + dim[None, :] * stride_dim
        row = plane * plane_rows + layer.to(tl.int64) * layer_rows + index.to(tl.int64) * N + token
        row_ptrs = rows_ptr + row[:, None] * (HEADS * D) + head * D + dim[None, :]
        if GATHER:
            tl.store(row_ptrs, tl.load(view_ptrs, mask=inside), mask=inside)
        else:
            tl.store(view_ptrs, tl.load(row_ptrs, mask=inside), mask=inside)


_launch = Launch(paged_copy_kernel)


@functools.cache
def block_shape(block_size: int, head_size: int) -> tuple[int, int]:
    """(BLOCK_N, BLOCK_D): at most 4096 elements a program."""
    block_d = min(triton.next_power_of_2(head_size), 1024)
    return min(triton.next_power_of_2(block_size), 4096 // block_d), block_d


def _copy(table: PageTable, block_ids: torch.Tensor, rows: torch.Tensor, first_layer: int, gather: bool) -> None:
    planes, layers, tokens, width = rows.shape
    if not planes * layers * tokens * width or not table.num_blocks:
        return
    bits = _BITS[table.dtype.itemsize]
    plane_rows, layer_rows = (layers * tokens, tokens) if rows.is_contiguous() else (tokens, planes * tokens)
    heads, n, d = table.heads, table.block_size, table.head_size
    block_n, block_d = block_shape(n, d)
    tiles = -(-n // block_n) * -(-d // block_d)
    strides = table.strides
    planes_at_once = planes if table.one_stride else 1
    constants = (heads, n, d, gather, table.aligned, block_n, block_d)
    for plane in range(0, planes, planes_at_once):
        _launch(
            (tokens // n * tiles, heads, planes_at_once * layers),
            (table.pointers, block_ids, rows),
            (torch.int64, torch.int64, bits),
            (plane, first_layer, table.num_layers, layers, plane_rows, layer_rows, table.num_blocks, *strides[plane]),
            constants,
            _WARPS,
        )


def gather_pages(table: PageTable, block_ids: torch.Tensor, out: torch.Tensor, first_layer: int = 0) -> None:
    """Copy blocks of all layers' pages into ``out``. The module's docstring is the contract."""
    checks.paged_copy("gather_pages", table, block_ids, out, first_layer)
    _copy(table, block_ids, out, first_layer, gather=True)


def scatter_pages(table: PageTable, block_ids: torch.Tensor, source: torch.Tensor, first_layer: int = 0) -> None:
    """Copy ``source`` into blocks of all layers' pages. The module's docstring is the contract."""
    checks.paged_copy("scatter_pages", table, block_ids, source, first_layer)
    _copy(table, block_ids, source, first_layer, gather=False)
