"""The ``qcap`` command: what is in a store, whether it is sound, what this machine can do, the demo, and a timeline.

Errors that qcap raises on purpose are one line on stderr and exit code 2; ``--debug`` shows where they came from. Exit code 1 means that
the command ran and found something wrong (``verify``, ``doctor``, ``demo``).
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import qcap
from qcap.errors import ConfigError, QcapError, StoreUnavailable, TokenError

if TYPE_CHECKING:
    from qcap.store.listing import StoredEdit
    from qcap.store.tiers import SequenceRecord

app = typer.Typer(name="qcap", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Small runs that show how something works on this machine.")
app.add_typer(bench, name="bench")

Url = Annotated[str, typer.Argument(metavar="URL", help="The store: file:///data/captures, a plain path, s3://bucket/prefix, ...")]
_WIDEST = 1 << 16
"""Columns of a table that is written to a file: as many as it takes."""
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
ModelName = Annotated[str | None, typer.Option("--model", help="Only this model, by the name the engine was given.")]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; never returns normally: ends in ``SystemExit`` like any command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments  # legal anywhere: one appends it to the command that has just failed
    try:
        app(args=[a for a in arguments if a != "--debug"], prog_name="qcap")
    except QcapError as error:
        if debug:
            traceback.print_exc()
        Console(stderr=True).print(Text(f"qcap: {_plain(_one_line(str(error)))}"), soft_wrap=True)
        sys.exit(getattr(error, "exit_code", 2))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qcap {qcap.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Capture attention queries, keys and values from vLLM; look at them, edit them, write them back."""


# -- ls ---------------------------------------------------------------------------------------------------------------


@app.command("ls")
def ls(
    url: Url,
    model: ModelName = None,
    limit: Annotated[int, typer.Option(min=0, help="Sequences to list, the newest; 0 for all.")] = 20,
    edits: Annotated[bool, typer.Option(help="List stored edits too, which takes a look at each object.")] = True,
    as_json: AsJson = False,
) -> None:
    """List a store's models, captured sequences and stored edits. Exit code 1 if the folder does not exist."""
    from qcap.backends import open_backend
    from qcap.store.listing import stored_edits
    from qcap.store.urls import open_tier
    from qcap.store.verify import nothing_at

    try:
        nothing = nothing_at(url)
        tier = open_tier(url)
        entries = [] if nothing else list(tier.list_objects())
    except OSError as error:
        raise StoreUnavailable(f"{url} cannot be listed ({error}): see to the permissions of its folders") from error
    if nothing:
        if as_json:
            _print_json({"url": url, "objects": 0, "bytes": 0, "models": [], "sequences": [], "edits": []})
        Console(stderr=as_json).print(Text(nothing.reason), soft_wrap=True)
        raise typer.Exit(0 if nothing.exists else 1)
    found, unreadable = stored_edits(tier, entries, model) if edits else ([], 0)
    backend = open_backend(url)
    try:
        manifests = backend.manifests(model)
        records = backend.sequences(model)
    finally:
        backend.close()
    models: list[dict[str, Any]] = [
        {
            "model": g.model, "kinds": [k.value for k in kinds], "layers": g.num_layers, "query_heads": g.num_q_heads * g.tp_size,
            "kv_heads": g.num_kv_heads, "head_size": g.head_size, "dtype": g.dtype, "chunk_size": g.chunk_size, "tp_size": g.tp_size,
            "rope": g.rope.kind, "engine": engine, "sequences": sum(r.model == g.model and r.chunk_size == g.chunk_size for r in records),
        }
        for g, kinds, engine in manifests
    ]  # fmt: skip
    total = {"objects": len(entries), "bytes": sum(e.nbytes for e in entries)}
    if as_json:
        sequences = [_summary(i, r) for i, r in enumerate(records)]
        return _print_json({"url": url, **total, "models": models, "sequences": sequences, "edits": [_edit_summary(e) for e in found]})
    console = Console()
    console.print(Text(_plain(f"{url}: {total['objects']} objects, {_size(total['bytes'])}")), soft_wrap=True)
    if not models:
        console.print(Text("No model has been captured here" + (f" under the name {model!r}." if model else " yet.")), soft_wrap=True)
        return
    rows = [
        (
            m["model"], ", ".join(m["kinds"]), m["layers"], f"{m['query_heads']} / {m['kv_heads']}", m["head_size"], m["dtype"],
            m["chunk_size"], m["tp_size"], m["sequences"],
        )
        for m in models
    ]  # fmt: skip
    _print_table(console, "models", ("model", "kinds", "L", "HQ / HK", "D", "dtype", "chunk", "tp", "sequences"), rows)
    first = max(0, len(records) - limit) if limit else 0
    title = "sequences" if not first else f"the newest {limit} of {len(records)} sequences (--limit 0 for all)"
    _print_sequences(console, title, [_summary(i, r) for i, r in enumerate(records)][first:])
    if entries and not records and not found:
        what = "No request has ended here: of one that is served, or was cut off with its engine, retrieve(token_ids) finds the chunks."
        console.print(Text(what), soft_wrap=True)
    if found:
        cells = [tuple(_edit_summary(e).values()) for e in found]
        _print_table(console, "edits (cache_salt)", ("model", "kind", "salt", "edit", "tokens", "chunks"), cells)
    if unreadable:
        what = f"{unreadable} objects cannot be read, and may be of edits too: `qcap verify {url}` tells which"
        console.print(Text(_plain(what)), soft_wrap=True)


def _edit_summary(edit: StoredEdit) -> dict[str, Any]:
    return {
        "model": edit.model, "kind": edit.kind.value, "salt": edit.salt, "edit": ", ".join(edit.names), "tokens": edit.tokens,
        "chunks": edit.chunks,
    }  # fmt: skip


def _summary(index: int, record: SequenceRecord) -> dict[str, Any]:
    whole = record.computed_tokens // record.chunk_size
    return {
        "index": index,
        "request_id": record.request_id,
        "model": record.model,
        "salt": record.salt,
        "tokens": len(record.token_ids),
        "prompt_tokens": record.prompt_tokens,
        "computed_tokens": record.computed_tokens,
        "whole_chunks": whole,
        "stored": {kind: len(chunks) for kind, chunks in record.stored.items()},
        "skipped": record.skipped,
        "finished_at": record.finished_at,
    }


def _print_sequences(console: Console, title: str, summaries: Sequence[dict[str, Any]]) -> None:
    rows = [
        (
            s["index"], s["request_id"], s["model"], s["salt"], s["tokens"], s["prompt_tokens"],
            ", ".join(f"{kind} {n}/{s['whole_chunks']}" for kind, n in s["stored"].items()) or "-",
            ", ".join(f"{kind}:{reason} {n}" for kind, reasons in s["skipped"].items() for reason, n in reasons.items()),
            datetime.fromtimestamp(s["finished_at"]).strftime("%Y-%m-%d %H:%M:%S") if s["finished_at"] else "",
        )
        for s in summaries
    ]  # fmt: skip
    _print_table(console, title, ("#", "request", "model", "salt", "tokens", "prompt", "chunks stored", "skipped", "finished"), rows)


# -- show -------------------------------------------------------------------------------------------------------------


@app.command("show")
def show(
    url: Url,
    model: ModelName = None,
    request: Annotated[str | None, typer.Option("--request", "-r", help="One sequence, by id or by its number in `qcap ls`.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A folder with the model's tokenizer, to see the text.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show one captured sequence: tokens, salt, and which chunks are stored, asked anew from the store."""
    from qcap.backends import open_backend

    backend = open_backend(url)
    try:
        records = backend.sequences(model)
    finally:
        backend.close()
    if not records:
        what = f"captured sequence of model {model!r}" if model else "captured sequence"
        raise ConfigError(f"{url} holds no {what}: `qcap ls {url}` lists what there is")
    if request is None and len(records) == 1:
        request = "0"
    if request is None:
        if as_json:
            return _print_json({"url": url, "sequences": [_summary(i, r) for i, r in enumerate(records)]})
        console = Console()
        _print_sequences(console, "sequences", [_summary(i, r) for i, r in enumerate(records)])
        console.print("Say which one with --request NUMBER or --request ID.")
        return
    index = _pick(url, records, request)
    record = records[index]
    found = _details(url, index, record, tokenizer)
    if as_json:
        return _print_json(found)
    _print_details(Console(), record, found)


def _pick(url: str, records: Sequence[SequenceRecord], request: str) -> int:
    """The number of the sequence that is meant."""
    same_id = [i for i, r in enumerate(records) if r.request_id == request]
    if len(same_id) == 1:
        return same_id[0]
    if same_id:  # two engines may use one id
        numbers = ", ".join(map(str, same_id))
        raise ConfigError(f"{len(same_id)} sequences have the request id {request!r}: say which by number, one of {numbers}")
    if request.removeprefix("-").isdigit() and -len(records) <= int(request) < len(records):
        return int(request) % len(records)
    raise ConfigError(f"no sequence {request!r} among the {len(records)} in {url}: `qcap ls {url}` lists ids and numbers")


def _details(url: str, index: int, record: SequenceRecord, tokenizer: Path | None) -> dict[str, Any]:
    from qcap.errors import ModelNotFound
    from qcap.kinds import CacheKind
    from qcap.sdk.connect import connect

    coverage: dict[str, Any] = {}
    for kind in CacheKind:
        try:
            with connect(url, model=record.model, kind=kind, chunk_size=record.chunk_size) as context:
                found = context.coverage(record.token_ids, record.salt, computed_tokens=record.computed_tokens)
        except ModelNotFound:
            continue  # this kind was never captured
        coverage[kind.value] = {
            "fraction": found.fraction,
            "stored_tokens": found.stored_tokens,
            "whole_tokens": found.whole_tokens,
            "prefix_tokens": found.prefix_tokens,
            "tail_tokens": found.tail_tokens,
            "chunks": list(found.stored),
            "holes": list(found.holes),
        }
    text = None
    if tokenizer is not None:
        text = _decode(tokenizer, record.token_ids, record.prompt_tokens)
    return {
        **_summary(index, record), "engine_id": record.engine_id, "chunk_size": record.chunk_size, "coverage": coverage,
        "token_ids": list(record.token_ids), **({"text": text} if text else {}),
    }  # fmt: skip


def _decode(folder: Path, ids: Sequence[int], prompt_tokens: int) -> dict[str, str]:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"--tokenizer needs transformers: pip install transformers ({error})") from None
    if not folder.is_dir():
        raise ConfigError(f"--tokenizer {folder} is not a folder: give the model's folder")
    try:
        made: Any = AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer {folder} holds no tokenizer: {_one_line(str(error))[:200]}") from None
    if ids and max(ids) >= len(made):
        raise TokenError(f"token id {max(ids)} is not in the vocabulary of {folder} ({len(made)} tokens): is it this model's tokenizer?")
    return {"prompt": str(made.decode(list(ids[:prompt_tokens]))), "generated": str(made.decode(list(ids[prompt_tokens:])))}


def _print_details(console: Console, record: SequenceRecord, found: dict[str, Any]) -> None:
    finished = datetime.fromtimestamp(record.finished_at).strftime("%Y-%m-%d %H:%M:%S") if record.finished_at else ""
    facts = [
        ("model", record.model), ("request", record.request_id), ("engine", record.engine_id), ("salt", record.salt or "(none)"),
        ("tokens", f"{len(record.token_ids)}: {record.prompt_tokens} prompt, {len(record.token_ids) - record.prompt_tokens} generated"),
        ("computed", f"{record.computed_tokens}, {found['whole_chunks']} whole chunks of {record.chunk_size}"), ("finished", finished),
    ]  # fmt: skip
    _print_table(console, f"sequence {found['index']}", ("", ""), facts)
    for kind, c in found["coverage"].items():
        bar = "".join("█" if there else "·" for there in c["chunks"])
        holes = f"; missing chunks: {', '.join(map(str, c['holes']))}" if c["holes"] else ""
        if not c["chunks"]:
            why = f"no whole chunk of {record.chunk_size} in {record.computed_tokens} computed tokens, so nothing of them can be stored"
            console.print(Text(f"{kind}: {why}"), soft_wrap=True)
            continue
        share = f"{c['stored_tokens']} of {c['whole_tokens']} whole-chunk tokens stored ({c['fraction']:.0%})"
        console.print(Text(f"{kind}: {share}, usable as a prefix {c['prefix_tokens']}{holes}"), soft_wrap=True)
        console.print(Text(f"  {bar}"))
    for kind, reasons in record.skipped.items():
        for reason, count in reasons.items():
            console.print(Text(_plain(f"{kind} skipped: {reason}, {count} chunks")), soft_wrap=True)
    for part, text in found.get("text", {}).items():
        console.print(Text(f"\n{part}:", style="bold"))
        console.print(Text(_plain(text, keep="\n\t")), soft_wrap=True)


# -- verify, doctor, demo ---------------------------------------------------------------------------------------------


@app.command("verify")
def verify(
    url: Url,
    as_json: AsJson = False,
    delete: Annotated[bool, typer.Option("--delete", help="Remove damaged files, so that they can be captured or stored again.")] = False,
) -> None:
    """Read every object of a store and check headers, keys and checksums, and that edits are whole. Exit code 1 if anything is wrong or
    nothing is there."""
    from qcap.store.verify import delete_bad, nothing_at, verify_store

    if as_json:
        report = verify_store(url)
    else:
        report = _with_bar("verifying", lambda tell: verify_store(url, tell))
    if as_json:
        _print_json(
            {
                "url": url, "ok": report.ok and not report.empty, "empty": report.empty,
                "objects": report.objects, "bytes": report.nbytes, "manifests": report.manifests,
                "sequences": report.sequences, "bad": [{"path": b.path, "reason": b.reason} for b in report.bad],
                "broken_edits": [
                    {"salt": e.salt, "model": e.model, "kind": e.kind, "reason": e.reason} for e in report.broken_edits
                ],
                "unlisted": report.unlisted, "stale_staging": report.stale_staging,
            }
        )  # fmt: skip
    else:
        console = Console()
        if report.bad:
            _print_table(console, "not sound", ("file", "why"), [(b.path, b.reason) for b in report.bad])
        if report.broken_edits:
            rows = [(e.salt, e.kind, e.reason) for e in report.broken_edits]
            _print_table(console, "edits that are not whole", ("salt", "kind", "why"), rows)
        for name, count in report.unlisted.items():
            text = f"{count} objects of {name} have no manifest, so nothing can connect to them: an engine of that model writes it again."
            console.print(Text(text), soft_wrap=True)
        if report.stale_staging:
            console.print(f"{len(report.stale_staging)} files under staging/ were left by killed processes; they are safe to remove.")
        what = f"{report.objects} objects ({_size(report.nbytes)}), {report.manifests} manifests, {report.sequences} receipts"
        if not report.empty:
            wrong = [f"{len(report.bad)} bad"] if report.bad else []
            wrong += [f"{len(report.broken_edits)} edits not whole"] if report.broken_edits else []
            wrong += [f"{sum(report.unlisted.values())} without a manifest"] if report.unlisted else []
            console.print(Text(f"{what}: " + (", ".join(wrong) or "all sound")), soft_wrap=True)
    if report.empty and (nothing := nothing_at(url)):
        Console(stderr=as_json).print(Text(nothing.reason), soft_wrap=True)
    if delete and (report.bad or report.stale_staging):
        Console(stderr=True).print(f"{delete_bad(url, report)} files removed")
    if report.empty or not report.ok:
        raise typer.Exit(1)


def _with_bar(title: str, work: Callable[[Callable[[int, int], None]], Any]) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        return work(lambda done, total: progress.update(task, completed=done, total=total))


@app.command("doctor")
def doctor(
    store: Annotated[str | None, typer.Option(help="A store's URL: check that it can be written and read.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what is installed, what works here, and what to do about the rest. Exit code 1 only if something asked for does not work."""
    from qcap.doctor import Status, examine

    findings = examine(store)
    if as_json:
        _print_json({"ok": all(f.status is not Status.BAD for f in findings), "findings": [f.as_json() for f in findings]})
    else:
        styles = {Status.GOOD: "green", Status.MISSING: "yellow", Status.BAD: "bold red", Status.INFO: ""}
        table = _table("", ("what", "", "found", "next step"), [])
        for f in findings:
            name, what, step = (Text(_plain(text)) for text in (f.name, f.found, f.next_step))
            table.add_row(name, Text(f.status.value, style=styles[f.status]), what, step)
        Console().print(table)
    if any(f.status is Status.BAD for f in findings):
        raise typer.Exit(1)


@app.command("demo")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report, pictures, logs and the demo's own store.")] = Path("out/demo"),
    model: Annotated[str, typer.Option(help="'smollm2', or a Hugging Face folder with a tokenizer.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt.")] = 40,
    keep: Annotated[float, typer.Option(help="Share of the stored prompt that SnapKV and random keep.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of the random policy.")] = 0,
) -> None:
    """Capture on a real model, edit without vLLM, go on from the edited cache; writes a report."""
    from qcap.demo.run import run
    from qcap.demo.settings import DemoSettings, find_model

    folder, name = find_model(model, dtype)
    settings = DemoSettings(out=str(out), model=str(folder), model_name=name, dtype=dtype, new_tokens=new_tokens, keep=keep, seed=seed)
    try:
        run(settings, Console())
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; nothing of this run is kept")
        raise typer.Exit(130) from None


@bench.command("layerwise")
def bench_layerwise(
    trace: Annotated[Path, typer.Option(help="Where to write the Chrome trace; its picture goes beside it, ending in .png.")],
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 12,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to load, and as many to store; whole chunks of 64.")] = 512,
    read_ms: Annotated[float, typer.Option(min=0, help="Milliseconds the slow store takes to read a layer.")] = 8.0,
    compute_ms: Annotated[float, typer.Option(min=0, help="Milliseconds a layer computes (a stand-in that does nothing else).")] = 10.0,
) -> None:
    """Load and store a small made-up cache layer by layer, once, and draw who did what when."""
    from qcap.demo.timeline import TimelineSettings, run

    timeline, picture = run(TimelineSettings(layers, tokens, read_ms, compute_ms), trace)
    load, compute = timeline.work("load"), timeline.work("compute")
    rows = [
        ("total", f"{timeline.total / 1000:.1f} ms"),
        ("sum of load", f"{load / 1000:.1f} ms"),
        ("sum of compute", f"{compute / 1000:.1f} ms"),
        ("sum of store", f"{timeline.work('store') / 1000:.1f} ms"),
        ("load + compute in sequence", f"{(load + compute) / 1000:.1f} ms"),
        ("overlap: share of loading during which a layer computed", f"{timeline.overlap:.0%}"),
    ]
    console = Console()
    console.print(_table(f"{layers} layers of {tokens} tokens on {timeline.device}", ("", ""), rows))
    console.print(Text(f"trace: {trace} (chrome://tracing, Perfetto); picture: {picture}"), soft_wrap=True)


# -- output -----------------------------------------------------------------------------------------------------------


def _print_json(value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if not text.replace("\n", " ").isprintable():  # json leaves some that steer a terminal as they are; in JSON only strings have others
        text = "".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text)
    sys.stdout.write(text + "\n")


def _plain(text: str, keep: str = "") -> str:
    from qcap.sdk.coverage import printable

    return printable(text, keep)


def _print_table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """As a table where all of it fits, and where no human's screen is; else a line a cell, so that each can be copied whole."""
    table = _table(title, columns, rows)
    wanted = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    if wanted <= console.width:
        return console.print(table)
    if not console.is_terminal:
        return Console(file=console.file, width=wanted, color_system=None).print(table)
    console.print(Text(title, style="italic"), soft_wrap=True)
    width = max(map(len, columns))
    for row in rows:
        first, *others = (f"{name:<{width}}  {_plain(str(cell))}".strip() for name, cell in zip(columns, row, strict=True) if str(cell))
        console.print(Text("\n  ".join([first, *others])), soft_wrap=True)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table of plain texts: what a store holds must not be read as markup."""
    table = Table(title=title or None, show_header=any(columns))
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_plain(str(cell))) for cell in row))
    return table


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


if __name__ == "__main__":
    main()
