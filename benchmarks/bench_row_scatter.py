"""Rows of one layer into the ring: a slice of fused QKV, as in an engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Case, benchmark
from qcap import kernels


@benchmark
def cases() -> Iterator[Case]:
    """Prefill and decode row counts of an 8B model and of a small one."""
    for rows, width in ((8192, 4096), (16384, 4096), (64, 4096), (8192, 576)):
        fused = torch.randn(rows, width * 3 // 2, device="cuda", dtype=torch.bfloat16)
        ring = torch.empty(2 * rows, width, device="cuda", dtype=torch.bfloat16)
        blocks = torch.randperm(2 * rows // 16, device="cuda")[: rows // 16]  # rows of a block stay together, blocks lie anywhere
        slots = (blocks[:, None] * 16 + torch.arange(16, device="cuda")).reshape(-1)
        query = fused[:, :width]
        nbytes = 2 * query.numel() * query.element_size() + slots.nbytes
        yield Case("row_scatter", f"{rows} x {width} bf16", lambda q=query, s=slots, r=ring: kernels.row_scatter(q, s, r), nbytes)
