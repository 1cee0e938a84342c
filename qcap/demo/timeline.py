"""``qcap bench layerwise``: one run of the layerwise pipelines over a small synthetic cache, and a picture of who did what when.

Half of a sequence is loaded, layer by layer, from a store that is made slow; the other half counts as computed and is stored as it goes.
The pipelines are the real ones (:mod:`qcap.layerwise`); the store's slowness and the computation are stand-ins of a given length. What was
loaded and stored is compared afterwards, bit for bit.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qcap.capture.staging import HostArena
from qcap.connectors import PagedConnector
from qcap.errors import ConfigError, QcapError, Unsupported
from qcap.geometry import Geometry, Rope
from qcap.kernels import PageTable
from qcap.kinds import CacheKind
from qcap.layerwise import LayerFetch, LayerwiseLoad, LayerwiseStore, LoadGear, MemoryLayers, Span, streams_for
from qcap.tokens import ChunkedTokenDatabase, ChunkRecord

ROWS = ("compute", "load", "store")
BLOCK, CHUNK, HEADS, HEAD_SIZE = 16, 64, 2, 32
MAX_BYTES = 2 << 30
_MAX_MS = 60_000.0
_SPIN_CYCLES = 10_000_000
"""Device cycles of the spin that says how long a cycle is."""


@dataclass(frozen=True)
class TimelineSettings:
    """What to run.

    Args:
        layers: L.
        tokens: tokens that are loaded, and as many that are stored; whole chunks of 64.
        read_ms: how long the store takes for one layer of all loaded tokens.
        compute_ms: how long the stand-in for a layer's computation takes.

    Raises:
        ConfigError: a value is out of range.
    """

    layers: int = 12
    tokens: int = 512
    read_ms: float = 8.0
    compute_ms: float = 10.0

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ConfigError(f"--layers must be 1 or more, got {self.layers}")
        if self.tokens < CHUNK or self.tokens % CHUNK:
            raise ConfigError(f"--tokens must be whole chunks of {CHUNK} tokens, 1 or more, got {self.tokens}")
        for name, value in (("--read-ms", self.read_ms), ("--compute-ms", self.compute_ms)):
            if not 0 <= value <= _MAX_MS:  # not a number fails too
                raise ConfigError(f"{name} must be 0 to {_MAX_MS:g} milliseconds, got {value:g}")
        if self.nbytes > MAX_BYTES:
            raise ConfigError(
                f"{self.layers} layers of {self.tokens} tokens take {self.nbytes >> 20} MiB, and this run is a picture of at most "
                f"{MAX_BYTES >> 20} MiB: lower --layers or --tokens"
            )

    @property
    def layer_bytes(self) -> int:
        """One layer of the loaded tokens, K and V, float32."""
        return CacheKind.KV.planes * self.tokens * HEADS * HEAD_SIZE * 4

    @property
    def nbytes(self) -> int:
        """Pages and store, both halves."""
        return 4 * self.layers * self.layer_bytes


@dataclass(frozen=True)
class Piece:
    """One layer in one row. Times in microseconds since the run began.

    Args:
        row: of :data:`ROWS`.
        layer: its index.
        start, end: of the bar. A load's bar goes from the store's first byte read to the copy into the pages.
        work: what of it was work; the rest was waiting between reading and copying.
        details: more numbers, for the trace.
    """

    row: str
    layer: int
    start: float
    end: float
    work: float
    details: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Timeline:
    """What a run was: its pieces, by start."""

    settings: TimelineSettings
    device: str
    pieces: tuple[Piece, ...]

    def row(self, name: str) -> list[Piece]:
        """The pieces of one row, by layer."""
        return sorted((p for p in self.pieces if p.row == name), key=lambda p: p.layer)

    def work(self, name: str) -> float:
        """Microseconds of work in one row."""
        return math.fsum(p.work for p in self.row(name))

    @property
    def total(self) -> float:
        """From the beginning to the last end, in microseconds."""
        return max(p.end for p in self.pieces)

    @property
    def overlap(self) -> float:
        """Share of the time with a load under way in which a layer was being computed, 0..1."""
        loads, computes = (_union((p.start, p.end) for p in self.row(name)) for name in ("load", "compute"))
        both = math.fsum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in loads for b in computes)
        loading = math.fsum(end - start for start, end in loads)
        return min(1.0, both / loading) if loading else 0.0


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


# -- the run


class _Clock:
    """Marks of the host and, on a GPU, of whatever stream is current; both as microseconds since the clock was made."""

    def __init__(self, device: torch.device) -> None:
        self._base: Any = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._base = self._event()
            self._base.synchronize()
        self._start = time.perf_counter_ns()

    def host(self) -> int:
        """Now, on this thread."""
        return time.perf_counter_ns()

    def mark(self) -> Any:
        """When the current stream gets here."""
        return self.host() if self._base is None else self._event()

    def at(self, mark: Any) -> float:
        """Microseconds. A stream's mark must be over."""
        return (mark - self._start) / 1000 if isinstance(mark, int) else float(self._base.elapsed_time(mark)) * 1000

    @staticmethod
    def _event() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Marks:
    """What the threads of a run say about themselves: ``marks[what][layer] = (begun, ended)``."""

    def __init__(self, clock: _Clock) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._marks: dict[str, dict[int, tuple[Any, Any]]] = {}

    def put(self, what: str, layer: int, begun: Any, ended: Any) -> None:
        with self._lock:
            self._marks.setdefault(what, {})[layer] = (begun, ended)

    def at(self, what: str, layer: int) -> tuple[float, float]:
        begun, ended = self._marks[what][layer]
        return self.clock.at(begun), self.clock.at(ended)


class _SlowFetch:
    """A :class:`~qcap.layerwise.LayerFetch` that takes its time: one layer after the other, as from a store with one line."""

    def __init__(self, inner: LayerFetch, executor: Executor, seconds: float, marks: _Marks) -> None:
        self._inner, self._executor, self._seconds, self._marks = inner, executor, seconds, marks

    def fetch(self, layer: int, out: torch.Tensor, chunks: int) -> Future[None]:
        asked = self._marks.clock.host()
        self._marks.put("asked", layer, asked, asked)
        return self._executor.submit(self._read, layer, out, chunks)

    def _read(self, layer: int, out: torch.Tensor, chunks: int) -> None:
        begun = self._marks.clock.host()
        time.sleep(self._seconds)
        self._inner.fetch(layer, out, chunks).result()
        self._marks.put("read", layer, begun, self._marks.clock.host())


class _MarkedConnector(PagedConnector):
    """Says when each layer's copies began and ended on their stream."""

    def __init__(self, table: PageTable, staging_tokens: int, marks: _Marks) -> None:
        super().__init__(table, staging_tokens=staging_tokens)
        self._marks = marks

    def to_device(self, layer: int, source: torch.Tensor, blocks: torch.Tensor) -> None:
        begun = self._marks.clock.mark()
        super().to_device(layer, source, blocks)
        self._marks.put("copy", layer, begun, self._marks.clock.mark())

    def from_device(self, layer: int, blocks: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        begun = self._marks.clock.mark()
        super().from_device(layer, blocks, targets)
        self._marks.put("store", layer, begun, self._marks.clock.mark())


class _StandIn:
    """Takes as long as a layer's computation: sleeps, or keeps one multiprocessor of a GPU spinning on the current stream."""

    def __init__(self, device: torch.device, milliseconds: float) -> None:
        self._seconds, self._cycles = milliseconds / 1000, 0
        if device.type == "cuda":
            spin: Any = torch.cuda._sleep
            spin(_SPIN_CYCLES)  # the first one loads the kernel
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            spin(_SPIN_CYCLES)
            ended.record()
            ended.synchronize()
            self._spin, self._cycles = spin, max(1, int(_SPIN_CYCLES * milliseconds / begun.elapsed_time(ended)))

    def run(self) -> None:
        if self._cycles:
            self._spin(self._cycles)
        else:
            time.sleep(self._seconds)


def record(settings: TimelineSettings) -> Timeline:
    """Run the pipelines once.

    Raises:
        QcapError: what arrived is not what was stored, or a pipeline gave up.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    s, blocks, n_chunks = settings, settings.tokens // BLOCK, settings.tokens // CHUNK
    geometry = Geometry(
        model="synthetic", layer_names=tuple(f"layer.{i}" for i in range(s.layers)), num_q_heads=HEADS, num_kv_heads=HEADS,
        head_size=HEAD_SIZE, dtype="float32", block_size=BLOCK, chunk_size=CHUNK, rope=Rope(rotary_dim=HEAD_SIZE),
    )  # fmt: skip
    rng = torch.Generator().manual_seed(0)
    planes, hidden = CacheKind.KV.planes, geometry.hidden(CacheKind.KV)
    stored = torch.randn((planes, s.layers, s.tokens, hidden), generator=rng)
    computed = torch.randn((s.layers, planes, blocks, HEADS, BLOCK, HEAD_SIZE), generator=rng)
    pages = torch.zeros((s.layers, planes, 2 * blocks, HEADS, BLOCK, HEAD_SIZE), device=device)
    pages[:, :, blocks:] = computed.to(device)
    table = PageTable([[pages[i, p] for p in range(planes)] for i in range(s.layers)])
    records = _records(geometry, 2 * s.tokens)
    memory = MemoryLayers(s.layers)
    for c, chunk in enumerate(records[:n_chunks]):
        for i, key in enumerate(chunk.key.split_layers(s.layers)):
            memory.put(key, stored[:, i, c * CHUNK : (c + 1) * CHUNK])

    room = (s.layers + 4) * s.layer_bytes + (n_chunks + 4) * 4096 * 4  # every layer of what is stored, a few of what is loaded
    arena = HostArena(room, pinned=device.type == "cuda", waits=False)
    touched = arena.take((arena.nbytes,), torch.uint8)
    assert touched is not None
    arena.give(touched.zero_())  # an engine's memory has been touched long ago; the first touch would be in the picture
    readers, loader = ThreadPoolExecutor(1, "qcap-bench-read"), ThreadPoolExecutor(1, "qcap-bench-load")
    stand_in = _StandIn(device, s.compute_ms)
    marks = _Marks(_Clock(device))
    try:
        streams = streams_for(device)
        connector = _MarkedConnector(table, s.tokens, marks)
        fetch = _SlowFetch(memory.reader([r.key for r in records[:n_chunks]]), readers, s.read_ms / 1000, marks)
        per_chunk = CHUNK // BLOCK
        leaving = [range(start, start + per_chunk) for start in range(blocks, 2 * blocks, per_chunk)]
        # a layer that is merely slow is what this is about: no time limit
        load = LayerwiseLoad(
            LoadGear(streams, connector, arena, loader, timeout_s=None), fetch, range(blocks), Span(s.tokens, 0, s.tokens, CHUNK)
        )
        store = LayerwiseStore(streams, connector, arena, memory.writer(records[n_chunks:]), leaving, CHUNK)
        try:
            load.begin()
            store.begin()
            for i in range(s.layers):
                load.layer(i)
                begun = marks.clock.mark()
                stand_in.run()
                marks.put("compute", i, begun, marks.clock.mark())
                store.layer(i)
            load.finish()
            store.finish()
        finally:
            load.close()
            store.close()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        failure = load.failure or store.failure
        if failure is not None:
            raise QcapError(f"the run was given up: {type(failure).__name__}: {failure}")
        memory.poll()
        _compare(pages[:, :, :blocks], stored, "loaded")
        _compare(computed, _fetched(memory, records[n_chunks:], s.layers), "stored")
    finally:
        readers.shutdown(cancel_futures=True)
        loader.shutdown(cancel_futures=True)
        arena.close()
    pieces = [piece for i in range(s.layers) for piece in _pieces(marks, i)]
    return Timeline(s, device.type, tuple(sorted(pieces, key=lambda p: p.start)))


def _records(geometry: Geometry, tokens: int) -> list[ChunkRecord]:
    ids = tuple(range(tokens))
    return [
        ChunkRecord(
            kind=CacheKind.KV, geometry=geometry, start=c.start, token_ids=ids[c.start : c.end], digest=c.digest, parent=c.parent, salt="",
        )
        for c in ChunkedTokenDatabase(geometry.chunk_size).chunks(ids)
    ]  # fmt: skip


def _fetched(memory: MemoryLayers, records: Sequence[ChunkRecord], layers: int) -> torch.Tensor:
    """``[planes, L, T, H]``."""
    found = torch.empty((CacheKind.KV.planes, layers, len(records) * CHUNK, HEADS * HEAD_SIZE))
    fetch = memory.reader([r.key for r in records])
    for layer in range(layers):
        fetch.fetch(layer, found[:, layer], len(records)).result()
    return found


def _compare(pages: torch.Tensor, rows: torch.Tensor, what: str) -> None:
    """Pages ``[L, planes, B, HEADS, N, D]`` hold rows ``[planes, L, T, H]``."""
    if not torch.equal(pages.cpu().permute(1, 0, 2, 4, 3, 5).reshape(rows.shape), rows):
        raise QcapError(f"what was {what} is not what was there")


def _pieces(marks: _Marks, layer: int) -> list[Piece]:
    asked, _ = marks.at("asked", layer)
    (read, read_end), (copy, copy_end) = marks.at("read", layer), marks.at("copy", layer)
    details = {"asked_us": asked, "read_us": read_end - read, "copy_us": copy_end - copy}
    pieces = [Piece("load", layer, read, copy_end, read_end - read + copy_end - copy, details)]
    for row in ("compute", "store"):
        begun, ended = marks.at(row, layer)
        pieces.append(Piece(row, layer, begun, ended, ended - begun))
    return pieces


# -- files


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Events for chrome://tracing and Perfetto: one "X" a piece, in microseconds, after "M" events that name process and rows.

    Pieces of one row that overlap (the store reads layer i + 1 while layer i is being copied) go to a second line of that row: viewers
    take what overlaps on one line for calls within calls.
    """
    events: list[dict[str, Any]] = []
    names: list[str] = []
    for row in ROWS:
        ends: list[float] = []  # of each line of this row
        first = len(names)
        for p in sorted(timeline.row(row), key=lambda p: p.start):
            line = next((i for i, end in enumerate(ends) if end <= p.start), len(ends))
            if line == len(ends):
                ends.append(0.0)
                names.append(row if not line else f"{row} (line {line + 1})")
            ends[line] = p.end
            args = {"layer": p.layer, **{name: round(value, 3) for name, value in p.details.items()}}
            events.append(
                {"name": f"layer {p.layer}", "cat": row, "ph": "X", "ts": round(p.start, 3), "dur": round(p.end - p.start, 3), "pid": 1,
                 "tid": first + line + 1, "args": args}
            )  # fmt: skip
    events.sort(key=lambda event: event["ts"])
    title = {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": f"qcap layerwise ({timeline.device})"}}
    named = [{"name": "thread_name", "ph": "M", "pid": 1, "tid": i + 1, "args": {"name": name}} for i, name in enumerate(names)]
    order = [{"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": i + 1, "args": {"sort_index": i}} for i in range(len(names))]
    return [title, *named, *order, *events]


def draw(timeline: Timeline) -> Any:
    """A ``matplotlib.figure.Figure``: three rows, a colour and a number a layer.

    Raises:
        Unsupported: matplotlib is not installed.
    """
    figure_type, colours = _matplotlib()
    figure = figure_type(figsize=(min(24.0, max(9.0, 4 + 0.5 * timeline.settings.layers)), 3.2), layout="constrained")
    axis = figure.subplots()
    total = timeline.total
    for place, row in enumerate(ROWS):
        for p in timeline.row(row):
            colour = colours(p.layer % 20)
            axis.barh(place, (p.end - p.start) / 1000, left=p.start / 1000, height=0.6, color=colour, edgecolor="white", linewidth=0.6)
            narrow = p.end - p.start < 0.012 * total
            axis.text(
                (p.start + p.end) / 2000, place - 0.4 * narrow, str(p.layer), ha="center", va="center", fontsize=6 if narrow else 8,
                color="#333333" if narrow else "black",
            )  # fmt: skip
    axis.set_yticks(range(len(ROWS)), ROWS)
    axis.set_ylim(len(ROWS) - 0.5, -0.5)
    axis.set_xlim(0, total / 1000 * 1.01)
    axis.set_xlabel("ms")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    sequence = (timeline.work("load") + timeline.work("compute")) / 1000
    axis.set_title(f"{total / 1000:.1f} ms in all; load + compute one after the other: {sequence:.1f} ms ({timeline.device})", fontsize=11)
    return figure


def run(settings: TimelineSettings, trace: Path) -> tuple[Timeline, Path]:
    """Run once; write ``trace`` and the picture beside it, whose path is returned.

    Raises:
        ConfigError: the files cannot be written.
        Unsupported: matplotlib is not installed.
        QcapError: see :func:`record`.
    """
    picture = trace.with_suffix(".png") if trace.name else trace
    if not trace.name or trace.is_dir() or picture.is_dir():
        raise ConfigError(f"--trace {trace} is a folder, or its picture's name is: give the name of a file, say {trace / 'trace.json'}")
    if picture == trace:
        raise ConfigError(f"--trace {trace} is the picture's name: give the trace another ending, say {trace.with_suffix('.json')}")
    if not trace.parent.is_dir():
        raise ConfigError(f"--trace {trace}: there is no folder {trace.parent}")
    _matplotlib()  # told before the run, not after it
    timeline = record(settings)
    figure = draw(timeline)
    try:
        trace.write_text(json.dumps(trace_events(timeline), indent=1) + "\n", encoding="utf-8")
        figure.savefig(picture, format="png", dpi=130)
    except OSError as error:
        raise ConfigError(f"--trace {trace} cannot be written: {error.strerror or error}") from None
    return timeline, picture


def _matplotlib() -> tuple[Any, Any]:
    """The type of a figure, and the colours. No pyplot: no backend is chosen and no figure stays open."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unsupported(f"the timeline's picture needs matplotlib: pip install 'qcap[notebook]' ({error})") from None
    return Figure, colormaps["tab20"]
