"""Attribution of a step's rows: what it costs is the launch, so bytes and shares mean little here."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Case, benchmark
from qcap import kernels
from qcap.attribution import PLAN_PADDING


@benchmark
def cases() -> Iterator[Case]:
    """One long request, and many of one row."""
    for rows, planned in ((16384, 1100), (8192, 512), (64, 64)):
        capacity = 1200
        blocks = torch.full((capacity,), PLAN_PADDING, dtype=torch.int64)
        ids = torch.randperm(20000)[:planned].sort().values
        blocks[:planned] = ids
        ring = torch.randperm(4096)[:capacity]
        slots = (ids[torch.arange(rows) * planned // rows] * 16 + torch.arange(rows) % 16).cuda()
        blocks, ring, out = blocks.cuda(), ring.cuda(), torch.empty(rows, dtype=torch.int64, device="cuda")
        yield Case(
            "slot_attribution",
            f"{rows} rows, {planned} blocks",
            lambda s=slots, b=blocks, r=ring, o=out: kernels.slot_attribution(s, b, r, 16, o),
            2 * out.nbytes + 2 * 8 * planned,
        )
