"""Rows of one layer into the ring: a slice of fused QKV, as in an engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Case, benchmark
from qcap import kernels


@benchmark
def cases() -> Iterator[Case]:
    """Prefill and decode row counts of an 8B model and of a small one; then into one layer of a ring of all 32."""
    for rows, width, layers in ((8192, 4096, 1), (16384, 4096, 1), (64, 4096, 1), (8192, 576, 1), (8192, 4096, 32), (64, 4096, 32)):
        fused = torch.randn(rows, width * 3 // 2, device="cuda", dtype=torch.bfloat16)
        ring = torch.empty(2 * rows, layers, width, device="cuda", dtype=torch.bfloat16)[:, layers // 2]
        blocks = torch.randperm(2 * rows // 16, device="cuda")[: rows // 16]  # rows of a block stay together, blocks lie anywhere
        slots = (blocks[:, None] * 16 + torch.arange(16, device="cuda")).reshape(-1)
        query = fused[:, :width]
        nbytes = 2 * query.numel() * query.element_size() + slots.nbytes
        name = f"{rows} x {width} bf16" + (f", one of {layers} layers" if layers > 1 else "")
        yield Case("row_scatter", name, lambda q=query, s=slots, r=ring: kernels.row_scatter(q, s, r), nbytes)
