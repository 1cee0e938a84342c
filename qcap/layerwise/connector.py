"""What layer by layer needs of others: something that moves one layer between host memory and pages, and host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from qcap.errors import ShapeError


class LayerConnector(Protocol):
    """Moves a layer's rows between host memory and pages, on whatever stream is current. It never makes the host wait.

    Whether an object is one is asked by ``layerwise``, not by its class; :class:`qcap.connectors.PagedConnector` is one.
    """

    layerwise: bool
    num_layers: int
    num_planes: int
    num_blocks: int
    """B: block ids are 0 to B - 1."""
    block_size: int
    hidden: int
    """H, elements of a token's row in one plane."""
    dtype: torch.dtype

    def prepare(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Block ids where :meth:`to_device` and :meth:`from_device` want them; a slice of it is good too. -1: leave this block out."""

    def to_device(self, layer: int, source: torch.Tensor, blocks: torch.Tensor) -> None:
        """Rows of one layer into its pages.

        Args:
            layer: index of the layer.
            source: host ``[planes, T, H]``, each plane contiguous; not given back before what was queued here is over.
            blocks: of :meth:`prepare`, ``T / block_size`` of them.
        """

    def from_device(self, layer: int, blocks: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        """Rows of one layer out of its pages, to ``targets``: host ``[planes, CH, H]`` each, one after the other over ``blocks``."""

    def new_staging(self, tokens: int) -> torch.Tensor:
        """A flat buffer beside the pages for ``tokens`` rows of all planes."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue one plain memory copy, into a part of such a buffer."""

    def write(self, layer: int, staged: torch.Tensor, blocks: torch.Tensor) -> None:
        """Rows of one layer from such a buffer, ``[planes, T, H]`` contiguous, into its pages."""


def check_blocks(connector: LayerConnector, blocks: Sequence[int]) -> None:
    """That every one of ``blocks`` is a page. What is moved to or from any other id is nothing, and nobody would hear of it.

    Raises:
        ShapeError: an id that is no integer or not one of the connector's, -1 too.
    """
    try:
        ids = np.asarray(blocks)
    except ValueError:  # lists of different lengths
        ids = np.empty((0, 0), dtype=object)
    if ids.shape == (0,):
        return
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ShapeError(f"block ids are a flat sequence of integers, got shape {ids.shape} of {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= connector.num_blocks:
        left_out = " (-1 leaves a block out in a connector's prepare() alone)" if low == -1 else ""
        raise ShapeError(
            f"block {low if low < 0 else high} does not exist{left_out}: these pages have blocks 0..{connector.num_blocks - 1}; give the "
            "ids of the request's own block table"
        )


class HostPool(Protocol):
    """Host memory, lent."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """An uninitialised contiguous tensor, page-locked where the device is a GPU; None if there is no room."""

    def give(self, piece: torch.Tensor, after: Any = None) -> None:
        """``piece`` may be used again once ``after`` (an event, or None) is over."""
