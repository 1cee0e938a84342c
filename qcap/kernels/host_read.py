"""A few kilobytes from page-locked host memory, read by the device itself.

``host_read(source, target) -> None``

- source  [n] int64, contiguous, page-locked host memory, read when the kernel runs: it may be written again only after that.
- target  [n] int64, contiguous, on the device, written whole.

For what the next kernel on the stream needs. A copy engine does the same, but the stream has to wait for it and it for the stream: on an
H200 a decode step takes 12 us longer so. What is large belongs to a copy engine.

One program does BLOCK entries. Nothing is allocated and nothing waits; where ``source`` lies is an argument, so a recorded graph would read
that place again and again. Reference: ``reference/host_read.py``. Raises ValueError on a wrong shape, dtype, stride, device, or if the host
memory is not page-locked.
"""
# mypy: disable-error-code="import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qcap.kernels import checks
from qcap.kernels.launch import Launch

_BLOCK = 1024
_WARPS = 4


@triton.jit(do_not_specialize=["length"])
def host_read_kernel(
    target_ptr,  # [n]
    source_ptr,  # [n], host memory
    length,  # n
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source_ptr + index, mask=index < length, cache_modifier=".cv")  # what the host wrote, not what was cached
    tl.store(target_ptr + index, values, mask=index < length)


_launch = Launch(host_read_kernel)


def host_read(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy ``source`` (host) to ``target`` (device), on the current stream. The module's docstring is the contract."""
    checks.host_read(source, target)
    length = target.numel()
    if length:
        _launch(((length + _BLOCK - 1) // _BLOCK, 1, 1), (target, source), (torch.int64, torch.int64), (length,), (_BLOCK,), _WARPS)
