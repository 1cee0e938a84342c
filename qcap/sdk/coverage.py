"""What is stored of some tokens, and what was captured at all: plain values that show themselves well in a terminal and a notebook."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, overload

from qcap.kinds import CacheKind
from qcap.store.tiers import SequenceRecord

if TYPE_CHECKING:
    from rich.table import Table

_TEXT_TOKENS = 24
"""Tokens of a sequence that are decoded for a table."""


def printable(text: str, keep: str = "") -> str:
    """``text`` with everything that steers a terminal written as its escape (``\\x1b``), but for the characters in ``keep``.

    Salts, request ids and texts come from whoever sent a request.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Which chunks of some tokens are stored.

    Args:
        model, kind, salt: what was asked for.
        chunk_size: CH.
        total_tokens: N, the tokens asked about.
        computed_tokens: tokens whose rows exist (an engine never computes the last one it generates: N - 1); N if nobody said.
        stored: for each whole chunk of the computed tokens, whether every rank's object is there.
    """

    model: str
    kind: CacheKind
    salt: str
    chunk_size: int
    total_tokens: int
    computed_tokens: int
    stored: tuple[bool, ...]

    @property
    def whole_chunks(self) -> int:
        """Chunks that can be stored at all."""
        return len(self.stored)

    @property
    def whole_tokens(self) -> int:
        """Tokens in whole chunks."""
        return self.whole_chunks * self.chunk_size

    @property
    def tail_tokens(self) -> int:
        """Tokens after the last whole chunk; they are never stored."""
        return self.total_tokens - self.whole_tokens

    @property
    def stored_tokens(self) -> int:
        """Tokens in stored chunks, holes or not."""
        return sum(self.stored) * self.chunk_size

    @property
    def prefix_tokens(self) -> int:
        """Tokens that ``retrieve`` returns: up to the first hole."""
        first_hole = self.stored.index(False) if False in self.stored else len(self.stored)
        return first_hole * self.chunk_size

    @property
    def fraction(self) -> float:
        """Stored tokens over whole-chunk tokens, 0..1; 1.0 where there is no whole chunk (nothing is missing)."""
        return self.stored_tokens / self.whole_tokens if self.whole_tokens else 1.0

    @property
    def holes(self) -> tuple[int, ...]:
        """Indices of the chunks that are not stored."""
        return tuple(i for i, there in enumerate(self.stored) if not there)

    def _summary(self) -> str:
        if not self.whole_chunks:
            return f"no whole chunk of {self.chunk_size} in {self.computed_tokens} tokens, so nothing of them can be stored"
        parts = [
            f"{self.stored_tokens} of {self.whole_tokens} whole-chunk tokens stored ({self.fraction:.0%})",
            f"{self.prefix_tokens} usable as a prefix",
            f"{self.tail_tokens} in the tail",
        ]
        if self.holes:
            shown = ", ".join(map(str, self.holes[:8])) + (", ..." if len(self.holes) > 8 else "")
            parts.append(f"missing chunks: {shown}")
        return "; ".join(parts)

    def __repr__(self) -> str:
        bar = "".join("█" if there else "·" for there in self.stored)
        salt = f" salt={self.salt!r}" if self.salt else ""
        return f"Coverage({self.model} {self.kind.value}{salt}, {self.total_tokens} tokens: {self._summary()}) [{bar}]"

    def __rich__(self) -> Table:
        rows = [("tokens", str(self.total_tokens)), ("chunk", str(self.chunk_size)), *_pairs(self._summary())]
        return _table(printable(f"{self.model} · {self.kind.value}" + (f" · {self.salt}" if self.salt else "")), ("", ""), rows)

    def _repr_html_(self) -> str:
        cells = "".join(
            f'<span title="chunk {i}: tokens {i * self.chunk_size}..{(i + 1) * self.chunk_size - 1}" style="display:inline-block;'
            f'width:10px;height:14px;margin-right:1px;background:{"#2a7f62" if there else "#d9d9d9"}"></span>'
            for i, there in enumerate(self.stored)
        )
        title = html.escape(f"{self.model} · {self.kind.value}" + (f" · salt {self.salt}" if self.salt else ""))
        return f"<div><b>{title}</b>: {html.escape(self._summary())}<br>{cells}</div>"


class Sequences(Sequence[SequenceRecord]):
    """The receipts of one model's captures, oldest first. A list of :class:`SequenceRecord` that shows itself as a table.

    Args:
        records: the receipts.
        tokenizer: anything with ``decode(list of ids) -> str``; adds a column with the first tokens' text.
    """

    def __init__(self, records: Iterable[SequenceRecord], tokenizer: Any = None) -> None:
        self._records = tuple(records)
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[SequenceRecord]:
        return iter(self._records)

    @overload
    def __getitem__(self, index: int) -> SequenceRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Sequences: ...
    def __getitem__(self, index: int | slice) -> SequenceRecord | Sequences:
        if isinstance(index, slice):
            return Sequences(self._records[index], self._tokenizer)
        return self._records[index]

    def filter(self, keep: Callable[[SequenceRecord], bool]) -> Sequences:
        """Those receipts for which ``keep`` is true."""
        return Sequences(filter(keep, self._records), self._tokenizer)

    def text(self, index: int) -> str:
        """The whole text of one sequence; "" without a tokenizer."""
        return str(self._tokenizer.decode(list(self._records[index].token_ids))) if self._tokenizer else ""

    def _columns(self) -> tuple[str, ...]:
        kinds = tuple(f"{kind.value} stored" for kind in CacheKind)
        return ("#", "request", "tokens", "prompt", *kinds, "salt", "finished", *(("text",) if self._tokenizer else ()))

    def _rows(self) -> list[tuple[str, ...]]:
        rows = []
        for number, record in enumerate(self._records):
            finished = datetime.fromtimestamp(record.finished_at).strftime("%Y-%m-%d %H:%M:%S") if record.finished_at else ""
            cells = [str(number), record.request_id, str(len(record.token_ids)), str(record.prompt_tokens)]
            cells += [_kind_cell(record, kind) for kind in CacheKind]
            cells += [record.salt, finished]
            if self._tokenizer:
                text = str(self._tokenizer.decode(list(record.token_ids[:_TEXT_TOKENS])))
                cells.append(text + (" …" if len(record.token_ids) > _TEXT_TOKENS else ""))
            rows.append(tuple(map(printable, cells)))
        return rows

    def __rich__(self) -> Table:
        return _table(f"{len(self)} captured sequences", self._columns(), self._rows())

    def __repr__(self) -> str:
        if not self._records:
            return "Sequences: none captured"
        rows = [self._columns(), *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self._columns())
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self._rows())
        return f"<table><caption>{len(self)} captured sequences</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _kind_cell(record: SequenceRecord, kind: CacheKind) -> str:
    """``3/4 (75%)``, with why chunks are missing; ``-`` where this kind was not captured."""
    if kind.value not in record.stored and kind.value not in record.skipped:
        return "-"
    whole = record.computed_tokens // record.chunk_size
    there = len(record.stored.get(kind.value, ()))
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(record.skipped.get(kind.value, {}).items()) if count)
    share = f" ({there / whole:.0%})" if whole else ""
    return f"{there}/{whole}{share}" + (f": {reasons}" if reasons else "")


def _pairs(summary: str) -> list[tuple[str, str]]:
    return [("", part) for part in summary.split("; ")]


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title)
    for name in columns:
        table.add_column(name)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: a model's own "[...]" must not be read as markup
    return table
