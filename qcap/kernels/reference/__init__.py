"""The ops in plain torch: the truth that kernels are tested against, and the path for CPU tensors.

Not graph-safe: they allocate, and may wait for a device.
"""

from __future__ import annotations

from qcap.kernels.reference.attention_mass import attention_mass
from qcap.kernels.reference.host_read import host_read
from qcap.kernels.reference.paged_copy import gather_pages, scatter_pages
from qcap.kernels.reference.rope_shift import rope_shift, rope_shift_
from qcap.kernels.reference.row_scatter import row_scatter
from qcap.kernels.reference.slot_attribution import slot_attribution

__all__ = ["attention_mass", "gather_pages", "host_read", "rope_shift", "rope_shift_", "row_scatter", "scatter_pages", "slot_attribution"]
