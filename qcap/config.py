"""Settings: frozen, keyword-only, checked at birth. The connector's come as ``qcap.*`` keys of vLLM's extra config."""

from __future__ import annotations

import difflib
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from qcap.errors import ConfigError
from qcap.kinds import CacheKind

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}


def parse_bool(key: str, value: Any) -> bool:
    """A bool from a bool, 0/1, or one of true/false/yes/no/on/off in any case.

    Raises:
        ConfigError: for anything else, naming ``key``.
    """
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ConfigError(f"{key} must be true or false, got {value!r}")


def parse_int(key: str, value: Any, minimum: int | None = None) -> int:
    """An int, optionally with a least value.

    Raises:
        ConfigError: not an integer, or too small.
    """
    try:
        if isinstance(value, bool | float):
            raise TypeError
        number = int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} must be an integer, got {value!r}") from None
    if minimum is not None and number < minimum:
        raise ConfigError(f"{key} must be at least {minimum}, got {number}")
    return number


def parse_seconds(key: str, value: Any) -> float:
    """A positive number of seconds.

    Raises:
        ConfigError: anything else: a text, NaN, or more than a lock can wait for.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) <= threading.TIMEOUT_MAX:
        raise ConfigError(f"{key} must be positive, a number of seconds, got {value!r}")
    return float(value)


def parse_choice(key: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of ``choices``.

    Raises:
        ConfigError: for anything else, with the choices.
    """
    if value not in choices:
        raise ConfigError(f"{key} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return str(value)


@dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    """What the connector does.

    Args:
        store: URL of the store (``file:///data/captures``, ``memory://name``). Key ``qcap.store``; required.
        query: capture queries too. Key ``qcap.transfer_intermediate_tensors``, default False.
        kv: capture keys and values. Key ``qcap.kv``, default True.
        chunk_size: tokens in a stored chunk, a multiple of the engine's block size. Key ``qcap.chunk_size``, default 256.
        on_pressure: ``skip`` never slows the engine and counts what it left out; ``wait`` never loses a row and holds the engine
            back instead. Key ``qcap.on_pressure``, default ``skip`` (``qcap.vllm.transfer_config`` says ``wait``).
        load: which requests may load stored KV: ``salted`` (those with a cache salt), ``all`` or ``off``.
            Key ``qcap.load``, default ``salted``.
        layerwise: load one layer at a time, while others compute (what is stored leaves that way with or without). Key
            ``qcap.layerwise``, default False.
        blending: load cached segments wherever they stand in a prompt; needs ``layerwise``. Key ``qcap.blending``, default False; no
            engine can do it yet, so :meth:`from_extra` refuses it.
        ring_bytes: device memory for queries on their way to the host. None takes 512 MiB, or what the engine's largest step and graph
            need if that is more. Key ``qcap.q.ring_bytes``.
        ring_blocks: blocks of a resident ring, which holds all layers on the device until a chunk is whole, in place of the streaming
            one. Key ``qcap.q.ring_blocks``.
        ring_depth: steps of the largest size that a resident ring holds. Key ``qcap.q.ring_depth``.
        recorded_layers: layers whose queries one launch of a recorded graph puts away, 1 to 8. With more of them a decode step costs less.
            It relies on queries that are still referred to not being written over by the layers behind them; where an engine is not known
            to keep to that (compiled so that attention is not a piece of its own), it is 1 whatever is set. Key
            ``qcap.q.recorded_layers``, default 4.
        debug: count the rows that each step found, and compare; waits for the device. Key ``qcap.debug``, default False.
        host_bytes: page-locked host memory for what is on its way to the store, and with ``memory://`` for chunks that rest there (up to
            half of it, a quarter with ``skip``; older ones move to ordinary memory). None takes two steps of the largest size, at least
            256 MiB and at most 8 GiB. Key ``qcap.host_bytes``.
        load_ahead_bytes: device memory for what is loaded before the engine has given a request its blocks, from ``memory://`` on a GPU.
            None takes 2 GiB with ``load="all"`` and 256 MiB with ``"salted"``, an eighth of what is free if that is less; 0 takes none.
            Key ``qcap.load_ahead_bytes``.
        model_name: the name to store under; None takes the engine's. Key ``qcap.model_name``.
    """

    store: str
    query: bool = False
    kv: bool = True
    chunk_size: int = 256
    on_pressure: str = "skip"
    load: str = "salted"
    layerwise: bool = False
    blending: bool = False
    ring_bytes: int | None = None
    ring_blocks: int | None = None
    ring_depth: int | None = None
    recorded_layers: int = 4
    debug: bool = False
    host_bytes: int | None = None
    load_ahead_bytes: int | None = None
    model_name: str | None = None

    def __post_init__(self) -> None:
        if self.blending and not self.layerwise:
            raise ConfigError("qcap.blending works a layer at a time: set qcap.layerwise too, or qcap.blending to false")
        if not 1 <= self.recorded_layers <= 8:
            raise ConfigError(f"qcap.q.recorded_layers must lie in 1..8, got {self.recorded_layers}")

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> CaptureConfig:
        """From the ``qcap.*`` keys of a ``kv_connector_extra_config``; keys of others are left alone.

        Raises:
            ConfigError: a key that is meant for qcap and is not one of its own (with the nearest that is), a value that cannot be read, no
                store, or nothing to do.
        """
        for key in extra:
            if key not in _PARSERS:
                _check_foreign(str(key))
        if not extra.get("qcap.store"):
            raise ConfigError("qcap.store is not set: give the store's URL, for instance 'file:///data/captures'")
        values = {}
        for key, (field, parse) in _PARSERS.items():
            if key in extra and extra[key] is not None:
                values[field] = parse(key, extra[key])
        config = cls(**values)
        if all(extra.get(f"qcap.q.{name}") is not None for name in ("ring_bytes", "ring_blocks")):
            raise ConfigError(
                "qcap.q.ring_bytes and qcap.q.ring_blocks are both set: the first bounds a streaming ring, the second makes a resident "
                "one. Leave one out"
            )
        if config.blending:
            raise ConfigError("qcap.blending: the model of no engine recomputes between cached segments yet: set it to false")
        if not config.kv and not config.query and config.load == "off":
            raise ConfigError(
                "nothing to do: qcap.kv and qcap.transfer_intermediate_tensors are false and qcap.load is 'off'. Set one of the first two "
                "to true to capture, qcap.load to 'salted' to load, or start the engine without qcap"
            )
        return config


def _at_least(minimum: int):  # type: ignore[no-untyped-def]
    return lambda key, value: parse_int(key, value, minimum)


def _url(key: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike) or str(value).strip() not in ("", str(value)):
        raise ConfigError(f"{key} must be a URL or a folder without blanks around it, like 'file:///data/captures', got {value!r}")
    return str(value)


def _name(key: str, value: Any) -> str:
    if not str(value).strip() or "\0" in str(value):
        raise ConfigError(f"{key} must be a name that chunks are stored under, got {value!r}: leave it out to take the engine's own")
    if str(value).endswith(suffix := CacheKind.QUERY.suffix):
        raise ConfigError(f"{key} must not end in {suffix!r}, which names the queries of a model, got {value!r}")
    return str(value)


_PARSERS: dict[str, tuple[str, Any]] = {
    "qcap.store": ("store", _url),
    "qcap.transfer_intermediate_tensors": ("query", parse_bool),
    "qcap.kv": ("kv", parse_bool),
    "qcap.chunk_size": ("chunk_size", _at_least(1)),
    "qcap.on_pressure": ("on_pressure", lambda key, value: parse_choice(key, value, ("wait", "skip"))),
    "qcap.load": ("load", lambda key, value: parse_choice(key, value, ("salted", "all", "off"))),
    "qcap.layerwise": ("layerwise", parse_bool),
    "qcap.blending": ("blending", parse_bool),
    "qcap.debug": ("debug", parse_bool),
    "qcap.q.ring_bytes": ("ring_bytes", _at_least(1)),
    "qcap.q.ring_blocks": ("ring_blocks", lambda key, value: max(1, parse_int(key, value))),
    "qcap.q.ring_depth": ("ring_depth", lambda key, value: max(1, parse_int(key, value))),
    "qcap.q.recorded_layers": ("recorded_layers", _at_least(1)),
    "qcap.host_bytes": ("host_bytes", _at_least(1)),
    "qcap.load_ahead_bytes": ("load_ahead_bytes", _at_least(0)),
    "qcap.model_name": ("model_name", _name),
}

ARGUMENTS: dict[str, str] = {
    "store_url": "qcap.store",
    "query": "qcap.transfer_intermediate_tensors",
    "chunk_size": "qcap.chunk_size",
    "on_pressure": "qcap.on_pressure",
    "kv": "qcap.kv",
    "load": "qcap.load",
    "q_ring_bytes": "qcap.q.ring_bytes",
    "q_ring_blocks": "qcap.q.ring_blocks",
    "q_ring_depth": "qcap.q.ring_depth",
    "q_recorded_layers": "qcap.q.recorded_layers",
    "host_bytes": "qcap.host_bytes",
    "load_ahead_bytes": "qcap.load_ahead_bytes",
    "debug": "qcap.debug",
    "model_name": "qcap.model_name",
    "layerwise": "qcap.layerwise",
}
"""What :func:`qcap.vllm.transfer_config` calls a setting -> its key."""


def _flat(key: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", key.lower())


_SPELLINGS = {_flat(key.removeprefix("qcap.")): key for key in _PARSERS} | ARGUMENTS
"""Names in one spelling -> the key that is meant."""
_NAMES = {field: key for key, (field, _) in _PARSERS.items()} | _SPELLINGS


def _check_foreign(key: str) -> None:
    """That a key which is not qcap's is not meant to be one.

    Raises:
        ConfigError: it begins like one, or is a setting's name without ``qcap.``, in another case, with ``_`` for ``.``, or as an argument
            of ``transfer_config``.
    """
    flat = _flat(key)
    if flat == "qcap":
        raise ConfigError(f"setting {key!r} is none: give each setting by itself, for instance 'qcap.store'. Known: {', '.join(_PARSERS)}")
    if flat.startswith("qcap_"):
        (near,) = difflib.get_close_matches(flat.removeprefix("qcap_"), _NAMES, n=1, cutoff=0.0)
        raise ConfigError(f"unknown setting {key!r}: did you mean {_NAMES[near]!r}? Known: {', '.join(_PARSERS)}")
    if flat in _SPELLINGS:
        raise ConfigError(f"setting {key!r} lacks its prefix: write {_SPELLINGS[flat]!r}")
