"""Bytes that the device's memory moved, counted by Nsight Compute, beside the bytes that a case says must move.

What is written may still lie in the L2 cache when a kernel ends, so written bytes are a lower bound, the more so the smaller the case.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum")
MARKER = "spin_kernel"  # torch.cuda._sleep's: between cases, so that a case may launch any number of kernels


def child(op: str) -> int:
    """Under ncu: one run of each case of ``op``."""
    import torch

    rates = {"device": 1.0, "pinned": 1.0, "from_pinned": 1.0}
    for number, case in enumerate(harness.REGISTRY[op].of(harness.Context(None, rates))):
        case.run()  # compiles
        torch.cuda.synchronize()
        print(f"case\t{number}\t{case.nbytes}\t{case.shape}", flush=True)
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        case.run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    return 0


def parse(output: str) -> tuple[list[tuple[int, str]], list[list[dict[str, float]]]]:
    """``(bytes, shape)`` of each case, and the metrics of each kernel that it launched, from a child's output."""
    lines = output.splitlines()
    cases = [(int(nbytes), shape) for _, _, nbytes, shape in (line.split("\t", 3) for line in lines if line.startswith("case\t"))]
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    kernels: list[list[dict[str, float]]] = []
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        if not row["ID"]:
            continue  # the row of units
        if MARKER in row["Kernel Name"]:
            kernels.append([])
        elif kernels:
            kernels[-1].append({metric: float(row[metric].replace(",", "")) for metric in METRICS})
    return cases, kernels


def report(op: str) -> int:
    """Run ``op`` under ncu and print a table. Exit code 2, with the reason, where that cannot be done."""
    tool = shutil.which("ncu")
    if tool is None:
        print("ncu (Nsight Compute) is not on PATH", file=sys.stderr)
        return 2
    command: list[Any] = [tool, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off"]
    command += ["--metrics", ",".join(METRICS), sys.executable, "-m", "benchmarks", "--ncu-child", op]
    done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in output:
        print("this user may not read the device's performance counters (ERR_NVGPUCTRPERM): ask whoever runs the machine", file=sys.stderr)
        return 2
    cases, kernels = parse(done.stdout)
    if done.returncode or not cases or len(cases) != len(kernels):
        print(f"ncu gave no figures (exit code {done.returncode}):\n{output[-3000:]}", file=sys.stderr)
        return 2
    table = Table("shape", "kernels", "must move", "read", "written", "counted / must", "us", title=f"{op}: counted by ncu, MB")
    for (nbytes, shape), launched in zip(cases, kernels, strict=True):
        read, written, span = (sum(kernel[metric] for kernel in launched) for metric in METRICS)
        counted = f"{(read + written) / nbytes:.3f}" if nbytes else ""
        figures = (f"{nbytes / 1e6:.2f}", f"{read / 1e6:.2f}", f"{written / 1e6:.2f}", counted, f"{span / 1e3:.1f}")
        table.add_row(shape, str(len(launched)), *figures)
    Console(width=160).print(table)
    return 0
