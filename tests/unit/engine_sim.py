"""A small model of vLLM's engine that drives the real scheduler side, worker side and capture on the CPU.

The scheduler part follows vLLM 0.32 in what a connector can see: block allocator with reference counts and a prefix cache by chained hash
and salt, sharing within a step, eviction, immediate slot reuse, chunked prefill under a token budget, preemption and resume, aborts,
asynchronous scheduling (one step in flight, ids known one step late), drafts and rejections, failed loads with policy ``recompute``.

The "device" keeps K/V pages as tensors and knows the one right value of every row: a function of layer, plane, salt and the whole token
prefix. A row whose attention read a page that does not hold the right value is garbage, and so is what follows from it.
"""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from qcap.attribution import step_block_limit
from qcap.backends import open_backend
from qcap.capture import Capture, HostArena, KVFeature, PageStager, QueryFeature, StreamBudget, StreamingQueryFeature
from qcap.config import CaptureConfig
from qcap.geometry import Geometry, PagedLayout, PlaneStrides, Rope
from qcap.kinds import CacheKind
from qcap.store.tiers import SequenceRecord, StoreOutcome
from qcap.tokens import ChunkedTokenDatabase, ChunkRecord, chunk_key
from qcap.vllm import worker as worker_module
from qcap.vllm.layouts import CacheGroup
from qcap.vllm.loading import LayerLoads
from qcap.vllm.scheduler import KeyParts, SchedulerSide
from qcap.vllm.worker import WorkerSide

L, HEADS, D, N = 2, 2, 4, 4
H = HEADS * D
MODEL = "sim"
POISON, GARBAGE = -7.0, -3.0
NAMES = tuple(f"model.layers.{i}.self_attn.attn" for i in range(L))


# ---- values -----------------------------------------------------------------------------------------------------------------------


def root(salt: str) -> int:
    return zlib.crc32(b"salt:" + salt.encode()) + 1


def chain(prev: int, token: int) -> int:
    return (prev * 6364136223846793005 + (token + 1) * 1442695040888963407 + 7) & ((1 << 62) - 1)


def prefix_hashes(tokens: list[int], salt: str) -> list[int]:
    out, value = [], root(salt)
    for token in tokens:
        value = chain(value, token)
        out.append(value)
    return out


_J = np.arange(1, H + 1, dtype=np.int64) * 977


def values(hashes: np.ndarray, layer: int, plane: int) -> torch.Tensor:
    """Float32 ``[rows, H]``; plane 0 K, 1 V, 2 Q. A negative hash is garbage."""
    mixed = (hashes ^ (hashes >> 29)) & 0xFFFFF
    rows = ((mixed[:, None] * (_J[None, :] + 31 * layer + 7 * plane) + 13 * layer + 5 * plane) % 65521).astype(np.float32)
    rows[hashes < 0] = GARBAGE
    return torch.from_numpy(rows)


# ---- store ------------------------------------------------------------------------------------------------------------------------


class RecordingBackend:
    """A store in a dict, written by one slow thread; can refuse, and remembers every object ever published.

    Of some chunks it also holds the lease, as a store in memory does, until their memory is wanted back: they must be what they were.
    """

    def __init__(self, rng: random.Random, *, refuse: float = 0.0, fail: float = 0.0, room: int | None = None, keep: bool = False) -> None:
        self.objects: dict[Any, tuple[ChunkRecord, torch.Tensor]] = {}
        self.published: list[tuple[ChunkRecord, torch.Tensor]] = []
        self.receipts: list[SequenceRecord] = []
        self._rng, self._refuse, self._fail, self._room = rng, refuse, fail, room
        self._jobs: deque[Any] = deque()
        self._lock = threading.Condition()
        self._pending = self._waiting_bytes = 0
        self._kept: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()
        self._keep, self.changed_under_lease = keep, 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    cheap_contains = True
    keeps_leases = False

    def edit_of(self, key: Any) -> str | None:
        return self.objects[key][0].edit if key in self.objects else None

    def has_room(self, nbytes: int) -> bool:
        return True

    def contains(self, keys: Any) -> list[bool]:
        return [k in self.objects for k in keys]

    def lookup(self, keys: Any) -> int:
        return next((i for i, k in enumerate(keys) if k not in self.objects), len(keys))

    def store(
        self, record: ChunkRecord, source: torch.Tensor, event: Any = None, *, overwrite: bool = False, lease: Any = None
    ) -> Future[StoreOutcome]:
        future: Future[StoreOutcome] = Future()
        if self._rng.random() < self._refuse:
            future.set_result(StoreOutcome.REFUSED)
            return future
        with self._lock:
            while self._room is not None and self._waiting_bytes and self._waiting_bytes + source.nbytes > self._room:
                if not self._lock.wait(20):
                    raise TimeoutError("deadlock: no room in the store for 20 s")
            self._jobs.append((record, source, event, future, self._rng.random() < self._fail, lease))
            self._pending += 1
            self._waiting_bytes += source.nbytes
            self._lock.notify_all()
        return future

    def put_sequence(self, record: SequenceRecord) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            self._jobs.append((record, None, None, future, False, None))
            self._pending += 1
            self._lock.notify_all()
        return future

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._jobs:
                    if self._closed:
                        return
                    self._lock.wait()
                record, source, event, future, fail, lease = self._jobs.popleft()
            outcome: Any = None
            if isinstance(record, SequenceRecord):
                self.receipts.append(record)
            else:
                outcome = StoreOutcome.FAILED
                try:
                    if event is not None:
                        event.synchronize()
                    if fail:
                        raise OSError("disk full")
                    if record.key in self.objects:
                        outcome = StoreOutcome.EXISTS
                    else:
                        self.published.append((record, source.clone()))
                        self.objects[record.key] = self.published[-1]
                        if self._keep and lease is not None and len(self.published) % 2:
                            lease.hold()
                            self._kept.append((lease, source, self.published[-1][1]))
                        outcome = StoreOutcome.STORED
                except Exception:  # a store's future never raises
                    pass
            with self._lock:
                self._waiting_bytes -= source.nbytes if source is not None else 0
                self._lock.notify_all()
            future.set_result(outcome)
            with self._lock:
                self._pending -= 1
                self._lock.notify_all()

    def loaded(self, keys) -> None:
        pass

    def relieve(self, nbytes: int) -> bool:
        given = 0
        while self._kept and given < nbytes:
            try:
                lease, source, wanted = self._kept.popleft()
            except IndexError:
                break
            self.changed_under_lease += not torch.equal(source, wanted)
            lease.release()
            given += source.nbytes
        return given > 0

    def load(self, key: Any) -> Any:
        found = self.objects.get(key)
        return None if found is None else SimpleNamespace(record=found[0], tensor=found[1].clone())

    def open_layers(self, key: Any) -> Any:
        found = self.objects.get(key)
        return None if found is None else RecordedLayers(*found)

    def sequences(self, model: str | None = None) -> list[SequenceRecord]:
        return list(self.receipts)

    def poll(self) -> int:
        return self._pending

    def drain(self, timeout_s: float | None = None) -> bool:
        with self._lock:
            return self._lock.wait_for(lambda: self._pending == 0, timeout_s if timeout_s is not None else 20)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._thread.join(20)
        self.relieve(1 << 60)


class RecordedLayers:
    """One object of a recording backend, to be read layer by layer; from layer ``dies_at`` on the store has gone away."""

    def __init__(self, record: ChunkRecord, tensor: torch.Tensor, dies_at: int | None = None) -> None:
        self.record, self._tensor, self.dies_at = record, tensor, dies_at

    def rest(self) -> None:
        return None

    def read(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.dies_at is not None and layer >= self.dies_at:
            raise OSError("the store has gone away")
        return self._tensor[:, layer].clone() if out is None else out.copy_(self._tensor[:, layer])


class FlakyLoads:
    """A backend whose loads fail now and then: an error, or the object is gone; layer by layer, at any layer."""

    def __init__(self, inner: Any, rng: random.Random, rate: float) -> None:
        self._inner, self._rng, self._rate = inner, rng, rate
        self._opened: Counter[Any] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load(self, key: Any) -> Any:
        if self._rng.random() < self._rate:
            if self._rng.random() < 0.5:
                return None
            raise OSError("the store has gone away")
        return self._inner.load(key)

    def open_layers(self, key: Any) -> Any:
        self._opened[key] += 1  # several threads open, in any order: what happens must not depend on it
        rng = random.Random(f"{key.digest} {key.salt} {self._opened[key]}")
        if rng.random() >= self._rate:
            return self._inner.open_layers(key)
        what, found = rng.choice(["gone", "away", "dies", "dies"]), self._inner.open_layers(key)
        if what == "away":
            raise OSError("the store has gone away")
        if what == "dies" and found is not None:
            found.dies_at = rng.randrange(L)
            return found
        return None


class PoisonedArena(HostArena):
    """Every piece starts as poison, so that a row nobody wrote is seen in the store."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        piece = super().take(shape, dtype)
        return None if piece is None else piece.fill_(int(POISON))


# ---- requests and blocks ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class SimRequest:
    """What a connector sees of vLLM's Request, and the script of what it will generate."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    cache_salt: str | None
    stop_after: int  # outputs until a stop token that the scheduler cannot foresee
    skip_reading_prefix_cache: bool = False
    seed: int = 0
    mm_features: list[Any] = field(default_factory=list)
    lora_request: Any = None
    prompt_embeds: Any = None
    num_computed_tokens: int = 0
    status: str = "waiting"

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.placeholders = self.in_flight = self.stale = 0
        self.drop_stale_output = False
        self.preemptions = 0
        self.blocks: list[int] = []
        self.epoch = 0
        self.ran = False
        self.aborted = False
        # truth about what capture could have seen
        self.captured: dict[int, bool] = {}
        self.dropped: set[int] = set()
        self.lost_end: set[int] = set()
        self.q_ok: set[int] = set()
        self.kv_ok: set[int] = set()
        self.garbage = False
        self.odd = ""
        self.resumable = False
        self.load_failed = False
        self.ended_preempted = False

    @property
    def salt(self) -> str:
        return self.cache_salt or ""

    def outputs(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    def device_tokens(self, upto: int) -> list[int]:
        """Ids of positions ``[0, upto)`` as the device feeds them: known ones, then what it has sampled itself."""
        tokens = list(self.all_token_ids)
        while len(tokens) < upto:
            position = len(tokens)
            tokens.append(zlib.crc32(repr((self.seed, self.epoch, position, tokens[-1])).encode()) % 5)
        return tokens[:upto]


class Blocks:
    """vLLM's block pool: free queue in eviction order, reference counts, prefix cache."""

    def __init__(self, count: int, enabled: bool) -> None:
        self.free: OrderedDict[int, None] = OrderedDict((b, None) for b in range(1, count))
        self.refs = [0] * count
        self.hash_of: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        self.enabled = enabled

    def hits(self, request: SimRequest) -> list[int]:
        if not self.enabled or request.skip_reading_prefix_cache:
            return []
        hashes = prefix_hashes(request.all_token_ids, request.salt)
        found = []
        for i in range((len(request.all_token_ids) - 1) // N):
            block = self.cached.get(hashes[(i + 1) * N - 1])
            if block is None:
                break
            found.append(block)
        return found

    def touch(self, blocks: list[int]) -> None:
        for b in blocks:
            if self.refs[b] == 0:
                del self.free[b]
            self.refs[b] += 1

    def take(self, count: int) -> list[int]:
        out = []
        for _ in range(count):
            b, _none = self.free.popitem(last=False)
            key = self.hash_of.pop(b, None)
            if key is not None and self.cached.get(key) == b:
                del self.cached[key]
            self.refs[b] = 1
            out.append(b)
        return out

    def give(self, blocks: list[int]) -> None:
        for b in reversed(blocks):
            self.refs[b] -= 1
            if self.refs[b] == 0:
                self.free[b] = None
                if b not in self.hash_of:
                    self.free.move_to_end(b, last=False)  # reused in the very next step

    def cache(self, request: SimRequest, upto: int) -> None:
        if not self.enabled:
            return
        hashes = prefix_hashes(request.all_token_ids[:upto], request.salt)
        for i in range(len(hashes) // N):
            b = request.blocks[i]
            if b not in self.hash_of:
                self.hash_of[b] = hashes[(i + 1) * N - 1]
                self.cached.setdefault(self.hash_of[b], b)

    def reset(self) -> None:
        self.hash_of.clear()
        self.cached.clear()


# ---- options ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    seed: int
    requests: int = 8
    chunk: int = 8
    families: int = 3
    odd: float = 0.0  # requests of which nothing may be stored
    depth: int = 2  # steps in flight of asynchronous scheduling
    num_blocks: int = 24
    budget: int = 16
    max_running: int = 4
    max_prompt: int = 30
    max_outputs: int = 14
    asynchronous: bool = False
    speculative: bool = False
    deferred_end: bool = False
    in_process: bool = True
    v2: bool = False
    prefix_caching: bool = True
    on_pressure: str = "wait"
    streaming: bool = True  # the form of the query ring; resident if ring_blocks is given
    small_rows: int = 5  # the largest step that a graph may replay
    windows: int = 2
    ring_blocks: int | None = None  # None: as many as one step can write
    arena_bytes: int = 1 << 16  # small, so that rows are moved out of it
    load: str = "off"
    load_failures: float = 0.0
    layerwise: bool = False
    load_bytes: int = 8192  # host memory for layers on their way in: some loads get two layers, some one, some none
    aborts: float = 0.0
    resets: float = 0.0
    lost_ends: float = 0.0
    redone_steps: float = 0.0
    dropped_rows: float = 0.0
    refuse: float = 0.0
    fail: float = 0.0
    room: int | None = None
    salts: tuple[str, ...] = ("", "", "blue")
    reuse_ids: bool = False
    skip_reading: float = 0.0
    always_launch: bool = True
    real_store: bool = False
    host_bytes: int = 1 << 20
    inference: bool = True  # the device side of a step runs in inference mode, ends and the writer's thread do not


class Sim:
    """One engine run. :meth:`run` drives it to the end; :meth:`check` raises AssertionError on anything wrong."""

    def __init__(self, options: Options) -> None:
        self.o = options
        self.rng = random.Random(options.seed)
        self.ch = options.chunk
        self.geometry = Geometry(
            model=MODEL, layer_names=NAMES, num_q_heads=HEADS, num_kv_heads=HEADS, head_size=D, dtype="float32", block_size=N,
            chunk_size=self.ch,
            rope=Rope(rotary_dim=D), scale=0.5, total_num_kv_heads=HEADS,
        )  # fmt: skip
        self.counters: Counter[str] = Counter()
        self._make_backend()
        self._make_worker()
        self._make_scheduler()
        self.blocks = Blocks(options.num_blocks, options.prefix_caching)
        self.tags = np.full(options.num_blocks * N, -1, dtype=np.int64)
        self._garbage = -10
        self.waiting: deque[SimRequest] = deque()
        self.running: list[SimRequest] = []
        self.all: list[SimRequest] = []
        self.finished_ids: list[SimRequest] = []
        self.preempted: set[str] = set()
        self.steps = 0
        self.events: Counter[str] = Counter()

    @staticmethod
    def no_events() -> Counter[str]:
        return Counter()

    # ---- parts ----------------------------------------------------------------------------------------------------------------

    def _make_backend(self) -> None:
        o = self.o
        if o.real_store:
            url = f"memory://sim-{o.seed}-{id(self)}"
            self.store: Any = open_backend(url, on_pressure=o.on_pressure, host_bytes=o.host_bytes)
        else:
            self.store = RecordingBackend(random.Random(o.seed + 1), refuse=o.refuse, fail=o.fail, room=o.room, keep=True)
        self.backend: Any = FlakyLoads(self.store, random.Random(o.seed + 2), o.load_failures)

    def _make_worker(self) -> None:
        o, g = self.o, self.geometry
        limit = step_block_limit(o.budget, o.max_running, N)
        self.ring_blocks = o.ring_blocks or limit
        self.pages = [torch.full((o.num_blocks, 2, N, HEADS, D), POISON) for _ in range(L)]
        layouts = []
        for page in self.pages:
            s = page.stride()
            k, v = PlaneStrides(0, s[0], s[3], s[2], s[4]), PlaneStrides(s[1], s[0], s[3], s[2], s[4])
            layouts.append(PagedLayout(name="B2NHD", blocks=o.num_blocks, heads=HEADS, block_size=N, head_size=D, planes=(k, v)))
        self.arena = PoisonedArena(o.arena_bytes, pinned=False, waits=o.on_pressure == "wait")
        stager = PageStager(torch.device("cpu"), self.arena)
        self.streaming = o.streaming and o.ring_blocks is None
        if self.streaming:
            budget = StreamBudget(o.budget, o.small_rows, o.windows, H * 4, L)
            self.query: Any = StreamingQueryFeature(
                g, budget, num_kv_blocks=o.num_blocks, plan_blocks=limit, plan_requests=o.max_running + 4,
                padded_rows=o.budget + 8, stager=stager, counters=self.counters,
                host_bytes=o.arena_bytes, debug=not (o.dropped_rows or o.lost_ends or o.redone_steps),
            )  # fmt: skip
            for buffer in (self.query.windows, self.query.resident):
                buffer.fill_(POISON)
            # Steps of one request may leave from where they lie, as on a GPU. If a row is lost there, so are those behind it. Smaller ones
            # are scattered several layers at a time.
            self.query._queries_stay = o.seed % 2 == 0 and not o.dropped_rows
            self.query._held_rows = o.small_rows + (2, 8, 1000)[o.seed // 2 % 3]
        else:
            self.query = QueryFeature(
                g, device=torch.device("cpu"), dtype=torch.float32, ring_blocks=self.ring_blocks, max_rows=o.budget + 8, plan_blocks=limit,
                never_lose=o.on_pressure == "wait", stager=stager, counters=self.counters,
            )  # fmt: skip
            for layer in self.query.ring.layers:
                layer.fill_(POISON)
        self.kv = KVFeature(g, self.pages, layouts, stager)
        config = CaptureConfig(store="memory://x", query=True, chunk_size=self.ch, on_pressure=o.on_pressure, load=o.load)
        fake = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=f"sim-{o.seed}"))
        self.worker = WorkerSide(fake, config, CacheGroup(0, dict.fromkeys(NAMES), N, o.num_blocks), MODEL)
        self.worker.counters = self.counters
        self.worker.capture = Capture(
            g, self.backend, [self.query, self.kv], engine_id="sim", write_receipts=True, arena=self.arena, counters=self.counters
        )
        self.capture = self.worker.capture
        self.worker._query, self.worker._pages, self.worker._always_launch = self.query, self.kv, o.always_launch
        if o.layerwise:
            self.worker._layer_index = {name: i for i, name in enumerate(NAMES)}
            loads = self.worker._layer_loads = LayerLoads(
                g, self.backend, self.kv.table, device=torch.device("cpu"), host_bytes=o.load_bytes, lowest=self.worker._lowest,
                whole=self.worker._load_whole,
            )  # fmt: skip
            loads.arena = PoisonedArena(o.load_bytes, pinned=False, waits=False)

    def _make_scheduler(self) -> None:
        o = self.o

        def finish_now(update: Any, done: Any) -> bool:
            if o.in_process:
                self.worker.finish(update, done)
            return o.in_process

        config = CaptureConfig(store="memory://x", query=True, chunk_size=self.ch, on_pressure=o.on_pressure, load=o.load)
        self.scheduler = SchedulerSide(
            config, KeyParts(MODEL, 1, "float32"), group=0, block_size=N, backend=lambda: self.backend, speculative=o.speculative,
            finish_now=finish_now, note={"store": "memory://x", "engine_id": "sim"},
        )  # fmt: skip

    # ---- requests -------------------------------------------------------------------------------------------------------------

    def make_request(self, number: int) -> SimRequest:
        rng, o = self.rng, self.o
        family = rng.randrange(o.families)
        shared = [zlib.crc32(f"{family}:{i}".encode()) % 5 for i in range(o.max_prompt)]
        length = rng.randint(1, o.max_prompt)
        keep = rng.randint(0, length)
        prompt = shared[:keep] + [rng.randrange(5) for _ in range(length - keep)]
        name = f"r{number % 3}" if o.reuse_ids else f"r{number}"
        max_tokens = 1 if rng.random() < 0.15 else rng.randint(1, o.max_outputs)
        room = (o.num_blocks - 2) * N  # a request alone always fits
        max_tokens = max(1, min(max_tokens, room - length - 4))
        request = SimRequest(
            name, prompt[: room - 5], max_tokens, rng.choice(o.salts) or None, rng.choice([10**6, rng.randint(1, o.max_outputs)]),
            skip_reading_prefix_cache=rng.random() < o.skip_reading, seed=rng.randrange(3),
        )  # fmt: skip
        if rng.random() < o.odd:
            request.odd = rng.choice(["multimodal", "lora", "no-token-ids", "streaming", "salt"])
            if request.odd == "multimodal":
                request.mm_features = ["an image, late in the prompt"]
            elif request.odd == "lora":
                request.lora_request, request.cache_salt = "adapter", "lora"  # its blocks are no text request's
            elif request.odd == "no-token-ids":
                request.prompt_embeds = "embeds"
            elif request.odd == "streaming":
                request.resumable = True
            else:
                request.cache_salt = "not/a key"
        self.all.append(request)
        return request

    # ---- vLLM's schedule() ----------------------------------------------------------------------------------------------------

    def _preempt(self, request: SimRequest, drop: bool = False) -> None:
        self.events["preempted"] += 1
        self.blocks.give(request.blocks)
        request.blocks = []
        request.status, request.num_computed_tokens = "preempted", 0
        request.drop_stale_output = drop or (request.drop_stale_output and request.stale > 0)
        request.stale, request.placeholders = request.in_flight, 0
        if drop:
            request.epoch += 1
        request.preemptions += 1
        self.waiting.appendleft(request)
        self.preempted.add(request.request_id)

    def schedule(self) -> Any:
        o, budget = self.o, self.o.budget
        amount: dict[str, int] = {}
        start: dict[str, int] = {}
        drafts: dict[str, list[int]] = {}
        new_blocks: dict[str, list[int]] = {}
        by_id: dict[str, SimRequest] = {}
        scheduled: list[SimRequest] = []
        preempted_now = False
        i = 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            i += 1
            if request.placeholders and request.outputs() + request.placeholders >= request.max_tokens:
                continue
            known = len(request.all_token_ids) + request.placeholders
            n = known - request.num_computed_tokens
            draft: list[int] = []
            if o.speculative and n == 1 and request.outputs() + 1 < request.max_tokens:
                true = request.device_tokens(len(request.all_token_ids) + 3)[len(request.all_token_ids) :]
                draft = [t if self.rng.random() < 0.6 else (t + 1) % 5 for t in true[: self.rng.randint(0, 3)]]
                n += len(draft)
            if n > budget:
                n = budget
                draft = []
                n = min(n, known - request.num_computed_tokens)
            if n <= 0:
                continue
            need = -(-(request.num_computed_tokens + n) // N) - len(request.blocks)
            fits = True
            while len(self.blocks.free) < need:
                victim = self.running.pop()
                if victim in scheduled:
                    scheduled.remove(victim)
                    budget += amount.pop(victim.request_id)
                    new_blocks.pop(victim.request_id)
                    drafts.pop(victim.request_id, None)
                    by_id.pop(victim.request_id)
                self._preempt(victim)
                preempted_now = True
                if victim is request:
                    fits = False
                    break
            if not fits:
                break
            taken = self.blocks.take(max(0, need))
            request.blocks += taken
            self.blocks.cache(request, min(request.num_computed_tokens + n, len(request.all_token_ids)))
            scheduled.append(request)
            by_id[request.request_id] = request
            amount[request.request_id], new_blocks[request.request_id] = n, taken
            start[request.request_id] = request.num_computed_tokens
            if draft:
                drafts[request.request_id] = draft
            budget -= n
        fresh: list[SimRequest] = []
        resumed: list[SimRequest] = []
        skipped: list[SimRequest] = []
        while not preempted_now and self.waiting and budget > 0 and len(self.running) < o.max_running:
            request = self.waiting[0]
            if request.stale and not request.drop_stale_output:
                skipped.append(self.waiting.popleft())
                continue
            hits = self.blocks.hits(request)
            local = len(hits) * N
            external = self.scheduler.matched_tokens(request, local)
            assert external % N == 0 and local + external < len(request.all_token_ids), "at least one token must be left to compute"
            if request.skip_reading_prefix_cache:
                external = 0
            computed = local + external
            n = min(len(request.all_token_ids) - computed, budget)
            need = -(-(computed + n) // N) - len(hits)
            if len(self.blocks.free) - sum(self.blocks.refs[b] == 0 for b in hits) < need:
                self.events["not_admitted"] += 1
                break
            self.blocks.touch(hits)
            request.blocks = hits + self.blocks.take(need)
            self.scheduler.allocated(request, external)
            self.waiting.popleft()
            self.running.append(request)
            (fresh if request.status == "waiting" else resumed).append(request)
            self.events["resumed"] += request.status != "waiting"
            self.events["prefix_hits"] += bool(hits)
            self.events["loads"] += bool(external)
            self.blocks.cache(request, computed + n)
            request.status, request.num_computed_tokens, request.ran = "running", computed, True
            by_id[request.request_id] = request
            amount[request.request_id], start[request.request_id] = n, computed
            budget -= n
        for request in reversed(skipped):
            self.waiting.appendleft(request)
        new = fresh + (resumed if o.v2 else [])
        cached = scheduled + ([] if o.v2 else resumed)
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id, block_ids=(list(r.blocks),), num_computed_tokens=r.num_computed_tokens) for r in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r in cached],
                resumed_req_ids={r.request_id for r in cached if r in resumed},
                new_block_ids=[
                    (list(r.blocks),) if r in resumed else ((list(new_blocks[r.request_id]),) if new_blocks[r.request_id] else None)
                    for r in cached
                ],
                num_computed_tokens=[r.num_computed_tokens for r in cached],
            ),
            num_scheduled_tokens=dict(amount),
            scheduled_spec_decode_tokens=dict(drafts),
            preempted_req_ids=set(self.preempted),
            total_num_scheduled_tokens=sum(amount.values()),
        )
        self.preempted = set()
        step = self.scheduler.step(output)
        for request in by_id.values():
            n = amount[request.request_id]
            request.num_computed_tokens += n
            request.in_flight += n
            is_chunk = request.num_computed_tokens < len(request.all_token_ids) + request.placeholders
            if o.asynchronous and not is_chunk:
                request.placeholders += 1
        return SimpleNamespace(
            step=step, by_id=by_id, amount=amount, start=start, drafts=drafts, samples={}, invalid=set(), number=self.steps
        )

    # ---- the device -----------------------------------------------------------------------------------------------------------

    def run_begin(self, out: Any) -> None:
        with torch.inference_mode(self.o.inference):
            self._run_begin(out)

    def _run_begin(self, out: Any) -> None:
        self.worker.begin(out.step)
        self.worker.load()
        if self.o.layerwise:
            self._run_layerwise(out)
            return
        for load in out.step.loads:
            if self.worker._failed_blocks.intersection(load.block_ids):
                out.by_id[load.request_id].load_failed = True
        for load in out.step.loads:  # tags follow what the load really wrote
            for position in range(load.start, load.end):
                block = load.block_ids[position // N]
                self.tags[block * N + position % N] = self._read_tag(block, position, load)
        out.failed = set(self.worker._failed_blocks)
        self._forward(out)

    def _run_layerwise(self, out: Any) -> None:
        """What a load is going to bring is known from the store; what it brought is looked at when the forward pass is over."""
        entries = list(self.worker._layer_loads._entries)
        assert [entry.load for entry in entries] == list(out.step.loads)
        good, out.failed = [], set()
        for entry in entries:
            dies = entry.job is not None and any(getattr(reader, "_reader", reader).dies_at is not None for reader in entry.readers)
            self.events["loads_that_die"] += dies and entry.problem is None
            self.events["loads_whole"] += entry.job is None and entry.problem is None
            bad, load = dies or entry.problem is not None, entry.load
            if bad:
                out.failed.update(load.block_ids[load.start // N :])
            else:
                good.append(load)
            request = out.by_id[load.request_id]
            hashes = prefix_hashes(request.all_token_ids[: load.end], request.salt)
            for p in range(load.start, load.end):
                self.tags[load.block_ids[p // N] * N + p % N] = self._new_garbage() if bad else hashes[p]
        for load in out.step.loads:
            if out.failed.intersection(load.block_ids):
                out.by_id[load.request_id].load_failed = True
        self._forward(out)
        for load in good:
            wanted = np.array(prefix_hashes(list(load.token_ids[: load.end]), load.salt)[load.start :])
            blocks = list(load.block_ids[load.start // N :])
            for layer in range(L):
                for plane in range(2):
                    assert torch.equal(self.pages[layer][blocks, plane].reshape(-1, H), values(wanted, layer, plane)), load

    def _read_tag(self, block: int, position: int, load: Any) -> int:
        request = next(r for r in self.running if r.request_id == load.request_id)
        wanted = prefix_hashes(request.all_token_ids[: position + 1], request.salt)[-1]
        right = values(np.array([wanted]), 0, 0)[0]
        return wanted if torch.equal(self.pages[0][block, 0, position % N].reshape(-1), right) else self._new_garbage()

    def _new_garbage(self) -> int:
        self._garbage -= 1
        return self._garbage

    def _forward(self, out: Any) -> None:
        rows: list[tuple[int, SimRequest, int, int]] = []  # position, request, slot, hash
        chains: dict[int, list[int]] = {}
        for rid, request in out.by_id.items():
            start, n = out.start[rid], out.amount[rid]
            draft = out.drafts.get(rid, [])
            tokens = request.device_tokens(start + n - len(draft)) + draft
            hashes = chains[id(request)] = prefix_hashes(tokens, request.salt)
            blocks = list(request.blocks)
            rows += [(p, request, blocks[p // N] * N + p % N, hashes[p]) for p in range(start, start + n)]
            true = request.device_tokens(start + n + 1)
            accepted = 0
            base = start + n - len(draft)
            while accepted < len(draft) and draft[accepted] == true[base + accepted]:
                accepted += 1
            out.samples[rid] = true[base : base + accepted + 1]
        fine: dict[int, bool] = {}
        computed: dict[tuple[int, int], int] = {}
        for p, request, slot, value in sorted(rows, key=lambda r: r[0]):
            if id(request) not in fine:
                before = np.array([request.blocks[i // N] * N + i % N for i in range(p)], dtype=np.int64)
                fine[id(request)] = bool((self.tags[before] == np.array(chains[id(request)][:p], dtype=np.int64)).all()) if p else True
            value = value if fine[id(request)] else self._new_garbage()
            if not fine[id(request)]:
                request.garbage = True
            self.tags[slot] = value
            computed[id(request), p] = value
        order = list(out.by_id.values())
        self.rng.shuffle(order)
        batch = [(p, r, s, computed[id(r), p]) for want in order for p, r, s, _ in rows if r is want]
        hashes = np.array([b[3] for b in batch], dtype=np.int64)
        slots = np.array([b[2] for b in batch], dtype=np.int64)
        blocks, offsets = torch.from_numpy(slots // N), torch.from_numpy(slots % N)
        q_hashes, q_slots = hashes, slots
        out.dropped = []
        if len(batch) > 1 and self.rng.random() < self.o.dropped_rows:
            gone = self.rng.randrange(len(batch))
            out.dropped.append((batch[gone][1], batch[gone][0]))
            same = [i for i, b in enumerate(batch) if b[1] is batch[gone][1] and b[0] // self.ch == batch[gone][0] // self.ch and i != gone]
            if same and self.rng.random() < 0.5:
                q_slots = slots.copy()
                q_slots[gone] = slots[self.rng.choice(same)]  # a duplicate slot and a missing token
                q_hashes = hashes.copy()
                q_hashes[gone] = hashes[int(np.flatnonzero(slots == q_slots[gone])[0])]
            else:
                q_hashes, q_slots = np.delete(hashes, gone), np.delete(slots, gone)
        padding = self.rng.choice([0, 0, 3])
        mapping = torch.from_numpy(np.concatenate([q_slots, np.full(padding, -1, dtype=np.int64)]))
        if self.rng.random() < 0.3:
            mapping = mapping.to(torch.int32)
        extra_rows = self.rng.choice([0, 0, 2])  # graph padding: query rows past the mapping
        graph = self.rng.random() < 0.3
        for layer in range(L):
            if self.o.layerwise:
                self.worker.layer_needed(NAMES[layer])
            if len(batch):
                self.pages[layer][blocks, 0, offsets] = values(hashes, layer, 0).view(-1, HEADS, D)
                self.pages[layer][blocks, 1, offsets] = values(hashes, layer, 1).view(-1, HEADS, D)
            fused = torch.full((len(q_slots) + padding + extra_rows, 3 * H), POISON)
            fused[: len(q_slots), :H] = values(q_hashes, layer, 2)
            query = fused[:, :H].view(-1, HEADS, D)
            if len(query) % 3:
                query = query.contiguous()
            if len(query):
                with self._recording(graph, len(query)):
                    self.worker._on_query(layer, NAMES[layer], query, mapping)
            if self.o.layerwise:
                self.worker.layer_done(NAMES[layer])
        if graph and self.query in self.capture.features and not (self.streaming and self.query._large):
            self.query._calls = 0  # a replayed graph: the kernels ran, Python did not

    @contextmanager
    def _recording(self, graph: bool, rows: int) -> Iterator[None]:
        """A replayed graph runs what was recorded while no step was active: several layers are put away together."""
        query = self.query
        if not graph or not self.streaming or not query.active or query._large or rows > query.budget.small_rows:
            yield
            return
        capturing, torch.cuda.is_current_stream_capturing = torch.cuda.is_current_stream_capturing, lambda: True
        self.worker._always_launch, query.active, query._recorded_layers = True, False, 2
        try:
            yield
        finally:
            torch.cuda.is_current_stream_capturing = capturing
            self.worker._always_launch, query.active, query._recorded_layers = False, True, 1

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Dummy runs with slots that look real, while no step is active."""
        rows = self.rng.randint(1, 8)
        mapping = torch.from_numpy(np.array([self.rng.randrange(N, self.o.num_blocks * N) for _ in range(rows)], dtype=np.int64))
        for layer in range(L):
            self.worker._on_query(layer, NAMES[layer], torch.full((rows, HEADS, D), GARBAGE), mapping)

    def run_end(self, out: Any, *, lost: bool = False) -> None:
        with torch.inference_mode(self.o.inference):
            if not lost:
                self.worker.end()
            out.invalid = self.worker.take_failed_blocks()
            assert not self.o.layerwise or out.invalid == out.failed, "not the blocks of the loads that failed"
            self.worker.settle()
        dropped = {(id(r), p) for r, p in out.dropped}
        bad = {r.uid for r in out.step.requests if out.invalid.intersection(r.block_ids)} if out.invalid else set()
        for rid, request in out.by_id.items():
            start, n = out.start[rid], out.amount[rid]
            for p in range(start, start + n):
                request.captured[p] = not lost and not bad
                (request.lost_end.add if lost else request.lost_end.discard)(p)
                (request.dropped.add if (id(request), p) in dropped else request.dropped.discard)(p)
            if lost or request.status == "finished":
                continue
            for chunk in range((start + n) // self.ch):
                request.kv_ok.add(chunk)
                if all(request.captured.get(p) for p in range(chunk * self.ch, (chunk + 1) * self.ch)):
                    request.q_ok.add(chunk)

    # ---- vLLM's update_from_output() ------------------------------------------------------------------------------------------

    def _handle_invalid(self, out: Any) -> set[str]:
        affected: set[str] = set()
        marked: set[int] = set()
        for request in self.running:
            hit = False
            truncated = False
            before = request.num_computed_tokens - out.amount.get(request.request_id, 0)
            for index, block in zip(range(-(-before // N)), request.blocks, strict=False):
                if block not in out.invalid:
                    continue
                hit = True
                if block in marked:
                    continue
                marked.add(block)
                if truncated:
                    continue
                truncated = True
                request.num_computed_tokens = index * N
            if hit:
                if not truncated:
                    request.num_computed_tokens = before
                affected.add(request.request_id)
        return affected

    def update(self, out: Any) -> None:
        failed = self._handle_invalid(out) if out.invalid else set()
        self.events["failed_loads"] += bool(failed)
        stopped = []
        for rid, request in out.by_id.items():
            n = out.amount[rid]
            request.in_flight -= n
            stale = request.stale > 0
            if stale:
                request.stale -= n
            if rid in failed or request.status == "finished":
                continue
            if stale and request.drop_stale_output:
                continue
            end = out.start[rid] + n - len(out.drafts.get(rid, []))
            if end < len(request.all_token_ids) and not stale:
                continue  # a chunk of a prompt
            if end != len(request.all_token_ids):
                continue
            tokens = out.samples[rid]
            rejected = len(out.drafts.get(rid, [])) - (len(tokens) - 1)
            if not stale:
                request.num_computed_tokens -= rejected
            self.events["rejected"] += rejected
            done = False
            for token in tokens:
                request.all_token_ids.append(token)
                if not stale and self.o.asynchronous:
                    request.placeholders -= 1
                if request.outputs() >= min(request.max_tokens, request.stop_after):
                    done = True
                    break
            if request.status == "running":
                self.blocks.cache(request, min(request.num_computed_tokens - request.placeholders, len(request.all_token_ids)))
            if done:
                stopped.append(request)
                self._finish(request)
        self.running = [r for r in self.running if r not in stopped]
        for request in stopped:
            if request in self.waiting:
                self.waiting.remove(request)
        if out.invalid:
            self.scheduler.load_failed(out.invalid)

    def _finish(self, request: SimRequest) -> None:
        request.ended_preempted = request.status == "preempted"
        self.events["ended_preempted"] += request.ended_preempted and not request.aborted
        request.status = "finished"
        self.scheduler.finished(request)
        self.blocks.give(request.blocks)
        request.blocks = []
        self.finished_ids.append(request)

    def abort(self, request: SimRequest) -> None:
        self.events["aborted"] += 1
        request.aborted = True
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._finish(request)

    def reset(self) -> None:
        """vLLM's reset_prefix_cache(reset_running_requests=True)."""
        self.events["resets"] += 1
        while self.running:
            self._preempt(self.running.pop(), drop=True)
        self.blocks.reset()

    def maybe_abort(self) -> None:
        live = self.running + list(self.waiting)
        if live and self.rng.random() < self.o.aborts:
            self.abort(self.rng.choice(live))

    # ---- the loop -------------------------------------------------------------------------------------------------------------

    def run(self) -> Sim:
        original = worker_module.slot_mapping_of
        worker_module.slot_mapping_of = lambda name, metadata: metadata
        try:
            self._run()
        finally:
            worker_module.slot_mapping_of = original
        return self

    def _arrive(self, number: int) -> None:
        request = self.make_request(number)
        live = {r.request_id for r in self.running} | {r.request_id for r in self.waiting}
        if request.request_id in live:
            request.request_id += f"-{number}"
        self.waiting.append(request)

    def _run(self) -> None:
        o, rng = self.o, self.rng
        arrived = 0
        in_flight: deque[Any] = deque()
        depth = o.depth if o.asynchronous else 1
        while arrived < o.requests or self.running or self.waiting or in_flight:
            self.steps += 1
            assert self.steps < 2000, "the simulated engine does not come to an end"
            while arrived < o.requests and (rng.random() < 0.5 or not (self.running or self.waiting or in_flight)):
                self._arrive(arrived)
                arrived += 1
            if rng.random() < o.resets and o.asynchronous:
                self.reset()
            if rng.random() < 0.2:
                self.warm_up()
            out = self.schedule()
            self.run_begin(out)
            if out.amount and not o.asynchronous and not o.speculative and rng.random() < o.redone_steps:
                self._redo(out)  # the step was given up before its save hook; the engine runs it again
                self.maybe_abort()
                continue
            if o.deferred_end and in_flight:
                self.update(in_flight.popleft())
                if rng.random() < o.aborts:
                    self.maybe_abort()
            self.run_end(out, lost=bool(out.amount) and rng.random() < o.lost_ends)
            in_flight.append(out)
            while len(in_flight) >= depth or (in_flight and not out.amount):
                self.update(in_flight.popleft())
            self.maybe_abort()
        out = self.schedule()  # an engine in its own process steps once more for what has finished
        self.run_begin(out)
        self.run_end(out)
        self.drained = self.backend.drain(20)

    def _redo(self, out: Any) -> None:
        self.events["redone"] += 1
        for rid, request in out.by_id.items():
            request.num_computed_tokens = out.start[rid]
            request.in_flight -= out.amount[rid]
            for p in range(out.start[rid], out.start[rid] + out.amount[rid]):
                request.captured[p] = False
                request.lost_end.add(p)
        self.worker.take_failed_blocks()

    # ---- the checks -----------------------------------------------------------------------------------------------------------

    def published(self) -> list[tuple[ChunkRecord, torch.Tensor]]:
        if not self.o.real_store:
            return list(self.store.published)
        database = ChunkedTokenDatabase(self.ch)
        keys = {
            chunk_key(kind, self.geometry, c.digest, r.salt)
            for r in self.all for kind in CacheKind for c in database.chunks(r.all_token_ids)
        }  # fmt: skip
        found = [self.store.load(k) for k in sorted(keys, key=lambda k: k.fingerprint()) if self.store.contains([k])[0]]
        return [(c.record, c.tensor) for c in found]

    def check(self) -> None:
        assert self.drained, "the store did not come to rest"
        assert self.counters["errors"] == 0, f"errors inside capture: {dict(self.counters)}"
        assert len(self.capture.features) == 2, "a feature was turned off"
        self._check_objects()
        self._check_receipts()
        self._check_nothing_held()
        self.events["spilled"] += self.counters["query.blocks_spilled"]

    def _check_objects(self) -> None:
        database = ChunkedTokenDatabase(self.ch)
        truth: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        for request in self.all:
            if request.odd:
                continue  # nothing of these is ever stored under their own tokens
            hashes = prefix_hashes(request.all_token_ids, request.salt)
            for c in database.chunks(request.all_token_ids):
                truth[c.digest, request.salt] = (request.all_token_ids[c.start : c.end], hashes[c.start : c.end])
        published = self.published()
        self.events["objects"] += len(published)
        for record, tensor in published:
            what = f"{record.kind.value} chunk at {record.start} salt {record.salt!r}"
            assert (record.digest, record.salt) in truth, f"{what}: no request has these tokens"
            tokens, hashes = truth[record.digest, record.salt]
            assert list(record.token_ids) == tokens and record.positions == tuple(range(record.start, record.start + self.ch)), what
            planes = (0, 1) if record.kind is CacheKind.KV else (2,)
            wanted = torch.stack([torch.stack([values(np.array(hashes), layer, p) for layer in range(L)]) for p in planes])
            assert not bool((tensor == POISON).any()), f"{what}: poison was stored"  # R37
            assert not bool((tensor == GARBAGE).any()), f"{what}: rows computed on garbage were stored"
            assert torch.equal(tensor, wanted), f"{what}: wrong rows"

    def _check_receipts(self) -> None:
        receipts: dict[str, list[SequenceRecord]] = {}
        for r in self.backend.sequences():
            receipts.setdefault(r.request_id, []).append(r)
        ran = [r for r in self.finished_ids if r.ran]
        assert sum(map(len, receipts.values())) == len(ran), "not one receipt a request"
        lenient = bool(self.o.refuse or self.o.fail or self.o.on_pressure == "skip")
        database = ChunkedTokenDatabase(self.ch)
        for request in ran:
            wanted = [] if request.odd else request.all_token_ids
            receipt = next((c for c in receipts[request.request_id] if list(c.token_ids) == wanted), None)
            assert receipt is not None, f"{request.request_id}: no receipt tells its tokens"
            receipts[request.request_id].remove(receipt)
            whole = receipt.computed_tokens // self.ch
            if not request.aborted:
                assert receipt.computed_tokens == len(request.all_token_ids) - 1, (
                    f"{request.request_id}: computed {receipt.computed_tokens}"
                )
            for kind in CacheKind:
                stored, skipped = receipt.stored[kind.value], receipt.skipped.get(kind.value, {})
                assert len(stored) + sum(skipped.values()) == whole, f"{request.request_id}: {kind.value} does not add up: {receipt}"
                for reason, count in skipped.items():
                    self.events[f"{kind.value}:{reason}"] += count
                chunks = database.chunks(request.all_token_ids)
                keys = [chunk_key(kind, self.geometry, chunks[i].digest, request.salt) for i in stored]
                assert all(self.store.contains(keys)), f"{request.request_id}: the receipt names chunks that are not there"
                if request.odd:
                    assert skipped == ({request.odd: whole} if whole else {}), f"{request.request_id}: {skipped}"
                    continue
                if lenient:
                    continue
                for index in set(range(whole)) - set(stored):
                    self._check_loss(request, kind, index, skipped)

    def _check_loss(self, request: SimRequest, kind: CacheKind, index: int, skipped: dict[str, int]) -> None:
        span = range(index * self.ch, (index + 1) * self.ch)
        what = f"{request.request_id}: {kind.value} chunk {index} was lost: {skipped}"
        if "load-failed" in skipped:
            assert request.garbage or request.load_failed, what
            return
        if self.o.speculative and (request.lost_end or request.ended_preempted or self.events["failed_loads"]):
            return
        if kind is CacheKind.KV and "token-ids-changed" in skipped:
            assert self.events["resets"], what
            return
        if kind is CacheKind.KV:
            assert index not in request.kv_ok and (request.aborted or request.lost_end), what
            return
        if any(p in request.dropped for p in span):
            assert "rows-missing" in skipped or "prefix-cached" in skipped, what
            return
        if index in request.q_ok:
            if "token-ids-changed" in skipped:
                assert self.events["resets"], what
                return
            given_up = (
                request.lost_end or self.events["redone"]
            )  # its plan stays in force: a dummy run may write over a row, and is found out
            assert "rows-missing" in skipped and (self.o.dropped_rows or given_up), what
            return
        never = any(p not in request.captured for p in span)
        if never:
            assert "prefix-cached" in skipped or request.lost_end or request.aborted, what
        else:
            assert "not-captured" in skipped or "prefix-cached" in skipped, what
            assert request.lost_end or request.aborted or self.events["failed_loads"], what

    def _check_nothing_held(self) -> None:
        ledger = self.query.ledger
        assert not self.capture._tracks, f"tracks left: {list(self.capture._tracks)}"
        if self.streaming:
            self.query._drop_step()  # of a last step whose end was lost
            held = (ledger._requests, ledger._open or (), ledger._shared)
            self.query.mover.close()
            assert self.query.mover.bytes == 0, f"{self.query.mover.bytes} bytes of rows leaked"
        else:
            assert self.query.ring.num_free_blocks() == self.query.ring.num_blocks, "ring blocks leaked"
            held = (ledger._requests, ledger._owners, ledger._stamps, ledger._of_kv, ledger._kv_of, ledger._active)
        assert not any(held), f"the ledger keeps, or leaked, {[len(h) for h in held]}"
        assert not self.query._skips and not self.kv._early and not self.kv._first_open
        assert self.counters["query.debug.rows_off"] == 0
        self.events["kept"] += len(getattr(self.store, "_kept", ()))
        while self.store.relieve(1 << 60):
            time.sleep(0.001)
        changed = getattr(self.store, "changed_under_lease", 0)
        assert not changed, f"{changed} chunks changed while the store held them"
        assert self.arena.outstanding == 0, f"{self.arena.outstanding} host buffers never came back"
        assert not self.scheduler._followed and not self.scheduler._load_failed
        if self.o.layerwise:
            loads = self.worker._layer_loads
            assert not loads.active
            loads._readers.shutdown()
            assert loads.arena.outstanding == 0, "host memory of a load never came back"
            self.events["loads_layerwise"] += self.counters["load.layerwise"]

    def close(self) -> None:
        if self.worker._layer_loads is not None:
            self.worker._layer_loads.close()
        self.worker.capture = None
        self.store.close()


def simulate(options: Options) -> Sim:
    """Run to the end, check everything, give the threads back."""
    sim = Sim(options)
    try:
        sim.run()
        sim.check()
    finally:
        sim.close()
    return sim
