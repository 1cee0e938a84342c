"""How much attention each key gets, without ever holding the T x T matrix.

``attention_mass(queries, keys, scale, *, window=0, softcap=0.0, sliding_window=0, column_sums, row_lse) -> None``

- queries      [TQ >= 1, HQ, D]  float32, bfloat16 or float16, any strides, read. Query i is token T - TQ + i.
- keys         [T >= TQ, HK, D]  queries' dtype, any strides, read. HQ is a multiple of HK; query head h reads key head h // (HQ / HK).
- scale        softmax scale.      softcap > 0: logits become ``softcap * tanh(logits / softcap)``, after the scale.
- window       w > 0: only the last w queries add to ``column_sums``; 0: all.
- sliding_window  s > 0: key j is seen by token i only if i - j < s; 0: by all tokens i >= j.
- column_sums  [HQ, T]   float32, contiguous, written whole: per key, its softmax probability summed over contributing queries.
- row_lse      [HQ, TQ]  float32, contiguous, written whole: natural log of the sum of exp of each query's visible logits, all queries.

Products are summed in float32 (float32 inputs: no TF32). Two passes without atomics, so equal inputs give equal bits: a program of the
first does BLOCK_M queries of a head over (a split of) their keys; one of the second BLOCK_N keys of a head. Graph-safe: grids come from
shapes, no allocation, no wait. Reference: ``reference/attention_mass.py``. Raises ValueError on a wrong shape, dtype, stride or device.
"""
# mypy: disable-error-code="import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qcap.kernels import checks


@triton.jit
def _load_rows(ptr, row, head, stride_token, stride_head, stride_dim, num_rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    dim = tl.arange(0, BLOCK_D)
    ptrs = ptr + head * stride_head + row.to(tl.int64)[:, None] * stride_token + dim.to(tl.int64)[None, :] * stride_dim
    return tl.load(ptrs, mask=(row < num_rows)[:, None] & (dim < D)[None, :], other=0.0)


@triton.jit
def _logits(q, k, token, column, num_keys, scale, softcap, sliding_window, SOFTCAP: tl.constexpr, SLIDING: tl.constexpr):
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
    if SOFTCAP:
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)  # tanh
    visible = (column[None, :] <= token[:, None]) & (column < num_keys)[None, :]
    if SLIDING:
        visible = visible & (token[:, None] - column[None, :] < sliding_window)
    return tl.where(visible, logits, float("-inf"))


@triton.jit
def row_lse_kernel(
    q_ptr, k_ptr, lse_ptr,  # [TQ, HQ, D], [T, HK, D], [HQ, stride_head]: split s's log-sum-exps at s * TQ
    stride_head: tl.int64, keys_per_split, num_queries, num_keys, scale, softcap, sliding_window,
    q_stride_token: tl.int64, q_stride_head: tl.int64, q_stride_dim, k_stride_token: tl.int64, k_stride_head: tl.int64, k_stride_dim,
    GROUP: tl.constexpr, D: tl.constexpr, SOFTCAP: tl.constexpr, SLIDING: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first_row = tl.program_id(0) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    shift = num_keys - num_queries  # query i is token i + shift
    q = _load_rows(q_ptr, row, head, q_stride_token, q_stride_head, q_stride_dim, num_queries, D, BLOCK_D)
    begin = split * keys_per_split
    if SLIDING:
        begin = tl.maximum(begin, tl.maximum(first_row + shift - sliding_window + 1, 0) // BLOCK_N * BLOCK_N)
    end = tl.minimum(tl.minimum(first_row + BLOCK_M, num_queries) + shift, (split + 1) * keys_per_split)
    peak, total = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32), tl.zeros([BLOCK_M], dtype=tl.float32)
    for first_column in range(begin, end, BLOCK_N):
        column = first_column + tl.arange(0, BLOCK_N)
        k = _load_rows(k_ptr, column, head // GROUP, k_stride_token, k_stride_head, k_stride_dim, num_keys, D, BLOCK_D)
        logits = _logits(q, k, row + shift, column, num_keys, scale, softcap, sliding_window, SOFTCAP, SLIDING)
        new_peak = tl.maximum(peak, tl.max(logits, axis=1))
        anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing visible yet: -inf - -inf would be NaN
        total = total * tl.exp(peak - anchor) + tl.sum(tl.exp(logits - anchor[:, None]), axis=1)
        peak = new_peak
    empty = total == 0  # a padded row, or one whose keys all lie in other splits
    lse = tl.where(empty, float("-inf"), peak + tl.log(tl.where(empty, 1.0, total)))
    tl.store(lse_ptr + head * stride_head + split.to(tl.int64) * num_queries + row, lse, mask=row < num_queries)


@triton.jit
def join_lse_kernel(
    parts_ptr, lse_ptr, stride_head: tl.int64, num_queries, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    row, split = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_S)
    inside, real = (row < num_queries)[None, :], (split < SPLITS)[:, None]
    ptrs = parts_ptr + head * stride_head + split.to(tl.int64)[:, None] * num_queries + row[None, :]
    parts = tl.where(real, tl.load(ptrs, mask=inside & real, other=0.0), float("-inf"))  # each row sees a key in one of them
    peak = tl.max(parts, axis=0)
    tl.store(lse_ptr + head * num_queries + row, peak + tl.log(tl.sum(tl.exp(parts - peak[None, :]), axis=0)), mask=row < num_queries)


@triton.jit
def column_sums_kernel(
    q_ptr, k_ptr, lse_ptr, sums_ptr,  # [TQ, HQ, D], [T, HK, D], [HQ, TQ], [HQ, T]
    num_queries, num_keys, first_query, scale, softcap, sliding_window,
    q_stride_token: tl.int64, q_stride_head: tl.int64, q_stride_dim, k_stride_token: tl.int64, k_stride_head: tl.int64, k_stride_dim,
    GROUP: tl.constexpr, D: tl.constexpr, SOFTCAP: tl.constexpr, SLIDING: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    first_column = tl.program_id(0) * BLOCK_N
    column = first_column + tl.arange(0, BLOCK_N)
    shift = num_keys - num_queries
    k = _load_rows(k_ptr, column, head // GROUP, k_stride_token, k_stride_head, k_stride_dim, num_keys, D, BLOCK_D)
    begin = tl.maximum(first_column - shift, first_query) // BLOCK_M * BLOCK_M
    end = num_queries
    if SLIDING:
        end = tl.minimum(end, first_column + BLOCK_N - 1 + sliding_window - shift)
    sums = tl.zeros([BLOCK_N], dtype=tl.float32)
    for first_row in range(begin, end, BLOCK_M):
        row = first_row + tl.arange(0, BLOCK_M)
        counts = (row >= first_query) & (row < num_queries)
        q = _load_rows(q_ptr, row, head, q_stride_token, q_stride_head, q_stride_dim, num_queries, D, BLOCK_D)
        logits = _logits(q, k, row + shift, column, num_keys, scale, softcap, sliding_window, SOFTCAP, SLIDING)
        lse = tl.load(lse_ptr + head * num_queries + row, mask=counts, other=float("inf"))
        sums += tl.sum(tl.where(counts[:, None], tl.exp(logits - lse[:, None]), 0.0), axis=0)
    tl.store(sums_ptr + head * num_keys + column, sums, mask=column < num_keys)


def key_splits(num_queries: int, num_keys: int, block: int) -> tuple[int, int]:
    """How many programs share a row's keys, and the keys of each; splits * TQ <= T, so that the parts fit into ``column_sums``."""
    wanted = max(1, min(32, num_keys // max(num_queries, 1), triton.cdiv(num_keys, 4 * block)))  # few queries alone leave a device idle
    keys_per_split = triton.cdiv(triton.cdiv(num_keys, wanted), block) * block
    return triton.cdiv(num_keys, keys_per_split), keys_per_split


def attention_mass(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, *, window: int = 0, softcap: float = 0.0, sliding_window: int = 0,
    column_sums: torch.Tensor, row_lse: torch.Tensor,
) -> None:  # fmt: skip
    """Sum of softmax probabilities each key receives, and each query's log-sum-exp. The module's docstring is the contract."""
    checks.attention_mass(queries, keys, scale, window, softcap, sliding_window, column_sums, row_lse)
    (num_queries, heads, head_size), num_keys = queries.shape, keys.shape[0]
    first_query = num_queries - window if 0 < window < num_queries else 0
    block = 32 if queries.dtype == torch.float32 or head_size > 128 else 64
    strides = (*queries.stride(), *keys.stride())
    options = {
        "GROUP": heads // keys.shape[1], "D": head_size, "SOFTCAP": softcap > 0, "SLIDING": sliding_window > 0,
        "BLOCK_M": block, "BLOCK_N": block, "BLOCK_D": max(16, triton.next_power_of_2(head_size)),
    }  # fmt: skip
    splits, per_split = key_splits(num_queries, num_keys, block)
    parts, stride_head = (column_sums, num_keys) if splits > 1 else (row_lse, num_queries)  # the sums come last: until then, room for parts
    row_lse_kernel[(triton.cdiv(num_queries, block), heads, splits)](
        queries, keys, parts, stride_head, per_split, num_queries, num_keys, scale, softcap, sliding_window, *strides, **options
    )
    if splits > 1:
        join = (splits, triton.next_power_of_2(splits), 64)  # SPLITS, BLOCK_S, BLOCK_M
        join_lse_kernel[(triton.cdiv(num_queries, 64), heads)](parts, row_lse, num_keys, num_queries, *join)
    column_sums_kernel[(triton.cdiv(num_keys, block), heads)](
        queries, keys, row_lse, column_sums, num_queries, num_keys, first_query, scale, softcap, sliding_window, *strides, **options
    )
