"""How much attention each key gets."""

import pytest
import torch

POISON = -7.0


def made(queries, keys, heads, key_heads, head_size, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(queries, heads, head_size, generator=generator)
    k = torch.randn(keys, key_heads, head_size, generator=generator)
    return (2 * q).to(dtype).to(device), k.to(dtype).to(device)


def dense(q, k, scale, window=0, softcap=0.0, sliding_window=0):
    """Column sums and log-sum-exp from the whole matrix, in float64, one head and one query at a time."""
    q, k = q.double().cpu(), k.double().cpu()
    sums, lse = torch.zeros(q.shape[1], k.shape[0]), torch.zeros(q.shape[1], q.shape[0])
    for head in range(q.shape[1]):
        key_head = head // (q.shape[1] // k.shape[1])
        for i in range(q.shape[0]):
            token = k.shape[0] - q.shape[0] + i
            first = max(0, token - sliding_window + 1) if sliding_window else 0
            logits = (k[first : token + 1, key_head] @ q[i, head]) * scale
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            lse[head, i] = logits.logsumexp(0)
            if window == 0 or i >= q.shape[0] - window:
                sums[head, first : token + 1] += logits.softmax(0).float()
    return sums, lse


def run(function, guarded, q, k, scale, **options):
    """(column_sums, row_lse), with the guards around both checked."""
    buffers = [guarded((q.shape[1], tokens), torch.float32, POISON) for tokens in (k.shape[0], q.shape[0])]
    for _, inner in buffers:
        inner.fill_(float("nan"))
    function(q, k, scale, **options, column_sums=buffers[0][1], row_lse=buffers[1][1])
    results = [inner.clone() for _, inner in buffers]
    for whole, inner in buffers:
        inner.fill_(POISON)
        assert (whole == POISON).all()
    return results


SHAPES = [  # TQ, T, HQ, HK, D
    (1, 1, 1, 1, 8),
    (1, 40, 2, 1, 16),
    (15, 15, 1, 1, 64),
    (33, 33, 4, 2, 20),
    (64, 64, 2, 2, 32),
    (65, 65, 3, 1, 80),
    (20, 97, 4, 4, 16),
    (70, 131, 2, 1, 128),
    (1, 700, 2, 1, 16),  # few queries of many keys: the keys are split
    (20, 601, 4, 2, 16),
]
OPTIONS = [
    {},
    {"window": 7},
    {"window": 10_000},
    {"softcap": 3.0},
    {"sliding_window": 1},
    {"sliding_window": 9},
    {"window": 11, "softcap": 2.5, "sliding_window": 37},
]


@pytest.mark.parametrize(("queries", "keys", "heads", "key_heads", "head_size"), SHAPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_like_the_whole_matrix(load, device, guarded, close, queries, keys, heads, key_heads, head_size, options):
    q, k = made(queries, keys, heads, key_heads, head_size, torch.float32, device)
    sums, lse = run(load("attention_mass"), guarded, q, k, 0.25, **options)
    wanted_sums, wanted_lse = dense(q, k, 0.25, **options)
    close(sums.cpu(), wanted_sums)
    close(lse.cpu(), wanted_lse)
    contributing = min(queries, options.get("window") or queries)
    close(sums.sum(dim=1).cpu(), torch.full((heads,), float(contributing)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "key_heads", "head_size"), [(17, 50, 4, 2, 64), (90, 90, 2, 1, 80), (40, 70, 1, 1, 256)]
)
def test_16_bit_inputs(load, device, guarded, close, dtype, queries, keys, heads, key_heads, head_size):
    if load.interpreted and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16 in tl.dot")
    q, k = made(queries, keys, heads, key_heads, head_size, dtype, device)
    for options in ({}, {"window": 9, "softcap": 20.0, "sliding_window": 30}):
        sums, lse = run(load("attention_mass"), guarded, q, k, head_size**-0.5, **options)
        wanted_sums, wanted_lse = dense(q, k, head_size**-0.5, **options)
        close(sums.cpu(), wanted_sums)
        close(lse.cpu(), wanted_lse)


def test_by_hand(load, device, guarded, close):  # equal logits: token i gives 1/(i+1) to each key it sees
    q, k = torch.zeros(4, 1, 4, device=device), torch.zeros(4, 1, 4, device=device)
    sums, lse = run(load("attention_mass"), guarded, q, k, 1.0)
    close(sums, torch.tensor([[1 + 1 / 2 + 1 / 3 + 1 / 4, 1 / 2 + 1 / 3 + 1 / 4, 1 / 3 + 1 / 4, 1 / 4]], device=device))
    close(lse, torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=device).log())
    sums, _ = run(load("attention_mass"), guarded, q, k, 1.0, window=1)
    close(sums, torch.full((1, 4), 0.25, device=device))
    sums, _ = run(load("attention_mass"), guarded, q, k, 1.0, sliding_window=2)
    close(sums, torch.tensor([[1.5, 1.0, 1.0, 0.5]], device=device))


def test_keys_no_query_sees_get_nothing(load, device, guarded):
    q, k = made(5, 100, 2, 1, 16, torch.float32, device)
    sums, _ = run(load("attention_mass"), guarded, q, k, 0.3, sliding_window=4)
    assert (sums[:, :92] == 0).all() and (sums[:, 92:] > 0).all()


def test_large_logits(load, device, guarded, close):
    q, k = made(30, 30, 1, 1, 16, torch.float32, device)
    sums, lse = run(load("attention_mass"), guarded, 30 * q, 10 * k, 1.0)
    wanted_sums, wanted_lse = dense(30 * q, 10 * k, 1.0)
    close(lse.cpu(), wanted_lse)
    assert (sums.cpu() - wanted_sums).abs().max() < 1e-2  # logits of a thousand hold three digits after the point


def test_a_query_outside_the_window_does_not_reach_the_sums(load, device, guarded, close):
    q, k = made(40, 40, 1, 1, 16, torch.float32, device)
    clean, _ = run(load("attention_mass"), guarded, q, k, 0.3, window=8)
    q[5] = float("nan")
    sums, lse = run(load("attention_mass"), guarded, q, k, 0.3, window=8)
    close(sums, clean)
    assert lse[:, 5].isnan().all() and not lse[:, 6:].isnan().any()


def test_strided_inputs(load, device, guarded, close):
    q, k = made(20, 37, 2, 2, 16, torch.float32, device)
    wanted = run(load("attention_mass"), guarded, q, k, 0.3)
    strided_q = torch.full((20, 5, 40), float("nan"), device=device)[:, 1:3, 5:21]
    strided_q.copy_(q)
    strided_k = k.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    got = run(load("attention_mass"), guarded, strided_q, strided_k, 0.3)
    for left, right in zip(got, wanted, strict=True):
        close(left, right)


def test_equal_inputs_give_equal_bits(pair, device, guarded):
    q, k = made(130, 130, 2, 1, 32, torch.float32, device)
    kernel, _ = pair("attention_mass")
    first, second = (run(kernel, guarded, q, k, 0.2, window=70) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("queries", lambda t: t.flatten(1), "[TQ >= 1, HQ, D]"),
        ("queries", lambda t: t[:0], "nothing was captured"),
        ("queries", lambda t: t.half(), "float32"),
        ("queries", lambda t: t[:, :3], "HQ=3, HK=2"),
        ("keys", lambda t: t[..., :4], "[T, HK, 8]"),
        ("keys", lambda t: t[:3], "T=3, TQ=4"),
        ("window", lambda n: -1, "window=-1"),
        ("scale", lambda n: float("nan"), "finite"),
        ("column_sums", lambda t: t[:, :5], "(4, 6)"),
        ("column_sums", lambda t: t.half(), "float32"),
        ("row_lse", lambda t: t.t().contiguous().t(), "contiguous"),
    ],
)
def test_wrong_arguments(device, name, change, words):
    from qcap import kernels
    from qcap.kernels.attention_mass import attention_mass

    arguments = {
        "queries": torch.zeros(4, 4, 8, device=device),
        "keys": torch.zeros(6, 2, 8, device=device),
        "scale": 1.0,
        "window": 0,
        "column_sums": torch.zeros(4, 6, device=device),
        "row_lse": torch.zeros(4, 4, device=device),
    }
    arguments[name] = change(arguments[name])
    for function in (kernels.attention_mass, attention_mass):
        with pytest.raises(ValueError, match="Likely cause") as error:
            function(**arguments)
        assert words in str(error.value) and "wanted" in str(error.value)


def test_replays_in_a_graph(pair, cuda, captured, guarded, close):
    kernel, reference = pair("attention_mass")
    q, k = torch.zeros(200, 4, 64, device=cuda), torch.zeros(333, 2, 64, device=cuda)
    sums, lse = torch.zeros(4, 333, device=cuda), torch.zeros(4, 200, device=cuda)
    replay = captured(lambda: kernel(q, k, 0.1, window=50, column_sums=sums, row_lse=lse))
    q.normal_()
    k.normal_()
    sums.fill_(float("nan"))
    replay()
    wanted = run(reference, guarded, q, k, 0.1, window=50)
    close(sums, wanted[0])
    close(lse, wanted[1])


@pytest.mark.parametrize(("queries", "keys"), [(200, 333), (3, 3000)])  # the second splits the keys
def test_launches_in_silence(pair, cuda, silent, queries, keys):  # A31
    q, k = torch.zeros(queries, 4, 64, device=cuda), torch.zeros(keys, 2, 64, device=cuda)
    sums, lse = torch.zeros(4, keys, device=cuda), torch.zeros(4, queries, device=cuda)
    silent(lambda: pair("attention_mass")[0](q, k, 0.1, window=50, column_sums=sums, row_lse=lse))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_sequence(pair, cuda, guarded, close, dtype):
    q, k = made(3000, 5003, 8, 2, 128, dtype, cuda)
    for options in ({}, {"window": 100}, {"sliding_window": 1000, "softcap": 30.0}):
        ours, theirs = (run(function, guarded, q, k, 128**-0.5, **options) for function in pair("attention_mass"))
        torch.testing.assert_close(ours[0], theirs[0], rtol=2e-4, atol=2e-4)  # sums of up to 5000 probabilities
        close(ours[1], theirs[1])
