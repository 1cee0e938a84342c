"""Column sums of attention: bound by arithmetic, so the time is what counts; bytes are those of Q, K and the sums."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Case, benchmark
from qcap import kernels


@benchmark
def cases() -> Iterator[Case]:
    """All queries of 8k and 32k tokens, and the last 64 of 32k (SnapKV's window)."""
    for tokens, window in ((8192, 0), (32768, 0), (32768, 64)):
        count = window or tokens
        q = torch.randn(count, 32, 128, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(tokens, 8, 128, device="cuda", dtype=torch.bfloat16)
        sums = torch.empty(32, tokens, device="cuda", dtype=torch.float32)
        lse = torch.empty(32, count, device="cuda", dtype=torch.float32)
        run = lambda q=q, k=k, s=sums, e=lse, w=window: kernels.attention_mass(q, k, 128**-0.5, window=w, column_sums=s, row_lse=e)  # noqa: E731
        yield Case("attention_mass", f"{count} queries, {tokens} keys", run, q.nbytes + k.nbytes + sums.nbytes + lse.nbytes)
