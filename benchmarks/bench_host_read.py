"""A step's plan on its way to the device: read by a kernel, and copied by a copy engine, each between two kernels that need it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Case, benchmark
from qcap import kernels


@benchmark
def cases() -> Iterator[Case]:
    """Plans of a decode step, of a long prefill and of a large batch."""
    for length in (512, 1024, 4096):
        source = torch.arange(length).pin_memory()
        target = torch.zeros(length, dtype=torch.int64, device="cuda")

        def check(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
            kernels.host_read(source, target.zero_())
            if not torch.equal(target.cpu(), source):
                raise RuntimeError("host_read wrote something else")

        def between(way: object, source: torch.Tensor = source, target: torch.Tensor = target) -> None:
            target.add_(1)
            if way is None:
                target.copy_(source, non_blocking=True)
            else:
                kernels.host_read(source, target)
            target.add_(1)

        yield Case(
            "host_read",
            f"{8 * length >> 10} KiB between two small kernels",
            lambda between=between: between(kernels.host_read),
            8 * length,
            rate="from_pinned",
            check=check,
            peer=lambda between=between: between(None),
            peer_name="a copy engine",
        )
