"""One object = one chunk of one kind on one rank = one safetensors file. The format is specified in ``docs/format.md``.

Tensor ``layers.{i}`` is ``[planes, CH, H]``; the layers lie in order, without gaps, so a layer is one byte range. Everything else is in
the header's metadata, with a blake3 checksum a layer and one over the metadata itself. Reading checks all of it: what does not fit raises
:class:`~qcap.errors.ObjectCorrupt` and says what.

The header is written and parsed here rather than by the safetensors library, because that one sorts tensors by name (``layers.10``
before ``layers.2``) and would copy the tensor into one contiguous piece first.

An engine's thread runs beside those that write and read here, and waits whenever one of them has the GIL. So what is large is hashed
(blake3's ``update``) and copied (:func:`copy_bytes`) without it, and what is Python takes well under a millisecond at a stretch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import torch
from blake3 import blake3

from qcap._version import __version__
from qcap.errors import ObjectCorrupt, ShapeError, TokenError
from qcap.geometry import Geometry, Rope, parse_dtype
from qcap.kinds import CacheKind
from qcap.store.tiers import LoadedChunk
from qcap.tokens import ChunkRecord, chain_digest

FORMAT_VERSION = "1"
ALIGNMENT = 64
"""The tensor data starts at a multiple of this many bytes."""
MAX_HEADER_BYTES = 64 << 20
LENGTH_BYTES = 8
"""A file begins with its header's length: this many bytes, little endian."""

SAFETENSORS_DTYPES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_TEXT_KEYS = ("format", "kind", "model", "parent", "digest", "salt", "edit", "qcap_version", "header_checksum")
_JSON_KEYS = ("geometry", "start", "token_ids", "positions", "tags", "layer_checksums")
_KEYS = frozenset(_TEXT_KEYS + _JSON_KEYS)

Buffer = bytes | bytearray | memoryview
_UINTS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def copy_bytes(target: memoryview, source: Buffer) -> None:
    """Copy ``source`` into ``target``, of the same length. Unlike ``target[:] = source`` this lets other threads run meanwhile."""
    if target.nbytes:
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


@dataclass(frozen=True)
class ChunkHeader:
    """What the first bytes of an object say.

    Args:
        record: everything about the chunk but its tensor.
        data_start: offset of layer 0 in the file, bytes.
        layer_bytes: bytes of one layer.
        layer_checksums: blake3 of each layer's bytes, 64 hex digits each.
        qcap_version: of the writer.
    """

    record: ChunkRecord
    data_start: int
    layer_bytes: int
    layer_checksums: tuple[str, ...]
    qcap_version: str

    @property
    def total_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_start + self.layer_bytes * len(self.layer_checksums)


@dataclass(frozen=True)
class EncodedChunk:
    """An object ready to be written: its header and views of the caller's tensor, in file order. Nothing is copied.

    Args:
        header: length, JSON and padding.
        pieces: ``L * planes`` views of ``CH * H`` elements each, layer by layer.
        layer_checksums: as in the header.
    """

    header: bytes
    pieces: list[memoryview]
    layer_checksums: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + sum(piece.nbytes for piece in self.pieces)

    def buffers(self) -> list[Buffer]:
        """The file as a list of buffers, for a gathering write."""
        return [self.header, *self.pieces]

    def __bytes__(self) -> bytes:
        return b"".join(self.buffers())


def tensor_pieces(tensor: torch.Tensor) -> list[memoryview]:
    """A CPU tensor ``[planes, L, CH, H]``, each ``[CH, H]`` contiguous, as byte views in file order: layer 0's planes, layer 1's, ..."""
    planes, layers = tensor.shape[:2]
    rows = tensor.detach().view(planes, layers, -1).view(torch.uint8).numpy()  # sliced as an array: a tensor's slices cost a millisecond
    return [rows[p, i].data for i in range(layers) for p in range(planes)]


def layer_pieces(header: ChunkHeader, layer: torch.Tensor) -> list[memoryview]:
    """One layer ``[planes, CH, H]`` as byte views, a plane each, in file order. Planes may lie anywhere; each is contiguous.

    Raises:
        ShapeError: not the shape, dtype or device of a layer of ``header``'s object, or a plane is not contiguous.
    """
    geometry, kind = header.record.geometry, header.record.kind
    planes, _, chunk, hidden = geometry.chunk_shape(kind)
    good = tuple(layer.shape) == (planes, chunk, hidden) and layer.dtype == geometry.torch_dtype and layer.device.type == "cpu"
    if not good or not all(plane.is_contiguous() for plane in layer):
        raise ShapeError(
            f"a layer of this object is {(planes, chunk, hidden)} of {geometry.dtype} on the CPU, each plane contiguous; got "
            f"{tuple(layer.shape)} of {layer.dtype} on {layer.device}, strides {layer.stride()}"
        )
    return [plane.detach().reshape(-1).view(torch.uint8).numpy().data for plane in layer]


def empty_layer(header: ChunkHeader) -> torch.Tensor:
    """An uninitialised ``[planes, CH, H]`` of the header's dtype, to read one layer into."""
    planes, _, chunk, hidden = header.record.geometry.chunk_shape(header.record.kind)
    return _empty((planes, chunk, hidden), header.record.geometry.torch_dtype)


def encode(record: ChunkRecord, tensor: torch.Tensor) -> EncodedChunk:
    """The object of one chunk. Reads ``tensor`` once, for the checksums.

    Args:
        record: the header; its digest must be that of its tokens.
        tensor: ``record.geometry.chunk_shape(kind)`` in the geometry's dtype, on the CPU, each ``[CH, H]`` contiguous. Read only.

    Raises:
        ShapeError: the tensor is not what the record says.
        TokenError: the digest is not that of the parent and the token ids, or another field cannot be written.
    """
    check_chunk(record, tensor)
    kind, pieces = record.kind, tensor_pieces(tensor)
    checksums = tuple(_layer_checksum(pieces[i : i + kind.planes]) for i in range(0, len(pieces), kind.planes))
    return EncodedChunk(_encode_header(record, checksums), pieces, checksums)


def check_chunk(record: ChunkRecord, tensor: torch.Tensor) -> None:
    """What :func:`encode` would refuse of a record and its tensor, short of making the header. Raises as it does."""
    geometry, kind = record.geometry, record.kind
    wanted = geometry.chunk_shape(kind)
    if tuple(tensor.shape) != wanted or tensor.dtype != geometry.torch_dtype:
        raise ShapeError(
            f"a {kind.value} chunk of {geometry.model!r} is {wanted} of {geometry.dtype}, got {tuple(tensor.shape)} of {tensor.dtype}"
        )
    if tensor.device.type != "cpu" or not tensor[0, 0].is_contiguous():
        raise ShapeError(
            f"each layer of a chunk to store must be contiguous and on the CPU, got strides {tensor.stride()} on {tensor.device}"
        )
    _check_record(record)


def copy_chunk(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a CPU tensor ``[planes, L, CH, H]``, each ``[CH, H]`` contiguous. Other threads run meanwhile."""
    own = _empty(tuple(tensor.shape), tensor.dtype)
    np.copyto(_bits(own), _bits(tensor))
    return own


def copy_layer(header: ChunkHeader, layer: torch.Tensor, out: torch.Tensor) -> None:
    """Copy one layer ``[planes, CH, H]`` into ``out``. Raises as :func:`layer_pieces`."""
    layer_pieces(header, out)
    np.copyto(_bits(out), _bits(layer))


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor as unsigned integers of its size, any strides."""
    return tensor.detach().view(_UINTS[tensor.element_size()]).numpy()


def _check_record(record: ChunkRecord) -> None:
    """What :func:`read_header` checks and what can be wrong in a record, before its tensor is hashed. Raises ``TokenError``.

    The rest is in :func:`_encode_header`. Reading the finished header back would say the same, but costs more than making it.
    """
    if chain_digest(record.parent, record.token_ids) != record.digest:
        raise TokenError(
            f"digest {record.digest!r} is not that of parent {record.parent!r} and the chunk's tokens: use qcap.tokens to make it"
        )
    try:
        _check_numbers("positions", [int(p) for p in record.positions])
        _check_start(record.start)
        _check_tags([list(tag) for tag in record.tags])
        _check_parent(record.parent)
        _check_texts(texts := {"edit": record.edit, "salt": record.salt, "model": record.geometry.model, "rows": record.rows})
        for text in (*texts.values(), *(part for tag in record.tags for part in tag)):
            text.encode()
        _check_geometry_text(_geometry_text(record.geometry))
    except (ObjectCorrupt, UnicodeError) as error:
        raise TokenError(f"this chunk's record cannot be stored: {error}") from None
    _ = record.key  # its checks of model and salt


def _encode_header(record: ChunkRecord, checksums: tuple[str, ...]) -> bytes:
    """Length, JSON and padding. Raises ``TokenError`` if a reader would not take it."""
    geometry, kind = record.geometry, record.kind
    metadata = {
        "format": FORMAT_VERSION,
        "kind": kind.value,
        "model": geometry.model,
        "geometry": _geometry_text(geometry),
        "start": _dump(record.start),
        "token_ids": _dump([int(t) for t in record.token_ids]),
        "parent": record.parent,
        "digest": record.digest,
        "salt": record.salt,
        "positions": _dump([int(p) for p in record.positions]),
        "edit": record.edit,
        "tags": _dump(sorted([list(tag) for tag in record.tags])),
        "qcap_version": __version__,
        "layer_checksums": _dump(checksums),
    }
    if record.rows:
        metadata["rows"] = record.rows
    try:
        _check_texts(metadata)
        metadata["header_checksum"] = metadata_checksum(metadata)
        text = f'{{"__metadata__":{_dump(metadata)},{_table_text(geometry.dtype, geometry.chunk_shape(kind))}}}'.encode()
        length = -(-(LENGTH_BYTES + len(text)) // ALIGNMENT) * ALIGNMENT - LENGTH_BYTES
        _check_header_length(length)
    except (ObjectCorrupt, UnicodeError) as error:
        raise TokenError(f"this chunk's record cannot be stored: {error}") from None
    return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)


def _geometry_text(geometry: Geometry) -> str:
    """As JSON. A writer has one geometry, and making its text is a third of making a header: the last one's is kept."""
    global _last_geometry
    last, params, text = _last_geometry
    if last is not geometry or params != geometry.rope.params:  # the one field that could be changed
        text = _dump(geometry.to_dict())
        _last_geometry = (geometry, dict(geometry.rope.params), text)
    return text


_last_geometry: tuple[Geometry | None, dict[str, float], str] = (None, {}, "")


def metadata_checksum(metadata: dict[str, str]) -> str:
    """blake3 over all metadata entries but ``header_checksum``, by sorted key, each key and value with its length before it."""
    hasher = blake3()
    for key in sorted(metadata, key=str.encode):
        if key != "header_checksum":
            for raw in (key.encode(), metadata[key].encode()):
                hasher.update(len(raw).to_bytes(8, "big") + raw)
    return hasher.hexdigest()


def header_length(prefix: Buffer, total_bytes: int) -> int:
    """Bytes of length and JSON together, from a file's first 8 bytes.

    Raises:
        ObjectCorrupt: too short, or a length that cannot be.
    """
    if len(prefix) < LENGTH_BYTES:
        _corrupt(f"only {len(prefix)} bytes, an object has at least a header")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    _check_header_length(length)
    if LENGTH_BYTES + length > total_bytes:
        _corrupt(f"truncated: the header needs {LENGTH_BYTES + length} bytes, there are {total_bytes}")
    return LENGTH_BYTES + length


def _check_header_length(length: int) -> None:
    if length > MAX_HEADER_BYTES:
        _corrupt(f"the header claims {length} bytes, more than the {MAX_HEADER_BYTES} any object has")


def read_header(data: Buffer, total_bytes: int | None = None) -> ChunkHeader:
    """Parse and check an object's header, everything in it against everything else.

    Args:
        data: the object, or at least its first :func:`header_length` bytes.
        total_bytes: size of the whole object; None takes ``data`` as the whole.

    Raises:
        ObjectCorrupt: whatever does not fit. No other error, for any bytes.
    """
    total = len(data) if total_bytes is None else total_bytes
    end = header_length(data, total)
    try:
        header = json.loads(bytes(data[LENGTH_BYTES:end]), object_pairs_hook=_no_duplicates, parse_constant=_corrupt_constant)
    except (ValueError, RecursionError) as error:
        _corrupt(f"the header is not JSON ({error})")
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__"), dict):
        _corrupt("the header has no __metadata__")
    metadata = header.pop("__metadata__")
    if metadata.get("format") != FORMAT_VERSION:
        _corrupt(f"format version {metadata.get('format')!r} is unknown, this qcap reads {FORMAT_VERSION!r}")
    if missing := sorted(_KEYS - metadata.keys()):
        _corrupt(f"metadata is missing: {', '.join(missing)}")
    _check_texts(metadata)
    try:
        matches = metadata_checksum(metadata) == metadata["header_checksum"]
    except UnicodeError:
        _corrupt("metadata holds text that is not Unicode")
    if not matches:
        _corrupt("wrong checksum over the metadata: a header field was changed")
    record, checksums = _record(metadata)
    return _check_layout(header, record, checksums, end, total, metadata["qcap_version"])


def _check_layout(
    table: dict[str, Any], record: ChunkRecord, checksums: tuple[str, ...], end: int, total: int, version: str
) -> ChunkHeader:
    """The tensor table must be exactly what the geometry gives; so there are no gaps, overlaps or surprises in it."""
    wanted = _tensor_table(record.geometry.dtype, record.geometry.chunk_shape(record.kind))
    if table.keys() != wanted.keys():
        odd = sorted(table.keys() ^ wanted.keys())
        _corrupt(f"{len(table)} tensors where the geometry says {len(wanted)} layers, for instance {odd[0]!r}")
    for name, entry in wanted.items():
        if table[name] != entry:
            _corrupt(f"tensor {name!r} is declared as {table[name]!r}, its geometry gives {entry!r}")
    layer_bytes = record.geometry.chunk_bytes(record.kind) // record.geometry.num_layers
    header = ChunkHeader(record, end, layer_bytes, checksums, version)
    if header.total_bytes != total:
        _corrupt(f"{'truncated' if total < header.total_bytes else 'too long'}: {total} bytes where the header says {header.total_bytes}")
    return header


def layer_range(header: ChunkHeader, layer: int) -> tuple[int, int]:
    """``(offset, length)`` of one layer in the file, bytes.

    Raises:
        IndexError: no such layer.
    """
    if not 0 <= layer < len(header.layer_checksums):
        raise IndexError(f"layer {layer} of {len(header.layer_checksums)}")
    return header.data_start + layer * header.layer_bytes, header.layer_bytes


def empty_tensor(header: ChunkHeader) -> torch.Tensor:
    """An uninitialised ``[planes, L, CH, H]`` of the header's dtype, to read the layers into."""
    return _empty(header.record.geometry.chunk_shape(header.record.kind), header.record.geometry.torch_dtype)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """By NumPy, which asks for huge pages: 64 MB are filled four times as fast, and freed (with the GIL held) in 0.5 ms instead of 6."""
    return torch.from_numpy(np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def check_layers(header: ChunkHeader, pieces: list[memoryview]) -> None:
    """Compare each layer's bytes (as :func:`tensor_pieces` gives them) with the header's checksums.

    Raises:
        ObjectCorrupt: naming the first layer that differs.
    """
    planes = header.record.kind.planes
    for layer, checksum in enumerate(header.layer_checksums):
        check_layer(layer, checksum, pieces[layer * planes : (layer + 1) * planes])


def check_layer(layer: int, checksum: str, pieces: Iterable[Buffer]) -> None:
    """Compare one layer's bytes with its checksum.

    Raises:
        ObjectCorrupt: they differ.
    """
    if _layer_checksum(pieces) != checksum:
        _corrupt(f"wrong checksum of layer {layer}: its bytes are not those that were stored")


def decode(data: Buffer, *, verify: bool = True) -> LoadedChunk:
    """One object from its bytes. The tensor is a copy, owned by the caller.

    Args:
        data: the whole object.
        verify: check the layers' checksums too. The header is always checked.

    Raises:
        ObjectCorrupt: whatever does not fit. No other error, for any bytes.
    """
    header = read_header(data)
    tensor = empty_tensor(header)
    pieces = tensor_pieces(tensor)
    view, offset = memoryview(data), header.data_start
    for piece in pieces:
        copy_bytes(piece, view[offset : offset + piece.nbytes])
        offset += piece.nbytes
    if verify:
        check_layers(header, pieces)
    return LoadedChunk(header.record, tensor)


def _layer_checksum(pieces: Iterable[Buffer]) -> str:
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


def _tensor_table(dtype: str, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    planes, layers, chunk, hidden = shape
    size = planes * chunk * hidden * parse_dtype(dtype).itemsize
    stored = SAFETENSORS_DTYPES[dtype]
    return {
        f"layers.{i}": {"dtype": stored, "shape": [planes, chunk, hidden], "data_offsets": [i * size, (i + 1) * size]}
        for i in range(layers)
    }


@lru_cache(maxsize=32)
def _table_text(dtype: str, shape: tuple[int, int, int, int]) -> str:
    """:func:`_tensor_table` as JSON, without its braces."""
    return _dump(_tensor_table(dtype, shape))[1:-1]


def _record(metadata: dict[str, str]) -> tuple[ChunkRecord, tuple[str, ...]]:
    try:
        values = {key: json.loads(metadata[key], parse_constant=_corrupt_constant) for key in _JSON_KEYS}
    except (ValueError, RecursionError) as error:
        _corrupt(f"metadata is not JSON where it should be ({error})")
    _check_numbers("token_ids", values["token_ids"])
    _check_numbers("positions", values["positions"])
    _check_start(values["start"])
    _check_tags(values["tags"])
    checksums = values["layer_checksums"]
    if not isinstance(checksums, list) or not all(isinstance(c, str) for c in checksums):
        _corrupt("metadata 'layer_checksums' is not a list of strings")
    _check_geometry_types(values["geometry"])
    try:
        geometry = Geometry.from_dict(values["geometry"])
        # exact kind names: CacheKind.parse is for people
        kind = CacheKind(metadata["kind"])
        if len(checksums) != geometry.num_layers:
            _corrupt(f"{len(checksums)} checksums for {geometry.num_layers} layers")
        if metadata["model"] != geometry.model:
            _corrupt(f"model {metadata['model']!r} is not the geometry's {geometry.model!r}")
        record = ChunkRecord(
            kind=kind,
            geometry=geometry,
            start=values["start"],
            token_ids=tuple(values["token_ids"]),
            digest=metadata["digest"],
            parent=metadata["parent"],
            salt=metadata["salt"],
            positions=tuple(values["positions"]),
            edit=metadata["edit"],
            tags=tuple((k, v) for k, v in values["tags"]),
            rows=metadata.get("rows", ""),
        )
        if not values["positions"]:
            _corrupt("metadata 'positions' is empty")
        _check_parent(record.parent)
        if chain_digest(record.parent, record.token_ids) != record.digest:
            _corrupt("the digest is not that of the parent digest and the token ids")
        _ = record.key  # its checks of model and salt
    except ObjectCorrupt:
        raise
    except Exception as error:  # a hostile header can fail in more ways than a list here would stay complete for
        raise ObjectCorrupt(f"not a qcap object: metadata is not usable ({type(error).__name__}: {error})") from None
    return record, tuple(checksums)


def _check_numbers(key: str, numbers: Any) -> None:
    # all at once: this is most of what reading a header costs
    if not isinstance(numbers, list) or set(map(type, numbers)) - {int} or (numbers and not 0 <= min(numbers) <= max(numbers) < 2**32):
        _corrupt(f"metadata {key!r} is not a list of integers in [0, 2**32)")


def _check_start(start: Any) -> None:
    if not _is_int(start) or start < 0:
        _corrupt(f"metadata 'start' is {start!r}, not a position")


def _check_tags(tags: Any) -> None:
    if not isinstance(tags, list) or not all(isinstance(t, list) and len(t) == 2 and all(isinstance(v, str) for v in t) for t in tags):
        _corrupt("metadata 'tags' is not a list of pairs of strings")


def _check_texts(metadata: dict[str, Any]) -> None:
    if not all(isinstance(value, str) for value in metadata.values()):
        _corrupt("a metadata value is not a string")


def _check_parent(parent: str) -> None:
    if len(parent) != 64:
        _corrupt("the digest is not that of the parent digest and the token ids: the parent has not 64 hex digits")


def _check_geometry_types(values: Any) -> None:
    _check_types(Geometry, values)
    _check_types(Rope, values["rope"])


@lru_cache(maxsize=32)
def _check_geometry_text(text: str) -> None:
    """As a reader would check it; once a geometry, of which a writer has one or two."""
    values = json.loads(text)
    _check_geometry_types(values)
    Geometry.from_dict(values)


def _check_types(cls: type, values: Any) -> None:
    """Field by field, JSON values have the types that ``cls`` declares; a float may be written as an integer."""
    if not isinstance(values, dict):
        _corrupt(f"metadata 'geometry': {cls.__name__} is not an object")
    for spec in fields(cls):
        value = values.get(spec.name)
        declared = str(spec.type)
        good = {
            "int": _is_int(value),
            "float": _is_number(value),
            "str": isinstance(value, str),
            "bool": isinstance(value, bool),
            "tuple[str, ...]": isinstance(value, list) and all(isinstance(v, str) for v in value),
            "dict[str, float]": isinstance(value, dict),  # what an exotic rope keeps here is its own business
            "Rope": isinstance(value, dict),
        }[declared]
        if not good:
            _corrupt(f"metadata 'geometry': {cls.__name__}.{spec.name} is {value!r}, not a {declared}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key occurs twice")
    return values


def _corrupt_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _corrupt(what: str) -> NoReturn:
    raise ObjectCorrupt(f"not a qcap object: {what}")
