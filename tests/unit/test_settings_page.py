"""docs/settings.md names every setting with its default, and every reason that a receipt may give; no other."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from pathlib import Path

import qcap.vllm
from qcap.config import _PARSERS, ARGUMENTS, CaptureConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "settings.md").read_text()
NO_REASONS = re.compile(r"qcap-.*")  # names of threads


def table(title: str) -> list[list[str]]:
    """Cells of the rows under a title, without the header."""
    part = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")][2:]


def shown(value: object) -> str:
    return "`none`" if value is None else f"`{json.dumps(value)}`"


def test_every_setting_is_on_the_page() -> None:
    rows = table("Settings")
    keys = {key.strip("`"): argument.strip("`") for argument, key, _, _ in rows}
    assert len(rows) == len(keys) and keys == {"qcap.blending": "-", **{key: argument for argument, key in ARGUMENTS.items()}}
    assert set(keys) == set(_PARSERS) and all(len(row) == 4 and row[3] for row in rows)


def test_defaults_on_the_page_are_those_of_the_code() -> None:
    fields = {f.name: f.default for f in dataclasses.fields(CaptureConfig)}
    named = inspect.signature(qcap.vllm.transfer_config).parameters
    for argument, key, default, _ in table("Settings"):
        value = fields[_PARSERS[key.strip("`")][0]]
        here = named[argument.strip("`")].default if argument.strip("`") in named else value
        if value is dataclasses.MISSING:
            assert default == "required" and here is inspect.Parameter.empty
        else:
            assert default == (shown(here) if here == value else f"{shown(here)}; as a key {shown(value)}"), key


def test_every_reason_is_on_the_page() -> None:
    """Reasons are texts with hyphens, wherever they stand, and what functions named after the question return."""
    found: set[str] = set()
    for path in [*(ROOT / "qcap" / "capture").glob("*.py"), *(ROOT / "qcap" / "vllm").glob("*.py"), ROOT / "qcap" / "attribution.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[a-z]+(-[a-z]+)+", node.value):
                found.add(node.value)
            if isinstance(node, ast.FunctionDef) and "why" in node.name:
                returned = [r.value for r in ast.walk(node) if isinstance(r, ast.Return) and isinstance(r.value, ast.Constant)]
                found |= {str(c.value) for c in returned if c.value and " " not in str(c.value)}
    found = {text for text in found if not NO_REASONS.fullmatch(text)}
    assert len(found) > 15
    assert found == {reason.strip("`") for reason, _ in table("Reasons")}


def test_the_readme_leads_here() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "(docs/settings.md)" in readme
    project = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"pip install -e '\.\[([a-z,]+)\]'", readme)[0].split(","):
        assert re.search(rf"^{extra} = \[", project, re.M), extra
