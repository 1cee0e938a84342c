"""From token ids to keys: chunking, chained digests, salts. Plain values.

A chunk's digest is ``blake3(parent digest || token ids as big-endian uint32)``, seed-free, so that two processes and two machines
agree. The first chunk's parent is :data:`ROOT_DIGEST`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from urllib.parse import quote, unquote

import numpy as np
import torch
from blake3 import blake3

from qcap.errors import TokenError
from qcap.geometry import Geometry
from qcap.kinds import CacheKind

ROOT_DIGEST = blake3(b"qcap chunk chain v1").hexdigest()
MAX_SALT_CHARS = 128
_SALT_FORBIDDEN = "@/\\\0"

TokenIds = Sequence[int] | np.ndarray | torch.Tensor


def as_token_array(tokens: TokenIds) -> np.ndarray:
    """Token ids as a contiguous uint32 array ``[T]``.

    Raises:
        TokenError: not a flat sequence of integers, or an id outside ``[0, 2**32)``.
    """
    if isinstance(tokens, str | bytes):
        raise TokenError(f"token ids wanted, got {type(tokens).__name__}: tokenise the text first")
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.detach().cpu().numpy()
    try:
        array = np.asarray(tokens)
    except ValueError:  # lists of different lengths
        raise TokenError("token ids must be a flat sequence of integers, got sequences in a sequence: give one at a time") from None
    if array.size == 0:
        return np.empty(0, dtype=np.uint32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        got = f"shape {array.shape} of {array.dtype}" if array.dtype.kind != "O" else type(tokens).__name__
        hint = ": give one sequence, [0] of it" if array.ndim == 2 and len(array) == 1 else ""
        hint = ": of a tokenizer's output, give input_ids" if isinstance(tokens, Mapping) else hint
        raise TokenError(f"token ids must be a flat sequence of integers, got {got}{hint}")
    if int(array.min()) < 0 or int(array.max()) >= 2**32:
        raise TokenError(f"token ids must lie in [0, 2**32), got {int(array.min())}..{int(array.max())}")
    return np.ascontiguousarray(array, dtype=np.uint32)


def check_salt(salt: str) -> str:
    """The salt, if it can be part of a key.

    Raises:
        TokenError: it holds ``@``, ``/``, ``\\``, NUL or half of a surrogate pair, or is longer than 128 characters.
    """
    if not isinstance(salt, str):
        raise TokenError(f"salt must be a string, got {type(salt).__name__}")
    if not salt:
        return salt
    if len(salt) > MAX_SALT_CHARS or any(c in salt for c in _SALT_FORBIDDEN):
        raise TokenError(f"salt {salt[:40]!r} must be at most {MAX_SALT_CHARS} characters and hold none of @ / \\ NUL")
    try:
        salt.encode()
    except UnicodeEncodeError:
        raise TokenError(f"salt {salt[:40]!r} holds half of a surrogate pair, which is no character: decode what it comes from") from None
    return salt


@dataclass(frozen=True)
class TokenChunk:
    """Tokens ``[start, end)`` of a sequence, with the digest of everything up to ``end``.

    ``behind``: the next chunk's parent, where that is not ``digest``: of the last chunk of an edit, see :func:`behind_rows`.
    """

    start: int
    end: int
    digest: str
    parent: str
    behind: str = ""

    @property
    def index(self) -> int:
        """The chunk's number in its sequence (all chunks of a sequence are of one size)."""
        return self.start // (self.end - self.start)


class ChunkedTokenDatabase:
    """Cuts token ids into whole chunks and chains their digests. The tail that fills no chunk has no key."""

    def __init__(self, chunk_size: int = 256) -> None:
        if chunk_size <= 0:
            raise TokenError(f"chunk_size must be positive, got {chunk_size}")
        self.chunk_size = chunk_size

    def chunks(self, tokens: TokenIds) -> list[TokenChunk]:
        """All whole chunks of ``tokens``, from token 0."""
        return self.extend([], tokens)

    def extend(self, known: Sequence[TokenChunk], tokens: TokenIds, upto: int | None = None) -> list[TokenChunk]:
        """``known`` (this sequence's first chunks) followed by the rest of the whole chunks of ``tokens[:upto]``; hashes only what is
        new. Of an engine's own kind of sequence no more is asked than that slices of it are token ids.

        Raises:
            TokenError: as :func:`as_token_array`.
        """
        size, chunks = self.chunk_size, list(known)
        first = len(chunks) * size
        try:
            rest = tokens[first:upto]
        except (TypeError, IndexError):  # it cannot be sliced
            rest = as_token_array(tokens)[first:upto]
        raw = _as_bytes(rest)  # all at once: an engine waits for this
        parent = chunks[-1].behind or chunks[-1].digest if chunks else ROOT_DIGEST
        for at in range(0, len(raw) - 4 * size + 1, 4 * size):
            digest = blake3(bytes.fromhex(parent) + raw[at : at + 4 * size]).hexdigest()
            start = first + at // 4
            chunks.append(TokenChunk(start, start + size, digest, parent))
            parent = digest
        return chunks


def _as_bytes(tokens: TokenIds) -> bytes:
    """Four bytes a token, most significant first. Raises as :func:`as_token_array`."""
    if type(tokens) is list and tokens and type(tokens[0]) is int:  # an engine's, and half the time of NumPy
        try:
            words = array("I", tokens)
        except (TypeError, OverflowError):
            pass  # told below
        else:
            if words.itemsize == 4:
                if sys.byteorder == "little":
                    words.byteswap()
                return words.tobytes()
    return as_token_array(tokens).astype(">u4").tobytes()


def behind_rows(digest: str, rows: str) -> str:
    """The parent of the first chunk behind an edit, 64 hex digits: rows that are computed there follow from the edit's rows, not from the
    token ids alone, so they are found only behind these.

    Args:
        digest: of the edit's last chunk.
        rows: of that chunk's :class:`ChunkRecord`.
    """
    return blake3(b"qcap behind an edit v1" + bytes.fromhex(digest) + rows.encode()).hexdigest()


def chain_digest(parent: str, tokens: TokenIds) -> str:
    """The digest of ``tokens`` after everything behind ``parent``: 64 hex digits."""
    return blake3(bytes.fromhex(parent) + _as_bytes(tokens)).hexdigest()


_numbers: tuple[int, ...] = ()
_MOST_NUMBERS = 1 << 18


def positions_between(start: int, end: int) -> tuple[int, ...]:
    """``start..end``, cut out of one tuple: an engine may wait for 32 thousand of them, and equal ones are then the same objects."""
    global _numbers
    if end > _MOST_NUMBERS or start < 0:
        return tuple(range(start, end))
    numbers = _numbers
    if len(numbers) < end:
        _numbers = numbers = tuple(range(min(2 * end, _MOST_NUMBERS)))
    return numbers[start:end]


@dataclass(frozen=True)
class ChunkKey:
    """The identity of one stored object.

    Args:
        model: model name with the kind's suffix.
        tp_size, tp_rank: whose heads these are.
        dtype: of the rows, by name.
        digest: chained digest of the tokens.
        salt: "" for what the engine computed; else the edit's (or the tenant's) salt.
        tags: further identity, e.g. a LoRA's name.
    """

    model: str
    tp_size: int
    tp_rank: int
    dtype: str
    digest: str
    salt: str = ""
    tags: tuple[tuple[str, str], ...] = field(default=())

    def __post_init__(self) -> None:
        check_salt(self.salt)
        if "\0" in self.model or not self.model:
            raise TokenError(f"model name {self.model!r} is empty or holds NUL")

    def sibling(self, digest: str) -> ChunkKey:
        """The key of another chunk that differs from this one in its tokens alone: nothing else has to be checked again."""
        key = object.__new__(ChunkKey)
        key.__dict__.update(self.__dict__, digest=digest)
        key.__dict__.pop("_fingerprint", None)  # that of this one, if it was asked for
        return key

    def __hash__(self) -> int:
        """Of two strings, whose own hashes are kept: an engine looks for hundreds of keys while a request waits."""
        return hash((self.digest, self.salt))

    def fingerprint(self) -> str:
        """A hash over all fields, unambiguous for any characters in them: the object's name in a store."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        fields = [self.model, str(self.tp_size), str(self.tp_rank), self.dtype, self.digest, self.salt]
        fields += [part for tag in self.tags for part in tag]
        raws = [text.encode() for text in fields]
        return blake3(b"".join([len(raw).to_bytes(8, "big") + raw for raw in raws])).hexdigest()

    def for_rank(self, rank: int) -> ChunkKey:
        """The same chunk of another rank's heads."""
        return replace(self, tp_rank=rank)

    def layer(self, layer_id: int) -> LayerKey:
        """The key of one layer of this chunk."""
        return LayerKey(self, layer_id)

    def split_layers(self, num_layers: int) -> tuple[LayerKey, ...]:
        """The keys of layers ``0..num_layers - 1``; they differ in ``layer_id`` alone.

        Raises:
            TokenError: ``num_layers`` is not positive.
        """
        if num_layers <= 0:
            raise TokenError(f"a chunk has at least one layer, got {num_layers}")
        return tuple(LayerKey(self, i) for i in range(num_layers))


@dataclass(frozen=True)
class LayerKey:
    """One layer of one chunk. Never equal to a plain key, nor to another layer's.

    ``str()`` gives one line that :meth:`parse` reads back: the chunk key's fields, the layer, then a part a tag, joined by ``@``. In each
    part everything but letters, digits and ``_.-~/`` is percent-encoded, so no field can run into the next.
    """

    chunk: ChunkKey
    layer_id: int

    def __post_init__(self) -> None:
        if self.layer_id < 0:
            raise TokenError(f"layers are numbered from 0, got {self.layer_id}")

    def __str__(self) -> str:
        c = self.chunk
        parts = [quote(part) for part in (c.model, str(c.tp_size), str(c.tp_rank), c.dtype, c.digest, c.salt, str(self.layer_id))]
        return "@".join(parts + [f"{quote(name)}={quote(value)}" for name, value in c.tags])

    @classmethod
    def parse(cls, text: str) -> LayerKey:
        """The key that ``str()`` wrote as ``text``.

        Raises:
            TokenError: it is not what ``str()`` gives for any key.
        """
        try:
            model, size, rank, dtype, digest, salt, layer, *tags = text.split("@")
            pairs = tuple((unquote(name), unquote(value)) for name, value in (tag.split("=") for tag in tags))
            chunk = ChunkKey(unquote(model), int(size), int(rank), unquote(dtype), unquote(digest), unquote(salt), pairs)
            key = cls(chunk, int(layer))
        except (TokenError, ValueError) as error:
            raise TokenError(f"not a layer key: {text[:80]!r} ({error})") from None
        if str(key) != text:
            raise TokenError(f"not a layer key: {text[:80]!r} is not written as {str(key)[:80]!r}")
        return key


@dataclass(frozen=True)
class ChunkRecord:
    """Everything about one chunk but its tensor: what goes into an object's header.

    Args:
        kind: what the tensor holds.
        geometry: of the rank that computed it.
        start: position of the chunk's first token in its sequence.
        token_ids: ``[CH]``.
        digest, parent: of the chain.
        salt: see :class:`ChunkKey`.
        positions: the position each row's rotation stands for, ``[CH]``; ``start..start+CH`` for what an engine computed.
        edit: how an edit came about (name, parameters, parent salt), JSON text; "" for what an engine computed.
        tags: see :class:`ChunkKey`.
        rows: of an edit, two hashes joined by a dot: over all of its rows up to this chunk's start ("" of the first), and up to its end;
            "" if none is known.
    """

    kind: CacheKind
    geometry: Geometry
    start: int
    token_ids: tuple[int, ...]
    digest: str
    parent: str
    salt: str = ""
    positions: tuple[int, ...] = ()
    edit: str = ""
    tags: tuple[tuple[str, str], ...] = ()
    rows: str = ""

    def __post_init__(self) -> None:
        check_salt(self.salt)
        if not self.positions:
            object.__setattr__(self, "positions", positions_between(self.start, self.start + len(self.token_ids)))
            self.__dict__["in_place"] = True
        if len(self.positions) != len(self.token_ids) or len(self.token_ids) != self.geometry.chunk_size:
            raise TokenError(
                f"a chunk has {self.geometry.chunk_size} tokens and as many positions, got {len(self.token_ids)} and {len(self.positions)}"
            )

    @cached_property
    def in_place(self) -> bool:
        """Whether each row's rotation stands for the place it has."""
        return self.positions == positions_between(self.start, self.start + len(self.token_ids))

    @property
    def behind(self) -> str:
        """As of a :class:`TokenChunk`, should this be an edit's last chunk."""
        return behind_rows(self.digest, self.rows) if self.edit and self.rows else ""

    def follows(self, before: ChunkRecord) -> bool:
        """Whether ``before``, the chunk before this one of an edit, holds the rows that were there when this one was stored; True if
        neither tells."""
        return self.rows.partition(".")[0] == before.rows.rpartition(".")[2]

    @cached_property
    def key(self) -> ChunkKey:
        """Where this chunk is kept."""
        return chunk_key(self.kind, self.geometry, self.digest, self.salt, self.tags)


def chunk_key(kind: CacheKind, geometry: Geometry, digest: str, salt: str = "", tags: Iterable[tuple[str, str]] = ()) -> ChunkKey:
    """The key of the chunk with ``digest`` for ``geometry``'s rank."""
    return ChunkKey(kind.model_name(geometry.model), geometry.tp_size, geometry.tp_rank, geometry.dtype, digest, salt, tuple(sorted(tags)))
