"""One model's cache of one kind in a store: read it, ask what is there, write edits back."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from blake3 import blake3

from qcap.errors import ConfigError, EditConflict, GeometryMismatch, ObjectCorrupt, ShapeError, StoreError, StoreUnavailable, TokenError
from qcap.geometry import Geometry, dtype_name
from qcap.kinds import CacheKind
from qcap.sdk.coverage import Coverage, Sequences
from qcap.sdk.ranks import columns, owners, whole_model
from qcap.store.extents import extent_of, same_edit, sequence_chunks, with_extent
from qcap.store.tiers import Backend, LoadedChunk, StoreOutcome
from qcap.tokens import ChunkedTokenDatabase, ChunkKey, ChunkRecord, TokenChunk, TokenIds, as_token_array, check_salt, chunk_key

if TYPE_CHECKING:
    from qcap.sdk.edits import Edit

_log = logging.getLogger("qcap.sdk")
_PACKAGE = str(Path(__file__).parents[1])
MAX_POSITION = 2**32
"""What an object's header can say: see docs/format.md."""
_LOAD_THREADS = 4
"""Chunks read at once: enough to hide an object store's latency, few enough to bound what is held beside the result."""


class CacheContext:
    """The chunks of one kind of one model, as whole tensors. Made by :func:`qcap.connect`.

    Args:
        backend: an open store; closed with the context.
        rank_geometry: the manifest (rank 0 of ``tp_size``).
        kind: what the chunks hold.
        url: for messages.
        timeout_s: how long ``store`` waits until its objects are published.

    Attributes:
        geometry: of the whole model: the heads of all tensor-parallel ranks joined.
        kind, model, chunk_size: as the names say.
    """

    def __init__(self, backend: Backend, rank_geometry: Geometry, kind: CacheKind, *, url: str = "", timeout_s: float = 60.0) -> None:
        self._backend: Backend | None = backend
        self._rank_geometry = rank_geometry.for_rank(0)
        self.geometry = whole_model(rank_geometry)
        self.kind = kind
        self.url = url
        self.timeout_s = timeout_s
        self._database = ChunkedTokenDatabase(rank_geometry.chunk_size)

    # -- what this is ---------------------------------------------------------------------------------------------

    @property
    def model(self) -> str:
        """The model's own name, without the kind's suffix."""
        return self.geometry.model

    @property
    def stored_model(self) -> str:
        """The name in the store's keys: ``<model>##query`` for queries."""
        return self.kind.model_name(self.model)

    @property
    def chunk_size(self) -> int:
        """CH, tokens in a stored chunk."""
        return self.geometry.chunk_size

    def shape_of(self, tokens: int) -> tuple[int, int, int, int]:
        """``[planes, L, T, H]`` for T tokens."""
        return (self.kind.planes, self.geometry.num_layers, tokens, self.geometry.hidden(self.kind))

    def __repr__(self) -> str:
        g = self.geometry
        state = "" if self._backend else ", closed"
        return (
            f"CacheContext({self.stored_model!r} at {self.url or 'a store'}: L={g.num_layers}, heads={g.heads(self.kind)}, "
            f"D={g.head_size}, {g.dtype}, chunk={g.chunk_size}, tp={self._rank_geometry.tp_size}{state})"
        )

    # -- read -----------------------------------------------------------------------------------------------------

    def retrieve(self, tokens: TokenIds, salt: str = "") -> torch.Tensor | None:
        """The stored rows of the longest prefix of ``tokens``.

        Args:
            tokens: token ids ``[T]``, from the first token of the sequence on.
            salt: "" for what the engine computed, else an edit's.

        Returns:
            ``[planes, L, T_hit, H]`` in the model's dtype, contiguous, on the CPU, owned by the caller; ``T_hit`` is a multiple of the
            chunk size: the run of whole chunks from token 0 up to the first hole. None if there is not even one chunk.

        Raises:
            TokenError: ids or salt are not usable.
            ObjectCorrupt: a chunk is there, but is not what it should be.
            GeometryMismatch: a chunk was written by a model of another shape.

        Does not:
            Return the tokens after the last whole chunk, nor anything behind a hole; :meth:`coverage` shows both.
        """
        backend, array = self._open(), as_token_array(tokens)
        check_salt(salt)
        chunks = sequence_chunks(backend, self._rank_geometry, array, salt, self.kind)
        if not chunks:
            _log.info("retrieve: %d tokens are less than one chunk of %d; nothing can be stored of them", len(array), self.chunk_size)
            return None
        hits = self._prefix(backend, chunks, salt)
        if not hits:
            _log.info("retrieve: no chunk of these %d tokens is stored for %s (salt %r)", len(array), self.stored_model, salt)
            return None
        out = torch.empty(self.shape_of(hits * self.chunk_size), dtype=self.geometry.torch_dtype)
        loaded = self._load_all(backend, out, chunks[:hits], array, salt)
        if loaded == hits:
            return out
        _log.warning(
            "retrieve: chunk %d of %s vanished between lookup and load; the prefix ends there, at %d tokens instead of %d",
            loaded, self.stored_model, loaded * self.chunk_size, hits * self.chunk_size,
        )  # fmt: skip
        return out[:, :, : loaded * self.chunk_size].clone() if loaded else None

    def coverage(self, tokens: TokenIds, salt: str = "", *, computed_tokens: int | None = None) -> Coverage:
        """Which chunks of ``tokens`` are stored; reads no data, and under a salt a few headers.

        Args:
            tokens: token ids ``[N]``.
            salt: as in :meth:`retrieve`.
            computed_tokens: how many of them an engine computed, if it is known (``N - 1`` after a generation); chunks beyond are not asked
                for, because no engine can have stored them.

        Raises:
            TokenError: ids, salt or count are not usable.
            ObjectCorrupt: an edit's header is not what it should be.
        """
        backend, array = self._open(), as_token_array(tokens)
        check_salt(salt)
        computed = len(array) if computed_tokens is None else computed_tokens
        if not 0 <= computed <= len(array):
            raise TokenError(f"computed_tokens must lie in 0..{len(array)} (the tokens given), got {computed}")
        chunks = sequence_chunks(backend, self._rank_geometry, array[:computed], salt, self.kind)
        there = [True] * len(chunks)
        for rank in range(self._rank_geometry.tp_size if chunks else 0):
            on_rank = backend.contains([self._key(chunk, salt, rank) for chunk in chunks])
            there = [a and b for a, b in zip(there, on_rank, strict=True)]
        return Coverage(
            model=self.model, kind=self.kind, salt=salt, chunk_size=self.chunk_size, total_tokens=len(array), computed_tokens=computed,
            stored=tuple(there),
        )  # fmt: skip

    def sequences(self, tokenizer: Any = None) -> Sequences:
        """What was captured of this model, one receipt a request, oldest first; shows itself as a table.

        Args:
            tokenizer: anything with ``decode(ids) -> str``, to see the text too.
        """
        return Sequences(self._open().sequences(self.model), tokenizer)

    # -- write ----------------------------------------------------------------------------------------------------

    def store(
        self,
        tensor: torch.Tensor | Edit,
        tokens: TokenIds | None = None,
        *,
        salt: str | None = None,
        positions: Sequence[int] | torch.Tensor | np.ndarray | None = None,
        edit: str | Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> bool:
        """Write edited rows under a salt, so that a request with that salt and these token ids goes on from them.

        Args:
            tensor: ``[planes, L, T, H]`` of the model's dtype, on any device, contiguous or not; or an :class:`Edit`, which brings
                everything else along.
            tokens: the ids these rows now stand for, ``[T]``.
            salt: the edit's name in the keys (:func:`qcap.edits.salt_for` makes one); never "".
            positions: what each row's rotation stands for, ``[T]``; ``0..T-1`` if not given.
            edit: how the edit came about, for the objects' headers: JSON text or a mapping.
            overwrite: replace other content under this salt. Requests that are being served go on with the old rows; new ones load the
                new (an engine of vLLM 0.20 only after ``llm.reset_prefix_cache()``). What engines computed and stored behind the old rows
                is found behind those alone: it stays, and is of use again if they come back. A fresh salt keeps both.

        Returns:
            True if every whole chunk is in the store (also when it already was, byte for byte). False if there is less than one whole
            chunk: nothing was written, the store was not asked.

        Warns:
            UserWarning: rows fill no chunk and are not stored: after the last whole chunk, or all of them.

        Raises:
            ShapeError: not a tensor, or it does not fit the model or the tokens.
            TokenError: no or unusable tokens, salt or positions.
            EditConflict: other content is stored under this salt; nothing was written.
            StoreError: a chunk could not be published within ``timeout_s``.

        Does not:
            Store the rows after the last whole chunk: the engine computes them anew from their token ids. Touch what the engine stored.
        """
        from qcap.sdk.edits import Edit

        if isinstance(tensor, Edit):
            return self._store_edit(tensor, tokens, salt, positions, edit, overwrite)
        _check_is_tensor(tensor, tokens)
        backend = self._open()
        array = self._check_tokens(tokens)
        self._check_tensor(tensor, len(array))
        salt = self._check_edit_salt(salt)
        where = self._check_positions(positions, len(array))
        text = _edit_text(edit)
        chunks = self._database.chunks(array)
        self._warn_of_rest(len(array))
        if not chunks:
            return False
        if overwrite:
            _log.warning(
                "store: overwrite=True under salt %r: requests that are being served go on with the old rows, and an engine of vLLM 0.20 "
                "uses its own cache until llm.reset_prefix_cache(); a fresh salt has none of these troubles",
                salt,
            )
        writer = _Writer(self, backend, array, where, salt, with_extent(text, chunks), overwrite)
        writer.write(tensor, chunks)
        return True

    def _warn_of_rest(self, tokens: int) -> None:
        """Rows that fill no chunk are lost: say so where ``store`` was called."""
        size, rest = self.chunk_size, tokens % self.chunk_size
        if not rest:
            return
        what, keep = f"the last {rest} of {tokens} edited rows fill no chunk of {size}", f"{tokens - rest} or {tokens - rest + size}"
        if tokens == rest:
            what, keep = f"{tokens} edited rows are less than one chunk of {size}", f"{size} (or a multiple of it)"
        warnings.warn(
            f"store: {what} and are not stored: an engine computes them anew from their token ids, not as edited. Keep {keep} tokens, or "
            "capture with a smaller chunk_size; rows that may be computed anew need not be stored: give their ids behind the edit's",
            UserWarning,
            stacklevel=outside(),
        )

    def _store_edit(self, edit: Edit, *others: Any) -> bool:
        """Hand an Edit's parts to :meth:`store`."""
        *given, overwrite = others
        if any(value is not None for value in given):
            raise TokenError("an Edit brings its own tokens, salt and positions: give ctx.store(edit) alone, or its tensor with yours")
        return self.store(edit.tensor, edit.token_ids, salt=edit.salt, positions=edit.positions, edit=edit.description, overwrite=overwrite)

    # -- end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the store. Safe to call twice; using the context afterwards raises."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _open(self) -> Backend:
        if self._backend is None:
            raise StoreUnavailable(f"this context of {self.stored_model!r} is closed: call qcap.connect({self.url!r}) again")
        return self._backend

    def _key(self, chunk: TokenChunk, salt: str, rank: int) -> ChunkKey:
        return chunk_key(self.kind, self._rank_geometry.for_rank(rank), chunk.digest, salt)

    def _prefix(self, backend: Backend, chunks: Sequence[TokenChunk], salt: str) -> int:
        """Chunks that every rank has without a hole, from the first on."""
        hits = len(chunks)
        for rank in range(self._rank_geometry.tp_size):
            if not hits:
                break
            hits = backend.lookup([self._key(chunk, salt, rank) for chunk in chunks[:hits]])
        return hits

    def _load_all(self, backend: Backend, out: torch.Tensor, chunks: Sequence[TokenChunk], array: np.ndarray, salt: str) -> int:
        """Fill ``out`` from ``chunks``; how many were there, from the first on."""
        with ThreadPoolExecutor(min(_LOAD_THREADS, len(chunks)), thread_name_prefix="qcap-load") as pool:
            pending = [pool.submit(self._load_into, backend, out, chunk, array, salt) for chunk in chunks]
            try:
                before: ChunkRecord | None = None
                told = extent_of("")
                for number, future in enumerate(pending):
                    record = future.result()
                    if record is None:
                        return number
                    edit = record.edit
                    if before is not None and edit and (edit != before.edit or not record.follows(before)):
                        raise ObjectCorrupt(
                            f"chunk {number} of {self.stored_model!r} under salt {salt!r} is of an edit the chunk before it is not of: "
                            "two caches are mixed, or one is being stored over the other. Store the edit again under another salt"
                        )
                    if edit:
                        told = extent_of(edit)
                    elif before is not None and before.edit and number < (told.covered(chunks) or 0):
                        raise ObjectCorrupt(
                            f"chunk {number} of {self.stored_model!r} under salt {salt!r} is not its edit's: that was lost, and an engine "
                            "computed this one in its place. Store the edit again, with overwrite=True or under another salt"
                        )
                    before = record
                return len(chunks)
            finally:
                for future in pending:
                    future.cancel()

    def _load_into(self, backend: Backend, out: torch.Tensor, chunk: TokenChunk, array: np.ndarray, salt: str) -> ChunkRecord | None:
        """Copy one chunk of all ranks to its place; a rank's header, None if a rank has no such chunk."""
        records: dict[tuple[str, str], ChunkRecord] = {}
        for rank in owners(self._rank_geometry, self.kind):
            loaded = self._load_one(backend, chunk, array, salt, rank)
            if loaded is None:
                return None
            records[loaded.record.edit, loaded.record.rows] = loaded.record
            out[:, :, chunk.start : chunk.end, columns(self._rank_geometry, self.kind, rank)] = loaded.tensor
        if len(records) > 1:
            raise ObjectCorrupt(
                f"chunk {chunk.index} of {self.stored_model!r} under salt {salt!r} has heads of {len(records)} different caches, one a "
                "rank. Store the edit again under another salt"
            )
        return next(iter(records.values()))

    def _load_one(self, backend: Backend, chunk: TokenChunk, array: np.ndarray, salt: str, rank: int) -> LoadedChunk | None:
        """One rank's chunk, checked against what was asked for."""
        geometry = self._rank_geometry.for_rank(rank)
        key = self._key(chunk, salt, rank)
        what = f"chunk {chunk.index} (tokens {chunk.start}..{chunk.end - 1}, rank {rank}) of {self.stored_model!r}"
        hint = f"run `qcap verify {self.url or 'STORE'}` to list what is damaged; `--delete` removes it, and it can be stored again"
        try:
            loaded = backend.load(key)
        except ObjectCorrupt as error:
            raise ObjectCorrupt(f"{what} is corrupt: {error}. {hint}") from error
        if loaded is None:
            return None
        record = loaded.record
        geometry.check_same(record.geometry, what)
        wrong = [
            name
            for name, is_same in (
                ("kind", record.kind is self.kind),
                ("digest", record.digest == chunk.digest),
                ("parent", record.parent == chunk.parent),
                ("salt", record.salt == salt),
                ("rank", record.geometry.tp_rank == rank),
                ("token ids", np.array_equal(np.asarray(record.token_ids), array[chunk.start : chunk.end])),
            )
            if not is_same
        ]
        if wrong:
            raise ObjectCorrupt(f"{what}: its header has another {', '.join(wrong)} than was asked for. {hint}")
        if tuple(loaded.tensor.shape) != geometry.chunk_shape(self.kind) or loaded.tensor.dtype != geometry.torch_dtype:
            raise GeometryMismatch(
                f"{what}: tensor {tuple(loaded.tensor.shape)} of {dtype_name(loaded.tensor.dtype)}, "
                f"wanted {geometry.chunk_shape(self.kind)} of {geometry.dtype}. {hint}"
            )
        return loaded

    def _check_tokens(self, tokens: TokenIds | None) -> np.ndarray:
        if tokens is None:
            raise TokenError("store needs the token ids these rows stand for: store(tensor, tokens, salt=...)")
        return as_token_array(tokens)

    def _check_tensor(self, tensor: torch.Tensor, tokens: int) -> None:
        got, wanted = tuple(tensor.shape), self.shape_of(tokens)
        if got != wanted:
            cause = "another model's tensor, or an axis was moved?"
            if len(got) != 4:
                cause = "the tensor must have four axes [planes, L, T, H]"
            elif got[0] != wanted[0]:
                cause = f"a {self.kind.value} tensor has {wanted[0]} plane(s); was it read from a context of the other kind?"
            elif got[1] == wanted[1] and got[3] == wanted[3]:
                cause = f"{got[2]} rows for {tokens} token ids: cut both the same way (tensor[:, :, index] and tokens[index])"
            elif got[3] == self.geometry.hidden(CacheKind.QUERY if self.kind is CacheKind.KV else CacheKind.KV):
                cause = "H is that of the other kind"
            raise ShapeError(f"tensor {got} does not fit {self.stored_model!r}: wanted [planes, L, T, H] = {wanted}; {cause}")
        if tensor.dtype != self.geometry.torch_dtype:
            raise ShapeError(
                f"tensor is {dtype_name(tensor.dtype)}, the model's cache is {self.geometry.dtype}: "
                f"cast it yourself, so that the rounding is yours: tensor.to(torch.{self.geometry.dtype})"
            )

    def _check_edit_salt(self, salt: str | None) -> str:
        if not salt:
            raise TokenError(
                "an edit needs a salt: what the engine stored (salt \"\") is never overwritten. Give salt='my-edit', "
                "or qcap.edits.salt_for(name, params)"
            )
        return check_salt(salt)

    def _check_positions(self, positions: Sequence[int] | torch.Tensor | np.ndarray | None, tokens: int) -> np.ndarray:
        given = positions.detach().cpu() if isinstance(positions, torch.Tensor) else positions
        try:
            where = np.arange(tokens) if given is None else np.asarray(given)
        except ValueError:  # lists of different lengths
            raise TokenError(f"positions must be {tokens} integers >= 0, one a row; got sequences in a sequence") from None
        if where.shape != (tokens,) or where.dtype.kind not in "iu" or (tokens and int(where.min()) < 0):
            raise TokenError(f"positions must be {tokens} integers >= 0, one a row; got shape {where.shape} of {where.dtype}")
        if tokens and int(where.max()) >= MAX_POSITION:
            raise TokenError(f"position {int(where.max())} is beyond any sequence: positions must lie in [0, 2**32), one a row")
        return where


class _Writer:
    """One call of :meth:`CacheContext.store`: cut, compare with what is there, queue, wait."""

    def __init__(
        self, context: CacheContext, backend: Backend, array: np.ndarray, positions: np.ndarray, salt: str, edit: str, overwrite: bool
    ) -> None:
        self.context, self.backend, self.array, self.positions = context, backend, array, positions
        self.salt, self.edit, self.overwrite = salt, edit, overwrite
        self._relabel: set[tuple[int, int]] = set()
        self._texts: dict[tuple[int, int], str] = {}
        self._hashes: list[str] = []

    def write(self, tensor: torch.Tensor, chunks: Sequence[TokenChunk]) -> None:
        """Store all chunks, or raise."""
        tensor = tensor.detach()
        self._hashes = self._hash_rows(tensor, chunks)
        # Last chunk first: they become visible in this order, so an edit that is cut off half-way has no prefix that could be loaded.
        todo = [(chunk, rank) for chunk in reversed(chunks) for rank in reversed(range(self.context._rank_geometry.tp_size))]
        if self.overwrite:
            self._texts[0, 0] = self._text_of(tensor, chunks[0])
            self._adopt()
        else:
            todo = self._missing(tensor, todo)
        deadline = time.monotonic() + self.context.timeout_s
        pending: list[tuple[TokenChunk, int, Future[StoreOutcome]]] = []
        finite = True
        for chunk, rank in todo:
            rows = self._rows(tensor, chunk, rank)
            finite = finite and bool(torch.isfinite(rows.float()).all())
            replaces = self.overwrite or (chunk.index, rank) in self._relabel
            pending.append((chunk, rank, self.backend.store(self._record(chunk, rank), rows, overwrite=replaces)))
        if not finite:
            _log.warning("store: rows with NaN or infinity go to %s (salt %r); the engine will read them as they are",
                         self.context.stored_model, self.salt)  # fmt: skip
        for number, (chunk, rank, future) in enumerate(pending):
            self._settle(tensor, chunk, rank, future, deadline, f"{number} of {len(pending)} objects are stored")

    def _hash_rows(self, tensor: torch.Tensor, chunks: Sequence[TokenChunk]) -> list[str]:
        """Of each chunk, hashes over all rows up to its start and up to its end and where they stand, of all ranks' heads: what an engine
        computes behind them is found by it, and a chunk of other rows in between is seen."""
        hasher, found, before = blake3(max_threads=blake3.AUTO), list[str](), ""
        for chunk in chunks:
            rows = tensor[:, :, chunk.start : chunk.end].to("cpu").contiguous()
            hasher.update(rows.view(torch.uint8).numpy().data)
            hasher.update(self.positions[chunk.start : chunk.end].astype("<i8").tobytes())
            after = hasher.hexdigest()
            found.append(f"{before}.{after}")
            before = after
        return found

    def _missing(self, tensor: torch.Tensor, todo: list[tuple[TokenChunk, int]]) -> list[tuple[TokenChunk, int]]:
        """What is not there yet; raises before anything is written if something else is."""
        there = self.backend.contains([self.context._key(chunk, self.salt, rank) for chunk, rank in todo])
        for (chunk, rank), is_there in zip(todo, there, strict=True):
            if is_there:
                self._is_same(tensor, chunk, rank)
        self._adopt()
        self._relabel = {at for at, text in self._texts.items() if text != self.edit}  # the same rows, told otherwise
        return [(chunk, rank) for chunk, rank in todo if self._texts.get((chunk.index, rank)) != self.edit]

    def _adopt(self) -> None:
        """An edit's chunks must all tell the same. If some of these rows are there as this edit's, but with another list of its chunks (of
        another sequence that begins alike, or of an older qcap), theirs is kept: chunks that are not written now tell it too."""
        self.edit = next((text for _, text in sorted(self._texts.items()) if same_edit(text, self.edit)), self.edit)

    def _text_of(self, tensor: torch.Tensor, chunk: TokenChunk) -> str:
        """What rank 0's stored object says of its edit; "" if it has other rows, or is not there."""
        try:
            return self._texts.get((chunk.index, 0), "") if self._is_same(tensor, chunk, 0) else ""
        except (StoreError, GeometryMismatch):
            return ""

    def _is_same(self, tensor: torch.Tensor, chunk: TokenChunk, rank: int) -> bool:
        """Whether the stored object holds byte for byte these rows (``_texts`` then has what it says of its edit); False if it vanished.

        Raises:
            EditConflict: it is another.
        """
        try:
            loaded = self.context._load_one(self.backend, chunk, self.array, self.salt, rank)
        except ObjectCorrupt:
            return False  # having been read and found damaged, it is replaced by what is stored now
        if loaded is None:
            return False
        rows = self._rows(tensor, chunk, rank)
        same = torch.equal(loaded.tensor.contiguous().view(torch.uint8), rows.view(torch.uint8))
        if same and loaded.record.positions == self._record(chunk, rank).positions:
            self._texts[chunk.index, rank] = loaded.record.edit
            return True
        what = "other rows" if not same else "the same rows at other positions"
        if not loaded.record.edit:
            raise EditConflict(
                f"{what} are already stored under salt {self.salt!r} for chunk {chunk.index} (tokens {chunk.start}..{chunk.end - 1}) of "
                f"{self.context.stored_model!r}, and they are no edit: an engine computed them for a request with this salt, while this "
                "chunk of the edit was not in the store (not yet, or not any more). Store the edit under a fresh salt; overwrite=True "
                "replaces them, but an engine that runs may still hold them in its own prefix cache until llm.reset_prefix_cache()"
            )
        raise EditConflict(
            f"{what} are already stored under salt {self.salt!r} for chunk {chunk.index} (tokens {chunk.start}..{chunk.end - 1}) of "
            f"{self.context.stored_model!r}: use another salt, or overwrite=True to replace them"
        )

    def _rows(self, tensor: torch.Tensor, chunk: TokenChunk, rank: int) -> torch.Tensor:
        """One object's rows ``[planes, L, CH, H]``: a copy, so that the caller may change the tensor while a slow store still reads."""
        context = self.context
        part = tensor[:, :, chunk.start : chunk.end, columns(context._rank_geometry, context.kind, rank)]
        return part.to("cpu").clone(memory_format=torch.contiguous_format)

    def _record(self, chunk: TokenChunk, rank: int) -> ChunkRecord:
        context = self.context
        return ChunkRecord(
            kind=context.kind,
            geometry=context._rank_geometry.for_rank(rank),
            start=chunk.start,
            token_ids=tuple(self.array[chunk.start : chunk.end].tolist()),
            digest=chunk.digest,
            parent=chunk.parent,
            salt=self.salt,
            positions=tuple(self.positions[chunk.start : chunk.end].tolist()),
            edit=self.edit,
            rows=self._hashes[chunk.index],
        )

    def _settle(
        self, tensor: torch.Tensor, chunk: TokenChunk, rank: int, future: Future[StoreOutcome], deadline: float, progress: str
    ) -> None:
        """Wait for one object and judge its outcome."""
        what = f"chunk {chunk.index} (rank {rank}) of {self.context.stored_model!r}, salt {self.salt!r}"
        try:
            outcome = future.result(timeout=max(0.0, deadline - time.monotonic()))
        except FutureTimeout:
            raise StoreError(
                f"{what} is not published after {self.context.timeout_s:g} s ({progress}); it may still be. "
                "Store again (what is there is kept), or connect with a larger timeout_s"
            ) from None
        if outcome is StoreOutcome.STORED:
            return
        if outcome is StoreOutcome.EXISTS:  # someone else wrote it between our look and our write
            if self._is_same(tensor, chunk, rank):
                return
            raise StoreError(f"{what} appeared and vanished while it was stored ({progress}): store again")
        left = "; under this salt old and new chunks are mixed now" if self.overwrite else ""
        raise StoreError(f"{what} was {outcome.value} by the store ({progress}{left}); the reason is in the log of qcap.store. Store again")


def _check_is_tensor(tensor: object, tokens: object) -> None:
    """Refuse what is no tensor, and tensors in the place of token ids.

    Raises:
        ShapeError: says what came instead.
    """
    swapped = "are the arguments swapped? store(tensor, tokens, salt=...)"
    if not isinstance(tensor, torch.Tensor):
        got = f"{type(tensor).__module__}.{type(tensor).__qualname__}".removeprefix("builtins.")
        shape = getattr(tensor, "shape", None)
        hint = "torch.from_numpy(array) makes one" if isinstance(tensor, np.ndarray) and np.ndim(tokens) < 2 else swapped  # type: ignore[arg-type]
        if tensor is None:
            hint = "retrieve() found nothing? Look at ctx.coverage(tokens)"
        raise ShapeError(
            f"torch.Tensor [planes, L, T, H] wanted, got {got}{f' of shape {tuple(shape)}' if shape is not None else ''}; {hint}"
        )
    if isinstance(tokens, torch.Tensor | np.ndarray) and tokens.ndim > 1 and tensor.dim() < 4:
        raise ShapeError(f"torch.Tensor [planes, L, T, H] wanted, got a tensor of shape {tuple(tensor.shape)}; {swapped}")


def outside() -> int:
    """The ``stacklevel`` at which our caller warns of a line of the user's, not of qcap's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level


def _edit_text(edit: str | Mapping[str, Any] | None) -> str:
    """The header's JSON text; never "", which means that an engine computed the rows."""
    if isinstance(edit, str) and edit:
        return edit
    try:
        return json.dumps(dict(edit) if isinstance(edit, Mapping) and edit else {"name": "unnamed"}, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"edit must be something JSON can say, numbers, text, lists and mappings: {error}") from None
