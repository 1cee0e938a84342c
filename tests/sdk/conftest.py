"""A store that counts what it is asked, small models, and contexts on the fake and on the real stores."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import Future

import pytest
import torch

from qcap.backends import open_backend
from qcap.errors import ObjectCorrupt
from qcap.geometry import Geometry, Rope
from qcap.kinds import CacheKind
from qcap.sdk.context import CacheContext
from qcap.sdk.ranks import columns, whole_model
from qcap.store.tiers import LoadedChunk, StoreOutcome
from qcap.tokens import ChunkedTokenDatabase, ChunkRecord

_numbers = itertools.count()


class FakeBackend:
    """A Backend in a dict. ``calls`` counts; ``outcome`` and ``corrupt`` and ``before_load`` make it misbehave."""

    def __init__(self):
        self.objects = {}
        self.manifest_list = []
        self.records = []
        self.calls = Counter()
        self.outcome = None
        self.corrupt = set()
        self.before_load = lambda key: None
        self.closed = 0

    cheap_contains = True

    keeps_leases = False

    def edit_of(self, key):
        return self.objects[key].record.edit if key in self.objects else None

    def open_layers(self, key):
        return self.objects.get(key)  # as far as its record goes

    def has_room(self, nbytes):
        return True

    def contains(self, keys):
        self.calls["contains"] += 1
        return [key in self.objects for key in keys]

    def lookup(self, keys):
        self.calls["lookup"] += 1
        return next((i for i, key in enumerate(keys) if key not in self.objects), len(keys))

    def store(self, record, source, event=None, *, overwrite=False, lease=None):
        self.calls["store"] += 1
        assert source.is_contiguous() and source.device.type == "cpu"
        assert tuple(source.shape) == record.geometry.chunk_shape(record.kind)
        future = Future()
        if self.outcome == "never":
            return future
        if self.outcome is not None:
            future.set_result(self.outcome)
        elif record.key in self.objects and not overwrite:
            future.set_result(StoreOutcome.EXISTS)
        else:
            self.objects[record.key] = LoadedChunk(record, source.clone())
            future.set_result(StoreOutcome.STORED)
        return future

    def load(self, key):
        self.calls["load"] += 1
        self.before_load(key)
        if key in self.corrupt:
            raise ObjectCorrupt("checksum of layer 0 differs")
        found = self.objects.get(key)
        return None if found is None else LoadedChunk(found.record, found.tensor.clone())

    def put_manifest(self, geometry, kinds, engine):
        self.calls["put_manifest"] += 1
        self.manifest_list.append((geometry, tuple(kinds), dict(engine)))

    def manifests(self, model=None):
        self.calls["manifests"] += 1
        return [m for m in self.manifest_list if model in (None, m[0].model)]

    def put_sequence(self, record):
        self.records.append(record)
        future = Future()
        future.set_result(None)
        return future

    def sequences(self, model=None):
        self.calls["sequences"] += 1
        return [r for r in self.records if model in (None, r.model)]

    def poll(self):
        return 0

    def loaded(self, keys):
        pass

    def relieve(self, nbytes):
        return False

    def drain(self, timeout_s=None):
        return True

    def counters(self):
        return dict(self.calls)

    def close(self):
        self.closed += 1

    @property
    def data_calls(self):
        """Calls that go to the store for chunks."""
        return sum(self.calls[name] for name in ("contains", "lookup", "store", "load"))


def make_geometry(**changes) -> Geometry:
    """2 layers, 4 query heads on 2 KV heads of 8, chunks of 4."""
    values = {
        "model": "org/tiny", "layer_names": ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"), "num_q_heads": 4,
        "num_kv_heads": 2, "head_size": 8, "dtype": "float32", "block_size": 2, "chunk_size": 4,
        "rope": Rope(rotary_dim=8, max_position=512), "scale": 8**-0.5,
    }  # fmt: skip
    return Geometry(**{**values, **changes})


def put_rows(backend, geometry, kind, tokens, rows, salt="", ranks=None):
    """Store the whole model's rows ``[planes, L, T, H]`` as an engine of ``geometry.tp_size`` ranks does."""
    for chunk in ChunkedTokenDatabase(geometry.chunk_size).chunks(tokens):
        for rank in range(geometry.tp_size) if ranks is None else ranks:
            record = ChunkRecord(
                kind=kind, geometry=geometry.for_rank(rank), start=chunk.start, token_ids=tuple(map(int, tokens[chunk.start : chunk.end])),
                digest=chunk.digest, parent=chunk.parent, salt=salt,
            )  # fmt: skip
            part = rows[:, :, chunk.start : chunk.end, columns(geometry, kind, rank)].contiguous()
            assert backend.store(record, part).result(timeout=20) is StoreOutcome.STORED


def random_rows(geometry, kind, tokens, seed=0):
    """The whole model's rows for as many tokens."""
    whole = whole_model(geometry)
    shape = (kind.planes, whole.num_layers, tokens, whole.hidden(kind))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(whole.torch_dtype)


class Bench:
    """One store with one model, and contexts on it."""

    def __init__(self, backend, geometry, url=""):
        self.backend, self.geometry, self.url = backend, geometry, url

    def context(self, kind=CacheKind.KV, **options):
        return CacheContext(self.backend, self.geometry, kind, url=self.url, **options)

    def put(self, kind, tokens, seed=0, salt="", ranks=None):
        rows = random_rows(self.geometry, kind, len(tokens), seed)
        put_rows(self.backend, self.geometry, kind, tokens, rows, salt, ranks)
        return rows


@pytest.fixture
def geometry():
    return make_geometry()


@pytest.fixture
def make_geometry_():
    return make_geometry


@pytest.fixture
def fake():
    return FakeBackend()


@pytest.fixture
def bench(fake, geometry):
    """On the fake store."""
    return Bench(fake, geometry, "fake://store")


@pytest.fixture
def make_bench(fake):
    """On the fake store, with another geometry."""
    return lambda **changes: Bench(fake, make_geometry(**changes), "fake://store")


@pytest.fixture(params=["fake", "file", "memory"])
def any_bench(request, tmp_path):
    """On each kind of store."""
    url = {"fake": "fake://store", "file": f"file://{tmp_path}/store", "memory": f"memory://sdk-{next(_numbers)}"}[request.param]
    backend = FakeBackend() if request.param == "fake" else open_backend(url)
    geometry = make_geometry()
    backend.put_manifest(geometry, [CacheKind.KV, CacheKind.QUERY], {"vllm": "0"})
    yield Bench(backend, geometry, url)
    backend.close()
