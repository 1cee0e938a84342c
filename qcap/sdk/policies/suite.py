"""Tests that every policy must pass, yours too: subclass, name the policy, run pytest.

class TestKeyNorm(PolicySuite):
    name = "key_norm"
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from qcap.geometry import Geometry, Rope
from qcap.sdk import edits, policies


class PolicySuite:
    """Subclass it and set ``name`` (and ``params``, where the defaults do not suit 48 tokens)."""

    name: ClassVar[str]
    params: ClassVar[dict[str, Any]] = {}
    tokens: ClassVar[int] = 48

    def geometry(self) -> Geometry:
        """A small model with grouped heads."""
        return Geometry(
            model="suite", layer_names=("a", "b", "c"), num_q_heads=4, num_kv_heads=2, head_size=8, dtype="float32", block_size=4,
            chunk_size=8, rope=Rope(rotary_dim=8, max_position=256), scale=8**-0.5,
        )  # fmt: skip

    def inputs(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """Random keys, values and queries."""
        g, generator = self.geometry(), torch.Generator().manual_seed(seed)
        kv = torch.randn(2, g.num_layers, self.tokens, g.num_kv_heads * g.head_size, generator=generator)
        q = torch.randn(1, g.num_layers, self.tokens, g.num_q_heads * g.head_size, generator=generator)
        return kv.to(dtype), q.to(dtype)

    def scores(self, kv: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """The policy's checked scores."""
        return policies.scores(self.name, kv, q, self.geometry(), **self.params)

    def test_shape_dtype_and_no_nan(self) -> None:
        """float32 ``[L, HK, T]``; :func:`policies.scores` checks it."""
        kv, q = self.inputs()
        assert self.scores(kv, q).shape == (3, 2, self.tokens)

    def test_same_twice(self) -> None:
        """Equal inputs give equal bits."""
        kv, q = self.inputs()
        assert torch.equal(self.scores(kv, q), self.scores(kv, q))

    def test_inputs_are_left_alone(self) -> None:
        """A policy reads."""
        kv, q = self.inputs()
        before = kv.clone(), q.clone()
        self.scores(kv, q)
        assert torch.equal(kv, before[0]) and torch.equal(q, before[1])

    def test_bf16_inputs(self) -> None:
        """Scores are float32 whatever the cache is."""
        kv, q = self.inputs(dtype=torch.bfloat16)
        assert self.scores(kv, q).dtype == torch.float32

    def test_non_contiguous_inputs(self) -> None:
        """Strides do not matter."""
        kv, q = self.inputs()
        strided = torch.stack((kv, kv), dim=-1)[..., 0], torch.stack((q, q), dim=-1)[..., 0]
        assert not strided[0].is_contiguous()
        assert torch.allclose(self.scores(*strided), self.scores(kv, q), rtol=1e-5, atol=1e-6)

    def test_missing_queries_say_how_to_capture_them(self) -> None:
        """A policy that needs queries says so; one that does not runs without."""
        kv, _ = self.inputs()
        if not policies.get(self.name).needs_queries:
            policies.scores(self.name, kv, None, self.geometry(), **self.params)
            return
        try:
            policies.scores(self.name, kv, None, self.geometry(), **self.params)
        except ValueError as error:
            assert "transfer_intermediate_tensors" in str(error)
        else:
            raise AssertionError(f"policy {self.name!r} is registered with needs_queries=True but ran without queries")

    def test_makes_an_edit_in_both_scopes(self) -> None:
        """The whole way: scores, choice, rows, salt."""
        kv, q = self.inputs()
        ids = list(range(100, 100 + self.tokens + 3))
        salts = set()
        for scope in ("global", "head"):
            edit = policies.apply(self.name, kv, q, ids, self.geometry(), keep=0.5, scope=scope, **self.params)
            assert edit.tensor.shape == (2, 3, 24, 16)
            assert edit.tail == (148, 149, 150)
            assert set(edit.token_ids) <= set(ids[: self.tokens]) and list(edit.token_ids) == sorted(edit.token_ids)
            salts.add(edit.salt)
        assert len(salts) == 2

    def test_values_of_kept_tokens_are_untouched(self) -> None:
        """V has no position: kept values are copies."""
        kv, q = self.inputs()
        index = policies.select(self.scores(kv, q), 16)
        kept = edits.keep(kv, index, geometry=self.geometry())
        assert torch.equal(kept[1], kv[1][:, index])
