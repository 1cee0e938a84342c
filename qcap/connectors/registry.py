"""Which connector moves the cache of which engine on which device: a table that each connector enters itself into.

``choose`` answers with a class or says why there is none; nothing is downgraded in silence. ``build`` makes the connector.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from qcap.connectors.base import Connector
from qcap.errors import ConfigError


class UnknownPlatform(ConfigError, RuntimeError):
    """An engine or device that qcap has never heard of; a ConfigError that those who catch RuntimeError see too."""


class Case(NamedTuple):
    """One row of the table."""

    engine: str
    device: str
    layerwise: bool = False
    blending: bool = False
    v3: bool = False


ENGINES = ("vllm", "sglang", "trtllm")
DEVICES = ("cuda", "xpu", "cpu", "musa", "hpu")  # ROCm is "cuda" to torch
BLENDING_DEVICES = ("cuda", "xpu")
_TABLE: dict[Case, type[Connector]] = {}
_C = TypeVar("_C", bound=Connector)


def register(
    engine: str, *devices: str, layerwise: bool = False, blending: bool = False, v3: bool = False
) -> Callable[[type[_C]], type[_C]]:
    """Enter a connector class into the table.

    Raises:
        ConfigError: the place is taken, or the class does not have the capabilities that the place promises.
    """

    def enter(cls: type[_C]) -> type[_C]:
        if (cls.layerwise, cls.blending) != (layerwise, blending):
            raise ConfigError(
                f"{cls.__name__} says layerwise={cls.layerwise}, blending={cls.blending}; its place is for {layerwise}, {blending}"
            )
        for device in devices:
            case = Case(engine, device, layerwise, blending, v3)
            if _TABLE.setdefault(case, cls) is not cls:
                raise ConfigError(f"{case} is {_TABLE[case].__name__}'s place already; {cls.__name__} cannot have it")
        return cls

    return enter


def table() -> dict[Case, type[Connector]]:
    """A copy of the table."""
    return dict(_TABLE)


def choose(
    *,
    engine: str,
    device: str,
    layerwise: bool = False,
    blending: bool = False,
    v3: bool = False,
    pd: bool = False,
    staging: bool = True,
) -> type[Connector]:
    """The connector class for a case.

    Args:
        engine: ``vllm``, ``sglang`` or ``trtllm``.
        device: a torch device type.
        layerwise: one layer at a time.
        blending: through two buffers in which keys are re-rotated; layerwise, on CUDA and XPU only.
        v3: without layerwise, all chunks of a request in one launch; on CUDA and XPU only.
        pd: the engine hands its KV to another engine, which leaves no device memory for staging.
        staging: whether a buffer on the device may be used.

    Raises:
        UnknownPlatform: an engine or device that is not known.
        ConfigError: a known one that cannot do what was asked; the message says what to change.
    """
    for what, value, known in (("engine", engine, ENGINES), ("device", device, DEVICES)):
        if value not in known:
            near = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UnknownPlatform(f"unknown {what} {value!r}: {hint}known are {', '.join(known)}")
    if engine == "trtllm":
        way = "layer by layer" if layerwise else "into its pages"
        raise ConfigError(
            f"TensorRT-LLM: nothing is moved {way} there: it has no hook for a layer and no pages to reach; use vllm or sglang"
        )
    if device == "hpu":
        raise ConfigError(
            "HPU: its cache cannot be addressed by strides, so there is no connector, layerwise or not: set qcap.layerwise off"
        )
    for name, wanted in (("blending", blending), ("v3", v3)):
        if wanted and device not in BLENDING_DEVICES:
            raise ConfigError(f"{name} exists on {' and '.join(BLENDING_DEVICES)} only, this is {device}: turn it off")
    if blending and not layerwise:
        raise ConfigError("blending works a layer at a time: set qcap.layerwise too, or turn blending off")
    if v3 and layerwise:
        raise ConfigError("v3 is a way to move whole chunks and means nothing with layerwise: turn one of them off")
    if blending and pd:
        raise ConfigError("blending needs buffers on the device, and an engine that hands its KV to another (P/D) has none: turn one off")
    if blending and not staging:
        raise ConfigError("blending needs buffers on the device (use_gpu): allow staging, or turn blending off")
    found = _TABLE.get(Case(engine, device, layerwise, blending, v3))
    if found is None:
        flags = {"layerwise": layerwise, "blending": blending, "v3": v3}
        there = ["+".join(n for n in flags if getattr(case, n)) or "whole chunks" for case in _TABLE if case[:2] == (engine, device)]
        asked = "+".join(n for n, on in flags.items() if on) or "whole chunks"
        raise ConfigError(f"{engine} on {device} has no connector for {asked}; it has: {', '.join(there) or 'none'}")
    return found


def build(
    pages: Any,
    *,
    engine: str,
    device: str,
    layerwise: bool = False,
    blending: bool = False,
    v3: bool = False,
    pd: bool = False,
    staging_tokens: int = 0,
    **options: Any,
) -> Connector:
    """The connector of :func:`choose` over ``pages``.

    Args:
        pages: a ``PageTable``; for SGLang, its pool.
        staging_tokens: tokens of a staging buffer; with ``pd`` there is none, whatever is asked for.
        **options: the class's own (``format``, ``device_module``, ``rope``).

    Raises:
        ConfigError: as :func:`choose`.
    """
    cls = choose(
        engine=engine, device=device, layerwise=layerwise, blending=blending, v3=v3, pd=pd, staging=not blending or staging_tokens > 0
    )
    return cls(pages, staging_tokens=0 if pd else staging_tokens, **options)


def check_layerwise(connector: Connector | type[Connector]) -> None:
    """Raise if a connector cannot move one layer at a time.

    Raises:
        ConfigError: it cannot.
    """
    if not connector.layerwise:
        name = connector.__name__ if isinstance(connector, type) else type(connector).__name__
        raise ConfigError(f"{name} moves whole chunks: take the one that choose(layerwise=True) gives, or set qcap.layerwise off")
