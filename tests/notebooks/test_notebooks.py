"""Every notebook runs from top to bottom in a kernel of its own, and is stored without outputs."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest

from qcap.testing.engine import ENGINE_ENVIRONMENT

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs(path: Path) -> None:
    """Outputs belong to whoever runs it."""
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.cell_type != "code" or (not cell.outputs and cell.execution_count is None)


@pytest.mark.vllm
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell raises; the engine's loading is asserted in the notebook itself."""
    from nbclient import NotebookClient

    for name, value in ENGINE_ENVIRONMENT.items():
        monkeypatch.setenv(name, os.environ.get(name, value))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(out.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs)
    assert "skipped: {}" in printed and "snapkv" in printed
