"""A small store, written through the store itself: two sequences of one model with both kinds, one of them with a hole, and an edit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from qcap.backends import open_backend
from qcap.geometry import Geometry, Rope
from qcap.kinds import CacheKind
from qcap.store.tiers import SequenceRecord
from qcap.tokens import ChunkedTokenDatabase, ChunkRecord

GEOMETRY = Geometry(
    model="org/tiny", layer_names=("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"), num_q_heads=4,
    num_kv_heads=2, head_size=8, dtype="float32", block_size=2, chunk_size=4, rope=Rope(rotary_dim=8, max_position=512),
    scale=8**-0.5, total_num_kv_heads=2,
)  # fmt: skip
WHOLE, HOLED = tuple(range(100, 114)), tuple(range(200, 210))


@dataclass
class SmallStore:
    """Where it is, and the paths of its objects."""

    url: str
    folder: object

    def objects(self):
        return sorted(self.folder.glob("objects/*/*.safetensors"))


def put(backend, kind, ids, chunks=None, salt="", edit=""):
    """Store the chunks with these numbers (all if None)."""
    for chunk in ChunkedTokenDatabase(GEOMETRY.chunk_size).chunks(ids):
        if chunks is None or chunk.index in chunks:
            record = ChunkRecord(
                kind=kind, geometry=GEOMETRY, start=chunk.start, token_ids=tuple(ids[chunk.start : chunk.end]), digest=chunk.digest,
                parent=chunk.parent, salt=salt, edit=edit,
            )  # fmt: skip
            backend.store(record, torch.full(GEOMETRY.chunk_shape(kind), float(chunk.index)))


@pytest.fixture
def small_store(tmp_path):
    """13 computed tokens of WHOLE: 3 chunks of both kinds; 9 of HOLED: 2 chunks, of which one query chunk is missing."""
    folder = tmp_path / "store"
    backend = open_backend(folder.as_uri())
    backend.put_manifest(GEOMETRY, list(CacheKind), {"vllm": "0.32.0"})
    for kind in CacheKind:
        put(backend, kind, WHOLE[:-1])
    put(backend, CacheKind.KV, HOLED[:-1])
    put(backend, CacheKind.QUERY, HOLED[:-1], chunks=[1])
    backend.put_sequence(
        SequenceRecord(
            "org/tiny", "req-whole", "engine-1", "", WHOLE, 8, 13, 4, {"kv": (0, 1, 2), "query": (0, 1, 2)}, {}, finished_at=1_700_000_000.0
        )
    )
    backend.put_sequence(
        SequenceRecord(
            "org/tiny", "req-[red]holed", "engine-1", "", HOLED, 6, 9, 4, {"kv": (0, 1), "query": (1,)}, {"query": {"ring-full": 1}},
            finished_at=1_700_000_001.0,
        )
    )  # fmt: skip
    backend.close()
    return SmallStore(folder.as_uri(), folder)


@pytest.fixture
def store_cut_off(tmp_path):
    """3 chunks of WHOLE, of a request that never ended."""
    folder = tmp_path / "cut"
    backend = open_backend(folder.as_uri())
    backend.put_manifest(GEOMETRY, list(CacheKind), {"vllm": "0.32.0"})
    put(backend, CacheKind.KV, WHOLE)
    backend.close()
    return SmallStore(folder.as_uri(), folder)


@pytest.fixture
def qcap_command(capsys):
    """``qcap_command("ls", url)`` -> (exit code, stdout, stderr), in this process."""
    from qcap.cli import main

    def call(*arguments):
        code = 0
        try:
            main([str(a) for a in arguments])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def store_with_edits(small_store):
    """The small store, with two edits, one of 2 chunks under ``half-1`` and one whose salt would steer a terminal, and a tenant's chunk."""
    backend = open_backend(small_store.url)
    put(backend, CacheKind.KV, WHOLE[:8], salt="half-1", edit='{"name": "snapkv"}')
    put(backend, CacheKind.KV, WHOLE[:4], salt="red\x1b[31m", edit="by hand")
    put(backend, CacheKind.KV, WHOLE[:4], salt="tenant")
    backend.close()
    return small_store
