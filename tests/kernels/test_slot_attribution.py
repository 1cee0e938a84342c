"""Rows to ring slots and stamps, by the KV slot they write."""

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

POISON = -99
STEP = 2**40 + 7  # wider than 32 bits
LOW = 0xFFFFFFFF


def words_of(requests, block_size, base=0, step=STEP):
    """The plan's words from ``(start, end, row, blocks)`` for each request, without anything after them."""
    table, keys = [], []
    for start, end, row, blocks in requests:
        table += [len(keys), start, end, row]
        keys += [block << 32 | len(keys) + i for i, block in enumerate(blocks)]
        assert end <= start or len(blocks) == (end - 1) // block_size - start // block_size + 1
    return [len(keys), step, len(requests), base, *table, *sorted(keys)]


def plan_of(words, device, spare=5):
    """The plan with ``spare`` words after its end that would fit a row, so that looking at them is a mistake that shows."""
    rng = random.Random(len(words))
    rest = [rng.randint(0, 40) << 32 | rng.randint(0, 3) for _ in range(spare)]
    return torch.tensor([*words, *rest], dtype=torch.int64, device=device)


def whole(blocks, block_size):
    """Requests from ``{block: ring block}``: one a block, every row of each, which is how a ring of blocks is planned."""
    return [(0, block_size, ring * block_size, [block]) for block, ring in blocks.items()]


def run(function, device, guarded, mapping, plan, block_size, length=None, slots=4096, dtype=torch.int64, counted=None):
    """``slots`` and ``stamps`` as lists and ``counts``, with the guards around all of them checked; ``plan`` as words or a tensor."""
    length = len(mapping) if length is None else length
    plan = plan if isinstance(plan, torch.Tensor) else plan_of(plan, device)
    before = plan.clone()
    buffers = [guarded((length,), torch.int64, POISON), guarded((slots,), torch.int64, POISON)]
    if counted is not None:
        buffers.append(guarded((counted,), torch.int32, POISON))
        buffers[-1][1].zero_()
    function(torch.tensor(mapping, dtype=dtype, device=device), plan, block_size, *[inner for _, inner in buffers])
    assert torch.equal(plan, before)
    for around, inner in buffers:
        start = inner.storage_offset()
        assert (around[:start] == POISON).all() and (around[start + inner.numel() :] == POISON).all()
    out = [inner.tolist() for _, inner in buffers]
    return SimpleNamespace(slots=out[0], stamps=out[1], counts=None if counted is None else out[2])


def expected(mapping, words, block_size, length, slots, counted):
    """By the contract's words, one row at a time, every list from its start to its end. ``words`` are the whole plan."""
    count, step, requests, base = words[:4]
    count = max(count, 0)
    legal = requests >= 0 and 4 + 4 * requests + count <= len(words) and (requests > 0 or count == 0)
    table = [words[4 + 4 * r : 8 + 4 * r] for r in range(requests)] if legal else []
    keys = words[4 + 4 * requests : 4 + 4 * requests + count] if legal else []
    out, stamps, counts = [], [POISON] * slots, [0] * counted
    for slot in mapping:
        out.append(-1)
        places = [key & LOW for key in keys if key >> 32 == slot // block_size and slot >= 0]
        holders = [r for r, request in enumerate(table) if places and request[0] <= places[0] < count]
        if holders:
            first_place, start, end, row = table[holders[-1]]
            position = (start // block_size + places[0] - first_place) * block_size + slot % block_size
            ring_slot = base + row + position - start
            if start <= position < end and 0 <= ring_slot < slots:
                out[-1] = ring_slot
                stamps[ring_slot] = step
                if holders[-1] < counted:
                    counts[holders[-1]] += 1
    return SimpleNamespace(slots=out + [-1] * (length - len(mapping)), stamps=stamps, counts=counts)


def random_step(rng, num_requests, most_blocks, block_size, all_blocks):
    """Requests of up to ``most_blocks`` blocks in no order, whose rows follow each other; and ``{KV slot: ring slot}`` for base 0."""
    requests, where, row, free = [], {}, 0, rng.sample(range(all_blocks), all_blocks)
    for _ in range(num_requests):
        start = rng.randint(0, 5 * block_size)
        end = start + rng.choice([1, rng.randint(0, (most_blocks - 1) * block_size)])
        blocks = [free.pop() for _ in range((end - 1) // block_size - start // block_size + 1)] if end > start else []
        requests.append((start, end, row, blocks))
        for position in range(start, end):
            block = blocks[position // block_size - start // block_size]
            where[block * block_size + position % block_size] = row + position - start
        row += end - start
    return requests, where


def test_by_hand(load, device, guarded):  # A1 A2 A15: positions 6..12 in blocks 7, 2, 9 of 4 rows; then position 3 in block 5
    words = words_of([(6, 13, 10, [7, 2, 9]), (3, 4, 0, [5])], 4, base=2)
    assert words == [4, STEP, 2, 2, 0, 6, 13, 10, 3, 3, 4, 0, 2 << 32 | 1, 5 << 32 | 3, 7 << 32 | 0, 9 << 32 | 2]
    mapping = [37, 36, 23, -1, 11, 30, 31, 29, 8, 0, 22, -7]
    got = run(load("slot_attribution"), device, guarded, mapping, words, 4, slots=24, counted=2)
    assert got.slots == [-1, 18, 2, -1, 17, 12, 13, -1, 14, -1, -1, -1]
    assert got.stamps == [STEP if slot in (2, 12, 13, 14, 17, 18) else POISON for slot in range(24)]
    assert got.counts == [5, 1]


def test_slots_out_of_the_ring_are_never_written(load, device, guarded):
    rows = [-2, 8, 10, 2**31, 2**40, -(2**40), 11]
    words = words_of([(0, 4, row, [block]) for block, row in enumerate(rows)], 4)
    got = run(load("slot_attribution"), device, guarded, list(range(28)), words, 4, slots=12, counted=7)
    assert got.slots == [-1, -1, 0, 1, 8, 9, 10, 11, 10, 11, *[-1] * 14, 11, -1, -1, -1]
    assert got.counts == [2, 4, 2, 0, 0, 0, 1]
    assert [slot for slot, stamp in enumerate(got.stamps) if stamp == STEP] == [0, 1, 8, 9, 10, 11]


@pytest.mark.parametrize("base", [-5, 2**40, -(2**40)])
def test_a_base_of_any_size(load, device, guarded, base):
    words = words_of([(4, 12, 7 - base if abs(base) > 5 else 0, [1, 0])], 4, base=base)
    got = run(load("slot_attribution"), device, guarded, [4, 5, 6, 7, 0, 1, 2, 3], words, 4, slots=15)
    assert got.slots == ([-1] * 5 + [0, 1, 2] if base == -5 else list(range(7, 15)))


def test_block_zero_and_padding_rows(load, device, guarded):  # A15: -1 rows do not hit block 0
    got = run(load("slot_attribution"), device, guarded, [-1, 0, -4, 3, -1], words_of([(0, 4, 8, [0])], 4), 4)
    assert got.slots == [-1, 8, -1, 11, -1]


@pytest.mark.parametrize("num_requests", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_any_number_of_requests_and_blocks(load, device, guarded, num_requests, block_size):  # A1 A4 A5 A15
    rng = random.Random(num_requests * 100 + block_size)
    for most_blocks in (1, 2, rng.randint(3, 9)):
        requests, where = random_step(rng, num_requests, most_blocks, block_size, num_requests * 10 + 4)
        words, base = words_of(requests, block_size), rng.randint(0, 9)
        words[3] = base
        mapping = rng.sample(sorted(where), len(where)) + [rng.randint(-4, num_requests * 10 * block_size + 99) for _ in range(40)]
        mapping, total = mapping[:290], base + len(where)
        got = run(load("slot_attribution"), device, guarded, mapping, words, block_size, 300, slots=total, counted=num_requests)
        assert vars(got) == vars(expected(mapping, words, block_size, 300, total, num_requests))
        assert got.slots == [base + where[slot] if slot in where else -1 for slot in mapping] + [-1] * (300 - len(mapping))


def wild_plan(rng):
    """A plan with its keys and first places ascending and much else as it falls, the count and the requests included."""
    requests, count = rng.choice([1, 2, 3, 8]), rng.choice([5, 16, 23])
    extreme = [2**31 - 1, 2**31, 2**40, -1, -(2**31), -(2**40)]
    table = []
    for first_place in sorted(rng.choice([0, 0, 0, 0, 0, 1, 2, 5, 9, -3, 2**33]) for _ in range(requests)):
        start = rng.choice([0, 0, 2, 5, 2**40])
        table += [first_place, start, start + rng.choice([*extreme, 0, 9, 9, 30, 30, 30, 30]), rng.choice([*extreme, *[0, 1, 3, 20] * 5])]
    ids, places = [0, 1, 2, 3, 4, 5, 6, 9, 2**31 - 1, -1], [0, 1, 1, 2, 2, 3, 4, 8, 30, LOW]
    keys = sorted(rng.choice(ids) << 32 | rng.choice(places) for _ in range(count))
    said = [(count + 9, requests), (count, requests + 3), (2**62, requests), (count, 2**62), (count, -requests), (count, 0)]
    said += [(count, -(2**61)), (2**63 - 1, 2**61 + 1), (-1, requests), (-(2**63), requests)]
    said = rng.choice(said) if rng.random() < 0.2 else (count, requests)
    return [said[0], STEP, said[1], rng.choice([0] * 6 + [3, -4, 2**35]), *table, *keys]


@pytest.mark.parametrize("seed", range(8))
def test_a_wild_plan_does_what_the_contract_says(load, device, guarded, seed):
    rng, hits = random.Random(seed), 0
    for _ in range(25):
        words, num_counts = wild_plan(rng), rng.choice([1, 2, 9])
        plan = plan_of(words, device, rng.choice([0, 1, 40]))
        mapping = [rng.randint(-9, 44) for _ in range(30)] + [2**33 + 1, 2**62, (2**31 - 1) * 4 + 2]
        got = run(load("slot_attribution"), device, guarded, mapping, plan, 4, slots=40, counted=num_counts)
        assert vars(got) == vars(expected(mapping, plan.tolist(), 4, len(mapping), 40, num_counts))
        hits += max(got.slots) >= 0
    assert 4 < hits < 25


@pytest.fixture
def loads(monkeypatch, device):
    """Every address that a kernel loads from, as ``(first, last)``; in the interpreter alone."""
    if device.type != "cpu":
        pytest.skip("loads are seen in the interpreter only")
    from triton.runtime.interpreter import InterpreterBuilder

    seen, real = [], InterpreterBuilder.create_masked_load

    def load(self, ptrs, mask, *args):
        if mask.data.any():
            addresses = ptrs.data[mask.data]
            seen.append((int(addresses.min()), int(addresses.max())))
        return real(self, ptrs, mask, *args)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", load)
    return seen


def test_no_plan_makes_it_read_out_of_bounds(pair, device, guarded, loads):  # whatever is in the plan, in whatever order
    kernel, rng, numbers = pair("slot_attribution")[0], random.Random(9), [0, 1, 2, 3, 4, 5, -1, 2**31, 2**40, 2**62, -(2**63), 2**63 - 1]
    mapping = torch.tensor([-1, 0, 5, 9, 14, 2**62], device=device)
    for turn in range(160):
        words = wild_plan(rng) if turn % 2 else [rng.choice([1, 3, 9]), STEP, rng.choice([1, 2, 4]), *rng.choices(numbers, k=30)]
        if turn % 4 == 2:
            words[:4] = rng.choices(numbers, k=4)
        words[4:] = rng.sample(words[4:], len(words) - 4)
        _, inner = guarded((len(words),), torch.int64, POISON)
        inner.copy_(torch.tensor(words))
        outs = [guarded((6,), torch.int64, POISON), guarded((16,), torch.int64, POISON), guarded((2,), torch.int32, 0)]
        loads.clear()
        kernel(mapping, inner, 4, *[out for _, out in outs])
        allowed = [(t.data_ptr(), t.data_ptr() + 8 * (t.numel() - 1)) for t in (mapping, inner)]
        assert len(loads) >= 5  # the rows, and the plan's first four
        assert all(any(low <= first and last <= high for low, high in allowed) for first, last in loads)
        for whole_buffer, out in outs:
            start = out.storage_offset()
            assert len({*whole_buffer[:start].tolist(), *whole_buffer[start + out.numel() :].tolist()}) == 1
        assert all(-1 <= slot < 16 for slot in outs[0][1].tolist())


def test_searches_are_as_deep_as_the_step_asks_for(pair, device, loads):  # not as deep as the plan's room
    kernel, depths = pair("slot_attribution")[0], []
    buffers = [torch.zeros(4, dtype=torch.int64, device=device), torch.zeros(999, dtype=torch.int64, device=device)]
    for count, requests in ((1, 1), (512, 1), (512, 512)):
        blocks = list(range(count))
        steps = [(0, count, 0, blocks)] if requests == 1 else [(0, 1, block, [block]) for block in blocks]
        loads.clear()
        kernel(torch.tensor([3, 0, 511, 77]), plan_of(words_of(steps, 1), device, 4000), 1, *buffers)
        depths.append(len(loads))
    assert [b - a for a, b in pairwise(depths)] == [9, 9]


@pytest.mark.parametrize("count", [0, -1, -(2**40)])
def test_no_blocks(load, device, guarded, count):  # blocks after the count that would fit; nothing is written
    words = words_of(whole({0: 1, 1: 2}, 4), 4)
    words[0] = count
    got = run(load("slot_attribution"), device, guarded, [0, 5, -1], words, 4, counted=2)
    assert got.slots == [-1, -1, -1] and set(got.stamps) == {POISON} and got.counts == [0, 0]


@pytest.mark.parametrize("length", [4, 5, 30])
def test_no_requests(load, device, guarded, length):
    plan = torch.tensor([0, STEP, 0, 0, *[0] * (length - 4)], device=device)
    got = run(load("slot_attribution"), device, guarded, [0, 5, -1], plan, 4, counted=1)
    assert got.slots == [-1, -1, -1] and set(got.stamps) == {POISON} and got.counts == [0]


@pytest.mark.parametrize(
    ("count", "requests"),
    [(3, 2), (2**31, 2), (2**40, 2), (2**63 - 1, 2), (2, 3), (2, 2**61), (2, 2**62), (2, -1), (2, -(2**62)), (2, 0), (7, 0), (0, 2**62)],
)
def test_a_plan_that_says_more_than_it_holds(load, device, guarded, count, requests):
    """What follows in memory would fit, so that going on past the end is a mistake that shows."""
    words = words_of(whole({0: 1, 1: 2}, 4), 4)
    words[0], words[2] = count, requests
    memory = torch.tensor([*words, *[2 << 32 | place for place in range(9)]], device=device)
    got = run(load("slot_attribution"), device, guarded, [0, 5, 9], memory[: len(words)], 4, counted=2)
    assert got.slots == [-1, -1, -1] and set(got.stamps) == {POISON} and got.counts == [0, 0]


def test_a_plan_that_ends_with_its_memory(load, device, guarded):
    words = words_of(whole({0: 1, 1: 2}, 4), 4)
    got = run(load("slot_attribution"), device, guarded, [0, 5, 9], plan_of(words, device, 0), 4)
    assert got.slots == [4, 9, -1]


def test_a_place_that_no_request_has(load, device, guarded):  # below the first request's, at the count, and past 31 bits
    keys = [0 << 32 | 0, 1 << 32 | 5, 2 << 32 | 2**31 + 1, 3 << 32 | LOW, 4 << 32 | 1]
    got = run(load("slot_attribution"), device, guarded, [0, 1, 2, 3, 4], [5, STEP, 1, 0, 1, 0, 2**40, 0, *keys], 1)
    assert got.slots == [-1, -1, -1, -1, 0]


def test_a_first_place_that_would_wrap_around(load, device, guarded):
    got = run(load("slot_attribution"), device, guarded, [20, 21], [1, STEP, 1, 0, 2**62, 0, 4, 0, 5 << 32], 4)
    assert got.slots == [-1, -1]


def test_requests_without_blocks(load, device, guarded):  # of equal first places the last has the block
    requests = [(4, 4, 0, []), (0, 2, 10, [3]), (8, 8, 0, []), (9, 9, 0, []), (3, 5, 20, [6, 1]), (0, 0, 0, [])]
    got = run(load("slot_attribution"), device, guarded, [6, 7, 13, 2, 3, 12], words_of(requests, 2), 2, counted=6)
    assert got.slots == [10, 11, 20, 21, -1, -1] and got.counts == [0, 2, 0, 0, 2, 0]


def test_rows_past_the_mapping_are_dropped(load, device, guarded):  # A14 A16
    words = words_of(whole({0: 1, 1: 0}, 128), 128)
    got = run(load("slot_attribution"), device, guarded, list(range(256)), words, 128, 264)
    assert got.slots == list(range(128, 256)) + list(range(128)) + [-1] * 8


@pytest.mark.parametrize("length", [0, 1, 3])
def test_empty_step(load, device, guarded, length):
    got = run(load("slot_attribution"), device, guarded, [], words_of([(0, 16, 0, [0])], 16), 16, length)
    assert got.slots == [-1] * length and set(got.stamps) == {POISON}


def test_longer_mapping_is_cut_by_the_caller(load, device, guarded):  # A23
    mapping = list(range(512))
    got = run(load("slot_attribution"), device, guarded, mapping[:256], words_of([(0, 16, 48, [0])], 16), 16)
    assert got.slots == list(range(48, 64)) + [-1] * 240


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_other_int_types(load, device, guarded, dtype):  # A22
    got = run(load("slot_attribution"), device, guarded, [9, -1, 4, 0], words_of(whole({1: 7, 2: 3}, 4), 4), 4, dtype=dtype)
    assert got.slots == [13, -1, 28, -1]


def test_tail_of_one_request_does_not_shift_another(load, device, guarded):  # A6 A7 A8
    a_blocks, b_blocks = list(range(100, 119)), list(range(40, 56))  # A: 300 rows, 288 of them in full blocks; B: 256
    a_rows = [a_blocks[i // 16] * 16 + i % 16 for i in range(300)]
    b_rows = [b_blocks[i // 16] * 16 + i % 16 for i in range(256)]
    blocks = {block: 10 + block for block in a_blocks[:18] + b_blocks}
    got = run(load("slot_attribution"), device, guarded, b_rows + a_rows, words_of(whole(blocks, 16), 16), 16)
    assert got.slots == [slot + 160 for slot in b_rows + a_rows[:288]] + [-1] * 12


def test_permuted_rows(load, device, guarded):  # A4 A5: a ring of blocks
    rng = random.Random(4)
    for _ in range(5):
        owned = rng.sample(range(64), 21)
        tails = rng.sample(range(64, 80), 6)
        mapping = [block * 8 + offset for block in owned + tails for offset in range(8)]
        rng.shuffle(mapping)
        words = words_of(whole(dict(zip(owned, rng.sample(range(21), 21), strict=True)), 8), 8)
        got = run(load("slot_attribution"), device, guarded, mapping, words, 8, slots=21 * 8, counted=21)
        assert vars(got) == vars(expected(mapping, words, 8, len(mapping), 21 * 8, 21))
        assert sorted(slot for slot in got.slots if slot >= 0) == list(range(21 * 8))  # one to one
        assert got.counts == [8] * 21 and set(got.stamps) == {STEP}


def test_first_of_equal_blocks_counts(load, device, guarded):
    words = words_of([(0, 2, 16, [3]), (0, 2, 2, [3]), (0, 2, 4, [3]), (0, 2, 10, [4])], 2)
    got = run(load("slot_attribution"), device, guarded, [6, 9], words, 2, counted=4)
    assert got.slots == [16, 11] and got.counts == [1, 0, 0, 1]


def test_two_rows_of_one_slot(load, device, guarded):
    got = run(load("slot_attribution"), device, guarded, [6, 7, 6, 8], words_of([(0, 4, 1, [3, 4])], 2), 2, slots=4, counted=1)
    assert got.slots == [1, 2, 1, 3] and got.counts == [4] and got.stamps == [POISON, STEP, STEP, STEP]


def test_numbers_past_32_bits(load, device, guarded):
    block, start = 2**31 - 1, 2**36 + 16
    mapping = [block * 16 + 5, 2**31 * 16, (2**32 + 3) * 16 + 5, 2**63 - 1, 3 * 16 + 5]
    got = run(load("slot_attribution"), device, guarded, mapping, words_of([(start, start + 32, 8, [block, 3])], 16), 16)
    assert got.slots == [13, -1, -1, -1, 29]


@pytest.mark.parametrize("counted", [0, 1, 2, 9])
def test_counts_of_any_length(load, device, guarded, counted):
    words = words_of([(0, 4, 0, [1]), (0, 4, 4, [2]), (0, 4, 8, [0])], 4)
    got = run(load("slot_attribution"), device, guarded, [4, 5, 9, 0], words, 4, counted=counted)
    assert got.slots == [0, 1, 5, 8] and got.counts == [2, 1, 1, *[0] * 6][:counted]


def test_counts_add_up_over_steps(load, device):
    out, stamps = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros(8, dtype=torch.int64, device=device)
    counts, plan = torch.tensor([5, 0], dtype=torch.int32, device=device), plan_of(words_of(whole({1: 0, 2: 1}, 4), 4), device)
    for _ in range(2):
        load("slot_attribution")(torch.tensor([4, 5, 9], device=device), plan, 4, out, stamps, counts)
    assert counts.tolist() == [9, 2]


def good(device):
    return {
        "slot_mapping": torch.zeros(4, dtype=torch.int64, device=device),
        "plan": torch.zeros(12, dtype=torch.int64, device=device),
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
        ("plan", lambda t: t[:3], "at least 4"),
        ("plan", lambda t: t.view(3, 4), "(3, 4)"),
        ("plan", lambda t: t[::2], "contiguous"),
        ("ring_slots", lambda t: torch.cat([t, t])[::2], "stride"),
        ("ring_slots", lambda t: t.int(), "int64"),
        ("stamps", lambda t: t.int(), "int64"),
        ("stamps", lambda t: t.view(2, 16), "[n]"),
        ("counts", lambda t: t.long(), "int32"),
        ("counts", lambda t: t.view(1, 2), "[n]"),
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


def test_replays_in_a_graph(pair, cuda, captured):  # C36 A31: count, requests, step, entries and rows change between replays
    kernel, reference = pair("slot_attribution")
    mapping, plan = torch.arange(700, device=cuda), plan_of(words_of(whole({0: 5, 3: 1}, 16), 16, step=1), cuda, 300)
    buffers = [
        torch.full((704,), POISON, device=cuda),
        torch.full((400,), POISON, device=cuda),
        torch.zeros(6, dtype=torch.int32, device=cuda),
    ]
    replay = captured(lambda: kernel(mapping, plan, 16, *buffers))
    rng, room = random.Random(2), plan.numel()
    steps = [random_step(rng, requests, blocks, 16, 43)[0] for requests, blocks in ((1, 1), (3, 6), (0, 1), (16, 2), (1, 20))]
    for step, requests in enumerate([[(5, 133, 3, [40, 2, 31, 7, 0, 12, 9, 33, 1])], whole({9: 2, 4: 0}, 16), *steps]):
        mapping.copy_(torch.randperm(700, device=cuda) - 20)
        words = words_of(requests, 16, base=step, step=step)
        plan.copy_(plan_of(words, cuda, room - len(words)))
        for buffer, value in zip(buffers, (POISON, POISON, 0), strict=True):
            buffer.fill_(value)
        wanted = [buffer.clone() for buffer in buffers]
        replay()
        reference(mapping, plan, 16, *wanted)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(buffers, wanted, strict=True))
        assert bool((buffers[0] >= 0).any()) == any(blocks for *_, blocks in requests)


def test_launches_in_silence(pair, cuda, silent):  # A31
    mapping, out = torch.arange(700, device=cuda), torch.zeros(704, dtype=torch.int64, device=cuda)
    plan = plan_of(words_of(whole({0: 5, 3: 1}, 16), 16), cuda)
    stamps, counts = torch.zeros(256, dtype=torch.int64, device=cuda), torch.zeros(2, dtype=torch.int32, device=cuda)
    silent(lambda: pair("slot_attribution")[0](mapping, plan, 16, out, stamps, counts))
    silent(lambda: pair("slot_attribution")[0](mapping, plan, 16, out, stamps))
