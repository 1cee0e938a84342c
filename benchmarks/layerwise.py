"""``python -m benchmarks.layerwise``: what a stored prefix costs when it is loaded layer by layer, and what storing it costs.

One child process a configuration, all on one GPU, one busy at a time and in turns: ``layerwise``, ``whole`` (loads a prefix at once before
the forward pass) and ``off`` (no connector). The model has the shape of Llama 3.1 8B and dummy weights; vLLM's own prefix cache is on, and
the store is ``memory://``. Each round has a new prompt of N tokens and, for each tail of t tokens, new last tokens for every run:

- ``prefill N``: time to first token of the whole prompt, of which nothing is stored or cached; two of the engines store it meanwhile.
- ``load t``: vLLM's prefix cache is empty, all but t tokens come from the store, t are computed.
- ``compute t``: the same step with the pages in place: vLLM's prefix cache has all but t tokens.
- ``copy t``: as many bytes as were loaded, from page-locked memory to the device in large pieces, while nothing else runs.

Times are from ``add_request`` to the ``step()`` that returns the first token. What was loaded and what was cached is checked after every
run: a run in which it is not exactly that ends the benchmark. Between the runs the store drains, and after a round it is emptied.

The acceptance, of medians: ``load t`` of ``layerwise`` is at most 1.05 x max(copy, compute) + 3 ms; ``prefill N`` of ``layerwise`` is at
most 1.5 % above that of ``off``.

``--trace FOLDER`` afterwards loads once more for each tail: when qcap was called on the engine's thread and for how long, in a load and in
a step with the pages in place, and when copies were made (``calls-t.json``, and tables); and what the device did in a load
(``trace-t.json.gz``, for Perfetto).
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import engine, harness
from qcap.connectors.streams import Turns

MORE = 4
"""Tokens that a request asks for beyond the one that is timed: an engine waits for the store at a request's end, outside of the figure."""
FACTOR, EXTRA_MS, STORE_PCT = 1.05, 3.0, 1.5
LOADS = {"query": False, "kv": True, "load": "all"}
CONFIGS: dict[str, dict[str, Any] | None] = {"layerwise": {**LOADS, "layerwise": True}, "whole": {**LOADS, "layerwise": False}, "off": None}
PIECE_BYTES, SOURCE_BYTES = 64 << 20, 1 << 30
TINY = {"tokens": 512, "tails": [64, 128], "batched": 256, "chunk_size": 64, "host_gib": 0.25}
RESERVE_S = 10.0
"""For what comes after the rounds; as much again for a trace of each tail."""


def why_wrong(counted: dict[str, int], cached: int | None, *, loaded: int, in_cache: int, layerwise: bool) -> str:
    """Why a run was not the one that was meant; "" if it was.

    Args:
        counted: how far qcap's counters moved in it.
        cached: tokens that the engine says it did not compute.
        loaded: tokens that had to come from the store.
        in_cache: tokens that vLLM's own prefix cache had to have.
        layerwise: whether a load had to go layer by layer.
    """
    wrong = []
    wanted = {"load.tokens": loaded, "load.layerwise": int(layerwise and loaded > 0), "load.failed": 0}
    for name, value in wanted.items():
        if counted.get(name, 0) != value:
            wrong.append(f"{name} is {counted.get(name, 0)}, not {value}")
    if cached != loaded + in_cache:
        wrong.append(f"{cached} tokens were not computed, and it had to be {loaded + in_cache}")
    return "; ".join(wrong)


class LoadEngine(engine.Engine):
    """Prompts whose beginning is computed, stored, loaded or cached."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._layerwise = bool((settings["qcap"] or {}).get("layerwise"))
        self._prompt: list[int] = []
        self._source: Any = None
        self._target: Any = None

    def prefill(self, tokens: int, seed: str) -> dict[str, float]:
        """A new prompt of which nothing is known, and whose beginning the other runs are about."""
        self._prompt = self._tokens(tokens, random.Random(seed))
        self._reset()
        return {f"prefill {tokens} ms": self._run(self._prompt, loaded=0, in_cache=0)}

    def load(self, tail: int, seed: str) -> dict[str, float]:
        """All but the last ``tail`` tokens from the store."""
        self._reset()
        return {f"load {tail} ms": self._run(self._with_tail(tail, seed), loaded=len(self._prompt) - tail, in_cache=0)}

    def compute(self, tail: int, seed: str) -> dict[str, float]:
        """All but the last ``tail`` tokens in the pages."""
        return {f"compute {tail} ms": self._run(self._with_tail(tail, seed), loaded=0, in_cache=len(self._prompt) - tail)}

    def copy(self, tail: int) -> dict[str, float]:
        """What loading all but ``tail`` tokens would take at the rate of page-locked memory."""
        from qcap.kinds import CacheKind

        geometry = self._worker().capture.geometry
        nbytes = (len(self._prompt) - tail) * geometry.chunk_bytes(CacheKind.KV) // geometry.chunk_size
        if self._source is None:
            self._source = self._torch.empty(SOURCE_BYTES if self._cuda else PIECE_BYTES, dtype=self._torch.uint8, pin_memory=self._cuda)
            self._target = self._torch.empty(PIECE_BYTES, dtype=self._torch.uint8, device="cuda" if self._cuda else "cpu")
        pieces, done = [], 0
        while done < nbytes:
            at, size = done % self._source.nbytes, min(PIECE_BYTES, nbytes - done)
            pieces.append((self._target[:size], self._source[at : at + size]))
            done += size
        self._synchronize()
        begun = time.perf_counter()
        for target, source in pieces:
            target.copy_(source, non_blocking=True)
        self._synchronize()
        span = (time.perf_counter() - begun) * 1e3
        return {f"copy {tail} ms": span, f"copy {tail} GB/s": nbytes / span / 1e6}

    def forget(self) -> dict[str, float]:
        """Drop what was stored."""
        self._finish()
        return {}

    def trace(self, tokens: int, tail: int, seed: str, folder: str) -> dict[str, Any]:
        """A load and a step with the pages in place, with a clock around qcap's calls; and a load that is profiled."""
        self.prefill(tokens, seed)
        self._reset()
        found = {"load": self._called(tail, f"{seed} load"), "compute": self._called(tail, f"{seed} compute")}
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"calls-{tail}.json").write_text(json.dumps(found))
        if self._cuda:
            from torch.profiler import ProfilerActivity, profile

            self._reset()
            request = self._request(self._with_tail(tail, f"{seed} profile"), MORE)
            with profile(activities=[ProfilerActivity.CUDA]) as traced:
                self._first_token(request)
                self._torch.cuda.synchronize()
            traced.export_chrome_trace(str(Path(folder) / f"trace-{tail}.json.gz"))
        self._finish()
        return found

    def _called(self, tail: int, seed: str) -> dict[str, Any]:
        """Milliseconds to the first token, [method, beginning, milliseconds] of each of qcap's calls until then, and [beginning, bytes] of
        each copy of the load."""
        request, calls = self._request(self._with_tail(tail, seed), MORE), []
        with timed_calls(sys.modules["qcap.vllm.connector"].QcapConnector, calls), timed_copies(self._torch, self._cuda) as copies:
            self._synchronize()
            begun = time.perf_counter()
            span, _ = self._first_token(request)
        self._drain()
        self._synchronize()
        gc.collect()
        return {
            "ms": span,
            "calls": [[name, (at - begun) * 1e3, took * 1e3] for name, at, took in calls],
            "copies": [[copies[0][0].elapsed_time(event), nbytes] for event, nbytes in copies[1:]],
        }

    def _with_tail(self, tail: int, seed: str) -> list[int]:
        return self._prompt[:-tail] + self._tokens(tail, random.Random(f"{seed} tail"))

    def _reset(self) -> None:
        """Empty vLLM's own prefix cache. Raises RuntimeError if it will not."""
        for _ in range(10):
            if self._engine.reset_prefix_cache() is not False:  # an engine that says nothing is checked by what the run then loads
                return
            self._engine.step()  # what a finished request held may come back with the step after its last
        raise RuntimeError("vLLM does not empty its prefix cache: blocks are still in use")

    def _run(self, ids: list[int], *, loaded: int, in_cache: int) -> float:
        """Milliseconds to the first token. Raises RuntimeError if not just so many tokens were loaded, and cached."""
        before = self._counts()
        request = self._request(ids, MORE)
        span, output = self._first_token(request)
        counted = {name: count - before.get(name, 0) for name, count in self._counts().items()}
        if self._worker() is None:
            counted = {"load.tokens": 0}
        wrong = why_wrong(counted, output.num_cached_tokens, loaded=loaded, in_cache=in_cache, layerwise=self._layerwise)
        if wrong:
            raise RuntimeError(f"a prompt of {len(ids)} tokens, of which {loaded} were to be loaded and {in_cache} cached: {wrong}")
        self._drain()
        gc.collect()
        return span

    def _counts(self) -> dict[str, int]:
        side = self._worker()
        return {} if side is None else {name: count for name, count in side.counters.items() if name.startswith("load.")}


@contextmanager
def timed_calls(kind: type, calls: list[tuple[str, float, float]]) -> Iterator[None]:
    """Meanwhile every call of a public method of ``kind`` appends (method, beginning, seconds); calls within a call are part of it."""
    methods = {name: value for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")}
    inside: list[str] = []

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if inside:
                return method(*args, **kwargs)
            inside.append(name)
            begun = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                calls.append((name, begun, time.perf_counter() - begun))
                inside.pop()

        return call

    for name, method in methods.items():
        setattr(kind, name, timed(name, method))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(kind, name, method)


@contextmanager
def timed_copies(torch: Any, cuda: bool) -> Iterator[list[tuple[Any, int]]]:
    """An event before each copy of the first pair of streams that takes turns meanwhile, and the copy's bytes; before them one of now."""
    take, copies, first = Turns.take, list[tuple[Any, int]](), list[Turns]()

    def event(stream: Any, nbytes: int) -> None:
        copies.append((torch.cuda.Event(enable_timing=True), nbytes))
        copies[-1][0].record(stream)

    def timed(turns: Turns, nbytes: int) -> Any:
        stream = take(turns, nbytes)
        first.extend([turns] * (not first))
        if turns is first[0]:
            event(stream, nbytes)
        return stream

    if cuda:
        event(torch.cuda.current_stream(), 0)
        Turns.take = timed  # type: ignore[method-assign]
    try:
        yield copies
    finally:
        Turns.take = take  # type: ignore[method-assign]


def load_round(
    children: engine.Children, configs: list[str], tokens: int, tails: list[int], number: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """One prompt, all tails, each in all engines in turn; another one is first each round."""
    seed, first = f"round {number}", number % len(configs)
    configs = [*configs[first:], *configs[:first]]
    for config in configs:
        yield config, children.ask(config, "prefill", tokens, seed)
    for tail in tails:
        for config in configs:
            if CONFIGS[config] is not None:
                yield config, children.ask(config, "load", tail, f"{seed} load")
            yield config, children.ask(config, "compute", tail, f"{seed} compute")
        yield "layerwise", children.ask("layerwise", "copy", tail)
    for config in configs:
        yield config, children.ask(config, "forget")


def limit_ms(load_ms: float, compute_ms: float) -> float:
    """What a load that goes layer by layer may take."""
    return FACTOR * max(load_ms, compute_ms) + EXTRA_MS


def accept_loads(figures: dict[Any, list[float]], tails: list[int]) -> list[dict[str, Any]]:
    """One row a tail, of medians; what a configuration that did not run would give is None."""
    rows = []
    for tail in tails:
        ours = figures[f"load {tail} ms", "layerwise"]
        p20, _, p80 = harness.spread(sorted(ours))
        p50 = statistics.median(ours)
        load = statistics.median(figures[f"copy {tail} ms", "layerwise"])
        compute = statistics.median(figures[f"compute {tail} ms", "layerwise"])
        limit = limit_ms(load, compute)
        whole = figures.get((f"load {tail} ms", "whole"))
        whole_ms = statistics.median(whole) if whole else None
        row = {"measure": "layerwise load", "tail": tail, "runs": len(ours), "load_ms": load, "compute_ms": compute, "limit_ms": limit}
        row |= {"p20": p20, "p50": p50, "p80": p80, "held": p50 <= limit, "over_ms": p50 - limit}
        rows.append(row | {"whole_ms": whole_ms, "ratio": whole_ms / p50 if whole_ms is not None else None})
    return rows


def accept_store(figures: dict[Any, list[float]], tokens: int) -> dict[str, Any] | None:
    """How much longer a prompt takes that is stored meanwhile, in percent of medians; None if no engine ran without."""
    off = figures.get((f"prefill {tokens} ms", "off"))
    if not off:
        return None
    off_ms, ours_ms = statistics.median(off), statistics.median(figures[f"prefill {tokens} ms", "layerwise"])
    slower = 100 * (ours_ms / off_ms - 1)
    row = {"measure": "layerwise store", "tokens": tokens, "runs": len(off), "off_ms": off_ms, "layerwise_ms": ours_ms}
    return row | {"slower_pct": slower, "held": slower <= STORE_PCT}


def show_acceptance(loads: list[dict[str, Any]], store: dict[str, Any] | None, on_device: bool, console: Console) -> None:
    """Both tables; without a GPU they say that they mean nothing."""
    nothing = "" if on_device else "  (on a CPU: to try the script, the figures mean nothing)"

    def verdict(row: dict[str, Any]) -> str:
        return ("yes" if row["held"] else "no") if on_device else "-"

    title = f"load: at most {FACTOR} x max(load, compute) + {EXTRA_MS:g} ms{nothing}"
    table = Table(
        "tail", "load ms", "compute ms", "limit ms", "layerwise p20", "p50", "p80", "held", "over ms", "whole ms", "ratio", title=title
    )
    for row in loads:
        values = (f"{row[name]:.2f}" for name in ("load_ms", "compute_ms", "limit_ms", "p20", "p50", "p80"))
        whole = ("", "") if row["whole_ms"] is None else (f"{row['whole_ms']:.2f}", f"{row['ratio']:.2f}x")
        table.add_row(str(row["tail"]), *values, verdict(row), f"{row['over_ms']:+.2f}", *whole)
    console.print(table)
    if store is not None:
        table = Table("tokens", "off ms", "layerwise ms", "slower", "held", title=f"store: at most {STORE_PCT} % slower{nothing}")
        values = (f"{store[name]:.2f}" for name in ("off_ms", "layerwise_ms"))
        table.add_row(str(store["tokens"]), *values, f"{store['slower_pct']:+.2f} %", verdict(store))
        console.print(table)


def show_calls(what: str, found: dict[str, Any], console: Console) -> None:
    """qcap's calls on the engine's thread in one run, by method; the ten longest of all."""
    calls = found["calls"]
    total = sum(took for _, _, took in calls)
    title = f"{what}: first token after {found['ms']:.2f} ms, {total:.2f} ms of them in qcap's calls (milliseconds)"
    table = Table("method", "calls", "in all", "longest", "first began", "last ended", title=title)
    for name in dict.fromkeys(name for name, _, _ in calls):
        mine = [(at, took) for method, at, took in calls if method == name]
        figures = (sum(took for _, took in mine), max(took for _, took in mine), mine[0][0], mine[-1][0] + mine[-1][1])
        table.add_row(name, str(len(mine)), *(f"{value:.3f}" for value in figures))
    console.print(table)
    if copies := found.get("copies"):
        (first, _), (last, rest) = copies[0], copies[-1]
        rate = (sum(nbytes for _, nbytes in copies) - rest) / 1e6 / max(last - first, 1e-9)
        console.print(f"copies: first after {first:.2f} ms, last ({rest / 1e6:.1f} MB) after {last:.2f}; {rate:.2f} GB/s until then")
    longest = sorted(calls, key=lambda call: -call[2])[:10]
    console.print("longest: " + ", ".join(f"{name} at {at:.2f} for {took:.2f}" for name, at, took in longest))


def main(argv: list[str] | None = None) -> int:
    """Measure, print, optionally append JSON lines."""
    parser = engine.arguments("benchmarks.layerwise", __doc__)
    parser.set_defaults(kv_gib=10.0)
    parser.add_argument("--configs", default=",".join(CONFIGS), help="layerwise, and what it is compared with")
    parser.add_argument("--tokens", type=int, default=32768, help="length of the prompt")
    parser.add_argument("--tails", default="1024,4096", help="how many of its last tokens are computed, not loaded")
    parser.add_argument("--host-gib", type=float, default=12.0, help="qcap's host memory, in which a stored prompt has to fit")
    parser.add_argument("--trace", type=Path, help="a folder: afterwards, one load of each tail in detail")
    args = parser.parse_args(argv)
    if args.child:
        engine.child(LoadEngine)
    begun = time.monotonic()
    configs, tokens, tails, batched = args.configs.split(","), args.tokens, [int(n) for n in args.tails.split(",")], 8192
    if args.tiny:  # a length that was given stays
        tokens = TINY["tokens"] if tokens == parser.get_default("tokens") else tokens
        tails = TINY["tails"] if args.tails == parser.get_default("tails") else tails
        args.chunk_size = TINY["chunk_size"] if args.chunk_size == parser.get_default("chunk_size") else args.chunk_size
        args.host_gib = TINY["host_gib"] if args.host_gib == parser.get_default("host_gib") else args.host_gib
        batched = TINY["batched"]
    if "layerwise" not in configs or set(configs) - set(CONFIGS):
        parser.error(f"--configs: layerwise and of {', '.join(CONFIGS)}, not {args.configs}")
    for tail in tails:
        if not 0 < tail < tokens or tail > batched or (tokens - tail) % args.chunk_size:
            parser.error(
                f"a tail of {tail} of {tokens} tokens: it has to fit one step ({batched}) and leave whole chunks of {args.chunk_size}"
            )
    options = {
        "enable_prefix_caching": True,
        "max_model_len": tokens + MORE + 256,
        "max_num_batched_tokens": batched,
        "max_num_seqs": 8,
    }
    host = {"host_bytes": int(args.host_gib * 2**30)}
    capture = {config: ours and {**ours, **host} for config, ours in CONFIGS.items() if config in configs}
    console = Console(width=160)
    with engine.engines("benchmarks.layerwise", args, capture, options) as (children, about):
        on_device = about["layerwise"]["device"] != "cpu"
        until = begun + args.budget_s - RESERVE_S * (1 + len(tails) * (args.trace is not None))
        figures = engine.measure(lambda number: load_round(children, configs, tokens, tails, number), args.repeats, args.warm_up, until)
        common = {"chunk_size": args.chunk_size, "commit": harness.commit(), "engine": about["layerwise"], "host_gib": args.host_gib}
        rows = engine.summary(figures, common)
        engine.show_figures(rows, about, args.chunk_size, console)
        loads, store = accept_loads(figures, tails), accept_store(figures, tokens)
        show_acceptance(loads, store, on_device, console)
        rows += [{**row, "on_device": on_device, **common} for row in (*loads, store) if row is not None]
        for config in configs:
            said = children.ask(config, "counters")
            engine.show_counters(config, said, console)
            rows.append({"measure": "counters", "config": config, **said, **common})
        engine.write(args.json, rows)
        for tail in tails if args.trace is not None else ():
            found = children.ask("layerwise", "trace", tokens, tail, f"trace {tail}", str(args.trace.resolve()))
            for what, run in found.items():
                show_calls(f"{what} {tail}", run, console)
            engine.write(args.json, [{"measure": "calls", "tail": tail, **found, **common}])
    return 0


if __name__ == "__main__":
    sys.exit(main())
