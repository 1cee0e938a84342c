"""The connector's settings."""

from __future__ import annotations

import dataclasses

import pytest

from qcap.config import _PARSERS, CaptureConfig, parse_bool, parse_choice, parse_int
from qcap.errors import ConfigError

STORE = {"qcap.store": "memory://x"}


def test_defaults() -> None:  # P1 P3 P4
    config = CaptureConfig.from_extra(STORE)
    assert (config.query, config.kv, config.chunk_size, config.on_pressure, config.load) == (False, True, 256, "skip", "salted")
    assert (config.ring_blocks, config.ring_depth, config.host_bytes, config.model_name) == (None, None, None, None)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        *((v, False) for v in ("false", "0", "no", "off", "", False, 0, "FALSE")),
        *((v, True) for v in ("true", "1", "yes", "on", True, 1, " True ")),
    ],
)
def test_booleans(value: object, wanted: bool) -> None:  # P2 P11
    assert parse_bool("k", value) is wanted
    assert CaptureConfig.from_extra({**STORE, "qcap.transfer_intermediate_tensors": value}).query is wanted


@pytest.mark.parametrize("value", ["maybe", 2, [], "tru", 0.5])
def test_what_is_no_boolean(value: object) -> None:  # P2
    with pytest.raises(ConfigError, match=r"qcap\.kv must be true or false"):
        CaptureConfig.from_extra({**STORE, "qcap.kv": value})


def test_layerwise_and_blending_are_off() -> None:  # L1 B2 P19
    config = CaptureConfig.from_extra(STORE)
    assert (config.layerwise, config.blending) == (False, False)
    assert CaptureConfig.from_extra({**STORE, "qcap.layerwise": "true"}).layerwise is True
    assert CaptureConfig.from_extra({**STORE, "qcap.layerwise": "0", "qcap.blending": "false"}) == config
    assert CaptureConfig(store="memory://x", layerwise=True, blending=True).blending is True


@pytest.mark.parametrize("key", ["qcap.layerwise", "qcap.blending"])
def test_layerwise_and_blending_are_booleans(key: str) -> None:  # L1 B2
    with pytest.raises(ConfigError, match=f"{key} must be true or false, got 'maybe'"):
        CaptureConfig.from_extra({**STORE, key: "maybe"})


def test_blending_is_refused() -> None:  # B1: a layer at a time, and B22: told at the start, not later
    with pytest.raises(ConfigError, match=r"qcap\.blending works a layer at a time: set qcap\.layerwise too"):
        CaptureConfig.from_extra({**STORE, "qcap.blending": True})
    with pytest.raises(ConfigError, match=r"qcap\.blending: the model of no engine recomputes .* set it to false"):
        CaptureConfig.from_extra({**STORE, "qcap.blending": True, "qcap.layerwise": True})


@pytest.mark.parametrize(("value", "wanted"), [("12", 12), (0, 1), (-5, 1), (3, 3)])
def test_ring_blocks_and_depth(value: object, wanted: int) -> None:  # P3 P4 C11 C12
    assert CaptureConfig.from_extra({**STORE, "qcap.q.ring_blocks": value}).ring_blocks == wanted
    assert CaptureConfig.from_extra({**STORE, "qcap.q.ring_depth": value}).ring_depth == wanted


def test_none_means_default() -> None:  # P3
    assert CaptureConfig.from_extra({**STORE, "qcap.q.ring_blocks": None, "qcap.kv": None}).ring_blocks is None


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("qcap.transfer_intermediate_tensor", "qcap.transfer_intermediate_tensors"),
        ("qcap.ring_blocks", "qcap.q.ring_blocks"),
        ("qcap.chunksize", "qcap.chunk_size"),
        ("qcap.stroe", "qcap.store"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{key}': did you mean '{near}'"):
        CaptureConfig.from_extra({**STORE, key: 1})


def test_keys_of_others_are_left_alone() -> None:
    assert CaptureConfig.from_extra({**STORE, "other.key": 1, "qcapx": 2}) == CaptureConfig(store="memory://x")


@pytest.mark.parametrize("extra", [{}, {"qcap.store": ""}, {"qcap.store": None}])
def test_no_store(extra: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"qcap\.store is not set"):
        CaptureConfig.from_extra(extra)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("qcap.chunk_size", 0, "at least 1, got 0"),
        ("qcap.chunk_size", "big", "must be an integer, got 'big'"),
        ("qcap.host_bytes", -1, "at least 1"),
        ("qcap.on_pressure", "block", "'wait', 'skip', got 'block'"),
        ("qcap.load", True, "'salted', 'all', 'off'"),
        ("qcap.q.ring_depth", [], "must be an integer"),
    ],
)
def test_bad_values_name_the_key(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        CaptureConfig.from_extra({**STORE, key: value})
    assert key in str(caught.value)


def test_every_field_has_a_key_and_every_key_is_documented() -> None:
    assert {name for name, _ in _PARSERS.values()} == {f.name for f in dataclasses.fields(CaptureConfig)}
    assert all(key in CaptureConfig.__doc__ for key in _PARSERS)


def test_frozen_and_keyword_only() -> None:
    with pytest.raises(TypeError):
        CaptureConfig("memory://x")  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        CaptureConfig(store="x").store = "y"  # type: ignore[misc]


def test_parsers() -> None:
    assert parse_int("k", "7") == 7 and parse_int("k", 7, 7) == 7
    assert parse_choice("k", "a", ("a", "b")) == "a"
