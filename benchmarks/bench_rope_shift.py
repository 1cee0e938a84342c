"""Re-rotation of one layer's keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Case, benchmark
from qcap import kernels
from qcap.geometry import Rope


@benchmark
def cases() -> Iterator[Case]:
    """8,192 kept tokens, both pairings."""
    inv_freq = Rope(rotary_dim=128, theta=5e5).inv_freq().cuda()
    keys = torch.randn(8192, 8, 128, device="cuda", dtype=torch.bfloat16)
    out, new = torch.empty_like(keys), torch.arange(8192, device="cuda")
    old = new * 2
    for interleaved in (False, True):
        name = "interleaved" if interleaved else "halves"
        run = lambda i=interleaved: kernels.rope_shift(keys, old, new, inv_freq, i, out)  # noqa: E731
        yield Case("rope_shift", f"8192 x 8 x 128 bf16, {name}", run, 2 * keys.nbytes)
