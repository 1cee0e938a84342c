"""The worker's half: hooks, pages, capture and loading on one rank."""

from __future__ import annotations

import logging
import platform
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from qcap._version import __version__
from qcap.attribution import FinishedRequest, LoadRequest, Step, TokenUpdate, ring_blocks_for, step_block_limit
from qcap.backends import open_backend
from qcap.capture import Capture, Feature, HostBuffers, KVFeature, QueryFeature, Stager, ring_bytes
from qcap.config import CaptureConfig
from qcap.errors import GeometryMismatch, ObjectCorrupt, QcapError, Unsupported
from qcap.geometry import Geometry, Rope, dtype_name
from qcap.kinds import CacheKind
from qcap.rope import rope_from_hf_config
from qcap.store.metrics import RateLimitedLog
from qcap.store.tiers import LoadedChunk
from qcap.tokens import chunk_key
from qcap.vllm.hooks import QueryHooks, attention_layers, engine_ropes, slot_mapping_of
from qcap.vllm.layouts import CacheGroup, certify

logger = logging.getLogger("qcap.vllm")
often = RateLimitedLog(logger)

_local: weakref.WeakValueDictionary[str, WorkerSide] = weakref.WeakValueDictionary()


def finish_in_process(engine_id: str, update: TokenUpdate | None, done: FinishedRequest) -> bool:
    """Tell the worker of ``engine_id`` in this process that a request ended; False if it lives elsewhere."""
    worker = _local.get(engine_id)
    if worker is None:
        return False
    worker.finish(update, done)
    return True


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
        self._query: QueryFeature | None = None
        self._pages: KVFeature | None = None
        self._failed_blocks: set[int] = set()
        self._step: Step | None = None
        self._always_launch = False

    # ---- start --------------------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # buffers made in inference mode could not be written to outside of it
    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """vLLM has allocated its pages: certify layouts, size the ring, hook the layers, publish the manifest.

        Raises:
            GeometryMismatch: the store holds another model's geometry under this name (only with ``on_pressure="wait"``).
        """
        self.close()  # registered before, with other pages: nothing of that may stay
        layers = attention_layers(self._vllm_config)
        names = [name for name in self._group.specs if name in layers]
        if not kv_caches or not names:
            logger.warning("qcap captures nothing: %s", "no KV caches" if not kv_caches else "no attention layers it knows")
            return
        device = next(t.device for t in kv_caches.values() if isinstance(t, torch.Tensor))
        geometry = self._geometry(names, layers)
        buffers = HostBuffers(pinned=device.type == "cuda", keep_bytes=self._config.host_bytes)
        stager = Stager(device, buffers)
        self._always_launch = device.type == "cuda"
        features: list[Feature] = []
        if self._config.query:
            self._query = self._query_feature(geometry, layers, names, device, stager)
            if self._query is not None:
                features.append(self._query)
        self._pages = self._page_feature(geometry, layers, names, kv_caches, stager)
        if self._config.kv and self._pages is not None:
            features.append(self._pages)
        backend = open_backend(self._config.store, on_pressure=self._config.on_pressure, host_bytes=self._config.host_bytes)
        self.capture = Capture(
            geometry,
            backend,
            features,
            engine_id=self._engine_id,
            write_receipts=geometry.tp_rank == 0 and (self._config.kv or self._config.query),
            buffers=buffers,
            counters=self.counters,
            refused={
                kind: "unsupported"
                for kind, wanted, got in ((CacheKind.KV, self._config.kv, self._pages), (CacheKind.QUERY, self._config.query, self._query))
                if wanted and got is None
            },
        )
        if geometry.tp_rank == 0:
            try:
                backend.put_manifest(geometry, [f.kind for f in features], self._engine_info(kv_caches))
            except GeometryMismatch:
                if self._config.on_pressure == "wait":
                    raise
                logger.exception("qcap captures nothing")
                for feature in features:
                    self.capture.turn_off(feature)
        if self._query is not None:
            self.hooks = QueryHooks({name: layers[name] for name in names}, self._on_query)
            self.hooks.install()
        _local[self._engine_id] = self
        for name, reason in self.refused.items():
            logger.warning("qcap leaves out layer %s: %s", name, reason)
        logger.info(
            "qcap captures %s of %s (%d layers) into %s", " and ".join(f.kind.value for f in features) or "nothing", geometry.model,
            geometry.num_layers, self._config.store,
        )  # fmt: skip

    def _geometry(self, names: list[str], layers: Mapping[str, Any]) -> Geometry:
        model, parallel = self._vllm_config.model_config, self._vllm_config.parallel_config
        spec = next(iter(self._group.specs.values()))
        impl = layers[names[0]].impl
        try:
            rope = certified_rope(getattr(model, "hf_text_config", model.hf_config), engine_ropes())
        except QcapError as error:
            logger.warning("qcap cannot re-rotate this model's keys, so dropped tokens cannot be renumbered: %s", error)
            rope = Rope(kind=f"unsupported: {error}")
        dtype = model.dtype if isinstance(model.dtype, torch.dtype) else getattr(torch, str(model.dtype).removeprefix("torch."))
        return Geometry(
            model=self.model_name,
            layer_names=tuple(names),
            num_q_heads=model.get_num_attention_heads(parallel),
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=dtype_name(dtype),
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

    def _query_feature(
        self, geometry: Geometry, layers: Mapping[str, Any], names: list[str], device: torch.device, stager: Stager
    ) -> QueryFeature | None:
        refused = QueryHooks({name: layers[name] for name in names}, self._on_query).refused
        if refused:
            self.refused.update(refused)
            logger.error("qcap cannot take queries of this model: %s", next(iter(refused.values())))
            return None
        scheduler = self._vllm_config.scheduler_config
        max_tokens = scheduler.max_num_batched_tokens or 8192
        n, config = geometry.block_size, self._config
        plan_blocks = step_block_limit(max_tokens, scheduler.max_num_seqs, n)
        blocks = config.ring_blocks or max(ring_blocks_for(max_tokens, n, config.ring_depth), plan_blocks)
        dtype = geometry.torch_dtype
        logger.info(
            "qcap query ring: %d blocks of %d tokens, %.1f MiB on %s", blocks, n, ring_bytes(geometry, blocks, dtype) / 2**20, device
        )
        graph_rows = max(getattr(self._vllm_config.compilation_config, "cudagraph_capture_sizes", None) or [0])
        return QueryFeature(
            geometry,
            device=device,
            dtype=dtype,
            ring_blocks=blocks,
            max_rows=max(max_tokens, graph_rows) + 1024,  # padding to a multiple, for sequence parallelism
            plan_blocks=plan_blocks,
            never_lose=config.on_pressure == "wait",
            stager=stager,
            counters=self.counters,
        )

    def _page_feature(
        self, geometry: Geometry, layers: Mapping[str, Any], names: list[str], kv_caches: Mapping[str, Any], stager: Stager
    ) -> KVFeature | None:
        """Keys and values, if every layer's layout is certified; else they are refused by name, and queries go on."""
        try:
            layouts = [certify(n, layers[n], kv_caches[n], self._group.specs[n], self._group.num_blocks) for n in names]
            if kv_caches[names[0]].dtype != geometry.torch_dtype:
                raise Unsupported(f"a {kv_caches[names[0]].dtype} cache beside a {geometry.dtype} model")
            feature = KVFeature(geometry, [kv_caches[n] for n in names], layouts, stager)
        except (Unsupported, ValueError, KeyError) as error:
            self.counters["kv.refused"] += 1
            self.refused["kv"] = str(error)
            logger.error("qcap stores and loads no KV here: %s", error)
            return None
        self.layout = layouts[0].name
        return feature

    def _engine_info(self, kv_caches: Mapping[str, Any]) -> dict[str, str]:
        import vllm

        return {
            "vllm": vllm.__version__,
            "qcap": __version__,
            "torch": torch.__version__,
            "device": next(iter(kv_caches.values())).device.type,
            "host": platform.machine(),
            "layout": getattr(self, "layout", ""),
            "engine_id": self._engine_id,
        }

    # ---- the step -----------------------------------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Before anything of the step runs on the device."""
        self._step = step
        capture = self.capture
        if capture is not None:
            with capture.guard("beginning a step"):
                capture.begin_step(step)

    def load(self) -> None:
        """Fill pages with stored chunks, before the forward pass; what cannot be loaded is reported and recomputed."""
        step = self._step
        if step is None or not step.loads:
            return
        loads, self._step = step.loads, None
        for load in loads:
            try:
                self._load(load)
                self.counters["load.tokens"] += load.end - load.start
            except Exception as error:
                self.counters["load.failed"] += 1
                often.error(
                    "request %s: its KV under salt %r cannot be loaded, tokens %d..%d are computed instead: %s",
                    load.request_id, load.salt, load.start, load.end, error,
                )  # fmt: skip
                blocks = set(load.block_ids[load.start // self._group.block_size :])
                self._failed_blocks |= blocks
                if self.capture is not None:
                    self.capture.mark_invalid(blocks, "load-failed")

    def _load(self, load: LoadRequest) -> None:
        capture, pages = self.capture, self._pages
        if capture is None or pages is None:
            raise Unsupported(self.refused.get("kv", "this engine's KV layout is not certified"))
        geometry = capture.geometry
        n, size = geometry.block_size, geometry.chunk_size
        loaded = []
        for index in range(load.start // size, -(-load.end // size)):  # all checked before the first page is written
            key = chunk_key(CacheKind.KV, geometry, load.digests[index], load.salt)
            chunk = capture.backend.load(key)
            if chunk is None:
                raise QcapError(f"chunk {index} is no longer in the store")
            self._check(chunk, geometry, load.token_ids[index * size : (index + 1) * size], index * size)
            loaded.append((index, chunk.tensor))
        for index, tensor in loaded:
            first, last = max(load.start, index * size), min(load.end, (index + 1) * size)
            pages.put(load.block_ids[first // n : last // n], tensor[:, :, first - index * size : last - index * size])

    @staticmethod
    def _check(chunk: LoadedChunk, geometry: Geometry, token_ids: tuple[int, ...], start: int) -> None:
        record = chunk.record
        geometry.check_same(record.geometry, "the stored chunk")
        if record.kind is not CacheKind.KV or record.token_ids != token_ids:
            raise ObjectCorrupt(f"the object under this key holds other tokens ({record.kind.value} from {record.start})")
        if record.positions != tuple(range(start, start + len(token_ids))):
            raise Unsupported("its keys keep the positions they had before tokens were dropped; an engine needs them renumbered")

    def _on_query(self, layer: int, name: str, query: torch.Tensor, attn_metadata: Any) -> None:
        feature, capture = self._query, self.capture
        if feature is None or capture is None or feature not in capture.features or not (feature.active or self._always_launch):
            return
        with capture.guard(f"capturing queries in {name}", feature):
            slots = slot_mapping_of(name, attn_metadata)
            if slots is None:
                if feature.active and layer == 0:
                    self.counters["query.steps_without_slots"] += 1
                    often.warning("no slot mapping in this step: its queries are not captured")
                return
            if query.dtype != feature.dtype:
                raise Unsupported(f"{name}: queries are {query.dtype}, the ring is {feature.dtype}: quantised queries are not stored yet")
            feature.on_layer(layer, query, slots)

    def end(self) -> None:
        """The forward pass has been queued."""
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
        """With nothing left to serve, and ``on_pressure="wait"``, the engine waits until all is in the store."""
        capture = self.capture
        if capture is not None and self._config.on_pressure == "wait" and capture.idle():
            with capture.guard("waiting for the store"):
                capture.backend.drain()

    def take_failed_blocks(self) -> set[int]:
        """KV blocks that could not be filled since the last time."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        """Unhook, give everything back, wait for the store."""
        if self.hooks is not None:
            self.hooks.remove()
        capture, self.capture = self.capture, None
        if capture is not None:
            try:
                capture.close()
            except Exception:
                logger.exception("qcap: closing the capture failed")
            logger.info("qcap: %s", dict(sorted(self.counters.items())))
        self.hooks = self._query = self._pages = None


def certified_rope(config: Any, modules: Sequence[Any]) -> Rope:
    """The model's rope as its config has it, if the engine's own cos/sin table agrees.

    Args:
        config: the HF (text) config.
        modules: the engine's rotary embedding modules.

    Raises:
        Unsupported: the config's rope cannot be re-rotated, layers rotate in more than one way, or the engine's table says otherwise.
    """
    styles = {bool(m.is_neox_style) for m in modules if hasattr(m, "is_neox_style")}
    tables = [m.cos_sin_cache for m in modules if isinstance(getattr(m, "cos_sin_cache", None), torch.Tensor)]
    if len(styles) > 1 or len(tables) > 1:
        raise Unsupported(f"the engine rotates in {len(tables)} ways, one for some layers and another for others")
    rope = rope_from_hf_config(config, interleaved=None if not styles else not styles.pop())
    inv_freq = rope.inv_freq().double()
    if not tables:
        if rope.kind != "none":
            raise Unsupported(f"the config says rope {rope.kind!r}, but the engine shows no table to check it against")
        return rope
    table = tables[0]
    if table.dim() != 2 or table.shape[1] != 2 * len(inv_freq):
        raise Unsupported(f"the config rotates {2 * len(inv_freq)} dims, the engine's table is {tuple(table.shape)}")
    at = torch.tensor(sorted({1, 2, 17, 100, table.shape[0] // 3, table.shape[0] - 1}))
    cos, sin = table[at.to(table.device)].double().cpu().chunk(2, dim=1)
    size = (cos**2 + sin**2).sqrt()  # yarn scales both by one factor
    angles = at[:, None].double() * inv_freq
    error = max(float((cos / size - angles.cos()).abs().max()), float((sin / size - angles.sin()).abs().max()))
    rounded = table.dtype in (torch.bfloat16, torch.float16)
    limit = 2e-2 if rounded else 2e-6 * float(at.max())  # a float32 angle is wrong by up to 6e-8 of itself
    if error > max(limit, 1e-5):
        raise Unsupported(f"the config's rope {rope.kind!r} and the engine's table differ by {error:.1g}")
    return rope


def _rank(parallel: Any) -> int:
    try:
        from vllm.distributed import get_tensor_model_parallel_rank

        return int(get_tensor_model_parallel_rank())
    except (ImportError, AssertionError):
        return int(parallel.rank) % int(parallel.tensor_parallel_size)
