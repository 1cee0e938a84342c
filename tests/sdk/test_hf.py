"""To and from a transformers cache, on a tiny random model."""

from __future__ import annotations

import pytest
import torch

from qcap.errors import ShapeError, Unsupported
from qcap.geometry import Geometry
from qcap.rope import rope_from_hf_config
from qcap.sdk.edits import keep
from qcap.sdk.hf import from_dynamic_cache, to_dynamic_cache

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    geometry = Geometry(
        model="tiny", layer_names=("0", "1", "2"), num_q_heads=4, num_kv_heads=2, head_size=16, dtype="float32", block_size=4, chunk_size=4,
        rope=rope_from_hf_config(config), scale=0.25,
    )  # fmt: skip
    return model, geometry


def prefill(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=True)


def test_round_trip_is_exact(tiny):
    model, geometry = tiny
    ids = list(range(1, 21))
    cache = prefill(model, ids).past_key_values
    kv = from_dynamic_cache(cache, geometry)
    assert kv.shape == (2, 3, 20, 32)
    assert torch.equal(kv[0, 1].view(20, 2, 16)[:, 1], cache.layers[1].keys[0, 1])
    again = to_dynamic_cache(kv, geometry)
    assert again.get_seq_length() == 20
    for mine, theirs in zip(again.layers, cache.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
    kv.zero_()
    assert again.layers[0].keys.abs().sum() > 0  # copies


def test_the_model_goes_on_from_it(tiny):
    model, geometry = tiny
    ids = list(range(1, 21))
    whole = prefill(model, [*ids, 30, 31]).logits[0, -1]
    kv = from_dynamic_cache(prefill(model, ids).past_key_values)
    with torch.no_grad():
        rest = model(torch.tensor([[30, 31]]), past_key_values=to_dynamic_cache(kv, geometry)).logits[0, -1]
    assert torch.allclose(rest, whole, atol=1e-5)


def test_dropped_tokens_equal_attention_without_them(tiny):
    """A first layer's keys depend on their token and position alone: after drop and renumber they are those of the shorter prompt."""
    model, geometry = tiny
    ids = list(range(1, 21))
    index = [0, 2, 3, 7, 8, 15, 19]
    kept = keep(from_dynamic_cache(prefill(model, ids).past_key_values), index, geometry=geometry)
    fresh = from_dynamic_cache(prefill(model, [ids[i] for i in index]).past_key_values)
    assert torch.allclose(kept[:, 0], fresh[:, 0], atol=1e-5)
    assert not torch.allclose(kept[:, 1], fresh[:, 1], atol=1e-2)  # deeper rows have seen the dropped tokens: that is the point


def test_what_does_not_fit_is_refused(tiny):
    model, geometry = tiny
    with pytest.raises(ShapeError, match=r"\[2, 3, T, 32\]"):
        to_dynamic_cache(torch.zeros(2, 2, 4, 32), geometry)
    with pytest.raises(ShapeError, match="empty"):
        from_dynamic_cache(transformers.DynamicCache())
    with torch.no_grad():
        two = model(torch.ones(2, 5, dtype=torch.long), use_cache=True).past_key_values
    with pytest.raises(ShapeError, match="batch 2"):
        from_dynamic_cache(two)
    cache = prefill(model, [1, 2, 3]).past_key_values
    cache.layers[1].keys, cache.layers[1].values = cache.layers[1].keys[:, :, :2], cache.layers[1].values[:, :, :2]
    with pytest.raises(Unsupported, match="differ"):
        from_dynamic_cache(cache)
    with pytest.raises(ShapeError, match="tiny"):
        from_dynamic_cache(to_dynamic_cache(torch.zeros(2, 3, 4, 32), geometry), Geometry(**{**geometry.__dict__, "num_kv_heads": 4}))
    sliding = transformers.DynamicCache(config=transformers.MistralConfig(num_hidden_layers=1, sliding_window=4))
    sliding.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    with pytest.raises(Unsupported, match="sliding"):
        from_dynamic_cache(sliding)
