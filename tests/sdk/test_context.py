"""retrieve, coverage, store, close."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from blake3 import blake3

from qcap.errors import EditConflict, GeometryMismatch, ObjectCorrupt, ShapeError, StoreError, StoreUnavailable, TokenError
from qcap.kinds import CacheKind
from qcap.sdk.edits import keep, salt_for
from qcap.store.extents import extent_of, sequence_chunks
from qcap.store.tiers import LoadedChunk, StoreOutcome
from qcap.tokens import ChunkedTokenDatabase, ChunkRecord, chain_digest

KV, QUERY = CacheKind.KV, CacheKind.QUERY
IDS = list(range(100, 118))  # 18 tokens: 4 chunks of 4 and a tail of 2


def key_of(ctx, chunk, salt="", rank=0, tokens=IDS):
    return ctx._key(ChunkedTokenDatabase(ctx.chunk_size).chunks(tokens)[chunk], salt, rank)


# -- retrieve -----------------------------------------------------------------------------------------------------------


def test_retrieve_returns_whole_chunks_of_both_kinds(any_bench):  # Q1 Q5 Q10 Q12 K4
    kv_rows, q_rows = any_bench.put(KV, IDS), any_bench.put(QUERY, IDS, seed=1)
    kv, q = any_bench.context(KV), any_bench.context(QUERY)
    assert (kv.stored_model, q.stored_model, q.model) == ("org/tiny", "org/tiny##query", "org/tiny")
    got_kv, got_q = kv.retrieve(IDS), q.retrieve(IDS)
    assert got_kv.shape == (2, 2, 16, 16) and got_q.shape == (1, 2, 16, 32)  # H of queries is that of the query heads
    assert kv.shape_of(16) == got_kv.shape and q.shape_of(16) == got_q.shape
    assert torch.equal(got_kv, kv_rows[:, :, :16]) and torch.equal(got_q, q_rows[:, :, :16])
    assert got_kv.is_contiguous() and got_q.is_contiguous()
    got_kv.zero_()  # Copies: the SDK's tensors are the caller's
    assert torch.equal(kv.retrieve(IDS), kv_rows[:, :, :16])


def test_ids_may_be_list_array_or_tensor(bench):
    rows = bench.put(KV, IDS)
    for ids in (IDS, tuple(IDS), np.array(IDS), torch.tensor(IDS, dtype=torch.int32)):
        assert torch.equal(bench.context().retrieve(ids), rows[:, :, :16])


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_less_than_a_chunk_is_none_without_asking_the_store(bench, caplog, tokens):  # Q11
    with caplog.at_level(logging.INFO, "qcap.sdk"):
        assert bench.context().retrieve(tokens) is None
    assert bench.backend.data_calls == 0
    assert "less than one chunk" in caplog.text and caplog.records[0].levelno == logging.INFO


def test_a_miss_is_none(bench, caplog):  # Q13
    with caplog.at_level(logging.INFO, "qcap.sdk"):
        assert bench.context().retrieve(IDS) is None
    assert bench.backend.calls["load"] == 0 and "no chunk" in caplog.text


def test_the_first_hole_ends_the_prefix(bench):
    rows = bench.put(KV, IDS)
    ctx = bench.context()
    del bench.backend.objects[key_of(ctx, 2)]
    assert torch.equal(ctx.retrieve(IDS), rows[:, :, :8])
    del bench.backend.objects[key_of(ctx, 0)]
    assert ctx.retrieve(IDS) is None


def test_a_chunk_that_vanishes_under_the_hand_ends_the_prefix_with_a_warning(bench, caplog):
    rows = bench.put(KV, IDS)
    ctx = bench.context()
    gone = key_of(ctx, 1)
    bench.backend.before_load = lambda key: bench.backend.objects.pop(gone, None)
    with caplog.at_level(logging.WARNING, "qcap.sdk"):
        got = ctx.retrieve(IDS)
    assert torch.equal(got, rows[:, :, :4]) and got.is_contiguous() and got.untyped_storage().nbytes() == got.nbytes
    assert "chunk 1" in caplog.text and "vanished" in caplog.text
    bench.backend.before_load = lambda key: bench.backend.objects.clear()
    assert ctx.retrieve(IDS) is None


def test_a_corrupt_chunk_raises_and_names_the_next_step(bench):
    bench.put(KV, IDS)
    ctx = bench.context()
    bench.backend.corrupt = {key_of(ctx, 1)}
    with pytest.raises(ObjectCorrupt, match=r"chunk 1 \(tokens 4\.\.7.*qcap verify fake://store"):
        ctx.retrieve(IDS)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("token_ids", (1, 2, 3, 4), ObjectCorrupt),
        ("digest", "00" * 32, ObjectCorrupt),
        ("parent", "00" * 32, ObjectCorrupt),
        ("salt", "other", ObjectCorrupt),
        ("kind", QUERY, ObjectCorrupt),
    ],
)
def test_a_header_that_is_not_what_was_asked_raises(bench, field, value, error):
    bench.put(KV, IDS)
    ctx = bench.context()
    key = key_of(ctx, 1)
    found = bench.backend.objects[key]
    bench.backend.objects[key] = LoadedChunk(replace(found.record, **{field: value}), found.tensor)
    with pytest.raises(error, match="another"):
        ctx.retrieve(IDS)


def test_a_chunk_of_another_geometry_raises(bench):
    bench.put(KV, IDS)
    ctx = bench.context()
    key = key_of(ctx, 0)
    found = bench.backend.objects[key]
    other = replace(bench.geometry, rope=replace(bench.geometry.rope, theta=5e5))
    bench.backend.objects[key] = LoadedChunk(replace(found.record, geometry=other), found.tensor)
    with pytest.raises(GeometryMismatch, match="theta"):
        ctx.retrieve(IDS)
    bench.backend.objects[key] = LoadedChunk(found.record, found.tensor[:, :1])
    with pytest.raises(GeometryMismatch, match="tensor"):
        ctx.retrieve(IDS)


def test_salts_are_apart(bench):  # K3
    plain, salted = bench.put(KV, IDS), bench.put(KV, IDS, seed=5, salt="mine")
    ctx = bench.context()
    assert torch.equal(ctx.retrieve(IDS), plain[:, :, :16]) and torch.equal(ctx.retrieve(IDS, "mine"), salted[:, :, :16])
    assert ctx.retrieve(IDS, "nobody") is None


# -- tensor parallel ----------------------------------------------------------------------------------------------------


def test_all_ranks_heads_are_joined(make_bench):  # Q7 W32
    bench = make_bench(num_q_heads=2, num_kv_heads=1, tp_size=2, total_num_kv_heads=2)
    for kind in CacheKind:
        ctx = bench.context(kind)
        assert (ctx.geometry.num_q_heads, ctx.geometry.num_kv_heads, ctx.geometry.tp_size) == (4, 2, 1)
        rows = bench.put(kind, IDS)
        assert torch.equal(ctx.retrieve(IDS), rows[:, :, :16])


def test_a_chunk_missing_on_one_rank_is_not_there(make_bench):  # Q7
    bench = make_bench(num_q_heads=2, num_kv_heads=1, tp_size=2, total_num_kv_heads=2)
    rows = bench.put(KV, IDS)
    ctx = bench.context()
    del bench.backend.objects[key_of(ctx, 2, rank=1)]
    assert torch.equal(ctx.retrieve(IDS), rows[:, :, :8])
    assert bench.backend.calls["load"] == 2 * 2  # lookup knew it: nothing beyond was read
    assert ctx.coverage(IDS).stored == (True, True, False, True)


def test_replicated_kv_heads_are_taken_once(make_bench):  # Q7
    bench = make_bench(num_q_heads=2, num_kv_heads=1, tp_size=4, total_num_kv_heads=2)
    ctx = bench.context()
    assert ctx.geometry.num_kv_heads == 2 and ctx.geometry.num_q_heads == 8
    rows = bench.put(KV, IDS)
    first, second = (bench.backend.objects[key_of(ctx, 0, rank=r)].tensor for r in (0, 1))
    assert torch.equal(first, second)  # ranks 0 and 1 hold the same head
    assert torch.equal(ctx.retrieve(IDS), rows[:, :, :16])
    assert bench.backend.calls["load"] == 4 * 2  # 4 chunks, the two owning ranks
    q_rows = bench.put(QUERY, IDS, seed=2)
    assert torch.equal(bench.context(QUERY).retrieve(IDS), q_rows[:, :, :16])


def test_store_splits_heads_by_rank(make_bench):  # Q7
    bench = make_bench(num_q_heads=2, num_kv_heads=1, tp_size=4, total_num_kv_heads=2)
    rows = torch.randn(2, 2, 8, 16)
    ctx = bench.context()
    assert ctx.store(rows, IDS[:8], salt="s")
    for rank, head in enumerate((0, 0, 1, 1)):
        part = bench.backend.objects[key_of(ctx, 1, "s", rank)].tensor
        assert torch.equal(part, rows[:, :, 4:8, head * 8 : head * 8 + 8])
    assert torch.equal(ctx.retrieve(IDS[:8], "s"), rows)


# -- coverage and sequences ---------------------------------------------------------------------------------------------


def test_coverage_tells_chunks_prefix_and_tail(bench):
    bench.put(KV, IDS)
    ctx = bench.context()
    del bench.backend.objects[key_of(ctx, 1)]
    cov = ctx.coverage(IDS)
    assert cov.stored == (True, False, True, True) and cov.holes == (1,)
    assert (cov.whole_chunks, cov.whole_tokens, cov.tail_tokens, cov.stored_tokens, cov.prefix_tokens) == (4, 16, 2, 12, 4)
    assert cov.fraction == 0.75
    assert bench.backend.calls["load"] == 0
    for text in (repr(cov), cov._repr_html_()):
        assert "12 of 16" in text and "75%" in text and "missing chunks: 1" in text
    assert len(ctx.retrieve(IDS)[0, 0]) == cov.prefix_tokens


def test_coverage_counts_only_what_an_engine_can_have_computed(bench):
    ctx = bench.context()
    bench.put(KV, IDS[:15])  # 16 tokens, of which the last was generated and never fed: 3 whole chunks
    cov = ctx.coverage(IDS[:16], computed_tokens=15)
    assert cov.whole_chunks == 3 and cov.fraction == 1.0 and cov.tail_tokens == 4
    assert ctx.coverage(IDS[:16]).fraction == 0.75
    with pytest.raises(TokenError, match=r"0\.\.16"):
        ctx.coverage(IDS[:16], computed_tokens=17)


def test_coverage_of_nothing(bench):
    cov = bench.context().coverage([1])
    assert cov.fraction == 1.0 and cov.tail_tokens == 1 and bench.backend.data_calls == 0


# -- store --------------------------------------------------------------------------------------------------------------


def test_store_then_retrieve(any_bench):  # Q17
    ctx = any_bench.context()
    rows = torch.randn(2, 2, 18, 16)
    with pytest.warns(UserWarning, match="last 2 of 18"):
        assert ctx.store(rows, IDS, salt="mine") is True
    assert torch.equal(ctx.retrieve(IDS, "mine"), rows[:, :, :16])  # cut to whole chunks
    assert ctx.retrieve(IDS) is None  # the engine's own entry is untouched


def test_store_works_for_queries(any_bench):  # Q18
    any_bench.put(QUERY, IDS)
    ctx = any_bench.context(QUERY)
    q = ctx.retrieve(IDS)
    assert ctx.store(-q, IDS[:16], salt="negated") is True
    assert torch.equal(ctx.retrieve(IDS, "negated"), -q)
    assert torch.equal(ctx.retrieve(IDS), q)


def test_non_contiguous_rows_are_stored_as_they_look(bench):  # Q17
    ctx = bench.context()
    rows = torch.randn(2, 2, 16, 8, 2).transpose(2, 3).reshape(2, 2, 16, 16).transpose(0, 1)
    assert not rows.is_contiguous()
    assert ctx.store(rows, IDS[:8] + IDS[8:16], salt="t")
    assert torch.equal(ctx.retrieve(IDS[:16], "t"), rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_rows_are_stored(bench):  # Q17
    rows = torch.randn(2, 2, 8, 16, device="cuda")
    assert bench.context().store(rows, IDS[:8], salt="cuda")
    assert torch.equal(bench.context().retrieve(IDS[:8], "cuda"), rows.cpu())


def test_rows_may_require_grad(bench):
    assert bench.context().store(torch.randn(2, 2, 4, 16, requires_grad=True), IDS[:4], salt="g")


def test_less_than_a_chunk_is_false_without_a_round_trip(bench):  # Q19
    with pytest.warns(UserWarning, match=r"3 edited rows are less than one chunk of 4 and are not stored.*Keep 4 \(or a multiple") as told:
        assert bench.context().store(torch.randn(2, 2, 3, 16), IDS[:3], salt="s") is False
    assert bench.backend.data_calls == 0 and [w.filename for w in told] == [__file__]


def test_the_tail_that_is_not_stored_is_told(bench):
    with pytest.warns(UserWarning, match=r"last 2 of 18 edited rows fill no chunk of 4 and are not stored.*Keep 16 or 20 tokens") as told:
        bench.context().store(torch.randn(2, 2, 18, 16), IDS, salt="s")
    assert [w.filename for w in told] == [__file__], "the user's line, not qcap's"


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((2, 2, 17, 16), "17 rows for 18 token ids"),
        ((1, 2, 18, 16), "2 plane"),
        ((2, 18, 2, 16), "axis was moved"),
        ((2, 2, 18, 2, 8), "four axes"),
        ((2, 2, 18, 32), "other kind"),
    ],
)
def test_wrong_shapes_name_got_wanted_and_cause(bench, shape, said):  # Q17
    with pytest.raises(ShapeError) as error:
        bench.context().store(torch.zeros(shape), IDS, salt="s")
    assert said in str(error.value) and str(tuple(shape)) in str(error.value) and "(2, 2, 18, 16)" in str(error.value)
    assert bench.backend.data_calls == 0


def test_another_dtype_is_refused_with_the_cast_to_write(bench):
    with pytest.raises(ShapeError, match=r"tensor\.to\(torch\.float32\)"):
        bench.context().store(torch.zeros(2, 2, 18, 16, dtype=torch.bfloat16), IDS, salt="s")


@pytest.mark.parametrize("salt", ["", None, "a/b", "x" * 129])
def test_an_edit_needs_a_usable_salt(bench, salt):
    with pytest.raises(TokenError, match="salt"):
        bench.context().store(torch.zeros(2, 2, 18, 16), IDS, salt=salt)
    assert bench.backend.data_calls == 0


def test_same_content_again_is_true_other_content_conflicts(any_bench):
    ctx = any_bench.context()
    rows = torch.randn(2, 2, 8, 16)
    assert ctx.store(rows, IDS[:8], salt="s") and ctx.store(rows.clone(), IDS[:8], salt="s")
    other = rows.clone()
    other[1, 1, 7, 15] += 1
    longer = torch.cat([other, torch.randn(2, 2, 4, 16)], dim=2)
    with pytest.raises(EditConflict, match=r"chunk 1.*another salt, or overwrite=True"):
        ctx.store(longer, IDS[:12], salt="s")
    assert torch.equal(ctx.retrieve(IDS, "s"), rows)  # nothing was written, not even the third chunk
    assert ctx.store(longer, IDS[:12], salt="s", overwrite=True)
    assert torch.equal(ctx.retrieve(IDS, "s"), longer)


def test_the_same_rows_at_other_positions_conflict(bench):
    ctx = bench.context()
    rows = torch.randn(2, 2, 8, 16)
    ctx.store(rows, IDS[:8], salt="s")
    with pytest.raises(EditConflict, match="other positions"):
        ctx.store(rows, IDS[:8], salt="s", positions=range(1, 9))


def test_nan_rows_are_the_same_rows(bench, caplog):
    ctx = bench.context()
    rows = torch.full((2, 2, 4, 16), float("nan"))
    with caplog.at_level(logging.WARNING, "qcap.sdk"):
        assert ctx.store(rows, IDS[:4], salt="s")
    assert "NaN" in caplog.text
    assert ctx.store(rows, IDS[:4], salt="s")


def test_positions_and_edit_are_in_the_header(any_bench):
    ctx = any_bench.context()
    ctx.store(torch.randn(2, 2, 8, 16), IDS[:8], salt="s", positions=torch.arange(3, 11), edit={"name": "mine", "params": {"a": 1}})
    record = any_bench.backend.load(key_of(ctx, 1, "s")).record
    assert record.positions == (7, 8, 9, 10) and json.loads(record.edit)["params"] == {"a": 1} and record.salt == "s"
    ctx.store(torch.randn(2, 2, 8, 16), IDS[:8], salt="u")
    record = any_bench.backend.load(key_of(ctx, 1, "u")).record
    assert record.positions == (4, 5, 6, 7) and record.edit  # never "", which means an engine computed it
    with pytest.raises(TokenError, match="positions"):
        ctx.store(torch.randn(2, 2, 8, 16), IDS[:8], salt="v", positions=[1, 2])


@pytest.mark.parametrize("outcome", [StoreOutcome.REFUSED, StoreOutcome.FAILED])
def test_what_the_store_does_not_take_raises(bench, outcome):
    bench.backend.outcome = outcome
    with pytest.raises(StoreError, match=outcome.value):
        bench.context().store(torch.zeros(2, 2, 8, 16), IDS[:8], salt="s")


def test_a_store_that_takes_too_long_raises(bench):
    bench.backend.outcome = "never"
    with pytest.raises(StoreError, match=r"not published after 0\.01 s \(0 of 2 objects are stored\)"):
        bench.context(timeout_s=0.01).store(torch.zeros(2, 2, 8, 16), IDS[:8], salt="s")


def test_someone_else_storing_the_same_at_once_is_fine(bench):
    ctx = bench.context()
    rows = torch.randn(2, 2, 4, 16)
    real = bench.backend.contains
    bench.backend.contains = lambda keys: [False] * len(keys)  # it appears between our look and our write
    bench.put(KV, IDS[:4], salt="s")
    with pytest.raises(EditConflict):
        ctx.store(rows, IDS[:4], salt="s")
    bench.backend.contains = real
    mine = ctx.retrieve(IDS[:4], "s")
    bench.backend.contains = lambda keys: [False] * len(keys)
    assert ctx.store(mine, IDS[:4], salt="s")


# -- an edit tells how far it goes --------------------------------------------------------------------------------------


def text_of(ctx, chunk, salt="s", tokens=IDS):
    return ctx._backend.load(key_of(ctx, chunk, salt, tokens=tokens)).record.edit


def test_every_chunk_of_an_edit_lists_them_all(any_bench):
    ctx = any_bench.context()
    ctx.store(torch.randn(2, 2, 16, 16), IDS[:16], salt="s", edit={"name": "mine"})
    (text,) = {text_of(ctx, i) for i in range(4)}
    chunks = ChunkedTokenDatabase(4).chunks(IDS)
    assert json.loads(text) == {"name": "mine", "qcap_chunks": "".join(c.digest[:8] for c in chunks)}
    extent = extent_of(text)
    assert extent.count(4) == 4 and extent.covered(chunks) == 4 and extent.covered(chunks[:3]) == 3
    assert extent.covered(ChunkedTokenDatabase(4).chunks([*IDS[:8], 0, *IDS[8:]])) == 2
    ctx.store(torch.randn(2, 2, 4, 16), IDS[:4], salt="t", edit="my own notes")
    assert text_of(ctx, 0, "t") == "my own notes" and extent_of("my own notes").count(4) is None


@pytest.mark.parametrize(
    ("text", "count"),
    [('{"kept": 11}', 2), ('{"kept": true}', None), ('{"kept": -1}', None), ('{"qcap_chunks": "abc"}', None), ("[1]", None), ("", None),
     ("[" * 100_000, None), ('{"qcap_chunks": 5, "kept": 4}', 1), ('{"qcap_chunks": "0123456789abcdef", "kept": 99}', 2)],
)  # fmt: skip
def test_what_a_text_says_of_how_far_its_edit_goes(text, count):
    assert extent_of(text).count(4) == count


@pytest.mark.parametrize("overwrite", [False, True])
def test_sequences_that_begin_alike_may_share_a_salt(any_bench, overwrite):
    """An engine and retrieve() refuse chunks that tell of different edits: the shared chunk must fit both sequences."""
    ctx = any_bench.context()
    shared, ends = torch.randn(2, 2, 4, 16), torch.randn(3, 2, 2, 8, 16)
    ids = [IDS[:4] + [n] * 8 for n in range(3)]
    for _ in range(2):
        for end, tokens in zip(ends, ids, strict=True):
            ctx.store(torch.cat([shared, end], 2), tokens, salt="s", overwrite=overwrite)
    ctx.store(shared, IDS[:4], salt="s", overwrite=overwrite)
    for end, tokens in zip(ends, ids, strict=True):
        assert torch.equal(ctx.retrieve(tokens, "s"), torch.cat([shared, end], 2))


def test_an_edit_of_an_older_qcap_is_completed_in_its_own_words(bench):
    ctx = bench.context()
    rows = torch.randn(2, 2, 12, 16)
    ctx.store(rows, IDS[:12], salt="s")
    for key, loaded in list(bench.backend.objects.items()):
        bench.backend.objects[key] = LoadedChunk(replace(loaded.record, edit='{"name": "unnamed"}'), loaded.tensor)
    del bench.backend.objects[key_of(ctx, 1, "s")]
    assert ctx.store(rows, IDS[:12], salt="s") and text_of(ctx, 1) == '{"name": "unnamed"}'
    assert torch.equal(ctx.retrieve(IDS, "s"), rows)
    assert ctx.store(rows, IDS[:12], salt="s", edit={"name": "new"})  # another edit's words: all are told anew
    assert len({text_of(ctx, i) for i in range(3)}) == 1 and '"new"' in text_of(ctx, 0)


def test_rows_that_an_engine_computed_in_an_edits_place_are_not_retrieved(bench):
    ctx = bench.context()
    rows = torch.randn(2, 2, 12, 16)
    ctx.store(rows, IDS[:12], salt="s")
    computed = bench.put(KV, [*IDS[:12], 1, 2, 3, 4], salt="other")
    behind = {k: v for k, v in bench.backend.objects.items() if k.salt == "other"}
    (end,) = (kept.record.behind for key, kept in bench.backend.objects.items() if key.salt == "s" and kept.record.start == 8)
    for loaded in behind.values():
        record = replace(loaded.record, salt="s")
        if record.start == 12:  # behind the whole edit
            record = replace(record, parent=end, digest=chain_digest(end, record.token_ids))
            bench.backend.objects[record.key] = LoadedChunk(record, loaded.tensor)
    longer = [*IDS[:12], 1, 2, 3, 4]
    assert torch.equal(ctx.retrieve(longer, "s"), torch.cat([rows, computed[:, :, 12:]], 2))
    last = next(v for v in behind.values() if v.record.start == 8)
    record = replace(last.record, salt="s")
    bench.backend.objects[record.key] = LoadedChunk(record, last.tensor)
    with pytest.raises(ObjectCorrupt, match=r"chunk 2 .* is not its edit's.*overwrite=True or under another salt"):
        ctx.retrieve(longer, "s")
    with pytest.raises(EditConflict, match="not any more"):
        ctx.store(rows, IDS[:12], salt="s")
    assert ctx.store(rows, IDS[:12], salt="s", overwrite=True) and torch.equal(ctx.retrieve(IDS[:12], "s"), rows)


# -- life ---------------------------------------------------------------------------------------------------------------


def test_close_twice_and_use_after(bench):  # Q21
    with bench.context() as ctx:
        pass
    ctx.close()
    assert bench.backend.closed == 1
    for use in (lambda: ctx.retrieve(IDS), lambda: ctx.coverage(IDS), ctx.sequences, ctx.__enter__,
                lambda: ctx.store(torch.zeros(2, 2, 4, 16), IDS[:4], salt="s")):  # fmt: skip
        with pytest.raises(StoreUnavailable, match=r"closed.*connect"):
            use()
    assert "closed" in repr(ctx)


def test_an_idle_context_just_works(any_bench, monkeypatch):  # Q22
    rows = any_bench.put(KV, IDS)
    ctx = any_bench.context()
    late = time.time() + 3601, time.monotonic() + 3601
    monkeypatch.setattr(time, "time", lambda: late[0])
    monkeypatch.setattr(time, "monotonic", lambda: late[1])
    assert torch.equal(ctx.retrieve(IDS), rows[:, :, :16])


def test_the_loop_a_researcher_runs(any_bench):  # Q23
    any_bench.put(KV, IDS)
    ctx = any_bench.context()
    kv = ctx.retrieve(IDS)
    index = torch.tensor([0, 1, 4, 5, 8, 9, 12, 13])
    edited, salt = keep(kv, index, geometry=ctx.geometry), salt_for("pairs", {"step": 4})
    ids = [IDS[i] for i in index]
    assert ctx.store(edited, ids, salt=salt)
    assert torch.equal(ctx.retrieve(ids, salt), edited)
    assert torch.equal(ctx.retrieve(IDS), kv)


def test_what_is_no_tensor_is_told(bench):
    rows = bench.put(CacheKind.KV, IDS[:8])
    ctx = bench.context()
    for wrong, tokens, said in (
        (rows.numpy(), IDS[:8], r"got numpy\.ndarray of shape \(2, 2, 8, 16\); torch\.from_numpy"),
        (list(IDS[:8]), rows, r"got list; are the arguments swapped"),
        (torch.tensor(IDS[:8]), rows, r"got a tensor of shape \(8,\); are the arguments swapped"),
        (np.array(IDS[:8]), rows, r"got numpy\.ndarray of shape \(8,\); are the arguments swapped"),
        (None, IDS[:8], r"got NoneType.*coverage"),
    ):
        with pytest.raises(ShapeError, match=r"torch\.Tensor \[planes, L, T, H\] wanted, " + said):
            ctx.store(wrong, tokens, salt="s")


def test_overwriting_warns_once_of_what_engines_still_hold(bench, caplog):
    ctx = bench.context()
    rows = torch.randn(ctx.shape_of(12))
    with caplog.at_level(logging.WARNING, "qcap.sdk"):
        ctx.store(rows, IDS[:12], salt="s")
        assert not caplog.records
        ctx.store(rows + 1, IDS[:12], salt="s", overwrite=True)
    (told,) = caplog.records
    assert "reset_prefix_cache" in told.getMessage() and "'s'" in told.getMessage()


def computed_behind(bench, edited, ids):
    """What an engine computes and stores of ``ids`` behind ``edited``, the ids of an edit under salt "s"."""
    backend, size = bench.backend, 4
    chunks = sequence_chunks(backend, bench.geometry, ids, "s")[len(edited) // size :]
    rows = torch.randn(bench.context().shape_of(len(chunks) * size))
    for number, chunk in enumerate(chunks):
        record = ChunkRecord(KV, bench.geometry, chunk.start, tuple(ids[chunk.start : chunk.end]), chunk.digest, chunk.parent, "s")
        assert backend.store(record, rows[:, :, number * size : (number + 1) * size].contiguous()).result(20) is StoreOutcome.STORED
    return rows


def test_what_an_engine_computed_on_an_edit_is_found_behind_that_alone(any_bench):
    """Rows behind an edit follow from the edit's rows: behind others they would be wrong, and nobody could tell."""
    bench, ctx = any_bench, any_bench.context()
    one, ids = torch.randn(ctx.shape_of(8)), IDS[:16]
    other = one.clone()
    other[1, 0, 3, 2] += 1  # in the first of its two chunks
    assert ctx.store(one, ids[:8], salt="s")
    behind = computed_behind(bench, ids[:8], ids)
    assert torch.equal(ctx.retrieve(ids, "s"), torch.cat([one, behind], 2)) and ctx.coverage(ids, "s").stored == (True,) * 4
    assert ctx.store(other, ids[:8], salt="s", overwrite=True)
    assert torch.equal(ctx.retrieve(ids, "s"), other) and ctx.coverage(ids, "s").stored == (True, True, False, False)
    behind_other = computed_behind(bench, ids[:8], ids)
    assert torch.equal(ctx.retrieve(ids, "s"), torch.cat([other, behind_other], 2))
    assert ctx.store(one, ids[:8], salt="s", overwrite=True)  # the first again, and what was computed on it
    assert torch.equal(ctx.retrieve(ids, "s"), torch.cat([one, behind], 2))
    longer = torch.cat([one, behind[:, :, :4] + 1], 2)
    assert ctx.store(longer, ids[:12], salt="s")
    assert torch.equal(ctx.retrieve(ids, "s"), longer)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_hash_of_an_edits_rows_is_what_the_formats_page_says(make_bench, tp):
    bench = make_bench(tp_size=tp)
    ctx = bench.context()
    rows, where = torch.randn(ctx.shape_of(8)), [3, 4, 5, 6, 9, 10, 11, 12]
    assert ctx.store(rows, IDS[:8], salt="s", positions=where)
    so_far, before = b"", ""
    for chunk in range(2):
        at = slice(4 * chunk, 4 * chunk + 4)
        so_far += rows[:, :, at].numpy().tobytes() + np.array(where[at], "<i8").tobytes()
        for rank in range(tp):
            told = bench.backend.objects[key_of(ctx, chunk, "s", rank)].record.rows
            assert told == f"{before}.{blake3(so_far).hexdigest()}"
        before = blake3(so_far).hexdigest()


def test_an_edit_that_is_half_stored_over_another_is_not_retrieved(bench):
    """Its last chunk is there first; its text is the other's."""
    ctx = bench.context()
    rows = torch.randn(ctx.shape_of(12))
    assert ctx.store(rows, IDS[:12], salt="s") and ctx.store(rows + 1, IDS[:12], salt="new")
    half = bench.backend.objects[key_of(ctx, 2, "new")]
    bench.backend.objects[key_of(ctx, 2, "s")] = LoadedChunk(replace(half.record, salt="s"), half.tensor)
    with pytest.raises(ObjectCorrupt, match=r"chunk 2.*mixed, or one is being stored over the other"):
        ctx.retrieve(IDS[:12], "s")
    assert ctx.store(rows + 1, IDS[:12], salt="s", overwrite=True)
    assert torch.equal(ctx.retrieve(IDS[:12], "s"), rows + 1)


def test_an_edit_may_be_replaced_by_a_shorter_one(any_bench):
    ctx = any_bench.context()
    rows = torch.randn(ctx.shape_of(12))
    assert ctx.store(rows, IDS[:12], salt="s") and ctx.store(rows[:, :, :8] + 1, IDS[:8], salt="s", overwrite=True)
    assert torch.equal(ctx.retrieve(IDS[:12], "s"), rows[:, :, :8] + 1)


def test_queries_may_be_edited_further_than_keys_and_values(bench):
    kv, query = bench.context(), bench.context(CacheKind.QUERY)
    queries = torch.randn(query.shape_of(12))
    assert query.store(queries, IDS[:12], salt="s") and kv.store(torch.randn(kv.shape_of(8)), IDS[:8], salt="s")
    assert torch.equal(query.retrieve(IDS[:16], "s"), queries)


def test_the_same_rows_at_other_positions_are_other_rows(bench):
    ctx = bench.context()
    rows = torch.randn(ctx.shape_of(8))
    assert ctx.store(rows, IDS[:8], salt="s")
    computed_behind(bench, IDS[:8], IDS[:12])
    assert ctx.store(rows, IDS[:8], salt="s", positions=range(1, 9), overwrite=True)
    assert torch.equal(ctx.retrieve(IDS[:12], "s"), rows)


def test_queries_behind_an_edit_are_found_behind_its_rows(bench):
    """Only keys and values were edited."""
    kv, query = bench.context(), bench.context(CacheKind.QUERY)
    rows = torch.randn(kv.shape_of(8))
    assert kv.store(rows, IDS[:8], salt="s")
    chunk = sequence_chunks(bench.backend, bench.geometry, IDS[:12], "s")[2]
    record = ChunkRecord(CacheKind.QUERY, bench.geometry, 8, tuple(IDS[8:12]), chunk.digest, chunk.parent, "s")
    bench.backend.store(record, torch.randn(query.shape_of(4))).result(20)
    assert query.coverage(IDS[:12], "s").stored == (False, False, True)
    kv.store(rows + 1, IDS[:8], salt="s", overwrite=True)
    assert query.coverage(IDS[:12], "s").stored == (False, False, False)


def test_a_conflict_with_what_an_engine_computed_says_so(bench):
    rows = bench.put(CacheKind.KV, IDS[:8], salt="s")
    with pytest.raises(EditConflict, match=r"no edit: an engine computed.*not yet, or not any more.*fresh salt; overwrite=True.*reset"):
        bench.context().store(rows + 1, IDS[:8], salt="s")
