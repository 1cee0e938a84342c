"""What every op checks before it runs: shape, dtype, stride and device. Nothing here looks at a tensor's contents or waits for a device."""

from __future__ import annotations

import math

import torch

from qcap.kernels.page_table import PageTable

INT_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MATHS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROW_DTYPES = (*MATHS_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64)  # int64: a step number a row


def _wrong(op: str, name: str, wanted: str, got: object, cause: str) -> ValueError:
    if isinstance(got, torch.Tensor):
        got = f"{got.dtype} {tuple(got.shape)} with stride {got.stride()} on {got.device}"
    return ValueError(f"{op}: {name}: wanted {wanted}; got {got}. Likely cause: {cause}")


def _vector(op: str, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device, cause: str) -> None:
    if tensor.dim() != 1 or tensor.dtype not in dtypes or tensor.device != device or (tensor.numel() > 1 and tensor.stride(0) != 1):
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise _wrong(op, name, f"contiguous {names} [n] on {device}", tensor, cause)


def slot_attribution(
    slot_mapping: torch.Tensor, block_ids: torch.Tensor, ring_blocks: torch.Tensor, block_size: int, ring_slots: torch.Tensor
) -> None:
    """Raise ValueError if ``slot_attribution`` could not run on these."""
    op, device = "slot_attribution", slot_mapping.device
    _vector(op, "slot_mapping", slot_mapping, INT_DTYPES, device, "not the engine's slot_mapping")
    _vector(op, "block_ids", block_ids, (torch.int64,), device, "the step's plan was built on the host and not copied")
    _vector(op, "ring_blocks", ring_blocks, (torch.int64,), device, "the step's plan was built on the host and not copied")
    _vector(op, "ring_slots", ring_slots, (torch.int64,), device, "the persistent buffer was made for another device")
    if block_size < 1:
        raise _wrong(op, "block_size", "at least 1", block_size, "the engine's cache_config was read before it was set")
    if block_ids.numel() < 1 or block_ids.numel() != ring_blocks.numel():
        got = f"{block_ids.numel()} and {ring_blocks.numel()}"
        raise _wrong(op, "block_ids and ring_blocks", "the same length, at least 1", got, "an empty plan is one padded entry")
    if ring_slots.numel() < slot_mapping.numel():
        got = f"{ring_slots.numel()} < {slot_mapping.numel()}"
        raise _wrong(op, "ring_slots", "at least as many entries as slot_mapping", got, "slot_mapping is longer than the step: slice it")


def row_scatter(rows: torch.Tensor, ring_slots: torch.Tensor, ring: torch.Tensor) -> None:
    """Raise ValueError if ``row_scatter`` could not run on these."""
    op = "row_scatter"
    if rows.dim() != 2 or rows.dtype not in ROW_DTYPES:
        raise _wrong(op, "rows", "[R, H] of float32, bfloat16, float16, float8 or int64", rows, "heads were not flattened")
    _vector(op, "ring_slots", ring_slots, (torch.int64,), rows.device, "slots of another step or device")
    if ring_slots.numel() < rows.shape[0]:
        raise _wrong(op, "ring_slots", f"at least {rows.shape[0]} entries", ring_slots, "rows are padded and slots are not")
    if ring.dim() != 2 or ring.shape[1] != rows.shape[1] or not ring.is_contiguous() or ring.device != rows.device:
        wanted = f"contiguous [S, {rows.shape[1]}] on {rows.device}"
        raise _wrong(op, "ring", wanted, ring, "the ring was sized for another head count, head size or device")
    if ring.dtype != rows.dtype and ring.dtype not in MATHS_DTYPES:
        wanted = f"float32, bfloat16, float16 or the rows' own {rows.dtype}"
        raise _wrong(op, "ring", wanted, ring, "a cast to float8 needs a scale, which a ring does not keep")


def paged_copy(op: str, table: PageTable, block_ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Raise ValueError if ``gather_pages`` or ``scatter_pages`` (``op`` says which) could not run on these."""
    _vector(op, "block_ids", block_ids, (torch.int64,), table.device, "block ids were left on the host")
    shape = table.rows_shape(block_ids.numel())
    name = "out" if op == "gather_pages" else "source"
    if tuple(rows.shape) != shape or rows.dtype != table.dtype or not rows.is_contiguous():
        raise _wrong(op, name, f"contiguous {table.dtype} {shape}", rows, "another geometry, or a cast, which a copy does not do")
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
        _vector(op, name, positions, (torch.int64,), device, "positions were left on the host")
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
