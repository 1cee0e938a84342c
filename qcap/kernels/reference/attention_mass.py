"""Reference of :mod:`qcap.kernels.attention_mass`; the contract is there."""

from __future__ import annotations

import torch

_CHUNK = 128  # queries at a time: HQ x 128 x T floats are held, never T x T


def attention_mass(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sliding_window: int = 0,
    column_sums: torch.Tensor,
    row_lse: torch.Tensor,
) -> None:
    """Sum of softmax probabilities each key receives, and each query's log-sum-exp."""
    total_queries, query_heads, _ = queries.shape
    total, key_heads, _ = keys.shape
    repeated = keys.float().repeat_interleave(query_heads // key_heads, dim=1).permute(1, 2, 0)  # [HQ, D, T]
    columns = torch.arange(total, device=keys.device)
    first_contributing = total_queries - window if 0 < window < total_queries else 0
    column_sums.zero_()
    for start in range(0, total_queries, _CHUNK):
        stop = min(start + _CHUNK, total_queries)
        logits = torch.matmul(queries[start:stop].float().transpose(0, 1), repeated) * scale  # [HQ, chunk, T]
        if softcap > 0:
            logits = softcap * torch.tanh(logits / softcap)
        tokens = torch.arange(start, stop, device=keys.device)[:, None] + (total - total_queries)
        hidden = columns > tokens
        if sliding_window > 0:
            hidden |= tokens - columns >= sliding_window
        logits = logits.masked_fill(hidden, float("-inf"))
        row_lse[:, start:stop] = torch.logsumexp(logits, dim=-1)
        contributing = max(first_contributing - start, 0)
        column_sums += torch.softmax(logits, dim=-1)[:, contributing:].sum(dim=1)
