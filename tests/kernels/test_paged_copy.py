"""Blocks of all layers out of pages, and back."""

import pytest
import torch

from qcap.kernels import PageTable

POISON = -7


def make_views(layers, kinds, shape, dtype, device):
    """``[L][planes]`` views of distinct values, inside bigger pages; ``kinds`` says how each plane lies in memory."""
    blocks, heads, n, d = shape
    made = []
    for layer in range(layers):
        planes = []
        for plane, kind in enumerate(kinds):
            order = {"bhnd": (0, 1, 2, 3), "bnhd": (0, 2, 1, 3), "bhdn": (0, 1, 3, 2), "hbnd": (1, 0, 2, 3)}[kind.removesuffix("+1")]
            offset = 1 if kind.endswith("+1") else 0
            count = blocks * heads * n * d
            values = (torch.arange(count) * 3 + 17 * layer + 5 * plane) % 251
            storage = torch.full((offset + count + 19,), 99, device=device).to(dtype)
            storage[offset : offset + count] = values.to(device).to(dtype)
            in_memory = storage[offset : offset + count].view([shape[axis] for axis in order])
            planes.append(in_memory.permute([order.index(axis) for axis in range(4)]))
        made.append(planes)
    return made


def by_hand(views, block_ids):
    """[planes, L, nb, N, H] and which ids are in range, one block at a time."""
    blocks, heads, n, d = views[0][0].shape
    keep = [0 <= block < blocks for block in block_ids]
    return [
        [[view[b].permute(1, 0, 2).reshape(n, heads * d) if ok else None for b, ok in zip(block_ids, keep, strict=True)] for view in plane]
        for plane in zip(*views, strict=True)
    ]


LAYOUTS = [
    (1, ("bhnd",), (3, 1, 4, 8)),
    (3, ("bhnd", "bhnd"), (6, 2, 16, 64)),
    (2, ("bnhd", "bnhd"), (5, 3, 5, 7)),
    (2, ("bhdn", "bhnd"), (7, 3, 12, 20)),  # K transposed inside the page, as a CPU engine has it
    (2, ("hbnd", "bnhd"), (4, 2, 3, 33)),
    (2, ("bhnd+1", "bhnd"), (4, 2, 3, 5)),  # a page that starts at no multiple of 16 bytes
    (1, ("bhnd",), (3, 1, 5, 1100)),  # a ring: wider than a tile
    (1, ("bhnd", "bhnd"), (2, 1, 130, 40)),  # longer than a tile
    (2, ("bnhd", "bnhd", "bnhd"), (3, 1, 1, 1)),
]


@pytest.mark.parametrize(("layers", "kinds", "shape"), LAYOUTS)
def test_gather(load, device, guarded, same_bits, layers, kinds, shape):  # R35
    views = make_views(layers, kinds, shape, torch.bfloat16, device)
    ids = [shape[0] - 1, 0, -1, shape[0], shape[0] - 1, 2**40, 1, -(2**40)]
    table = PageTable(views)
    whole, out = guarded(table.rows_shape(len(ids)), torch.bfloat16, POISON)
    wanted, start = whole.clone(), out.storage_offset()
    inner = wanted[start : start + out.numel()].view(len(kinds), layers, len(ids), shape[2], shape[1] * shape[3])
    for p, plane in enumerate(by_hand(views, ids)):
        for layer, blocks in enumerate(plane):
            for i, block in enumerate(blocks):
                if block is not None:
                    inner[p, layer, i] = block
    load("paged_copy", "gather_pages")(table, torch.tensor(ids, device=device), out)
    same_bits(whole, wanted)
    assert (out == POISON).any() and (out != POISON).any()


@pytest.mark.parametrize(("layers", "kinds", "shape"), LAYOUTS)
def test_scatter(load, device, same_bits, layers, kinds, shape):
    views = make_views(layers, kinds, shape, torch.float32, device)
    pages = [view._base for planes in views for view in planes]
    table, ids = PageTable(views), [shape[0] - 1, -1, 0, shape[0], 2**40]
    source = torch.arange(torch.Size(table.rows_shape(len(ids))).numel(), device=device).float().view(table.rows_shape(len(ids))) + 1000
    wanted = [[view.clone() for view in planes] for planes in views]
    for i, block in enumerate(ids):
        if 0 <= block < shape[0]:
            for layer in range(layers):
                for p in range(len(kinds)):
                    rows = source[p, layer, i * shape[2] : (i + 1) * shape[2]]
                    wanted[layer][p][block] = rows.view(shape[2], shape[1], shape[3]).permute(1, 0, 2)
    load("paged_copy", "scatter_pages")(table, torch.tensor(ids, device=device), source)
    for got, expect in zip(views, wanted, strict=True):
        for left, right in zip(got, expect, strict=True):
            same_bits(left, right)
    assert all((page[-19:] == 99).all() for page in pages)  # what lies behind the last block
    assert all((page[0] == 99) == (kind.endswith("+1")) for page, kind in zip(pages, kinds * layers, strict=True) if kind.endswith("+1"))


@pytest.mark.parametrize(("layers", "kinds", "shape"), [LAYOUTS[1], (4, ("bhdn", "bnhd"), (5, 2, 6, 10)), (4, ("bhnd",), (3, 1, 5, 1100))])
def test_some_layers(load, device, guarded, same_bits, layers, kinds, shape):
    views = make_views(layers, kinds, shape, torch.bfloat16, device)
    table, ids = PageTable(views), torch.tensor([shape[0] - 1, -1, 0], device=device)
    everything = torch.full(table.rows_shape(3), float(POISON), dtype=torch.bfloat16, device=device)
    load("paged_copy", "gather_pages")(table, ids, everything)
    source = torch.arange(everything.numel(), device=device).view(everything.shape).remainder(119).to(torch.bfloat16) + 300
    cuts = [(first, count) for first in range(layers) for count in range(1, layers - first + 1)]
    assert (0, layers) in cuts and (layers - 1, 1) in cuts
    for first, count in cuts:
        whole, out = guarded(table.rows_shape(3, count), torch.bfloat16, POISON)
        load("paged_copy", "gather_pages")(table, ids, out, first)
        same_bits(out, everything[:, first : first + count])
        out.fill_(POISON)
        assert (whole == POISON).all()
        load("paged_copy", "scatter_pages")(table, ids, source[:, first : first + count].contiguous(), first_layer=first)
        for layer, planes in enumerate(views):
            for plane, view in enumerate(planes):
                rows = (source if first <= layer < first + count else everything)[plane, layer].view(3, shape[2], shape[1], shape[3])
                same_bits(view[ids[[0, 2]]], rows[[0, 2]].permute(0, 2, 1, 3))
        load("paged_copy", "scatter_pages")(table, ids, everything)


@pytest.mark.parametrize(("layers", "kinds", "shape"), LAYOUTS)
@pytest.mark.parametrize("count", [1, 2])
def test_planes_side_by_side(load, device, guarded, same_bits, layers, kinds, shape, count):
    """Rows that are contiguous as [l, planes, T, H]."""
    views = make_views(layers, kinds, shape, torch.float32, device)
    table, ids, count = PageTable(views), torch.tensor([shape[0] - 1, -1, 0], device=device), min(count, layers)
    first = layers - count
    planes, _, tokens, width = table.rows_shape(3)
    wanted = torch.full((planes, count, tokens, width), POISON, device=device).float()
    load("paged_copy", "gather_pages")(table, ids, wanted, first)
    whole, flat = guarded((count, planes, tokens, width), torch.float32, POISON)
    load("paged_copy", "gather_pages")(table, ids, flat.transpose(0, 1), first)
    same_bits(flat.transpose(0, 1), wanted)
    assert (whole == POISON).sum() > flat.numel() // 3, "what lies around it, and the rows of no block"
    new = torch.arange(flat.numel(), device=device).float().view(planes, count, tokens, width) + 7000
    load("paged_copy", "scatter_pages")(table, ids, new.transpose(0, 1).contiguous().transpose(0, 1), first_layer=first)
    got = torch.full_like(new, POISON)
    load("paged_copy", "gather_pages")(table, ids, got, first)
    expect = new.clone()
    expect[:, :, shape[2] : 2 * shape[2]] = POISON
    same_bits(got, expect)


@pytest.mark.parametrize(("first_layer", "count"), [(-1, 1), (0, 0), (1, 3), (2, 2), (3, 1)])
def test_layers_outside_the_table(device, first_layer, count):
    from qcap import kernels
    from qcap.kernels.paged_copy import gather_pages, scatter_pages

    table, ids = PageTable(make_views(3, ("bhnd",), (3, 2, 4, 8), torch.float32, device)), torch.tensor([0, 2], device=device)
    for function in (gather_pages, scatter_pages, kernels.gather_pages, kernels.scatter_pages):
        with pytest.raises(
            ValueError, match=rf"wanted at least 1, within the table's 3; got {count} layers from first_layer={first_layer}"
        ):
            function(table, ids, torch.zeros(1, count, 8, 16, device=device), first_layer)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.float16, torch.float32, torch.float64])
def test_dtypes_go_bit_for_bit(load, device, dtype):
    generator = torch.Generator().manual_seed(1)
    views = [[torch.randint(0, 256, (4, 2, 3, 8 * dtype.itemsize), generator=generator, dtype=torch.uint8).to(device).view(dtype)]]
    table, ids = PageTable(views), torch.tensor([3, 1], device=device)
    out = torch.zeros(table.rows_shape(2), dtype=dtype, device=device)
    load("paged_copy", "gather_pages")(table, ids, out)
    wanted = views[0][0].view(torch.uint8)[[3, 1]].permute(0, 2, 1, 3).reshape(1, 1, 6, -1)
    assert torch.equal(out.view(torch.uint8), wanted)
    load("paged_copy", "scatter_pages")(table, torch.tensor([0, 2], device=device), out)
    assert torch.equal(views[0][0].view(torch.uint8)[[0, 2]], views[0][0].view(torch.uint8)[[3, 1]])


@pytest.mark.parametrize("ids", [[], [2]])
def test_no_block_and_one_block(load, device, guarded, ids):
    views = make_views(2, ("bhnd",), (3, 2, 4, 8), torch.float32, device)
    table = PageTable(views)
    whole, out = guarded(table.rows_shape(len(ids)), torch.float32, POISON)
    load("paged_copy", "gather_pages")(table, torch.tensor(ids, dtype=torch.int64, device=device), out)
    assert int((whole != POISON).sum()) == sum(int((layer[0][ids] != POISON).sum()) for layer in views)
    load("paged_copy", "scatter_pages")(table, torch.tensor(ids, dtype=torch.int64, device=device), out)


def test_there_and_back(load, device, same_bits):
    views = make_views(2, ("bhdn", "bnhd"), (9, 2, 6, 10), torch.bfloat16, device)
    before = [[view.clone() for view in planes] for planes in views]
    table, ids = PageTable(views), torch.tensor([8, 2, 5, 0], device=device)
    out = torch.empty(table.rows_shape(4), dtype=torch.bfloat16, device=device)
    load("paged_copy", "gather_pages")(table, ids, out)
    for planes in views:
        for view in planes:
            view[ids] = 0
    load("paged_copy", "scatter_pages")(table, ids, out)
    for planes, old in zip(views, before, strict=True):
        for view, expect in zip(planes, old, strict=True):
            same_bits(view, expect)


def test_kernel_equals_reference(pair, device):
    for seed, (layers, kinds, shape) in enumerate(LAYOUTS):
        table = PageTable(make_views(layers, kinds, shape, torch.float16, device))
        ids = torch.randint(-2, shape[0] + 2, (5,), generator=torch.Generator().manual_seed(seed)).to(device)
        outs = [torch.full(table.rows_shape(5), float(POISON), dtype=torch.float16, device=device) for _ in range(2)]
        for function, out in zip(pair("paged_copy", "gather_pages"), outs, strict=True):
            function(table, ids, out)
        assert torch.equal(*outs)


def test_table_describes_its_pages(device):
    table = PageTable(make_views(3, ("bhdn", "bnhd"), (7, 2, 4, 6), torch.float16, device))
    assert (table.num_layers, table.num_planes, table.num_blocks, table.heads, table.block_size, table.head_size) == (3, 2, 7, 2, 4, 6)
    assert table.dtype == torch.float16 and table.device == device and table.rows_shape(5) == (2, 3, 20, 12)
    assert table.pointers.tolist() == [[planes[p].data_ptr() for planes in table.views] for p in range(2)]
    assert table.strides[0] == (48, 24, 1, 4)


def test_table_refuses_what_differs(device):
    views = make_views(2, ("bhnd", "bhnd"), (3, 2, 4, 8), torch.float32, device)
    other = {
        "planes": [views[0], views[1][:1]],
        "strides": [views[0], [views[1][0], views[1][1].transpose(0, 1).contiguous().transpose(0, 1)]],
        "shape": [views[0], [view[:2] for view in views[1]]],
        "dtype": [views[0], [view.half() for view in views[1]]],
        "rank": [[view[0] for view in planes] for planes in views],
        "nothing": [],
        "no plane": [[]],
    }
    for wrong in other.values():
        with pytest.raises(ValueError, match=r"wanted .*got .*Likely cause"):
            PageTable(wrong)


@pytest.mark.parametrize(
    ("ids", "rows", "words"),
    [
        (lambda t: t.int(), None, "int64"),
        (lambda t: t[None], None, "[n]"),
        (None, lambda t: t.half(), "cast"),
        (None, lambda t: t[:, :, :4], "(2, 2, 8, 16)"),
        (None, lambda t: t.transpose(0, 2).contiguous().transpose(0, 2), "contiguous"),
        (None, lambda t: t.view(2, 2, 4, 32), "(2, 2, 4, 32)"),
    ],
)
def test_wrong_arguments(device, ids, rows, words):
    from qcap import kernels
    from qcap.kernels.paged_copy import gather_pages, scatter_pages

    table = PageTable(make_views(2, ("bhnd", "bhnd"), (3, 2, 4, 8), torch.float32, device))
    block_ids, buffer = torch.tensor([0, 2], device=device), torch.zeros(2, 2, 8, 16, device=device)
    block_ids, buffer = (ids or (lambda t: t))(block_ids), (rows or (lambda t: t))(buffer)
    for function in (gather_pages, scatter_pages, kernels.gather_pages, kernels.scatter_pages):
        with pytest.raises(ValueError, match="Likely cause") as error:
            function(table, block_ids, buffer)
        assert words in str(error.value) and "wanted" in str(error.value)


def test_pinned_host_memory(pair, cuda):
    views = make_views(2, ("bnhd", "bnhd"), (6, 2, 16, 64), torch.bfloat16, cuda)
    table, ids = PageTable(views), torch.tensor([4, 1], device=cuda)
    host = torch.zeros(table.rows_shape(2), dtype=torch.bfloat16, pin_memory=True)
    gather, reference = pair("paged_copy", "gather_pages")
    gather(table, ids, host)
    torch.cuda.synchronize()
    wanted = torch.empty(table.rows_shape(2), dtype=torch.bfloat16, device=cuda)
    reference(table, ids, wanted)
    assert torch.equal(host, wanted.cpu())
    pair("paged_copy", "scatter_pages")[0](table, torch.tensor([0, 5], device=cuda), host)
    assert torch.equal(views[1][1][0], views[1][1][4])
    with pytest.raises(ValueError, match="pinned"):
        gather(table, ids, torch.zeros(table.rows_shape(2), dtype=torch.bfloat16))


@pytest.mark.parametrize("which", ["gather_pages", "scatter_pages"])
@pytest.mark.parametrize(("first_layer", "count"), [(0, 3), (1, 2)])
def test_replays_in_a_graph(pair, cuda, captured, which, first_layer, count):  # C36 A31
    kernel, reference = pair("paged_copy", which)
    ours, theirs = (make_views(3, ("bhdn", "bnhd"), (9, 2, 16, 24), torch.bfloat16, cuda) for _ in range(2))
    table, ids = PageTable(ours), torch.tensor([0, 1, 2], device=cuda)
    rows = torch.zeros(table.rows_shape(3, count), dtype=torch.bfloat16, device=cuda)
    replay = captured(lambda: kernel(table, ids, rows, first_layer))
    ids.copy_(torch.tensor([7, -1, 3], device=cuda))
    rows.copy_(torch.randn(rows.shape, device=cuda))
    mine = rows.clone()
    for planes, others in zip(ours, theirs, strict=True):
        for view, other in zip(planes, others, strict=True):
            view.copy_(torch.randn(view.shape, device=cuda))
            other.copy_(view)
    replay()
    reference(PageTable(theirs), ids, mine, first_layer)
    assert torch.equal(rows, mine)
    assert all(torch.equal(a, b) for planes, others in zip(ours, theirs, strict=True) for a, b in zip(planes, others, strict=True))


@pytest.mark.parametrize("which", ["gather_pages", "scatter_pages"])
def test_launches_in_silence(pair, cuda, silent, which):  # A31
    table = PageTable(make_views(3, ("bhdn", "bnhd"), (9, 2, 16, 24), torch.bfloat16, cuda))
    ids, rows = torch.tensor([0, 1, 2], device=cuda), torch.zeros(table.rows_shape(3), dtype=torch.bfloat16, device=cuda)
    silent(lambda: pair("paged_copy", which)[0](table, ids, rows))
    if which == "gather_pages":
        host = torch.zeros(table.rows_shape(3), dtype=torch.bfloat16, pin_memory=True)
        silent(lambda: pair("paged_copy", which)[0](table, ids, host))


def test_more_elements_than_32_bits_count(pair, cuda):
    blocks = 2**31 // (16 * 4096) + 3
    pages = torch.zeros(blocks, 16, 4096, dtype=torch.uint8, device=cuda)
    pages[-1] = 5
    pages[2] = 3
    table = PageTable([[pages.unsqueeze(1)]])
    out = torch.full((1, 1, 32, 4096), 9, dtype=torch.uint8, device=cuda)
    pair("paged_copy", "gather_pages")[0](table, torch.tensor([blocks - 1, 2], device=cuda), out)
    assert (out[0, 0, :16] == 5).all() and (out[0, 0, 16:] == 3).all()
    everything = torch.zeros(1, 1, blocks * 16, 4096, dtype=torch.uint8, device=cuda)
    pair("paged_copy", "gather_pages")[0](table, torch.arange(blocks, device=cuda), everything)
    assert torch.equal(everything.view(pages.shape), pages)
    pages.zero_()
    pair("paged_copy", "scatter_pages")[0](table, torch.arange(blocks, device=cuda), everything)
    assert torch.equal(everything.view(pages.shape), pages) and (pages[-1] == 5).all()
