"""The error tree is the one drawn at the top of errors.py."""

from __future__ import annotations

import inspect
import re

import pytest

from qcap import errors


def drawn() -> dict[str, str]:
    """Each error in the drawing and its parent."""
    parents, found = {0: "QcapError"}, {}
    for line in errors.__doc__.splitlines():
        if match := re.match(r"^([│ ]*)[├└]── (\w+)", line):
            depth = len(match[1]) // 4 + 1
            found[match[2]] = parents[depth - 1]
            parents[depth] = match[2]
    return found


def test_tree_is_as_drawn() -> None:
    classes = {n: c for n, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.QcapError)}
    tree = drawn()
    assert set(tree) | {"QcapError"} == set(classes) and len(tree) == 12
    for name, parent in tree.items():
        assert classes[name].__bases__[0] is classes[parent], name
        assert classes[name].__doc__


@pytest.mark.parametrize("name", ["ConfigError", "ShapeError", "TokenError"])
def test_wrong_arguments_are_value_errors_too(name: str) -> None:
    assert issubclass(getattr(errors, name), ValueError)
    assert f"{name} " in errors.__doc__ and "(also a ValueError)" in next(x for x in errors.__doc__.splitlines() if f"{name} " in x)


def test_others_are_not_value_errors() -> None:
    assert not issubclass(errors.StoreError, ValueError) and not issubclass(errors.GeometryMismatch, ValueError)
