"""``QcapConnector``: vLLM's KV connector interface, mapped to :class:`SchedulerSide` and :class:`WorkerSide`. Fits vLLM 0.20 to 0.32."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from qcap.attribution import Step
from qcap.backends import open_backend
from qcap.config import CaptureConfig, parse_bool
from qcap.errors import ConfigError, Unsupported
from qcap.geometry import dtype_name, parse_dtype
from qcap.vllm.layouts import CacheGroup, pick_group
from qcap.vllm.scheduler import KeyParts, SchedulerSide
from qcap.vllm.worker import EarlyInProcess, WorkerSide, finish_in_process

logger = logging.getLogger("qcap.vllm")
T = TypeVar("T")
if not logging.getLogger("qcap").handlers:
    logging.getLogger("qcap").parent = logging.getLogger("vllm")  # in an engine's process, qcap speaks where and as vLLM does


@dataclass
class QcapMetadata(KVConnectorMetadata):
    """One step's :class:`~qcap.attribution.Step`, on its way to the workers."""

    step: Step


class QcapConnector(KVConnectorBase_V1, SupportsHMA):
    """Captures Q and KV of a stock vLLM, and loads stored KV for requests that ask for it by their cache salt.

    Settings are the ``qcap.*`` keys of ``kv_connector_extra_config``; see :class:`~qcap.config.CaptureConfig`.

    Raises:
        ConfigError: a setting is unknown or illegal, or the chunk size does not fit the block size.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer is None:
            raise ConfigError("no kv_transfer_config: build one with qcap.vllm.transfer_config(store_url)")
        self._config = _for_role(CaptureConfig.from_extra(transfer.kv_connector_extra_config), str(transfer.kv_role))
        self._warned = False
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._engine_id = str(transfer.engine_id)
        _refuse_parallelism(vllm_config.parallel_config)
        if self._config.store.startswith("memory:") and multiprocessing.parent_process() is not None:
            raise ConfigError(
                "memory:// lives in one process, and this engine runs in another: use file://, or VLLM_ENABLE_V1_MULTIPROCESSING=0"
            )
        try:
            group: CacheGroup | None = pick_group(kv_cache_config, _hidden_layers(vllm_config))
        except Unsupported as error:
            logger.warning("qcap captures nothing: %s", error)
            return
        assert group is not None
        self._config = _with_safe_loading(self._config, vllm_config, group, len(kv_cache_config.kv_cache_groups))
        if self._config.chunk_size % group.block_size:
            raise ConfigError(
                f"qcap.chunk_size {self._config.chunk_size} is not a multiple of the engine's block size {group.block_size}: "
                f"set qcap.chunk_size to a multiple of it, or the engine's block_size to a divisor of the chunk size"
            )
        model = vllm_config.model_config
        name = self._config.model_name or str(model.model)
        if role == KVConnectorRole.WORKER:
            self._worker = WorkerSide(vllm_config, self._config, group, name)
            return
        self._scheduler = SchedulerSide(
            self._config,
            KeyParts(name, vllm_config.parallel_config.tensor_parallel_size, dtype_name(parse_dtype(model.dtype))),
            group=group.index,
            block_size=group.block_size,
            backend=lambda: open_backend(self._config.store),
            speculative=getattr(vllm_config, "speculative_config", None) is not None,
            finish_now=lambda update, done: finish_in_process(self._engine_id, update, done),
            # It reaches API clients: a URL with credentials or options in it is not theirs to see.
            note={"store": "" if set("@?") & set(self._config.store) else self._config.store, "engine_id": self._engine_id},
            early=EarlyInProcess(self._engine_id),
        )

    # ---- class level --------------------------------------------------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Only loads that go layer by layer need Python between layers; queries are captured by kernels that full graphs record.

        Raises:
            ConfigError: ``qcap.layerwise`` is not true or false.
        """
        return parse_bool("qcap.layerwise", extra_config.get("qcap.layerwise") or False)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Any certified layout will do."""
        return None

    @property
    def requires_kv_delivery(self) -> bool:
        """A recorder: no request depends on it."""
        return False

    # ---- worker -------------------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """vLLM's pages exist."""
        if self._worker is not None:
            self._worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins (``start_load_kv`` may come after the forward pass)."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is None:
            return
        if not isinstance(connector_metadata, QcapMetadata):
            self._warn_once("no metadata of qcap's in a step (%s): nothing is captured or loaded in it", type(connector_metadata).__name__)
            self._worker.begin(Step(0))
            return
        self._worker.begin(connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fill pages, if this step has loads; with ``qcap.layerwise``, start to."""
        if self._worker is not None:
            self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """With ``qcap.layerwise``, what is queued on the current stream from here on sees this layer's stored rows."""
        if self._worker is not None:
            self._worker.layer_needed(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer has been queued: what it wrote may leave."""
        if self._worker is not None:
            self._worker.layer_done(layer_name)

    def wait_for_save(self) -> None:
        """The forward pass of this step has been queued."""
        if self._worker is not None:
            self._worker.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """No request's blocks are ever held back."""
        if self._worker is not None:
            self._worker.settle()
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be filled in this step."""
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    def shutdown(self) -> None:
        """Everything captured reaches the store before the process goes."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    def _warn_once(self, message: str, *args: object) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(message, *args)

    def _guarded(self, what: str, nothing: T, call: Callable[[SchedulerSide], T]) -> T:
        """``call`` on the scheduler's half, or ``nothing`` if it is off. An error turns it off for good: the engine goes on without us."""
        scheduler = self._scheduler
        if scheduler is None:
            return nothing
        try:
            return call(scheduler)
        except Exception:
            self._scheduler = None
            logger.exception("qcap: %s failed; nothing is captured or loaded from now on, the engine goes on", what)
            return nothing

    # ---- scheduler ----------------------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How much stored KV can be loaded beyond what vLLM has."""
        nothing: int | None = 0
        return self._guarded("matching", nothing, lambda s: s.matched_tokens(request, num_computed_tokens)), False

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM's block pool exists."""
        self._guarded("binding the block pool", None, lambda s: s.bind_block_pool(gpu_block_pool))

    def on_new_request(self, request: Any) -> None:
        """A request was added."""
        self._guarded("receiving a request", None, lambda s: s.arrived(request))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM gave the request its blocks."""
        self._guarded("following a request", None, lambda s: s.allocated(request, num_external_tokens, blocks))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the workers must know of this step."""
        return QcapMetadata(self._guarded("describing a step", Step(0), lambda s: s.step(scheduler_output)))

    def update_connector_output(self, connector_output: Any) -> None:
        """Remember which loads failed, so that they are not claimed again."""
        failed = getattr(connector_output, "invalid_block_ids", None)
        if failed:
            self._guarded("noting a failed load", None, lambda s: s.load_failed(set(failed)))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; its blocks may be freed at once."""
        return False, self._guarded("finishing a request", None, lambda s: s.finished(request))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """The same, for engines with several KV cache groups."""
        return self.request_finished(request, block_ids[0] if block_ids else [])


def _refuse_parallelism(parallel: Any) -> None:
    """Pipeline stages and context-parallel ranks would write different rows under one key.

    Raises:
        ConfigError: the engine uses one of them.
    """
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if int(getattr(parallel, name, 1) or 1) > 1:
            raise ConfigError(f"qcap does not support {name}={getattr(parallel, name)} yet: start the engine without it, or without qcap")


def _for_role(config: CaptureConfig, role: str) -> CaptureConfig:
    """A ``kv_consumer`` stores nothing, a ``kv_producer`` loads nothing."""
    if role == "kv_consumer":
        return replace(config, kv=False, query=False)
    return replace(config, load="off") if role == "kv_producer" else config


def _with_safe_loading(config: CaptureConfig, vllm_config: Any, group: CacheGroup, groups: int) -> CaptureConfig:
    """``config``, with loading off where vLLM would take tokens as computed whose rows a load does not bring, or could not survive a
    failed load."""
    if config.load == "off":
        return config
    cache_dtype = str(getattr(vllm_config.cache_config, "cache_dtype", "auto"))
    own = str(vllm_config.model_config.dtype).removeprefix("torch.")
    why = ""
    if groups > 1 or not group.whole:
        why = "layers outside the captured group keep their own cache, which is not stored"
    elif cache_dtype not in ("auto", own):
        why = f"the KV cache is {cache_dtype}"
    if why:
        logger.warning("qcap loads no stored KV here: %s", why)
        return replace(config, load="off")
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        logger.warning("qcap sets kv_load_failure_policy to 'recompute': KV that cannot be loaded is computed, not an error for the user")
        transfer.kv_load_failure_policy = "recompute"
    return config


def _hidden_layers(vllm_config: Any) -> int | None:
    config = getattr(vllm_config.model_config, "hf_text_config", None)
    return getattr(config, "num_hidden_layers", None)
