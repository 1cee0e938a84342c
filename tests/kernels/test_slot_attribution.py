"""Rows to ring slots and stamps, by the KV slot they write."""

import random
from types import SimpleNamespace

import pytest
import torch

POISON = -99
STEP = 2**40 + 7  # wider than 32 bits


def plan_of(entries, device, capacity=None, count=None, step=STEP):
    """A plan whose rows past the count are blocks like any other, so that looking at them is a mistake that shows."""
    capacity = max(len(entries), 1) if capacity is None else capacity
    rng = random.Random(capacity)
    rest = [[rng.randint(0, 40), 0, 1 << 20, 0] for _ in range(capacity - len(entries))]
    rows = [[len(entries) if count is None else count, step, 0, 0], *[list(entry) for entry in entries], *rest]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def whole(blocks, block_size):
    """Plan entries from ``{block: ring block}``: every row of each."""
    return [(block, 0, block_size, ring * block_size) for block, ring in sorted(blocks.items())]


def run(
    function,
    device,
    guarded,
    mapping,
    entries,
    block_size,
    length=None,
    slots=4096,
    dtype=torch.int64,
    counted=False,
    capacity=None,
    count=None,
):
    """``slots`` and ``stamps`` as lists and ``counts``, with the guards around all of them checked."""
    length = len(mapping) if length is None else length
    plan = plan_of(entries, device, capacity, count)
    before = plan.clone()
    buffers = [guarded((length,), torch.int64, POISON), guarded((slots,), torch.int64, POISON)]
    if counted:
        buffers.append(guarded((plan.shape[0] - 1,), torch.int32, POISON))
        buffers[-1][1].zero_()
    function(torch.tensor(mapping, dtype=dtype, device=device), plan, block_size, *[inner for _, inner in buffers])
    assert torch.equal(plan, before)
    for around, inner in buffers:
        start = inner.storage_offset()
        assert (around[:start] == POISON).all() and (around[start + inner.numel() :] == POISON).all()
    out = [inner.tolist() for _, inner in buffers]
    return SimpleNamespace(slots=out[0], stamps=out[1], counts=out[2] if counted else None)


def expected(mapping, entries, block_size, length, slots, capacity=None):
    """By dictionary, one row at a time."""
    where = {}
    for index, entry in enumerate(entries):
        where.setdefault(entry[0], (index, *entry[1:]))
    out, stamps, counts = [], [POISON] * slots, [0] * (capacity or max(len(entries), 1))
    for slot in mapping:
        out.append(-1)
        if slot >= 0 and slot // block_size in where:
            index, first, last, base = where[slot // block_size]
            offset = slot % block_size
            if first <= offset < last and 0 <= base + offset < slots:
                out[-1] = base + offset
                stamps[base + offset] = STEP
                counts[index] += 1
    return SimpleNamespace(slots=out + [-1] * (length - len(mapping)), stamps=stamps, counts=counts)


def test_by_hand(load, device, guarded):  # A1 A2 A15: block 2 -> ring slots 20.., block 7 -> 0.., rows in no order
    mapping = [29, 8, -1, 11, 28, 12, 0, -7, 31]
    got = run(load("slot_attribution"), device, guarded, mapping, [(2, 0, 4, 20), (7, 0, 4, 0)], 4, slots=24, counted=True)
    assert got.slots == [1, 20, -1, 23, 0, -1, -1, -1, 3]
    assert got.stamps == [STEP if slot in (0, 1, 3, 20, 23) else POISON for slot in range(24)]
    assert got.counts == [2, 3]


def test_part_of_a_block(load, device, guarded):  # first <= offset < last; a base may be negative where its slots are not
    entries = [(1, 2, 4, -2), (2, 0, 1, 9), (3, 2, 2, 5), (4, 3, 1, 5), (5, 0, 8, 100)]
    mapping = list(range(4, 24))
    got = run(load("slot_attribution"), device, guarded, mapping, entries, 4, slots=104, counted=True)
    assert got.slots == [-1, -1, 0, 1, 9, -1, -1, -1, *[-1] * 8, 100, 101, 102, 103]
    assert got.counts == [2, 1, 0, 0, 4]
    assert [slot for slot, stamp in enumerate(got.stamps) if stamp == STEP] == [0, 1, 9, 100, 101, 102, 103]


def test_slots_out_of_the_ring_are_never_written(load, device, guarded):
    entries = [(0, 0, 4, -2), (1, 0, 4, 8), (2, 0, 4, 10), (3, 0, 4, 2**31), (4, 0, 4, 2**40), (5, 0, 4, -(2**40)), (6, 0, 4, 11)]
    got = run(load("slot_attribution"), device, guarded, list(range(28)), entries, 4, slots=12, counted=True)
    assert got.slots == [-1, -1, 0, 1, 8, 9, 10, 11, 10, 11, *[-1] * 14, 11, -1, -1, -1]
    assert got.counts == [2, 4, 2, 0, 0, 0, 1]
    assert [slot for slot, stamp in enumerate(got.stamps) if stamp == STEP] == [0, 1, 8, 9, 10, 11]


def test_block_zero_and_padding_rows(load, device, guarded):  # A15: -1 rows do not hit block 0
    got = run(load("slot_attribution"), device, guarded, [-1, 0, -4, 3, -1], [(0, 0, 4, 8)], 4)
    assert got.slots == [-1, 8, -1, 11, -1]


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33])
def test_any_number_of_entries(load, device, guarded, capacity):  # every count up to the capacity, garbage after it
    rng = random.Random(capacity)
    for count in sorted({0, 1, capacity // 2, capacity - 1, capacity}):
        entries = []
        for block in sorted(rng.sample(range(40), count)):
            first = rng.choice([0, 0, 1])
            entries.append((block, first, rng.choice([3, 3, 2]), rng.randint(-3, 50)))
        mapping = [rng.randint(-4, 40 * 3 + 5) for _ in range(290)]
        got = run(load("slot_attribution"), device, guarded, mapping, entries, 3, 300, slots=51, counted=True, capacity=capacity)
        assert vars(got) == vars(expected(mapping, entries, 3, 300, 51, capacity))
        assert (count == 0) == all(slot < 0 for slot in expected(range(130), whole(dict.fromkeys(range(count), 1), 3), 3, 130, 51).slots)


@pytest.mark.parametrize("count", [0, -1, -(2**40)])
def test_no_entries(load, device, guarded, count):  # garbage in every row; nothing is written
    entries = whole({0: 1, 1: 2}, 4)
    got = run(load("slot_attribution"), device, guarded, [0, 5, -1], entries, 4, count=count, counted=True)
    assert got.slots == [-1, -1, -1] and set(got.stamps) == {POISON} and got.counts == [0, 0]


@pytest.mark.parametrize("count", [3, 2**31, 2**40])
def test_a_count_past_the_end(load, device, guarded, count):
    got = run(load("slot_attribution"), device, guarded, [0, 5, 9], whole({0: 1, 1: 2}, 4), 4, count=count)
    assert got.slots == [4, 9, -1]


def test_rows_past_the_mapping_are_dropped(load, device, guarded):  # A14 A16
    got = run(load("slot_attribution"), device, guarded, list(range(256)), whole({0: 1, 1: 0}, 128), 128, 264)
    assert got.slots == list(range(128, 256)) + list(range(128)) + [-1] * 8


@pytest.mark.parametrize("length", [0, 1, 3])
def test_empty_step(load, device, guarded, length):
    got = run(load("slot_attribution"), device, guarded, [], [(0, 0, 16, 0)], 16, length)
    assert got.slots == [-1] * length and set(got.stamps) == {POISON}


def test_longer_mapping_is_cut_by_the_caller(load, device, guarded):  # A23
    mapping = list(range(512))
    got = run(load("slot_attribution"), device, guarded, mapping[:256], [(0, 0, 16, 48)], 16)
    assert got.slots == list(range(48, 64)) + [-1] * 240


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_other_int_types(load, device, guarded, dtype):  # A22
    got = run(load("slot_attribution"), device, guarded, [9, -1, 4, 0], whole({1: 7, 2: 3}, 4), 4, dtype=dtype)
    assert got.slots == [13, -1, 28, -1]


def test_tail_of_one_request_does_not_shift_another(load, device, guarded):  # A6 A7 A8
    a_blocks, b_blocks = list(range(100, 119)), list(range(40, 56))  # A: 300 rows, 288 of them in full blocks; B: 256
    a_rows = [a_blocks[i // 16] * 16 + i % 16 for i in range(300)]
    b_rows = [b_blocks[i // 16] * 16 + i % 16 for i in range(256)]
    entries = whole({block: 10 + block for block in a_blocks[:18] + b_blocks}, 16)
    got = run(load("slot_attribution"), device, guarded, b_rows + a_rows, entries, 16)
    assert got.slots == [slot + 160 for slot in b_rows + a_rows[:288]] + [-1] * 12


def test_permuted_rows(load, device, guarded):  # A4 A5
    rng = random.Random(4)
    for _ in range(5):
        owned = rng.sample(range(64), 21)
        tails = rng.sample(range(64, 80), 6)
        mapping = [block * 8 + offset for block in owned + tails for offset in range(8)]
        rng.shuffle(mapping)
        entries = whole(dict(zip(owned, rng.sample(range(21), 21), strict=True)), 8)
        got = run(load("slot_attribution"), device, guarded, mapping, entries, 8, slots=21 * 8, counted=True)
        assert vars(got) == vars(expected(mapping, entries, 8, len(mapping), 21 * 8))
        assert sorted(slot for slot in got.slots if slot >= 0) == list(range(21 * 8))  # one to one
        assert got.counts == [8] * 21 and set(got.stamps) == {STEP}


def test_first_of_equal_blocks_counts(load, device, guarded):
    entries = [(3, 0, 2, 16), (3, 0, 2, 2), (3, 0, 2, 4), (4, 0, 2, 10)]
    got = run(load("slot_attribution"), device, guarded, [6, 9], entries, 2, counted=True)
    assert got.slots == [16, 11] and got.counts == [1, 0, 0, 1]


def test_two_rows_of_one_slot(load, device, guarded):
    got = run(load("slot_attribution"), device, guarded, [6, 7, 6, 8], [(3, 0, 2, 1), (4, 0, 2, 1)], 2, slots=3, counted=True)
    assert got.slots == [1, 2, 1, 1] and got.counts == [3, 1] and got.stamps == [POISON, STEP, STEP]


def test_numbers_past_32_bits(load, device, guarded):
    block = 2**40 + 3
    mapping = [block * 16 + 5, (block + 1) * 16, 3 * 16 + 5]
    got = run(load("slot_attribution"), device, guarded, mapping, [(3, 0, 16, 7), (block, 0, 2**40, 30)], 16)
    assert got.slots == [35, -1, 12]


def test_counts_add_up_over_steps(load, device):
    out, stamps = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros(8, dtype=torch.int64, device=device)
    counts, plan = torch.tensor([5, 0], dtype=torch.int32, device=device), plan_of(whole({1: 0, 2: 1}, 4), device)
    for _ in range(2):
        load("slot_attribution")(torch.tensor([4, 5, 9], device=device), plan, 4, out, stamps, counts)
    assert counts.tolist() == [9, 2]


def good(device):
    return {
        "slot_mapping": torch.zeros(4, dtype=torch.int64, device=device),
        "plan": torch.zeros(3, 4, dtype=torch.int64, device=device),
        "block_size": 16,
        "ring_slots": torch.zeros(4, dtype=torch.int64, device=device),
        "stamps": torch.zeros(32, dtype=torch.int64, device=device),
        "counts": torch.zeros(2, dtype=torch.int32, device=device),
    }


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("slot_mapping", lambda t: t.float(), "int64 or int32"),
        ("slot_mapping", lambda t: torch.cat([t, t]), "8"),
        ("plan", lambda t: t.int(), "int64"),
        ("plan", lambda t: t[:1], "at least 1"),
        ("plan", lambda t: t[:, :3], "(3, 3)"),
        ("plan", lambda t: t.flatten(), "[1 + P, 4]"),
        ("plan", lambda t: t.t().contiguous().t(), "contiguous"),
        ("ring_slots", lambda t: torch.cat([t, t])[::2], "stride"),
        ("ring_slots", lambda t: t.int(), "int64"),
        ("stamps", lambda t: t.int(), "int64"),
        ("stamps", lambda t: t.view(2, 16), "[n]"),
        ("counts", lambda t: t.long(), "int32"),
        ("counts", lambda t: t[:1], "2 entries"),
        ("block_size", lambda n: 0, "at least 1"),
    ],
)
def test_wrong_arguments(device, name, change, words):
    from qcap import kernels
    from qcap.kernels.slot_attribution import slot_attribution

    arguments = good(device)
    for function in (kernels.slot_attribution, slot_attribution):
        function(**arguments)
    arguments[name] = change(arguments[name])
    for function in (kernels.slot_attribution, slot_attribution):
        with pytest.raises(ValueError, match="Likely cause") as error:
            function(**arguments)
        assert words in str(error.value) and "wanted" in str(error.value) and "got" in str(error.value)


def test_replays_in_a_graph(pair, cuda, captured):  # C36 A31: count, step, entries and rows change between replays
    kernel, reference = pair("slot_attribution")
    mapping, plan = torch.arange(700, device=cuda), plan_of(whole({0: 5, 3: 1}, 16), cuda, capacity=6, step=1)
    buffers = [
        torch.full((704,), POISON, device=cuda),
        torch.full((256,), POISON, device=cuda),
        torch.zeros(6, dtype=torch.int32, device=cuda),
    ]
    replay = captured(lambda: kernel(mapping, plan, 16, *buffers))
    for step, blocks in enumerate([{1: 3, 2: 9, 30: 0, 31: 15}, {}, {40: 2}, {block: block for block in range(6)}]):
        mapping.copy_(torch.randperm(700, device=cuda) - 20)
        plan.copy_(plan_of(whole(blocks, 16), cuda, capacity=6, step=step))
        for buffer, value in zip(buffers, (POISON, POISON, 0), strict=True):
            buffer.fill_(value)
        wanted = [buffer.clone() for buffer in buffers]
        replay()
        reference(mapping, plan, 16, *wanted)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(buffers, wanted, strict=True))
        assert bool((buffers[0] >= 0).any()) == bool(blocks)


def test_launches_in_silence(pair, cuda, silent):  # A31
    mapping, plan, out = (
        torch.arange(700, device=cuda),
        plan_of(whole({0: 5, 3: 1}, 16), cuda),
        torch.zeros(704, dtype=torch.int64, device=cuda),
    )
    stamps, counts = torch.zeros(256, dtype=torch.int64, device=cuda), torch.zeros(2, dtype=torch.int32, device=cuda)
    silent(lambda: pair("slot_attribution")[0](mapping, plan, 16, out, stamps, counts))
    silent(lambda: pair("slot_attribution")[0](mapping, plan, 16, out, stamps))
