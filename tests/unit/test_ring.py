"""The query ring: which blocks are free, and what lands where. R37 needs a capture and is proven there."""

import logging
import random
import threading

import pytest
import torch

from qcap import kernels
from qcap.errors import ConfigError, ShapeError
from qcap.ring import QRingBuffer, RingUsage

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
POISON = -7.0


def make(layers=2, blocks=4, block_size=8, hidden=16, dtype=torch.float32, **options):
    ring = QRingBuffer(layers, blocks, block_size, hidden, dtype, DEVICE, **options)
    for layer in ring.layers:
        layer.fill_(POISON)
    return ring


def slots_of(*values):
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def queries(rows, hidden=16):
    return torch.arange(1, rows * hidden + 1, device=DEVICE).float().view(rows, hidden)


def warnings_of(caplog):
    return [record for record in caplog.records if record.levelno == logging.WARNING and record.name == "qcap.ring"]


def test_shape_and_properties():  # R1 R2 R3 R9
    ring = QRingBuffer(2, 4, 8, 4 * 8, torch.bfloat16, DEVICE)
    assert [tuple(layer.shape) for layer in ring.layers] == [(4, 8, 32)] * 2
    assert (ring.num_layers, ring.num_blocks, ring.block_size, ring.hidden_dim) == (2, 4, 8, 32)
    assert all(layer.dtype == torch.bfloat16 and layer.device == DEVICE for layer in ring.layers)
    assert ring.nbytes == 2 * 4 * 8 * 32 * 2


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_must_be_positive(position, value):  # R4 R5
    sizes = [2, 4, 8, 16]
    sizes[position] = value
    with pytest.raises(ValueError, match="positive") as error:
        QRingBuffer(*sizes, torch.float32, DEVICE)
    for name, size in zip(("num_layers", "num_blocks", "block_size", "hidden_dim"), sizes, strict=True):
        assert f"{name}={size}" in str(error.value)
    assert isinstance(error.value, ConfigError)


def test_a_tensor_a_layer():  # R6
    ring = make()
    assert len({layer.untyped_storage().data_ptr() for layer in ring.layers}) == 2


def test_tensors_by_name_are_the_layers():  # R7 R8
    ring = make()
    assert list(ring.tensors) == ["qcap_q_layer_0", "qcap_q_layer_1"]
    ring.scatter(1, queries(1), slots_of(10))
    assert torch.equal(ring.tensors["qcap_q_layer_1"][1, 2], queries(1)[0])
    assert all(a is b for a, b in zip(ring.tensors.values(), ring.layers, strict=True))


def test_all_blocks_are_free_at_first():  # R10
    ring = make()
    assert ring.num_free_blocks() == 4 and sorted(ring.allocate(4)) == [0, 1, 2, 3]


def test_allocate_takes_the_tail():  # R11
    ring = make()
    assert ring.allocate(2) == [2, 3] and ring.allocate(2) == [0, 1]


def test_allocate_nothing():  # R12
    ring = make()
    assert ring.allocate(0) == [] and ring.num_free_blocks() == 4
    ring.allocate(4)
    assert ring.allocate(0) == []


def test_all_or_nothing():  # R13
    ring = make()
    assert ring.allocate(5) is None and ring.num_free_blocks() == 4
    assert ring.allocate(4) == [0, 1, 2, 3]
    assert ring.allocate(1) is None


def test_negative_count():  # R14
    with pytest.raises(ValueError, match=r"negative block count.*-1"):
        make().allocate(-1)


def test_ids_are_unique_while_out():  # R15
    rng, ring, out = random.Random(15), make(blocks=13), []
    refused = 0
    for _ in range(1000):
        if rng.random() < 0.55:
            got = ring.allocate(rng.randint(0, 6))
            refused += got is None
            out += got or []
        else:
            rng.shuffle(out)
            count = rng.randint(0, len(out))
            ring.free(out[:count])
            del out[:count]
        assert len(set(out)) == len(out) and all(0 <= block < 13 for block in out)
        assert ring.num_free_blocks() == 13 - len(out)
    assert refused  # the full ring was met


def test_free_drops_ids_out_of_range(caplog):  # R16
    ring = make()
    (block,) = ring.allocate(1)
    ring.free([-1, 99, block])
    assert len(warnings_of(caplog)) == 2 and ring.num_free_blocks() == 4
    assert "-1" in caplog.text and "99" in caplog.text


def test_free_twice(caplog):  # R17
    ring = make()
    block = ring.allocate(1)
    ring.free(block)
    ring.free(block)
    assert ring.num_free_blocks() == 4 and len(warnings_of(caplog)) == 1


def test_duplicate_in_one_call(caplog):  # R18
    ring = make()
    ring.allocate(4)
    ring.free([0, 0])
    assert ring.num_free_blocks() == 1 and len(warnings_of(caplog)) == 1


def test_reuse_is_last_in_first_out():  # R19
    ring = make()
    first = ring.allocate(1)
    ring.allocate(1)
    ring.free(first)
    assert ring.allocate(1) == first
    ring.allocate(2)
    ring.free([1, 3])
    assert ring.allocate(2) == [1, 3]


@pytest.mark.parametrize("ids", [[], [10**9], [None, "x", 1.5], None, 3, [2**70]])
def test_free_never_raises(ids):  # R20
    ring = make()
    ring.allocate(2)
    ring.free(ids)
    assert ring.num_free_blocks() == 2 and ring.usage().used == 2


def test_free_goes_on_when_its_ids_break_off():  # R20
    def ids():
        yield 3
        raise RuntimeError("lost")

    ring = make()
    ring.allocate(4)
    ring.free(ids())
    assert ring.num_free_blocks() == 1 and ring.allocate(1) == [3]


def test_number_of_free_blocks():  # R21
    ring = make(blocks=8)
    ring.allocate(3)
    assert ring.num_free_blocks() == 5


def test_heads_are_flattened():  # R22
    flat, headed = make(), make()
    flat.scatter(0, queries(3), slots_of(0, 9, 31))
    headed.scatter(0, queries(3).view(3, 2, 8), slots_of(0, 9, 31))
    assert torch.equal(flat.layers[0], headed.layers[0]) and (flat.layers[0] != POISON).any()


@pytest.mark.parametrize("shape", [(2, 64), (2, 8, 8), (2,), (2, 15)])
def test_wrong_width(shape):  # R23
    ring = make()
    with pytest.raises(ShapeError, match="head count x head size"):
        ring.scatter(0, torch.ones(shape, device=DEVICE), slots_of(0, 1))
    assert (ring.layers[0] == POISON).all()


def test_slots_blocks_layers_and_dropped_rows():  # R24 R25 R26 R30
    ring, rows = make(), queries(4)
    ring.scatter(0, rows, slots_of(0, -1, 10, -7))
    wanted = torch.full((4, 8, 16), POISON, device=DEVICE)
    wanted[0, 0], wanted[1, 2] = rows[0], rows[2]
    assert torch.equal(ring.layers[0], wanted) and (ring.layers[1] == POISON).all()


def test_nothing_to_write():  # R27 R32
    ring = make()
    ring.scatter(0, queries(2), slots_of(-1, -1))
    ring.scatter(0, torch.empty(0, 16, device=DEVICE), slots_of(0))
    ring.scatter(0, torch.empty(0, 2, 8, device=DEVICE), slots_of())
    assert all((layer == POISON).all() for layer in ring.layers)


def test_rows_are_cast():  # R28
    ring = make(dtype=torch.bfloat16)
    ring.scatter(0, torch.full((1, 16), 0.1, device=DEVICE), slots_of(3))
    assert torch.equal(ring.layers[0][0, 3], torch.full((16,), 0.1, device=DEVICE).bfloat16())


@pytest.mark.parametrize("layer", [-1, 2])
def test_no_such_layer(layer):  # R29
    ring = make()
    with pytest.raises(ShapeError, match=str(layer)):
        ring.scatter(layer, queries(1), slots_of(0))
    assert all((tensor == POISON).all() for tensor in ring.layers)


def test_strided_queries():  # R31
    fused = torch.arange(5 * 60, device=DEVICE).float().view(5, 60)
    slots = slots_of(4, 0, -1, 31, 8)
    heads_first = fused[:, :16].reshape(5, 2, 8).transpose(0, 1).contiguous().transpose(0, 1)
    for view in (
        fused[:, :16],
        fused[:, 20:36].unflatten(1, (2, 8)),
        heads_first,
        fused[:, ::3][:, :16],
        fused[:, :16].t().contiguous().t(),
    ):
        strided, dense = make(), make()
        strided.scatter(0, view, slots)
        dense.scatter(0, view.contiguous(), slots)
        assert torch.equal(strided.layers[0], dense.layers[0]) and (strided.layers[0] != POISON).any()


@pytest.mark.parametrize("slots", [(0, 1, 2), (0, 1, 2, 3, 4)])
def test_one_slot_a_row(slots):  # R33
    ring = make()
    with pytest.raises(ShapeError, match="one slot a row"):
        ring.scatter(0, queries(4), slots_of(*slots))
    with pytest.raises(ShapeError, match="one slot a row"):
        ring.scatter(0, queries(4), slots_of(0, 1, 2, 3)[None])
    assert (ring.layers[0] == POISON).all()


def test_slots_of_another_type_or_device():
    with pytest.raises(ValueError, match="int64"):
        make().scatter(0, queries(1), slots_of(0).int())


def test_slots_past_the_ring():  # R34
    ring, rows = make(), queries(3)
    ring.scatter(0, rows, slots_of(32, 31, 2**40))
    assert torch.equal(ring.layers[0][3, 7], rows[1]) and int((ring.layers[0] != POISON).sum()) == 16
    debug = make(debug=True)
    debug.scatter(0, rows, slots_of(31, -1, -9))
    with pytest.raises(ValueError, match="slot 32 is past the last slot 31"):
        debug.scatter(0, rows, slots_of(0, 32, 1))
    assert int((debug.layers[0] != POISON).sum()) == 16


def test_the_ring_is_pages_of_one_plane():  # R35
    ring = make(layers=3, blocks=8, block_size=4)
    for index, layer in enumerate(ring.layers):
        layer.copy_(torch.randn(layer.shape) + index)
    ids = [5, 3, 0, 7]
    table = ring.page_table()
    out = torch.full(table.rows_shape(4), float("nan"), device=DEVICE)
    kernels.gather_pages(table, slots_of(*ids), out)
    assert out.shape == (1, 3, 16, 16)
    for index, layer in enumerate(ring.layers):
        assert torch.equal(out[0, index], torch.cat([layer[block] for block in ids]))


def test_usage_is_exact():  # R36
    ring = make()
    assert ring.usage() == RingUsage(capacity=4, used=0, free=4, high_water=0)
    blocks = ring.allocate(3)
    assert ring.allocate(2) is None
    assert ring.usage() == RingUsage(capacity=4, used=3, free=1, high_water=3)
    ring.free([*blocks, *blocks, 77])
    assert ring.usage() == RingUsage(capacity=4, used=0, free=4, high_water=3)
    ring.allocate(1)
    assert ring.usage() == RingUsage(capacity=4, used=1, free=3, high_water=3)
    with pytest.raises(AttributeError):
        ring.usage().used = 0


def test_threads():  # R38
    ring, out, lock, wrong = make(blocks=16), set(), threading.Lock(), []
    start = threading.Barrier(4)

    def work(seed):
        rng, mine = random.Random(seed), []
        start.wait()
        for _ in range(5000):
            got = ring.allocate(rng.randint(1, 3)) or []
            with lock:
                if out & set(got):
                    wrong.append(got)
                out.update(got)
            mine += got
            if len(mine) > 3 or not got:
                with lock:
                    out.difference_update(mine)
                ring.free(mine)
                mine = []
            usage = ring.usage()
            if usage.used + usage.free != 16 or usage.high_water < usage.used:
                wrong.append(usage)
        with lock:
            out.difference_update(mine)
        ring.free(mine)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and ring.num_free_blocks() == 16 and sorted(ring.allocate(16)) == list(range(16))
