"""``report.html``: one file, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

_STYLE = Path(__file__).with_name("report.css")

_WORDS = {"full": "everything, written back unchanged", "snapkv": "what the last tokens look at", "random": "tokens drawn at random"}


def page(report: Mapping[str, Any], stages: Mapping[str, Mapping[str, Any]], pictures: Mapping[str, bytes]) -> str:
    """The whole page.

    Args:
        report: what goes into ``report.json``.
        stages: what the stages left; the prompts' tokens are only there.
        pictures: PNG bytes by file name.
    """
    body = [_head(report), _policies(report), _prompts(report, stages, pictures), _facts(report)]
    title = escape(f"qcap demo: {report['geometry']['model']}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE.read_text()}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _head(report: Mapping[str, Any]) -> str:
    tokens = sum(p["tokens"] for p in report["prompts"])
    tiles = [_tile(f"{share:.0%}", f"{kind} coverage of whole chunks", share == 1.0) for kind, share in report["coverage"].items()]
    count = sum(report["skipped"].values())
    tiles.append(_tile(str(count), "chunks skipped" + (": " + ", ".join(report["skipped"]) if count else ""), not count))
    same = report["policies"]["full"]["same_tokens_as_capture"]
    tiles.append(_tile("same" if same else "other", "tokens after writing the cache back unchanged", same))
    tiles.append(_tile(f"{report['seconds']['total']:.0f} s", "all three processes", True))
    engine = report["engine"]["capture"]
    return (
        f"<h1>Capture, edit, go on: {escape(report['geometry']['model'])}</h1>"
        f'<p class="lead">{len(report["prompts"])} prompts served together by vLLM {escape(str(engine["vllm"]))} '
        f"({escape(str(engine['device']))}, {escape(str(engine['dtype']))}, at most {engine['step_tokens']} tokens a step), {tokens} "
        f"tokens in all; read, edited and written back without vLLM; gone on from by a fresh vLLM.</p>"
        f'<div class="tiles">{"".join(tiles)}</div>'
    )


def _tile(value: str, what: str, good: bool) -> str:
    return f'<div class="tile{"" if good else " bad"}"><b>{escape(value)}</b><span>{escape(what)}</span></div>'


def _policies(report: Mapping[str, Any]) -> str:
    rows = []
    for name, policy in report["policies"].items():
        loaded = ", ".join(f"{a} of {b}" for a, b in zip(policy["loaded_tokens"], policy["stored_tokens"], strict=True))
        rows.append(
            [
                f"<b>{escape(name)}</b><br>{escape(_WORDS.get(name, name))}", _kept(policy), loaded,
                f"{policy['top1_agreement']:.1%}", f"{policy['logit_kl']:.3g}", _said(policy["text"]),
            ]
        )  # fmt: skip
    positions = next(iter(report["policies"].values()))["positions"]
    table = _table(("cache", "=kept", "=loaded tokens, per prompt", "=top-1", "=KL, nats", "text for the first prompt"), rows)
    vocabulary = report["reference"]["vocabulary"]
    note = (
        f"Top-1 and KL(full || cache): the captured continuation is forced, and at each of the {positions} positions the next-token "
        f"distribution over all {vocabulary} tokens is compared with that of the full cache as the engine computes it itself, without "
        "loading anything. Loaded tokens are what vLLM reports; its own prefix cache was off. What follows the last whole chunk of a "
        "prompt is sent again and computed. SnapKV lets the last 32 stored prompt tokens vote; where the question is among them, the "
        "policy has seen it."
    )
    return f'<h2>Going on from three caches</h2>{table}<p class="note">{escape(note)}</p>'


def _kept(policy: Mapping[str, Any]) -> str:
    """The share, and why it is not what was asked for."""
    why = f'<div class="why">{policy["keep"]:.0%} asked for, rounded down to whole chunks</div>' if policy["kept"] < policy["keep"] else ""
    return f"{policy['kept']:.1%}{why}"


def _said(text: str) -> str:
    return escape(text) or "<i>(ends at once)</i>"


def _prompts(report: Mapping[str, Any], stages: Mapping[str, Mapping[str, Any]], pictures: Mapping[str, bytes]) -> str:
    parts = ["<h2>The prompts</h2>", _legend()]
    for number, (prompt, found) in enumerate(zip(report["prompts"], stages["analyse"]["prompts"], strict=True)):
        texts = [["captured run", "", "", _said(prompt["text"])]]
        for name, policy in report["policies"].items():
            figures = policy["per_prompt"][number]
            texts.append([escape(name), f"{figures['top1_agreement']:.1%}", f"{figures['logit_kl']:.3g}", _said(policy["texts"][number])])
        parts.append(f"<h3>{escape(prompt['name'])}: {prompt['prompt_tokens']} prompt tokens, {prompt['new_tokens']} new</h3>")
        parts.append(_table(("cache", "=top-1", "=KL, nats", "text"), texts))
        for name, edit in found["edits"].items():
            if name != "full":
                summary = f"{name} keeps {edit['stored_tokens']} of {edit['of']} tokens; {edit['resent_tokens']} more are sent again"
                opened = " open" if number == 0 else ""
                parts.append(
                    f'<details{opened}><summary>{escape(summary)}</summary><div class="tokens">'
                    f"{_spans(found['pieces'], edit['kept'], edit['of'])}</div></details>"
                )
        for picture in prompt["pictures"].values():
            data = base64.b64encode(pictures[picture]).decode()
            parts.append(f'<img alt="{escape(picture)}" src="data:image/png;base64,{data}">')
    return "\n".join(parts)


def _legend() -> str:
    return '<p class="legend"><span class="k">kept</span><span class="g">dropped</span><span class="r">sent again</span></p>'


def _spans(pieces: Sequence[str], kept: Sequence[int], rows: int) -> str:
    """The prompt's tokens, runs of one sort in one span."""
    chosen, out, last = set(kept), [], ""
    for i, piece in enumerate(pieces):
        sort = "r" if i >= rows else "k" if i in chosen else "g"
        if sort != last:
            out.append(("</span>" if last else "") + f'<span class="{sort}">')
            last = sort
        out.append(escape(piece))
    return "".join(out) + ("</span>" if last else "")


def _facts(report: Mapping[str, Any]) -> str:
    geometry, seconds = report["geometry"], report["seconds"]
    shapes = [
        [escape(p["name"]), str(p["tokens"]), str(p["computed_tokens"]), *(_shape(p["shapes"][kind]) for kind in ("kv", "query")),
         *(f"{p['coverage'][kind]['stored']} of {p['coverage'][kind]['whole']}" for kind in ("kv", "query"))]
        for p in report["prompts"]
    ]  # fmt: skip
    model = [[escape(k), escape(str(v))] for k, v in geometry.items()]
    times = [
        [escape(stage), f"{value:.1f}", escape(_inside(seconds["inside"].get(stage, {})))]
        for stage, value in seconds.items()
        if stage != "inside"
    ]
    versions = [[escape(k), escape(v)] for k, v in report["versions"].items()]
    return (
        "<h2>What was captured</h2>"
        + _table(("prompt", "=tokens", "=computed", "KV [2, L, T, H]", "queries [1, L, T, H]", "=KV stored", "=queries stored"), shapes)
        + '<p class="note">An engine never computes the last token it says: of N tokens N - 1 are computed, their whole chunks stored.</p>'
        + "<h2>Model, time, versions</h2>"
        + _table(("stage", "=seconds", "of which"), times)
        + _table(("model", ""), model)
        + _table(("package", "version"), versions)
        + f'<p class="note">{escape(report["finished"])}</p>'
    )


def _shape(shape: Sequence[int] | None) -> str:
    return "nothing" if shape is None else escape("[" + ", ".join(map(str, shape)) + "]")


def _inside(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in parts.items())


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """``columns`` are plain text, ``=`` in front for right-aligned numbers; cells are HTML."""
    classes = [' class="n"' if name.startswith("=") else "" for name in columns]
    head = "".join(f"<th{c}>{escape(name.removeprefix('='))}</th>" for name, c in zip(columns, classes, strict=True))
    body = "".join("<tr>" + "".join(f"<td{c}>{cell}</td>" for cell, c in zip(row, classes, strict=True)) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
