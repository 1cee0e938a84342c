"""``python -m benchmarks.engine``: what capture costs a vLLM engine.

One child process a configuration, all on one GPU, one busy at a time and in turns: capture off, queries, queries and KV, each into host
memory with ``on_pressure="wait"``. The model has the shape of Llama 3.1 8B and dummy weights; the token ids of every run are new, so that
everything is computed and stored anew. Measured, per run:

- ``ttft N``: from ``add_request`` of one prompt of N tokens to the ``step()`` that returns its first token. Each comes right after a short
  prompt that is not timed: what counts is an engine that serves, not one that wakes up.
- ``decode``: 64 prompts of 100 tokens, 128 new tokens each: tokens per second from the first ``add_request`` to the step that returns the
  last of them. ``decode step``: the median time of a ``step()`` between the 20th and the 120th.

``--engines 2`` starts two of each configuration, and their figures count together: two processes that do the same differ by about as much
as capture costs. ``--switch`` compares each engine that captures with itself: the first token, with its connector and its hooks taken away
and put back in turns. (Not the decode step: graphs of whole steps are recorded with capture in them.)

Requests ask for a few tokens more than are timed: at its end an engine that waits for the store does so, and that is not in a figure.
``--profile`` prints what the device did in one long prefill and in 20 decode steps, by kernel.

What any benchmark of engines needs is here too: :class:`Engine` in a child, :func:`engines` and :func:`measure` in the parent.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import re
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness

REQUESTS, PROMPT, NEW, MORE = 64, 100, 128, 4
ROUSE = 1024
"""Tokens of a prompt that is not timed, served right before one that is: an engine whose process slept for seconds, while others worked,
finds its code and data pushed out of the processor's caches."""
REST_S = 0.1
"""After each prompt, and longer than a store takes: so that the device rests as long in engines that wait for one."""
STEADY = slice(20, 120)
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
CAPTURE = {"off": None, "query": {"query": True, "kv": False}, "kv": {"query": False, "kv": True}, "both": {"query": True, "kv": True}}
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "torch_dtype": "float32",
}
AGAIN = "off again"
ON, OFF = " switched on", " switched off"
NAMED = ("skipped", "lost", "error", "missing", "refused", "failed", "turned_off", "incomplete", "without", "spilled", "cut_off")


def write_model(folder: Path, shape: dict[str, Any]) -> None:
    """A config.json; weights are dummies."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_theta": 5e5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config))


class Engine:
    """In a child: one engine. A benchmark's own subclass has what is asked of it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from qcap.testing.engine import build_llm

        more: dict[str, Any] = dict(settings["engine"])
        if settings["qcap"] is not None:
            from qcap import vllm

            more["kv_transfer_config"] = vllm.transfer_config("memory://bench", **settings["qcap"])
        self._llm = build_llm(settings["model"], **more)
        self._engine = self._llm.llm_engine
        self._vocab = settings["vocab"]
        self._numbers = itertools.count()
        import torch

        self._torch, self._cuda = torch, torch.cuda.is_available()

    def about(self) -> dict[str, Any]:
        """What the engine made of its settings."""
        import vllm

        config = self._engine.vllm_config
        return {
            "vllm": vllm.__version__,
            "torch": self._torch.__version__,
            "device": self._torch.cuda.get_device_name() if self._cuda else "cpu",
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "async_scheduling": bool(getattr(config.scheduler_config, "async_scheduling", False)),
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "kv_blocks": config.cache_config.num_gpu_blocks,
            "block_size": config.cache_config.block_size,
        }

    def _tokens(self, count: int, source: random.Random) -> list[int]:
        return [source.randrange(3, self._vocab) for _ in range(count)]

    def _request(self, ids: list[int], new: int) -> tuple[str, dict[str, Any], Any]:
        """Arguments of ``add_request``, made before the clock starts."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        return str(next(self._numbers)), {"prompt_token_ids": ids}, params

    def _first_token(self, request: tuple[str, dict[str, Any], Any]) -> tuple[float, Any]:
        """Milliseconds to the first token of a request, and the engine's output with it."""
        self._synchronize()
        begun = time.perf_counter()
        self._engine.add_request(*request)
        while True:
            for output in self._engine.step():
                if output.outputs[0].token_ids:
                    return (time.perf_counter() - begun) * 1e3, output

    def _drain(self) -> None:
        """Serve what is left, and wait until all of it is stored."""
        while self._engine.has_unfinished_requests():
            self._engine.step()
        side = self._worker()
        if side is not None and side.capture is not None:
            side.capture.backend.drain()

    def _finish(self) -> None:
        """Serve what is left, then drop what was stored: the store is this process's memory."""
        self._drain()
        if self._worker() is not None:
            self._drop_stored()
        gc.collect()

    @staticmethod
    def _drop_stored() -> None:
        import obstore

        from qcap.store import buckets, memory

        for name in list(memory._shelves):
            memory.forget(name)
        for store in buckets._memory_stores.values():
            for batch in obstore.list(store):
                paths = [meta["path"] for meta in batch if "manifest" not in meta["path"]]
                if paths:
                    obstore.delete(store, paths)

    @staticmethod
    def _worker() -> Any:
        if "qcap.vllm.worker" not in sys.modules:
            return None
        return next(iter(sys.modules["qcap.vllm.worker"]._local.values()), None)

    def _synchronize(self) -> None:
        if self._cuda:
            self._torch.cuda.synchronize()

    def counters(self) -> dict[str, Any]:
        """qcap's own counts, and the memory it takes."""
        found: dict[str, Any] = {}
        if self._cuda:
            found["max_memory_allocated"] = self._torch.cuda.max_memory_allocated()
        side = self._worker()
        if side is None:
            return found
        found["counters"] = dict(side.counters)
        found["refused"] = dict(side.refused)
        if side.capture is not None:
            found["store"] = {name: count for name, count in side.capture.backend.counters().items() if count}
        report = getattr(side, "memory_report", None)
        if report is not None:
            found["memory"] = dict(report())
        else:
            ring = getattr(getattr(side, "_query", None), "ring", None)
            kept = getattr(getattr(side.capture, "_buffers", None), "_free_bytes", None)
            found["memory"] = {"ring_bytes": ring.nbytes if ring is not None else 0, "host_bytes_kept": kept}
        return found


class CaptureEngine(Engine):
    """Prompts and decoding of an engine that captures, or not."""

    _connectors: Any = None  # those of the scheduler and the worker, once they were taken away

    def _requests(self, count: int, tokens: int, new: int, seed: str) -> list[tuple[str, dict[str, Any], Any]]:
        source = random.Random(seed)
        return [self._request(self._tokens(tokens, source), new) for _ in range(count)]

    def ttft(self, tokens: int, seed: str) -> dict[str, float]:
        """Milliseconds to the first token of one prompt, in an engine that has just served another."""
        (before,) = self._requests(1, min(ROUSE, tokens), MORE, f"{seed}, before it")  # other tokens: nothing of it may be known
        (request,) = self._requests(1, tokens, MORE, seed)
        for one in (before, request):
            found = self._found_stored()
            span, output = self._first_token(one)
            self._drain()
            time.sleep(REST_S)
            if known := (output.num_cached_tokens or 0) + self._found_stored() - found:
                raise RuntimeError(f"a prompt of {tokens} tokens was to be new, and {known} tokens or chunks of it were known")
        self._finish()
        return {f"ttft {tokens} ms": span}

    def switch(self, on: bool) -> None:
        """Take qcap away from the engine, or put it back."""
        from vllm.distributed.kv_transfer import kv_transfer_state

        core = self._engine.engine_core.engine_core
        worker, side = core.model_executor.driver_worker, self._worker()
        runner = getattr(worker, "worker", worker).model_runner
        if self._connectors is None:
            self._connectors = core.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT
        core.scheduler.connector, agent = self._connectors if on else (None, None)
        if hasattr(runner, "kv_connector"):
            runner.kv_connector.set_disabled(not on)
        else:
            kv_transfer_state._KV_CONNECTOR_AGENT = agent
        if on:
            side.hooks.install()
        else:
            side.hooks.remove()

    def switched(self, tokens: int, seed: str, on_first: bool) -> dict[str, dict[str, float]]:
        """:meth:`ttft` with qcap and without, one right after the other."""
        found = {}
        for label in (ON, OFF) if on_first else (OFF, ON):
            if label == OFF:
                self.switch(False)
            try:
                found[label] = self.ttft(tokens, seed + label)
            finally:
                if label == OFF:
                    self.switch(True)
        return found

    def _found_stored(self) -> int:
        """Chunks that were captured and found to be in the store already, ever."""
        side = self._worker()
        return 0 if side is None else sum(count for name, count in side.counters.items() if name.endswith(".exists"))

    def decode(self, seed: str) -> dict[str, float]:
        """Tokens per second of many requests at once, and the time of a step in between."""
        requests = self._requests(REQUESTS, PROMPT, NEW + MORE, seed)
        steps, left = [], {name for name, _, _ in requests}
        self._synchronize()
        begun = time.perf_counter()
        for request in requests:
            self._engine.add_request(*request)
        while left:
            at = time.perf_counter()
            for output in self._engine.step():
                if len(output.outputs[0].token_ids) >= NEW:
                    left.discard(output.request_id)
            steps.append(time.perf_counter() - at)
        span = time.perf_counter() - begun
        self._finish()
        return {"decode tok/s": REQUESTS * NEW / span, "decode step ms": statistics.median(steps[STEADY]) * 1e3}

    def profile(self, tokens: int, seed: str) -> dict[str, dict[str, list[float]]]:
        """Device microseconds and launches by kernel: one prefill with its way to the host, and 20 decode steps."""
        if not self._cuda:
            return {}
        from torch.profiler import ProfilerActivity, profile

        (request,) = self._requests(1, tokens, 1, seed)
        with profile(activities=[ProfilerActivity.CUDA]) as prefill:
            self._engine.add_request(*request)
            self._drain()
            self._torch.cuda.synchronize()
        self._finish()
        for request in self._requests(REQUESTS, PROMPT, NEW, seed + " decode"):
            self._engine.add_request(*request)
        for _ in range(STEADY.start):
            self._engine.step()
        self._torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as decode:
            for _ in range(20):
                self._engine.step()
            self._torch.cuda.synchronize()
        self._finish()
        return {f"prefill {tokens}": self._by_name(prefill), "20 decode steps": self._by_name(decode)}

    def _by_name(self, profile: Any) -> dict[str, list[float]]:
        device = self._torch.autograd.DeviceType.CUDA
        spent: dict[str, list[float]] = {}
        for event in profile.events():
            if event.device_type == device:
                entry = spent.setdefault(event.name, [0.0, 0])
                entry[0] += event.time_range.elapsed_us()
                entry[1] += 1
        return spent


def child(kind: type[Engine]) -> None:
    """Answer the parent's questions, a line of JSON each, until it hangs up: settings and questions come on stdin, answers go to the file
    descriptor that the settings name, and all that is printed here goes to a log."""
    settings = json.loads(sys.stdin.readline())
    with os.fdopen(settings["answers"], "w") as answers:
        try:
            engine = kind(settings)
            print(json.dumps(engine.about()), file=answers, flush=True)
            for line in sys.stdin:
                name, arguments = json.loads(line)
                print(json.dumps(getattr(engine, name)(*arguments)), file=answers, flush=True)
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
    os._exit(0)  # the engine's own way out can take long, and nothing is left to save


class Children:
    """One process a configuration, asked one at a time. No children of multiprocessing: vLLM, and qcap's ``memory://``, would take them for
    an engine core that serves another process.

    Args:
        module: of the benchmark; with ``--child`` it runs :func:`child`.
        settings: of each configuration.
    """

    def __init__(self, module: str, settings: dict[str, dict[str, Any]]) -> None:
        self._settings = settings
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._answers: dict[str, Any] = {}
        for config, of_config in settings.items():
            ours, theirs = os.pipe()
            command = [sys.executable, "-m", module, "--child"]
            with open(of_config["log"], "w") as log:
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log, "pass_fds": (theirs,)}
                process = subprocess.Popen(command, **pipes, text=True, cwd=harness.ROOT, env={**os.environ, **of_config["env"]})
            os.close(theirs)
            self._processes[config], self._answers[config] = process, os.fdopen(ours)
            self._send(config, {**of_config, "answers": theirs})

    def _send(self, config: str, what: Any) -> None:
        pipe = self._processes[config].stdin
        assert pipe is not None
        try:
            print(json.dumps(what), file=pipe, flush=True)
        except BrokenPipeError:
            pass  # the answer will not come, and tells why

    def answer(self, config: str) -> Any:
        """What the child says next. Raises RuntimeError with the end of its log if it died."""
        line = self._answers[config].readline()
        if not line:
            said = Path(self._settings[config]["log"]).read_text(errors="replace")[-6000:]
            raise RuntimeError(f"the engine of {config!r} died; its last output:\n{said}")
        return json.loads(line)

    def first_answers(self) -> dict[str, Any]:
        """What each child says once its engine is up; raises as soon as one dies."""
        found: dict[str, Any] = {}
        while len(found) < len(self._answers):
            waiting = {pipe: config for config, pipe in self._answers.items() if config not in found}
            for pipe in select.select(list(waiting), [], [])[0]:
                found[waiting[pipe]] = self.answer(waiting[pipe])
        return found

    def ask(self, config: str, name: str, *arguments: Any) -> Any:
        """Call a method of the child's Engine."""
        self._send(config, (name, arguments))
        return self.answer(config)

    def close(self) -> None:
        """End all."""
        for process in self._processes.values():
            process.kill()
            process.wait()


def measure(
    one_round: Callable[[int], Iterable[tuple[str, dict[str, float]]]], repeats: int, warm_up: int, until: float
) -> dict[Any, list[float]]:
    """``(measure, config)`` -> one figure a run, of what ``one_round`` says of each configuration. Stops early, between rounds, when the
    next would end after ``until``."""
    figures: dict[Any, list[float]] = {}
    slowest = 0.0
    for number in range(warm_up + repeats):
        begun = time.monotonic()
        if number > warm_up and begun + slowest > until:
            print(f"stopped after {number - warm_up} of {repeats} rounds: the time is up", file=sys.stderr)
            break
        for config, got in one_round(number):
            for name, value in got.items() if number >= warm_up else ():
                figures.setdefault((name, config), []).append(value)
        slowest = max(slowest, time.monotonic() - begun)
        print(f"round {number + 1} of {warm_up + repeats}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    return figures


def capture_round(
    children: Children, names: list[str], tokens: list[int], number: int, *, switch: bool = False
) -> Iterator[tuple[str, dict[str, float]]]:
    """Every prompt length, then decoding, each in all engines in turn: another one first each round, since a device that just worked is
    slower than one that rested. A single ``off`` has two turns, to show how far two measurements of the same thing lie apart.

    ``switch``: then each engine that captures against itself."""
    turns = [*names, AGAIN] if "off" in names and all(name == config_of(name) for name in names) else names
    first = number % len(turns)
    for what in (*tokens, "decode"):
        for config in (*turns[first:], *turns[:first]):
            seed, engine = f"{what} {number} {config == AGAIN}", "off" if config == AGAIN else config
            yield config, children.ask(engine, "decode", seed) if what == "decode" else children.ask(engine, "ttft", what, seed)
    for what, name in itertools.product(tokens, names) if switch else ():
        if config_of(name) != "off":
            for label, got in children.ask(name, "switched", what, f"{what} {number} {name}", number % 2 == 0).items():
                yield config_of(name) + label, got


def config_of(name: str) -> str:
    """The configuration of an engine, of which there may be several: ``off 2`` is the second that captures nothing."""
    config, _, number = name.rpartition(" ")
    return config if number.isdigit() else name


def together(figures: dict[Any, list[float]]) -> dict[Any, list[float]]:
    """``(measure, config)`` -> the figures of all its engines."""
    found: dict[Any, list[float]] = {}
    for (what, name), values in figures.items():
        found.setdefault((what, config_of(name)), []).extend(values)
    return found


def summary(figures: dict[Any, list[float]], common: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a measure and configuration: median, p20, p80, and how much slower than ``off`` (both of its turns) it is, in percent."""
    rows = []
    for (name, config), values in figures.items():
        p20, p50, p80 = harness.spread(sorted(values))
        p50 = statistics.median(values)
        base = figures.get((name, "off"), []) + (figures.get((name, AGAIN), []) if config != AGAIN else [])
        if config.endswith((ON, OFF)):
            base = figures[name, config.removesuffix(ON) + OFF] if config.endswith(ON) else []
        slower = None
        if base and config != "off":
            off = statistics.median(base)
            slower = 100 * (off / p50 - 1 if name.endswith("tok/s") else p50 / off - 1)
        row = {"measure": name, "config": config, "runs": len(values), "p20": p20, "p50": p50, "p80": p80, "slower_pct": slower}
        rows.append({**row, "values": values, **common})
    return sorted(rows, key=lambda row: list(dict.fromkeys(name for name, _ in figures)).index(row["measure"]))


def kernel_names() -> list[str]:
    """Of all kernels of qcap."""
    sources = (harness.ROOT / "qcap" / "kernels").glob("*.py")
    return sorted(name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source.read_text(), re.MULTILINE))


def show_profile(config: str, profile: dict[str, dict[str, list[float]]], console: Console) -> None:
    """qcap's kernels and all copies, and the largest of the rest, by device time."""
    for part, spent in profile.items():
        total = sum(time_us for time_us, _ in spent.values()) or 1.0
        table = Table("what", "launches", "us", "of device time", title=f"{config}: {part}, {total / 1e3:.2f} ms on the device")
        mine = (*kernel_names(), "Memcpy", "Memset", "FillFunctor")
        ranked = sorted(spent.items(), key=lambda item: -item[1][0])
        named = [item for item in ranked if any(word in item[0] for word in mine)]
        for name, (time_us, launches) in [*named, *[item for item in ranked if item not in named][:6]]:
            table.add_row(name[:90], str(launches), f"{time_us:.0f}", f"{time_us / total:.2%}")
        console.print(table)


def arguments(prog: str, doc: str | None) -> argparse.ArgumentParser:
    """Options of every benchmark of engines."""
    parser = argparse.ArgumentParser(prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, help="a folder with a config.json of another shape; weights are dummies all the same")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--chunk-size", type=int, default=256)
    parser.add_argument("--budget-s", type=float, default=540, help="start no round that would end after so many seconds")
    parser.add_argument("--kv-gib", type=float, default=6.0, help="KV cache of each engine")
    parser.add_argument("--block-size", type=int, default=None, help="tokens of a KV block; default 16 (32 on a CPU)")
    parser.add_argument("--qcap", default="{}", help="further arguments of transfer_config, as JSON")
    parser.add_argument("--hold", type=Path, help="start the rounds when this file exists: for a script that uses the device until then")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short prompts, also on a CPU: to try this script")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


@contextmanager
def engines(
    module: str, args: argparse.Namespace, capture: dict[str, dict[str, Any] | None], options: dict[str, Any]
) -> Iterator[tuple[Children, dict[str, Any]]]:
    """One child a configuration, all up, and what each says of itself; they end with the block.

    Args:
        module: of the benchmark.
        args: as :func:`arguments` has them.
        capture: arguments of ``transfer_config`` by configuration; None for an engine without qcap.
        options: further arguments of ``vllm.LLM``.
    """
    import torch

    begun, cuda = time.monotonic(), torch.cuda.is_available()
    scratch = Path(tempfile.mkdtemp(prefix="qcap-bench-"))
    children: Children | None = None
    try:
        model = (args.model_dir or scratch).resolve()
        if args.model_dir is None:
            write_model(scratch, TINY if args.tiny else LLAMA_8B)
        shape = json.loads((model / "config.json").read_text())
        engine: dict[str, Any] = {
            "dtype": shape.get("torch_dtype", shape.get("dtype", "bfloat16")),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "enforce_eager": not cuda,
            "block_size": args.block_size or (16 if cuda else 32),
            **options,
        }
        if cuda:
            # Several engines start at once on one device: vLLM would take the others' memory for its own, so the KV cache is in bytes.
            engine |= {"gpu_memory_utilization": 0.25, "kv_cache_memory_bytes": int(args.kv_gib * 2**30)}
        common = {"chunk_size": args.chunk_size, "on_pressure": "wait"}
        settings = {
            config: {
                "config": config,
                "model": str(model),
                "vocab": shape["vocab_size"],
                "engine": engine,
                "qcap": None if ours is None else {**common, **ours, **json.loads(args.qcap)},
                "log": str(scratch / f"{config}.log"),
                "env": {
                    **ENVIRONMENT,
                    # compiled at the same time by all: a folder each, so that nobody reads what another is writing
                    "VLLM_CACHE_ROOT": str(scratch / config / "vllm"),
                    "TORCHINDUCTOR_CACHE_DIR": str(scratch / config / "inductor"),
                    "TRITON_CACHE_DIR": str(scratch / config / "triton"),
                },
            }
            for config, ours in capture.items()
        }
        children = Children(module, settings)
        about = children.first_answers()
        print(f"engines started in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        while args.hold is not None and not args.hold.exists():
            time.sleep(0.2)
        yield children, about
    finally:
        if children is not None:
            children.close()
        shutil.rmtree(scratch, ignore_errors=True)


def show_figures(rows: list[dict[str, Any]], about: dict[str, Any], chunk_size: int, console: Console) -> None:
    """The rows of :func:`summary`, below what the engines are and where they differ."""
    first = next(iter(about.values()))
    table = Table("measure", "capture", "runs", "p20", "p50", "p80", "slower than off")
    for row in rows:
        slower = "" if row["slower_pct"] is None else f"{row['slower_pct']:+.2f} %"
        values = (f"{row[name]:.3f}" for name in ("p20", "p50", "p80"))
        table.add_row(row["measure"], row["config"], str(row["runs"]), *values, slower)
    console.print(", ".join(f"{name} {value}" for name, value in (first | {"chunk_size": chunk_size}).items()))
    console.print(table)
    for config, said in about.items():
        difference = {name: value for name, value in said.items() if value != first[name]}
        if difference:
            console.print(f"{config}: {difference}")


def show_pairs(figures: dict[Any, list[float]], console: Console) -> None:
    """How much longer a first token took with qcap than without, in one engine, right before or after."""
    for (name, config), values in figures.items():
        if config.endswith(ON):
            ours = config.removesuffix(ON)
            off = figures[name, ours + OFF]
            low, median, high = harness.spread(sorted(a - b for a, b in zip(values, off, strict=True)))
            share = 100 * median / statistics.median(off)
            console.print(f"{name}, {ours}, pairs in one engine: {median:+.3f} ms ({share:+.2f} %), p20 {low:+.3f}, p80 {high:+.3f}")


def show_counters(config: str, said: dict[str, Any], console: Console) -> None:
    """What :meth:`Engine.counters` said: what was lost or went wrong, and the memory taken."""
    counts = Counter(said.get("counters", {}))
    bad = {name: count for name, count in counts.items() if any(word in name for word in NAMED) and count}
    console.print(
        f"{config}: steps {counts['steps']}, replayed {counts['query.steps_replayed']}, lost or wrong: {bad or 'nothing'}, "
        f"store {said.get('store', {})}, memory {said.get('memory', {})}, most on the device {said.get('max_memory_allocated')}"
    )


def main(argv: list[str] | None = None) -> int:
    """Measure, print, optionally append JSON lines."""
    parser = arguments("benchmarks.engine", __doc__)
    parser.add_argument("--configs", default="off,query,both", help=f"of {', '.join(CAPTURE)}")
    parser.add_argument("--tokens", default="1024,8192", help="lengths of the prompts whose first token is timed")
    parser.add_argument("--engines", type=int, default=1, help="of each configuration")
    parser.add_argument("--switch", action="store_true", help="also compare engines that capture with themselves, qcap taken away")
    parser.add_argument("--profile", action="store_true", help="afterwards, device time by kernel")
    args = parser.parse_args(argv)
    if args.child:
        child(CaptureEngine)
    begun = time.monotonic()
    configs, tokens = args.configs.split(","), [int(n) for n in args.tokens.split(",")]
    if unknown := set(configs) - set(CAPTURE):
        parser.error(f"unknown configuration {', '.join(sorted(unknown))}")
    if args.tiny and args.tokens == parser.get_default("tokens"):
        tokens = [64, 512]
    import torch

    cuda = torch.cuda.is_available()
    batched = max(tokens) if args.tiny else 8192
    options = {
        "enable_prefix_caching": True,  # as by default; without it, vLLM hashes prompts only for an engine that has a connector
        "max_model_len": max(*tokens, PROMPT + NEW + MORE) + 256,
        "max_num_batched_tokens": max(batched, max(tokens) + 256 if not cuda else 0),
        "max_num_seqs": REQUESTS,
    }
    console = Console(width=160)
    names = [config if number == 1 else f"{config} {number}" for number in range(1, args.engines + 1) for config in configs]
    with engines("benchmarks.engine", args, {name: CAPTURE[config_of(name)] for name in names}, options) as (children, about):
        reserve = 45.0 * len(configs) if args.profile and cuda else 10.0
        until = begun + args.budget_s - reserve

        def one_round(number: int) -> Iterator[tuple[str, dict[str, float]]]:
            return capture_round(children, names, tokens, number, switch=args.switch)

        figures = measure(one_round, args.repeats, args.warm_up, until)
        left = {name: children.ask(name, "counters") for name in names}
        common = {"chunk_size": args.chunk_size, "commit": harness.commit(), "engine": about[configs[0]]}
        rows = summary(together(figures), common)
        show_figures(rows, about, args.chunk_size, console)
        show_pairs(figures, console)
        for (what, name), values in figures.items() if args.engines > 1 else ():
            console.print(f"{what}, engine {name!r}: median {statistics.median(values):.3f} of {len(values)}")
            rows.append({"measure": what, "engine_of_its_configuration": name, "values": values, **common})
        for config, said in left.items():
            show_counters(config, said, console)
            rows.append({"measure": "counters", "config": config, **said, **common})
        write(args.json, rows)
        if args.profile:
            for config in configs:
                profile = children.ask(config, "profile", max(tokens), "profile")
                show_profile(config, profile, console)
                write(args.json, [{"measure": "profile", "config": config, "spent_us": profile, **common}])
    return 0


def write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Append JSON lines."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps(harness.rounded(row)) + "\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
