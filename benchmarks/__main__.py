"""``python -m benchmarks [op ...] [--json FILE] [--vs lmcache] [--ncu OP] [--untested]``: figures of what qcap does on a GPU.

Each op's tests run first; nothing is printed for an op whose tests fail. ``--vs lmcache`` lets the installed peer do the same work on the
same tensors, in turns. ``--ncu OP`` prints the bytes that the memory controllers counted in one run of each case, beside those that must
move. The engine as a whole is measured by ``python -m benchmarks.engine``.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import harness, ncu
from benchmarks.harness import Context, Row

# Columns that most tables need, and those that are shown where a row has them.
COLUMNS = {
    "op": lambda r: r.op,
    "shape": lambda r: r.shape,
    "p20 us": lambda r: f"{r.us_p20:.1f}",
    "p50 us": lambda r: f"{r.us_p50:.1f}",
    "p80 us": lambda r: f"{r.us_p80:.1f}",
    "GB/s": lambda r: f"{r.gb_s:.0f}" if r.rate == "device" else f"{r.gb_s:.1f}",
    "of copy": lambda r: f"{r.share:.1%}",
}
OPTIONAL = {
    "of same size": lambda r: None if r.share_of_same_copy is None else f"{r.share_of_same_copy:.1%}",
    "floor us": lambda r: None if r.floor_us is None else f"{r.floor_us:.1f} {r.floor_name}".strip(),
    "over floor": lambda r: None if r.over_floor_us is None else f"{r.over_floor_us:+.1f}",
    "host waits": lambda r: str(r.host_waits) if r.host_waits is not None and (r.host_waits or r.peer) else None,
    "peer": lambda r: r.peer or None,
    "peer p50 us": lambda r: None if r.peer_us_p50 is None else f"{r.peer_us_p50:.1f}",
    "peer waits": lambda r: None if r.peer_host_waits is None else str(r.peer_host_waits),
    "peer / ours": lambda r: None if r.ratio is None else f"{r.ratio:.2f}x",
}


def table_of(rows: list[Row], failed: list[str], title: str) -> Table:
    """One line a row; a column that no row has anything for is left out."""
    optional = {name: cell for name, cell in OPTIONAL.items() if any(cell(row) is not None for row in rows)}
    table = Table(*COLUMNS, *optional, title=title)
    for row in rows:
        table.add_row(*(cell(row) for cell in COLUMNS.values()), *(cell(row) or "" for cell in optional.values()))
    for op in failed:
        table.add_row(op, "tests failed")
    return table


@functools.cache  # ops may share their tests
def tests_pass(tests: tuple[str, ...]) -> bool:
    """Run the tests of an op."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", *tests, "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-2000:], file=sys.stderr)
    return done.returncode == 0


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, optionally append JSON lines. Exit code 1 if an op's tests failed, 2 if nothing can be measured here."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--vs", choices=("lmcache",), help="let this installed peer do the same work")
    parser.add_argument("--ncu", metavar="OP", help="count the bytes of one run of each case of OP")
    parser.add_argument("--ncu-child", metavar="OP", help=argparse.SUPPRESS)
    parser.add_argument("--untested", action="store_true", help="skip the tests; for work on a kernel, not for figures")
    args = parser.parse_args(argv)
    harness.load_all()
    unknown = {*args.ops, *filter(None, (args.ncu, args.ncu_child))} - set(harness.REGISTRY)
    if unknown:
        print(f"no benchmark named {', '.join(sorted(unknown))}; there are {', '.join(sorted(harness.REGISTRY))}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("no CUDA device here: figures count only from a GPU", file=sys.stderr)
        return 2
    if args.ncu_child:
        return ncu.child(args.ncu_child)
    if args.ncu:
        return ncu.report(args.ncu)
    if args.vs:
        from benchmarks import peer_lmcache

        missing = peer_lmcache.why_missing()
        if missing:
            print(missing, file=sys.stderr)
            return 2
    ops = args.ops or sorted(harness.REGISTRY)
    failed = [op for op in ops if not args.untested and not tests_pass(harness.REGISTRY[op].tests)]
    context, at = Context(args.vs, harness.copy_rates()), harness.commit()
    rates = "device copy {device:.0f} GB/s, to pinned {pinned:.1f}, from pinned {from_pinned:.1f} GB/s".format(**context.rates)
    rows = []
    for op in ops:
        if op not in failed:
            for case in harness.REGISTRY[op].of(context):
                rows.append(harness.measure(case, context.rates, at))
                print(f"{case.op} {case.shape}: {rows[-1].us_p50:.1f} us", file=sys.stderr, flush=True)
                if args.json:  # at once: what has been measured stays, whatever comes after
                    args.json.parent.mkdir(parents=True, exist_ok=True)
                    with args.json.open("a") as file:
                        file.write(harness.to_json(rows[-1]) + "\n")
                del case
    Console(width=200).print(table_of(rows, failed, f"{torch.cuda.get_device_name()}, {at}: {rates}"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
