"""Figures: where the attention goes, what is stored, which tokens are kept. Needs the extra ``notebook`` (matplotlib).

Every function returns a ``matplotlib.figure.Figure`` made without pyplot: nothing is shown, no backend is chosen, no figure stays open.
A notebook shows what a cell returns; a script calls ``figure.savefig(path)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from qcap.errors import ConfigError, ShapeError, Unsupported
from qcap.geometry import Geometry
from qcap.kinds import CacheKind
from qcap.sdk.coverage import Coverage
from qcap.sdk.edits import Index, as_index
from qcap.sdk.mass import layer_mass, nothing_retrieved
from qcap.tokens import TokenIds, as_token_array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KEPT, _DROPPED, _MISSING = "#2a7f62", "#e4e4e4", "#c8553d"
_MAX_LABELS = 110
"""More token labels than this on one axis overlap; beyond it every second, third or fourth token is labelled."""


def attention_mass(
    q: torch.Tensor | None,
    kv: torch.Tensor | None,
    geometry: Geometry,
    tokens: TokenIds | None = None,
    tokenizer: Any = None,
    *,
    window: int = 0,
    kept: Index | None = None,
    log_scale: bool = True,
    queries_are_last: bool = False,
) -> Figure:
    """How much attention each token gets in each layer, as a heat map.

    Args:
        q: ``[1, L, T, HQ * D]``, the queries of all tokens; of the last TQ tokens only with ``queries_are_last``.
        kv: ``[2, L, T, H]``, or keys alone ``[1, L, T, H]``.
        geometry: of the whole model.
        tokens: ids ``[T]``, with ``tokenizer`` for labels on the token axis.
        tokenizer: anything with ``decode(ids) -> str``.
        window: count the last ``window`` queries only; 0 for all.
        kept: tokens that an edit keeps, drawn as a strip under the map: ``[B]``, a bool mask ``[T]``, or ``[L, HK, B]``.
        log_scale: colours by the logarithm (the first token usually gets most); False by the mass itself.
        queries_are_last: ``q`` has fewer rows than ``kv`` and they are those of the last tokens, say ``q[:, :, -32:]``. What ``retrieve``
            returns is a prefix: the first tokens, never the last.

    Returns:
        A figure. The colour is the attention received per counted query, mean over query heads, 0..1: what one query gives this token.

    Raises:
        CaptureEmpty: ``q`` or ``kv`` is None: ``retrieve`` found nothing.
        ShapeError: the tensors do not fit the model, or there are fewer queries than keys and nothing says that they are the last.
        Unsupported: matplotlib is not installed.
    """
    from_matplotlib = _matplotlib()
    if q is None or kv is None:
        raise nothing_retrieved("attention_mass", q=q, kv=kv)
    mass = _layer_token_mass(q, kv, geometry, window, queries_are_last)
    layers, total = mass.shape
    has_strip = kept is not None
    width, height = _map_size(layers, total)
    figure = from_matplotlib.Figure(figsize=(width, height + 0.7 * has_strip), layout="constrained")
    ratios = [max(4, layers), 1] if has_strip else [1]
    axes: Any = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)
    axis = axes[0, 0]
    norm = None
    if log_scale:
        positive = mass[mass > 0]
        low = float(positive.min()) if positive.numel() else 1e-6
        norm = from_matplotlib.LogNorm(vmin=max(low, float(mass.max()) * 1e-5, 1e-12), vmax=max(float(mass.max()), 1e-11), clip=True)
    image = axis.imshow(mass.numpy(), aspect="auto", interpolation="nearest", cmap="magma", norm=norm, origin="lower")
    bar = figure.colorbar(image, ax=axis, pad=0.015, fraction=0.05)
    bar.set_label("attention received per query\n(mean over heads" + (", log scale)" if log_scale else ")"), fontsize=9)
    counted = min(window or q.shape[2], q.shape[2])
    axis.set_title(f"{geometry.model} · attention mass · L={layers}, T={total}, last {counted} queries", fontsize=11)
    axis.set_ylabel("layer", fontsize=10)
    axis.yaxis.set_major_locator(from_matplotlib.MaxNLocator(integer=True, nbins=12))
    if kept is not None:
        _strip(axes[1, 0], _kept_share(kept, total, geometry), geometry)
    _label_tokens(axes[-1, 0], total, tokens, tokenizer)
    return figure  # type: ignore[no-any-return]


def coverage_bar(*coverages: Coverage) -> Figure:
    """Which chunks are stored, one bar a coverage (for instance one for KV and one for queries).

    Args:
        coverages: of the same tokens, from ``ctx.coverage(tokens)``.

    Returns:
        A figure with the token index along x: stored chunks, missing ones, and the tail that fills no chunk.

    Raises:
        ConfigError: none given.
        Unsupported: matplotlib is not installed.
    """
    from_matplotlib = _matplotlib()
    if not coverages:
        raise ConfigError("coverage_bar needs at least one coverage: coverage_bar(ctx.coverage(tokens))")
    figure = from_matplotlib.Figure(figsize=(9.0, 1.5 + 0.55 * len(coverages)), layout="constrained")
    axis = figure.subplots()
    for row, coverage in enumerate(coverages):
        size = coverage.chunk_size
        for state, colour in ((True, _KEPT), (False, _MISSING)):
            spans = [(i * size, size) for i, there in enumerate(coverage.stored) if there is state]
            axis.broken_barh(spans, (row - 0.35, 0.7), facecolors=colour, edgecolors="white", linewidth=0.6)
        tail = (coverage.whole_tokens, coverage.tail_tokens)
        axis.broken_barh([tail], (row - 0.35, 0.7), facecolors=_DROPPED, hatch="////", edgecolors="white")
    labels = [f"{c.kind.value}{' · ' + c.salt if c.salt else ''}\n{_share(c)}" for c in coverages]
    axis.set_yticks(range(len(coverages)), labels, fontsize=9)
    axis.set_ylim(len(coverages) - 0.5, -0.5)
    axis.set_xlim(0, max(1, *(c.total_tokens for c in coverages)))
    axis.set_xlabel("token", fontsize=10)
    first = coverages[0]
    axis.set_title(f"{first.model} · stored chunks of {first.chunk_size} · T={first.total_tokens}", fontsize=11)
    meanings = ((_KEPT, "stored"), (_MISSING, "missing"), (_DROPPED, "tail, no chunk"))
    patches = [from_matplotlib.Patch(facecolor=colour, label=meaning) for colour, meaning in meanings]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    _plain(axis)
    return figure  # type: ignore[no-any-return]


def kept_tokens(index: Index, geometry: Geometry, tokens: TokenIds, tokenizer: Any = None) -> Figure:
    """Which tokens an edit keeps: one row for a choice of all layers, or layers x tokens for composite tokens.

    Args:
        index: ``[B]``, a bool mask ``[T]``, or ``[L, HK, B]``.
        geometry: of the whole model.
        tokens: the ids ``[T]`` the index points into.
        tokenizer: anything with ``decode(ids) -> str``, for labels.

    Returns:
        A figure; for composite tokens the colour is the share of a layer's KV heads that keep the token.

    Raises:
        TokenError: the index does not fit.
        Unsupported: matplotlib is not installed.
    """
    from_matplotlib = _matplotlib()
    total = len(as_token_array(tokens))
    share = _kept_share(index, total, geometry)
    rows = share.shape[0]
    width, height = _map_size(rows, total)
    figure = from_matplotlib.Figure(figsize=(width, 1.9 if rows == 1 else height), layout="constrained")
    axis = figure.subplots()
    _strip(axis, share, geometry)
    count = round(float(share.sum()) / rows)
    what = "" if rows == 1 else f", {geometry.num_kv_heads} KV heads choose for themselves"
    axis.set_title(f"{geometry.model} · kept {count} of T={total} tokens ({count / total:.0%}){what}", fontsize=11)
    if rows > 1:
        axis.yaxis.set_major_locator(from_matplotlib.MaxNLocator(integer=True, nbins=12))
        figure.colorbar(axis.images[0], ax=axis, pad=0.015, fraction=0.05).set_label("share of KV heads that keep it", fontsize=9)
    _label_tokens(axis, total, tokens, tokenizer)
    return figure  # type: ignore[no-any-return]


def _layer_token_mass(q: torch.Tensor, kv: torch.Tensor, geometry: Geometry, window: int, queries_are_last: bool) -> torch.Tensor:
    """float32 ``[L, T]`` on the CPU: mean over heads, per counted query."""
    layers, q_width, kv_width = geometry.num_layers, geometry.hidden(CacheKind.QUERY), geometry.hidden(CacheKind.KV)
    if q.dim() != 4 or (q.shape[0], q.shape[1], q.shape[3]) != (1, layers, q_width):
        raise ShapeError(f"q must be [1, L, TQ, HQ * D] = [1, {layers}, TQ, {q_width}], got {tuple(q.shape)}")
    if kv.dim() != 4 or (kv.shape[1], kv.shape[3]) != (layers, kv_width):
        raise ShapeError(f"kv must be [planes, L, T, H] = [2, {layers}, T, {kv_width}], got {tuple(kv.shape)}")
    if q.shape[2] > kv.shape[2] or window < 0:
        raise ShapeError(f"{q.shape[2]} queries for {kv.shape[2]} keys, window {window}: queries are those of the last tokens, at most T")
    if q.shape[2] < kv.shape[2] and not queries_are_last:
        raise ShapeError(
            f"{q.shape[2]} query rows for {kv.shape[2]} key rows: q.retrieve returned fewer chunks (queries of tokens that an engine took "
            "from its prefix cache are never computed, which leaves a hole; q.coverage(tokens) shows it). Cut the keys to the same tokens, "
            f"kv[:, :, :{q.shape[2]}]; only if these are the queries of the last {q.shape[2]} tokens, give queries_are_last=True"
        )
    counted = min(window or q.shape[2], q.shape[2])
    rows = [layer_mass(q, kv, geometry, layer, window=window).mean(dim=0) / counted for layer in range(layers)]
    return torch.stack(rows).cpu()


def _kept_share(index: Index, tokens: int, geometry: Geometry) -> torch.Tensor:
    """float32 ``[1, T]`` of 0 and 1, or ``[L, T]``: the share of heads that keep a token."""
    at = as_index(index, tokens, geometry.num_layers, geometry.num_kv_heads)
    if at.dim() == 1:
        return torch.zeros(1, tokens).index_fill_(1, at, 1.0)
    return torch.zeros(*at.shape[:2], tokens).scatter_(2, at, 1.0).mean(dim=1)


def _map_size(rows: int, tokens: int) -> tuple[float, float]:
    """Width and height in inches of a map of rows x tokens."""
    return min(16.0, max(7.0, 2.5 + tokens * 0.11)), min(12.0, max(3.2, 1.7 + rows * 0.2))


def _strip(axis: Axes, share: torch.Tensor, geometry: Geometry) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("kept", [_DROPPED, _KEPT])
    axis.imshow(share.numpy(), aspect="auto", interpolation="nearest", cmap=colours, vmin=0.0, vmax=1.0, origin="lower")
    if share.shape[0] == 1:
        axis.set_yticks([0], ["kept"], fontsize=9)
    else:
        axis.set_ylabel("layer", fontsize=10)


def _label_tokens(axis: Axes, total: int, tokens: TokenIds | None, tokenizer: Any) -> None:
    """The token axis: text where there is a tokenizer and room, numbers else."""
    axis.set_xlim(-0.5, total - 0.5)
    if tokens is None or tokenizer is None or total > 4 * _MAX_LABELS:
        axis.set_xlabel("token", fontsize=10)
        return
    ids = as_token_array(tokens)[:total].tolist()
    step = max(1, -(-total // _MAX_LABELS))
    axis.set_xticks(range(0, len(ids), step), [_readable(str(tokenizer.decode([t]))) for t in ids[::step]], rotation=90, fontsize=7)
    axis.set_xlabel("token" + (f" (one label for {step} tokens)" if step > 1 else ""), fontsize=10)


def _readable(text: str) -> str:
    """A token's text as a label: no line breaks, no mathtext, not long, DejaVu's missing glyphs replaced by their code."""
    shown = text.replace("\n", "⏎").replace("\t", "→").replace("$", r"\$")
    shown = "".join(c if c.isprintable() and ord(c) < 0x3000 else f"U+{ord(c):X}" for c in shown)
    return (shown[:11] + "…" if len(shown) > 12 else shown) or "·"


def _plain(axis: Axes) -> None:
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)


class _Matplotlib:
    """The few classes that are used, imported on first use."""

    def __init__(self) -> None:
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator

        self.Figure: Any = Figure
        self.LogNorm: Any = LogNorm
        self.Patch: Any = Patch
        self.MaxNLocator: Any = MaxNLocator


def _matplotlib() -> _Matplotlib:
    try:
        return _Matplotlib()
    except ImportError as error:
        raise Unsupported(f"plots need matplotlib: pip install 'qcap[notebook]' ({error})") from None


def _share(coverage: Coverage) -> str:
    return f"{coverage.fraction:.0%}" if coverage.whole_chunks else "no whole chunk"


__all__: Sequence[str] = ["attention_mass", "coverage_bar", "kept_tokens"]
