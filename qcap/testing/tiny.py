"""Tiny models with seeded weights, one for each way a model turns positions into rotations. No tokenizer, no download."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qcap.errors import ConfigError
from qcap.testing.folders import build_once

VOCAB = 1024
LAYERS = 4
HIDDEN = 256
HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 64  # vLLM's CPU attention takes 32, 64, 80, 96, 112, 128 and up
MAX_POSITIONS = 4096

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _llama(**rope: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_COMMON, head_dim=HEAD_SIZE, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **rope})


def _llama3() -> Any:
    return _llama(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=MAX_POSITIONS // 8
    )


def _yarn() -> Any:
    return _llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=MAX_POSITIONS // 4)


def _linear() -> Any:
    return _llama(rope_type="linear", factor=2.0)


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_COMMON, head_dim=HEAD_SIZE, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


def _phi3() -> Any:
    from transformers import Phi3Config

    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return Phi3Config(**_COMMON, original_max_position_embeddings=MAX_POSITIONS, rope_parameters=rope)


def _glm4() -> Any:
    from transformers import Glm4Config

    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return Glm4Config(**_COMMON, head_dim=HEAD_SIZE, attention_bias=True, rope_parameters=rope)


def _cohere() -> Any:
    from transformers import CohereConfig

    # vLLM runs this family with tied embeddings only; they are drawn small (see _scaled), which the scale of the logits makes up for.
    common = {**_COMMON, "tie_word_embeddings": True}
    return CohereConfig(**common, logit_scale=1.6, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _llama,  # grouped-query attention, plain rope
    "llama3": _llama3,  # rope with llama3 frequency bands
    "yarn": _yarn,  # yarn, with its factor on cos and sin
    "linear": _linear,  # positions divided by 2
    "qwen3": _qwen3,  # q and k are normalised per head before rope
    "phi3": _phi3,  # the first half of a head is rotated, the rest is not; fused qkv
    "glm4": _glm4,  # half of a head, interleaved pairs; biases on q, k and v
    "cohere": _cohere,  # a whole head, interleaved pairs; parallel blocks
}
KINDS = tuple(_CONFIGS)


def tiny_model_path(kind: str = "llama", dtype: str = "float32", seed: int = 0) -> Path:
    """A folder with a tiny model of ``kind``, built on the first call (below 1 s) and reused after that.

    4 layers, hidden size 256, 4 query heads, 2 KV heads, head size 64, vocabulary 1024, 4096 positions. The weights are random, but
    scaled so that every layer matters, attention is far from uniform and logits have a standard deviation of 2 to 3: greedy decoding
    then rarely meets a near tie. There is no tokenizer: start vLLM with ``skip_tokenizer_init=True`` (``build_llm`` does).

    Args:
        kind: one of ``KINDS``.
        dtype: a torch dtype's name: float32, bfloat16 or float16. All hold the same values, rounded.
        seed: of the weights.

    Raises:
        ConfigError: an unknown kind or dtype.
    """
    if kind not in _CONFIGS:
        raise ConfigError(f"unknown tiny model {kind!r}: use one of {', '.join(KINDS)}")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]  # another recipe is another folder
    return build_once(f"tiny-{kind}-{dtype}-seed{seed}-{recipe}", lambda folder: _build(folder, kind, dtype, seed))


def _build(folder: Path, kind: str, dtype: str, seed: int) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_config(_CONFIGS[kind](), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(name, noise, model.config.tie_word_embeddings))
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def _scaled(name: str, noise: Any, tied: bool) -> Any:
    """Unit noise in the shape of parameter ``name`` -> its weights. Inputs of a matrix are normalised, so fan-in sets the scale."""
    if "q_norm" in name or "k_norm" in name:  # per head, and the last word on the size of q and k
        return 1.4 + 0.1 * noise
    if "norm" in name:
        return 1 + 0.1 * noise
    if noise.ndim == 1:  # biases
        return 0.1 * noise
    if "embed" in name:  # small if tied: else the token just read wins, and a greedy model repeats it for ever
        return 0.1 * noise if tied else noise
    gain = 1.0
    if "lm_head" in name:
        gain = 2.5
    elif any(part in name for part in ("q_proj", "k_proj", "qkv_proj")):
        gain = 1.4  # scores then have a standard deviation near 2
    return noise * (gain / noise.shape[-1] ** 0.5)
