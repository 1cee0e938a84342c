"""Keys from their old to their new positions."""

import math

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def frequencies(half, device):
    return (10000.0 ** (-torch.arange(half, dtype=torch.float32) / max(half, 1))).to(device)


def rotate(raw, positions, inv_freq, interleaved):
    """What an engine does to raw keys at ``positions``, pair by pair, in float64 from float32 angles."""
    out = raw.double().clone()
    half = inv_freq.numel()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        angle = (positions.float() * inv_freq[i]).double()[:, None]
        out[..., a] = raw[..., a].double() * angle.cos() - raw[..., b].double() * angle.sin()
        out[..., b] = raw[..., b].double() * angle.cos() + raw[..., a].double() * angle.sin()
    return out


def made(tokens, heads, head_size, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, head_size, generator=generator).to(dtype).to(device)


def positions_of(values, device):
    return torch.tensor(values, dtype=torch.int64, device=device)


def shifted(function, guarded, same_bits, *arguments):
    """The result, with the guards around it checked."""
    keys = arguments[0]
    whole, out = guarded(tuple(keys.shape), keys.dtype, float("nan"))
    before, start = whole.clone(), out.storage_offset()
    function(*arguments, out)
    result = out.clone()
    out.copy_(before[start : start + out.numel()].view(out.shape))
    same_bits(whole, before)
    assert not result.isnan().any()
    return result


def test_by_hand(load, device, guarded, same_bits, close):
    keys = torch.tensor([[[1.0, 0.0, 0.0, 2.0]], [[0.0, 1.0, 3.0, 0.0]]], device=device)
    inv_freq = torch.tensor([math.pi / 2, math.pi], device=device)
    old, new = positions_of([0, 3], device), positions_of([1, 2], device)
    halves = shifted(load("rope_shift"), guarded, same_bits, keys, old, new, inv_freq, False)
    close(halves, torch.tensor([[[0.0, 0.0, 1.0, -2.0]], [[3.0, -1.0, 0.0, 0.0]]], device=device))
    interleaved = shifted(load("rope_shift"), guarded, same_bits, keys, old, new, inv_freq, True)
    close(interleaved, torch.tensor([[[0.0, 1.0, 0.0, -2.0]], [[1.0, 0.0, -3.0, 0.0]]], device=device))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "head_size", "half"), [(1, 8, 4), (2, 64, 32), (3, 20, 5), (9, 80, 16), (5, 6, 3), (2, 128, 64), (2, 7, 1)]
)
def test_like_an_engine_at_the_new_position(load, device, guarded, same_bits, close, interleaved, heads, head_size, half):
    raw, inv_freq = made(6, heads, head_size, torch.float32, device), frequencies(half, device)
    old, new = positions_of([0, 1, 17, 4000, 5, 131071], device), positions_of([9, 0, 16, 3, 5, 100003], device)
    keys = rotate(raw, old, inv_freq, interleaved).float()
    got = shifted(load("rope_shift"), guarded, same_bits, keys, old, new, inv_freq, interleaved)
    close(got, rotate(raw, new, inv_freq, interleaved))
    same_bits(got[..., 2 * half :], keys[..., 2 * half :])  # dims that are not rotated


def test_angles_are_rounded_to_float32_once(load, device, guarded, same_bits):
    inv_freq = torch.tensor([0.7391, 0.31], device=device)
    old, new = positions_of([100003, 0], device), positions_of([7, 90001], device)
    keys = torch.tensor([[[1.0, 1.0, 0.0, 0.0]], [[1.0, 1.0, 0.0, 0.0]]], device=device)
    got = shifted(load("rope_shift"), guarded, same_bits, keys, old, new, inv_freq, False)
    as_engine = (new.float()[:, None] * inv_freq).double() - (old.float()[:, None] * inv_freq).double()
    exact = (new - old).double()[:, None] * inv_freq.double()
    assert (as_engine.cos() - exact.cos()).abs().max() > 1e-3  # so the two can be told apart
    assert (got[:, 0, :2].double() - as_engine.cos()).abs().max() < 1e-6
    assert (got[:, 0, 2:].double() - as_engine.sin()).abs().max() < 1e-6


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("reach", [3, 1000, 2**24])
def test_cos_and_sin_are_as_exact_as_float32(load, device, interleaved, reach):  # also where the angles are a million turns apart
    generator = torch.Generator().manual_seed(reach)
    old, new = (torch.randint(0, reach, (600,), generator=generator).to(device) for _ in range(2))
    inv_freq = torch.tensor([1.0, 0.7391, math.pi / 2, math.pi, 5.5], device=device)  # quarter turns and half turns among them
    keys = torch.zeros(600, 1, 10, device=device)
    keys[:, 0, :: 2 if interleaved else 1][:, :5] = 1
    out = torch.full_like(keys, float("nan"))
    load("rope_shift")(keys, old, new, inv_freq, interleaved, out)
    delta = (new.float()[:, None] * inv_freq).double() - (old.float()[:, None] * inv_freq).double()
    cos, sin = (out[:, 0, ::2], out[:, 0, 1::2]) if interleaved else (out[:, 0, :5], out[:, 0, 5:])
    assert (cos.double() - delta.cos()).abs().max() < 2**-22
    assert (sin.double() - delta.sin()).abs().max() < 2**-22
    quadrants = (delta * 2 / math.pi).round().long() % 4
    assert len(quadrants.unique()) == 4


@pytest.mark.parametrize(("tokens", "heads", "head_size", "half"), [(17, 8, 128, 64), (9, 40, 64, 32), (7, 3, 400, 20), (5, 70, 128, 30)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_more_than_one_block(load, device, guarded, same_bits, close, tokens, heads, head_size, half, interleaved):
    raw, inv_freq = made(tokens, heads, head_size, torch.float32, device), frequencies(half, device)
    old, new = torch.arange(tokens, device=device) * 7, torch.arange(tokens, device=device) + 3
    got = shifted(load("rope_shift"), guarded, same_bits, raw, old, new, inv_freq, interleaved)
    close(got, rotate(raw, new - old, inv_freq, interleaved))
    same_bits(got[..., 2 * half :], raw[..., 2 * half :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_kernel_equals_reference(pair, device, guarded, same_bits, close, dtype, interleaved):
    keys = made(11, 3, 48, dtype, device)
    generator = torch.Generator().manual_seed(2)
    old, new = (torch.randint(0, 9000, (11,), generator=generator).to(device) for _ in range(2))
    results = [shifted(f, guarded, same_bits, keys, old, new, frequencies(20, device), interleaved) for f in pair("rope_shift")]
    close(*results)
    assert not torch.equal(results[0], keys)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # infinities, in the interpreter's numpy
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_no_shift_no_change(load, device, same_bits, dtype, interleaved):
    keys = made(4, 2, 16, dtype, device)
    keys[0, 0] = torch.tensor([-0.0, float("inf"), float("nan"), 0.0] * 4)
    keys[1, 1] = torch.tensor([float("-inf"), -0.0] * 8)
    old = positions_of([0, 7, 12345, 3], device)
    new = old.clone()
    new[3] += 1
    out = torch.full_like(keys, 5)
    load("rope_shift")(keys, old, new, frequencies(8, device), interleaved, out)
    same_bits(out[:3], keys[:3])
    assert not torch.equal(out[3], keys[3])


def test_no_rope(load, device, same_bits):
    keys, out = made(3, 2, 10, torch.bfloat16, device), torch.full((3, 2, 10), float("nan"), dtype=torch.bfloat16, device=device)
    load("rope_shift")(keys, positions_of([0, 1, 2], device), positions_of([9, 8, 7], device), frequencies(0, device), False, out)
    same_bits(out, keys)


@pytest.mark.parametrize("half", [8, 5])
@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place_and_strided(load, device, same_bits, half, interleaved):
    old, new, inv_freq = positions_of([3, 1, 4, 1], device), positions_of([2, 7, 1, 8], device), frequencies(half, device)
    base = made(4, 2, 16, torch.float32, device)
    wanted = torch.full_like(base, float("nan"))
    load("rope_shift")(base, old, new, inv_freq, interleaved, wanted)
    views = {
        "own": base.clone(),
        "heads first": base.transpose(0, 1).contiguous().transpose(0, 1),
        "dims first": base.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "slice": torch.full((4, 5, 40), 77.0, device=device)[:, 1:3, 3:19],
    }
    views["slice"].copy_(base)
    for keys in views.values():
        out = torch.full((16, 2, 4), float("nan"), device=device).permute(2, 1, 0)
        load("rope_shift")(keys, old, new, inv_freq, interleaved, out)
        same_bits(out, wanted)
        load("rope_shift", "rope_shift_")(keys, old, new, inv_freq, interleaved)
        same_bits(keys, wanted)
    around = views["slice"]._base.clone()
    around[:, 1:3, 3:19] = 77
    assert (around == 77).all()


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token(load, device, guarded, same_bits, close, tokens):
    keys = made(tokens, 1, 4, torch.float32, device)
    old, new, inv_freq = positions_of([5] * tokens, device), positions_of([6] * tokens, device), frequencies(2, device)
    got = shifted(load("rope_shift"), guarded, same_bits, keys, old, new, inv_freq, False)
    close(got, rotate(keys, new - old, inv_freq, False))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("keys", lambda t: t.flatten(1), "[T, HK, D]"),
        ("keys", lambda t: t.to(torch.float8_e5m2), "float8"),
        ("old_positions", lambda t: t.int(), "int64"),
        ("new_positions", lambda t: t[:2], "3 positions"),
        ("inv_freq", lambda t: t.half(), "float32"),
        ("inv_freq", lambda t: torch.cat([t, t]), "at most 4"),
        ("out", lambda t: t[:2], "(2, 2, 8)"),
        ("out", lambda t: t.half(), "float16"),
    ],
)
def test_wrong_arguments(device, name, change, words):
    from qcap import kernels
    from qcap.kernels.rope_shift import rope_shift

    arguments = {
        "keys": torch.zeros(3, 2, 8, device=device),
        "old_positions": positions_of([0, 1, 2], device),
        "new_positions": positions_of([0, 1, 2], device),
        "inv_freq": frequencies(4, device),
        "interleaved": False,
        "out": torch.zeros(3, 2, 8, device=device),
    }
    arguments[name] = change(arguments[name])
    for function in (kernels.rope_shift, rope_shift):
        with pytest.raises(ValueError, match="Likely cause") as error:
            function(**arguments)
        assert words in str(error.value) and "wanted" in str(error.value)


def test_replays_in_a_graph(pair, cuda, captured, close):
    kernel, reference = pair("rope_shift")
    keys, out = torch.zeros(30, 3, 64, device=cuda), torch.zeros(30, 3, 64, device=cuda)
    old, new, inv_freq = torch.arange(30, device=cuda), torch.arange(30, device=cuda), frequencies(24, cuda)
    replay = captured(lambda: kernel(keys, old, new, inv_freq, False, out))
    keys.normal_()
    new.add_(500)
    out.fill_(float("nan"))
    replay()
    wanted = torch.empty_like(out)
    reference(keys, old, new, inv_freq, False, wanted)
    close(out, wanted)


@pytest.mark.parametrize("which", ["rope_shift", "rope_shift_"])
def test_launches_in_silence(pair, cuda, silent, which):  # A31
    keys, out = torch.zeros(30, 3, 64, device=cuda), torch.zeros(30, 3, 64, device=cuda)
    old, new, inv_freq = torch.arange(30, device=cuda), torch.arange(30, device=cuda), frequencies(24, cuda)
    silent(lambda: pair("rope_shift", which)[0](keys, old, new, inv_freq, False, *([out] if which == "rope_shift" else [])))


def test_more_elements_than_32_bits_count(pair, cuda):
    tokens = 2**31 // (8 * 128) + 3
    keys = torch.zeros(tokens, 8, 128, dtype=torch.bfloat16, device=cuda)
    keys[-1, :, 0] = 1
    keys[5, :, 0] = 1
    old = torch.zeros(tokens, dtype=torch.int64, device=cuda)
    new = torch.ones(tokens, dtype=torch.int64, device=cuda)
    pair("rope_shift", "rope_shift_")[0](keys, old, new, torch.full((64,), math.pi / 2, device=cuda), False)
    assert torch.equal(keys[-1], keys[5]) and bool((keys[-1, :, 64] == 1).all())
    assert int((keys == 1).sum()) == 16
