"""Kernels run compiled where there is a CUDA device, and in Triton's interpreter everywhere else.

The interpreter is chosen when Triton is imported, for the whole process, so without a device these tests need a process of their own:
``pytest tests/kernels`` is one. A run over more than this folder (which may import vLLM, and so Triton) collects ``test_own_process.py``
alone from here, and that starts the process.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
COMPILED = torch.cuda.is_available()
MATHS_TOLERANCE = {  # by the dtype of the result; copies are exact and do not look here
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}
_FOREIGN = pytest.StashKey[bool]()


def pytest_configure(config):
    paths = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    inside = all(path.is_relative_to(HERE) for path in paths)
    ready = COMPILED or os.environ.get("TRITON_INTERPRET") == "1"
    if not ready and inside and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
        ready = True
    if not ready and any(path.is_relative_to(HERE) and path.is_file() for path in paths):
        raise pytest.UsageError("without a CUDA device, files of tests/kernels run in a pytest of their own: name no others beside them")
    config.stash[_FOREIGN] = not ready


def pytest_ignore_collect(collection_path, config):
    if collection_path.suffix == ".py" and collection_path.parent == HERE:
        starts_the_process = collection_path.name == "test_own_process.py"
        return True if starts_the_process != config.stash[_FOREIGN] else None
    return None


@pytest.fixture
def device():
    return torch.device("cuda", 0) if COMPILED else torch.device("cpu")


@pytest.fixture
def cuda():
    if not COMPILED:
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", 0)


@pytest.fixture(params=["kernel", "reference"])
def load(request):
    """``load(op, function)``: the launcher of the kernel, then the reference."""
    folder = "qcap.kernels" if request.param == "kernel" else "qcap.kernels.reference"

    def launcher(op, function=None):
        return getattr(import_module(f"{folder}.{op}"), function or op)

    launcher.interpreted = request.param == "kernel" and not COMPILED
    return launcher


@pytest.fixture
def pair():
    """``pair(op, function)``: (launcher of the kernel, reference)."""

    def both(op, function=None):
        return [getattr(import_module(f"{folder}.{op}"), function or op) for folder in ("qcap.kernels", "qcap.kernels.reference")]

    return both


@pytest.fixture
def guarded(device):
    """``guarded(shape, dtype, poison)`` -> (whole, inner): ``inner`` lies in ``whole`` with spare poisoned rows on both sides."""

    def make(shape, dtype, poison):
        count = torch.Size(shape).numel()
        guard = 2 * (shape[-1] if shape else 1) + 64
        whole = torch.full((guard + count + guard,), poison, device=device, dtype=torch.float32 if dtype.itemsize == 1 else dtype).to(dtype)
        return whole, whole[guard : guard + count].view(shape)

    return make


@pytest.fixture
def same_bits():
    def compare(left, right):
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
        assert left.dtype == right.dtype and left.shape == right.shape
        assert torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))

    return compare


@pytest.fixture
def close():
    def compare(left, right):
        torch.testing.assert_close(left, right.to(left.dtype), **MATHS_TOLERANCE[left.dtype])

    return compare


@contextmanager
def looks_forbidden():
    """Any wait for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")  # A31
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def silent(cuda):
    """``silent(call)``: after a first call, which compiles, ``call`` neither waits for the device nor allocates on it."""

    def check(call):
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with looks_forbidden():
            call()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        torch.cuda.synchronize()

    return check


@pytest.fixture
def captured(cuda):
    """``captured(call)``: a replay function of ``call`` recorded into a CUDA graph, with every look at the device forbidden."""

    def record(call):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()  # compiles
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with looks_forbidden():
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            call()
        return lambda: (graph.replay(), torch.cuda.synchronize())

    return record
