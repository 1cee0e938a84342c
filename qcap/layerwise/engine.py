"""Layerwise loading and storing by token ids, as generators: the form in which an engine that knows nothing of steps drives them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Iterable, Sequence

import numpy as np
import torch

from qcap.errors import ConfigError, ShapeError, TokenError
from qcap.geometry import Geometry
from qcap.kinds import CacheKind
from qcap.layerwise.connector import check_blocks
from qcap.layerwise.fetch import ChunkFailed, LayerMissing
from qcap.layerwise.layers import LayerStore
from qcap.layerwise.load import LayerwiseLoad, LoadBatch, LoadGear, Span
from qcap.layerwise.save import LayerwiseStore
from qcap.tokens import ChunkedTokenDatabase, ChunkRecord, TokenChunk, TokenIds, as_token_array

logger = logging.getLogger("qcap.layerwise")

Mask = Sequence[bool] | np.ndarray | torch.Tensor


def leading_mask(total: int, done: int, chunk_size: int) -> torch.Tensor:
    """``[total]`` bool: False for the first ``done`` tokens, rounded down to whole chunks, which the engine has already; then True."""
    mask = torch.ones(total, dtype=torch.bool)
    mask[: min(done, total) // chunk_size * chunk_size] = False
    return mask


def masked_tokens(mask: Mask | None, total: int, chunk_size: int) -> int:
    """How many tokens a mask leaves out: its leading Falses.

    Raises:
        TokenError: another length than ``total``, a False after a True, or a number of Falses that is not whole chunks.
    """
    if mask is None:
        return 0
    try:
        values = np.asarray(mask.cpu() if isinstance(mask, torch.Tensor) else mask)
    except ValueError:
        raise TokenError(f"a mask is {total} bools, one a token, got sequences in a sequence") from None
    if values.shape != (total,) or values.dtype != np.bool_:
        raise TokenError(f"a mask is {total} bools, one a token, got shape {values.shape} of {values.dtype}")
    skipped = int(total - values.sum())
    if values[:skipped].any():
        raise TokenError(f"a mask is False up to some token and True from there on; token {int(values.argmin())} breaks that")
    if skipped % chunk_size and skipped != total:
        raise TokenError(f"a mask leaves out whole chunks of {chunk_size} tokens, got {skipped} tokens")
    return skipped


class LayerwiseEngine:
    """The two generators and what gates them. None of its failures reaches the caller: a load that fails is a miss, to be computed.

    Args:
        geometry: of this rank.
        kind: what the pages hold.
        store: where layers are kept.
        gear: streams, connector, host memory.

    Attributes:
        healthy: False: nothing is loaded and nothing stored.
        frozen: True: nothing is stored, and loaded only from ``store.local``.
        passive: True: another rank stores what this one holds too.
        counters: what became of loads and stores.
    """

    def __init__(self, geometry: Geometry, kind: CacheKind, store: LayerStore, gear: LoadGear) -> None:
        connector = gear.connector
        wanted = (geometry.num_layers, geometry.block_size, geometry.hidden(kind), kind.planes, geometry.torch_dtype)
        got = (connector.num_layers, connector.block_size, connector.hidden, connector.num_planes, connector.dtype)
        if wanted != got:
            raise ConfigError(f"layers, block size, row, planes and dtype are {wanted} in the geometry and {got} in the connector")
        self.geometry, self.kind, self.store, self.gear = geometry, kind, store, gear
        self.database = ChunkedTokenDatabase(geometry.chunk_size)
        self.healthy, self.frozen, self.passive = True, False, False
        self.counters: Counter[str] = Counter()

    # -- loading

    def retrieve_layer(
        self,
        tokens: TokenIds,
        blocks: Sequence[int],
        *,
        mask: Mask | None = None,
        salt: str = "",
        tags: Iterable[tuple[str, str]] = (),
        last: bool = True,
        batch: LoadBatch | None = None,
    ) -> Generator[int | torch.Tensor | None, None, None]:
        """Load the longest stored prefix. Yields L + 2 times, whatever happens: the hit count, then None a layer, then the mask.

        The step after the k-th yield moves layer k - 1 and starts fetching layer k; close it to give up.

        Args:
            tokens: ``[T]``.
            blocks: the sequence's block ids from its first token on. Those of whole chunks behind the mask must exist, and a load fills
                each once.
            mask: ``[T]``; leading Falses are whole chunks that the engine has already.
            salt, tags: of the keys.
            last: of the batch; see :class:`LayerwiseLoad`.
            batch: of this step.

        Returns:
            A generator. What it yields last is ``[T]`` bool: True where a token's rows are in the pages now.

        Raises:
            TokenError, ShapeError: tokens, mask or blocks cannot be used. Raised here, not by the generator.
        """
        records, skipped = self._records(tokens, blocks, mask, salt, tags)
        used = [int(block) for block in self._used(blocks, skipped, len(records))]
        if len(set(used)) < len(used):
            twice = next(block for place, block in enumerate(used) if block in used[:place])
            raise ShapeError(
                f"block {twice} is given twice: it cannot hold the rows of two places; give the ids of the request's block table"
            )
        return self._retrieve(len(as_token_array(tokens)), records, skipped, blocks, last, batch)

    def _retrieve(
        self, total: int, records: list[ChunkRecord], skipped: int, blocks: Sequence[int], last: bool, batch: LoadBatch | None
    ) -> Generator[int | torch.Tensor | None, None, None]:
        n = self.geometry.block_size
        hit = self._hit(records)
        end = skipped + len(hit) * self.geometry.chunk_size
        fetch = self.store.reader([record.key for record in hit]) if hit else None
        span = Span(total, skipped if hit else 0, end if hit else 0, self.geometry.chunk_size)
        ids = blocks[span.start // n : span.end // n]
        load = LayerwiseLoad(self.gear, fetch, ids, span, batch=batch, last=last, keep_prefix=True)
        try:
            yield load.begin()
            for layer in range(self.geometry.num_layers):
                load.layer(layer)
                yield None
            loaded = load.finish()
            self._count(load)
            yield loaded
        finally:
            load.close()

    def _hit(self, records: list[ChunkRecord]) -> list[ChunkRecord]:
        """The leading chunks that can be loaded, judged by their layer 0: up to the first that is missing or lies in another place."""
        if not self.healthy or not records:
            return []
        try:
            keys = [record.key.layer(0) for record in records]
            found = self.store.contains(keys)
            hit: list[ChunkRecord] = []
            first = ""
            for record, key, there in zip(records, keys, found, strict=True):
                if not there:
                    break
                place = self.store.location(key)
                if self.frozen and place not in self.store.local:
                    break
                if hit and place != first:
                    self.counters["load.truncated_at_another_location"] += 1
                    break
                first = place
                hit.append(record)
            return hit
        except Exception as error:  # a store that cannot be asked holds nothing for now
            self.counters["load.unavailable"] += 1
            logger.warning("the store cannot be asked, so nothing is loaded: %s: %s", type(error).__name__, error)
            return []

    def _count(self, load: LayerwiseLoad) -> None:
        self.counters["load.tokens"] += load.valid_end - load.span.start
        self.counters["load.tokens_invalid"] += len(load.invalid)
        if load.failure is not None:
            missing = isinstance(load.failure, ChunkFailed) and isinstance(load.failure.cause, LayerMissing)
            self.counters["load.holes" if missing else "load.failed"] += 1
            logger.warning("%d tokens were not loaded and are computed instead: %s", len(load.invalid), load.failure)

    # -- storing

    def store_layer(
        self,
        tokens: TokenIds,
        blocks: Sequence[int],
        *,
        mask: Mask | None = None,
        salt: str = "",
        tags: Iterable[tuple[str, str]] = (),
    ) -> Generator[None, None, None]:
        """Store the whole chunks that are not there yet. Yields L + 1 times, whatever happens.

        The first L steps each follow a layer's computation; the last publishes. Close it to give up. Arguments, and what is raised here
        and not by the generator, as :meth:`retrieve_layer`.
        """
        return self._store(self._records(tokens, blocks, mask, salt, tags)[0], blocks)

    def _store(self, records: list[ChunkRecord], blocks: Sequence[int]) -> Generator[None, None, None]:
        wanted = self._not_there(records)
        per_chunk = self.geometry.chunk_size // self.geometry.block_size
        ids = [blocks[r.start // self.geometry.block_size :][:per_chunk] for r in wanted]
        store: LayerwiseStore | None = None
        if wanted:
            gear, sink = self.gear, self.store.writer(wanted)
            store = LayerwiseStore(gear.streams, gear.connector, gear.host, sink, ids, self.geometry.chunk_size)
        try:
            if store is not None:
                got = store.begin()
                self.counters["store.chunks_without_memory"] += len(wanted) - got
            for layer in range(self.geometry.num_layers):
                if store is not None:
                    store.layer(layer)
                yield None
            if store is not None:
                self.counters["store.chunks"] += store.finish()
                self.counters["store.failed"] += store.failure is not None
            yield None
        finally:
            if store is not None:
                store.close()

    def _not_there(self, records: list[ChunkRecord]) -> list[ChunkRecord]:
        if not self.healthy or self.passive or self.frozen or not records:
            return []
        try:
            found = self.store.contains([record.key.layer(0) for record in records])
            return [record for record, there in zip(records, found, strict=True) if not there]
        except Exception as error:
            self.counters["store.unavailable"] += 1
            logger.warning("the store cannot be asked, so nothing is stored: %s: %s", type(error).__name__, error)
            return []

    # -- both

    def _records(
        self, tokens: TokenIds, blocks: Sequence[int], mask: Mask | None, salt: str, tags: Iterable[tuple[str, str]]
    ) -> tuple[list[ChunkRecord], int]:
        """The whole chunks behind the mask, and how many tokens are before them."""
        array, size = as_token_array(tokens), self.geometry.chunk_size
        skipped = masked_tokens(mask, len(array), size)
        chunks = self.database.chunks(array)
        if len(blocks) * self.geometry.block_size < len(chunks) * size:
            raise ShapeError(
                f"{len(chunks) * size} tokens in whole chunks need more than {len(blocks)} blocks of {self.geometry.block_size}"
            )
        ids, pairs = array.tolist(), tuple(sorted(tags))
        records = [self._record(chunk, ids, salt, pairs) for chunk in chunks if chunk.start >= skipped]
        check_blocks(self.gear.connector, self._used(blocks, skipped, len(records)))
        return records, skipped

    def _used(self, blocks: Sequence[int], skipped: int, chunks: int) -> Sequence[int]:
        """The ids of what is moved: of ``chunks`` chunks behind ``skipped`` tokens."""
        n = self.geometry.block_size
        return blocks[skipped // n : (skipped + chunks * self.geometry.chunk_size) // n]

    def _record(self, chunk: TokenChunk, ids: list[int], salt: str, tags: tuple[tuple[str, str], ...]) -> ChunkRecord:
        return ChunkRecord(
            kind=self.kind, geometry=self.geometry, start=chunk.start, token_ids=tuple(ids[chunk.start : chunk.end]),
            digest=chunk.digest, parent=chunk.parent, salt=salt, tags=tags,
        )  # fmt: skip
