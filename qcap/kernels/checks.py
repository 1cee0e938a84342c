"""What every op checks before it runs: shape, dtype, stride and device. Nothing here looks at a tensor's contents or waits for a device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from qcap.kernels.page_table import PageTable

INT64 = (torch.int64,)
INT_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MATHS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROW_DTYPES = (*MATHS_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64)  # int64: a step number a row
MAX_LAYERS = 8  # of row_scatter_layers: its kernel has a pointer each


def _wrong(op: str, name: str, wanted: str, got: object, cause: str) -> ValueError:
    if isinstance(got, torch.Tensor):
        got = f"{got.dtype} {tuple(got.shape)} with stride {got.stride()} on {got.device}"
    return ValueError(f"{op}: {name}: wanted {wanted}; got {got}. Likely cause: {cause}")


def _vector(op: str, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device, cause: str) -> None:
    if tensor.dim() != 1 or tensor.dtype not in dtypes or tensor.device != device or not tensor.is_contiguous():
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise _wrong(op, name, f"contiguous {names} [n] on {device}", tensor, cause)


def slot_attribution(
    slot_mapping: torch.Tensor,
    plan: torch.Tensor,
    block_size: int,
    ring_slots: torch.Tensor,
    stamps: torch.Tensor,
    counts: torch.Tensor | None,
) -> None:
    """Raise ValueError if ``slot_attribution`` could not run on these."""
    op, device = "slot_attribution", slot_mapping.device
    _vector(op, "slot_mapping", slot_mapping, INT_DTYPES, device, "not the engine's slot_mapping")
    _vector(op, "ring_slots", ring_slots, INT64, device, "the persistent buffer was made for another device")
    _vector(op, "stamps", stamps, INT64, device, "stamps of another ring or device")
    _vector(op, "plan", plan, INT64, device, "the step's plan was built on the host and not copied")
    if plan.numel() < 4:
        raise _wrong(op, "plan", "at least 4 entries: count, step, requests, base", plan, "a slice that leaves out the start")
    if block_size < 1:
        raise _wrong(op, "block_size", "at least 1", block_size, "the engine's cache_config was read before it was set")
    if ring_slots.numel() < slot_mapping.numel():
        got = f"{ring_slots.numel()} < {slot_mapping.numel()}"
        raise _wrong(op, "ring_slots", "at least as many entries as slot_mapping", got, "slot_mapping is longer than the step: slice it")
    if counts is not None:
        _vector(op, "counts", counts, (torch.int32,), device, "counts of another device")


def host_read(source: torch.Tensor, target: torch.Tensor) -> None:
    """Raise ValueError if ``host_read`` could not run on these."""
    op, host = "host_read", torch.device("cpu")
    _vector(op, "source", source, INT64, host, "a tensor of the device, which needs no such copy")
    _vector(op, "target", target, INT64, target.device, "a slice with a step, or another type than the source")
    if source.numel() != target.numel():
        raise _wrong(op, "target", f"[{source.numel()}], as the source", target, "only one of them was sliced")
    if target.is_cuda and source.numel() and not source.is_pinned():
        raise _wrong(op, "source", "page-locked memory", source, "it was made without pin_memory=True: the device cannot read it")


def row_scatter(rows: torch.Tensor, ring_slots: torch.Tensor, ring: torch.Tensor) -> None:
    """Raise ValueError if ``row_scatter`` could not run on these."""
    _scatter("row_scatter", rows, ring_slots, ring, 2)


def row_scatter_layers(rows: Sequence[torch.Tensor], ring_slots: torch.Tensor, ring: torch.Tensor) -> None:
    """Raise ValueError if ``row_scatter_layers`` could not run on these."""
    op, count = "row_scatter_layers", len(rows)
    if not 1 <= count <= MAX_LAYERS:
        raise _wrong(op, "rows", f"1 to {MAX_LAYERS} tensors, one a layer", f"{count}", "more layers than one launch takes, or none")
    first = rows[0]
    _scatter(op, first, ring_slots, ring, 3)
    if ring.shape[1] != count:
        raise _wrong(op, "ring", f"[S, {count}, H], a layer for each of rows", ring, "a slice of the ring for another number of layers")
    shape, dtype, device, stride = first.shape, first.dtype, first.device, first.stride()
    for layer in range(1, count):
        other = rows[layer]
        same = other.shape == shape and other.dtype == dtype and other.device == device
        if not same or any(n > 1 and a != b for n, a, b in zip(shape, other.stride(), stride, strict=True)):
            wanted = f"{dtype} {tuple(shape)} with stride {stride} on {device}, as rows[0] is"
            raise _wrong(op, f"rows[{layer}]", wanted, other, "rows of another step, or cut from another tensor than the first layer's")


def _scatter(op: str, rows: torch.Tensor, ring_slots: torch.Tensor, ring: torch.Tensor, ring_dims: int) -> None:
    shape, dtype, device, target = rows.shape, rows.dtype, rows.device, ring.shape
    if len(shape) != 2 or dtype not in ROW_DTYPES:
        raise _wrong(op, "rows", "[R, H] of float32, bfloat16, float16, float8 or int64", rows, "heads were not flattened")
    _vector(op, "ring_slots", ring_slots, INT64, device, "slots of another step or device")
    if ring_slots.numel() < shape[0]:
        raise _wrong(op, "ring_slots", f"at least {shape[0]} entries", ring_slots, "rows are padded and slots are not")
    if len(target) != ring_dims or target[-1] != shape[1] or ring.device != device:
        wanted = f"[S, {'G, ' * (ring_dims - 2)}{shape[1]}] on {device}"
        raise _wrong(op, "ring", wanted, ring, "the ring was sized for another head count, head size or device")
    if ring.stride()[-1] != 1 and shape[1] > 1:
        raise _wrong(op, "ring", "rows that are contiguous, that is a column stride of 1", ring, "a ring with its axes in another order")
    if ring.dtype != dtype and ring.dtype not in MATHS_DTYPES:
        wanted = f"float32, bfloat16, float16 or the rows' own {dtype}"
        raise _wrong(op, "ring", wanted, ring, "a cast to float8 needs a scale, which a ring does not keep")


def paged_copy(op: str, table: PageTable, block_ids: torch.Tensor, rows: torch.Tensor, first_layer: int) -> None:
    """Raise ValueError if ``gather_pages`` or ``scatter_pages`` (``op`` says which) could not run on these."""
    _vector(op, "block_ids", block_ids, INT64, table.device, "block ids were left on the host")
    count = rows.shape[1] if rows.dim() == 4 else table.num_layers - first_layer
    if first_layer < 0 or count < 1 or first_layer + count > table.num_layers:
        got = f"{count} layers from first_layer={first_layer}"
        raise _wrong(op, "layers", f"at least 1, within the table's {table.num_layers}", got, "a buffer for other layers")
    shape = table.rows_shape(block_ids.numel(), count)
    name = "out" if op == "gather_pages" else "source"
    if tuple(rows.shape) != shape or rows.dtype != table.dtype or not (rows.is_contiguous() or rows.transpose(0, 1).is_contiguous()):
        wanted = f"contiguous {table.dtype} {shape}, or contiguous with planes and layers exchanged"
        raise _wrong(op, name, wanted, rows, "another geometry, or a cast, which a copy does not do")
    if rows.device != table.device and not (table.device.type == "cuda" and rows.is_pinned()):
        raise _wrong(op, name, f"on {table.device}, or pinned host memory beside CUDA pages", rows, "the buffer was made on another device")


def rope_shift(
    keys: torch.Tensor, old_positions: torch.Tensor, new_positions: torch.Tensor, inv_freq: torch.Tensor, out: torch.Tensor
) -> None:
    """Raise ValueError if ``rope_shift`` could not run on these."""
    op, device = "rope_shift", keys.device
    if keys.dim() != 3 or keys.dtype not in MATHS_DTYPES:
        raise _wrong(op, "keys", "[T, HK, D] of float32, bfloat16 or float16", keys, "float8 keys must be made float first")
    for name, positions in (("old_positions", old_positions), ("new_positions", new_positions)):
        _vector(op, name, positions, INT64, device, "positions were left on the host")
        if positions.numel() != keys.shape[0]:
            raise _wrong(op, name, f"{keys.shape[0]} positions, one a token", positions, "keys were cut and positions were not")
    _vector(op, "inv_freq", inv_freq, (torch.float32,), device, "inv_freq was left on the host or rounded")
    if 2 * inv_freq.numel() > keys.shape[2]:
        raise _wrong(op, "inv_freq", f"at most {keys.shape[2] // 2} pairs", inv_freq, "inv_freq of a model with larger heads")
    if out.shape != keys.shape or out.dtype != keys.dtype or out.device != device:
        raise _wrong(op, "out", f"{keys.dtype} {tuple(keys.shape)} on {device}", out, "out was made for other keys")


def attention_mass(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sliding_window: int,
    column_sums: torch.Tensor,
    row_lse: torch.Tensor,
) -> None:
    """Raise ValueError if ``attention_mass`` could not run on these."""
    op, device = "attention_mass", queries.device
    if queries.dim() != 3 or queries.dtype not in MATHS_DTYPES or queries.shape[0] < 1:
        raise _wrong(
            op, "queries", "[TQ >= 1, HQ, D] of float32, bfloat16 or float16", queries, "heads were flattened, or nothing was captured"
        )
    if keys.dim() != 3 or keys.dtype != queries.dtype or keys.device != device or keys.shape[2] != queries.shape[2]:
        raise _wrong(op, "keys", f"[T, HK, {queries.shape[2]}] {queries.dtype} on {device}", keys, "keys of another model or capture")
    if keys.shape[1] < 1 or queries.shape[1] % keys.shape[1]:
        got = f"HQ={queries.shape[1]}, HK={keys.shape[1]}"
        raise _wrong(op, "heads", "HQ a multiple of HK", got, "queries and keys of different tensor-parallel ranks")
    if keys.shape[0] < queries.shape[0]:
        got = f"T={keys.shape[0]}, TQ={queries.shape[0]}"
        raise _wrong(op, "tokens", "TQ <= T, since query i is token T - TQ + i", got, "keys of a shorter sequence")
    if window < 0 or sliding_window < 0 or softcap < 0 or not math.isfinite(scale):
        got = f"window={window}, sliding_window={sliding_window}, softcap={softcap}, scale={scale}"
        raise _wrong(op, "options", "0 for none or a positive number, and a finite scale", got, "-1 was used for none")
    for name, tensor, width in (("column_sums", column_sums, keys.shape[0]), ("row_lse", row_lse, queries.shape[0])):
        shape = (queries.shape[1], width)
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or tensor.device != device or not tensor.is_contiguous():
            raise _wrong(op, name, f"contiguous float32 {shape} on {device}", tensor, "an output made for another shape")
