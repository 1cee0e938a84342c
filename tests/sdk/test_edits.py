"""keep, drop, salts and the Edit value. That renumbering is right for each rope is in test_rope.py."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qcap import kernels
from qcap.errors import ConfigError, ShapeError, TokenError, Unsupported
from qcap.geometry import Rope
from qcap.kinds import CacheKind
from qcap.sdk import edits
from qcap.sdk.edits import Edit, drop, drop_tokens, keep, keep_tokens, salt_for

KV = CacheKind.KV
IDS = list(range(100, 118))


@pytest.fixture
def kv(geometry):
    return torch.randn(2, 2, 18, 16, generator=torch.Generator().manual_seed(0))


def rotated(rows, old, new, geometry):
    """rows[T, heads, D] from old to new positions, one head at a time by the reference kernel."""
    out = torch.empty_like(rows)
    kernels.rope_shift(rows, torch.as_tensor(old), torch.as_tensor(new), geometry.rope.inv_freq(), geometry.rope.interleaved, out)
    return out


def test_keep_renumbers_keys_and_leaves_values(kv, geometry):
    index = [0, 3, 4, 17]
    before = kv.clone()
    got = keep(kv, index, geometry=geometry)
    assert got.shape == (2, 2, 4, 16) and torch.equal(got[1], kv[1][:, index]) and torch.equal(kv, before)
    for layer in range(2):
        want = rotated(kv[0, layer, index].view(4, 2, 8), index, range(4), geometry)
        assert torch.equal(got[0, layer].view(4, 2, 8), want)
    assert torch.equal(got[0, :, 0], kv[0, :, 0])  # position 0 stays: not one bit changes
    assert not torch.allclose(got[0, :, 3], kv[0, :, 17])


def test_positions_keep_leaves_the_rotation(kv, geometry):
    assert torch.equal(keep(kv, [2, 5], geometry=geometry, positions="keep"), kv[:, :, [2, 5]])
    with pytest.raises(ConfigError, match="renumber"):
        keep(kv, [2], geometry=geometry, positions="renumbr")


def test_a_model_without_rope_is_only_cut(kv, make_geometry_):
    assert torch.equal(keep(kv, [2, 5], geometry=make_geometry_(rope=Rope(kind="none"))), kv[:, :, [2, 5]])


def test_first_position_moves_the_whole_frame(kv, geometry):
    got = keep(kv, [2, 5], geometry=geometry, first_position=30)
    assert torch.equal(got[0, 0].view(2, 2, 8), rotated(kv[0, 0, [2, 5]].view(2, 2, 8), [32, 35], [30, 31], geometry))


def test_a_mask_is_an_index(kv, geometry):
    mask = torch.zeros(18, dtype=torch.bool)
    mask[[1, 9]] = True
    for same in (mask, mask.numpy(), mask.tolist(), np.array([1, 9]), (1, 9)):
        assert torch.equal(keep(kv, same, geometry=geometry), keep(kv, [1, 9], geometry=geometry))


def test_drop_is_keep_of_the_others(kv, geometry):
    others = [i for i in range(18) if i not in (0, 7)]
    assert torch.equal(drop(kv, [0, 7], geometry=geometry), keep(kv, others, geometry=geometry))
    mask = torch.zeros(18, dtype=torch.bool)
    assert torch.equal(drop(kv, mask, geometry=geometry), kv) and torch.equal(drop(kv, [], geometry=geometry), kv)
    with pytest.raises(TokenError, match="at least one must stay"):
        drop(kv, range(18), geometry=geometry)
    with pytest.raises(TokenError, match="to drop"):
        drop(kv, torch.zeros(2, 2, 1, dtype=torch.long), geometry=geometry)


def test_queries_rotate_the_same_way(geometry):
    q = torch.randn(1, 2, 18, 32)
    got = keep(q, [3, 9], geometry=geometry)
    assert torch.equal(got[0, 1].view(2, 4, 8), rotated(q[0, 1, [3, 9]].view(2, 4, 8), [3, 9], [0, 1], geometry))


def test_scores_between_kept_tokens_do_not_change_when_all_move_alike(geometry):
    """Rope is relative: a contiguous run that is renumbered keeps its own attention logits."""
    keys, queries = torch.randn(2, 2, 18, 16), torch.randn(1, 2, 18, 32)
    k, q = keep(keys, range(10, 18), geometry=geometry), keep(queries, range(10, 18), geometry=geometry)

    def logits(k_rows, q_rows):
        return torch.einsum("qhd,kd->hqk", q_rows.view(8, 4, 8)[:, :2], k_rows.view(8, 2, 8)[:, 0])

    assert torch.allclose(logits(k[0, 0], q[0, 0]), logits(keys[0, 0, 10:], queries[0, 0, 10:]), atol=1e-5)


def test_composite_tokens_choose_per_layer_and_head(kv, geometry):
    index = torch.stack([torch.stack([torch.randperm(18)[:5].sort().values for _ in range(2)]) for _ in range(2)])
    got = keep(kv, index, geometry=geometry).view(2, 2, 5, 2, 8)
    rows = kv.view(2, 2, 18, 2, 8)
    for layer in range(2):
        for head in range(2):
            at = index[layer, head]
            assert torch.equal(got[1, layer, :, head], rows[1, layer, at, head])
            want = rotated(rows[0, layer, at, head][:, None], at, range(5), geometry)[:, 0]
            assert torch.equal(got[0, layer, :, head], want)
    same = torch.tensor([1, 4, 6]).expand(2, 2, 3)
    assert torch.equal(keep(kv, same, geometry=geometry), keep(kv, [1, 4, 6], geometry=geometry))
    q = torch.randn(1, 2, 18, 32)
    got_q = keep(q, index, geometry=geometry, positions="keep").view(1, 2, 5, 4, 8)
    for head in range(4):  # two query heads to a KV head
        assert torch.equal(got_q[0, 1, :, head], q.view(1, 2, 18, 4, 8)[0, 1, index[1, head // 2], head])


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ([], "empty"),
        ([0, 18], r"18 is out of range.*0\.\.17"),
        ([-1, 3], "-1 is out of range"),
        ([3, 1], "not sorted: 3 is followed by 1"),
        ([1, 3, 3], "a duplicate: 3 is followed by 3"),
        ([0.5], "scores"),
        (slice(0, 5), r"got slice: for a slice, range\(start, stop\)"),
        ({1, 2}, "got set"),
        (None, "got NoneType"),
        ("abc", "got str"),
        ([True] * 17, r"\[T\] = \[18\]"),
        ([False] * 18, "empty"),
        ([[0, 1]], r"\[B\] or \[L, HK, B\] = \[2, 2, B\]"),
        ([[[0, 1], [0, 1]], [[0, 1], [1, 1]]], r"duplicate \(layer 1, head 1\)"),
        ([[[0, 1]], [[0, 1]]], r"\[2, 2, B\]"),
    ],
)
def test_bad_indices_say_what_is_wrong(kv, geometry, index, said):
    with pytest.raises(TokenError, match=said):
        keep(kv, index, geometry=geometry)


def test_bad_tensors_say_what_is_wrong(kv, geometry, make_geometry_):
    with pytest.raises(ShapeError, match=r"got \(2, 18, 16\)"):
        keep(kv[0], [0], geometry=geometry)
    with pytest.raises(ShapeError, match=r"H=4 x 8 = 32.*ctx\.geometry"):
        keep(kv[:1], [0], geometry=geometry)  # one plane means queries
    with pytest.raises(ShapeError, match="floating"):
        keep(kv.long(), [0], geometry=geometry)
    with pytest.raises(ConfigError, match="longrope"):
        keep(kv, [0], geometry=make_geometry_(rope=Rope(kind="longrope", rotary_dim=8)))
    assert keep(kv, [0], geometry=make_geometry_(rope=Rope(kind="longrope", rotary_dim=8)), positions="keep").shape[2] == 1
    with pytest.raises(Unsupported, match="bfloat16"):
        keep(kv.to(torch.float8_e4m3fn), [0, 2], geometry=geometry)


def test_sixteen_bit_rows_are_rotated_in_float32(kv, geometry):
    low = kv.bfloat16()
    assert torch.equal(keep(low, [0, 9, 17], geometry=geometry), keep(low.float(), [0, 9, 17], geometry=geometry).bfloat16())


def test_nan_rows_are_carried_along(kv, geometry):
    kv[0, 0, 5] = float("nan")
    got = keep(kv, [4, 5, 6], geometry=geometry)
    assert got[0, 0, 1].isnan().all() and not got[0, 0, [0, 2]].isnan().any()


def test_sliding_windows_are_warned_about(kv, make_geometry_, caplog):
    with caplog.at_level(logging.WARNING, "qcap.sdk"):
        keep(kv, [0, 9], geometry=make_geometry_(sliding_window=4))
    assert "sliding window of 4" in caplog.text


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 17), min_size=1), st.sampled_from([(1, 2), (2, 2)]))
def test_twice_renumbered_is_once_renumbered(chosen, _):
    """Keeping A and then B of A is keeping A[B]."""
    from qcap.geometry import Geometry

    geometry = Geometry(
        model="m", layer_names=("a", "b"), num_q_heads=4, num_kv_heads=2, head_size=8, dtype="float32", block_size=2, chunk_size=4,
        rope=Rope(rotary_dim=8),
    )  # fmt: skip
    kv = torch.randn(2, 2, 18, 16)
    first = sorted(chosen)
    second = list(range(0, len(first), 2))
    twice = keep(keep(kv, first, geometry=geometry), second, geometry=geometry)
    assert torch.allclose(twice, keep(kv, [first[i] for i in second], geometry=geometry), atol=1e-5)


# -- salts --------------------------------------------------------------------------------------------------------------


def test_salts_are_short_legal_and_the_same_everywhere():
    salt = salt_for("snapkv", {"window": 32, "keep": 0.5})
    assert salt == salt_for("snapkv", {"keep": 0.5, "window": 32})
    assert salt == "snapkv-175fa1346d5010e33937"  # fixed: a stored edit must be found again
    assert salt_for("a/b@c", {}).startswith("a_b_c-")
    different = {
        salt, salt_for("snapkv", {"window": 32, "keep": 1}), salt_for("snapkv", {"window": 32}), salt_for("snapkv2", {"window": 32}),
        salt_for("snapkv", {"window": 32}, parent="p"), salt_for("snapkv", {"window": "32"}),
    }  # fmt: skip
    assert len(different) == 6
    assert salt_for("x", {"i": torch.tensor([1, 2])}) == salt_for("x", {"i": [1, 2]}) == salt_for("x", {"i": np.array([1, 2])})
    assert len(salt_for("n" * 500)) <= 128
    with pytest.raises(TokenError):
        salt_for("")
    with pytest.raises(ConfigError, match="object"):
        salt_for("x", {"f": object()})


# -- Edit ---------------------------------------------------------------------------------------------------------------


def test_drop_tokens_makes_an_edit_with_ids_and_tail(bench):
    rows = bench.put(KV, IDS)
    ctx = bench.context()
    edit = drop_tokens(ctx, IDS, [1, 2, 3, 4], name="mine", params={"why": "test"})
    assert edit.token_ids == tuple(IDS[i] for i in (0, *range(5, 16))) and edit.tail == (116, 117)
    assert edit.positions == tuple(range(12))
    assert torch.equal(edit.tensor, drop(rows[:, :, :16], [1, 2, 3, 4], geometry=ctx.geometry))
    assert edit.prompt([7, 8]) == [*edit.token_ids, 116, 117, 7, 8]
    assert edit.store(ctx) is True
    assert torch.equal(ctx.retrieve(edit.token_ids, edit.salt), edit.tensor)
    assert ctx.store(edit) is True  # again: the same content
    record = next(v.record for k, v in bench.backend.objects.items() if k.salt == edit.salt)
    told = json.loads(record.edit)
    assert told["name"] == "mine" and told["params"] == {"why": "test"} and told["kept"] == 12 and told["of"] == 16
    with pytest.raises(TokenError, match="alone"):
        ctx.store(edit, IDS)


def test_an_edit_of_a_tensor_needs_the_geometry(kv, geometry):
    with pytest.raises(ConfigError, match=r"ctx\.geometry"):
        keep_tokens(kv, IDS, [0, 1])
    assert keep_tokens(kv, [*IDS, 5], [0, 1], geometry=geometry).tail == (5,)
    with pytest.raises(TokenError, match="whole sequence"):
        keep_tokens(kv, IDS[:17], [0, 1], geometry=geometry)


def test_an_edit_of_nothing_says_so(bench):
    with pytest.raises(TokenError, match="coverage"):
        drop_tokens(bench.context(), IDS, [0])


def test_salts_of_edits_tell_sources_indices_and_modes_apart(kv, geometry):
    def salt(ids=IDS, index=(0, 1), **options):
        return keep_tokens(kv, ids, index, geometry=geometry, **options).salt

    other_source = [*IDS[:2], 999, *IDS[3:]]  # the kept ids are the same, the rows are not
    salts = {salt(), salt(other_source), salt(index=(0, 2)), salt(positions="keep")}
    salts |= {salt(parent_salt="p"), salt(params={"a": 1}), salt(name="n")}
    assert len(salts) == 7 and salt() == salt()


def test_composite_edits_name_the_most_kept_tokens(kv, geometry):
    index = torch.tensor([[[0, 5], [0, 6]], [[0, 6], [1, 6]]])
    edit = keep_tokens(kv, IDS, index, geometry=geometry)
    assert edit.token_ids == (100, 106) and edit.positions == (0, 1) and edit.description["composite"] is True
    with pytest.raises(Unsupported, match="composite"):
        keep_tokens(kv, IDS, index, geometry=geometry, positions="keep")


def test_kept_positions_are_recorded(kv, geometry):
    assert keep_tokens(kv, IDS, [3, 9], geometry=geometry, positions="keep").positions == (3, 9)


def test_a_prompt_that_ends_with_the_edit_is_warned_about(kv, geometry, caplog):
    edit = keep_tokens(kv, IDS, [3, 9], geometry=geometry)
    with caplog.at_level(logging.WARNING, "qcap.sdk"):
        assert edit.prompt() == [103, 109]
    assert "at least one token" in caplog.text


def test_an_edit_checks_itself(kv):
    with pytest.raises(ShapeError, match="agree on B"):
        Edit(tensor=kv, token_ids=(1,), positions=(0,), salt="s")
    with pytest.raises(TokenError, match="salt"):
        Edit(tensor=kv[:, :, :1], token_ids=(1,), positions=(0,), salt="")
    assert "1 tokens kept" in repr(Edit(tensor=kv[:, :, :1], token_ids=(1,), positions=(0,), salt="s"))
    assert edits.__all__ == ["Edit", "as_index", "drop", "drop_tokens", "keep", "keep_tokens", "salt_for"]
