"""docs/format.md is enough to write a reader: here is one, which uses nothing of qcap but the store that wrote the file."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from store_makers import chunk, geometry
from store_suite import receipt

from qcap.backends import open_backend
from qcap.kinds import CacheKind
from qcap.tokens import behind_rows

DOC = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def field(text: str) -> bytes:
    raw = text.encode()
    return struct.pack(">Q", len(raw)) + raw


def fingerprint(model: str, tp_size: int, tp_rank: int, dtype: str, digest: str, salt: str, tags: list[list[str]]) -> str:
    parts = [model, str(tp_size), str(tp_rank), dtype, digest, salt, *(part for tag in sorted(tags) for part in tag)]
    return blake3(b"".join(field(p) for p in parts)).hexdigest()


def digests(tokens: list[int], size: int) -> list[str]:
    parent, found = blake3(b"qcap chunk chain v1").digest(), []
    for start in range(0, len(tokens) - size + 1, size):
        parent = blake3(parent + struct.pack(f">{size}I", *tokens[start : start + size])).digest()
        found.append(parent.hex())
    return found


def read(path: Path) -> tuple[dict[str, str], np.ndarray]:
    """Metadata, and ``[L, planes, CH, H]`` of an F32 object, by the page's rules."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    meta, start = header.pop("__metadata__"), 8 + length
    assert meta["format"] == "1" and start % 64 == 0
    signed = b"".join(field(k) + field(meta[k]) for k in sorted(meta, key=str.encode) if k != "header_checksum")
    assert blake3(signed).hexdigest() == meta["header_checksum"]
    geo, tokens = json.loads(meta["geometry"]), json.loads(meta["token_ids"])
    planes, heads = (2, geo["num_kv_heads"]) if meta["kind"] == "kv" else (1, geo["num_q_heads"])
    shape, size = [planes, geo["chunk_size"], heads * geo["head_size"]], planes * geo["chunk_size"] * heads * geo["head_size"] * 4
    assert header == {
        f"layers.{i}": {"dtype": "F32", "shape": shape, "data_offsets": [i * size, (i + 1) * size]} for i in range(len(geo["layer_names"]))
    }
    assert len(data) == start + size * len(header)
    layers = [data[start + i * size : start + (i + 1) * size] for i in range(len(header))]
    assert [blake3(layer).hexdigest() for layer in layers] == json.loads(meta["layer_checksums"])
    assert blake3(bytes.fromhex(meta["parent"]) + struct.pack(f">{len(tokens)}I", *tokens)).hexdigest() == meta["digest"]
    suffix = {"kv": "", "query": "##query"}[meta["kind"]]
    name = fingerprint(
        meta["model"] + suffix, geo["tp_size"], geo["tp_rank"], geo["dtype"], meta["digest"], meta["salt"], json.loads(meta["tags"])
    )
    assert path.parts[-3:] == ("objects", name[:2], f"{name}.safetensors")
    return meta, np.stack([np.frombuffer(layer, "<f4").reshape(shape) for layer in layers])


def test_a_reader_written_from_the_page(tmp_path) -> None:
    backend, geo = open_backend(str(tmp_path)), geometry(dtype="float32", tp_size=2, tp_rank=1)
    wanted = {}
    for kind in CacheKind:
        of_edit = {"edit": "{}", "rows": "hash"} if kind is CacheKind.KV else {}
        record, tensor = chunk(4, kind, geo, index=1, salt="s", tags=(("b", "é"), ("a", "x")), **of_edit)
        backend.store(record, tensor).result(30)
        wanted[kind.value] = tensor
    found = [read(path) for path in tmp_path.rglob("*.safetensors")]
    assert len(found) == 2
    for meta, array in found:
        as_bits = torch.from_numpy(array.copy()).transpose(0, 1).contiguous().view(torch.int32)
        assert torch.equal(as_bits, wanted[meta["kind"]].view(torch.int32))
        table = set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in DOC.splitlines() if line.startswith("| `"))))
        assert table == {*meta, "rows"} and ("rows" in meta) == (meta["kind"] == "kv")
        assert all(f"`{name}`" in DOC for name in json.loads(meta["geometry"]))
        assert all(f"`{name}`" in DOC for name in json.loads(meta["geometry"])["rope"])


def test_the_pages_vectors() -> None:  # K32: a digest fixed in our own tests
    one, two = digests([1, 2, 3, 4], 2)
    assert f"digest_0  {one}\n" in DOC and f"digest_1  {two}\n" in DOC
    assert f"root      {blake3(b'qcap chunk chain v1').hexdigest()}\n" in DOC
    assert fingerprint("org/m##query", 2, 1, "bfloat16", two, "s", [["a", "x"]]) in DOC
    behind = blake3(b"qcap behind an edit v1" + bytes.fromhex(one) + b"ab").digest()
    assert behind.hex() in DOC and blake3(behind + struct.pack(">2I", 3, 4)).hexdigest() in DOC
    assert behind.hex() == behind_rows(one, "ab")


def test_manifests_and_receipts_lie_where_the_page_says(tmp_path) -> None:
    backend, geo = open_backend(str(tmp_path)), geometry()
    backend.put_manifest(geo, [CacheKind.KV], {"vllm": "0.32"})
    backend.put_sequence(receipt("r/1")).result(30)
    backend.close()
    slug = "org-small-model-" + blake3(geo.model.encode()).hexdigest()[:8]
    identity = blake3(json.dumps([geo.model, geo.chunk_size, geo.dtype, geo.tp_size]).encode()).hexdigest()[:32]
    manifest = json.loads((tmp_path / "models" / slug / f"{identity}.kv.json").read_text())
    assert manifest.keys() == {"format", "kind", "geometry", "engine"} and manifest["format"] == 1
    (path,) = (tmp_path / "sequences" / slug).iterdir()
    document = json.loads(path.read_text())
    assert document["format"] == 1 and document["sequence"]["request_id"] == "r/1" and document["sequence"]["stored"] == {"kv": [0, 1]}
