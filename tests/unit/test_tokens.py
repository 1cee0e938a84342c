"""Chunking, chained digests, keys, salts."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from qcap.errors import TokenError
from qcap.geometry import Geometry, Rope
from qcap.kinds import CacheKind
from qcap.tokens import ROOT_DIGEST, ChunkedTokenDatabase, ChunkKey, ChunkRecord, as_token_array, chain_digest, check_salt, chunk_key

GEO = Geometry(
    model="org/m", layer_names=("a",), num_q_heads=4, num_kv_heads=2, head_size=8, dtype="bfloat16", block_size=2, chunk_size=4, rope=Rope()
)
KEY = ChunkKey("org/m", 2, 1, "bfloat16", "d" * 64, "s", (("lora", "x"),))


def test_fixed_vector() -> None:  # K32
    assert ROOT_DIGEST == "51b5e742fd4bca21f415a5b8ac27d3b79fe4eca70baa5bc79087d2d8fcac329f"
    first, second = ChunkedTokenDatabase(2).chunks([1, 2, 3, 4])
    assert first.digest == "15e70be18b96e9246ae1bc70b5ce0daae3c967b053d1839d946fe2c6f0dd1078" and first.parent == ROOT_DIGEST
    assert second.digest == "899cd0104d4247027e9d1ccf87e1ed2f3c52d91d53e7f71c57d672ddb636b570" and second.parent == first.digest
    key = ChunkKey("org/m##query", 2, 1, "bfloat16", second.digest, "s", (("a", "x"),))
    assert key.fingerprint() == "da2fd322332471a7c68aafe1921f1a509ca6d5864d1868be65140cfdcf88faed"


def test_digests_are_chained() -> None:  # K11
    one = ChunkedTokenDatabase(2).chunks([1, 2, 3, 4])
    two = ChunkedTokenDatabase(2).chunks([9, 2, 3, 4])
    assert one[1].digest != two[1].digest
    assert chain_digest(one[0].digest, [3, 4]) == one[1].digest


def test_the_first_parent_is_the_root() -> None:  # K12
    assert ChunkedTokenDatabase(2).chunks([1, 2])[0].digest == chain_digest(ROOT_DIGEST, [1, 2])


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        np.array,
        torch.tensor,
        lambda t: np.array(t, np.uint16),
        lambda t: torch.tensor(t, dtype=torch.int32),
        lambda t: np.repeat(t, 2)[::2],
    ],
)
def test_inputs_are_normalised(make) -> None:  # K13
    tokens = [5, 6, 7, 8]
    assert ChunkedTokenDatabase(2).chunks(make(tokens)) == ChunkedTokenDatabase(2).chunks(tokens)


@pytest.mark.parametrize("bad", ["abcd", b"abcd", [1.0, 2.0], [[1, 2]], ["1"], np.array(3), [True, False], [None]])
def test_other_inputs_are_refused(bad: object) -> None:  # K14
    with pytest.raises(TokenError):
        as_token_array(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [5, None, {1, 2}, {"a": 1}, np.array(3), iter([1, 2])])
def test_what_cannot_be_cut_is_refused(bad: object) -> None:  # K14
    with pytest.raises(TokenError):
        ChunkedTokenDatabase(2).chunks(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([[1, 2, 3]], r"shape \(1, 3\) of int64: give one sequence, \[0\] of it"),
        ({"input_ids": [1, 2]}, "got dict: of a tokenizer's output, give input_ids"),
        (None, "got NoneType"),
    ],
)
def test_what_is_told_of_what_is_no_sequence(bad: object, said: str) -> None:
    with pytest.raises(TokenError, match=said):
        as_token_array(bad)


@pytest.mark.parametrize("bad", [[-1], [2**32], [0, 2**40], [2**70]])
def test_ids_beyond_uint32(bad: list[int]) -> None:  # K32
    with pytest.raises(TokenError, match=r"\[0, 2\*\*32\)|flat sequence of integers"):
        as_token_array(bad)


def test_the_largest_id_is_fine() -> None:  # K32
    assert as_token_array([0, 2**32 - 1]).tolist() == [0, 2**32 - 1]
    assert as_token_array([]).tolist() == []


def test_only_whole_chunks_have_keys() -> None:  # K33
    chunks = ChunkedTokenDatabase().chunks(range(600))
    assert [(c.start, c.end, c.index) for c in chunks] == [(0, 256, 0), (256, 512, 1)]
    assert ChunkedTokenDatabase(256).chunks(range(255)) == []
    assert len(ChunkedTokenDatabase(256).chunks(range(256))) == 1


def test_extend_hashes_only_what_is_new() -> None:
    rng, database = random.Random(0), ChunkedTokenDatabase(4)
    tokens = [rng.randrange(2**32) for _ in range(97)]
    known = []
    for n in (0, 3, 4, 17, 17, 64, 97):
        known = database.extend(known, tokens[:n])
        assert known == database.chunks(tokens[:n])
    spoiled = [dataclasses.replace(known[0], digest="0" * 64)]
    assert database.extend(spoiled, tokens)[0] is spoiled[0]


@pytest.mark.parametrize("size", [0, -1])
def test_chunk_size(size: int) -> None:
    with pytest.raises(TokenError):
        ChunkedTokenDatabase(size)


def test_kinds_differ_in_the_model_name_alone() -> None:  # K3 K4
    kv, query = (chunk_key(kind, GEO, "d" * 64, "s", [("a", "b")]) for kind in CacheKind)
    assert dataclasses.replace(query, model=kv.model) == kv
    assert kv.fingerprint() != query.fingerprint()


@pytest.mark.parametrize("salt", ["a@b", "a/b", "a\\b", "a\0", "x" * 129, 3, None, "\ud800", "a\udfff"])
def test_salts_that_cannot_be(salt: object) -> None:  # K5
    with pytest.raises(TokenError):
        check_salt(salt)  # type: ignore[arg-type]
    with pytest.raises(TokenError):
        dataclasses.replace(KEY, salt=salt)


@pytest.mark.parametrize("salt", ["", "x" * 128, "a b", "é", "a%b#c"])
def test_salts_that_can(salt: str) -> None:  # K5
    assert check_salt(salt) == salt


def test_model_names_that_cannot_be() -> None:  # K5: "@" is no separator here, so a model may hold it
    for model in ("", "a\0b"):
        with pytest.raises(TokenError):
            dataclasses.replace(KEY, model=model)
    assert dataclasses.replace(KEY, model="a@b").fingerprint() != KEY.fingerprint()


def test_every_field_is_identity() -> None:  # K7 K16
    changes = {"model": "n", "tp_size": 3, "tp_rank": 0, "dtype": "float16", "digest": "e" * 64, "salt": "t", "tags": (("lora", "y"),)}
    assert set(changes) == {f.name for f in dataclasses.fields(ChunkKey)}
    prints = {KEY.fingerprint()}
    for name, value in changes.items():
        changed = dataclasses.replace(KEY, **{name: value})
        assert changed != KEY
        prints.add(changed.fingerprint())
    assert len(prints) == len(changes) + 1


def test_ranks_do_not_overflow_into_each_other() -> None:  # K6
    keys = [dataclasses.replace(KEY, tp_size=s, tp_rank=r).fingerprint() for s in (1, 16, 256, 300) for r in (0, 1, 255, 256)]
    assert len(set(keys)) == 16
    assert KEY.for_rank(300).tp_rank == 300


def test_fields_cannot_run_into_each_other() -> None:
    one = dataclasses.replace(KEY, tags=(("a", "bc"),))
    two = dataclasses.replace(KEY, tags=(("ab", "c"),))
    three = dataclasses.replace(KEY, tags=(("a", "b"), ("c", "")))
    four = dataclasses.replace(KEY, dtype="bfloat16d", digest="d" * 63)
    assert len({k.fingerprint() for k in (KEY, one, two, three, four)}) == 5


def test_tags_are_sorted_into_the_key() -> None:  # K17
    assert chunk_key(CacheKind.KV, GEO, "d", tags=[("b", "1"), ("a", "2")]) == chunk_key(
        CacheKind.KV, GEO, "d", tags=[("a", "2"), ("b", "1")]
    )


def test_layer_keys() -> None:  # K21 K22
    layers = [KEY.layer(i) for i in range(3)]
    assert [k.layer_id for k in layers] == [0, 1, 2] and all(k.chunk == KEY for k in layers)
    assert len({KEY, *layers}) == 4 and KEY != layers[0]


def record(**changes: object) -> ChunkRecord:
    found = ChunkedTokenDatabase(4).chunks([1, 2, 3, 4, 5, 6, 7, 8])[1]
    fields = {"kind": CacheKind.KV, "geometry": GEO, "start": 4, "token_ids": (5, 6, 7, 8), "digest": found.digest, "parent": found.parent}
    return ChunkRecord(**{**fields, **changes})


def test_record() -> None:
    assert record().positions == (4, 5, 6, 7)
    assert record(positions=(0, 1, 2, 9)).positions == (0, 1, 2, 9)
    assert record(salt="s", tags=(("b", "1"), ("a", "2"))).key == chunk_key(
        CacheKind.KV, GEO, record().digest, "s", [("a", "2"), ("b", "1")]
    )


@pytest.mark.parametrize("changes", [{"token_ids": (1, 2, 3)}, {"positions": (1,)}, {"salt": "a/b"}, {"token_ids": ()}])
def test_record_that_does_not_fit(changes: dict[str, object]) -> None:
    with pytest.raises(TokenError):
        record(**changes)


@pytest.mark.parametrize("tokens", [[0, 1, 2**32 - 1], [2**31, 7], list(range(300)), [5, np.int64(6)], [1, True]])
def test_a_list_and_an_array_have_the_same_digest(tokens):
    assert chain_digest(ROOT_DIGEST, tokens) == chain_digest(ROOT_DIGEST, np.array(tokens, dtype=np.int64))
    assert chain_digest(ROOT_DIGEST, tokens) == chain_digest(ROOT_DIGEST, tuple(tokens))


@pytest.mark.parametrize("tokens", [[1, -1], [1, 2**32], [1, 2.5], [1, "2"], [1, None], [1, [2]], [True, False], [2.0, 1]])
def test_a_list_that_is_no_token_ids_is_refused(tokens):
    with pytest.raises((TokenError, ValueError)):
        chain_digest(ROOT_DIGEST, tokens)
