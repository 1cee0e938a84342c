"""One registry, one way to measure, one row a case.

A case names the bytes that must move (each input read once, each output written once); its share is against the device copy rate that was
measured in the same run, so a row means the same on any card.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Case:
    """What to measure.

    Args:
        op: the kernel's name; its tests are in ``tests/kernels/test_<op>.py``.
        shape: in words.
        run: launches it once; no allocation inside.
        nbytes: read plus written.
        rate: ``device`` or ``pinned``: the copy rate it is compared with.
    """

    op: str
    shape: str
    run: Callable[[], None]
    nbytes: int
    rate: str = "device"


@dataclass(frozen=True)
class Row:
    """One measured case: microseconds at the 20th, 50th and 80th percentile, GB/s at the median, its share of the copy rate, and of what a
    contiguous device copy of as many bytes reaches."""

    op: str
    shape: str
    us_p20: float
    us_p50: float
    us_p80: float
    nbytes: int
    gb_s: float
    share: float
    share_of_same_copy: float
    commit: str
    device: str
    torch: str
    triton: str


Registration = Callable[[], Iterator[Case]]
REGISTRY: dict[str, Registration] = {}


def benchmark(function: Registration) -> Registration:
    """Register a generator of cases under its module's op name."""
    REGISTRY[function.__module__.rsplit("bench_", 1)[-1]] = function
    return function


def timings(run: Callable[[], None], *, repeats: int = 40, warm_up: int = 5) -> list[float]:
    """Microseconds of each of ``repeats`` runs, by events on the device. A sweep in between empties the caches and
    gives the host time to queue the run, so that launch gaps stay out of the figure."""
    sweep = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    for _ in range(warm_up):
        run()
    spans = []
    for _ in range(repeats):
        sweep.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) * 1e3 for begin, end in spans)


def copy_rates() -> dict[str, float]:
    """GB/s (read plus written) of a 4 GiB device copy, and GB/s one way of a 1 GiB copy to pinned memory."""
    source = torch.empty(4 << 30, dtype=torch.int8, device="cuda").random_()
    target = torch.empty_like(source)
    device = 2 * source.nbytes / statistics.median(timings(lambda: target.copy_(source), repeats=10)) / 1e3
    host = torch.empty(1 << 30, dtype=torch.int8, pin_memory=True)
    pinned = host.nbytes / statistics.median(timings(lambda: host.copy_(source[: host.nbytes], non_blocking=True), repeats=5)) / 1e3
    return {"device": device, "pinned": pinned}


def commit() -> str:
    """The tree's commit, or "unknown" outside a checkout."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return done.stdout.strip() or "unknown"


def measure(case: Case, rates: dict[str, float], at: str) -> Row:
    """Run one case."""
    import triton

    times = timings(case.run)
    p20, p50, p80 = (times[int(len(times) * q)] for q in (0.2, 0.5, 0.8))
    rate = case.nbytes / p50 / 1e3
    source = torch.empty(max(case.nbytes // 2, 1), dtype=torch.int8, device="cuda").random_()
    target = torch.empty_like(source)
    same = timings(lambda: target.copy_(source))
    shares = (rate / rates[case.rate], same[len(same) // 2] / p50)
    versions = (torch.cuda.get_device_name(), torch.__version__, triton.__version__)
    return Row(case.op, case.shape, p20, p50, p80, case.nbytes, rate, *shares, at, *versions)


def to_json(row: Row) -> str:
    """One line."""
    return json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()})
