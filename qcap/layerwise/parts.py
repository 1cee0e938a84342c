"""A load cut up for staging buffers: runs of chunks that lie side by side in memory, and what goes through one buffer at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from qcap.layerwise.connector import LayerConnector

Piece = tuple[torch.Tensor, int, int]
"""Tokens ``[first, last)`` of a run ``[planes, L, T, H]``."""


def merged(chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Chunks ``[planes, L, CH, H]`` as runs ``[planes, L, T, H]``: those that follow each other along the token axis in memory are one."""
    runs: list[torch.Tensor] = []
    tokens = behind = storage = 0
    strides: tuple[int, ...] = ()

    def close() -> None:
        if tokens > runs[-1].shape[2]:
            planes, layers, _, hidden = runs[-1].shape
            runs[-1] = runs[-1].as_strided((planes, layers, tokens, hidden), strides)

    for chunk in chunks:
        here, its_strides, its_storage = chunk.data_ptr(), chunk.stride(), chunk.untyped_storage().data_ptr()
        if runs and here == behind and its_strides == strides and its_storage == storage:
            tokens += chunk.shape[2]
        else:
            if runs:
                close()
            runs.append(chunk)
            tokens, strides, storage = chunk.shape[2], its_strides, its_storage
        behind = here + chunk.shape[2] * its_strides[2] * chunk.element_size()
    if runs:
        close()
    return runs


def pieces_of(chunks: Sequence[torch.Tensor], skip: int, tokens: int) -> Iterator[Piece]:
    """``tokens`` tokens of ``chunks``, from token ``skip`` of the first on."""
    for run in merged(chunks):
        last = min(run.shape[2], skip + tokens)
        if skip < last:
            yield run, skip, last
            tokens -= last - skip
        skip = max(skip - run.shape[2], 0)


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same tokens in fewer pieces: those that follow each other in memory are one."""
    found: list[Piece] = []
    for run, first, end in pieces:
        if found:
            before, start, last = found[-1]
            strides = before.stride()
            neighbours = run.stride() == strides and run.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
            if neighbours and before.storage_offset() + last * strides[2] == run.storage_offset() + first * strides[2]:
                last += end - first
                planes, layers, _, hidden = before.shape
                found[-1] = (before.as_strided((planes, layers, last, hidden), strides), start, last)
                continue
        found.append((run, first, end))
    return found


def cut(pieces: Sequence[Piece], capacity: int) -> list[list[Piece]]:
    """Pieces by staging buffer, ``capacity`` tokens each; only the last is not full."""
    parts: list[list[Piece]] = []
    room = 0
    for run, first, end in pieces:
        start = first
        while start < end:
            if not room:
                parts.append([])
                room = capacity
            last = min(end, start + room)
            parts[-1].append((run, start, last))
            room -= last - start
            start = last
    return parts


class Part:
    """What goes through a staging buffer at once, of any layer: piece by piece, each of them ``[planes, t, H]`` there.

    Attributes:
        lengths: tokens of each piece.
        size: elements of a layer of it.
        sources: ``[L, t * H]`` on the host, one for each piece and plane; ``[L, planes * t * H]`` of a piece whose planes lie side by side.
    """

    def __init__(self, connector: LayerConnector, pieces: Sequence[Piece]) -> None:
        self._planes, self._hidden = connector.num_planes, connector.hidden
        self.lengths = [end - start for _, start, end in pieces]
        self.size = sum(self.lengths) * connector.num_planes * connector.hidden
        self.sources: list[torch.Tensor] = []
        for (run, start, _), length in zip(pieces, self.lengths, strict=True):
            by_plane, by_layer, row, _ = run.stride()
            width, first = length * self._hidden, run.storage_offset() + start * row
            if by_plane == width:
                self.sources.append(run.as_strided((run.shape[1], self._planes * width), (by_layer, 1), first))
            else:
                self.sources += [run.as_strided((run.shape[1], width), (by_layer, 1), first + p * by_plane) for p in range(self._planes)]

    def places(self, buffer: torch.Tensor, begin: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Where each source goes in ``buffer``, flat, from element ``begin`` on; and what is then to be scattered, ``[planes, t, H]`` of
        each piece."""
        hidden, planes = self._hidden, self._planes
        begin += int(buffer.storage_offset())
        targets, staged, first = [], [], begin
        for source in self.sources:
            width = source.shape[1]
            targets.append(buffer.as_strided((width,), (1,), first))
            first += width
        first = begin
        for length in self.lengths:
            plane = length * hidden
            staged.append(buffer.as_strided((planes, length, hidden), (plane, hidden, 1), first))
            first += planes * plane
        return targets, staged
