"""Rows into ring slots."""

import pytest
import torch

POISON = -7


def make_rows(shape, dtype, device):
    """Values that every float dtype but float8 holds exactly: Triton's interpreter does not round a cast to bfloat16 to nearest."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randint(-128, 128, shape, generator=generator) / 16).to(dtype).to(device)


def slots_of(values, device):
    return torch.tensor(values, dtype=torch.int64, device=device)


def by_hand(rows, slots, ring):
    """The ring afterwards, one row at a time."""
    ring = ring.clone()
    for row, slot in zip(rows, slots.tolist(), strict=False):
        if 0 <= slot < ring.shape[0]:
            ring[slot] = row.to(ring.dtype)
    return ring


def check(function, guarded, same_bits, rows, slots, num_slots, dtype):
    whole, ring = guarded((num_slots, rows.shape[1]), dtype, POISON)
    wanted = whole.clone()
    start = ring.storage_offset()
    wanted[start : start + ring.numel()] = by_hand(rows, slots, ring).flatten()
    function(rows, slots, ring)
    same_bits(whole, wanted)
    return ring


def test_slot_is_block_and_offset(load, device, guarded, same_bits):  # R24 R25 R26: blocks of 8, slot 10 is row 2 of block 1
    rows = make_rows((4, 16), torch.float32, device)
    ring = check(load("row_scatter"), guarded, same_bits, rows, slots_of([0, -1, 10, -7], device), 32, torch.float32)
    blocks = ring.view(4, 8, 16)
    assert torch.equal(blocks[1, 2], rows[2]) and torch.equal(blocks[0, 0], rows[0])
    assert int((ring != POISON).any(dim=1).sum()) == 2


def test_first_last_and_out_of_range_slots(load, device, guarded, same_bits):  # R34
    rows = make_rows((7, 5), torch.float32, device)
    slots = slots_of([8, 0, 9, 2**31, 2**40, -(2**40), 1], device)
    check(load("row_scatter"), guarded, same_bits, rows, slots, 9, torch.float32)


def test_all_dropped(load, device, guarded, same_bits):  # R27
    check(
        load("row_scatter"), guarded, same_bits, make_rows((3, 8), torch.float32, device), slots_of([-1, -1, -9], device), 4, torch.float32
    )


@pytest.mark.parametrize("rows", [0, 1])
def test_no_row_and_one_row(load, device, guarded, same_bits, rows):  # R32
    check(load("row_scatter"), guarded, same_bits, make_rows((rows, 8), torch.float32, device), slots_of([1, 0], device), 4, torch.float32)


def test_slots_past_the_rows_are_not_used(load, device, guarded, same_bits):
    check(
        load("row_scatter"), guarded, same_bits, make_rows((2, 8), torch.float32, device), slots_of([1, 3, 0, 2], device), 4, torch.float32
    )


@pytest.mark.parametrize("width", [1, 3, 16, 33, 576, 2047, 2048, 2049, 4100])
def test_any_width(load, device, guarded, same_bits, width):
    rows = make_rows((5, width), torch.bfloat16, device)
    check(load("row_scatter"), guarded, same_bits, rows, slots_of([5, -1, 0, 3, 6], device), 6, torch.bfloat16)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
def test_casts(load, device, guarded, same_bits, source, target):  # R28
    check(load("row_scatter"), guarded, same_bits, make_rows((4, 24), source, device), slots_of([2, 0, -1, 1], device), 3, target)


@pytest.mark.parametrize("source", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("target", [None, torch.float32, torch.bfloat16])
def test_float8_rows(load, device, guarded, same_bits, source, target):
    if source == torch.float8_e4m3fn and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8_e4m3fn is cast by compute capability 8.9 and up")
    rows = torch.arange(-20, 20, device=device).view(4, 10).float().to(source)
    slots = slots_of([2, 0, -1, 1], device)
    if target is not None:
        check(load("row_scatter"), guarded, same_bits, rows, slots, 3, target)
        return
    whole, ring = guarded((3, 10), source, POISON)
    before = whole.view(torch.uint8).clone()
    load("row_scatter")(rows, slots, ring)
    start = ring.storage_offset()
    before[start : start + 30] = rows.view(torch.uint8)[[1, 3, 0]].flatten()
    assert torch.equal(whole.view(torch.uint8), before)


def test_cast_rounds_to_nearest_even(pair, cuda):  # R28: real hardware only, see make_rows
    rows = torch.randn(64, 100, device=cuda) * torch.logspace(-6, 6, 100, device=cuda)
    for dtype in (torch.bfloat16, torch.float16):
        ring = torch.full((64, 100), float("nan"), dtype=dtype, device=cuda)
        pair("row_scatter")[0](rows, torch.arange(64, device=cuda), ring)
        assert torch.equal(ring, rows.to(dtype))


def test_same_dtype_is_bit_for_bit(load, device, same_bits):  # NaN payloads and -0.0 survive
    bits = torch.tensor([[0x7FC1, 0x7F81, -32768, 1, -1, 0x7F80]], dtype=torch.int16, device=device)
    ring = torch.zeros(2, 6, dtype=torch.bfloat16, device=device)
    load("row_scatter")(bits.view(torch.bfloat16), slots_of([1], device), ring)
    assert torch.equal(ring.view(torch.int16)[1], bits[0])


def test_int64_rows(load, device, guarded, same_bits):  # a stamp a row, wider than a float holds
    rows = torch.tensor([[2**62 + 1], [-5], [7]], device=device)
    check(load("row_scatter"), guarded, same_bits, rows, slots_of([2, -1, 0], device), 3, torch.int64)
    check(load("row_scatter"), guarded, same_bits, rows[:1].expand(3, 1), slots_of([0, 1, 2], device), 3, torch.int64)


def test_strided_rows(load, device, guarded, same_bits):  # R31
    fused = make_rows((6, 100), torch.float32, device)
    slots = slots_of([3, 1, -1, 0, 2, 5], device)
    for rows in (fused[:, :32], fused[:, 37:70], fused[::2, :32], fused[:, ::3], fused.t().contiguous().t(), fused[:1, :32].expand(6, 32)):
        assert rows.numel() > 0
        check(load("row_scatter"), guarded, same_bits, rows, slots, 5, torch.bfloat16)


@pytest.mark.parametrize(("rows_dtype", "ring_dtype"), [(torch.float32, torch.bfloat16), (torch.float16, torch.float16)])
def test_one_layer_of_a_ring_of_all(load, device, guarded, same_bits, rows_dtype, ring_dtype):  # the other layers stay as they are
    slots, width = slots_of([4, 0, -1, 5, 6, 1], device), 33
    for layers, layer in ((3, 0), (3, 1), (3, 2), (1, 0)):
        whole, ring_all = guarded((6, layers, width), ring_dtype, POISON)
        rows, wanted = make_rows((6, width + 3), rows_dtype, device)[:, 3:], whole.clone()
        start, ring = ring_all.storage_offset(), ring_all[:, layer, :]
        wanted[start : start + ring_all.numel()].view(ring_all.shape)[:, layer] = by_hand(rows, slots, ring)
        load("row_scatter")(rows, slots, ring)
        same_bits(whole, wanted)
        assert int((whole != POISON).sum()) > 0


def test_a_ring_cut_from_wider_rows(load, device, guarded, same_bits):
    whole, wide = guarded((5, 40), torch.float32, POISON)
    rows, slots, wanted = make_rows((3, 8), torch.float32, device), slots_of([4, -1, 0], device), whole.clone()
    wanted[wide.storage_offset() :][: wide.numel()].view(5, 40)[[4, 0], 7:15] = rows[[0, 2]]
    load("row_scatter")(rows, slots, wide[:, 7:15])
    same_bits(whole, wanted)


def test_a_ring_of_one_column_may_have_any_column_stride(load, device):
    whole = torch.zeros(4, 3, dtype=torch.int64, device=device)
    load("row_scatter")(torch.tensor([[5], [6]], device=device), slots_of([3, 1], device), whole.t()[1:2].t())
    assert whole.tolist() == [[0, 0, 0], [0, 6, 0], [0, 0, 0], [0, 5, 0]]


@pytest.mark.parametrize("which", ["ring", "rows"])
def test_offsets_of_more_than_32_bits(load, device, which):
    """A few rows 2**30 apart, in memory that is asked for and, on the CPU, never touched. A 32-bit offset would land before the first."""
    try:
        storage = torch.empty(2**32 + 2**31 + 64, dtype=torch.float8_e5m2, device=device)
    except RuntimeError as error:
        pytest.skip(f"no room for 6 GiB: {error}")
    far = storage[2**31 :].as_strided((5, 8), (2**30, 1))
    assert (far.shape[0] - 1) * far.stride(0) == 2**32
    near = torch.arange(1, 41, device=device).view(5, 8).float().to(torch.float8_e5m2)
    bits = torch.uint8
    if which == "ring":
        far.view(bits).zero_()
        load("row_scatter")(near[:3], slots_of([4, 2, 3], device), far)
        assert torch.equal(far.view(bits)[[4, 2, 3]], near.view(bits)[:3]) and not far.view(bits)[:2].any()
    else:
        far.copy_(near)
        ring = torch.zeros(5, 8, dtype=torch.float8_e5m2, device=device)
        load("row_scatter")(far, slots_of([1, 0, 3, 4, 2], device), ring)
        assert torch.equal(ring.view(bits)[[1, 0, 3, 4, 2]], near.view(bits))


def test_rows_land_by_slot_not_by_order(load, device, guarded, same_bits):  # A4
    rows = make_rows((40, 12), torch.float32, device)
    slots = torch.randperm(64)[:40].to(device)
    ring = check(load("row_scatter"), guarded, same_bits, rows, slots, 64, torch.float32)
    assert torch.equal(ring[slots], rows)


def good(device):
    rows, ring = torch.zeros(4, 8, device=device), torch.zeros(6, 8, device=device)
    return {"rows": rows, "ring_slots": torch.zeros(4, dtype=torch.int64, device=device), "ring": ring}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("rows", lambda t: t.view(4, 2, 4), "not flattened"),
        ("rows", lambda t: t.double(), "float64"),
        ("rows", lambda t: t[:, :4], "(6, 8)"),
        ("ring_slots", lambda t: t.int(), "int32"),
        ("ring_slots", lambda t: t[:3], "at least 4"),
        ("ring_slots", lambda t: torch.cat([t, t])[::2], "stride"),
        ("ring", lambda t: t.t().contiguous().t(), "contiguous"),
        ("ring", lambda t: torch.cat([t, t], dim=1)[:, ::2], "column stride"),
        ("ring", lambda t: t.view(3, 2, 8), "(3, 2, 8)"),
        ("ring", lambda t: t.to(torch.float8_e5m2), "scale"),
        ("ring", lambda t: t.int(), "int32"),
    ],
)
def test_wrong_arguments(device, name, change, words):  # R33
    from qcap import kernels
    from qcap.kernels.row_scatter import row_scatter

    arguments = good(device)
    arguments[name] = change(arguments[name])
    for function in (kernels.row_scatter, row_scatter):
        with pytest.raises(ValueError, match="Likely cause") as error:
            function(**arguments)
        assert words in str(error.value) and "wanted" in str(error.value) and "got" in str(error.value)


@pytest.mark.parametrize("layers", [1, 3])
def test_replays_in_a_graph(pair, cuda, captured, layers):  # C36 A31
    kernel, reference = pair("row_scatter")
    fused, slots = torch.randn(33, 3 * 96, device=cuda), torch.arange(40, device=cuda)
    rows, ring_all = fused[:, 96:192], torch.full((50, layers, 96), POISON, dtype=torch.bfloat16, device=cuda)
    replay = captured(lambda: kernel(rows, slots, ring_all[:, layers - 1]))
    for _ in range(2):
        fused.normal_()
        slots.copy_(torch.randperm(60, device=cuda)[:40] - 5)
        ring_all.fill_(POISON)
        replay()
        wanted = torch.full_like(ring_all, POISON)
        reference(rows, slots, wanted[:, layers - 1])
        assert torch.equal(ring_all, wanted) and (ring_all != POISON).any()


def test_launches_in_silence(pair, cuda, silent):  # A31
    fused, slots = torch.randn(33, 3 * 96, device=cuda), torch.arange(33, device=cuda)
    for dtype in (torch.float32, torch.bfloat16):  # a copy and a cast
        ring = torch.zeros(50, 2, 96, dtype=dtype, device=cuda)
        silent(lambda ring=ring: pair("row_scatter")[0](fused[:, 96:192], slots, ring[:, 1]))


def test_more_elements_than_32_bits_count(pair, cuda):
    width, num_slots = 4096, 2**31 // 4096 + 8
    ring = torch.zeros(num_slots, width, dtype=torch.float8_e5m2, device=cuda)
    rows = torch.ones(2, width, device=cuda).to(torch.float8_e5m2)
    pair("row_scatter")[0](rows, torch.tensor([num_slots - 1, 3], device=cuda), ring)
    bits = ring.view(torch.uint8)
    assert torch.equal(bits[-1], rows.view(torch.uint8)[0]) and torch.equal(bits[3], rows.view(torch.uint8)[1])
    assert int(bits.count_nonzero()) == 2 * width
    wide = torch.zeros(num_slots, width, dtype=torch.float8_e5m2, device=cuda)
    pair("row_scatter")[0](ring, torch.arange(num_slots, device=cuda), wide)  # rows past 2**31 elements too
    assert torch.equal(wide.view(torch.uint8), bits)
