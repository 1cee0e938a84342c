"""The worker's half: hooks, pages, capture and loading on one rank."""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from qcap._version import __version__
from qcap.attribution import FinishedRequest, LoadRequest, Step, TokenUpdate, ring_blocks_for, step_block_limit
from qcap.backends import open_backend
from qcap.capture import Capture, Feature, HostArena, KVFeature, PageStager, QueryFeature, StreamBudget, StreamingQueryFeature
from qcap.capture.staging import SLOT_BYTES
from qcap.config import CaptureConfig
from qcap.errors import ConfigError, GeometryMismatch, QcapError, Unsupported
from qcap.geometry import Geometry, Rope, dtype_name, parse_dtype
from qcap.kinds import CacheKind
from qcap.rope import rope_from_hf_config
from qcap.store.metrics import RateLimitedLog
from qcap.store.objects import NUMERICS
from qcap.store.tiers import Backend, LoadedChunk
from qcap.tokens import TokenChunk, chunk_key
from qcap.vllm.hooks import (
    QueryHooks,
    attention_layers,
    engine_ropes,
    queries_outlive_their_layer,
    queries_stay,
    refusal,
    slot_mapping_of,
    why_layers_pass_unseen,
)
from qcap.vllm.layouts import CacheGroup, certify
from qcap.vllm.loading import AHEAD_BYTES, LayerLoads, LoadOutcome, check_edits, check_record, edits_digest, first_to_check, pool_bytes

DEFAULT_RING_BYTES = 512 << 20
SMALL_STEP_ROWS = 512
"""Without graphs: a step of at most so many rows (fewer, if they would take half the ring) leaves in one copy, not layer by layer."""


logger = logging.getLogger("qcap.vllm")
often = RateLimitedLog(logger)

_recorded: list[Any] = []
"""Buffers of rings that a second registration replaced: a graph recorded before it, should it still run, reads and writes them. Nothing is
planned in them."""

_local: weakref.WeakValueDictionary[str, WorkerSide] = weakref.WeakValueDictionary()


def finish_in_process(engine_id: str, update: TokenUpdate | None, done: FinishedRequest) -> bool:
    """Tell the worker of ``engine_id`` in this process that a request ended; False if it lives elsewhere."""
    worker = _local.get(engine_id)
    if worker is None:
        return False
    worker.finish(update, done)
    return True


class EarlyInProcess:
    """Tells the worker of ``engine_id`` of loads to come, if it lives in this process."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id

    def more(self, uid: int, salt: str, start: int, end: int, chunks: Sequence[TokenChunk], token_ids: Sequence[int]) -> bool:
        """See :meth:`~qcap.vllm.loading.LayerLoads.early`."""
        loads = self._loads()
        return loads is not None and loads.early(uid, salt, start, end, chunks, token_ids)

    def told(self, uid: int) -> None:
        """See :meth:`~qcap.vllm.loading.LayerLoads.early_told`."""
        loads = self._loads()
        if loads is not None:
            loads.early_told(uid)

    def _loads(self) -> LayerLoads | None:
        worker = _local.get(self._engine_id)
        return None if worker is None else worker.loads_here()


class WorkerSide:
    """One rank of one engine."""

    def __init__(self, vllm_config: Any, config: CaptureConfig, group: CacheGroup, model_name: str) -> None:
        self._vllm_config, self._config, self._group = vllm_config, config, group
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self.model_name = model_name
        self.counters: Counter[str] = Counter()
        self.capture: Capture | None = None
        self.hooks: QueryHooks | None = None
        self.refused: dict[str, str] = dict(group.left_out)
        self._query: QueryFeature | StreamingQueryFeature | None = None
        self._arena: HostArena | None = None
        self._layer_index: dict[str, int] = {}
        self._pages: KVFeature | None = None
        self._layer_loads: LayerLoads | None = None
        self._failed_blocks: set[int] = set()
        self._step: Step | None = None
        self._thread = 0  # that runs the steps
        self._always_launch = False
        self.layout = ""  # of the pages, by its certified name

    # ---- start --------------------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # buffers made in inference mode could not be written to outside of it
    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """vLLM has allocated its pages: certify layouts, size the ring, hook the layers, publish the manifest.

        Raises:
            GeometryMismatch: the store holds what another model, or another configuration of this one, computed under its name. With
                ``on_pressure="skip"`` and ``load="off"`` the engine goes on, and captures nothing.
        """
        if self._query is not None and self._always_launch:
            _recorded.append(self._query.graph_buffers)
        self.close()  # registered before, with other pages: nothing of that may stay
        layers = attention_layers(self._vllm_config)
        names = [name for name in self._group.specs if name in layers]
        if not kv_caches or not names:
            logger.warning("qcap captures nothing: %s", "no KV caches" if not kv_caches else "no attention layers it knows")
            return
        device = next(t.device for t in kv_caches.values() if isinstance(t, torch.Tensor))
        geometry = self._geometry(names, layers)
        host_bytes = self._host_bytes(geometry)
        arena = HostArena(host_bytes, pinned=device.type == "cuda", waits=self._config.on_pressure == "wait")
        stager = PageStager(device, arena, slot_bytes=max(SLOT_BYTES, *(geometry.chunk_bytes(k) // geometry.num_layers for k in CacheKind)))
        self._arena, self._layer_index = arena, {name: index for index, name in enumerate(names)}
        self._always_launch = device.type == "cuda"
        features: list[Feature] = []
        if self._config.query:
            self._query = self._query_feature(geometry, layers, names, device, stager)
            if self._query is not None:
                features.append(self._query)
        self._pages = self._page_feature(geometry, layers, names, kv_caches, stager)
        if self._config.kv and self._pages is not None:
            features.append(self._pages)
        backend = open_backend(self._config.store, on_pressure=self._config.on_pressure, host_bytes=host_bytes)
        self.capture = Capture(
            geometry,
            backend,
            features,
            engine_id=self._engine_id,
            write_receipts=geometry.tp_rank == 0 and (self._config.kv or self._config.query),
            arena=arena,
            counters=self.counters,
            may_wait=self._config.on_pressure == "wait",
            refused={
                kind: "unsupported"
                for kind, wanted, got in ((CacheKind.KV, self._config.kv, self._pages), (CacheKind.QUERY, self._config.query, self._query))
                if wanted and got is None
            },
        )
        self._layer_loads = self._make_layer_loads(geometry, backend, device, arena)
        loads = self._pages is not None and self._config.load != "off"
        if features or loads:  # every rank checks; the manifest is rank 0's, and writing it again changes nothing
            try:
                backend.put_manifest(geometry.for_rank(0), [f.kind for f in features], self._engine_info(kv_caches, geometry.rope))
            except GeometryMismatch:
                if self._config.on_pressure == "wait" or loads:  # what is stored must not be loaded either
                    raise
                logger.exception("qcap captures nothing")
                for feature in features:
                    self.capture.turn_off(feature)
        if self._query is not None:
            self.hooks = QueryHooks({name: layers[name] for name in names}, self._on_query)
            self.hooks.install()
        if _local.get(self._engine_id, self) is not self:
            raise ConfigError("two engines in this process share one kv_transfer_config: call transfer_config() once for each")
        _local[self._engine_id] = self
        for name, reason in self.refused.items():
            logger.warning("qcap leaves out layer %s: %s", name, reason)
        logger.info(
            "qcap captures %s of %s (%d layers) into %s", " and ".join(f.kind.value for f in features) or "nothing", geometry.model,
            geometry.num_layers, self._config.store,
        )  # fmt: skip
        self._log_memory(geometry)

    def memory_report(self) -> dict[str, int]:
        """What qcap holds and has held, in bytes: on the device ``ring_bytes`` (queries) and ``slot_bytes`` (pages on their way), on the
        host ``arena_bytes``, of which ``arena_used`` now and ``arena_high_water`` at most, ``arena_over_budget`` ever taken beyond it, and
        ``rows_waiting`` now and ``rows_high_water`` at most of rows whose chunk is not full. With ``qcap.layerwise``, for layers on their
        way in: ``load_slot_bytes`` on the device, and on the host ``load_arena_bytes``, ``load_arena_used``, ``load_arena_high_water``."""
        arena, query = self._arena, self._query
        report = {
            "ring_bytes": query.on_device_bytes if query is not None else 0,
            "slot_bytes": self._pages.on_device_bytes if self._pages is not None else 0,
        }
        if arena is not None:
            report.update(
                arena_bytes=arena.nbytes, arena_used=arena.used, arena_high_water=arena.high_water, arena_over_budget=arena.over_budget
            )
        if isinstance(query, StreamingQueryFeature):
            report.update(rows_waiting=query.mover.bytes, rows_high_water=query.mover.high_water)
        if self._layer_loads is not None:
            pool = self._layer_loads.arena
            report.update(
                load_slot_bytes=self._layer_loads.device_bytes, load_arena_bytes=pool.nbytes, load_arena_used=pool.used,
                load_arena_high_water=pool.high_water,
            )  # fmt: skip
        return report

    def _log_memory(self, geometry: Geometry) -> None:
        report, query = self.memory_report(), self._query
        if isinstance(query, StreamingQueryFeature):
            budget = query.budget
            logger.info(
                "qcap query ring: %.0f MiB on the device (%d layers of %d tokens in flight, %d rows of all layers); a token is %.0f KiB",
                report["ring_bytes"] / 2**20, budget.windows, budget.max_rows, query.resident.shape[0],
                geometry.num_layers * budget.row_bytes / 1024,
            )  # fmt: skip
        elif query is not None:
            logger.info(
                "qcap query ring, resident: %.0f MiB on the device, %d blocks of %d tokens",
                report["ring_bytes"] / 2**20, query.ring.num_blocks, geometry.block_size,
            )  # fmt: skip
        if self._layer_loads is not None:
            logger.info(
                "qcap loads layer by layer: %.0f MiB of host memory, %.0f MiB on the device",
                report["load_arena_bytes"] / 2**20, report["load_slot_bytes"] / 2**20,
            )  # fmt: skip
        logger.info(
            "qcap host memory: %.0f MiB%s", report["arena_bytes"] / 2**20, ", page-locked" if self._arena and self._arena.pinned else ""
        )

    def _geometry(self, names: list[str], layers: Mapping[str, Any]) -> Geometry:
        model, parallel = self._vllm_config.model_config, self._vllm_config.parallel_config
        spec = next(iter(self._group.specs.values()))
        impl = layers[names[0]].impl
        try:
            rope = certified_rope(getattr(model, "hf_text_config", model.hf_config), engine_ropes())
        except QcapError as error:
            logger.warning("qcap cannot re-rotate this model's keys, so dropped tokens cannot be renumbered: %s", error)
            rope = Rope(kind="unsupported")
        return Geometry(
            model=self.model_name,
            layer_names=tuple(names),
            num_q_heads=model.get_num_attention_heads(parallel),
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=dtype_name(parse_dtype(model.dtype)),
            block_size=self._group.block_size,
            chunk_size=self._config.chunk_size,
            rope=rope,
            tp_size=parallel.tensor_parallel_size,
            tp_rank=_rank(parallel),
            scale=float(getattr(impl, "scale", 0.0) or spec.head_size**-0.5),
            softcap=float(getattr(impl, "logits_soft_cap", 0.0) or 0.0),
            sliding_window=int(getattr(spec, "sliding_window", 0) or 0),
            total_num_kv_heads=model.get_total_num_kv_heads(),
        )

    def _host_bytes(self, geometry: Geometry) -> int:
        """Host memory for what waits to be written: as set, or two of the largest steps, within reason for this machine."""
        kinds = [kind for kind, on in ((CacheKind.KV, self._config.kv), (CacheKind.QUERY, self._config.query)) if on]
        tokens = self._vllm_config.scheduler_config.max_num_batched_tokens or 8192
        chunks = 2 * -(-tokens // geometry.chunk_size)
        wanted = chunks * sum(geometry.chunk_bytes(kind) for kind in kinds)
        return self._config.host_bytes or min(max(wanted, 256 << 20), 8 << 30, max(_available_bytes() // 4, 256 << 20))

    def _make_layer_loads(self, geometry: Geometry, backend: Backend, device: torch.device, arena: HostArena) -> LayerLoads | None:
        """The pipeline of ``qcap.layerwise``, or what loads chunks at once from where they lie in this process's memory; None if there is
        nothing to load, or only what is read whole."""
        if self._config.load == "off" or self._pages is None:
            return None
        layered = self._config.layerwise
        why = why_layers_pass_unseen(self._vllm_config) if layered else ""
        if why:
            logger.warning("qcap.layerwise is off, stored KV is loaded whole before a forward pass: %s", why)
            layered = False
        if not layered and not (backend.keeps_leases and arena.pinned):
            return None
        host_bytes = pool_bytes(
            geometry,
            cache_tokens=self._group.num_blocks * geometry.block_size,
            max_seqs=self._vllm_config.scheduler_config.max_num_seqs,
            max_len=self._vllm_config.model_config.max_model_len,
            available=_available_bytes(),
        )
        loads: LayerLoads | None = None
        try:
            loads = LayerLoads(
                geometry, backend, self._pages.table, device=device, host_bytes=host_bytes if layered else 1, lowest=self._lowest,
                whole=self._load_whole, layered=layered, ahead_bytes=_ahead_bytes(self._config, device, backend),
            )  # fmt: skip
        except Exception as error:  # no memory left on the device, say
            logger.warning("stored KV is read whole, before a forward pass: %s: %s", type(error).__name__, str(error).split("\n", 1)[0])
        (on_all,) = self._lowest([loads is not None])
        if loads is not None and not on_all:
            loads.close()
        if loads is None or not on_all:
            return None
        arena.watch(loads.poll)  # chunks are loaded from where they lie in it
        return loads

    def _query_feature(
        self, geometry: Geometry, layers: Mapping[str, Any], names: list[str], device: torch.device, stager: PageStager
    ) -> QueryFeature | StreamingQueryFeature | None:
        refused = {name: why for name in names if (why := refusal(layers[name]))}
        drafting = getattr(self._vllm_config, "speculative_config", None) is not None
        if drafting and getattr(self._vllm_config.scheduler_config, "async_scheduling", False):
            # The scheduler then counts every draft as accepted, so the positions it announces may be too high, and a rejected draft's row
            # in the block before could pass for the right one.
            refused = dict.fromkeys(names, "drafts with asynchronous scheduling: start the engine with async_scheduling=False")
        if refused:
            self.refused.update(refused)
            logger.error("qcap cannot take queries of this model: %s", next(iter(refused.values())))
            return None
        scheduler, config = self._vllm_config.scheduler_config, self._config
        max_tokens, n = scheduler.max_num_batched_tokens or 8192, geometry.block_size
        plan_blocks = step_block_limit(max_tokens, scheduler.max_num_seqs, n)
        graph_rows = max(getattr(self._vllm_config.compilation_config, "cudagraph_capture_sizes", None) or [0])
        padded = max(max_tokens, graph_rows) + 1024  # to a multiple, for sequence parallelism
        if config.ring_blocks is None and config.ring_depth is None:
            stay = queries_stay({name: layers[name] for name in names}, self._vllm_config)
            feature: QueryFeature | StreamingQueryFeature = self._streaming(
                geometry, max_tokens, graph_rows, plan_blocks, padded, stager, stay
            )
        else:
            blocks = config.ring_blocks or max(ring_blocks_for(max_tokens, n, config.ring_depth or 2), plan_blocks)
            if blocks < plan_blocks and config.on_pressure == "wait":
                raise ConfigError(
                    f"qcap.q.ring_blocks is {blocks} and one step can write {plan_blocks} blocks ({max_tokens} tokens of "
                    f"{scheduler.max_num_seqs} requests in blocks of {n}): queries would be lost, which on_pressure='wait' is to rule out. "
                    f"Set it to {plan_blocks} or more, leave it out for the streaming ring, or set on_pressure='skip'"
                )
            self._check_memory(blocks * n * geometry.num_layers * geometry.hidden(CacheKind.QUERY) * geometry.torch_dtype.itemsize, device)
            feature = QueryFeature(
                geometry,
                device=device,
                dtype=geometry.torch_dtype,
                ring_blocks=blocks,
                max_rows=padded,
                plan_blocks=plan_blocks,
                never_lose=config.on_pressure == "wait",
                stager=stager,
                counters=self.counters,
            )
        return feature

    def _streaming(
        self, geometry: Geometry, max_tokens: int, graph_rows: int, plan_blocks: int, padded: int, stager: PageStager, stay: bool
    ) -> StreamingQueryFeature:
        ring_bytes = self._config.ring_bytes or DEFAULT_RING_BYTES
        row_bytes = geometry.num_layers * geometry.hidden(CacheKind.QUERY) * geometry.torch_dtype.itemsize
        small = graph_rows or max(1, min(SMALL_STEP_ROWS, max_tokens // 2, ring_bytes // (4 * row_bytes)))
        sizes = {"max_rows": max_tokens, "small_rows": small}
        try:
            budget = StreamBudget.plan(geometry, **sizes, ring_bytes=ring_bytes)
        except ConfigError as error:
            if self._config.ring_bytes is not None:
                raise
            budget = StreamBudget.least(geometry, **sizes)
            logger.warning("qcap takes more than its default: %s", error)
        self._check_memory(budget.nbytes, stager.device)
        return StreamingQueryFeature(
            geometry,
            budget,
            num_kv_blocks=self._group.num_blocks,
            plan_blocks=plan_blocks,
            plan_requests=max(self._vllm_config.scheduler_config.max_num_seqs, 1) + 64,
            padded_rows=padded,
            stager=stager,
            counters=self.counters,
            host_bytes=stager.arena.nbytes,
            recorded_layers=self._config.recorded_layers if queries_outlive_their_layer(self._vllm_config) else 1,
            queries_stay=stay,
            debug=self._config.debug,
        )

    def _check_memory(self, needed: int, device: torch.device) -> None:
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else needed
        if needed > free:
            raise ConfigError(
                f"the query ring needs {needed / 2**30:.2f} GiB, and the device has {free / 2**30:.2f} GiB left: lower the engine's "
                "gpu_memory_utilization, or qcap.q.ring_bytes (or qcap.q.ring_blocks, if that is set)"
            )

    def _page_feature(
        self, geometry: Geometry, layers: Mapping[str, Any], names: list[str], kv_caches: Mapping[str, Any], stager: PageStager
    ) -> KVFeature | None:
        """Keys and values, if every layer's layout is certified; else they are refused by name, and queries go on."""
        try:
            layouts = [certify(n, layers[n], kv_caches[n], self._group.specs[n], self._group.num_blocks) for n in names]
            if kv_caches[names[0]].dtype != geometry.torch_dtype:
                raise Unsupported(f"a {kv_caches[names[0]].dtype} cache beside a {geometry.dtype} model")
            feature = KVFeature(geometry, [kv_caches[n] for n in names], layouts, stager, strict=not self._group.alone)
        except (Unsupported, ValueError, KeyError) as error:
            self.counters["kv.refused"] += 1
            self.refused["kv"] = str(error)
            logger.error("qcap stores and loads no KV here: %s", error)
            return None
        self.layout = layouts[0].name
        return feature

    def _engine_info(self, kv_caches: Mapping[str, Any], rope: Rope) -> dict[str, str]:
        import vllm

        return {
            "vllm": vllm.__version__,
            "qcap": __version__,
            "torch": torch.__version__,
            "device": next(iter(kv_caches.values())).device.type,
            "host": platform.machine(),
            "layout": self.layout,
            "engine_id": self._engine_id,
            NUMERICS: json.dumps(numerics(self._vllm_config.model_config, rope), default=str),
        }

    # ---- the step -----------------------------------------------------------------------------------------------------------------

    def loads_here(self) -> LayerLoads | None:
        """The loads of this worker, for a caller on the thread that runs its steps."""
        return self._layer_loads if self._thread == threading.get_ident() else None

    def begin(self, step: Step) -> None:
        """Before anything of the step runs on the device."""
        self._end_loads(lost=True)  # of a step whose end never came
        self._step, self._thread = step, threading.get_ident()
        if not step.loads and self._layer_loads is not None:
            self._layer_loads.forget_early()
        capture = self.capture
        if capture is not None:
            with capture.guard("beginning a step"):
                capture.begin_step(step)

    def load(self) -> None:
        """Fill pages with stored chunks, before the forward pass, or start to; what cannot be loaded is reported and recomputed."""
        step = self._step
        if step is None or not step.loads:
            return
        loads, self._step = step.loads, None
        pipeline = self._layer_loads
        if pipeline is not None:
            if pipeline.layered:
                pipeline.begin(loads)
            else:
                self._note_loads(pipeline.at_once(loads))
            return
        for load in loads:
            loaded: list[LoadedChunk] = []
            problem: Exception | None = None
            try:
                loaded = self._fetch(load)
            except Exception as error:
                problem = error
            try:
                self._agree(problem, loaded)
                self._put(load, loaded)
                self.counters["load.tokens"] += load.end - load.start
            except Exception as error:
                self._load_failed(load, error)

    def layer_needed(self, name: str) -> None:
        """Layer ``name`` is about to read its pages."""
        loads = self._layer_loads
        if loads is not None and loads.active:
            index = self._layer_index.get(name)
            if index is not None:
                loads.layer(index)

    def _end_loads(self, *, lost: bool = False) -> None:
        """No page is written any more on behalf of this step; see what became of it. Does nothing the second time."""
        loads = self._layer_loads
        if loads is None or not loads.active:
            return
        self._note_loads(loads.end(lost=lost))
        if loads.unseen:
            logger.warning("qcap.layerwise is off from now on: a forward pass ran without asking for its layers, and was done in vain")
            self._layer_loads = None
            _close_loads(loads)

    def _note_loads(self, outcomes: Sequence[LoadOutcome]) -> None:
        assert self._layer_loads is not None
        for outcome in outcomes:
            if outcome.problem is not None:
                self._load_failed(outcome.load, outcome.problem)
                continue
            self.counters["load.tokens"] += outcome.load.end - outcome.load.start
            self.counters["load.layerwise"] += outcome.layerwise and self._layer_loads.layered
            self.counters["load.resting"] += outcome.resting
            self.counters["load.early"] += outcome.early

    def _load_failed(self, load: LoadRequest, error: Exception) -> None:
        """The blocks hold garbage: vLLM computes them, and nothing that this step computed on them is stored."""
        self.counters["load.failed"] += 1
        often.error(
            "request %s: its KV under salt %r cannot be loaded, tokens %d..%d are computed instead: %s",
            load.request_id, load.salt, load.start, load.end, error,
        )  # fmt: skip
        blocks = set(load.block_ids[load.start // self._group.block_size :])
        self._failed_blocks |= blocks
        if self.capture is not None:
            self.capture.mark_invalid(blocks, "load-failed")

    def _fetch(self, load: LoadRequest) -> list[LoadedChunk]:
        """The load's chunks, all checked before the first page is written."""
        capture = self.capture
        if capture is None or self._pages is None:
            raise Unsupported(self.refused.get("kv", "this engine's KV layout is not certified"))
        geometry, size = capture.geometry, capture.geometry.chunk_size
        loaded: list[LoadedChunk] = []
        first = load.start // size
        for index in range(first_to_check(load, size), -(-load.end // size)):
            chunk = capture.backend.load(chunk_key(CacheKind.KV, geometry, load.digests[index], load.salt))
            if chunk is None:
                if index < first:
                    continue
                raise QcapError(f"chunk {index} is no longer in the store")
            check_record(chunk.record, geometry, load.token_ids[index * size : (index + 1) * size], index * size)
            loaded.append(chunk)
        check_edits([chunk.record for chunk in loaded], load.behind)
        return [chunk for chunk in loaded if chunk.record.start >= first * size]

    def _lowest(self, values: list[int]) -> list[int]:
        """Of each value the least that a tensor-parallel rank has."""
        if self.capture is None or self.capture.geometry.tp_size == 1:
            return values
        from vllm.distributed import get_tp_group

        least = torch.tensor(values, dtype=torch.int64)
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group)
        return [int(value) for value in least]

    def _agree(self, problem: Exception | None, loaded: list[LoadedChunk]) -> None:
        """All tensor-parallel ranks load the same chunks of the same edit, or none does.

        Raises:
            Exception: this rank's ``problem``, or that another rank had one.
        """
        edits = edits_digest([chunk.record for chunk in loaded])
        good, low, high = self._lowest([problem is None, edits, -edits])
        if problem is not None:
            raise problem
        if not good or low != -high:
            raise QcapError("another rank cannot load these chunks" if not good else "the ranks' chunks are of different edits")

    def _put(self, load: LoadRequest, loaded: list[LoadedChunk]) -> None:
        assert self.capture is not None and self._pages is not None
        n, size = self.capture.geometry.block_size, self.capture.geometry.chunk_size
        for chunk in loaded:
            start = chunk.record.start
            first, last = max(load.start, start), min(load.end, start + size)
            self._pages.put(load.block_ids[first // n : last // n], chunk.tensor[:, :, first - start : last - start])

    def _load_whole(self, load: LoadRequest) -> None:
        """One request's load, at once, on this rank. Raises what went wrong."""
        self._put(load, self._fetch(load))

    def _on_query(self, layer: int, name: str, query: torch.Tensor, attn_metadata: Any) -> None:
        feature, capture = self._query, self.capture
        if feature is None or capture is None or not (feature.active or self._always_launch) or feature not in capture.features:
            return
        try:
            slots = slot_mapping_of(name, attn_metadata)
            if slots is None:
                if feature.active and layer == 0:
                    self.counters["query.steps_without_slots"] += 1
                    often.warning("no slot mapping in this step: its queries are not captured")
                return
            if query.dtype != feature.dtype:
                raise Unsupported(f"{name}: queries are {query.dtype}, the ring is {feature.dtype}: quantised queries are not stored yet")
            feature.on_layer(layer, query, slots)
        except Exception as error:  # without a guard: this is run for every layer
            capture.failed(f"capturing queries in {name}", error, feature)

    def layer_done(self, name: str) -> None:
        """Layer ``name`` has been queued, by Python."""
        capture = self.capture
        if capture is None:
            return
        index = self._layer_index.get(name)
        if index is not None:
            try:
                capture.layer_done(index)
            except Exception as error:
                capture.failed("moving a layer", error)

    def end(self) -> None:
        """The forward pass has been queued."""
        self._end_loads()
        if self.capture is not None:
            with self.capture.guard("ending a step"):
                self.capture.end_step()

    def finish(self, update: TokenUpdate | None, done: FinishedRequest) -> None:
        """A request ended, told from inside this process."""
        capture = self.capture
        if capture is not None:
            with capture.guard("finishing a request"):
                capture.finished(update, done)
            self.settle()

    def settle(self) -> None:
        """A step is over. With nothing left to serve, and ``on_pressure="wait"``, the engine waits until all is in the store."""
        capture = self.capture
        if self._layer_loads is not None:
            self._layer_loads.poll()
        if capture is not None and self._config.on_pressure == "wait" and capture.idle():
            with capture.guard("waiting for the store"):
                capture.backend.drain()

    def take_failed_blocks(self) -> set[int]:
        """KV blocks that could not be filled since the last time. vLLM may ask before it says that the forward pass is over."""
        self._end_loads()
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        """Unhook, give everything back, wait for the store."""
        if self.hooks is not None:
            self.hooks.remove()
        loads, self._layer_loads = self._layer_loads, None
        if loads is not None:
            _close_loads(loads)
        capture, self.capture = self.capture, None
        if capture is not None:
            try:
                capture.close()
            except Exception:
                logger.exception("qcap: closing the capture failed")
            logger.info("qcap: %s", dict(sorted(self.counters.items())))
        self.hooks = self._query = self._pages = None


def _ahead_bytes(config: CaptureConfig, device: torch.device, backend: Backend) -> int:
    """Device memory for loads that begin early: as set, or as much as is easily spared."""
    if device.type != "cuda" or not backend.keeps_leases:
        return 0
    if config.load_ahead_bytes is not None:
        return config.load_ahead_bytes
    return min(AHEAD_BYTES[config.load], torch.cuda.mem_get_info(device)[0] // 8)


def _close_loads(loads: LayerLoads) -> None:
    try:
        loads.close()
    except Exception:  # a device that is lost; what was captured still goes to the store
        logger.exception("qcap: giving up loads failed")


def _available_bytes() -> int:
    """Host memory that is free now, as far as that can be told."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 32 << 30


_NUMERICS = (
    "hidden_size intermediate_size num_hidden_layers hidden_act hidden_activation rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps "
    "attention_bias qkv_bias mlp_bias query_pre_attn_scalar attn_logit_softcapping attention_multiplier embedding_multiplier "
    "residual_multiplier num_experts_per_tok norm_topk_prob routed_scaling_factor use_qk_norm clip_qkv scale_emb scale_depth "
    "activation_function use_parallel_residual moe_intermediate_size n_group topk_group scoring_func swiglu_limit layer_types "
    "no_rope_layers"
).split()
"""Fields of a model's config that its rows depend on, and that the geometry does not hold."""


def numerics(model: Any, rope: Rope) -> dict[str, Any]:
    """What rows of an engine's ``model_config`` depend on beside weights and geometry: plain JSON values.

    Quantization is what the checkpoint says, where it says it: the engine's own names for it are those of its implementations, which
    change with versions and devices. The config's rope is part of it only if the geometry does not hold it.
    """
    config = getattr(model, "hf_text_config", model.hf_config)
    said = {name: getattr(config, name, None) for name in _NUMERICS}
    quantized = getattr(config, "quantization_config", None) or getattr(model.hf_config, "quantization_config", None)
    if isinstance(quantized, Mapping):
        said["quantization"] = [quantized.get(name) for name in ("quant_method", "bits")]
    else:
        said["quantization"] = str(getattr(model, "quantization", None))
    if rope.kind == "unsupported":
        said["rope"] = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling", "rope_theta")]
    return {name: value for name, value in said.items() if isinstance(value, str | int | float | bool | list)}


def certified_rope(config: Any, modules: Sequence[Any]) -> Rope:
    """The model's rope as its config has it, if one of the engine's own cos/sin tables agrees.

    Args:
        config: the HF (text) config.
        modules: the rotary embedding modules of this process: the model's, and those of earlier engines, draft models, vision towers.

    Raises:
        Unsupported: the config's rope cannot be re-rotated, or no table of the engine says the same.
    """
    said = rope_from_hf_config(config)
    if said.kind == "none":
        return said
    if not modules:
        raise Unsupported(f"the config says rope {said.kind!r}, but the engine shows no table to check it against")
    agreeing: list[Rope] = []
    refusals: list[str] = []
    for module in modules:
        rope = rope_from_hf_config(config, interleaved=not getattr(module, "is_neox_style", True))
        problem = _table_differs(rope, getattr(module, "cos_sin_cache", None))
        if problem:
            refusals.append(problem)
        elif rope not in agreeing:
            agreeing.append(rope)
    if len(agreeing) != 1:
        raise Unsupported("; ".join(refusals) if not agreeing else "modules of both pairings agree with the config's rope")
    return agreeing[0]


def _table_differs(rope: Rope, table: Any) -> str:
    """Why an engine's ``cos_sin_cache`` ``[positions, rotary_dim]`` (cos, then sin) is not that of ``rope``; "" if it is."""
    inv_freq = rope.inv_freq().double()
    if not isinstance(table, torch.Tensor) or table.dim() != 2 or table.shape[1] != 2 * len(inv_freq):
        return f"the config rotates {2 * len(inv_freq)} dims, the engine's table is {getattr(table, 'shape', None)}"
    at = torch.tensor(sorted({1, 2, 17, 100, table.shape[0] // 3, table.shape[0] - 1}))
    cos, sin = table[at.to(table.device)].double().cpu().chunk(2, dim=1)
    size = (cos**2 + sin**2).sqrt()  # yarn scales both by one factor
    angles = at[:, None].double() * inv_freq
    error = max(float((cos / size - angles.cos()).abs().max()), float((sin / size - angles.sin()).abs().max()))
    rounded = table.dtype in (torch.bfloat16, torch.float16)
    limit = max(1e-5, 2e-2 if rounded else 2e-6 * float(at.max()))  # a float32 angle is wrong by up to 6e-8 of itself
    return f"the config's rope {rope.kind!r} and the engine's table differ by {error:.1g}" if error > limit else ""


def _rank(parallel: Any) -> int:
    try:
        from vllm.distributed import get_tensor_model_parallel_rank

        return int(get_tensor_model_parallel_rank())
    except (ImportError, AssertionError):
        return int(parallel.rank) % int(parallel.tensor_parallel_size)
