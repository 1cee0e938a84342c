"""A folder of malformed objects, made from a good one. Each must fail as ObjectCorrupt with a message that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from qcap.store.chunkfile import metadata_checksum


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and tensor bytes."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def join(header: dict[str, Any] | str | bytes, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + body


def resigned(data: bytes, change: Callable[[dict[str, str]], None]) -> bytes:
    """Metadata changed by somebody who also knew how to sign it: what is behind the checksum must catch it."""
    header, body = split(data)
    change(header["__metadata__"])
    header["__metadata__"]["header_checksum"] = metadata_checksum(header["__metadata__"])
    return join(header, body)


def _set(**values: str) -> Callable[[dict[str, str]], None]:
    return lambda metadata: metadata.update(values)


def _json(key: str, change: Callable[[Any], Any]) -> Callable[[dict[str, str]], None]:
    def apply(metadata: dict[str, str]) -> None:
        value = json.loads(metadata[key])
        changed = change(value)
        metadata[key] = json.dumps(value if changed is None else changed)

    return apply


def _geometry(**values: Any) -> Callable[[dict[str, str]], None]:
    return _json("geometry", lambda g: {**g, **values})


def _tensors(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    header, body = split(data)
    change(header)
    return join(header, body)


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def malformed(good: bytes) -> Iterator[tuple[str, bytes, str]]:
    """``(name, bytes, what the message must match)``. ``good``: a KV chunk of 16 tokens and 12 layers."""
    header, body = split(good)
    start = len(good) - len(body)
    meta = header["__metadata__"]

    yield "empty", b"", "only 0 bytes"
    yield "seven-bytes", good[:7], "only 7 bytes"
    yield "length-only", good[:8], "truncated: the header needs"
    yield "half-header", good[: start // 2], "truncated: the header needs"
    yield "header-only", good[:start], "truncated"
    yield "half-body", good[: start + len(body) // 2], "truncated"
    yield "one-byte-short", good[:-1], "truncated"
    yield "one-byte-long", good + b"\0", "too long"
    yield "length-2^63", b"\xff" * 7 + b"\x7f" + good[8:], "header claims"
    yield "length-2^64", b"\xff" * 8 + good[8:], "header claims"
    yield "length-0", bytes(8) + good[8:], "not JSON"
    yield "length-plus-one", (int.from_bytes(good[:8], "little") + 1).to_bytes(8, "little") + good[8:], "not JSON|too long|truncated"
    yield "zeros", bytes(len(good)), "not JSON"
    yield "header-zeros", join(bytes(64), body), "not JSON"
    yield "header-text", join("hello", body), "not JSON"
    yield "header-not-utf8", join(b'{"\xff": 1}', body), "not JSON"
    yield "header-list", join("[]", body), "no __metadata__"
    yield "header-null", join("null", body), "no __metadata__"
    yield "header-deep", join("[" * 100_000, body), "not JSON"
    yield "header-big-number", join("9" * 10_000, body), "not JSON"
    yield "header-nan", join('{"__metadata__": NaN}', body), "not JSON"
    yield "key-twice", join(json.dumps(header)[:-1] + ', "layers.0": {}}', body), "occurs twice"
    yield "no-metadata", join({k: v for k, v in header.items() if k != "__metadata__"}, body), "no __metadata__"
    yield "metadata-list", join({**header, "__metadata__": []}, body), "no __metadata__"
    yield "metadata-number", join({**header, "__metadata__": {**meta, "start": 0}}, body), "not a string"
    yield "surrogate", join({**header, "__metadata__": {**meta, "edit": "\ud800"}}, body), "not Unicode"
    yield (
        "foreign-safetensors",
        join({"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        "format version 'pt'",
    )
    for key in meta:
        without = {k: v for k, v in meta.items() if k != key}
        message = "format version None" if key == "format" else f"missing: {key}"
        yield f"missing-{key}", join({**header, "__metadata__": without}, body), message
        if key not in ("format", "header_checksum"):
            yield f"changed-{key}", join({**header, "__metadata__": {**meta, key: meta[key] + " "}}, body), "checksum over the metadata"
    yield "version-2", resigned(good, _set(format="2")), "format version '2'"
    yield "header-checksum", join({**header, "__metadata__": {**meta, "header_checksum": "0" * 64}}, body), "checksum over the metadata"

    yield "kind-unknown", resigned(good, _set(kind="mass")), "metadata is not usable"
    yield "kind-swapped", resigned(good, _set(kind="query")), "declared as"
    yield "kind-upper", resigned(good, _set(kind="KV")), "metadata is not usable"
    yield "model-other", resigned(good, _set(model="org/other")), "not the geometry's"
    yield "model-empty", resigned(good, lambda m: (_set(model="")(m), _geometry(model="")(m))[0]), "not usable"
    yield "salt-slash", resigned(good, _set(salt="a/b")), "not usable"
    yield "start-text", resigned(good, _set(start='"0"')), "'start'"
    yield "start-negative", resigned(good, _set(start="-1")), "'start'"
    yield "start-bool", resigned(good, _set(start="true")), "'start'"
    yield "tokens-not-json", resigned(good, _set(token_ids="[1,")), "not JSON"
    yield "tokens-swapped", resigned(good, _json("token_ids", lambda t: [t[1], t[0], *t[2:]])), "digest is not"
    yield "tokens-one-less", resigned(good, _json("token_ids", lambda t: t[:-1])), "a chunk has 16 tokens"
    yield "tokens-negative", resigned(good, _json("token_ids", lambda t: [-1, *t[1:]])), "'token_ids'"
    yield "tokens-too-large", resigned(good, _json("token_ids", lambda t: [2**32, *t[1:]])), "'token_ids'"
    yield "tokens-float", resigned(good, _json("token_ids", lambda t: [1.0, *t[1:]])), "'token_ids'"
    yield "tokens-object", resigned(good, _set(token_ids="{}")), "'token_ids'"
    yield "positions-none", resigned(good, _set(positions="[]")), "'positions'"
    yield "positions-one-less", resigned(good, _json("positions", lambda p: p[:-1])), "a chunk has 16 tokens"
    yield "positions-text", resigned(good, _json("positions", lambda p: ["0", *p[1:]])), "'positions'"
    yield "digest-other", resigned(good, _set(digest="0" * 64)), "digest is not"
    yield "parent-other", resigned(good, _set(parent="0" * 64)), "digest is not"
    yield "parent-short", resigned(good, _set(parent="00")), "digest is not"
    yield "parent-not-hex", resigned(good, _set(parent="z" * 64)), "not usable"
    yield "tags-flat", resigned(good, _set(tags='["a","b"]')), "'tags'"
    yield "tags-triple", resigned(good, _set(tags='[["a","b","c"]]')), "'tags'"
    yield "checksums-one-less", resigned(good, _json("layer_checksums", lambda c: c[:-1])), "11 checksums for 12 layers"
    yield "checksums-number", resigned(good, _set(layer_checksums="[1]")), "'layer_checksums'"
    yield "checksums-swapped", resigned(good, _json("layer_checksums", lambda c: [c[1], c[0], *c[2:]])), "checksum of layer 0"
    yield "geometry-list", resigned(good, _set(geometry="[]")), "'geometry'"
    yield "geometry-field-more", resigned(good, _geometry(colour="red")), "not a qcap geometry"
    yield (
        "geometry-field-less",
        resigned(good, _json("geometry", lambda g: {k: v for k, v in g.items() if k != "softcap"})),
        "softcap is None",
    )
    for name, value in (
        ("num_kv_heads", 0), ("num_kv_heads", -2), ("num_kv_heads", 2.0), ("num_kv_heads", True), ("num_kv_heads", 2**70),
        ("head_size", "8"), ("chunk_size", 32), ("chunk_size", 17), ("block_size", 0), ("dtype", "int8"),
        ("dtype", 7), ("dtype", "float32"),
        ("layer_names", []), ("layer_names", "abc"), ("layer_names", [1]), ("model", None), ("rope", None), ("rope", {}), ("scale", "1"),
        ("tp_size", 0),
    ):  # fmt: skip
        yield f"geometry-{name}-{value!r}"[:60], resigned(good, _geometry(**{name: value})), "not a qcap object: "
    yield "rope-theta", resigned(good, _json("geometry", lambda g: g["rope"].update(theta="x"))), "Rope.theta"

    def tensors(change: Callable[[dict[str, Any]], None]) -> bytes:
        return _tensors(good, change)

    size = header["layers.0"]["data_offsets"][1]
    yield "tensor-missing", tensors(lambda h: h.pop("layers.3")), "'layers.3'"
    yield "tensor-more", tensors(lambda h: h.update({"layers.12": h["layers.11"]})), "'layers.12'"
    yield "tensor-renamed", tensors(lambda h: h.update({"layer.3": h.pop("layers.3")})), "'layer"
    yield "tensor-dtype", tensors(lambda h: h["layers.1"].update(dtype="F16")), "'layers.1' is declared"
    yield "tensor-shape", tensors(lambda h: h["layers.1"].update(shape=[2, 8, 32])), "'layers.1' is declared"
    yield "tensor-shape-negative", tensors(lambda h: h["layers.1"].update(shape=[-2, -16, 16])), "'layers.1' is declared"
    yield "tensor-overlap", tensors(lambda h: h["layers.1"].update(data_offsets=[0, size])), "'layers.1' is declared"
    yield (
        "tensor-order",
        tensors(lambda h: (h["layers.0"].update(data_offsets=[size, 2 * size]), h["layers.1"].update(data_offsets=[0, size]))[0]),
        "'layers.0' is declared",
    )
    yield "tensor-beyond", tensors(lambda h: h["layers.11"].update(data_offsets=[11 * size, 13 * size])), "'layers.11' is declared"
    yield "tensor-offsets-text", tensors(lambda h: h["layers.0"].update(data_offsets="0")), "'layers.0' is declared"
    yield "tensor-null", tensors(lambda h: h.update({"layers.0": None})), "'layers.0' is declared"
    yield "tensor-field-more", tensors(lambda h: h["layers.0"].update(x=1)), "'layers.0' is declared"

    yield "bit-first", _flip(good, start), "checksum of layer 0"
    yield "bit-last", _flip(good, len(good) - 1), "checksum of layer 11"
    yield "bit-layer-5", _flip(good, start + 5 * size + size // 2), "checksum of layer 5"
    yield "body-zeros", good[:start] + bytes(len(body)), "checksum of layer 0"
    yield "body-of-another", good[:start] + body[size:] + body[:size], "checksum of layer 0"
