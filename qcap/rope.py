"""From a Hugging Face model config to :class:`qcap.geometry.Rope`. Plain values: neither transformers nor vLLM is imported."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from qcap.errors import Unsupported
from qcap.geometry import Rope

_log = logging.getLogger("qcap.rope")
_EXACT = ("default", "linear", "dynamic", "llama3", "yarn")
_WITHOUT_ROPE = ("bloom", "gpt2", "gpt_bigcode", "jais", "mpt", "opt")
"""Model types whose positions are learned or are ALiBi."""
_INTERLEAVED = (
    "chatglm", "codegen", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "gptj",
)  # fmt: skip
"""Model types that rotate the pairs (0, 1), (2, 3), ...; no config says it."""
_NOT_PARAMS = ("rope_theta", "partial_rotary_factor", "rope_dim")


def rope_from_hf_config(config: Any, *, interleaved: bool | None = None, strict: bool = True) -> Rope:
    """How a model rotates its queries and keys, read from its config.

    Both styles are read: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters`` (transformers 5), which wins if both are there.

    Args:
        config: a ``transformers`` config or a ``config.json`` as a mapping; of a multimodal model its text config is taken.
        interleaved: whether pairs are (0, 1), (2, 3), ...; None goes by ``model_type``. Who holds the model's rope module knows it for
            certain (vLLM: ``not rotary_emb.is_neox_style``) and should give it.
        strict: False returns a :class:`Rope` of the config's own kind, or of kind ``unsupported``, instead of raising; its ``inv_freq()``
            raises. So such a model can be captured, though its tokens cannot be renumbered.

    Returns:
        The rope; kind ``none`` where the model has none.

    Raises:
        Unsupported: longrope, multimodal ropes, a rope that differs between layers, latent (MLA) heads, or a config that does not say;
            the message names which.
    """
    text = _text_config(config)
    try:
        return _read(text, interleaved)
    except Unsupported as error:
        if strict:
            raise
        raw = _get(text, "rope_parameters", "rope_scaling") or {}
        kind = str(raw.get("rope_type") or raw.get("type") or "unsupported")
        _log.info("%s; rows can be captured but not renumbered", error)
        return Rope(kind="unsupported" if kind in _EXACT else kind, max_position=int(_get(text, "max_position_embeddings") or 0))


def _read(config: Any, interleaved: bool | None) -> Rope:
    model_type = str(_get(config, "model_type") or "")
    name = model_type or type(config).__name__
    max_position = int(_get(config, "max_position_embeddings", "n_positions", "seq_length") or 0)
    other_positions = _get(config, "position_embedding_type") in ("absolute", "alibi", "learned", "nope")
    if model_type in _WITHOUT_ROPE or _get(config, "alibi") or other_positions:
        return Rope(kind="none", max_position=max_position)
    if _get(config, "kv_lora_rank"):
        raise Unsupported(f"rope of {name}: multi-head latent attention keeps no rotated key per head")
    _refuse_layers_without_rope(config, name)
    raw = _parameters(config, name)
    theta = raw.get("rope_theta") or _get(config, "rope_theta", "rotary_emb_base")
    if theta is None:
        if not raw and model_type != "gptj":
            raise Unsupported(
                f"rope of {name}: the config has neither rope_parameters nor rope_theta; "
                "load it with transformers.AutoConfig, which fills in a model's defaults"
            )
        theta = 10000.0
    kind = str(raw.get("rope_type") or raw.get("type") or "default")
    _refuse_kinds(kind, raw, config, name)
    params = {key: value for key, value in raw.items() if isinstance(value, int | float) and key not in _NOT_PARAMS}
    if kind in ("llama3", "yarn"):
        original = _get(config, "original_max_position_embeddings") or params.get("original_max_position_embeddings") or max_position
        params["original_max_position_embeddings"] = original
    return Rope(
        kind=kind,
        theta=float(theta),
        rotary_dim=_rotary_dim(config, raw, name),
        interleaved=model_type in _INTERLEAVED if interleaved is None else interleaved,
        max_position=max_position,
        params=params,
    )


def _text_config(config: Any) -> Any:
    nested = _get(config, "text_config")
    return config if nested is None else nested


def _get(config: Any, *names: str) -> Any:
    """The first of ``names`` that the config has and that is not None."""
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return value
    return None


def _parameters(config: Any, name: str) -> dict[str, Any]:
    """The rope parameters as one flat dict."""
    found = _get(config, "rope_parameters") or _get(config, "rope_scaling") or {}
    nested = {key: value for key, value in dict(found).items() if isinstance(value, Mapping)}
    if not nested:
        return dict(found)
    used = [value for key, value in nested.items() if key in (_get(config, "layer_types") or nested)]
    if any(dict(value) != dict(used[0]) for value in used[1:]):
        raise Unsupported(f"rope of {name}: it differs between layer types ({', '.join(sorted(nested))})")
    return dict(used[0])


def _refuse_layers_without_rope(config: Any, name: str) -> None:
    """NoPE layers among others: one rope for all layers would rotate rows that were never rotated."""
    flags = _get(config, "no_rope_layers")
    mixed = isinstance(flags, list | tuple) and 0 in flags and len(flags) > 0
    interval = _get(config, "no_rope_layer_interval") or 0
    full_without = _get(config, "model_type") in ("cohere2", "cohere2_moe")
    if mixed or (flags is None and interval) or full_without:
        raise Unsupported(f"rope of {name}: some layers have none (NoPE), others have")


def _refuse_kinds(kind: str, raw: Mapping[str, Any], config: Any, name: str) -> None:
    if kind == "mrope" or "mrope_section" in raw or "xdrope_section" in raw or _get(config, "mrope_section"):
        raise Unsupported(f"rope of {name}: multimodal rope (mrope) has more than one position a token")
    if kind == "dynamic" and "alpha" in raw:
        raise Unsupported(f"rope of {name}: dynamic rope by 'alpha'")
    if raw.get("use_fope"):
        raise Unsupported(f"rope of {name}: Fourier rope (fope)")
    if kind not in _EXACT:
        raise Unsupported(f"rope of {name}: kind {kind!r} cannot be re-rotated exactly; known: {', '.join(_EXACT)}, and none")


def _rotary_dim(config: Any, raw: Mapping[str, Any], name: str) -> int:
    given = raw.get("rope_dim") or _get(config, "rotary_dim")
    if given:
        return int(given)
    head_dim = _get(config, "head_dim")
    if head_dim is None:
        hidden, heads = _get(config, "hidden_size", "n_embd"), _get(config, "num_attention_heads", "n_head")
        if not hidden or not heads:
            raise Unsupported(f"rope of {name}: the config has neither head_dim nor hidden_size and num_attention_heads")
        head_dim = hidden // heads
    factor = raw.get("partial_rotary_factor")
    if factor is None:
        factor = _get(config, "partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
    return int(head_dim * (1.0 if factor is None else factor))
