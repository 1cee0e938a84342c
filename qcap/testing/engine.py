"""A real vLLM engine for tests, a fresh process to run it in, and what transformers computes for the same tokens."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qcap.errors import QcapError

# What a small machine without a network needs. Only defaults: what the caller's environment says wins.
ENGINE_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine core and worker live in the calling process: no children, and hooks can be watched
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; vLLM would take a share of all memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # pinning threads to cores makes two test processes fight for the same ones
    "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads that spin take the cores from the others: several times slower on a small machine
    "KMP_BLOCKTIME": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class ProcessFailed(QcapError):
    """A function run by ``run_in_process`` raised, was killed or took too long. The message holds its traceback or last output."""


def build_llm(model_path: str | Path, **kw: Any) -> Any:
    """A ``vllm.LLM`` on ``model_path``, eager, in this process, without a look at any hub. Takes about 10 s.

    Sets ``ENGINE_ENVIRONMENT`` where a variable is unset, so call it before anything imports vLLM. Build one engine in a process: vLLM
    keeps global state; ``run_in_process`` gives a fresh one.

    Args:
        model_path: a Hugging Face folder. Without a tokenizer in it, pass prompts as ``{"prompt_token_ids": ids}`` and
            ``SamplingParams(detokenize=False)``.
        **kw: arguments of ``vllm.LLM``; they win over the defaults (float32, enforce_eager, 2048 tokens, 8 requests at a time).
    """
    for name, value in ENGINE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    folder = Path(model_path)
    has_tokenizer = any((folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "skip_tokenizer_init": not has_tokenizer,
        "disable_log_stats": True,
        "seed": 0,
    }
    return LLM(**{**arguments, **kw})


def generate_tokens(llm: Any, prompts: Sequence[Sequence[int]], n: int, **params: Any) -> list[list[int]]:
    """``n`` greedy tokens for each prompt, past any end-of-sequence token.

    Args:
        llm: from ``build_llm``.
        prompts: token ids, one list a request.
        **params: further ``SamplingParams``.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": n, "ignore_eos": True, "detokenize": False, **params})
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def run_in_process(
    function: str | Callable[[Any], Any], payload: Any = None, *, timeout_s: float = 240, env: Mapping[str, str] | None = None
) -> Any:
    """``function(payload)`` in a fresh interpreter; returns what it returns.

    The child runs in a session of its own; when it ends or its time is up, whatever it started ends with it.

    Args:
        function: a function of a module: the function itself, ``"package.module:name"`` or ``"/path/file.py:name"``.
        payload: its one argument; must survive pickle, like the result.
        timeout_s: seconds before the child and its children are killed.
        env: variables added to this process's environment.

    Raises:
        ProcessFailed: the function raised (the message is its traceback), died, or took longer than ``timeout_s``.
    """
    target = function if isinstance(function, str) else f"{sys.modules[function.__module__].__file__}:{function.__qualname__}"
    with tempfile.TemporaryDirectory(prefix="qcap-process-") as scratch:
        request, answer, output = (Path(scratch, name) for name in ("request", "answer", "output"))
        request.write_bytes(pickle.dumps((list(sys.path), target, payload)))
        command = [sys.executable, "-m", "qcap.testing.engine", str(request), str(answer)]
        package_root = str(Path(__file__).parents[2])
        search = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        with output.open("wb") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**ENGINE_ENVIRONMENT, **os.environ, "PYTHONPATH": search, **(env or {})},
                start_new_session=True,
            )
            try:
                code: int | None = child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end_session(child)
        said = output.read_text(errors="replace")[-8000:]
        if code is None:
            raise ProcessFailed(f"{target} took longer than {timeout_s:g} s; its last output:\n{said}")
        if not answer.exists():
            raise ProcessFailed(f"{target} died with exit code {code}; its last output:\n{said}")
        good, result = pickle.loads(answer.read_bytes())
        if not good:
            raise ProcessFailed(f"{target} raised:\n{result}\nits last output:\n{said}")
        return result


def _end_session(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def _child(request: Path, answer: Path) -> None:
    search, target, payload = pickle.loads(request.read_bytes())
    sys.path[:] = list(dict.fromkeys([*sys.path, *search]))
    try:
        where, _, name = target.rpartition(":")
        result: tuple[bool, Any] = (True, getattr(_module(where), name)(payload))
        data = pickle.dumps(result)
    except BaseException:  # also SystemExit: the parent must hear of everything that ended the function
        data = pickle.dumps((False, traceback.format_exc()))
    answer.with_suffix(".part").write_bytes(data)
    answer.with_suffix(".part").rename(answer)


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    spec = importlib.util.spec_from_file_location(Path(where).stem, where)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {where}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@functools.lru_cache(maxsize=2)
def hf_model(model_path: str | Path) -> Any:
    """The model in transformers, float32, on the CPU, in evaluation mode; its attention is eager and can be recorded by ``hf_forward``."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register(_ATTENTION, _recording_attention)
    AttentionMaskInterface.register(_ATTENTION, eager_mask)
    model: Any = AutoModelForCausalLM.from_pretrained(str(model_path), dtype=torch.float32, attn_implementation=_ATTENTION)
    return model.eval()


_ATTENTION = "qcap_recording"
_recorded: dict[int, tuple[Any, Any, Any]] | None = None  # layer -> q, k, v of the forward that hf_forward runs


def _recording_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **_: Any) -> tuple[Any, None]:
    """Plain attention. query ``[1, HQ, T, D]``, key and value ``[1, HK, T', D]``, all after rope -> ``[1, T, HQ, D]``."""
    if _recorded is not None:
        _recorded[module.layer_idx] = (query, key, value)
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, dim=1).transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    out = scores.softmax(dim=-1) @ value.repeat_interleave(groups, dim=1)
    return out.transpose(1, 2).contiguous(), None


def hf_forward(model_path: str | Path, token_ids: Sequence[int]) -> dict[str, Any]:
    """What transformers computes for ``token_ids`` in float32: the truth for a capture.

    Returns:
        ``q`` ``[L, T, HQ*D]``, ``k`` and ``v`` ``[L, T, HK*D]``, as attention sees them (q and k after rope), and ``logits``
        ``[T, vocabulary]``; all float32 on the CPU.
    """
    import torch

    global _recorded
    model = hf_model(model_path)
    _recorded = {}
    try:
        with torch.no_grad():
            logits = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        layers = [_recorded[layer] for layer in sorted(_recorded)]
    finally:
        _recorded = None
    planes = [torch.stack([layer[plane][0].transpose(0, 1).flatten(1) for layer in layers]) for plane in range(3)]
    return {"q": planes[0], "k": planes[1], "v": planes[2], "logits": logits.clone()}


def hf_greedy(model_path: str | Path, token_ids: Sequence[int], n: int, cache: Any = None) -> list[int]:
    """The ``n`` tokens that transformers continues ``token_ids`` with, greedily, in float32.

    Args:
        token_ids: the whole prompt.
        n: tokens to generate; an end-of-sequence token does not stop it.
        cache: a ``transformers.DynamicCache`` that holds the first ``cache.get_seq_length()`` tokens of the prompt, edited or not; only
            the rest is computed, at positions that go on from there. It is not changed. None starts from nothing.

    Raises:
        ValueError: the cache leaves no token to compute.
    """
    import torch
    from transformers import DynamicCache

    model = hf_model(model_path)
    cache = DynamicCache(config=model.config) if cache is None else copy.deepcopy(cache)
    known = cache.get_seq_length()
    if known >= len(token_ids):
        raise ValueError(f"the cache holds {known} tokens of a prompt of {len(token_ids)}: at least the last one must be computed")
    step = torch.tensor([list(token_ids)[known:]])
    generated: list[int] = []
    with torch.no_grad():
        while len(generated) < n:
            positions = torch.arange(known, known + step.shape[1])[None]
            logits = model(step, past_key_values=cache, position_ids=positions, use_cache=True, logits_to_keep=1).logits
            known += step.shape[1]
            generated.append(int(logits[0, -1].argmax()))
            step = torch.tensor([[generated[-1]]])
    return generated


if __name__ == "__main__":
    _child(Path(sys.argv[1]), Path(sys.argv[2]))
