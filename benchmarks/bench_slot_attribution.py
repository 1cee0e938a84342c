"""Attribution of a step's rows: what it costs is the launch, so bytes and shares mean little here."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Case, benchmark
from qcap import kernels


@benchmark
def cases() -> Iterator[Case]:
    """One long request, some, many of one row, and a ring of blocks, which is planned as a request a block."""
    block, room, ring = 16, 4 + 4 * 512 + 1600, 4096 * 16
    for rows, planned, requests in ((16384, 1024, 1), (16384, 1100, 128), (8192, 512, 512), (64, 64, 64)):
        ids = torch.randperm(20000)[:planned]
        places = torch.arange(planned)
        first_place = torch.arange(requests) * planned // requests
        blocks = torch.diff(first_place, append=torch.tensor([planned]))
        table = torch.stack([first_place, first_place * 0, blocks * block, first_place * block], dim=1)
        plan = torch.randint(0, 1 << 40, (room,))  # what lies past the keys is not looked at
        plan[:4] = torch.tensor([planned, 7, requests, 0])
        plan[4 : 4 + 4 * requests] = table.flatten()
        plan[4 + 4 * requests : 4 + 4 * requests + planned] = (ids << 32 | places).sort().values
        slots = (ids[torch.arange(rows) * planned // rows] * block + torch.arange(rows) % block).cuda()
        plan, out, stamps = plan.cuda(), torch.empty(rows, dtype=torch.int64, device="cuda"), torch.empty(ring, dtype=torch.int64).cuda()
        counts = torch.zeros(512, dtype=torch.int32, device="cuda")
        for name, given in (("", None), (", counted", counts)):
            yield Case(
                "slot_attribution",
                f"{rows} rows, {planned} blocks, {requests} requests{name}",
                lambda m=slots, p=plan, o=out, s=stamps, c=given: kernels.slot_attribution(m, p, block, o, s, c),
                3 * out.nbytes + 8 * planned + 32 * requests,
            )
