"""What a model's cache looks like: plain values, no device, no I/O.

``Geometry`` says how wide a row is and how positions were rotated; it travels in the manifest and in every object, so that a reader
needs neither the model nor the engine. ``PagedLayout`` says where K and V of token ``n`` of a block lie in an engine's page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from qcap.errors import ConfigError, GeometryMismatch
from qcap.kinds import CacheKind

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def parse_dtype(value: torch.dtype | str) -> torch.dtype:
    """A ``torch.dtype`` from itself or its name (``"bfloat16"``, ``"torch.bfloat16"``).

    Raises:
        ConfigError: for a dtype qcap does not store, with the ones it does.
    """
    if isinstance(value, torch.dtype):
        value = str(value)
    name = value.removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {value!r}: qcap stores {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """How keys and queries were rotated, in the engine's own terms.

    Args:
        kind: ``none`` (NoPE), ``default``, ``linear``, ``dynamic``, ``llama3`` or ``yarn``.
        theta: base of the frequencies.
        rotary_dim: leading dims of a head that are rotated (<= head size; less with partial rotary).
        interleaved: pairs are (0, 1), (2, 3), ... (GPT-J) instead of (0, R/2), (1, R/2 + 1), ... (NeoX).
        max_position: the model's trained or configured maximum position.
        params: the scaling parameters as in the HF config (``factor``, ``low_freq_factor``, ``beta_fast``, ...).
    """

    kind: str = "default"
    theta: float = 10000.0
    rotary_dim: int = 0
    interleaved: bool = False
    max_position: int = 0
    params: dict[str, float] = field(default_factory=dict)

    def inv_freq(self) -> torch.Tensor:
        """The angle per position of each rotated pair: float32 ``[rotary_dim // 2]`` on the CPU.

        Computed in float32, step by step as vLLM 0.20-0.32 does (``model_executor/layers/rotary_embedding``), because the rounding of
        these numbers is multiplied by the position. Empty for ``none``.

        Raises:
            ConfigError: for a kind qcap cannot re-rotate exactly (``longrope``, multimodal ropes), or a missing parameter.
        """
        if self.kind == "none":
            return torch.empty(0, dtype=torch.float32)
        known = ("default", "linear", "dynamic", "llama3", "yarn")
        if self.kind not in known:
            raise ConfigError(f"rope kind {self.kind!r} cannot be re-rotated exactly; known: none, {', '.join(known)}")
        if self.rotary_dim <= 0 or self.rotary_dim % 2:  # an empty answer would silently leave rows unrotated
            raise ConfigError(f"rope kind {self.kind!r} needs an even rotary_dim > 0, got {self.rotary_dim}; without rope it is 'none'")
        p = self.params
        try:
            if self.kind == "default":
                return self._base_inv_freq(self.theta)
            if self.kind == "linear":
                return self._base_inv_freq(self.theta) / float(p["factor"])
            if self.kind == "dynamic":
                factor, trained = float(p["factor"]), float(p.get("max_trained_positions", self.max_position))
                stretch = factor * self.max_position / trained - (factor - 1) if trained else 1.0
                return self._base_inv_freq(self.theta * stretch ** (self.rotary_dim / (self.rotary_dim - 2)))
            if self.kind == "llama3":
                return self._llama3_inv_freq()
            return self._yarn_inv_freq()
        except KeyError as missing:
            raise ConfigError(f"rope kind {self.kind!r} needs parameter {missing}; got {sorted(p)}") from None

    def _base_inv_freq(self, base: float) -> torch.Tensor:
        exponent = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        return 1.0 / (base**exponent)

    def _llama3_inv_freq(self) -> torch.Tensor:
        p = self.params
        inv = self._base_inv_freq(self.theta)
        original = float(p["original_max_position_embeddings"])
        low, high, factor = float(p["low_freq_factor"]), float(p["high_freq_factor"]), float(p["factor"])
        wavelength = 2 * math.pi / inv
        smooth = (original / wavelength - low) / (high - low) if low != high else torch.zeros_like(inv)
        return torch.where(
            wavelength < original / high,
            inv,
            torch.where(wavelength > original / low, inv / factor, (1 - smooth) * inv / factor + smooth * inv),
        )

    def _yarn_inv_freq(self) -> torch.Tensor:
        p = self.params
        factor, original = float(p["factor"]), float(p["original_max_position_embeddings"])
        beta_fast, beta_slow = float(p.get("beta_fast", 32)), float(p.get("beta_slow", 1))
        extrapolation = float(p.get("extrapolation_factor", 1.0))
        pos_freqs = self.theta ** (torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim)

        def dim_of(rotations: float) -> float:
            return (self.rotary_dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(self.theta))

        low, high = dim_of(beta_fast), dim_of(beta_slow)
        if p.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(self.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        mask = (1 - ramp) * extrapolation
        return (1.0 / (factor * pos_freqs)) * (1 - mask) + (1.0 / pos_freqs) * mask


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Shape and meaning of one rank's rows of one model.

    Args:
        model: the model's name as the engine was given it (no kind suffix).
        layer_names: the captured attention layers by module path, in model order; ``L = len(layer_names)``.
        num_q_heads / num_kv_heads: heads on this rank.
        head_size: D.
        dtype: of K, V and Q rows, by name.
        block_size: tokens in an engine block (N).
        chunk_size: tokens in a stored chunk (CH), a multiple of ``block_size``.
        rope: how positions were rotated.
        tp_size / tp_rank: tensor-parallel size and this rank.
        scale: softmax scale of the attention (1/sqrt(D) if the model does not say otherwise).
        softcap: logit softcap, 0 for none.
        sliding_window: window in tokens, 0 for full attention.
        total_num_kv_heads: KV heads of the whole model; less than ``tp_size`` where ranks replicate heads.
    """

    model: str
    layer_names: tuple[str, ...]
    num_q_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    block_size: int
    chunk_size: int
    rope: Rope
    tp_size: int = 1
    tp_rank: int = 0
    scale: float = 0.0
    softcap: float = 0.0
    sliding_window: int = 0
    total_num_kv_heads: int = 0

    def __post_init__(self) -> None:
        for name in ("num_q_heads", "num_kv_heads", "head_size", "block_size", "chunk_size", "tp_size"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"geometry of {self.model!r}: {name} must be positive, got {getattr(self, name)}")
        if not self.layer_names:
            raise ConfigError(f"geometry of {self.model!r}: no attention layers")
        if self.chunk_size % self.block_size:
            raise ConfigError(
                f"chunk_size {self.chunk_size} is not a multiple of the engine's block_size {self.block_size}: "
                f"set qcap.chunk_size to a multiple, for instance {max(1, self.chunk_size // self.block_size) * self.block_size}"
            )
        parse_dtype(self.dtype)
        object.__setattr__(self, "layer_names", tuple(self.layer_names))

    @property
    def num_layers(self) -> int:
        """L, the captured layers."""
        return len(self.layer_names)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The rows' dtype."""
        return parse_dtype(self.dtype)

    def heads(self, kind: CacheKind) -> int:
        """Heads in a row of ``kind`` on this rank."""
        return self.num_kv_heads if kind is CacheKind.KV else self.num_q_heads

    def hidden(self, kind: CacheKind) -> int:
        """H: width of one row of ``kind``, heads x D."""
        return self.heads(kind) * self.head_size

    def chunk_shape(self, kind: CacheKind) -> tuple[int, int, int, int]:
        """``[planes, L, CH, H]`` of one stored chunk."""
        return (kind.planes, self.num_layers, self.chunk_size, self.hidden(kind))

    def chunk_bytes(self, kind: CacheKind) -> int:
        """Bytes of one chunk's tensors."""
        return math.prod(self.chunk_shape(kind)) * self.torch_dtype.itemsize

    def for_rank(self, rank: int) -> Geometry:
        """The same geometry as another tensor-parallel rank sees it."""
        return replace(self, tp_rank=rank)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Geometry:
        """The inverse of :meth:`to_dict`.

        Raises:
            ConfigError: a field is missing or unknown (written by another version).
        """
        try:
            values = dict(data)
            values["rope"] = Rope(**values["rope"])
            values["layer_names"] = tuple(values["layer_names"])
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"not a qcap geometry ({error}); it may come from another qcap version") from None

    def check_same(self, other: Geometry, what: str) -> None:
        """Raise if rows of ``other`` could not stand where this geometry's rows stand.

        Raises:
            GeometryMismatch: with each field that differs; ``what`` says whose geometry ``other`` is.
        """
        mine, theirs = self.to_dict(), other.to_dict()
        ignored = ("block_size", "tp_rank")  # a chunk is laid out by tokens, not by engine blocks; ranks have their own keys
        differing = [f"{k}: {mine[k]!r} here, {theirs[k]!r} there" for k in mine if k not in ignored and mine[k] != theirs[k]]
        if differing:
            raise GeometryMismatch(f"{what} does not fit {self.model!r}: " + "; ".join(differing))


@dataclass(frozen=True)
class PlaneStrides:
    """One plane of a page as an affine map: element (block, head, token, dim) lies at ``offset + sum(index * stride)``, in elements."""

    offset: int
    block: int
    head: int
    token: int
    dim: int


@dataclass(frozen=True, kw_only=True)
class PagedLayout:
    """Where K and V of every token lie in an engine's page tensor. Every certified layout is affine, so one kernel serves all.

    Args:
        name: the certified layout's name, for reports.
        blocks, heads, block_size, head_size: B, heads, N, D of the views.
        planes: one :class:`PlaneStrides` a plane (K then V; one for a ring of queries).
    """

    name: str
    blocks: int
    heads: int
    block_size: int
    head_size: int
    planes: tuple[PlaneStrides, ...]

    def views(self, pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Strided views ``[B, heads, N, D]`` of ``pages``, one a plane. Writing to them writes to the pages."""
        base = pages.storage_offset()
        shape = (self.blocks, self.heads, self.block_size, self.head_size)
        return tuple(torch.as_strided(pages, shape, (p.block, p.head, p.token, p.dim), base + p.offset) for p in self.planes)
