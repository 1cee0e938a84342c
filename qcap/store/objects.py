"""The object tier: chunks, manifests and receipts as files of a store, whole or not there.

=============================================================  ==================================================================
``objects/<first 2 of fingerprint>/<fingerprint>.safetensors``  one chunk; the fingerprint is that of its key
``models/<slug>/<fingerprint>.<kind>.json``                     manifest: what a reader must know of one model and kind
``sequences/<slug>/<engine>-<request>-<hash>.json``             receipt of one served request
``staging/<uuid>``                                              being written; left behind only by a killed process
=============================================================  ==================================================================

Publishing is: write beside, read back and compare with the checksums, then rename if nothing is there. Any number of processes may
write one store. Nothing is flushed to the medium (``fsync``): a killed process loses nothing that was visible, a power cut may leave
a file that its checksums disown.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from blake3 import blake3

from qcap.errors import GeometryMismatch, ObjectCorrupt, StoreError
from qcap.geometry import Geometry
from qcap.kinds import CacheKind
from qcap.store import chunkfile
from qcap.store.buckets import STAGING, Bucket, Entry, Reader, Staged
from qcap.store.tiers import Lease, LoadedChunk, Resting, SequenceRecord
from qcap.tokens import ChunkKey, ChunkRecord

logger = logging.getLogger("qcap.store")

OBJECTS, MODELS, SEQUENCES = "objects", "models", "sequences"
HEAD_BYTES = 64 << 10
"""What is asked for where only a header is wanted; a longer one costs a second request."""
JSON_FORMAT = 1
NUMERICS = "numerics"
"""In a manifest's ``engine``: JSON of what, beside weights and geometry, an engine's rows depend on."""
LOOK_S = 30.0
"""How often a store that it takes a round trip to ask is asked whether its manifests are still there."""
_OBJECT_PATH = re.compile(r"objects/([0-9a-f]{2})/(\1[0-9a-f]{62})\.safetensors")


class LayerReplaced(ObjectCorrupt):
    """The object was replaced or removed between two range reads. What is stored now may be sound."""


class _LongHeader(StoreError):
    """The header goes beyond what was read. ``nbytes``: its length."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"the header has {nbytes} bytes")
        self.nbytes = nbytes


def object_path(key: ChunkKey) -> str:
    """Where the chunk of ``key`` lies, from the store's root."""
    name = key.fingerprint()
    return f"{OBJECTS}/{name[:2]}/{name}.safetensors"


def is_object_path(path: str) -> bool:
    """Whether ``path`` has the form that :func:`object_path` gives."""
    return _OBJECT_PATH.fullmatch(path) is not None


def slug(text: str, limit: int = 64) -> str:
    """``text`` as one part of a path: other characters become ``-``; a hash keeps different texts apart."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-")[:limit]
    return f"{safe}-{blake3(text.encode()).hexdigest()[:8]}"


@dataclass
class PreparedChunk:
    """A chunk written beside and checked. ``publish`` or ``discard`` ends it."""

    path: str
    nbytes: int
    staged: Staged

    def publish(self, *, overwrite: bool = False) -> bool:
        """Make it visible; False if an object is there and not ``overwrite``. Nothing stays beside in any case."""
        return self.staged.publish(self.path, overwrite=overwrite)

    def discard(self) -> None:
        """Remove it."""
        self.staged.discard()


class ObjectTier:
    """Chunks, manifests and receipts in a bucket. All methods may be called from any thread.

    Errors of the medium come as ``OSError`` or obstore's own; the engine maps them.
    """

    def __init__(self, bucket: Bucket, url: str) -> None:
        self.bucket = bucket
        self.url = url
        self._own_manifests: dict[str, bytes] = {}  # that this tier has put, by path
        self._looked_at = 0.0  # when they were last looked for

    @property
    def cheap_exists(self) -> bool:
        """Whether :meth:`exists` costs no round trip."""
        return self.bucket.cheap_exists

    @property
    def writers(self) -> int:
        """Threads that a store should write with."""
        return min(4, os.cpu_count() or 1)

    # -- chunks

    def exists(self, key: ChunkKey) -> bool:
        """Whether an object is published under ``key``."""
        return self.bucket.exists(object_path(key))

    def prepare(self, record: ChunkRecord, tensor: torch.Tensor, lease: Lease | None = None) -> PreparedChunk:
        """Write one chunk beside and check what was written.

        Args:
            record, tensor: see :func:`chunkfile.encode`.
            lease: see :meth:`Backend.store`. Files are copies.

        Raises:
            ShapeError, TokenError: record and tensor do not fit.
            ObjectCorrupt: what was read back is not what was written, or ``tensor`` changed meanwhile.
        """
        encoded = chunkfile.encode(record, tensor)
        staged = self.bucket.stage(encoded.buffers())
        try:
            _check_written(staged, encoded, record.kind.planes)
        except BaseException:
            staged.discard()
            raise
        return PreparedChunk(object_path(record.key), encoded.nbytes, staged)

    def load(self, key: ChunkKey, *, verify: bool = True) -> LoadedChunk | None:
        """One chunk; None if there is no such object.

        Raises:
            ObjectCorrupt: it does not verify, or is another key's object.
        """
        return self.load_path(object_path(key), verify=verify)

    def load_path(self, path: str, *, verify: bool = True) -> LoadedChunk | None:
        """As :meth:`load`, by path: the object's key must be the one the path stands for."""
        with self._open(path) as reader:
            if reader is None:
                return None
            loaded = _read_chunk(reader, path, verify)
        _check_key(loaded.record, path)
        return loaded

    def header(self, key: ChunkKey) -> chunkfile.ChunkHeader | None:
        """The header of one chunk, checked; None if there is no such object. Raises ``ObjectCorrupt``."""
        return self._header(object_path(key))

    def salted_header(self, path: str) -> chunkfile.ChunkHeader | None:
        """As :meth:`header`, by path; None too if the object has no salt, which is seen without making sense of all of its header."""
        with self._open(path, HEAD_BYTES) as reader:
            if reader is None:
                return None
            head = bytearray(min(HEAD_BYTES, reader.nbytes))
            reader.readinto([memoryview(head)])
        end = chunkfile.LENGTH_BYTES + int.from_bytes(head[: chunkfile.LENGTH_BYTES], "little")
        # Texts within the header have their quotes escaped, so this is the field itself.
        return None if head.find(b'"salt":""', 0, end) >= 0 else self._header(path)

    def _header(self, path: str) -> chunkfile.ChunkHeader | None:
        head = HEAD_BYTES
        while True:
            with self._open(path, head) as reader:
                if reader is None:
                    return None
                try:
                    header = _read_header(reader, path)
                    break
                except _LongHeader as error:
                    if error.nbytes <= head:
                        raise ObjectCorrupt(f"{path}: truncated while it was read") from None
                    head = error.nbytes
        _check_key(header.record, path)
        return header

    def read_layer(self, header: chunkfile.ChunkHeader, layer: int, out: torch.Tensor) -> None:
        """One layer of the object that ``header`` is of, into ``out``: one range read, checked.

        Args:
            header: from :meth:`header`.
            layer: index of the layer. Raises ``IndexError``.
            out: see :func:`chunkfile.layer_pieces`.

        Raises:
            LayerReplaced: another object is there now, or none: not damage.
            ObjectCorrupt: the layer does not verify.
            ShapeError: ``out`` does not fit.
        """
        path = object_path(header.record.key)
        offset, nbytes = chunkfile.layer_range(header, layer)
        pieces = chunkfile.layer_pieces(header, out)
        got = self.bucket.read_range(path, offset, pieces)
        try:
            if got != nbytes:
                raise ObjectCorrupt(f"truncated: {got} of the {nbytes} bytes of layer {layer}")
            chunkfile.check_layer(layer, header.layer_checksums[layer], pieces)
        except ObjectCorrupt as error:
            if self.header(header.record.key) != header:
                raise LayerReplaced(f"{path}: it was replaced or removed while it was read, layer by layer: load it anew") from None
            raise ObjectCorrupt(f"{path}: {error}") from None

    keeps_leases = False
    """Whether :meth:`rest` can be anything but None."""

    def rest(self, header: chunkfile.ChunkHeader) -> Resting | None:
        """The chunk that ``header`` is of, where it lies in page-locked memory of this process: see :meth:`LayerReader.rest`."""
        return None

    def loaded(self, keys: Sequence[ChunkKey]) -> None:
        """An engine has loaded these, in the order of a sequence."""

    def relieve(self, nbytes: int) -> bool:
        """Memory that came under leases is wanted back: see to it that ``nbytes`` of it are on their way. Whether anything is."""
        return False

    def close(self) -> None:
        """Hold no lease any more."""

    def delete(self, key: ChunkKey) -> None:
        """Remove one chunk, if it is there."""
        self.bucket.delete(object_path(key))

    def list_objects(self) -> Iterator[Entry]:
        """All files below ``objects/``."""
        return self.bucket.list(OBJECTS)

    # -- manifests

    def put_manifest(self, geometry: Geometry, kinds: Sequence[CacheKind], engine: dict[str, str]) -> None:
        """Publish a manifest a kind, unless it is there. See :meth:`Backend.put_manifest`.

        Raises:
            GeometryMismatch: the store holds another geometry under this model name, chunk size, dtype and tensor-parallel size, or what
                another configuration of the model computed.
        """
        geometry = geometry.for_rank(0)
        base = _manifest_base(geometry)
        for other in CacheKind:
            self._check_manifest(f"{base}.{other.value}.json", geometry, engine)
        for kind in kinds:
            document = {"format": JSON_FORMAT, "kind": kind.value, "geometry": geometry.to_dict(), "engine": engine}
            path, data = f"{base}.{kind.value}.json", json.dumps(document, indent=1).encode()
            if not self.bucket.stage([data]).publish(path):
                self._check_manifest(path, geometry, engine)  # another process was first
            self._own_manifests[path] = data
        self._looked_at = time.monotonic()

    def _check_manifest(self, path: str, geometry: Geometry, engine: dict[str, str]) -> None:
        found = self.read_manifest(path)
        if found is None:
            return
        held = f"what the store {self.url} already holds of this model"
        try:
            geometry.check_same(found[0], held)
            check_numerics(engine.get(NUMERICS, ""), found[2].get(NUMERICS, ""), held)
        except GeometryMismatch as error:
            raise GeometryMismatch(
                f"{error}. Give another store, or model_name= (qcap.model_name) to keep both apart in this one"
            ) from None

    def _manifests_again(self) -> None:
        """Who emptied the store while it is in use took them along, and without them nobody can read what is written from now on."""
        if not self.cheap_exists and time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        for path, data in self._own_manifests.items():
            if self.bucket.exists(path):
                continue
            if not self.bucket.stage([data]).publish(path):  # another process was first
                own = json.loads(data)
                self._check_manifest(path, Geometry.from_dict(own["geometry"]), own["engine"])
            else:
                logger.warning("%s: the manifest %s was gone, and is written again: was the store emptied?", self.url, path)

    def read_manifest(self, path: str) -> tuple[Geometry, CacheKind, dict[str, str]] | None:
        """One manifest; None if it is not there. Raises ``ObjectCorrupt``."""
        document = self._read_json(path)
        if document is None:
            return None
        try:
            engine = {str(k): str(v) for k, v in document["engine"].items()}
            return Geometry.from_dict(document["geometry"]), CacheKind(document["kind"]), engine
        except Exception as error:  # whatever a foreign or damaged file makes fail
            raise ObjectCorrupt(f"{path} is not a manifest ({type(error).__name__}: {error})") from None

    def manifests(self, model: str | None = None) -> list[tuple[Geometry, tuple[CacheKind, ...], dict[str, str]]]:
        """See :meth:`Backend.manifests`. Sorted by path. Raises ``ObjectCorrupt``."""
        merged: dict[str, tuple[Geometry, tuple[CacheKind, ...], dict[str, str]]] = {}
        for path in self.list_manifests(model):
            found = self.read_manifest(path)
            if found is None or (model is not None and found[0].model != model):
                continue
            geometry, kind, engine = found
            base = path.removesuffix(f".{kind.value}.json")
            before = merged.get(base, (geometry, (), engine))
            kinds = (*before[1], kind)
            merged[base] = (before[0], tuple(k for k in CacheKind if k in kinds), before[2])
        return list(merged.values())

    def list_manifests(self, model: str | None = None) -> list[str]:
        """Paths of all manifests, sorted."""
        return sorted(e.path for e in self.bucket.list(MODELS if model is None else f"{MODELS}/{slug(model)}"))

    # -- receipts

    def put_sequence(self, record: SequenceRecord) -> None:
        """Publish a receipt, and the manifests again if they are gone."""
        try:
            self._manifests_again()
        except Exception as error:  # the receipt is worth more
            logger.warning("%s: it is not known whether its manifests are still there: %s: %s", self.url, type(error).__name__, error)
        body = msgspec.json.encode(record)
        name = f"{slug(record.engine_id, 24)}-{slug(record.request_id, 64)}-{blake3(body).hexdigest()[:16]}"
        data = b'{"format":%d,"sequence":%s}' % (JSON_FORMAT, body)
        self.bucket.stage([data]).publish(f"{SEQUENCES}/{slug(record.model)}/{name}.json")

    def read_sequence(self, path: str) -> SequenceRecord | None:
        """One receipt; None if it is not there. Raises ``ObjectCorrupt``."""
        document = self._read_json(path)
        if document is None:
            return None
        try:
            return msgspec.convert(document["sequence"], SequenceRecord)
        except (KeyError, msgspec.ValidationError) as error:
            raise ObjectCorrupt(f"{path} is not a receipt ({error})") from None

    def list_sequences(self, model: str | None = None) -> list[str]:
        """Paths of all receipts, sorted."""
        return sorted(e.path for e in self.bucket.list(SEQUENCES if model is None else f"{SEQUENCES}/{slug(model)}"))

    # -- staging

    def list_staging(self, older_than_s: float = 0.0) -> list[Entry]:
        """Files being written, or left by a killed process: those last written to ``older_than_s`` or more ago."""
        return [e for e in self.bucket.list(STAGING) if e.age_s >= older_than_s]

    def clean_staging(self, older_than_s: float = 24 * 3600.0) -> int:
        """Remove what killed processes left; how many files. A writer that is alive and slower than ``older_than_s`` would fail."""
        old = self.list_staging(older_than_s)
        for entry in old:
            self.bucket.delete(entry.path)
        return len(old)

    def _read_json(self, path: str) -> dict[str, Any] | None:
        with self._open(path) as reader:
            if reader is None:
                return None
            data = bytearray(reader.nbytes)
            reader.readinto([memoryview(data)])
        try:
            document = json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            raise ObjectCorrupt(f"{path} is not JSON ({error})") from None
        if not isinstance(document, dict) or document.get("format") != JSON_FORMAT:
            version = document.get("format") if isinstance(document, dict) else None
            raise ObjectCorrupt(f"{path} has format {version!r}, this qcap reads {JSON_FORMAT}")
        return document

    @contextlib.contextmanager
    def _open(self, path: str, head: int | None = None) -> Iterator[Reader | None]:
        reader = self.bucket.open(path, head)
        try:
            yield reader
        finally:
            if reader is not None:
                reader.close()


def check_numerics(mine: str, theirs: str, what: str) -> None:
    """Raise ``GeometryMismatch`` if two engines, each as its manifest's ``numerics`` says, compute different rows of the same tokens.
    What only one of them says is not compared."""
    here, there = _object(mine), _object(theirs)
    both = {name: (here[name], there[name]) for name in here if name in there}
    differing = [f"{name}: {a!r} here, {b!r} there" for name, (a, b) in both.items() if json.dumps(a) != json.dumps(b)]
    if differing:
        raise GeometryMismatch(f"{what} was computed by another configuration of it: " + "; ".join(differing))


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def manifest_path(geometry: Geometry, kind: CacheKind) -> str:
    """Of what a rank of that geometry stores."""
    return f"{_manifest_base(geometry.for_rank(0))}.{kind.value}.json"


def _manifest_base(geometry: Geometry) -> str:
    identity = json.dumps([geometry.model, geometry.chunk_size, geometry.dtype, geometry.tp_size])
    return f"{MODELS}/{slug(geometry.model)}/{blake3(identity.encode()).hexdigest()[:32]}"


def _check_written(staged: Staged, encoded: chunkfile.EncodedChunk, planes: int) -> None:
    """Read a staged object back, a layer at a time, and compare."""
    header = bytearray(len(encoded.header))
    scratch = np.empty(encoded.pieces[0].nbytes * planes, dtype=np.uint8).data  # not a bytearray, which is filled under the GIL
    reader = staged.open()
    try:
        if reader.nbytes != encoded.nbytes or reader.readinto([memoryview(header)]) != len(header) or header != encoded.header:
            raise ObjectCorrupt(
                f"{reader.nbytes} bytes read back of {encoded.nbytes} written, or another header: the medium is not reliable"
            )
        for i, checksum in enumerate(encoded.layer_checksums):
            chunkfile.check_layer(i, checksum, [reader.take(scratch)])
    finally:
        reader.close()


def _read_header(reader: Reader, path: str) -> chunkfile.ChunkHeader:
    try:
        prefix = bytearray(min(chunkfile.LENGTH_BYTES, reader.nbytes))
        reader.readinto([memoryview(prefix)])
        data = bytearray(chunkfile.header_length(prefix, reader.nbytes))
        data[: len(prefix)] = prefix
        if len(data) > len(prefix) and reader.readinto([memoryview(data)[len(prefix) :]]) != len(data) - len(prefix):
            raise _LongHeader(len(data))
        return chunkfile.read_header(data, reader.nbytes)
    except ObjectCorrupt as error:
        raise ObjectCorrupt(f"{path}: {error}") from None


def _read_chunk(reader: Reader, path: str, verify: bool) -> LoadedChunk:
    """Header, then the layers straight into the tensor that is handed out."""
    header = _read_header(reader, path)
    tensor = chunkfile.empty_tensor(header)
    pieces = chunkfile.tensor_pieces(tensor)
    wanted = header.total_bytes - header.data_start
    if (got := reader.readinto(pieces)) != wanted:
        raise ObjectCorrupt(f"{path}: truncated while it was read, {got} bytes of {wanted}")
    if verify:
        try:
            chunkfile.check_layers(header, pieces)
        except ObjectCorrupt as error:
            raise ObjectCorrupt(f"{path}: {error}") from None
    return LoadedChunk(header.record, tensor)


def _check_key(record: ChunkRecord, path: str) -> None:
    if object_path(record.key) != path:
        raise ObjectCorrupt(f"{path}: holds the object of another key, {object_path(record.key)}: it was moved or copied by hand")
