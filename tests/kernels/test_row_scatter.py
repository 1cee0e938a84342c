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


# row_scatter_layers: several layers in one launch


def layers_by_hand(rows, slots, ring):
    ring = ring.clone()
    for layer, layer_rows in enumerate(rows):
        ring[:, layer] = by_hand(layer_rows, slots, ring[:, layer])
    return ring


def rows_of_layers(layers, shape, dtype, device):
    """Rows that differ from layer to layer, each at an address of its own."""
    return [make_rows((layers, *shape), torch.float32, device)[layer].to(dtype) + layer for layer in range(layers)]


def check_layers(function, guarded, same_bits, rows, slots, num_slots, dtype, first=1, layers_after=1):
    """Into layers ``first``.. of a ring with others around them; all of it is compared. Twice: on a GPU the second launch is direct."""
    last = first + len(rows)
    whole, ring_all = guarded((num_slots, last + layers_after, rows[0].shape[1]), dtype, POISON)
    before = whole.clone()
    start, ring = ring_all.storage_offset(), ring_all[:, first:last]
    wanted = whole.clone()
    wanted[start : start + ring_all.numel()].view(ring_all.shape)[:, first:last] = layers_by_hand(rows, slots, ring)
    assert function(rows, slots, ring) is None
    same_bits(whole, wanted)
    whole.copy_(before)
    function(rows, slots, ring)
    same_bits(whole, wanted)
    return ring


@pytest.mark.parametrize("layers", range(1, 9))
def test_layers_land_in_their_layer(load, device, guarded, same_bits, layers):  # R24 R25 R26
    rows = rows_of_layers(layers, (4, 16), torch.float32, device)
    slots = slots_of([0, -1, 10, -7], device)
    ring = check_layers(load("row_scatter", "row_scatter_layers"), guarded, same_bits, rows, slots, 32, torch.float32)
    for layer in range(layers):
        assert torch.equal(ring[10, layer], rows[layer][2]) and torch.equal(ring[0, layer], rows[layer][0])
        assert all(not torch.equal(ring[0, layer], ring[0, other]) for other in range(layer))
    assert int((ring != POISON).any(dim=2).sum()) == 2 * layers


@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("layers_after", [0, 2])
def test_layers_of_a_bigger_ring(load, device, guarded, same_bits, first, layers_after):
    rows, slots = rows_of_layers(3, (5, 33), torch.float16, device), slots_of([5, -1, 0, 3, 6], device)
    check_layers(load("row_scatter", "row_scatter_layers"), guarded, same_bits, rows, slots, 6, torch.bfloat16, first, layers_after)


def test_layers_drop_slots_out_of_range(load, device, guarded, same_bits):  # R27 R34
    function = load("row_scatter", "row_scatter_layers")
    rows = rows_of_layers(4, (7, 5), torch.float32, device)
    check_layers(function, guarded, same_bits, rows, slots_of([8, 0, 9, 2**31, 2**40, -(2**40), 1], device), 9, torch.float32)
    ring = check_layers(function, guarded, same_bits, rows, slots_of([-1, 9, -9, 10, -1, -1, -1], device), 9, torch.float32)
    assert bool((ring == POISON).all())


@pytest.mark.parametrize("count", [0, 1, 2])
def test_layers_of_no_row_one_row_and_slots_past_the_rows(load, device, guarded, same_bits, count):  # R32
    rows = rows_of_layers(4, (count, 8), torch.float32, device)
    check_layers(load("row_scatter", "row_scatter_layers"), guarded, same_bits, rows, slots_of([1, 3, 0, 2], device), 4, torch.float32)


@pytest.mark.parametrize("width", [1, 3, 16, 33, 576, 2049, 4100])
def test_layers_of_any_width(load, device, guarded, same_bits, width):
    rows = rows_of_layers(2, (5, width), torch.bfloat16, device)
    function = load("row_scatter", "row_scatter_layers")
    check_layers(function, guarded, same_bits, rows, slots_of([5, -1, 0, 3, 6], device), 6, torch.bfloat16)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_cast(load, device, guarded, same_bits, source, target):  # R28
    rows = rows_of_layers(3, (4, 24), source, device)
    check_layers(load("row_scatter", "row_scatter_layers"), guarded, same_bits, rows, slots_of([2, 0, -1, 1], device), 3, target)


@pytest.mark.parametrize("source", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("target", [None, torch.float32, torch.bfloat16])
def test_layers_of_float8_rows(load, device, source, target):
    if source == torch.float8_e4m3fn and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8_e4m3fn is cast by compute capability 8.9 and up")
    rows = [(torch.arange(-20, 20, device=device).view(4, 10) + layer).float().to(source) for layer in range(2)]
    ring = torch.zeros(3, 2, 10, device=device).to(target or source)
    load("row_scatter", "row_scatter_layers")(rows, slots_of([2, 0, -1, 1], device), ring)
    for layer in range(2):
        got, wanted = ring[:, layer], rows[layer].view(torch.uint8)[[1, 3, 0]]
        assert torch.equal(got, wanted.view(source).to(target)) if target else torch.equal(got.contiguous().view(torch.uint8), wanted)


def test_layers_are_copied_bit_for_bit(load, device):  # NaN payloads and -0.0 survive; stamps are wider than a float holds
    bits = torch.tensor([[0x7FC1, 0x7F81, -32768, 1, -1, 0x7F80]], dtype=torch.int16, device=device)
    ring, slots = torch.zeros(2, 2, 6, dtype=torch.bfloat16, device=device), slots_of([1], device)
    load("row_scatter", "row_scatter_layers")([bits.view(torch.bfloat16), bits.flip(1).view(torch.bfloat16)], slots, ring)
    assert torch.equal(ring.view(torch.int16)[1], torch.cat([bits, bits.flip(1)]))
    stamps = torch.zeros(2, 2, 1, dtype=torch.int64, device=device)
    load("row_scatter", "row_scatter_layers")([torch.tensor([[2**62 + 1]], device=device), slots.view(1, 1)], slots, stamps)
    assert stamps.flatten().tolist() == [0, 0, 2**62 + 1, 1]


def test_layers_of_strided_rows(load, device, guarded, same_bits):  # R31
    fused = [tensor.contiguous() for tensor in rows_of_layers(3, (6, 100), torch.float32, device)]
    slots = slots_of([3, 1, -1, 0, 2, 5], device)
    cuts = (
        lambda t: t[:, :32],
        lambda t: t[:, 37:70],
        lambda t: t[::2, :32],
        lambda t: t[:, ::3],
        lambda t: t.t().contiguous().t(),
        lambda t: t[:1, :32].expand(6, 32),
    )
    for cut in cuts:
        rows = [cut(tensor) for tensor in fused]
        assert rows[0].numel() > 0 and rows[0].stride() != (rows[0].shape[1], 1)
        check_layers(load("row_scatter", "row_scatter_layers"), guarded, same_bits, rows, slots, 5, torch.bfloat16)


def test_layers_at_addresses_of_any_alignment(load, device, guarded, same_bits):  # also within one tensor, and one of them twice
    fused, slots = make_rows((6, 100), torch.bfloat16, device), slots_of([3, 1, -1, 0, 2, 5], device)
    for starts in ((0, 8, 16, 24), (0, 8, 16, 1), (3, 8, 16, 64), (0, 2, 4, 6), (16, 5), (8, 8)):
        rows = [fused[:, start : start + 32] for start in starts]
        check_layers(load("row_scatter", "row_scatter_layers"), guarded, same_bits, rows, slots, 5, torch.bfloat16)


def test_layers_whose_strides_count_for_nothing(load, device, guarded, same_bits):
    """One row has no row stride, one column no column stride, whatever the tensors say."""
    function, wide = load("row_scatter", "row_scatter_layers"), make_rows((3, 20), torch.float32, device)
    rows = [wide[:1, :8], wide[2, :8].view(1, 8)]
    assert rows[0].stride() != rows[1].stride()
    check_layers(function, guarded, same_bits, rows, slots_of([2], device), 4, torch.float32)
    rows = [wide.as_strided((3, 1), (20, 1)), wide.as_strided((3, 1), (20, 5), 1)]
    check_layers(function, guarded, same_bits, rows, slots_of([2, 0, 1], device), 4, torch.float32)


def test_a_ring_with_layers_outermost(load, device):  # any slot and layer stride
    rows, slots = rows_of_layers(2, (3, 8), torch.float32, device), slots_of([4, -1, 0], device)
    ring = torch.full((3, 5, 9), float(POISON), device=device).transpose(0, 1)[:, 1:, 1:]
    wanted = layers_by_hand(rows, slots, ring)
    load("row_scatter", "row_scatter_layers")(rows, slots, ring)
    assert torch.equal(ring, wanted) and bool((ring._base[:, :, 0] == POISON).all()) and bool((ring._base[0] == POISON).all())


@pytest.mark.parametrize("which", ["slots", "layers", "rows"])
def test_layers_at_offsets_of_more_than_32_bits(load, device, which):
    """As for one layer: a 32-bit offset would land before the first."""
    try:
        storage = torch.empty(2**32 + 2**31 + 64, dtype=torch.float8_e5m2, device=device)
    except RuntimeError as error:
        pytest.skip(f"no room for 6 GiB: {error}")
    function, bits = load("row_scatter", "row_scatter_layers"), torch.uint8
    near = [torch.arange(1 + layer, 41 + layer, device=device).view(5, 8).float().to(torch.float8_e5m2) for layer in range(4)]
    if which == "rows":
        far = [storage[2**31 + 16 * layer :].as_strided((5, 8), (2**30, 1)) for layer in range(2)]
        for layer in range(2):
            far[layer].copy_(near[layer])
        ring = torch.zeros(5, 2, 8, dtype=torch.float8_e5m2, device=device)
        function(far, slots_of([1, 0, 3, 4, 2], device), ring)
    else:
        shape, strides = ((5, 2, 8), (2**30, 16, 1)) if which == "slots" else ((5, 4, 8), (16, 2**30 + 2**28, 1))
        ring = storage[2**31 :].as_strided(shape, strides)
        assert sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) >= 2**31
        ring.view(bits).zero_()
        function([tensor.clone() for tensor in near[: shape[1]]], slots_of([1, 0, 3, 4, 2], device), ring)
    for layer in range(ring.shape[1]):
        assert torch.equal(ring.view(bits)[[1, 0, 3, 4, 2], layer], near[layer].view(bits))


def good_layers(device):
    rows = [torch.zeros(4, 8, device=device) for _ in range(3)]
    return {"rows": rows, "ring_slots": torch.zeros(4, dtype=torch.int64, device=device), "ring": torch.zeros(6, 3, 8, device=device)}


def other_rows(change):
    """Only the last layer's rows are changed."""
    return lambda rows: [*rows[:-1], change(rows[-1])]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("rows", lambda rows: [], "1 to 8"),
        ("rows", lambda rows: (rows * 3)[:9], "1 to 8"),
        ("rows", lambda rows: rows[:2], "[S, 2, H]"),
        ("rows", lambda rows: [t.view(4, 2, 4) for t in rows], "not flattened"),
        ("rows", lambda rows: [t.double() for t in rows], "float64"),
        ("rows", lambda rows: [t[:, :4] for t in rows], "(6, 3, 8)"),
        ("rows", other_rows(lambda t: t[:, :4]), "rows[2]"),
        ("rows", other_rows(lambda t: t[:3]), "rows[2]"),
        ("rows", other_rows(lambda t: t.view(4, 2, 4)), "rows[2]"),
        ("rows", other_rows(lambda t: t.bfloat16()), "bfloat16"),
        ("rows", other_rows(lambda t: t.to("meta")), "meta"),
        ("rows", other_rows(lambda t: torch.cat([t, t])[::2]), "(16, 1)"),
        ("rows", other_rows(lambda t: t.t().contiguous().t()), "(1, 4)"),
        ("ring_slots", lambda t: t.int(), "int32"),
        ("ring_slots", lambda t: t[:3], "at least 4"),
        ("ring_slots", lambda t: torch.cat([t, t])[::2], "stride"),
        ("ring", lambda t: t[:, 0], "(6, 8)"),
        ("ring", lambda t: t[:, :2], "(6, 2, 8)"),
        ("ring", lambda t: t.view(6, 3, 2, 4), "(6, 3, 2, 4)"),
        ("ring", lambda t: t[:, :, None], "(6, 3, 1, 8)"),
        ("ring", lambda t: t[:, :, :7], "(6, 3, 7)"),
        ("ring", lambda t: torch.cat([t, t], dim=2)[:, :, ::2], "column stride"),
        ("ring", lambda t: t.to("meta"), "meta"),
        ("ring", lambda t: t.to(torch.float8_e5m2), "scale"),
        ("ring", lambda t: t.int(), "int32"),
    ],
)
def test_wrong_layers(device, name, change, words):  # R33
    from qcap import kernels
    from qcap.kernels.row_scatter import row_scatter_layers

    arguments = good_layers(device)
    for function in (kernels.row_scatter_layers, row_scatter_layers):
        function(**arguments)
    arguments[name] = change(arguments[name])
    for function in (kernels.row_scatter_layers, row_scatter_layers):
        with pytest.raises(ValueError, match="Likely cause") as error:
            function(**arguments)
        said = str(error.value)
        assert words in said and "wanted" in said and "got" in said and said.startswith("row_scatter_layers: ")


def test_the_package_scatters_layers_too(device):  # by the kernel on a GPU, by the reference elsewhere
    from qcap import kernels

    rows, slots = rows_of_layers(4, (5, 8), torch.float32, device), slots_of([5, -1, 0, 3, 6], device)
    ring = torch.full((6, 4, 8), float(POISON), device=device)
    wanted = layers_by_hand(rows, slots, ring)
    kernels.row_scatter_layers(tuple(rows), slots, ring)
    assert torch.equal(ring, wanted)


@pytest.fixture
def layers_launches(pair, monkeypatch):
    """(launcher, what it has launched); nothing runs."""
    import sys

    launcher, calls = pair("row_scatter", "row_scatter_layers")[0], []
    monkeypatch.setattr(sys.modules["qcap.kernels.row_scatter"], "_launch_layers", lambda *args: calls.append(args))
    return launcher, calls


@pytest.mark.parametrize("layers", range(1, 9))
def test_layers_are_one_launch(layers_launches, device, layers):
    launcher, calls = layers_launches
    rows = rows_of_layers(layers, (3, 4100), torch.bfloat16, device)
    launcher(rows, slots_of([1, 0, -1], device), torch.zeros(2, layers, 4100, device=device))
    ((grid, tensors, dtypes, numbers, constants, _),) = calls
    assert grid == (3, 2, layers) and [tensor.data_ptr() for tensor in tensors[:layers]] == [t.data_ptr() for t in rows]
    assert len(tensors) == len(dtypes) == 10 and all(tensor.dtype == dtype for tensor, dtype in zip(tensors, dtypes, strict=True))
    assert numbers == (2, 4100, 1, layers * 4100, 4100) and constants == (4100, 4096)


def test_a_copy_of_layers_sees_bits_and_a_cast_sees_floats(layers_launches, device):
    launcher, calls = layers_launches
    for source, target, seen in (
        (torch.float8_e4m3fn, torch.float8_e4m3fn, (torch.uint8, torch.uint8)),
        (torch.bfloat16, torch.bfloat16, (torch.int16, torch.int16)),
        (torch.float32, torch.float32, (torch.int32, torch.int32)),
        (torch.float8_e5m2, torch.bfloat16, (torch.float8_e5m2, torch.bfloat16)),
    ):
        rows = [torch.zeros(3, 8, dtype=source, device=device)] * 2
        launcher(rows, slots_of([1, 0, -1], device), torch.zeros(2, 2, 8, dtype=target, device=device))
        assert calls.pop()[2] == (seen[0],) * 8 + (torch.int64, seen[1])


def test_nothing_to_scatter_is_no_launch(layers_launches, device):  # R32: a grid of none is an error on a GPU
    launcher, calls = layers_launches
    for count, width, num_slots in ((0, 8, 4), (2, 0, 4), (2, 8, 0), (2, 8, 4)):
        rows = [torch.zeros(count, width, device=device)] * 3
        launcher(rows, slots_of([0, 1], device), torch.zeros(num_slots, 3, width, device=device))
        assert len(calls) == (count * width * num_slots > 0)


def test_the_layers_kernel_takes_pointers_then_numbers_then_constants(pair):  # the order in which Launch passes them
    import inspect
    import sys

    pair("row_scatter")
    kernel = sys.modules["qcap.kernels.row_scatter"].row_scatter_layers_kernel
    names = list(inspect.signature(kernel.fn).parameters)
    assert [name.endswith("_ptr") for name in names] == [True] * 10 + [False] * 7
    assert [name.isupper() for name in names] == [False] * 15 + [True] * 2


_PTX = """
import json, re
from qcap.kernels import compile_check as check
cases = {case.name: case for case in check.CASES if case.name in ("row_scatter 16 bits", "row_scatter_layers 16 bits")}
ptx = {name: check.compile_case(case, "cuda sm_90", aligned=True).asm["ptx"] for name, case in cases.items()}
print(json.dumps({name: re.findall(r"\\b(?:ld|st)[.]global[.a-z0-9]*", text) for name, text in ptx.items()}))
"""


def test_loads_and_stores_are_16_bytes_wide():
    """4096 elements of 16 bits by 128 threads: 4 wide loads each, under way before the slot is looked up, and 4 wide stores."""
    import json
    import os
    import subprocess
    import sys
    from pathlib import Path

    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", _PTX], cwd=root, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 2
    for accesses in found.values():
        assert accesses == ["ld.global.v4.b32"] * 4 + ["ld.global.b64"] + ["st.global.v4.b32"] * 4


@pytest.mark.parametrize("layers", range(1, 9))
def test_layers_replay_in_a_graph(pair, cuda, captured, layers):  # C36 A31
    kernel, reference = pair("row_scatter", "row_scatter_layers")
    fused, slots = [torch.randn(33, 3 * 96, device=cuda) for _ in range(layers)], torch.arange(40, device=cuda)
    rows = [tensor[:, 96:192] for tensor in fused]
    ring_all = torch.full((50, layers + 2, 96), POISON, dtype=torch.bfloat16, device=cuda)
    replay = captured(lambda: kernel(rows, slots, ring_all[:, 1 : 1 + layers]))
    for _ in range(2):
        for tensor in fused:
            tensor.normal_()
        slots.copy_(torch.randperm(60, device=cuda)[:40] - 5)
        ring_all.fill_(POISON)
        replay()
        wanted = torch.full_like(ring_all, POISON)
        reference(rows, slots, wanted[:, 1 : 1 + layers])
        assert torch.equal(ring_all, wanted) and (ring_all != POISON).any()


def test_layers_launch_in_silence(pair, cuda, silent):  # A31
    fused, slots = [torch.randn(33, 3 * 96, device=cuda) for _ in range(3)], torch.arange(33, device=cuda)
    rows = [tensor[:, 96:192] for tensor in fused]
    for dtype in (torch.float32, torch.bfloat16):  # a copy and a cast
        ring = torch.zeros(50, 4, 96, dtype=dtype, device=cuda)
        silent(lambda ring=ring: pair("row_scatter", "row_scatter_layers")[0](rows, slots, ring[:, 1:]))
