"""Attribution of a step's rows: what it costs is the launch, so bytes and shares mean little here."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Case, benchmark
from qcap import kernels


@benchmark
def cases() -> Iterator[Case]:
    """One long request, and many of one row."""
    for rows, planned in ((16384, 1100), (8192, 512), (64, 64)):
        capacity, ring = 1200, 4096 * 16
        plan = torch.randint(0, 1 << 40, (1 + capacity, 4))  # what lies past the count is not looked at
        ids = torch.randperm(20000)[:planned].sort().values
        plan[0] = torch.tensor([planned, 7, 0, 0])
        plan[1 : 1 + planned] = torch.stack([ids, ids * 0, ids * 0 + 16, torch.randperm(4096)[:planned] * 16], dim=1)
        slots = (ids[torch.arange(rows) * planned // rows] * 16 + torch.arange(rows) % 16).cuda()
        plan, out, stamps = plan.cuda(), torch.empty(rows, dtype=torch.int64, device="cuda"), torch.empty(ring, dtype=torch.int64).cuda()
        yield Case(
            "slot_attribution",
            f"{rows} rows, {planned} blocks",
            lambda m=slots, p=plan, o=out, s=stamps: kernels.slot_attribution(m, p, 16, o, s),
            3 * out.nbytes + 32 * planned,
        )
