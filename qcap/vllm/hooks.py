"""The one file that touches vLLM's insides: it replaces ``layer.impl.forward`` on attention layers, on enter, and puts it back on exit.

The attribute is looked up inside an opaque custom op at call time, so the replacement is seen in eager mode, under ``torch.compile``, and
while a CUDA graph is recorded (a replay runs what was recorded, without Python). Each target is checked: it must exist and have the
expected parameters. What was changed is in :attr:`QueryHooks.hooked`, what was not, with the reason, in :attr:`QueryHooks.refused`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch

_PARAMETERS = ("layer", "query", "key", "value", "kv_cache", "attn_metadata")

OnQuery = Callable[[int, str, torch.Tensor, Any], None]
"""Called with (index of the layer, its name, queries, attention metadata)."""


def attention_layers(vllm_config: Any) -> dict[str, Any]:
    """The model's attention layers by name, from vLLM's static forward context."""
    context = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if hasattr(layer, "impl")}


def refusal(layer: Any) -> str:
    """Why ``layer``'s queries cannot be taken at ``impl.forward``; "" if they can."""
    names = {base.__name__ for base in type(layer).__mro__}
    if "MLAAttention" in names:
        return "multi-head latent attention does not go through impl.forward"
    if "Attention" not in names:
        return f"{type(layer).__name__} is not vLLM's Attention"
    forward = getattr(type(layer.impl), "forward", None)
    if forward is None:
        return f"{type(layer.impl).__name__} has no forward"
    parameters = tuple(inspect.signature(inspect.unwrap(forward)).parameters)[1 : len(_PARAMETERS) + 1]
    if parameters != _PARAMETERS:
        return f"{type(layer.impl).__name__}.forward takes {parameters}, expected {_PARAMETERS}"
    return ""


def why_layers_pass_unseen(vllm_config: Any) -> str:
    """Why this engine does not run Python, once and in order, before each layer of every forward pass; "" if it does."""
    mode = getattr(vllm_config.compilation_config, "cudagraph_mode", None)
    if mode is not None and mode.has_full_cudagraphs():
        return f"this engine replays graphs of whole forward passes (cudagraph_mode {mode.name}); set it to PIECEWISE"
    parallel = vllm_config.parallel_config
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "ubatch_size", 0) > 1:
        return "this engine runs micro-batches, on two threads"
    return ""


def queries_outlive_their_layer(vllm_config: Any) -> bool:
    """Whether a layer's queries stay what they are, as long as someone refers to them, until later layers have run: in what a graph of a
    whole forward pass records, and only there (graphs of pieces share their memory whoever refers to it).

    So it is where each piece between two attentions is compiled by itself, or nothing is. A compiler that sees the attention from inside
    plans the memory of what it reads, and uses it again.
    """
    config = vllm_config.compilation_config
    mode = getattr(config, "mode", None)
    if mode == 0:
        return True
    split = any("unified_attention" in op for op in getattr(config, "splitting_ops", None) or ())
    return bool(mode == 3 and split and not getattr(config, "use_inductor_graph_partition", True))


def queries_stay(layers: Mapping[str, Any], vllm_config: Any) -> bool:
    """Whether a layer's queries, in a forward pass that is no graph, stay what they are until their memory is free, so that they may be
    read later than the attention reads them: the compiler does not plan their memory, and the attention is known to write nothing there.
    """
    impls = {type(layer.impl) for layer in layers.values()}
    known = all(impl.__name__ == "FlashAttentionImpl" and impl.__module__.startswith("vllm.") for impl in impls)
    return known and queries_outlive_their_layer(vllm_config)


def engine_ropes() -> list[Any]:
    """The rotary embedding modules of this process (vLLM keeps one of each kind); empty if there are none, or vLLM moved them."""
    rotary_embedding = sys.modules.get("vllm.model_executor.layers.rotary_embedding")  # a model that rotates has imported it
    return list(getattr(rotary_embedding, "_ROPE_DICT", {}).values())


_forward_context: Any = None  # vLLM's module of that name, once it was asked: an import statement a layer has its price


def slot_mapping_of(layer_name: str, attn_metadata: Any) -> torch.Tensor | None:
    """The KV slot of each row in the running forward pass, or None where there is none (profiling, a micro-batched pass)."""
    global _forward_context
    context = _forward_context
    if context is None:
        context = _forward_context = import_module("vllm.forward_context")
    if context.is_forward_context_available():
        mapping = getattr(context.get_forward_context(), "slot_mapping", None)
        if isinstance(mapping, list):
            return None  # micro-batches run on two threads; their rows are not attributed
        if isinstance(mapping, (dict, Mapping)) and layer_name in mapping:
            found = mapping[layer_name]
            return found if isinstance(found, torch.Tensor) else None
    if isinstance(attn_metadata, Mapping):
        attn_metadata = attn_metadata.get(layer_name)
    found = getattr(attn_metadata, "slot_mapping", None)
    return found if isinstance(found, torch.Tensor) else None


class QueryHooks:
    """Calls ``on_query`` before each attention layer's own forward, from :meth:`install` to :meth:`remove`."""

    def __init__(self, layers: Mapping[str, Any], on_query: OnQuery) -> None:
        self._layers, self._on_query = dict(layers), on_query
        self.hooked: list[str] = []
        self._before: dict[str, Any] = {}  # an override that was there before ours (another tool's hook)
        self.refused = {name: reason for name, layer in self._layers.items() if (reason := refusal(layer))}

    def install(self) -> None:
        """Replace ``impl.forward`` on every layer; all or none are to be captured, so a refused layer is the caller's business first."""
        for index, (name, layer) in enumerate(self._layers.items()):
            if name in self.refused:
                continue
            if "forward" in vars(layer.impl):
                self._before[name] = layer.impl.forward
            layer.impl.forward = self._wrap(index, name, layer.impl.forward)
            self.hooked.append(name)

    def _wrap(self, index: int, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        on_query = self._on_query

        def forward(layer: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            metadata = args[3] if len(args) > 3 else kwargs.get("attn_metadata")
            on_query(index, name, query, metadata)
            return original(layer, query, *args, **kwargs)

        forward.qcap_original = original  # type: ignore[attr-defined]
        return forward

    def remove(self) -> None:
        """Put every layer's own forward back."""
        for name in self.hooked:
            impl = self._layers[name].impl
            if not hasattr(vars(impl).get("forward"), "qcap_original"):
                continue  # someone has hooked over us since: taking ours out would take theirs out
            if name in self._before:
                impl.forward = self._before[name]
            else:
                del impl.forward  # the class's own method is seen again
        self.hooked.clear()
        self._before.clear()
