"""A rope is used for re-rotation only if the engine's own cos/sin table agrees with it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from qcap.errors import Unsupported
from qcap.rope import rope_from_hf_config
from qcap.vllm.worker import certified_rope

CONFIG = {
    "model_type": "llama",
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def module(
    theta: float = 10000.0, *, neox: bool = True, dtype: torch.dtype = torch.float32, factor: float = 1.0, dim: int = 16
) -> SimpleNamespace:
    inv = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    angles = torch.arange(512, dtype=torch.float32)[:, None] * inv
    return SimpleNamespace(is_neox_style=neox, cos_sin_cache=(torch.cat([angles.cos(), angles.sin()], dim=1) * factor).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_agreeing_table(dtype: torch.dtype, factor: float) -> None:
    """The config's rope is taken; an attention factor on cos and sin does not matter to a rotation by a difference."""
    assert certified_rope(CONFIG, [module(dtype=dtype, factor=factor)]) == rope_from_hf_config(CONFIG)


def test_the_engine_knows_the_pairs() -> None:
    """No config says whether pairs are interleaved; the engine's module does."""
    assert certified_rope(CONFIG, [module(neox=False)]).interleaved
    assert not certified_rope({**CONFIG, "model_type": "glm"}, [module()]).interleaved


def test_ropes_of_others_do_not_matter() -> None:
    """An earlier engine, a draft model or a vision tower may have left a table of its own."""
    assert certified_rope(CONFIG, [module(theta=5e5), module(), module(dim=8)]) == rope_from_hf_config(CONFIG)


@pytest.mark.parametrize(
    "modules",
    [[module(theta=10100.0)], [module(theta=10100.0, dtype=torch.bfloat16)], [module(), module(neox=False)], [module(dim=8)], []],
    ids=["other theta", "other theta in bf16", "both pairings", "fewer dims", "no table"],
)
def test_a_table_that_differs_is_unsupported(modules: list[SimpleNamespace]) -> None:
    """A wrong rotation is worse than none."""
    with pytest.raises(Unsupported):
        certified_rope(CONFIG, modules)
