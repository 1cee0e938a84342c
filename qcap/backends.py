"""From a URL to a Backend: the one place that knows which implementations there are."""

from __future__ import annotations

from qcap.config import parse_choice, parse_int
from qcap.store.engine import StoreEngine
from qcap.store.tiers import Backend
from qcap.store.urls import open_tier


def open_backend(url: str, *, on_pressure: str = "wait", host_bytes: int = 256 << 20) -> Backend:
    """Open a store.

    Args:
        url: ``file:///data/captures``, a plain path, ``memory://name``, ``s3://bucket/prefix`` and the like.
        on_pressure: what ``store()`` does when ``host_bytes`` wait to be written: ``wait`` holds its caller, ``skip`` refuses the chunk.
        host_bytes: bound on chunks waiting in host memory, bytes.

    Raises:
        ConfigError: an argument is not usable; an unknown scheme with those that exist.
        StoreUnavailable: the store cannot be opened.
    """
    parse_choice("on_pressure", on_pressure, ("wait", "skip"))
    parse_int("host_bytes", host_bytes, 1)
    return StoreEngine(open_tier(url), on_pressure=on_pressure, host_bytes=host_bytes)
