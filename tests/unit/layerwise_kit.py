"""A device that does its work late and in any order that its streams allow, a pool that poisons what comes back, small geometries."""

from __future__ import annotations

import random
import threading
from collections import deque
from contextlib import contextmanager

import torch

from qcap.connectors import PagedConnector
from qcap.geometry import Geometry, Rope
from qcap.kernels import PageTable
from qcap.kinds import CacheKind
from qcap.layerwise import LayerwiseEngine, LoadGear, MemoryLayers

N, CH, HEADS, D = 2, 4, 2, 3
H = HEADS * D


def geometry(layers: int = 3, **changes: object) -> Geometry:
    fields = {
        "model": "org/m", "layer_names": tuple(f"l{i}" for i in range(layers)), "num_q_heads": 4, "num_kv_heads": HEADS, "head_size": D,
        "dtype": "float32", "block_size": N, "chunk_size": CH, "rope": Rope(rotary_dim=2),
    }  # fmt: skip
    return Geometry(**{**fields, **changes})


def pages(layers: int, blocks: int = 40, seed: int = 0) -> PageTable:
    """Pages ``[B, N, heads, D]`` of K and V of each layer, seen as ``[B, heads, N, D]``, of random numbers."""
    rng = torch.Generator().manual_seed(seed)
    return PageTable([[torch.randn((blocks, N, HEADS, D), generator=rng).transpose(1, 2) for _ in range(2)] for _ in range(layers)])


def rows_of(table: PageTable, block_ids, layer: int) -> torch.Tensor:
    """``[planes, T, H]`` of some blocks of one layer, by plain indexing."""
    ids = torch.as_tensor(list(block_ids), dtype=torch.int64)
    return torch.stack([view[ids].transpose(1, 2).reshape(-1, H) for view in table.views[layer]])


class Mark:
    def __init__(self, name: str) -> None:
        self.name, self.done = name, False


class SimEvent:
    """May be recorded again: who waits for it already waits for the mark that it stood for then."""

    def __init__(self, streams: SimStreams) -> None:
        self.streams, self.mark = streams, Mark("")

    def query(self) -> bool:
        if self.streams.busy_while_asked:
            self.streams.step()
        return self.mark.done

    def synchronize(self) -> None:
        raise AssertionError("the host must not wait for the device")


class SimStreams:
    """Streams as queues. Work is done when :meth:`step` or :meth:`run` says, in a random order that waits and streams allow."""

    load, load_twin, store, pages = "load", "load twin", "store", "pages"

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.trace: list[tuple[object, ...]] = []
        self.queues: dict[str, deque[tuple[str, object]]] = {name: deque() for name in ("compute", "load", "load twin", "store", "pages")}
        self.busy_while_asked = True
        self.slow: str | None = None  # a stream that goes on only when no other one can
        self._here = threading.local()
        self._lock = threading.RLock()
        self.events_made = 0

    def compute(self) -> str:
        return "compute"

    @contextmanager
    def on(self, stream: str):
        before = getattr(self._here, "stream", "compute")
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def record(self, stream: str, event: SimEvent | None = None) -> SimEvent:
        with self._lock:
            self.events_made += event is None
            event = event or SimEvent(self)
            event.mark = Mark(stream)
            self.queues[stream].append(("record", event.mark))
            self.trace.append(("record", stream))
            return event

    def wait(self, stream: str, event: SimEvent) -> None:
        with self._lock:
            self.queues[stream].append(("wait", event.mark))
            self.trace.append(("wait", stream, event.mark.name))

    def synchronize(self) -> None:
        raise AssertionError("the host must not wait for the device")

    def push(self, call) -> None:
        with self._lock:
            self.queues[getattr(self._here, "stream", "compute")].append(("call", call))

    def _ready(self) -> list[str]:
        return [name for name, q in self.queues.items() if q and not (q[0][0] == "wait" and not q[0][1].done)]

    def can_go_without(self, stream: str) -> bool:
        """Whether any other stream has something to do that waits for nothing."""
        return any(name != stream for name in self._ready())

    def step(self) -> bool:
        with self._lock:
            ready = self._ready()
            if not ready:
                return False
            what, thing = self.queues[self.rng.choice([name for name in ready if name != self.slow] or ready)].popleft()
            if what == "call":
                thing()
            elif what == "record":
                thing.done = True
            return True

    def run(self) -> None:
        while self.step():
            pass
        assert not any(self.queues.values()), "a stream waits for what never comes"


class SimConnector(PagedConnector):
    """Queues each layer's move on the current stream."""

    def __init__(self, table: PageTable, streams: SimStreams, staging_tokens: int = 0) -> None:
        super().__init__(table, staging_tokens=staging_tokens)
        self.sim = streams

    def prepare(self, block_ids):
        late = torch.full((len(block_ids),), -7)
        self._push(lambda: late.copy_(super(SimConnector, self).prepare(block_ids)))
        return late

    def to_device(self, layer, source, blocks):
        self._check_blocks(source, blocks.numel() * self.block_size)
        self.sim.trace.append(("to_device", layer))
        self.sim.push(lambda: super(SimConnector, self).to_device(layer, source, blocks))

    def from_device(self, layer, blocks, targets):
        self.sim.trace.append(("from_device", layer))
        self.sim.push(lambda: super(SimConnector, self).from_device(layer, blocks, targets))

    def copy(self, target, source):
        self.sim.trace.append(("copy", source.numel()))
        self._push(lambda: super(SimConnector, self).copy(target, source))

    def write(self, layer, staged, blocks):
        self.sim.trace.append(("write", layer))

        def late():
            super(SimConnector, self).write(layer, staged, blocks)
            staged.fill_(float("nan"))  # nobody needs it any more; a copy that came too early was in vain

        self._push(late)

    def _push(self, call):
        self.sim.push(torch.inference_mode()(call))  # as an engine's step runs, whose tensors these are


class Pool:
    """Host memory that is spoiled the moment it comes back. ``room``: pieces that can be lent at once, None for any number."""

    def __init__(self, room: int | None = None) -> None:
        self.room, self.lent, self.high_water, self.takes = room, 0, 0, []
        self._late: list[tuple[object, torch.Tensor]] = []
        self._lock = threading.RLock()
        self._ids: set[int] = set()

    def take(self, shape, dtype):
        with self._lock:
            self._sweep()
            if self.room is not None and self.lent >= self.room:
                return None
            piece = torch.full(shape, float("nan"), dtype=dtype)
            self.lent += 1
            self.high_water = max(self.high_water, self.lent)
            self.takes.append(tuple(shape))
            self._ids.add(id(piece))
            return piece

    def give(self, piece, after=None):
        with self._lock:
            assert id(piece) in self._ids, "given back twice"
            self._ids.discard(id(piece))
            self._late.append((after, piece))

    def outstanding(self) -> int:
        with self._lock:
            self._sweep()
            return self.lent

    def _sweep(self) -> None:
        late, self._late = self._late, []
        for after, piece in late:
            if after is None or after.query():
                piece.fill_(float("nan"))
                self.lent -= 1
            else:
                self._late.append((after, piece))


class Bench:
    """An engine over simulated streams, with ``chunks`` chunks of random rows in a memory store."""

    def __init__(self, layers: int = 3, chunks: int = 3, *, stored: int | None = None, room: int | None = None, seed: int = 0, **gear):
        rng = random.Random(seed)
        self.geometry, self.streams, self.pool = geometry(layers), SimStreams(seed), Pool(room)
        self.table = pages(layers, seed=seed)
        self.store = TracedLayers(layers, self.streams)
        self.connector = SimConnector(self.table, self.streams, gear.pop("staging_tokens", 0))
        self.gear = LoadGear(self.streams, self.connector, self.pool, **gear)
        self.engine = LayerwiseEngine(self.geometry, CacheKind.KV, self.store, self.gear)
        self.tokens = [rng.randrange(1000) for _ in range(chunks * CH + 1)]
        self.blocks = rng.sample(range(40), -(-len(self.tokens) // N))
        self.records = self.engine._records(self.tokens, self.blocks, None, "", ())[0]
        generator = torch.Generator().manual_seed(seed + 1)
        self.rows = torch.randn((2, layers, chunks * CH, H), generator=generator)
        for i, record in enumerate(self.records[: chunks if stored is None else stored]):
            for layer, key in enumerate(record.key.split_layers(layers)):
                self.store.put(key, self.rows[:, layer, i * CH : (i + 1) * CH])

    def clean(self) -> bool:
        """All host memory is back, once the device is done."""
        self.streams.run()
        self.store.poll()
        return self.pool.outstanding() == 0


class TracedLayers(MemoryLayers):
    """Says in the trace what it was asked."""

    def __init__(self, num_layers: int, streams: SimStreams, executor=None) -> None:
        super().__init__(num_layers, executor)
        self.streams, self.asked, self.futures = streams, [], []

    def contains(self, keys):
        self.asked.extend(keys)
        return super().contains(keys)

    def reader(self, chunks):
        inner, outer = super().reader(chunks), self

        class Traced:
            def fetch(self, layer, out, chunks):
                outer.streams.trace.append(("get", layer))
                future = inner.fetch(layer, out, chunks)
                outer.futures.append(future)
                return future

        return Traced()

    def writer(self, records):
        inner, outer = super().writer(records), self

        class Traced:
            def put(self, layer, tensors, event):
                outer.streams.trace.append(("put", layer))
                inner.put(layer, tensors, event)

            def publish(self, chunks, event, done):
                outer.streams.trace.append(("publish", len(chunks)))
                inner.publish(chunks, event, done)

            def discard(self):
                outer.streams.trace.append(("discard",))
                inner.discard()

        return Traced()


def moves(trace) -> list[tuple[object, ...]]:
    """A trace without its events."""
    return [entry for entry in trace if entry[0] not in ("record", "wait")]
