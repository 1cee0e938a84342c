"""The rooms of the house and who may enter which: imports only point down. And what no file of the tree may say."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "qcap"

# Rooms from the top down, several on one floor where neither may enter the other. A room may import rooms of lower floors and itself.
FLOORS = [
    {"qcap.__main__"},
    {"qcap.cli"},
    {"qcap.doctor"},
    {"qcap.demo"},
    {"qcap.testing"},  # and demo: may use everything below the command line
    {"qcap"},  # __init__ names the public parts; nothing below may import from it
    {"qcap.sdk", "qcap.vllm"},
    {"qcap.backends"},
    {"qcap.server"},
    {"qcap.capture"},
    {"qcap.layerwise"},
    {"qcap.connectors"},  # how a layer gets to an engine's pages; knows no engine's code
    {"qcap.store"},
    {"qcap.attribution"},
    {"qcap.ring"},
    {"qcap.kernels"},
    {"qcap.rope"},
    {"qcap.config", "qcap.tokens"},
    {"qcap.geometry"},
    {"qcap.kinds"},
    {"qcap.errors", "qcap.reasons", "qcap._version"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ONLY_HERE = {  # outside package -> the rooms that may import it
    "vllm": {"qcap.vllm", "qcap.testing", "qcap.demo"},
    "matplotlib": {"qcap.sdk", "qcap.demo"},
    "transformers": {"qcap.cli", "qcap.sdk", "qcap.testing", "qcap.demo", "qcap.vllm"},
    "triton": {"qcap.kernels"},
    "obstore": {"qcap.store"},
    "pickle": {"qcap.testing"},  # between a test and its own child; nothing that is stored or sent is pickled
}
NEVER = {  # closer rules than the floors: room -> what it must not import
    "qcap.sdk": {"vllm", "qcap.vllm", "qcap.capture", "qcap.layerwise", "qcap.attribution", "qcap.ring"},
    "qcap.store": {"qcap.kernels", "qcap.ring", "qcap.attribution"},
    "qcap.kernels": {"qcap.config", "qcap.geometry", "qcap.kinds", "qcap.tokens", "qcap.errors", "qcap.rope", "qcap._version"},
}


def module_name(path, root=PACKAGE):
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module):
    """The room that a module of qcap lies in."""
    return ".".join(module.split(".")[:2])


def imports(source, module, is_package):
    """Full names of all that ``source`` imports, wherever in the file, imports for type checking included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*up, *filter(None, [node.module])])
            if base == "qcap":
                # `from qcap import x` enters room x where there is one, and else the package's front
                found.update(f"qcap.{alias.name}" if f"qcap.{alias.name}" in FLOOR_OF else "qcap" for alias in node.names)
            else:
                found.add(base)
    return found


def wrong_arrows(module, imported):
    """What is wrong with the imports of one module, as sentences."""
    here, wrong = room(module), []
    if here not in FLOOR_OF:
        return [f"{module} is in no room of FLOORS"]
    for name in sorted(imported):
        target = room(name)
        top = name.split(".")[0]
        if top == "qcap":
            if target not in FLOOR_OF:
                wrong.append(f"{module} imports {name}, which is in no room of FLOORS")
            elif target != here and FLOOR_OF[target] <= FLOOR_OF[here]:
                wrong.append(f"{module} imports {name}: an arrow up")
        elif top in ONLY_HERE and here not in ONLY_HERE[top]:
            wrong.append(f"{module} imports {top}, which only {', '.join(sorted(ONLY_HERE[top]))} may")
        if target in NEVER.get(here, ()) or top in NEVER.get(here, ()):
            wrong.append(f"{module} imports {name}, which {here} never may")
    return wrong


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_point_down(path):
    module = module_name(path)
    assert wrong_arrows(module, imports(path.read_text(), module, path.name == "__init__.py")) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("qcap.store.engine", "from qcap.capture import Features"),
        ("qcap.store.engine", "import qcap.sdk.connect"),
        ("qcap.store.engine", "from qcap import sdk"),
        ("qcap.store.engine", "from qcap import connect"),
        ("qcap.store.engine", "from ..capture import x"),
        ("qcap.capture", "def f():\n    import vllm.config"),
        ("qcap.sdk.hf", "from vllm import LLM"),
        ("qcap.sdk.hf", "from qcap.capture import x"),
        ("qcap.sdk.hf", "from qcap.vllm import hooks"),
        ("qcap.vllm.worker", "from qcap.sdk import edits"),
        ("qcap.vllm.worker", "from qcap.testing import tiny"),
        ("qcap.kernels.row_scatter", "from qcap.errors import ShapeError"),
        ("qcap.ring", "import triton"),
        ("qcap.store.objects", "import pickle"),
        ("qcap.tokens", "from qcap.config import CaptureConfig"),
        ("qcap.unknown", "import os"),
        ("qcap.testing.tiny", "from qcap.cli import main"),
    ],
)
def test_an_arrow_up_is_seen(module, line):
    assert len(wrong_arrows(module, imports(line, module, False))) >= 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("qcap.vllm.worker", "from vllm.config import VllmConfig\nfrom qcap.capture import x\nfrom . import hooks\nimport torch"),
        ("qcap.store.engine", "from qcap.store.tiers import Tier\nfrom .tiers import Tier\nfrom qcap.errors import StoreError"),
        ("qcap.sdk.context", "from qcap import backends\nfrom qcap.kernels.reference import rope_shift"),
        ("qcap.demo.capture", "import qcap.vllm\nimport vllm\nfrom qcap import connect\nfrom qcap.testing.smollm2 import smollm2_path"),
    ],
)
def test_an_arrow_down_is_let_through(module, line):
    assert wrong_arrows(module, imports(line, module, False)) == []


def test_what_the_package_exports_is_sorted_and_complete():
    qcap = importlib.import_module("qcap")
    if not hasattr(qcap, "__all__"):
        pytest.skip("the package exports nothing yet")
    assert list(qcap.__all__) == sorted(set(qcap.__all__))
    assert [name for name in qcap.__all__ if not hasattr(qcap, name)] == []
    front = ast.parse((PACKAGE / "__init__.py").read_text())
    bound = {
        alias.asname or alias.name
        for node in ast.walk(front)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qcap")
        for alias in node.names
    }
    assert bound == set(qcap.__all__), "what __init__ imports from the package and what it exports differ"
    documented = set(re.findall(r"^(\w+)\s{2,}", qcap.__doc__, re.MULTILINE))
    assert documented == set(qcap.__all__), "the list in the docstring and __all__ differ"


def test_what_importing_the_package_loads():
    code = "import sys, qcap; print(*sorted({'torch', 'vllm', 'triton', 'matplotlib', 'transformers', 'obstore'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == ""


CACHES = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}
UNCOMMITTED = {".git", ".venv", ".cache", ".gpu", ".notes", "out"} | CACHES


def tree():
    """Every text file that belongs to the repository: what git lists, or all but what is never committed."""
    try:
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60).stdout.decode().split("\0")
        paths = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path for path in ROOT.rglob("*") if not any(part in UNCOMMITTED for part in path.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file() and not path.is_symlink() and b"\0" not in path.read_bytes()[:4096]]


# Each pattern is broken by a character class, so that this file does not match itself.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w./-])/(?:wor[k]|far[m]|roo[t]|opt/pyp[i]|opt/wheel[s])/[\w.]|(?<![\w.])/hom[e]/\w+/",
    "a package index's host": r"pypi\.or[g]|pythonhosted\.or[g]|download\.pytorch\.or[g]|--(?:extra-)?index-ur[l]",
    "how the tree was made": r"(?i)\b(?:clau[d]e|anthropi[c]|chatgp[t]|code[x]|this workplac[e]|helper sessio[n]"
    r"|previous sessio[n]|this sessio[n]|sub-?agen[t]s?|CONTRACT\.m[d]|\.library[/])",
    "a place outside the repository": r"\.\./share[d]\b|shared/(?:spe[c]|desig[n]|tool[s])",
    "an unresolved merge": r"^(?:<{7} |>{7} )",
    "a note to oneself": r"\b(?:TOD[O]|FIXM[E]|XX[X])\b",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what):
    pattern = re.compile(FORBIDDEN[what], re.MULTILINE)
    found = []
    for path in tree():
        text = path.read_text(errors="replace")
        found += [f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, m.start()) + 1}: {m.group()!r}" for m in pattern.finditer(text)]
    assert found == []


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a path of one machine", "see /wor" + "k/main/x"),
        ("a path of one machine", "cd /hom" + "e/me/src"),
        ("a package index's host", "https://pypi.or" + "g/simple"),
        ("how the tree was made", "as the previous sessio" + "n found"),
        ("a place outside the repository", "../share" + "d/spec"),
        ("an unresolved merge", "<" * 7 + " HEAD"),
        ("a note to oneself", "# TOD" + "O: later"),
    ],
)
def test_the_forbidden_is_seen(what, text):
    assert re.search(FORBIDDEN[what], text, re.MULTILINE)


def test_the_top_level_is_small():
    allowed = {"pyproject.toml", "README.md", "Makefile", "qcap", "notebooks", "tests", "docs", "benchmarks"}
    names = {path.relative_to(ROOT).parts[0] for path in tree()}
    assert {name for name in names if not name.startswith(".")} <= allowed


def test_modules_under_tests_have_names_of_their_own():
    """pytest imports them by their bare names: of two with one name, the second would be taken for the first."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []
