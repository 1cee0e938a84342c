"""All kernels compile to machine code for devices that are not here. Always in a process without the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
TARGETS = ("cuda sm_80", "cuda sm_90", "cuda sm_100", "hip gfx942")
_CODE = """
import json, sys
from qcap.kernels import compile_check as check
target = sys.argv[1]
assert target in check.TARGETS
report = {}
for case in check.CASES:
    if target in case.not_for:
        continue
    try:
        report[case.name] = sorted(check.compile_case(case, target).asm)
    except Exception as error:
        report[case.name] = repr(error)[:500]
print(json.dumps({"report": report, "kernels": sorted({case.kernel for case in check.CASES})}))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_for(target):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", _CODE, target], cwd=root, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    binary = "hsaco" if target.startswith("hip") else "cubin"
    assert len(answer["report"]) >= 15
    assert {name: got for name, got in answer["report"].items() if binary not in got} == {}
    written = "".join(path.read_text() for path in (root / "qcap" / "kernels").glob("*.py"))
    kernels = {line.split("(")[0].removeprefix("def ") for line in written.splitlines() if line.startswith("def ") and "_kernel(" in line}
    assert kernels == set(answer["kernels"])  # a new kernel must be in the registry
