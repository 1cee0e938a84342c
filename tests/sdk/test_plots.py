"""Figures can be made without a display, say what they show, and hold the right numbers."""

from __future__ import annotations

import pytest
import torch

from qcap.errors import CaptureEmpty, ConfigError, ShapeError, Unsupported
from qcap.kinds import CacheKind
from qcap.sdk import plots
from qcap.sdk.coverage import Coverage
from qcap.sdk.mass import layer_mass

pytest.importorskip("matplotlib")


class Tokenizer:
    def decode(self, ids):
        return "".join({0: "\n", 1: "$x$", 2: "a very long token", 3: "日"}.get(i, f" w{i}") for i in ids)


def tensors(geometry, tokens=24):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 2, tokens, 16, generator=generator), torch.randn(1, 2, tokens, 32, generator=generator)


def test_attention_mass(geometry, tmp_path, recwarn):
    kv, q = tensors(geometry)
    figure = plots.attention_mass(q, kv, geometry, range(24), Tokenizer(), window=8, kept=[0, 3, 20])
    heat, strip = figure.axes[0], figure.axes[1]
    assert "org/tiny" in heat.get_title() and "T=24" in heat.get_title() and "L=2" in heat.get_title() and "8 queries" in heat.get_title()
    shown = torch.tensor(heat.images[0].get_array().filled(0))
    assert torch.allclose(shown, torch.stack([layer_mass(q, kv, geometry, i, window=8).mean(0) / 8 for i in range(2)]))
    assert torch.allclose(shown.sum(1), torch.ones(2), atol=1e-5)  # each query spends 1
    assert strip.images[0].get_array()[0].nonzero()[0].tolist() == [0, 3, 20]
    labels = [t.get_text() for t in strip.get_xticklabels()]
    assert labels[:3] == ["⏎", r"\$x\$", "a very long…"] and labels[3] == "U+65E5"
    figure.savefig(tmp_path / "a.png")
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


def test_attention_mass_of_keys_alone_and_without_labels(geometry, tmp_path):
    kv, q = tensors(geometry)
    figure = plots.attention_mass(q[:, :, -4:], kv[:1], geometry, log_scale=False, queries_are_last=True)
    assert figure.axes[0].get_xlabel() == "token"
    figure.savefig(tmp_path / "b.png")
    with pytest.raises(ShapeError, match="queries for"):
        plots.attention_mass(q, kv[:, :, :10], geometry)
    with pytest.raises(ShapeError, match="q must be"):
        plots.attention_mass(kv, kv, geometry)
    with pytest.raises(ShapeError, match="kv must be"):
        plots.attention_mass(q, q, geometry)


def test_fewer_queries_than_keys_are_not_taken_for_the_last_ones(geometry):
    kv, q = tensors(geometry)
    with pytest.raises(ShapeError, match=r"8 query rows for 24 key rows.*fewer chunks.*queries_are_last=True"):
        plots.attention_mass(q[:, :, :8], kv, geometry)
    plots.attention_mass(q[:, :, -8:], kv, geometry, queries_are_last=True)


def test_attention_mass_of_nothing_says_where_to_look(geometry):
    kv, q = tensors(geometry)
    for queries, keys, said in ((None, kv, "q is None"), (q, None, "kv is None"), (None, None, "q and kv is None")):
        with pytest.raises(CaptureEmpty, match=rf"{said}.*retrieve\(\) found nothing.*ctx\.coverage\(tokens\)"):
            plots.attention_mass(queries, keys, geometry)


def test_coverage_bar(tmp_path):
    def coverage(kind, stored):
        return Coverage(model="m", kind=kind, salt="", chunk_size=4, total_tokens=18, computed_tokens=17, stored=stored)

    figure = plots.coverage_bar(coverage(CacheKind.KV, (True, False, True, True)), coverage(CacheKind.QUERY, (True,) * 4))
    labels = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert labels == ["kv\n75%", "query\n100%"] and figure.axes[0].get_xlim() == (0, 18)
    figure.savefig(tmp_path / "c.png")
    with pytest.raises(ConfigError):
        plots.coverage_bar()


def test_kept_tokens(geometry, tmp_path):
    figure = plots.kept_tokens([0, 2, 5], geometry, range(12), Tokenizer())
    assert "kept 3 of T=12 tokens (25%)" in figure.axes[0].get_title()
    index = torch.tensor([[[0, 1], [0, 2]], [[3, 4], [3, 4]]])
    composite = plots.kept_tokens(index, geometry, range(12))
    assert composite.axes[0].images[0].get_array()[0][:3].tolist() == [1.0, 0.5, 0.5]
    assert "2 KV heads choose" in composite.axes[0].get_title() and "kept 2 of T=12" in composite.axes[0].get_title()
    for figure_ in (figure, composite):
        figure_.savefig(tmp_path / "d.png")


def test_without_matplotlib_the_install_is_named(geometry, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    with pytest.raises(Unsupported, match=r"pip install 'qcap\[notebook\]'"):
        plots.kept_tokens([0], geometry, [1, 2])


def test_no_pyplot_no_open_figures(geometry):
    import sys

    before = "matplotlib.pyplot" in sys.modules
    plots.kept_tokens([0], geometry, [1, 2])
    assert ("matplotlib.pyplot" in sys.modules) is before
