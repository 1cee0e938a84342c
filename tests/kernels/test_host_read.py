"""Page-locked host memory, read by the device."""

import pytest
import torch


def source_of(values, device):
    source = torch.as_tensor(values, dtype=torch.int64)
    return source.pin_memory() if device.type == "cuda" else source


@pytest.mark.parametrize("length", [0, 1, 255, 1024, 1025, 5000])
def test_all_of_it_and_nothing_beside_it(load, device, guarded, same_bits, length):
    whole, target = guarded((length,), torch.int64, -7)
    wanted, start = whole.clone(), target.storage_offset()
    values = torch.randint(-(1 << 62), 1 << 62, (length,))
    wanted[start : start + length] = values.to(device)
    load("host_read")(source_of(values, device), target)
    same_bits(whole, wanted)


def test_a_part_of_a_buffer(load, device, same_bits):
    source = source_of(range(600), device)
    target = torch.zeros(600, dtype=torch.int64, device=device)
    load("host_read")(source[:512], target[:512])
    assert torch.equal(target[:512].cpu(), torch.arange(512)) and not target[512:].any()


def test_what_was_written_since_is_what_is_read(load, device):  # R25: one buffer, step after step
    source, target = source_of([0] * 700, device), torch.zeros(700, dtype=torch.int64, device=device)
    for step in range(1, 40):
        source[:] = step
        load("host_read")(source, target)
        assert bool((target == step).all()), f"step {step}"  # waits for the device


def test_it_is_in_order_on_its_stream_and_the_host_waits_for_nothing(cuda):
    from qcap import kernels
    from tests.kernels.conftest import looks_forbidden

    sources = [torch.full((1024,), i).pin_memory() for i in range(20)]
    target, sums = torch.zeros(1024, dtype=torch.int64, device=cuda), torch.zeros(20, dtype=torch.int64, device=cuda)
    kernels.host_read(sources[0], target)
    torch.cuda.synchronize()
    with looks_forbidden():
        torch.cuda._sleep(10_000_000)
        for i, source in enumerate(sources):
            kernels.host_read(source, target)
            torch.sum(target, 0, out=sums[i])
    assert sums.tolist() == [1024 * i for i in range(20)]


@pytest.mark.parametrize(
    "source, target, what",
    [
        (torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64), "source"),
        (torch.zeros(2, 2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), "source"),
        (torch.zeros(8, dtype=torch.int64)[::2], torch.zeros(4, dtype=torch.int64), "source"),
        (torch.zeros(4, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)[::2], "target"),
        (torch.zeros(4, dtype=torch.int64), torch.zeros(4), "target"),
        (torch.zeros(4, dtype=torch.int64), torch.zeros(5, dtype=torch.int64), "target"),
    ],
)
def test_what_is_wrong_is_told(source, target, what):
    from qcap import kernels

    with pytest.raises(ValueError, match=f"host_read: {what}: wanted"):
        kernels.host_read(source, target)


def test_memory_that_is_not_page_locked_is_refused(cuda):
    from qcap import kernels

    target = torch.zeros(4, dtype=torch.int64, device=cuda)
    with pytest.raises(ValueError, match="page-locked"):
        kernels.host_read(torch.zeros(4, dtype=torch.int64), target)
    with pytest.raises(ValueError, match="source"):
        kernels.host_read(target, target)
