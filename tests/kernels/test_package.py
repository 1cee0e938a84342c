"""The room itself: what it imports, and that each op has its places."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "qcap" / "kernels"
OPS = ("attention_mass", "host_read", "paged_copy", "rope_shift", "row_scatter", "slot_attribution")


@pytest.mark.parametrize("op", OPS)
def test_each_op_has_its_places(op):
    for path in (KERNELS / f"{op}.py", KERNELS / "reference" / f"{op}.py", ROOT / "tests" / "kernels" / f"test_{op}.py"):
        assert path.is_file(), f"{op} lacks {path.relative_to(ROOT)}"
    kernel = (KERNELS / f"{op}.py").read_text()
    assert len(kernel.splitlines()) < 150
    assert "@triton.jit" in kernel and f"reference/{op}.py" in kernel


def test_no_op_is_missing_from_the_list():
    found = {path.stem for path in KERNELS.glob("*.py") if "@triton.jit" in path.read_text()}
    assert found == set(OPS) == {path.stem for path in (KERNELS / "reference").glob("*.py")} - {"__init__"}


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: str(path.relative_to(KERNELS)))
def test_kernels_import_nothing_of_qcap_and_a_reference_nothing_of_a_kernel(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            assert not name.startswith("qcap") or name.startswith("qcap.kernels"), name
            assert name.split(".")[0] not in ("vllm", "os"), name
            if "reference" in path.parts and name.startswith("qcap"):
                assert name.startswith("qcap.kernels.reference") or name == "qcap.kernels.page_table", name


def _run(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_needs_no_triton_and_touches_no_device():
    _run(
        "import sys; sys.modules['triton'] = None\n"
        "import torch, qcap.kernels as k\n"
        "assert not torch.cuda.is_initialized()\n"
        "ring = torch.zeros(2, 1); k.row_scatter(torch.ones(1, 1), torch.tensor([1]), ring); assert ring.tolist() == [[0.0], [1.0]]"
    )


def test_importing_a_submodule_leaves_the_function_of_its_name():
    _run(
        "import qcap.kernels as k, qcap.kernels.row_scatter, importlib\n"
        "from qcap.kernels.row_scatter import row_scatter\n"
        "import qcap.kernels.slot_attribution, qcap.kernels.rope_shift, qcap.kernels.attention_mass\n"
        "import types\n"
        "assert all(isinstance(getattr(k, name), (types.FunctionType, type)) for name in k.__all__)\n"
        "assert k.row_scatter is not row_scatter"
    )
