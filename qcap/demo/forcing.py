"""Teacher forcing in a stock vLLM: a logits processor that makes a request say given tokens, and keeps the logits it had before that.

``LLM(..., logits_processors=[TeacherForcing])``, then per request ``SamplingParams(extra_args=forced(tokens, path))``. Works wherever the
worker runs, since what is kept goes to a file. Imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

_TOKENS, _PATH = "qcap_forced_tokens", "qcap_logits_path"


def forced(tokens: Sequence[int], path: str | Path) -> dict[str, Any]:
    """``extra_args`` of a request that must say ``tokens`` (give it ``max_tokens=len(tokens)``, ``temperature=0``) and whose logits go to
    ``path`` once the last of them has been said."""
    return {_TOKENS: [int(t) for t in tokens], _PATH: str(path)}


def recorded(path: str | Path) -> torch.Tensor:
    """The logits of a forced request: float32 ``[P, V]``, row j before token j was forced."""
    return load_file(str(path))["logits"]


class TeacherForcing(AdapterLogitsProcessor):  # type: ignore[misc]
    """vLLM's per-request logits processor; requests without :func:`forced` are left alone."""

    def is_argmax_invariant(self) -> bool:
        """It changes what is said."""
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """For one request, or None."""
        extra = params.extra_args or {}
        if _TOKENS not in extra:
            return None
        return _Request(extra[_TOKENS], extra[_PATH])


class _Request:
    """One forced request: ``rows[j]`` are the logits for output position j."""

    def __init__(self, tokens: Sequence[int], path: str) -> None:
        self._tokens, self._path = list(tokens), path
        self._rows: dict[int, torch.Tensor] = {}

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        # A prompt computed in several steps comes here once a step; the row of the last one is the one that counts, and stays.
        position = len(output_ids)
        if position >= len(self._tokens):
            return logits
        self._rows[position] = logits.detach().float().cpu().clone()
        if position == len(self._tokens) - 1:
            save_file({"logits": torch.stack([self._rows[j] for j in range(len(self._tokens))])}, self._path)
        only = torch.full_like(logits, float("-inf"))
        only[self._tokens[position]] = 0.0
        return only
