"""Launching a compiled kernel directly: only where it is the one that Triton itself would have taken."""

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from qcap.kernels import PageTable, gather_pages, launch, row_scatter, scatter_pages, slot_attribution

KERNELS = ("row_scatter", "slot_attribution", "paged_copy")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.int32, torch.int64, torch.uint8)
NUMBERS = (0, 1, 2, 15, 16, 17, 4096, -1, -16, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, -(2**31), -(2**31) - 1, 2**40, 2**40 + 1, 2**63 - 1)


def kernel_of(op):
    """The kernel as Triton compiles it, also in a process with the interpreter."""
    from importlib import import_module

    found = getattr(import_module(f"qcap.kernels.{op}"), f"{op}_kernel")
    return found if isinstance(found, JITFunction) else JITFunction(found.fn, **found.kwargs)


def random_arguments(kernel, rng):
    """(tensors, dtypes, numbers, constants) for the kernel's parameters, each varied where Triton might look."""
    tensors, numbers, constants = [], [], []
    for parameter in kernel.params:
        if parameter.is_constexpr:
            constants.append(rng.choice([True, False]) if parameter.name == "COUNT" else rng.choice([2, 16, 256]))
        elif parameter.name.endswith("_ptr"):
            storage = torch.zeros(256, dtype=torch.uint8)
            dtype = rng.choice(DTYPES)
            start = -storage.data_ptr() % 16 + rng.choice([0, 16, 32, 8, 24])
            tensors.append(storage[start : start + 64].view(dtype))
        else:
            numbers.append(rng.choice(NUMBERS))
    return tuple(tensors), tuple(tensor.dtype for tensor in tensors), tuple(numbers), tuple(constants)


@pytest.mark.parametrize("op", KERNELS)
def test_the_key_tells_apart_all_that_triton_does(op):
    kernel = kernel_of(op)
    bind = create_function_from_signature(kernel.signature, kernel.params, CUDABackend)
    rng, seen = random.Random(7), {}
    base = random_arguments(kernel, rng)
    for _ in range(6000):
        fresh = random_arguments(kernel, rng)
        mixed = [list(part) for part in base]
        for part, other in zip(mixed, fresh, strict=True):  # one or two changes at a time, so that a missed one cannot hide
            if rng.random() < 0.5 and part:
                at = rng.randrange(len(part))
                part[at] = other[at]
        tensors, numbers, constants = tuple(mixed[0]), tuple(mixed[2]), tuple(mixed[3])
        base = (tensors, tuple(tensor.dtype for tensor in tensors), numbers, constants)
        addresses = [tensor.data_ptr() for tensor in tensors]
        key = launch.specialisation(0, addresses, base[1], numbers, constants, 4)
        _, theirs, options = bind(*tensors, *numbers, *constants, num_warps=4)
        assert options == {"num_warps": 4}
        assert seen.setdefault(key, str(theirs)) == str(theirs)
    assert len(set(seen.values())) > 500


def test_the_key_holds_device_and_warps():
    def key(device, warps):
        return launch.specialisation(device, [64], (torch.int64,), (3,), (16,), warps)

    assert len({key(device, warps) for device in (0, 1) for warps in (4, 8)}) == 4


@pytest.mark.parametrize("op", KERNELS)
def test_pointers_then_numbers_then_constants(op):  # the order in which Launch passes them
    kinds = ["constant" if p.is_constexpr else "pointer" if p.name.endswith("_ptr") else "number" for p in kernel_of(op).params]
    assert kinds == sorted(kinds, key=["pointer", "number", "constant"].index) and set(kinds) == {"pointer", "number", "constant"}


def test_this_triton_launches_as_expected():  # where not, all still works, slower: then read launch.py against the new Triton
    assert launch.runs_as_expected(kernel_of("row_scatter")) == (torch.version.hip is None)
    assert not launch.runs_as_expected(SimpleNamespace(pre_run_hooks=[]))


def test_another_triton_is_not_trusted(monkeypatch):
    monkeypatch.setattr(launch, "_RUN", launch._RUN.replace("stream,", ""))
    assert not launch.runs_as_expected(kernel_of("row_scatter"))


class FakeKernel:
    """Counts ordinary launches, and gives back something that counts direct ones."""

    def __init__(self):
        self.ordinary, self.direct, self.function = [], [], "function"

    def __getitem__(self, grid):
        def call(*args, num_warps):
            self.ordinary.append((grid, [a.dtype if isinstance(a, torch.Tensor) else a for a in args], num_warps))
            return SimpleNamespace(run=lambda *args: self.direct.append(args), function=self.function, packed_metadata="metadata")

        return call


@pytest.fixture
def fake(monkeypatch):
    kernel = FakeKernel()
    monkeypatch.setattr(launch, "runs_as_expected", lambda kernel: True)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 77)))
    return kernel, launch.Launch(kernel)


def test_the_second_launch_is_direct(fake):
    kernel, call = fake
    rows = torch.zeros(64, dtype=torch.bfloat16)
    for _ in range(3):
        call((4, 2, 1), (rows,), (torch.int16,), (5, 1), (16, True), 8)
    assert kernel.ordinary == [((4, 2, 1), [torch.int16, 5, 1, 16, True], 8)]
    assert kernel.direct == [(4, 2, 1, 77, "function", "metadata", None, None, None, rows.data_ptr(), 5, 1, 16, True)] * 2
    call((9, 1, 1), (rows,), (torch.int16,), (6, 1), (16, True), 8)  # another number of the same kind, another grid
    assert len(kernel.ordinary) == 1 and kernel.direct[-1][:3] == (9, 1, 1) and kernel.direct[-1][-4] == 6
    call((9, 1, 1), (rows[1:],), (torch.int16,), (6, 1), (16, True), 8)  # another alignment
    call((9, 1, 1), (rows,), (torch.int16,), (16, 1), (16, True), 8)  # another kind of number
    call((9, 1, 1), (rows,), (torch.bfloat16,), (6, 1), (16, True), 8)
    call((9, 1, 1), (rows,), (torch.int16,), (6, 1), (16, True), 4)
    assert len(kernel.ordinary) == 5 and len(kernel.direct) == 3


def test_exact_calls_are_forgotten_and_made_anew(fake, monkeypatch):
    kernel, call = fake
    monkeypatch.setattr(launch, "_REMEMBERED", 3)
    rows = torch.zeros(64)
    for number in (3, 5, 7, 9, 11, 3, 5, 16, 3):
        call((1, 1, 1), (rows,), (torch.float32,), (number,), (16,), 4)
    assert len(kernel.ordinary) == 2 and [args[-2] for args in kernel.direct] == [5, 7, 9, 11, 3, 5, 3]


def test_a_profiler_sees_every_launch(fake, monkeypatch):
    kernel, call = fake
    arguments = ((1, 1, 1), (torch.zeros(4),), (torch.float32,), (5,), (16,), 4)
    call(*arguments)
    monkeypatch.setattr(launch, "_is_watched", lambda: True)
    call(*arguments)
    call(*arguments)
    monkeypatch.undo()
    from triton import knobs

    assert not launch._is_watched()
    knobs.runtime.launch_enter_hook.add(print)
    try:
        assert launch._is_watched()
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    assert len(kernel.ordinary) == 3 and not kernel.direct


def test_what_cannot_be_bound_is_launched_as_always(fake):
    kernel, call = fake
    kernel.function = None
    for _ in range(3):
        call((1, 1, 1), (torch.zeros(4),), (torch.float32,), (5,), (16,), 4)
    assert len(kernel.ordinary) == 3 and not kernel.direct


def test_direct_equals_ordinary(cuda, monkeypatch):  # the fast path is the slow one with known work left out
    """Random arguments, every one launched three ways: first (which binds), again (direct), and never directly."""
    from importlib import import_module

    module = import_module("qcap.kernels.row_scatter")
    if not module._launch._direct:
        pytest.skip("launches as always here")
    rng, direct, before = random.Random(3), 0, len(module._launch._bound)
    for _ in range(150):
        width, offset = rng.choice([1, 3, 16, 33, 2049]), rng.choice([0, 1, 8])
        count, slots, step = rng.choice([1, 5, 16]), rng.choice([1, 7, 16, 64]), rng.choice([1, 1, 2])
        source, target = rng.choice([(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.int64, torch.int64)])
        rows = (torch.randn(count, offset + width * step, device=cuda) * 50).to(source)[:, offset::step]
        ring_slots = torch.randperm(64, device=cuda)[:count] - 1
        results = []
        for way in ("bind", "again", "ordinary"):
            ring_all = torch.full((slots, 2, width + 1), -7, device=cuda).to(target)
            monkeypatch.setattr(module._launch, "_direct", way != "ordinary")
            held = len(module._launch._bound)
            row_scatter(rows, ring_slots, ring_all[:, 1, :width])
            direct += way == "again" and len(module._launch._bound) == held
            results.append(ring_all)
        assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[2])
    assert direct == 150 and len(module._launch._bound) > before


def test_direct_equals_ordinary_for_slots(cuda, monkeypatch):
    from importlib import import_module

    module, rng = import_module("qcap.kernels.slot_attribution"), random.Random(5)
    if not module._launch._direct:
        pytest.skip("launches as always here")
    for _ in range(80):
        rows, count, size = rng.choice([1, 16, 17, 300]), rng.choice([1, 2, 16, 33]), rng.choice([1, 16])
        dtype, spare, room = rng.choice([torch.int64, torch.int32]), rng.choice([0, 1]), rng.choice([0, 3, 16])
        mapping = torch.randint(-3, 40 * size, (rows + spare,), device=cuda).to(dtype)[spare:]
        table = [number for block in range(count) for number in (block, 0, size, block * size)]
        words = [count, 9, count, 0, *table, *(block << 32 | block for block in range(count))]
        plan = torch.tensor([0] * spare + words + [0] * room, device=cuda)[spare:]
        results = []
        for way in ("bind", "again", "ordinary"):
            out = [torch.full((n,), -9, dtype=torch.int64, device=cuda) for n in (rows + spare, 64)]
            out.append(torch.zeros(count, dtype=torch.int32, device=cuda))
            monkeypatch.setattr(module._launch, "_direct", way != "ordinary")
            slot_attribution(mapping, plan, size, out[0][spare:], *out[1:])
            results.append(torch.cat([tensor.long() for tensor in out]))
        assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[2])


def test_direct_equals_ordinary_for_pages(cuda, monkeypatch):
    from importlib import import_module

    module, rng, direct = import_module("qcap.kernels.paged_copy"), random.Random(11), 0
    if not module._launch._direct:
        pytest.skip("launches as always here")
    for _ in range(100):
        layers, heads, size, dim = rng.choice([1, 2, 17]), rng.choice([1, 2, 8]), rng.choice([1, 3, 16]), rng.choice([1, 8, 24, 128])
        blocks, offset, side_by_side = rng.choice([1, 16, 33]), rng.choice([0, 1]), rng.choice([True, False])
        dtype = rng.choice([torch.bfloat16, torch.float32, torch.uint8])
        storage = torch.randint(0, 100, (layers, blocks, 2, size, heads, dim + offset), device=cuda).to(dtype)[..., offset:]
        table = PageTable([[page[:, plane].transpose(1, 2) for plane in range(2)] for page in storage])
        first = rng.randrange(layers)
        count = rng.randrange(1, layers - first + 1)
        ids = torch.randint(0, blocks, (rng.choice([1, 2, 16]) + 1,), device=cuda)[rng.choice([0, 1]) :].unique()
        shape = (2, count, len(ids) * size, heads * dim)
        results = []
        for way in ("bind", "again", "ordinary"):
            monkeypatch.setattr(module._launch, "_direct", way != "ordinary")
            out = torch.full((count, 2, *shape[2:]) if side_by_side else shape, 7, device=cuda).to(dtype)
            rows = out.transpose(0, 1) if side_by_side else out
            held = len(module._launch._bound)
            gather_pages(table, ids, rows, first)
            wanted = torch.stack([storage[first : first + count, ids, plane].flatten(1, 2).flatten(2) for plane in range(2)])
            assert torch.equal(rows, wanted)
            direct += way == "again" and len(module._launch._bound) == held
            before = storage.clone()
            scatter_pages(table, ids, rows + 1, first)
            results.append(storage.clone())
            storage.copy_(before)
        assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[2])
        assert not torch.equal(results[0], storage)
    assert direct == 100


def test_another_device_than_the_current_one(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    from qcap.kernels.row_scatter import row_scatter as launcher

    for function in (row_scatter, launcher):
        for index in (1, 0, 1, 0):
            device = torch.device("cuda", index)
            rows, ring = torch.randn(4, 32, device=device), torch.zeros(4, 32, device=device)
            function(rows, torch.arange(4, device=device), ring)
            assert torch.equal(rows, ring) and torch.cuda.current_device() == 0
