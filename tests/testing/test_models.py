"""The models of qcap.testing, and what transformers computes with them."""

import json
import os
import threading

import pytest
import torch

from qcap.errors import ConfigError
from qcap.testing import folders
from qcap.testing.engine import hf_forward, hf_greedy, hf_model
from qcap.testing.smollm2 import smollm2_path
from qcap.testing.tiny import HEAD_SIZE, HEADS, KINDS, KV_HEADS, LAYERS, VOCAB, tiny_model_path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QCAP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tokens(count, seed=5):
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class TestBuildOnce:
    def test_builds_once(self, cache):
        built = []
        for _ in range(2):
            path = folders.build_once("model", lambda folder: (folder / "file").write_text("x") and built.append(folder))
        assert len(built) == 1 and built[0] != path
        assert path == cache / "model" and (path / "file").read_text() == "x"

    def test_a_failed_build_leaves_nothing(self, cache):
        def build(folder):
            (folder / "half").write_text("x")
            raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            folders.build_once("model", build)
        assert [path.name for path in cache.iterdir()] == [".lock"]

    def test_what_a_cut_off_build_left_is_cleared(self, cache):
        leftover = cache / ".model.part-abc"
        leftover.mkdir(parents=True)
        folders.build_once("model", lambda folder: None)
        assert not leftover.exists()

    def test_the_second_waits_for_the_first(self, cache):
        inside, go, built = threading.Event(), threading.Event(), []

        def slow(folder):
            inside.set()
            assert go.wait(20)
            built.append("slow")

        first = threading.Thread(target=folders.build_once, args=("model", slow))
        first.start()
        assert inside.wait(20)
        second_built = threading.Event()
        second = threading.Thread(target=folders.build_once, args=("model", lambda folder: (built.append("second"), second_built.set())))
        second.start()
        second_built.wait(1)  # time to do it wrong
        go.set()
        first.join(20)
        second.join(20)
        assert built == ["slow"]


@pytest.mark.parametrize("kind", KINDS)
class TestTiny:
    def test_every_layer_attends_and_logits_are_peaked(self, kind):
        count = 96
        truth = hf_forward(tiny_model_path(kind), tokens(count))
        assert truth["q"].shape == (LAYERS, count, HEADS * HEAD_SIZE)
        assert truth["k"].shape == truth["v"].shape == (LAYERS, count, KV_HEADS * HEAD_SIZE)
        assert 2 < truth["logits"].std() < 3
        q = truth["q"].view(LAYERS, count, HEADS, HEAD_SIZE)
        k = truth["k"].view(LAYERS, count, KV_HEADS, HEAD_SIZE).repeat_interleave(HEADS // KV_HEADS, dim=2)
        weights = torch.einsum("lhd,lshd->lhs", q[:, -1], k).div(HEAD_SIZE**0.5).softmax(-1)
        entropy = -(weights * weights.clamp_min(1e-12).log()).sum(-1).mean(-1)
        assert (entropy < torch.tensor(float(count)).log() - 0.7).all()

    def test_a_query_depends_on_its_position(self, kind):
        ids = tokens(24)
        doubled = hf_forward(tiny_model_path(kind), ids + ids)["q"][0]
        assert not torch.allclose(doubled[:24], doubled[24:], atol=0.1)
        assert torch.allclose(doubled[:24].norm(dim=1), doubled[24:].norm(dim=1), rtol=1e-4)


class TestTinyFolders:
    def test_same_seed_same_weights(self, cache, monkeypatch, tmp_path):
        here = (tiny_model_path("llama") / "model.safetensors").read_bytes()
        assert (tiny_model_path("llama", seed=1) / "model.safetensors").read_bytes() != here
        monkeypatch.setenv("QCAP_CACHE", str(tmp_path / "other"))
        assert (tiny_model_path("llama") / "model.safetensors").read_bytes() == here

    def test_bfloat16_holds_the_same_values_rounded(self, cache):
        from safetensors.torch import load_file

        exact, rounded = (load_file(tiny_model_path("llama", dtype) / "model.safetensors") for dtype in ("float32", "bfloat16"))
        assert exact.keys() == rounded.keys()
        assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)

    def test_unknown_names_are_refused(self):
        with pytest.raises(ConfigError, match="use one of llama, llama3"):
            tiny_model_path("lama")
        with pytest.raises(ConfigError, match="float64"):
            tiny_model_path("llama", "float64")
        with pytest.raises(ConfigError, match="int8"):
            smollm2_path("int8")


class TestTruth:
    def test_values_are_what_the_model_caches(self):
        from transformers import DynamicCache

        path, ids = tiny_model_path("llama3"), tokens(40)
        truth = hf_forward(path, ids)
        cache = DynamicCache(config=hf_model(path).config)
        with torch.no_grad():
            hf_model(path)(torch.tensor([ids]), past_key_values=cache)
        for layer in range(LAYERS):
            for plane, cached in (("k", cache.layers[layer].keys), ("v", cache.layers[layer].values)):
                assert torch.equal(truth[plane][layer], cached[0].transpose(0, 1).flatten(1))

    def test_greedy_from_a_cache_is_greedy_from_nothing(self):
        from transformers import DynamicCache

        path, ids = tiny_model_path("llama"), tokens(40)
        cache = DynamicCache(config=hf_model(path).config)
        with torch.no_grad():
            hf_model(path)(torch.tensor([ids[:33]]), past_key_values=cache)
        assert hf_greedy(path, ids, 12, cache) == hf_greedy(path, ids, 12)
        assert cache.get_seq_length() == 33, "the caller's cache must not grow"
        other = tokens(40, seed=6)[:33] + ids[33:]
        assert hf_greedy(path, other, 12, cache) == hf_greedy(path, ids, 12), "cached tokens come from the cache, not from the prompt"
        assert hf_greedy(path, other, 12) != hf_greedy(path, ids, 12)
        with pytest.raises(ValueError, match="at least the last one"):
            hf_greedy(path, ids[:33], 1, cache)

    def test_greedy_is_the_argmax_of_forward(self):
        path, ids = tiny_model_path("qwen3"), tokens(20)
        made = hf_greedy(path, ids, 8)
        logits = hf_forward(path, ids + made)["logits"]
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == made


class TestSmolLM2:
    def test_it_speaks_english(self):
        from transformers import AutoTokenizer

        path = smollm2_path()
        tokenizer = AutoTokenizer.from_pretrained(str(path))
        prompt = tokenizer("The capital of France is").input_ids
        assert "Paris" in tokenizer.decode(hf_greedy(path, prompt, 8))

    def test_the_folder_is_plain(self):
        config = json.loads((smollm2_path() / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert "quantization_config" not in config
        assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
        assert os.access(smollm2_path() / "tokenizer.json", os.R_OK)
