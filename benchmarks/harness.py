"""One registry, one way to measure, one row a case.

A case names the bytes that must move (each input read once, each output written once); its share is against the copy rate that was
measured in the same run, so a row means the same on any card.

A file ``bench_<op>.py`` registers a generator of cases; with an argument it gets the :class:`Context` of the run::

    @benchmark(tests=("tests/unit/test_capture.py",))  # without: tests/kernels/test_<op>.py
    def cases(ctx: Context) -> Iterator[Case]:
        yield Case("query_step", "8 x 1024", step, nbytes, clock="host", floor=ctx.copy_us(nbytes), floor_name="copy",
                   peer=theirs if ctx.vs == "lmcache" else None, peer_name="lmcache 0.5.6")
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Context:
    """What a run was asked for.

    Args:
        vs: the installed peer to compare with, or None.
        rates: the copy rates of this run, GB/s: ``device`` (read plus written), ``pinned`` and ``from_pinned`` (one way).
    """

    vs: str | None = None
    rates: dict[str, float] = field(default_factory=dict)

    def copy_us(self, nbytes: int, rate: str = "device") -> float:
        """Microseconds that ``nbytes`` take at a measured copy rate."""
        return nbytes / self.rates[rate] / 1e3


@dataclass(frozen=True)
class Case:
    """What to measure.

    Args:
        op: as in ``bench_<op>.py``.
        shape: in words.
        run: does it once. Where ``clock`` is ``device``, nothing is allocated inside.
        nbytes: read plus written; for a ``pinned`` rate, bytes over the bus.
        rate: the copy rate it is compared with: ``device``, ``pinned`` or ``from_pinned``.
        clock: ``device`` times by events on the current stream, with the host ahead; ``host`` from a synchronised device to a synchronised
            device, for what the host's part counts in, or for work on other streams.
        floor, floor_name: microseconds that no implementation can be below, and what they stand for.
        check: runs once, before the timing; raises if ``run`` computes something else.
        peer, peer_name: another implementation on the same tensors; the two take turns.
        repeats: timed runs.
        together: by the host's clock, runs in a row between two synchronisations, as the steps of an engine follow each other; the figure
            is for one.
        host_waits: count the waits of one run; False where that means nothing.
    """

    op: str
    shape: str
    run: Callable[[], Any]
    nbytes: int
    rate: str = "device"
    clock: str = "device"
    floor: float | None = None
    floor_name: str = ""
    check: Callable[[], None] | None = None
    peer: Callable[[], Any] | None = None
    peer_name: str = ""
    repeats: int = 40
    together: int = 1
    host_waits: bool = True


@dataclass(frozen=True)
class Row:
    """One measured case: microseconds at the 20th, 50th and 80th percentile, GB/s at the median, its share of the copy rate, and of what a
    contiguous copy of as many bytes reaches (device clock only). ``host_waits``: how often one run made the host wait for the device.
    ``ratio``: the peer's median over ours, so above 1 is faster than the peer. None where a case has no such thing."""

    op: str
    shape: str
    us_p20: float
    us_p50: float
    us_p80: float
    nbytes: int
    gb_s: float
    share: float
    share_of_same_copy: float | None
    clock: str
    rate: str
    host_waits: int | None
    floor_us: float | None
    floor_name: str
    over_floor_us: float | None
    peer: str
    peer_us_p20: float | None
    peer_us_p50: float | None
    peer_us_p80: float | None
    peer_host_waits: int | None
    ratio: float | None
    copy_rates: dict[str, float]
    commit: str
    device: str
    torch: str
    cuda: str
    triton: str


Registration = Callable[..., Iterator[Case]]


@dataclass(frozen=True)
class Bench:
    """A registered generator, and the arguments to pytest that must pass before its figures count."""

    cases: Registration
    tests: tuple[str, ...]

    def of(self, context: Context) -> Iterator[Case]:
        """Its cases."""
        return self.cases(context) if inspect.signature(self.cases).parameters else self.cases()


REGISTRY: dict[str, Bench] = {}


def benchmark(function: Registration | None = None, *, tests: Sequence[str] = ()) -> Any:
    """Register a generator of cases under its module's op name; bare, or with ``tests`` (paths and options for pytest)."""

    def register(function: Registration) -> Registration:
        op = function.__module__.rsplit("bench_", 1)[-1]
        REGISTRY[op] = Bench(function, tuple(tests) or (f"tests/kernels/test_{op}.py",))
        return function

    return register(function) if function is not None else register


def load_all() -> None:
    """Import every ``bench_*.py`` of this folder."""
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        importlib.import_module(f"benchmarks.{path.stem}")


def alternate(
    runs: Sequence[Callable[[], Any]], *, clock: str = "device", repeats: int = 40, warm_up: int = 5, together: int = 1
) -> list[list[float]]:
    """Microseconds of ``repeats`` runs of each of ``runs``, sorted; they take turns, so that both see the same state of the machine.

    A sweep before each run empties the caches; by the device's clock it also gives the host time to queue the run, so that launch gaps
    stay out of the figure (a run that makes the host wait has gaps all the same, and they count).
    """
    sweep = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    for run in [run for run in runs for _ in range(warm_up)]:
        run()
    spans: list[list[Any]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, mine in zip(runs, spans, strict=True):
            if clock == "host":
                run()  # so that neither pays for the host's caches being full of the other's code
            sweep.zero_()
            if clock == "host":
                torch.cuda.synchronize()
                begun = time.perf_counter()
                for _ in range(together):
                    run()
                torch.cuda.synchronize()
                mine.append((time.perf_counter() - begun) * 1e6 / together)
            else:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                run()
                end.record()
                mine.append((begin, end))
    torch.cuda.synchronize()
    if clock == "host":
        return [sorted(mine) for mine in spans]
    return [sorted(begin.elapsed_time(end) * 1e3 for begin, end in mine) for mine in spans]


def timings(run: Callable[[], Any], *, repeats: int = 40, warm_up: int = 5) -> list[float]:
    """Microseconds of ``repeats`` runs by the device's clock, sorted."""
    return alternate([run], repeats=repeats, warm_up=warm_up)[0]


def host_waits(run: Callable[[], Any]) -> int:
    """How often one run makes the host wait for the device, as far as torch can tell: an event that a run waits for itself is not seen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return sum("synchroniz" in str(warning.message) for warning in caught)


def copy_rates() -> dict[str, float]:
    """GB/s (read plus written) of a 4 GiB device copy, and GB/s one way of 1 GiB copies to and from pinned memory."""
    source = torch.empty(4 << 30, dtype=torch.int8, device="cuda").random_()
    target = torch.empty_like(source)
    device = 2 * source.nbytes / statistics.median(timings(lambda: target.copy_(source), repeats=10)) / 1e3
    host = torch.empty(1 << 30, dtype=torch.int8, pin_memory=True)
    part = source[: host.nbytes]
    pinned = host.nbytes / statistics.median(timings(lambda: host.copy_(part, non_blocking=True), repeats=5)) / 1e3
    back = host.nbytes / statistics.median(timings(lambda: part.copy_(host, non_blocking=True), repeats=5)) / 1e3
    return {"device": device, "pinned": pinned, "from_pinned": back}


def commit() -> str:
    """The tree's commit; for a copy of the tree without its history, what ``QCAP_BENCH_COMMIT`` says, or "unknown"."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout.strip() or os.environ.get("QCAP_BENCH_COMMIT", "unknown")


def spread(times: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile of sorted ``times``."""
    p20, p50, p80 = (times[min(int(len(times) * q), len(times) - 1)] for q in (0.2, 0.5, 0.8))
    return p20, p50, p80


def measure(case: Case, rates: dict[str, float], at: str) -> Row:
    """Run one case, and its peer in turns with it."""
    import triton

    if case.check is not None:
        case.check()
    runs = [case.run] if case.peer is None else [case.run, case.peer]
    times = alternate(runs, clock=case.clock, repeats=case.repeats, together=case.together)
    waits = [host_waits(run) for run in runs] if case.host_waits else [None] * len(runs)
    p20, p50, p80 = spread(times[0])
    rate = case.nbytes / p50 / 1e3
    same = None
    if case.clock == "device" and case.rate == "device":
        source = torch.empty(max(case.nbytes // 2, 1), dtype=torch.int8, device="cuda").random_()
        target = torch.empty_like(source)
        same = spread(timings(lambda: target.copy_(source)))[1] / p50
    theirs = spread(times[1]) if case.peer is not None else (None, None, None)
    return Row(
        op=case.op,
        shape=case.shape,
        us_p20=p20,
        us_p50=p50,
        us_p80=p80,
        nbytes=case.nbytes,
        gb_s=rate,
        share=rate / rates[case.rate],
        share_of_same_copy=same,
        clock=case.clock,
        rate=case.rate,
        host_waits=waits[0],
        floor_us=case.floor,
        floor_name=case.floor_name,
        over_floor_us=None if case.floor is None else p50 - case.floor,
        peer=case.peer_name if case.peer is not None else "",
        peer_us_p20=theirs[0],
        peer_us_p50=theirs[1],
        peer_us_p80=theirs[2],
        peer_host_waits=waits[1] if case.peer is not None else None,
        ratio=None if theirs[1] is None else theirs[1] / p50,
        copy_rates=rates,
        commit=at,
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        cuda=str(torch.version.cuda),
        triton=triton.__version__,
    )


def rounded(value: Any) -> Any:
    """Floats to four places, in dicts too."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def to_json(row: Row) -> str:
    """One line."""
    return json.dumps(rounded(asdict(row)))
