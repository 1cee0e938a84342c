"""The tensor kinds qcap stores. A new kind is one entry here and one feature in ``capture.py``."""

from __future__ import annotations

from enum import Enum

_QUERY_SUFFIX = "##query"


class CacheKind(Enum):
    """What a stored chunk holds.

    ``KV``     keys and values, 2 planes (K first), under the model's own name.
    ``QUERY``  post-RoPE queries, 1 plane, under ``<model>##query``.
    """

    KV = "kv"
    QUERY = "query"

    @property
    def planes(self) -> int:
        """Number of planes: 2 for KV, 1 for QUERY."""
        return 2 if self is CacheKind.KV else 1

    @property
    def suffix(self) -> str:
        """What this kind adds to a model's name in keys."""
        return "" if self is CacheKind.KV else _QUERY_SUFFIX

    def model_name(self, model: str) -> str:
        """The name under which ``model``'s chunks of this kind are kept."""
        return model + self.suffix

    def base_name(self, name: str) -> str:
        """The model's own name again: takes off one suffix of this kind, if it is there."""
        return name.removesuffix(self.suffix) if self.suffix else name

    @classmethod
    def parse(cls, value: CacheKind | str) -> CacheKind:
        """A kind from itself, its value or its name (any case).

        Raises:
            ValueError: for anything else, with the names that exist.
        """
        if isinstance(value, CacheKind):
            return value
        for kind in cls:
            if isinstance(value, str) and value.lower() in (kind.value, kind.name.lower()):
                return kind
        raise ValueError(f"unknown cache kind {value!r}: use one of {', '.join(repr(k.value) for k in cls)}")
