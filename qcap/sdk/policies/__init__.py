"""Which tokens to keep: policies that score tokens, and what turns scores into an edit.

A policy is one short function ``scores(kv, q, geometry, **params) -> float32 [L, HK, T]``: the higher, the rather kept. ``@policy("name")``
makes its name known. A new ready policy is a new file here and a line in this one; your own needs only the decorator.

    @policies.policy("key_norm")
    def key_norm(kv, q, geometry):
        return -kv[0].unflatten(-1, (geometry.num_kv_heads, -1)).float().norm(dim=-1).transpose(1, 2)

    edit = policies.apply("key_norm", kv, None, tokens, ctx.geometry, keep=0.5)
    edit.store(ctx)

``qcap.sdk.policies.suite.PolicySuite`` tests any policy: subclass it and name yours.
"""

from __future__ import annotations

from qcap.sdk.policies.registry import Policy, get, names, policy, scores
from qcap.sdk.policies.selection import apply, select

from qcap.sdk.policies import random, snapkv  # isort: skip  # they register themselves

__all__ = ["Policy", "apply", "get", "names", "policy", "random", "scores", "select", "snapkv"]
