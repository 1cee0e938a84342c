"""Pages of all layers to chunk objects and back, in the layouts that engines use."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Case, benchmark
from qcap import kernels

LAYERS, HEADS, SIZE, N = 32, 8, 128, 16


def pages(layout: str, blocks: int) -> list[list[torch.Tensor]]:
    """``[L][2]`` views ``[B, H, N, D]``."""
    views = []
    for _ in range(LAYERS):
        if layout == "NHD":  # [B, 2, N, H, D]
            t = torch.randn(blocks, 2, N, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
            views.append([t[:, 0].transpose(1, 2), t[:, 1].transpose(1, 2)])
        else:  # [B, H, N, K|V]
            t = torch.randn(blocks, HEADS, N, 2 * SIZE, device="cuda", dtype=torch.bfloat16)
            views.append([t[..., :SIZE], t[..., SIZE:]])
    return views


@benchmark
def cases() -> Iterator[Case]:
    """One chunk of 256 tokens, and 8,192 tokens, all layers (or some) in one launch."""
    for layout in ("NHD", "K|V"):
        table = kernels.PageTable(pages(layout, 1024))
        for tokens in (256, 8192):
            ids = torch.randperm(1024, device="cuda")[: tokens // N]
            rows = torch.empty(2, LAYERS, tokens, HEADS * SIZE, device="cuda", dtype=torch.bfloat16)
            nbytes = 2 * rows.nbytes
            yield Case(
                "paged_copy", f"gather {layout} {tokens} tokens", lambda i=ids, r=rows, t=table: kernels.gather_pages(t, i, r), nbytes
            )
            yield Case(
                "paged_copy", f"scatter {layout} {tokens} tokens", lambda i=ids, r=rows, t=table: kernels.scatter_pages(t, i, r), nbytes
            )
        part = rows[:, : LAYERS // 4].clone()
        run = lambda i=ids, r=part, t=table: kernels.gather_pages(t, i, r, LAYERS // 2)  # noqa: E731
        yield Case("paged_copy", f"gather {layout} 8192 tokens, {LAYERS // 4} layers", run, 2 * part.nbytes)
    ring = [torch.randn(1024, 1, N, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    table = kernels.PageTable([[layer] for layer in ring])
    ids = torch.randperm(1024, device="cuda")[: 256 // N]
    rows = torch.empty(1, LAYERS, 256, 4096, device="cuda", dtype=torch.bfloat16)
    yield Case("paged_copy", "gather ring 256 tokens", lambda: kernels.gather_pages(table, ids, rows), 2 * rows.nbytes)
