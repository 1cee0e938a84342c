"""Every behaviour of this slice is proved by a test that carries its number, or answered in docs/behaviours.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLICE = {"R": range(1, 39), "L": range(1, 53), "A": range(1, 32), "C": range(1, 37), "Q": range(1, 24), "P": (1, 2, 3, 4, 5, 12)}


def numbers_in_tests() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for line in path.read_text().splitlines():
            _, mark, comment = line.partition("#")
            if mark:
                found.update(re.findall(r"\b[A-Z]\d{1,2}\b", comment))
    return found


def numbers_in_docs() -> set[str]:
    found: set[str] = set()
    for line in (ROOT / "docs" / "behaviours.md").read_text().splitlines():
        head = re.match(r"- ((?:[A-Z]\d+(?:-[A-Z]?\d+)?(?:, )?)+)", line)
        if head:
            for part in head[1].split(", "):
                first, _, last = part.partition("-")
                letter, start = first[0], int(first[1:])
                found.update(f"{letter}{n}" for n in range(start, int(last.lstrip(letter) or start) + 1))
    return found


@pytest.mark.parametrize("group", SLICE)
def test_each_number_has_an_answer(group: str) -> None:
    answered = numbers_in_tests() | numbers_in_docs()
    assert [f"{group}{n}" for n in SLICE[group] if f"{group}{n}" not in answered] == []
