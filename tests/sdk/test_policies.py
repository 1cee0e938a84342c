"""Policies, select and apply. PolicySuite is what a third party runs for its own."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch

from qcap.errors import CaptureEmpty, ConfigError, ShapeError, TokenError
from qcap.kinds import CacheKind
from qcap.sdk import policies
from qcap.sdk.policies.registry import _POLICIES
from qcap.sdk.policies.suite import PolicySuite


class TestRandom(PolicySuite):
    name = "random"
    params: ClassVar = {"seed": 3}


class TestSnapKV(PolicySuite):
    name = "snapkv"
    params: ClassVar = {"window": 8}


class TestSnapKVUnpooled(PolicySuite):
    name = "snapkv"
    params: ClassVar = {"window": 4, "kernel": 1, "reduce": "max"}


@pytest.fixture
def own_policy():
    @policies.policy("key_norm")
    def key_norm(kv, q, geometry, power=1.0):
        return -(kv[0].unflatten(-1, (geometry.num_kv_heads, -1)).float().norm(dim=-1).transpose(1, 2) ** power)

    yield "key_norm"
    del _POLICIES["key_norm"]


def inputs(tokens=48):
    suite = PolicySuite()
    kv, q = suite.inputs()
    return kv[:, :, :tokens], q[:, :, :tokens], suite.geometry()


def test_your_own_policy_goes_the_same_way(own_policy):
    kv, _, geometry = inputs()
    edit = policies.apply(own_policy, kv, None, list(range(48)), geometry, keep=16)
    norms = kv[0].view(3, 48, 2, 8).norm(dim=-1).mean(dim=(0, 2))
    assert edit.token_ids == tuple(sorted(norms.argsort()[:16].tolist()))
    assert edit.salt.startswith("key_norm-") and edit.description["params"] == {"keep": 16, "scope": "global"}
    assert policies.names() == ["key_norm", "random", "snapkv"]


def test_what_was_not_retrieved_says_where_to_look():
    kv, q, geometry = inputs()
    for call in (
        lambda: policies.scores("snapkv", None, q, geometry),
        lambda: policies.scores("snapkv", kv, None, geometry),
        lambda: policies.apply("random", None, None, list(range(48)), geometry, keep=0.5),
    ):
        with pytest.raises(CaptureEmpty, match=r"(?s)nothing.*ctx\.coverage\(tokens\)"):
            call()


def test_names_and_parameters_are_checked(own_policy):
    kv, _, geometry = inputs()
    with pytest.raises(ConfigError, match="did you mean 'snapkv'"):
        policies.get("snapvk")
    with pytest.raises(ConfigError, match="no parameter 'windw'; it has window, kernel, pool, reduce"):
        policies.scores("snapkv", kv, None, geometry, windw=3)
    with pytest.raises(ConfigError, match="no parameter 'seed'; it has power"):
        policies.scores(own_policy, kv, None, geometry, seed=1)


def test_what_a_policy_returns_is_checked(own_policy):
    kv, _, geometry = inputs()
    wrong = {
        "short": (lambda kv, q, g: torch.zeros(3, 2, 47), r"\(3, 2, 47\).*wanted \[L, HK, T\] = \(3, 2, 48\)"),
        "bf16": (lambda kv, q, g: torch.zeros(3, 2, 48, dtype=torch.bfloat16), "bfloat16"),
        "none": (lambda kv, q, g: None, "NoneType"),
        "nan": (lambda kv, q, g: torch.full((3, 2, 48), torch.nan), r"288 of 288 scores, first at layer 0 \(a\), head 0, token 0"),
    }
    for name, (function, said) in wrong.items():
        policies.policy(name)(function)
        with pytest.raises(ShapeError, match=said):
            policies.scores(name, kv, None, geometry)
        del _POLICIES[name]


def test_inputs_are_checked():
    kv, q, geometry = inputs()
    with pytest.raises(ShapeError, match="kv must be"):
        policies.scores("random", q, None, geometry)
    with pytest.raises(ShapeError, match="it a KV tensor"):
        policies.scores("snapkv", kv, kv, geometry)
    with pytest.raises(ShapeError, match=r"40 queries for 48 keys.*cut both"):
        policies.scores("snapkv", kv, q[:, :, :40], geometry)


# -- SnapKV against its definition ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize("pool", ["max", "avg"])
def test_snapkv_is_its_definition(pool, reduce):
    kv, q, geometry = inputs()
    window, kernel, heads, group = 6, 5, 4, 2
    got = policies.scores("snapkv", kv, q, geometry, window=window, kernel=kernel, pool=pool, reduce=reduce)
    for layer in range(3):
        votes = []
        for head in range(heads):
            queries = q[0, layer].view(48, heads, 8)[-window:, head].double()
            keys = kv[0, layer].view(48, 2, 8)[:, head // group].double()
            logits = queries @ keys.T / math.sqrt(8)
            for i in range(window):
                logits[i, 48 - window + i + 1 :] = -math.inf
            mass = logits.softmax(-1).sum(0)[: 48 - window]
            pooled = []
            for j in range(48 - window):
                near = mass[max(0, j - 2) : j + 3]
                pooled.append(near.max() if pool == "max" else near.sum() / kernel)
            votes.append(torch.stack(pooled))
        for kv_head in range(2):
            pair = torch.stack(votes[kv_head * group : (kv_head + 1) * group])
            want = {"mean": pair.mean(0), "max": pair.amax(0), "sum": pair.sum(0)}[reduce]
            assert torch.allclose(got[layer, kv_head, : 48 - window].double(), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scope", ["global", "head"])
def test_snapkv_always_keeps_its_window(scope):
    kv, q, geometry = inputs()
    kv[0, :, 0] *= 50  # a token that draws all attention
    marks = policies.scores("snapkv", kv, q, geometry, window=8)
    index = policies.select(marks, 10, scope=scope)
    assert (index[..., -8:] == torch.arange(40, 48)).all()
    assert marks.isfinite().all()


@pytest.mark.parametrize("params", [{"window": 48}, {"window": 0}, {"kernel": 4}, {"kernel": 0}, {"pool": "min"}, {"reduce": "last"}])
def test_snapkv_parameters_are_checked(params):
    kv, q, geometry = inputs()
    with pytest.raises(ConfigError):
        policies.scores("snapkv", kv, q, geometry, **params)


def test_snapkv_finds_a_planted_needle():
    kv, q, geometry = inputs()
    for layer in range(3):  # the last queries all point at token 20
        kv[0, layer, 20] *= 4
        needle = kv[0, layer, 20].view(2, 8)
        q[0, layer, -8:] = needle.repeat_interleave(2, dim=0).flatten() * 20
    marks = policies.scores("snapkv", kv, q, geometry, window=8, kernel=1)
    assert (marks[..., :40].argmax(-1) == 20).all()


def test_random_is_the_same_for_a_seed_and_for_all_heads():
    kv, _, geometry = inputs()
    one, two = (policies.scores("random", kv, None, geometry, seed=s) for s in (1, 2))
    assert torch.equal(one, policies.scores("random", kv, None, geometry, seed=1)) and not torch.equal(one, two)
    assert (one == one[0, 0]).all()


# -- select ---------------------------------------------------------------------------------------------------------------


def test_select_global_and_head():
    scores = torch.tensor([[[5.0, 0, 3, 4, 1, 2]], [[5.0, 9, 3, 0, 1, 2]]])
    assert policies.select(scores, 3).tolist() == [0, 1, 2]  # means 5, 4.5, 3, 2, 1, 2
    assert policies.select(scores, 3, scope="head").tolist() == [[[0, 2, 3]], [[0, 1, 2]]]


def test_ties_go_to_the_lower_position():
    scores = torch.zeros(2, 2, 100)
    scores[..., 50] = 1
    assert policies.select(scores, 5).tolist() == [0, 1, 2, 3, 50]
    assert policies.select(scores, 5, scope="head")[1, 1].tolist() == [0, 1, 2, 3, 50]
    many = torch.rand(1, 28, 2, 1).round(decimals=1).expand(1, 28, 2, 400).reshape(28, 2, 400)  # equal columns must have equal means
    assert policies.select(many, 7).tolist() == list(range(7))


def test_keep_as_share_number_and_multiple():
    scores = torch.rand(1, 1, 100)
    assert len(policies.select(scores, 0.5)) == 50 and len(policies.select(scores, 1.0)) == 100 and len(policies.select(scores, 1)) == 1
    assert len(policies.select(scores, 0.5, multiple_of=16)) == 48
    for keep in (0.0, 1.5, 0, 101, -1, True):
        with pytest.raises(ConfigError, match="keep"):
            policies.select(scores, keep)
    with pytest.raises(ConfigError, match="multiple_of=16"):
        policies.select(scores, 15, multiple_of=16)
    with pytest.raises(ConfigError, match="scope"):
        policies.select(scores, 5, scope="layer")


@pytest.mark.parametrize("scope", ["global", "head"])
def test_always_keep_is_kept_and_the_rest_is_by_score(scope):
    scores = torch.arange(20.0).expand(2, 2, 20).contiguous()
    index = policies.select(scores, 5, scope=scope, always_keep=[0, 3])
    assert (index == torch.tensor([0, 3, 17, 18, 19])).all()
    with pytest.raises(TokenError, match="raise keep"):
        policies.select(scores, 1, scope=scope, always_keep=[0, 3])
    assert (policies.select(scores, 2, always_keep=torch.arange(20) < 2) == torch.tensor([0, 1])).all()


def test_select_refuses_what_would_be_ambiguous():
    with pytest.raises(ShapeError, match="float32"):
        policies.select(torch.zeros(1, 1, 4, dtype=torch.float16), 2)
    with pytest.raises(ShapeError, match="NaN"):
        policies.select(torch.full((1, 1, 4), float("nan")), 2)


# -- apply ----------------------------------------------------------------------------------------------------------------


def test_apply_rounds_to_whole_chunks_and_stores(bench):
    ids = list(range(18))
    bench.put(CacheKind.KV, ids)
    bench.put(CacheKind.QUERY, ids)
    ctx = bench.context()
    kv, q = ctx.retrieve(ids), bench.context(CacheKind.QUERY).retrieve(ids)
    with pytest.warns(UserWarning, match=r"keep=0.7 of 16 tokens: 8 are kept, 50.0%.*whole chunks of 4.*smaller chunk_size"):
        edit = policies.apply("snapkv", kv, q, ids, ctx.geometry, 0.7, window=4)
    assert edit.tensor.shape == (2, 2, 8, 16)  # 11 of 16, down to a multiple of the chunk of 4
    assert edit.token_ids[-4:] == (12, 13, 14, 15) and edit.tail == (16, 17)
    assert edit.store(ctx) and torch.equal(ctx.retrieve(edit.prompt([1]), edit.salt), edit.tensor)
    other = policies.apply("snapkv", kv, q, ids, ctx.geometry, 0.5, window=5)  # a share that whole chunks make: nothing to warn of
    assert other.salt != edit.salt
    with pytest.warns(UserWarning, match="whole chunks"):
        composite = policies.apply("snapkv", kv, q, ids, ctx.geometry, 0.7, window=4, scope="head")
    assert composite.store(ctx) and composite.salt != edit.salt
