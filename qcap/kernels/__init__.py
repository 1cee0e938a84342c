"""Device work on rows, slots and pages. Imports nothing of qcap but this folder, reads no setting, and touches no device on import.

One op, one name: ``kernels/x.py`` is the Triton kernel with its launcher, ``kernels/reference/x.py`` the same function in plain torch.
The functions here choose between them by the tensors' device: CUDA and HIP run the kernel, everything else the reference. Both check
their arguments alike (:mod:`qcap.kernels.checks`) and raise ``ValueError`` with what was got, what was wanted, and the likely cause.

Triton is imported on the first call with a CUDA tensor, so a machine without it can use all of this on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from qcap.kernels import checks, reference
from qcap.kernels.page_table import PageTable
from qcap.kernels.reference.row_scatter import row_scatter_layers as _reference_row_scatter_layers

__all__ = [
    "PageTable",
    "attention_mass",
    "gather_pages",
    "host_read",
    "rope_shift",
    "rope_shift_",
    "row_scatter",
    "row_scatter_layers",
    "scatter_pages",
    "slot_attribution",
]


class _Package(ModuleType):
    """Keeps ``kernels.row_scatter`` the function: the import system would put the submodule of that name over it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


_launchers: dict[str, Callable[..., None]] = {}  # by function: a step calls these often, and an import statement has its price


def _launcher(op: str, function: str) -> Callable[..., None]:
    launcher = _launchers.get(function)
    if launcher is None:
        launcher = _launchers[function] = getattr(import_module(f"{__name__}.{op}"), function)
    return launcher


def _launch(op: str, function: str, device: torch.device, *args: Any, **kwargs: Any) -> None:
    launcher = _launcher(op, function)
    if device.index == torch.cuda.current_device():
        launcher(*args, **kwargs)
        return
    with torch.cuda.device(device):  # Triton launches on the current device, whatever the tensors' device is
        launcher(*args, **kwargs)


def slot_attribution(
    slot_mapping: torch.Tensor,
    plan: torch.Tensor,
    block_size: int,
    ring_slots: torch.Tensor,
    stamps: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> None:
    """Where each row of a step goes in the ring; -1 for a row that is not wanted. See :mod:`qcap.kernels.slot_attribution`."""
    if slot_mapping.is_cuda:
        # No change of device: qcap.kernels.launch does that where it is needed.
        launcher = _launchers.get("slot_attribution") or _launcher("slot_attribution", "slot_attribution")
        launcher(slot_mapping, plan, block_size, ring_slots, stamps, counts)
        return
    checks.slot_attribution(slot_mapping, plan, block_size, ring_slots, stamps, counts)
    reference.slot_attribution(slot_mapping, plan, block_size, ring_slots, stamps, counts)


def host_read(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a few int64 from page-locked memory to the device, without a copy engine. See :mod:`qcap.kernels.host_read`."""
    if target.is_cuda:
        launcher = _launchers.get("host_read") or _launcher("host_read", "host_read")
        launcher(source, target)  # likewise
        return
    checks.host_read(source, target)
    reference.host_read(source, target)


def row_scatter(rows: torch.Tensor, ring_slots: torch.Tensor, ring: torch.Tensor) -> None:
    """Write rows to their ring slots, dropping negative and out-of-range ones. See :mod:`qcap.kernels.row_scatter`."""
    if rows.is_cuda:
        launcher = _launchers.get("row_scatter") or _launcher("row_scatter", "row_scatter")
        launcher(rows, ring_slots, ring)  # likewise
        return
    checks.row_scatter(rows, ring_slots, ring)
    reference.row_scatter(rows, ring_slots, ring)


def row_scatter_layers(rows: Sequence[torch.Tensor], ring_slots: torch.Tensor, ring: torch.Tensor) -> None:
    """:func:`row_scatter` of 1 to 8 layers, one tensor each, into ``ring`` ``[S, G, H]``. See :mod:`qcap.kernels.row_scatter`."""
    if ring.is_cuda:
        launcher = _launchers.get("row_scatter_layers") or _launcher("row_scatter", "row_scatter_layers")
        launcher(rows, ring_slots, ring)  # likewise
        return
    checks.row_scatter_layers(rows, ring_slots, ring)
    _reference_row_scatter_layers(rows, ring_slots, ring)


def gather_pages(table: PageTable, block_ids: torch.Tensor, out: torch.Tensor, first_layer: int = 0) -> None:
    """Copy blocks of ``out``'s layers out of the pages into ``out`` ``[planes, l, nb*N, H]``. See :mod:`qcap.kernels.paged_copy`."""
    if table.pointers.is_cuda:
        launcher = _launchers.get("gather_pages") or _launcher("paged_copy", "gather_pages")
        launcher(table, block_ids, out, first_layer)  # likewise
        return
    checks.paged_copy("gather_pages", table, block_ids, out, first_layer)
    reference.gather_pages(table, block_ids, out, first_layer)


def scatter_pages(table: PageTable, block_ids: torch.Tensor, source: torch.Tensor, first_layer: int = 0) -> None:
    """The inverse of :func:`gather_pages`: copy ``source`` ``[planes, l, nb*N, H]`` into blocks of its layers' pages."""
    if table.pointers.is_cuda:
        launcher = _launchers.get("scatter_pages") or _launcher("paged_copy", "scatter_pages")
        launcher(table, block_ids, source, first_layer)  # likewise
        return
    checks.paged_copy("scatter_pages", table, block_ids, source, first_layer)
    reference.scatter_pages(table, block_ids, source, first_layer)


def rope_shift(
    keys: torch.Tensor,
    old_positions: torch.Tensor,
    new_positions: torch.Tensor,
    inv_freq: torch.Tensor,
    interleaved: bool,
    out: torch.Tensor,
) -> None:
    """Re-rotate keys from their old to their new positions, into ``out``. See :mod:`qcap.kernels.rope_shift`."""
    if keys.is_cuda:
        _launch("rope_shift", "rope_shift", keys.device, keys, old_positions, new_positions, inv_freq, interleaved, out)
        return
    checks.rope_shift(keys, old_positions, new_positions, inv_freq, out)
    reference.rope_shift(keys, old_positions, new_positions, inv_freq, interleaved, out)


def rope_shift_(
    keys: torch.Tensor, old_positions: torch.Tensor, new_positions: torch.Tensor, inv_freq: torch.Tensor, interleaved: bool
) -> None:
    """:func:`rope_shift` in place."""
    rope_shift(keys, old_positions, new_positions, inv_freq, interleaved, keys)


def attention_mass(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sliding_window: int = 0,
    column_sums: torch.Tensor,
    row_lse: torch.Tensor,
) -> None:
    """How much attention each key gets, without the T x T matrix. See :mod:`qcap.kernels.attention_mass`."""
    options = {"window": window, "softcap": softcap, "sliding_window": sliding_window}
    if queries.is_cuda:
        device = queries.device
        _launch("attention_mass", "attention_mass", device, queries, keys, scale, **options, column_sums=column_sums, row_lse=row_lse)
        return
    checks.attention_mass(queries, keys, scale, window, softcap, sliding_window, column_sums, row_lse)
    reference.attention_mass(
        queries,
        keys,
        scale,
        window=window,
        softcap=softcap,
        sliding_window=sliding_window,
        column_sums=column_sums,
        row_lse=row_lse,
    )
