"""Cache kinds: names, suffixes, planes."""

from __future__ import annotations

import pytest

from qcap.kinds import CacheKind


def test_model_names_of_both_kinds() -> None:  # K1
    assert CacheKind.KV.model_name("org/m") == "org/m"
    assert CacheKind.QUERY.model_name("org/m") == "org/m##query"


def test_suffix_comes_off_once() -> None:  # K2
    assert CacheKind.QUERY.base_name("m##query") == "m"
    assert CacheKind.QUERY.base_name("m##query##query") == "m##query"
    assert CacheKind.QUERY.base_name("m") == "m"
    assert CacheKind.KV.base_name("m##query") == "m##query"
    assert CacheKind.KV.base_name("m") == "m"


def test_planes() -> None:
    assert (CacheKind.KV.planes, CacheKind.QUERY.planes) == (2, 1)


@pytest.mark.parametrize("text", ["query", "QUERY", "Query", CacheKind.QUERY])
def test_parse(text: str | CacheKind) -> None:
    assert CacheKind.parse(text) is CacheKind.QUERY


@pytest.mark.parametrize("bad", ["q", "", None, 1, "kv "])
def test_parse_refuses(bad: object) -> None:
    with pytest.raises(ValueError, match="'kv', 'query'"):
        CacheKind.parse(bad)  # type: ignore[arg-type]
