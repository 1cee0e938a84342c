"""The connector's settings."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys

import pytest

import qcap.vllm
from qcap.config import _PARSERS, ARGUMENTS, CaptureConfig, parse_bool, parse_choice, parse_int
from qcap.errors import ConfigError, StoreUnavailable

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
        ("qcap.query", "qcap.transfer_intermediate_tensors"),
        ("qcap.recorded_layers", "qcap.q.recorded_layers"),
        ("qcap_query", "qcap.transfer_intermediate_tensors"),
        ("qcap_chunk_size", "qcap.chunk_size"),
        ("qcap.q_ring_bytes", "qcap.q.ring_bytes"),
        ("QCAP-LOAD", "qcap.load"),
        ("Qcap.chunk_size", "qcap.chunk_size"),
        ("qcap.Layerwise", "qcap.layerwise"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{key}': did you mean '{near}'"):
        CaptureConfig.from_extra({**STORE, key: 1})


def test_keys_of_others_are_left_alone() -> None:
    foreign = {"other.key": 1, "qcapx": 2, "lmcache.chunk_size": 3, "my_query": 4, "load_kv": 5, "shared_storage_path": 6, "": 7}
    assert CaptureConfig.from_extra({**STORE, **foreign}) == CaptureConfig(store="memory://x")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("chunk_size", "qcap.chunk_size"), ("Chunk_Size", "qcap.chunk_size"), ("q.ring_bytes", "qcap.q.ring_bytes"),
        ("q_ring_bytes", "qcap.q.ring_bytes"), ("query", "qcap.transfer_intermediate_tensors"), ("store_url", "qcap.store"),
        ("transfer_intermediate_tensors", "qcap.transfer_intermediate_tensors"), ("model.name", "qcap.model_name"),
    ],
)  # fmt: skip
def test_a_key_without_its_prefix(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"setting '{key}' lacks its prefix: write '{meant}'"):
        CaptureConfig.from_extra({**STORE, key: 1})


def test_settings_are_not_nested() -> None:
    with pytest.raises(ConfigError, match=r"setting 'qcap' is none: give each setting by itself, for instance 'qcap\.store'"):
        CaptureConfig.from_extra({**STORE, "qcap": {"kv": True}})


def test_nothing_to_do() -> None:
    off = {"qcap.kv": False, "qcap.load": "off"}
    with pytest.raises(ConfigError, match=r"nothing to do: .* start the engine without qcap"):
        CaptureConfig.from_extra({**STORE, **off})
    assert CaptureConfig.from_extra({**STORE, **off, "qcap.transfer_intermediate_tensors": True}).query
    assert CaptureConfig.from_extra({**STORE, **off, "qcap.load": "salted"}).load == "salted"


@pytest.mark.parametrize("name", ["", " ", "a\0b"])
def test_a_model_has_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"qcap\.model_name must be a name .*leave it out"):
        CaptureConfig.from_extra({**STORE, "qcap.model_name": name})


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


# -- transfer_config: before vLLM is asked for anything


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is refused before vLLM is imported; what gets so far is legal."""
    monkeypatch.setitem(sys.modules, "vllm.config", None)


def accepted(url: str, **arguments: object) -> bool:
    with pytest.raises(ImportError):
        qcap.vllm.transfer_config(url, **arguments)
    return True


def test_arguments_and_keys() -> None:
    named = [*inspect.signature(qcap.vllm.transfer_config).parameters][:-1]
    assert set(named) < set(ARGUMENTS) and set(ARGUMENTS.values()) == set(_PARSERS) - {"qcap.blending"}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("fiel:///x", r"unknown scheme 'fiel' .*did you mean 'file'"),
        ("file://x", "has no absolute path"),
        ("file:/x", "is not a URL: did you mean 'file://x'"),
        ("memory://", "memory:// needs a name"),
        ("qcap://host:1", "no store server"),
        ("file://[x", "is not a URL"),
        ("", r"qcap\.store is not set"),
        (" ", "a store's URL is a text"),
    ],
)
def test_what_is_no_store(url: str, message: str, without_vllm: None) -> None:
    with pytest.raises(ConfigError, match=message):
        qcap.vllm.transfer_config(url)


@pytest.mark.parametrize("url", ["s3://b/p", "gs://b", "az://c", "abfss://c/p", "memory://x", "relative/path"])
def test_stores_that_are_not_opened_yet(url: str, without_vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No client is made: it may need what only the engine's machine has."""
    monkeypatch.setattr("obstore.store.from_url", None)
    assert accepted(url)


def test_other_wrong_arguments(without_vllm: None) -> None:
    for arguments, message in (
        ({"kv": False, "load": "off"}, "nothing to do"),
        ({"model_name": ""}, "must be a name"),
        ({"model_name": "m##query"}, "must not end in '##query'"),
        ({"q_ring_bytes": 1 << 20, "q_ring_blocks": 8}, "both set.*Leave one out"),
        ({"querry": True}, "unknown argument 'querry': did you mean 'query'"),
        ({"q_ring_bytes": "512M"}, r"qcap\.q\.ring_bytes must be an integer"),
    ):
        with pytest.raises(ConfigError, match=message):
            qcap.vllm.transfer_config("memory://x", **arguments)


def test_none_is_the_default() -> None:
    """Of `transfer_config`: a wrapper that hands None on must not get the mode that drops chunks."""
    pytest.importorskip("vllm")
    extra = qcap.vllm.transfer_config("memory://x", on_pressure=None).kv_connector_extra_config
    assert CaptureConfig.from_extra(extra).on_pressure == "wait"


@pytest.mark.parametrize("url", [3, " file:///x", "file:///x ", ["file:///x"]])
def test_what_is_no_url(url: object, without_vllm: None) -> None:
    with pytest.raises(ConfigError, match="must be a URL or a folder"):
        qcap.vllm.transfer_config(url)


def test_a_folder_that_cannot_be_written(tmp_path, without_vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before a model is loaded, and nothing is made by asking."""
    (tmp_path / "file").write_text("")
    for url in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreUnavailable, match=r"directory|cannot be created"):
            qcap.vllm.transfer_config(url.as_uri())
    assert accepted((tmp_path / "new" / "store").as_uri()) and not (tmp_path / "new").exists()
    store = tmp_path / "store"
    (store / "objects").mkdir(parents=True)
    assert accepted(str(store))
    access = os.access
    for folder in (store, store / "objects"):
        monkeypatch.setattr(os, "access", lambda path, mode, folder=folder: access(path, mode) and not (path == folder and mode & os.W_OK))
        with pytest.raises(StoreUnavailable, match=f"{folder} cannot be written to: .*give another store"):
            qcap.vllm.transfer_config(str(store))
        assert accepted(str(store), kv=False)  # it only loads


def test_no_setting_is_lost(tmp_path) -> None:
    pytest.importorskip("vllm")
    config = qcap.vllm.transfer_config(tmp_path.as_uri(), query=True, q_ring_bytes=5, layerwise=True)
    assert config.kv_connector_extra_config["qcap.q.ring_bytes"] == 5 and config.kv_connector == "QcapConnector"
    assert CaptureConfig.from_extra(config.kv_connector_extra_config).layerwise
