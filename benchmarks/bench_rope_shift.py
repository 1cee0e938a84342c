"""Re-rotation of one layer's keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Case, benchmark
from qcap import kernels
from qcap.geometry import Rope


@benchmark
def cases() -> Iterator[Case]:
    """8,192 kept tokens, both pairings; 256 tokens, and keys of which half the dims are rotated."""
    for tokens, rotary, interleaved in ((8192, 128, False), (8192, 128, True), (256, 128, False), (8192, 64, False)):
        inv_freq = Rope(rotary_dim=rotary, theta=5e5).inv_freq().cuda()
        keys = torch.randn(tokens, 8, 128, device="cuda", dtype=torch.bfloat16)
        out, new = torch.empty_like(keys), torch.arange(tokens, device="cuda")
        name = f"{tokens} x 8 x 128 bf16, {'interleaved' if interleaved else 'halves'}" + (f", {rotary} dims" if rotary < 128 else "")
        arguments = (keys, 2 * new, new, inv_freq, interleaved, out)
        yield Case("rope_shift", name, lambda a=arguments: kernels.rope_shift(*a), 2 * keys.nbytes)
