"""connect: which capture is meant, and what is said when none fits."""

from __future__ import annotations

import inspect
import io
import subprocess
import sys

import pytest
import torch

import qcap
from qcap.backends import open_backend
from qcap.errors import ConfigError, ModelNotFound
from qcap.kinds import CacheKind
from qcap.sdk.connect import connect
from qcap.store.tiers import SequenceRecord

KV, QUERY = CacheKind.KV, CacheKind.QUERY


@pytest.fixture
def fake_url(fake, monkeypatch):
    monkeypatch.setattr("qcap.sdk.connect.open_backend", lambda url, **options: fake)
    return "fake://store"


def test_the_only_model_is_taken(fake, fake_url, geometry):
    fake.put_manifest(geometry, [KV], {})
    ctx = connect(fake_url)
    assert (ctx.model, ctx.kind, ctx.chunk_size, ctx.geometry.num_kv_heads) == ("org/tiny", KV, 4, 2)
    assert ctx.timeout_s == 60.0  # Q2
    assert inspect.signature(connect).parameters["timeout_s"].default == 60.0


@pytest.mark.parametrize("kind", [QUERY, "query", "QUERY"])
def test_kind_by_value_or_name(fake, fake_url, geometry, kind):  # Q1
    fake.put_manifest(geometry, [KV, QUERY], {})
    ctx = connect(fake_url, kind=kind)
    assert ctx.stored_model == "org/tiny##query" and ctx.shape_of(4) == (1, 2, 4, 32)
    assert connect(fake_url, kind=kind, model="org/tiny##query").model == "org/tiny"  # K2: the suffix may be there, once


def test_unknown_kind_is_a_value_error(fake_url):  # Q2
    with pytest.raises(ValueError, match="'kv', 'query'"):
        connect(fake_url, kind="FOO")
    with pytest.raises(ConfigError, match="'qeury'"):
        connect(fake_url, kind="qeury")


def test_bad_arguments(fake_url):
    with pytest.raises(ValueError, match="timeout_s"):
        connect(fake_url, timeout_s=0)
    with pytest.raises(ConfigError, match="float8"):
        connect(fake_url, dtype="int4")


def test_an_empty_store_says_how_to_fill_it(fake, fake_url):  # Q8
    with pytest.raises(ModelNotFound, match="transfer_config"):
        connect(fake_url)
    assert fake.closed == 1


def test_unknown_model_lists_the_models(fake, fake_url, geometry, make_geometry_):  # Q8
    fake.put_manifest(geometry, [KV], {})
    fake.put_manifest(make_geometry_(model="org/other"), [KV], {})
    with pytest.raises(ModelNotFound, match=r"'org/tinny'.*'org/other', 'org/tiny'.*start the engine"):
        connect(fake_url, model="org/tinny")
    with pytest.raises(ModelNotFound, match=r"several models.*'org/other', 'org/tiny'"):
        connect(fake_url)
    assert connect(fake_url, model="org/other").model == "org/other"


def test_a_kind_that_was_not_captured_names_its_switch(fake, fake_url, geometry):
    fake.put_manifest(geometry, [KV], {})
    with pytest.raises(ModelNotFound, match=r"only kv.*qcap\.transfer_intermediate_tensors"):
        connect(fake_url, kind="query")


def test_several_captures_of_one_model_are_listed(fake, fake_url, geometry, make_geometry_):
    fake.put_manifest(geometry, [KV], {})
    fake.put_manifest(make_geometry_(dtype="bfloat16"), [KV], {})
    fake.put_manifest(make_geometry_(dtype="bfloat16", chunk_size=8), [KV], {})
    fake.put_manifest(make_geometry_(dtype="bfloat16", chunk_size=8, tp_size=2, num_kv_heads=1, num_q_heads=2), [KV], {})
    with pytest.raises(ModelNotFound, match=r"4 captures.*dtype='float32', chunk_size=4, tp_size=1;.*tp_size=2"):
        connect(fake_url)
    assert connect(fake_url, dtype=torch.float32).geometry.dtype == "float32"
    assert connect(fake_url, dtype="bfloat16", chunk_size=4).chunk_size == 4
    assert connect(fake_url, tp_size=2).geometry.num_kv_heads == 2
    with pytest.raises(ModelNotFound, match="There are"):
        connect(fake_url, chunk_size=16)


def test_connecting_writes_nothing(fake, fake_url, geometry):  # Q20
    fake.put_manifest(geometry, [KV, QUERY], {})
    before = fake.manifests()
    connect(fake_url, kind="query").close()
    assert fake.manifests() == before and fake.calls["put_manifest"] == 1 and fake.calls["store"] == 0


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_on_real_stores(scheme, tmp_path, geometry):  # Q1 Q20
    url = f"file://{tmp_path}/s" if scheme == "file" else "memory://test-connect"
    backend = open_backend(url)
    backend.put_manifest(geometry, [KV, QUERY], {"vllm": "0"})
    before = backend.manifests()
    ids = list(range(8))
    with qcap.connect(url, kind="query") as q:
        rows = torch.randn(q.shape_of(8))
        assert q.store(rows, ids, salt="s") and torch.equal(q.retrieve(ids, "s"), rows)
    assert backend.manifests() == before
    with qcap.connect(url) as kv:
        assert kv.retrieve(ids, "s") is None  # K4
    backend.close()


def test_sequences_show_themselves(fake, fake_url, geometry):
    fake.put_manifest(geometry, [KV, QUERY], {})
    fake.put_sequence(
        SequenceRecord(
            model="org/tiny", request_id="r<1>", engine_id="e", salt="", token_ids=tuple(range(18)), prompt_tokens=10, computed_tokens=17,
            chunk_size=4, stored={"kv": (0, 1, 2, 3), "query": (0, 2)}, skipped={"query": {"ring_full": 2}}, finished_at=1.0,
        )
    )  # fmt: skip
    fake.put_sequence(SequenceRecord("other", "r2", "e", "", (1,), 1, 1, 4))

    class Tokenizer:
        def decode(self, ids):
            return f"[bold]{len(ids)} ids"

    ctx = connect(fake_url)
    sequences = ctx.sequences(Tokenizer())
    assert len(sequences) == 1 and sequences[0].request_id == "r<1>" and list(sequences) == [sequences[0]]
    assert ctx.coverage(sequences[0].token_ids, computed_tokens=sequences[0].computed_tokens).whole_chunks == 4
    assert len(sequences[:1]) == 1 and len(sequences.filter(lambda r: r.prompt_tokens > 10)) == 0
    assert sequences.text(0) == "[bold]18 ids"
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(sequences)
    for text in (repr(sequences), console.export_text()):
        assert "4/4 (100%)" in text and "2/4 (50%): ring_full 2" in text and "[bold]18 ids" in text
    assert "r&lt;1&gt;" in sequences._repr_html_()
    console.print(ctx.coverage(list(range(18))))
    assert "none captured" in repr(connect(fake_url).sequences()[:0])


def test_the_public_surface():  # STYLE 24
    assert qcap.__all__ == sorted(qcap.__all__)
    assert set(qcap.__all__) == {
        "CacheContext", "CacheKind", "Edit", "QcapError", "__version__", "connect", "edits", "hf", "plots", "policies",
    }  # fmt: skip
    for name in qcap.__all__:
        assert getattr(qcap, name) is not None
    assert set(qcap.__all__) <= set(dir(qcap))
    with pytest.raises(AttributeError, match="connect"):
        qcap.conect  # noqa: B018


def test_import_loads_nothing_heavy():
    code = (
        "import sys, qcap; heavy = {'torch', 'vllm', 'matplotlib', 'transformers', 'triton'} & set(sys.modules); assert not heavy, heavy;"
        "qcap.policies, qcap.edits, qcap.plots, qcap.hf, qcap.connect;"
        "heavy = {'vllm', 'matplotlib', 'transformers', 'triton'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
