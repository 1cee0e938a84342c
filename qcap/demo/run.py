"""The parent of the demo's processes: starts one after the other, shows how far they are, and writes the report."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from qcap.demo.progress import LISTENER
from qcap.demo.prompts import TEXTS, picture_names
from qcap.demo.report import problems, summary_table, write_report
from qcap.demo.settings import DemoSettings
from qcap.errors import ConfigError, QcapError
from qcap.testing.engine import ENGINE_ENVIRONMENT

STAGES = ("capture", "analyse", "resume")
TITLES = {"capture": "1/3 capture", "analyse": "2/3 analyse and edit", "resume": "3/3 go on"}
STAGE_ENVIRONMENT = {
    **ENGINE_ENVIRONMENT,
    # Threads that wait sleep instead of spinning: on a machine with other work, spinning costs several times the work itself.
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
}
_STORE_PARTS = {"objects", "models", "sequences", "staging"}
_POLL_S = 0.2


class DemoFailed(QcapError):
    """A stage of the demo ended badly, or what it found is not what it must be. The message says which, and where to look."""

    exit_code = 1  # the command line's: the demo ran and found something wrong


@dataclass
class _Heard:
    """What a stage has said so far."""

    total: float = 100.0
    done: float = 0.0
    text: str = ""
    error: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def listen(self, stream: IO[str]) -> None:
        """Read until the stage closes its end."""
        for line in stream:
            try:
                said = json.loads(line)
            except ValueError:
                continue  # a killed stage may leave half a line
            with self.lock:
                for name, value in said.items():
                    setattr(self, name, value)


def run(settings: DemoSettings, console: Console) -> dict[str, Any]:
    """The whole demo; returns what is in ``report.json``.

    Raises:
        DemoFailed: a stage died, coverage is not 100 %, something was skipped, or tokens were not loaded. Where all stages ran, the report
            is written all the same.
        ConfigError: ``out`` cannot be written to, or ``out/store`` is there and is not a store.
        KeyboardInterrupt: the stage that ran has been ended and what this run made is taken away.
    """
    try:
        _clear(settings)
        settings.write()
    except OSError as error:
        raise ConfigError(f"{settings.folder} cannot be written to ({error}): give another folder with --out") from None
    try:
        return _run(settings, console)
    except KeyboardInterrupt:
        _clear(settings)
        for stage in STAGES:
            (settings.work / f"{stage}.log").unlink(missing_ok=True)
        for name, _ in TEXTS:
            for picture in picture_names(name).values():
                (settings.folder / picture).unlink(missing_ok=True)
        (settings.work / "settings.json").unlink(missing_ok=True)
        raise


def _run(settings: DemoSettings, console: Console) -> dict[str, Any]:
    """The stages and the report."""
    path = settings.write()
    seconds: dict[str, float] = {}
    began = time.monotonic()
    with _progress(console) as progress:
        tasks = {stage: progress.add_task(TITLES[stage], total=100.0, start=False, now="") for stage in STAGES}
        for stage in STAGES:
            at = time.monotonic()
            _run_stage(stage, path, settings, console, progress, tasks[stage])
            seconds[stage] = round(time.monotonic() - at, 1)
    seconds["total"] = round(time.monotonic() - began, 1)
    report = write_report(settings, {stage: settings.get(stage) for stage in STAGES}, seconds)
    console.print(summary_table(report))
    console.print(f"report: {settings.folder / 'report.html'} and {settings.folder / 'report.json'}", soft_wrap=True)
    if wrong := problems(report):
        raise DemoFailed("the demo ran, but " + "; ".join(wrong) + f". See {settings.folder / 'report.json'}")
    return report


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<20}"),
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
        console=console,
        disable=not console.is_terminal,
    )


def _run_stage(stage: str, path: Path, settings: DemoSettings, console: Console, progress: Progress, task: TaskID) -> None:
    """One child process from start to end.

    Raises:
        DemoFailed: it did not end with 0.
    """
    log_path = settings.work / f"{stage}.log"
    search = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    read_fd, write_fd = os.pipe()
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", f"qcap.demo.{stage}", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**STAGE_ENVIRONMENT, **os.environ, "PYTHONPATH": search, LISTENER: str(write_fd)},
            pass_fds=(write_fd,),
            start_new_session=True,
        )
    os.close(write_fd)
    heard = _Heard()
    stream = os.fdopen(read_fd, encoding="utf-8", errors="replace")
    ear = threading.Thread(target=heard.listen, args=(stream,), name=f"qcap-demo-{stage}", daemon=True)
    ear.start()
    try:
        progress.start_task(task)
        shown = ""
        while child.poll() is None:
            with heard.lock:
                total, done, text = heard.total, heard.done, heard.text
            progress.update(task, total=total, completed=done, now=text)
            if text != shown and not console.is_terminal:
                console.print(f"{TITLES[stage]}: {text}")
            shown = text
            time.sleep(_POLL_S)
    finally:
        _end(child)  # before the stream is closed: closing waits for the listener's read, which ends with the last writer
        ear.join(timeout=5)
        if not ear.is_alive():
            stream.close()
    if child.returncode:
        why = heard.error or _last_line(log_path)
        raise DemoFailed(f"stage {stage!r} ended with code {child.returncode}: {why}. Its log is {log_path}")
    progress.update(task, completed=heard.total, now="")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Whatever the stage started ends with it, also when the demo is interrupted."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _clear(settings: DemoSettings) -> None:
    """Take away an earlier run: its store would answer for this one. Nothing else in the folder is touched."""
    store = settings.store_folder
    if store.exists():
        if not store.is_dir() or {p.name for p in store.iterdir()} - _STORE_PARTS:
            raise ConfigError(f"{store} is there and is not a store of this demo: give another folder with --out")
        shutil.rmtree(store)
    for stage in STAGES:
        (settings.work / f"{stage}.json").unlink(missing_ok=True)
    for name in ("report.json", "report.html"):
        (settings.folder / name).unlink(missing_ok=True)
