"""Run in processes of their own by test_engine.py."""

import os
import time

from qcap.testing.engine import build_llm, generate_tokens

LENGTHS = (120, 37, 5)


def prompts(vocabulary=1024):
    """Three prompts of fixed random token ids."""
    import torch

    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]


def greedy(paths):
    """``{name: model folder}`` -> ``{name: 16 greedy tokens for each prompt}``: plain vLLM, no connector, one engine after the other."""
    from vllm.distributed import cleanup_dist_env_and_memory

    tokens = {}
    for name, path in paths.items():
        llm = build_llm(path)
        tokens[name] = generate_tokens(llm, prompts(), 16)
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
    return tokens


def where_it_runs(path):
    """Process ids: this process, the worker; and the kind of the engine's client."""
    llm = build_llm(path)
    return os.getpid(), llm.collective_rpc(worker_pid), type(llm.llm_engine.engine_core).__name__


def worker_pid(worker):
    return os.getpid()


def double(number):
    return 2 * number


def fail(payload):
    raise ValueError(f"no good: {payload}")


def exit_at_once(payload):
    os._exit(payload)


def sleep_with_child(pid_file):
    """Starts a child, writes its process id, and never ends."""
    import subprocess
    import sys
    from pathlib import Path

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pid_file).with_suffix(".part").write_text(str(child.pid))
    Path(pid_file).with_suffix(".part").rename(pid_file)
    time.sleep(600)
