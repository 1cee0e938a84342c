"""Captured rows against what transformers computes for the same token ids."""

from __future__ import annotations

from pathlib import Path

import torch

import qcap
from qcap.testing.engine import hf_forward

NOISE = 2e-5
"""float32 rounding differs by 1e-6 to 5e-6 between the engine and transformers; a row of another token differs by more than 0.1."""


def row_errors(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Relative error of each row: ``[..., T]`` from ``[..., T, H]``."""
    got, wanted = got.double(), wanted.double()
    return (got - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)


def captured(store: str, model: str | Path, ids: list[int], salt: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """(KV ``[2, L, T, H]``, Q ``[1, L, T, H]``) of every whole chunk of ``ids``."""
    with qcap.connect(store, model=str(model)) as kv, qcap.connect(store, model=str(model), kind=qcap.CacheKind.QUERY) as q:
        keys_values, queries = kv.retrieve(ids, salt=salt), q.retrieve(ids, salt=salt)
    assert keys_values is not None and queries is not None, "nothing stored for these ids"
    return keys_values, queries


def assert_equals_transformers(store: str, model: str | Path, ids: list[int], chunk_size: int = 32) -> float:
    """Q, K and V of all N-1 computed tokens in whole chunks, every layer and token; returns the largest relative error of a row."""
    whole = (len(ids) - 1) // chunk_size * chunk_size
    keys_values, queries = captured(store, model, ids[: len(ids) - 1])
    assert keys_values.shape[2] == queries.shape[2] == whole
    wanted = hf_forward(model, ids[:whole])
    worst = 0.0
    for name, got in (("q", queries[0]), ("k", keys_values[0]), ("v", keys_values[1])):
        errors = row_errors(got, wanted[name])
        assert errors.max() < NOISE, (
            f"{name}: layer, token {torch.nonzero(errors >= NOISE)[:5].tolist()} differ by up to {errors.max():.2g}"
        )
        worst = max(worst, float(errors.max()))
    return worst
