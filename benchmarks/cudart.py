"""The few calls of the CUDA runtime that torch has no name for, from the library that torch has loaded."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch


@functools.cache
def library() -> Any:
    """torch's own libcudart. Raises OSError if this process has none."""
    torch.cuda.init()
    mapped = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    for path in sorted({fields[5] for fields in mapped if len(fields) == 6}):
        if Path(path).name.startswith("libcudart"):
            return ctypes.CDLL(path)
    raise OSError("torch has loaded no libcudart")


def version() -> int:
    """Of the runtime, as 1000 * major + 10 * minor."""
    number = ctypes.c_int()
    _check(library().cudaRuntimeGetVersion(ctypes.byref(number)))
    return number.value


def why_no_batches() -> str:
    """Why there is no ``cudaMemcpyBatchAsync`` here; "" if there is."""
    try:
        found = hasattr(library(), "cudaMemcpyBatchAsync")
    except OSError as error:
        return str(error)
    return "" if found and version() >= 12080 else f"the CUDA runtime {version()} has no cudaMemcpyBatchAsync (12.8 and up has)"


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (("order", ctypes.c_int), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


_IN_STREAM_ORDER = 1


class Copies:
    """Plain copies between addresses, in one direction: by one call of the runtime each, or as one batch.

    Args:
        targets, sources: int64 arrays of addresses.
        nbytes: of each copy.
        to_host: device to host, else host to device.
    """

    def __init__(self, targets: np.ndarray, sources: np.ndarray, nbytes: int, *, to_host: bool) -> None:
        count = len(targets)
        self._targets, self._sources = (np.ascontiguousarray(a, dtype=np.uint64) for a in (targets, sources))
        self._sizes = np.full(count, nbytes, dtype=np.uint64)
        self._list = list(zip(self._targets.tolist(), self._sources.tolist(), strict=True))
        self._nbytes, self._kind = nbytes, 2 if to_host else 1
        self._attributes = _Attributes(order=_IN_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t(0)
        self._copy = library().cudaMemcpyAsync
        self._copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        addresses, sizes = ctypes.c_void_p, ctypes.c_size_t
        if not why_no_batches():
            self._batch = library().cudaMemcpyBatchAsync
            self._fails = version() < 13000  # up to 12.x the call also tells which copy failed
            more = (ctypes.c_void_p,) if self._fails else ()
            self._batch.argtypes = (addresses, addresses, addresses, sizes, ctypes.c_void_p, ctypes.c_void_p, sizes, *more, ctypes.c_void_p)

    def one_by_one(self, stream: torch.cuda.Stream) -> None:
        """One call a copy."""
        copy, nbytes, kind, handle = self._copy, self._nbytes, self._kind, stream.cuda_stream
        for target, source in self._list:
            if copy(target, source, nbytes, kind, handle):
                raise RuntimeError("cudaMemcpyAsync failed")

    def batch(self, stream: torch.cuda.Stream) -> None:
        """One call for all. The stream must not be the legacy default stream."""
        pointers = (array.ctypes.data for array in (self._targets, self._sources, self._sizes))
        attributes = (ctypes.addressof(self._attributes), ctypes.addressof(self._first), 1)
        failed = (ctypes.addressof(self._failed),) if self._fails else ()
        _check(self._batch(*pointers, len(self._sizes), *attributes, *failed, stream.cuda_stream))


def _check(code: int) -> None:
    if code:
        name = library().cudaGetErrorString
        name.restype = ctypes.c_char_p
        raise RuntimeError(f"the CUDA runtime says: {name(code).decode()}")
