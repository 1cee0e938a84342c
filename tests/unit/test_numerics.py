"""What tells two configurations of one model apart."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from qcap.geometry import Rope
from qcap.vllm.worker import numerics

ROPE = Rope(kind="default", rotary_dim=8)


def of(rope: Rope = ROPE, quantization: str | None = None, **config: object) -> dict[str, object]:
    found = numerics(SimpleNamespace(hf_config=SimpleNamespace(**config), quantization=quantization), rope)
    assert json.loads(json.dumps(found)) == found
    return found


def test_fields_that_rows_depend_on() -> None:
    said = of(rms_norm_eps=1e-5, hidden_act="silu", intermediate_size=[4, 8], attention_bias=False, vocab_size=9, num_experts_per_tok=None)
    assert said == {
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "intermediate_size": [4, 8],
        "attention_bias": False,
        "quantization": "None",
    }


@pytest.mark.parametrize("engines", ["gptq", "gptq_marlin", "auto_gptq"])
def test_a_checkpoint_says_how_it_is_quantized(engines: str) -> None:
    """What an engine calls it is the name of what it computes it with."""
    assert of(quantization=engines, quantization_config={"quant_method": "gptq", "bits": 4})["quantization"] == ["gptq", 4]
    assert of(quantization="fp8")["quantization"] == "fp8"


def test_a_rope_that_the_geometry_does_not_hold() -> None:
    config = {"rope_parameters": {"factor": 2.0}}
    assert "rope" not in of(**config)
    assert of(Rope(kind="unsupported"), **config)["rope"] == [{"factor": 2.0}, None, None]
