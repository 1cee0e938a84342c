"""Rows to ring slots, by the KV slot they write."""

import random

import pytest
import torch

PADDING = torch.iinfo(torch.int64).max
POISON = -99


def run(function, device, guarded, mapping, ids, blocks, block_size, length=None, dtype=torch.int64):
    """(what was written as a list, whether the guards are untouched)"""
    length = len(mapping) if length is None else length
    whole, out = guarded((length,), torch.int64, POISON)
    made = [
        torch.tensor(values, dtype=kind, device=device) for values, kind in ((mapping, dtype), (ids, torch.int64), (blocks, torch.int64))
    ]
    function(*made, block_size, out)
    start = out.storage_offset()
    assert (whole[:start] == POISON).all() and (whole[start + length :] == POISON).all()
    return out.tolist()


def expected(mapping, ids, blocks, block_size, length):
    """By dictionary, one row at a time."""
    where = {}
    for block, ring_block in zip(ids, blocks, strict=True):
        where.setdefault(block, ring_block)
    out = []
    for slot in mapping:
        ring_block = where.get(slot // block_size, -1) if slot >= 0 else -1
        out.append(ring_block * block_size + slot % block_size if ring_block >= 0 else -1)
    return out + [-1] * (length - len(mapping))


def test_by_hand(load, device, guarded):  # A1 A2 A15: block 2 -> ring 5, block 7 -> ring 0, rows in no order
    mapping = [29, 8, -1, 11, 28, 12, 0, -7, 31]
    got = run(load("slot_attribution"), device, guarded, mapping, [2, 7, PADDING], [5, 0, -1], 4)
    assert got == [1, 20, -1, 23, 0, -1, -1, -1, 3]


def test_block_zero_and_padding_rows(load, device, guarded):  # A15: -1 rows do not hit block 0
    assert run(load("slot_attribution"), device, guarded, [-1, 0, -4, 3, -1], [0], [2], 4) == [-1, 8, -1, 11, -1]


@pytest.mark.parametrize("entries", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33])
def test_any_number_of_entries(load, device, guarded, entries):  # P = 1 upwards, with and without padding
    rng = random.Random(entries)
    for padded in {0, 1, entries - 1, entries} - {-1}:
        ids = sorted(rng.sample(range(40), entries - padded)) + [PADDING] * padded
        blocks = [rng.randint(-2, 50) for _ in ids]
        mapping = [rng.randint(-4, 40 * 3 + 5) for _ in range(290)]
        got = run(load("slot_attribution"), device, guarded, mapping, ids, blocks, 3, 300)
        assert got == expected(mapping, ids, blocks, 3, 300)
        assert padded == entries or any(slot >= 0 for slot in expected(range(130), ids, [1] * entries, 3, 130))


def test_all_padded(load, device, guarded):
    assert run(load("slot_attribution"), device, guarded, [0, 5, -1], [PADDING, PADDING], [3, 3], 2) == [-1, -1, -1]


def test_padding_is_no_block(load, device, guarded):  # one token a block is the only way to name it
    assert run(load("slot_attribution"), device, guarded, [PADDING, 4], [4, PADDING], [1, 6], 1) == [-1, 1]


def test_rows_past_the_mapping_are_dropped(load, device, guarded):  # A14 A16
    got = run(load("slot_attribution"), device, guarded, list(range(256)), [0, 1], [1, 0], 128, 264)
    assert got == list(range(128, 256)) + list(range(128)) + [-1] * 8


@pytest.mark.parametrize("length", [0, 1, 3])
def test_empty_step(load, device, guarded, length):
    assert run(load("slot_attribution"), device, guarded, [], [0], [0], 16, length) == [-1] * length


def test_longer_mapping_is_cut_by_the_caller(load, device, guarded):  # A23
    mapping = list(range(512))
    assert run(load("slot_attribution"), device, guarded, mapping[:256], [0], [3], 16) == list(range(48, 64)) + [-1] * 240


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_other_int_types(load, device, guarded, dtype):  # A22
    assert run(load("slot_attribution"), device, guarded, [9, -1, 4, 0], [1, 2], [7, 3], 4, dtype=dtype) == [13, -1, 28, -1]


def test_tail_of_one_request_does_not_shift_another(load, device, guarded):  # A6 A7 A8
    a_blocks, b_blocks = list(range(100, 119)), list(range(40, 56))  # A: 300 rows, 288 of them in full blocks; B: 256
    a_rows = [a_blocks[i // 16] * 16 + i % 16 for i in range(300)]
    b_rows = [b_blocks[i // 16] * 16 + i % 16 for i in range(256)]
    ids = sorted(a_blocks[:18] + b_blocks)
    blocks = [1000 + block for block in ids]
    got = run(load("slot_attribution"), device, guarded, b_rows + a_rows, ids, blocks, 16)
    assert got == [slot + 16000 for slot in b_rows + a_rows[:288]] + [-1] * 12


def test_permuted_rows(load, device, guarded):  # A4 A5
    rng = random.Random(4)
    for _ in range(5):
        owned = rng.sample(range(64), 21)
        ids, tails = sorted(owned), rng.sample(range(64, 80), 6)
        mapping = [block * 8 + offset for block in owned + tails for offset in range(8)]
        rng.shuffle(mapping)
        blocks = rng.sample(range(21), 21)
        got = run(load("slot_attribution"), device, guarded, mapping, ids, blocks, 8)
        assert got == expected(mapping, ids, blocks, 8, len(mapping))
        assert sorted(slot for slot in got if slot >= 0) == list(range(21 * 8))  # one to one


def test_first_of_equal_ids_counts(load, device, guarded):
    assert run(load("slot_attribution"), device, guarded, [6, 9], [3, 3, 3, 4], [8, 1, 2, 5], 2) == [16, 11]


def test_numbers_past_32_bits(load, device, guarded):
    block = 2**40 + 3
    got = run(load("slot_attribution"), device, guarded, [block * 16 + 5, (block + 1) * 16, 3 * 16 + 5], [3, block], [2**33, 2**36], 16)
    assert got == [2**36 * 16 + 5, -1, 2**33 * 16 + 5]


def good(device):
    return {
        "slot_mapping": torch.zeros(4, dtype=torch.int64, device=device),
        "block_ids": torch.zeros(2, dtype=torch.int64, device=device),
        "ring_blocks": torch.zeros(2, dtype=torch.int64, device=device),
        "block_size": 16,
        "ring_slots": torch.zeros(4, dtype=torch.int64, device=device),
    }


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("slot_mapping", lambda t: t.float(), "int64 or int32"),
        ("slot_mapping", lambda t: torch.cat([t, t]), "8"),
        ("block_ids", lambda t: t.int(), "int64"),
        ("block_ids", lambda t: t[:0], "at least 1"),
        ("block_ids", lambda t: t[:1], "1 and 2"),
        ("ring_blocks", lambda t: t[None], "contiguous"),
        ("ring_slots", lambda t: torch.cat([t, t])[::2], "stride"),
        ("ring_slots", lambda t: t.int(), "int64"),
        ("block_size", lambda n: 0, "at least 1"),
    ],
)
def test_wrong_arguments(device, name, change, words):
    from qcap import kernels
    from qcap.kernels.slot_attribution import slot_attribution

    arguments = good(device)
    arguments[name] = change(arguments[name])
    for function in (kernels.slot_attribution, slot_attribution):
        with pytest.raises(ValueError, match="Likely cause") as error:
            function(**arguments)
        assert words in str(error.value) and "wanted" in str(error.value) and "got" in str(error.value)


def test_replays_in_a_graph(pair, cuda, captured):  # C36 A31
    kernel, reference = pair("slot_attribution")
    mapping, ids = torch.arange(700, device=cuda), torch.tensor([0, 3, 9, PADDING], device=cuda)
    blocks, out = torch.tensor([5, 1, 2, -1], device=cuda), torch.full((704,), POISON, device=cuda)
    replay = captured(lambda: kernel(mapping, ids, blocks, 16, out))
    mapping.copy_(torch.randperm(700, device=cuda) - 20)
    ids.copy_(torch.tensor([1, 2, 30, 31], device=cuda))
    out.fill_(POISON)
    replay()
    wanted = torch.full_like(out, POISON)
    reference(mapping, ids, blocks, 16, wanted)
    assert torch.equal(out, wanted) and (out >= 0).any()
