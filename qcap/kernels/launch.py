"""A kernel launched again without Triton's own argument binding.

An engine step launches ``row_scatter`` once a layer, and then the host's time for a launch counts. Triton binds and specialises the
arguments anew each time, which takes longer than the launch itself. :class:`Launch` does that once for each specialisation: it keeps the
compiled kernel that an ordinary launch gave back and runs it directly, with addresses and numbers, exactly as Triton's own ``run`` would.

What makes a compiled kernel the right one is the key (:func:`specialisation`): the current device, warps, constants, dtypes, which
addresses are multiples of 16, and of each number its integer type, whether it is 1 and whether it is a multiple of 16. Triton looks at
no more on CUDA. A test compares the key with Triton's own specialisation over random arguments.

The ordinary launch is taken where any of that is in doubt: in the interpreter, on HIP (which specialises on sizes too), while a profiler
hooks launches, or if this Triton's ``run`` ends in another call than the one made here. Triton's settings that change what is compiled
count as they are at the first launch.
"""
# mypy: disable-error-code="import-untyped, no-untyped-call"

from __future__ import annotations

import inspect
from typing import Any

import torch
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

_REMEMBERED = 4096  # exact calls; their keys are made anew after that many
_runtime = knobs.runtime
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # without a look at whether CUDA has been initialised
_RUN = (  # how Triton's JITFunction.run launches; Launch does the same
    "kernel.run(grid_0,grid_1,grid_2,stream,kernel.function,kernel.packed_metadata,launch_metadata,"
    "knobs.runtime.launch_enter_hook,knobs.runtime.launch_exit_hook,*bound_args.values())"
)


def specialisation(
    device: int,
    addresses: list[int],
    dtypes: tuple[torch.dtype, ...],
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
    num_warps: int,
) -> tuple[Any, ...]:
    """All that a compiled kernel depends on; equal keys mean the same compiled kernel."""
    return (
        device,
        num_warps,
        dtypes,
        constants,
        *[address % 16 == 0 for address in addresses],
        *[1 if n == 1 else (n % 16 == 0, _int_type(n)) for n in numbers],
    )


def _int_type(number: int) -> str:
    if -(2**31) <= number < 2**31:
        return "i32"
    return "i64" if number < 2**63 else "u64"


def runs_as_expected(kernel: Any) -> bool:
    """Whether this Triton compiles ``kernel`` for CUDA and launches it by the call that is made here."""
    if not isinstance(kernel, JITFunction) or torch.version.hip is not None or kernel.pre_run_hooks:
        return False
    try:
        return _RUN in "".join(inspect.getsource(JITFunction.run).split())
    except OSError:  # no source to read
        return False


def _is_watched() -> bool:
    """Whether someone, a profiler say, wants to hear of each launch."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook  # each a chain of calls, or in some versions a function or None
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Launch:
    """``launch(grid, tensors, dtypes, numbers, constants, num_warps)``: one kernel's launches.

    Args:
        kernel: a Triton kernel whose parameters are pointers, then integers, then constants.

    Call it with:

    - grid: three sizes, each at least 1.
    - tensors, dtypes: one a pointer, not empty, on one device; the kernel sees each tensor's bits as that dtype, of the same size.
    - numbers: one int (no bool) an integer parameter.
    - constants: one hashable a constant, of the same Python type each time.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._direct = runs_as_expected(kernel)
        self._bound: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # run, function, packed metadata; the kernel itself, to keep it alive
        self._exact: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # the same by all that the key is made from, which is quicker to look up

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
        dtypes: tuple[torch.dtype, ...],
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int,
    ) -> None:
        """Launch on the tensors' device and its current stream."""
        device = tensors[0].get_device()
        if device >= 0 and device != _current_device():
            with torch.cuda.device(device):  # Triton launches on the current device, whatever the tensors' device is
                return self(grid, tensors, dtypes, numbers, constants, num_warps)
        if not self._direct:
            self._ordinary(grid, tensors, dtypes, numbers, constants, num_warps)
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        low = 0
        for address in addresses:
            low |= address
        if low % 16:
            low = 1  # and each address's own, which only few calls need
            for address in addresses:
                low = low * 16 + address % 16
        else:
            low = 0
        exact = (device, low, numbers, constants, dtypes, num_warps)
        bound = self._exact.get(exact)
        if bound is None:
            key = specialisation(device, addresses, dtypes, numbers, constants, num_warps)
            bound = self._bound.get(key)
            if bound is None:
                self._bind(key, self._ordinary(grid, tensors, dtypes, numbers, constants, num_warps))
                return
            if len(self._exact) >= _REMEMBERED:
                self._exact.clear()
            self._exact[exact] = bound
        if _is_watched():
            self._ordinary(grid, tensors, dtypes, numbers, constants, num_warps)
            return
        run, function, metadata, _ = bound
        run(*grid, driver.active.get_current_stream(device), function, metadata, None, None, None, *addresses, *numbers, *constants)

    def _ordinary(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
        dtypes: tuple[torch.dtype, ...],
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int,
    ) -> Any:
        views = [tensor if tensor.dtype == dtype else tensor.view(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
        return self._kernel[grid](*views, *numbers, *constants, num_warps=num_warps)

    def _bind(self, key: tuple[Any, ...], compiled: Any) -> None:
        parts = [getattr(compiled, name, None) for name in ("run", "function", "packed_metadata")]
        if None not in parts:
            self._bound[key] = (*parts, compiled)
