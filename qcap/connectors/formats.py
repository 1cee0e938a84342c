"""One layer of one chunk on the host: its tensor, which way round the tensor is, and where its keys stand."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from qcap.errors import ShapeError


class LayerFormat(Enum):
    """Which way round one layer of one chunk is; T tokens, H = heads x D."""

    KV_T2D = "KV_T2D"  # [T, 2, H]: a token's K row, then its V row
    KV_2TD = "KV_2TD"  # [2, T, H]: all K rows, then all V rows; a layer of a stored chunk is this
    KV_MLA = "KV_MLA"  # [T, H]: one latent row a token

    @property
    def planes(self) -> int:
        """Planes of a layer's pages that it fits."""
        return 1 if self is LayerFormat.KV_MLA else 2

    def shape(self, tokens: int, hidden: int) -> tuple[int, ...]:
        """Its shape for ``tokens`` tokens of ``hidden`` elements a row."""
        if self is LayerFormat.KV_T2D:
            return (tokens, 2, hidden)
        return (2, tokens, hidden) if self is LayerFormat.KV_2TD else (tokens, hidden)

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` of this format, seen as ``[planes, T, H]``; a view."""
        if self is LayerFormat.KV_T2D:
            return tensor.transpose(0, 1)
        return tensor if self is LayerFormat.KV_2TD else tensor.unsqueeze(0)


def layer_format(*, blending: bool = False, mla: bool = False) -> LayerFormat:
    """The format that a connector takes unless it is told another.

    Raises:
        ShapeError: blending with latent rows, whose keys cannot be re-rotated.
    """
    if mla and blending:
        raise ShapeError("blending re-rotates keys, and latent attention (MLA) keeps none: turn blending off for this model")
    if mla:
        return LayerFormat.KV_MLA
    return LayerFormat.KV_2TD if blending else LayerFormat.KV_T2D


@dataclass(eq=False)
class LayerObject:
    """One layer of one chunk in host memory.

    Args:
        tensor: of ``format``'s shape and the cache's dtype, contiguous (KV_2TD: each plane); pinned where a copy is to overlap with
            compute.
        format: which way round it is.
        positions: int64 ``[T]`` on the CPU, where its keys stand; None if nobody re-rotates. A store that knows them fills it in.
    """

    tensor: torch.Tensor
    format: LayerFormat
    positions: torch.Tensor | None = None


def rows_of(
    value: LayerObject | torch.Tensor, wanted: LayerFormat, tokens: int, hidden: int, dtype: torch.dtype, what: str
) -> torch.Tensor:
    """The rows ``[planes, T, H]`` of a host object, as a view of it.

    Args:
        value: a :class:`LayerObject`, or a tensor that is taken to be of the format ``wanted``.
        what: names the object in messages.

    Raises:
        ShapeError: another format, shape or dtype, or strides that would make the host wait for a copy.
    """
    if isinstance(value, LayerObject):
        if value.format is not wanted:
            raise ShapeError(
                f"{what}: its format is {value.format.value}, this connector takes {wanted.value}: give it format=, or convert"
            )
        value = value.tensor
    if not isinstance(value, torch.Tensor):
        raise ShapeError(f"{what}: wanted a tensor or a LayerObject, got {type(value).__name__}")
    shape = wanted.shape(tokens, hidden)
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise ShapeError(
            f"{what}: wanted {wanted.value} {shape} of {dtype}, got {tuple(value.shape)} of {value.dtype}: "
            "another format (format= at construction), other bounds, or a cast, which a copy does not do"
        )
    runs = value if wanted is LayerFormat.KV_2TD else (value,)
    if not all(run.is_contiguous() for run in runs):
        raise ShapeError(f"{what}: wanted {wanted.value} in contiguous runs, got strides {value.stride()}: a view the other way round?")
    return wanted.rows(value)
