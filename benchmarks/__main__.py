"""``python -m benchmarks [op ...] [--json FILE] [--untested]``: each op's tests first; nothing is printed for an op whose tests fail."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import harness

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Measure, print a table, optionally append JSON lines. Exit code 1 if an op's tests failed, 2 without a CUDA device."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--untested", action="store_true", help="skip the tests; for work on a kernel, not for figures")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: figures count only from a GPU", file=sys.stderr)
        return 2
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        importlib.import_module(f"benchmarks.{path.stem}")
    ops = args.ops or sorted(harness.REGISTRY)
    failed = []
    if not args.untested:
        for op in ops:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/kernels", "-k", op, "-p", "no:cacheprovider"]
            if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode:
                failed.append(op)
    rates, at = harness.copy_rates(), harness.commit()
    title = f"{torch.cuda.get_device_name()}, {at}: device copy {rates['device']:.0f} GB/s, pinned copy {rates['pinned']:.1f} GB/s"
    table = Table("op", "shape", "p20 us", "p50 us", "p80 us", "GB/s", "of copy", "of same size", title=title)
    lines = []
    for op in ops:
        if op in failed:
            table.add_row(op, "tests failed", *[""] * 6)
            continue
        for case in harness.REGISTRY[op]():
            row = harness.measure(case, rates, at)
            lines.append(harness.to_json(row))
            spread = (f"{t:.1f}" for t in (row.us_p20, row.us_p50, row.us_p80))
            table.add_row(op, row.shape, *spread, f"{row.gb_s:.0f}", f"{row.share:.1%}", f"{row.share_of_same_copy:.1%}")
    Console(width=140).print(table)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        with args.json.open("a") as file:
            file.writelines(line + "\n" for line in lines)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
