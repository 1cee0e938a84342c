"""Plain vLLM and transformers agree on every model of qcap.testing, so that a difference with qcap in between is qcap's."""

import importlib.util
import os
from pathlib import Path

import pytest

from qcap.testing.engine import ProcessFailed, hf_greedy, run_in_process
from qcap.testing.smollm2 import smollm2_path
from qcap.testing.tiny import KINDS, tiny_model_path

JOBS = Path(__file__).parent / "engine_jobs.py"
needs_vllm = [pytest.mark.vllm, pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")]


def job(name):
    return f"{JOBS}:{name}"


@pytest.fixture(scope="module")
def paths():
    return {"smollm2": str(smollm2_path()), **{kind: str(tiny_model_path(kind)) for kind in KINDS}}


@pytest.fixture(scope="module")
def from_vllm(paths):
    return run_in_process(job("greedy"), paths, timeout_s=1200)


@pytest.fixture(scope="module")
def prompts():
    return run_in_process(job("prompts"), 1024)


# The first of them waits for all the engines, about 10 s each on two idle cores.
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["smollm2", *KINDS])
class TestGreedy:
    pytestmark = needs_vllm

    def test_vllm_and_transformers_generate_the_same_tokens(self, name, paths, from_vllm, prompts):
        assert [len(tokens) for tokens in from_vllm[name]] == [16, 16, 16]
        assert from_vllm[name] == [hf_greedy(paths[name], prompt, 16) for prompt in prompts]


@needs_vllm[0]
@needs_vllm[1]
def test_engine_core_and_worker_live_in_the_calling_process():
    here, workers, client = run_in_process(job("where_it_runs"), str(tiny_model_path("llama")))
    assert client == "InprocClient"
    assert workers == [here]
    assert here != os.getpid()


class TestRunInProcess:
    def test_returns_what_the_function_returns(self):
        assert run_in_process(job("double"), 21) == 42

    def test_takes_a_dotted_name(self):
        assert run_in_process("operator:neg", 3) == -3

    def test_an_exception_comes_back_with_its_traceback(self):
        with pytest.raises(ProcessFailed, match=r"(?s)engine_jobs\.py.*ValueError: no good: \{'a': 1\}"):
            run_in_process(job("fail"), {"a": 1})

    def test_a_death_without_an_answer_is_told(self):
        with pytest.raises(ProcessFailed, match="exit code 7"):
            run_in_process(job("exit_at_once"), 7)

    def test_out_of_time_ends_the_child_and_its_children(self, tmp_path):
        pid_file = tmp_path / "pid"
        with pytest.raises(ProcessFailed, match="longer than"):
            run_in_process(job("sleep_with_child"), str(pid_file), timeout_s=15)
        grandchild = Path("/proc", pid_file.read_text())
        if Path("/proc/self").exists():
            # a killed process that its new parent has not waited for yet still has an entry, as a zombie
            assert not grandchild.exists() or ") Z " in (grandchild / "stat").read_text()
