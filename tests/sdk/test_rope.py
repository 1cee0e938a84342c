"""Ropes: read from configs, against vLLM's and transformers' own numbers, and re-rotation against rotating afresh."""

from __future__ import annotations

import pytest
import torch

from qcap.errors import ConfigError, Unsupported
from qcap.geometry import Geometry, Rope
from qcap.rope import rope_from_hf_config
from qcap.sdk.edits import keep

transformers = pytest.importorskip("transformers")

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear by 3": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, all set": {**YARN, "beta_fast": 24, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.0, "attention_factor": 1.3},
    "yarn, not truncated": {**YARN, "truncate": False},
}


def llama_config(scaling, head_dim=32, theta=10000.0, max_position=256):
    return transformers.LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=max_position,
        rope_parameters={"rope_theta": theta, **scaling},
    )  # fmt: skip


@pytest.fixture(scope="module")
def get_rope():
    """vLLM's own factory; it wants a config to be set."""
    rotary = pytest.importorskip("vllm.model_executor.layers.rotary_embedding")
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield rotary.get_rope


def vllm_angles(module, kind):
    """The angle per position of each pair, as vLLM's module computes it."""
    if kind == "yarn":
        return module._compute_inv_freq(module.scaling_factor)
    if kind == "linear":
        return module._compute_inv_freq(module.base) / torch.tensor(module.scaling_factors[0])
    if kind == "dynamic":
        ratio = module.scaling_factor * module.max_position_embeddings / module.max_trained_positions
        stretch = ratio - (module.scaling_factor - 1)
        return module._compute_inv_freq(module.base * stretch ** (module.rotary_dim / (module.rotary_dim - 2)))
    return module._compute_inv_freq(module.base)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", list(SCALINGS))
def test_inv_freq_is_vllms(get_rope, name, theta):
    config = llama_config(SCALINGS[name], theta=theta)
    module = get_rope(32, max_position=256, is_neox_style=True, rope_parameters=dict(config.rope_parameters), dtype=torch.float32)
    rope = rope_from_hf_config(config)
    assert torch.equal(rope.inv_freq(), vllm_angles(module, rope.kind))
    # ... and that is what it takes cos and sin of: at position p the cached sine over the cosine is tan(p * inv_freq).
    cos, sin = module.cos_sin_cache[:200].double().chunk(2, dim=-1)
    angles = torch.arange(200, dtype=torch.float64)[:, None] * rope.inv_freq().double()
    assert torch.allclose(torch.atan2(sin, cos), torch.atan2(angles.sin(), angles.cos()), atol=3e-5)


def test_partial_rotary_is_vllms(get_rope):
    config = llama_config({"rope_type": "default", "partial_rotary_factor": 0.25})
    module = get_rope(32, max_position=256, rope_parameters=dict(config.rope_parameters), dtype=torch.float32)
    rope = rope_from_hf_config(config)
    assert rope.rotary_dim == module.rotary_dim == 8
    assert torch.equal(rope.inv_freq(), module._compute_inv_freq(module.base))


def test_dynamic_with_trained_positions_is_vllms(get_rope):
    scaling = {**SCALINGS["dynamic"], "rope_theta": 10000.0, "max_trained_positions": 64}
    module = get_rope(32, max_position=256, rope_parameters=scaling, dtype=torch.float32)
    rope = Rope(kind="dynamic", rotary_dim=32, max_position=256, params={"factor": 2.0, "max_trained_positions": 64})
    assert torch.equal(rope.inv_freq(), vllm_angles(module, "dynamic"))
    assert not torch.equal(rope.inv_freq(), Rope(rotary_dim=32).inv_freq())


@pytest.mark.parametrize("name", list(SCALINGS))
def test_inv_freq_is_transformers(name):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = llama_config(SCALINGS[name], theta=500000.0)
    assert torch.allclose(rope_from_hf_config(config).inv_freq(), LlamaRotaryEmbedding(config).inv_freq, rtol=1e-6, atol=0)


# -- conformance: keep and renumber == rotate afresh --------------------------------------------------------------------


def hf_rotate(config, rows, positions):
    """``rows[T, heads, D]`` rotated by the model's own code, in float32."""
    if config.model_type == "cohere":
        from transformers.models.cohere.modeling_cohere import CohereRotaryEmbedding as Rotary
        from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb
    elif config.model_type == "gpt_neox":
        from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding as Rotary
        from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb
    else:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding as Rotary
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    states = rows.transpose(0, 1)[None]  # [1, heads, T, D]
    cos, sin = Rotary(config)(states, positions[None])
    return apply_rotary_pos_emb(states, states, cos, sin)[1][0].transpose(0, 1)


def conformance_configs():
    for name, scaling in SCALINGS.items():
        yield pytest.param(llama_config(scaling), id=name)
    shape = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 256}
    yield pytest.param(transformers.CohereConfig(num_key_value_heads=2, **shape), id="interleaved")
    yield pytest.param(transformers.GPTNeoXConfig(rotary_pct=0.25, **shape), id="partial rotary")


@pytest.mark.parametrize("config", list(conformance_configs()))
def test_keep_and_renumber_is_rotating_afresh(config):
    torch.manual_seed(0)
    tokens, heads, size = 200, 2, 32
    rope = rope_from_hf_config(config)
    geometry = Geometry(
        model=config.model_type, layer_names=("a", "b"), num_q_heads=4, num_kv_heads=heads, head_size=size, dtype="float32", block_size=8,
        chunk_size=8, rope=rope,
    )  # fmt: skip
    raw, values = torch.randn(2, tokens, heads, size), torch.randn(2, tokens, heads * size)
    rotated = torch.stack([hf_rotate(config, layer, torch.arange(tokens)) for layer in raw])
    kv = torch.stack([rotated.flatten(-2), values])
    index = torch.randperm(tokens)[:80].sort().values
    index[-1] = tokens - 1
    got = keep(kv, index, geometry=geometry)
    fresh = torch.stack([hf_rotate(config, layer[index], torch.arange(80)) for layer in raw]).flatten(-2)
    error = (got[0] - fresh).norm() / fresh.norm()
    assert error < 1e-6, error
    assert torch.equal(got[1], values[:, index])
    assert (kv[0][:, index] - fresh).norm() / fresh.norm() > 0.1  # without the rotation it is far off


def test_a_rope_that_is_not_the_models_is_far_off():
    """The test above can tell ropes apart: llama3's keys renumbered by plain frequencies."""
    config = llama_config(LLAMA3)
    raw = torch.randn(200, 2, 32)
    kv = hf_rotate(config, raw, torch.arange(200)).flatten(-2)[None, None].expand(2, 1, -1, -1)
    geometry = Geometry(
        model="m", layer_names=("a",), num_q_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=8, chunk_size=8,
        rope=Rope(rotary_dim=32),
    )  # fmt: skip
    fresh = hf_rotate(config, raw[100:], torch.arange(100)).flatten(-2)
    assert (keep(kv, range(100, 200), geometry=geometry)[0, 0] - fresh).norm() / fresh.norm() > 0.1


# -- reading configs ----------------------------------------------------------------------------------------------------


def test_both_config_styles_read_alike():
    old = {
        "model_type": "llama", "hidden_size": 128, "num_attention_heads": 4, "rope_theta": 500000.0, "max_position_embeddings": 512,
        "rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 64},
    }  # fmt: skip
    new = {
        "model_type": "llama", "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": 500000.0, **LLAMA3},
    }  # fmt: skip
    expected = Rope(
        kind="llama3", theta=500000.0, rotary_dim=32, max_position=512,
        params={"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    )  # fmt: skip
    assert rope_from_hf_config(old) == rope_from_hf_config(new) == expected
    assert rope_from_hf_config(llama_config(LLAMA3, theta=500000.0, max_position=512)) == expected
    assert rope_from_hf_config({"text_config": old}) == expected


def test_details_of_reading():
    base = {"model_type": "x", "hidden_size": 96, "num_attention_heads": 4, "rope_theta": 1e4, "max_position_embeddings": 128}
    assert rope_from_hf_config(base) == Rope(rotary_dim=24, max_position=128)
    assert rope_from_hf_config({**base, "head_dim": 64}).rotary_dim == 64
    assert rope_from_hf_config({**base, "partial_rotary_factor": 0.5}).rotary_dim == 12
    assert rope_from_hf_config({**base, "rotary_dim": 8}).rotary_dim == 8
    assert rope_from_hf_config({**base, "rope_scaling": None}).kind == "default"
    yarn = rope_from_hf_config({**base, "rope_scaling": {"type": "yarn", "factor": 2.0}})
    assert yarn.params == {"factor": 2.0, "original_max_position_embeddings": 128}
    assert rope_from_hf_config({**base, "model_type": "cohere"}).interleaved
    assert rope_from_hf_config(base, interleaved=True).interleaved
    same = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    nested = {**base, "rope_parameters": {**same, "other": dict(same["full_attention"])}}
    assert rope_from_hf_config(nested).theta == 1e6


@pytest.mark.parametrize("config", [
    {"model_type": "gpt2", "n_positions": 64}, {"model_type": "opt", "max_position_embeddings": 64},
    {"model_type": "falcon", "alibi": True, "hidden_size": 64, "num_attention_heads": 2},
])  # fmt: skip
def test_models_without_rope(config):
    rope = rope_from_hf_config(config)
    assert rope.kind == "none" and len(rope.inv_freq()) == 0


def test_transformers_gpt2_has_none():
    assert rope_from_hf_config(transformers.GPT2Config()).kind == "none"


BASE = {"model_type": "m", "hidden_size": 64, "num_attention_heads": 2, "rope_theta": 1e4, "max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("change", "said", "kind"),
    [
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "longrope", "longrope"),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0]}}, "'su'", "su"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}, "mrope", "mrope"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 1]}}, "mrope", "unsupported"),
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000.0}}, "alpha", "unsupported"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "proportional", "proportional"),
        ({"no_rope_layers": [1, 1, 1, 0]}, "NoPE", "unsupported"),
        ({"model_type": "cohere2"}, "NoPE", "unsupported"),
        ({"kv_lora_rank": 512}, "latent", "unsupported"),
        ({"rope_theta": None}, "AutoConfig", "unsupported"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            "differs between layer types", "unsupported",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_renumbered_is_named(change, said, kind):
    with pytest.raises(Unsupported, match=said):
        rope_from_hf_config({**BASE, **change})
    loose = rope_from_hf_config({**BASE, **change}, strict=False)
    assert loose.kind == kind
    with pytest.raises(ConfigError, match=f"{kind}.*cannot be re-rotated"):
        loose.inv_freq()


def test_a_rope_without_rotary_dim_does_not_pass_for_none():
    with pytest.raises(ConfigError, match="rotary_dim"):
        Rope().inv_freq()
