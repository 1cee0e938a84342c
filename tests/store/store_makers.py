"""Small chunks for store tests."""

from __future__ import annotations

import dataclasses
import random
import uuid
from collections.abc import Callable

import torch

from qcap.geometry import Geometry, Rope
from qcap.kinds import CacheKind
from qcap.store.buckets import memory_bucket
from qcap.store.objects import ObjectTier
from qcap.tokens import ChunkedTokenDatabase, ChunkRecord

SMALL = Geometry(
    model="org/small-model",
    layer_names=tuple(f"model.layers.{i}.self_attn.attn" for i in range(12)),
    num_q_heads=4,
    num_kv_heads=2,
    head_size=8,
    dtype="bfloat16",
    block_size=4,
    chunk_size=16,
    rope=Rope(theta=1e4, rotary_dim=8, max_position=2048, params={"factor": 2.0}),
    scale=8**-0.5,
    total_num_kv_heads=2,
)


def geometry(**changes: object) -> Geometry:
    """``SMALL`` with changes. Twelve layers, so that sorting tensor names by text would show."""
    return dataclasses.replace(SMALL, **changes)


def random_bytes_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern, NaNs among them: a store must not care."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.tensor(list(random.Random(seed).randbytes(count)), dtype=torch.uint8).view(dtype).reshape(shape)


def chunk(
    seed: int = 0, kind: CacheKind = CacheKind.KV, geo: Geometry = SMALL, index: int = 0, **fields: object
) -> tuple[ChunkRecord, torch.Tensor]:
    """The ``index``-th chunk of a random sequence and a tensor for it; the same for the same arguments, in every process."""
    rng = random.Random(seed)
    tokens = [rng.randrange(50000) for _ in range(geo.chunk_size * (index + 1))]
    found = ChunkedTokenDatabase(geo.chunk_size).chunks(tokens)[index]
    record = ChunkRecord(
        kind=kind, geometry=geo, start=found.start, token_ids=tuple(tokens[found.start : found.end]),
        digest=found.digest, parent=found.parent, **fields,
    )  # fmt: skip
    return record, random_bytes_tensor(geo.chunk_shape(kind), geo.torch_dtype, seed * 7 + index)


def object_store() -> Callable[[], ObjectTier]:
    """Opens one and the same object store, each time anew: what ``s3://`` is, in memory. ``memory://`` is something else: a MemoryTier."""
    name = f"object-store-{uuid.uuid4().hex}"
    return lambda: ObjectTier(memory_bucket(name), f"s3://{name}")


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same shape, dtype and bytes; NaNs compare by their bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
