"""How a stage tells its parent how far it is: one JSON object a line on a file descriptor, or nothing if nobody listens."""

from __future__ import annotations

import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from qcap.demo.settings import DemoSettings
from qcap.errors import QcapError

LISTENER = "QCAP_DEMO_PROGRESS_FD"
"""Set by the parent: the descriptor to write to."""


class Reporter:
    """The stage's side.

    Args:
        total: steps of the whole stage; :meth:`step` moves by some of them.
    """

    def __init__(self, total: float) -> None:
        number = os.environ.pop(LISTENER, "")
        self._fd = int(number) if number else None
        self._done = 0.0
        self._say(total=total)

    def step(self, by: float, text: str = "") -> None:
        """``by`` more steps are done; ``text`` says what is being done now."""
        self._done += by
        self._say(done=self._done, **({"text": text} if text else {}))

    def fail(self, message: str) -> None:
        """The stage ends here, and why: one line."""
        self._say(error=message)

    def _say(self, **what: Any) -> None:
        if self._fd is not None:
            try:
                os.write(self._fd, json.dumps(what).encode() + b"\n")
            except OSError:  # the parent has gone; the stage may still finish
                self._fd = None

    def bar(self, steps: float, text: str) -> Callable[..., Any]:
        """What ``LLM.generate(use_tqdm=...)`` takes: spreads ``steps`` over the requests that finish."""
        from tqdm import tqdm

        reporter = self

        class Bar(tqdm):  # type: ignore[misc]
            def __init__(self, *args: Any, **kw: Any) -> None:
                super().__init__(*args, **{**kw, "disable": False, "file": io.StringIO()})

            def update(self, n: float | None = 1) -> None:
                if self.desc.startswith("Processed") and self.total:
                    reporter.step(steps * (n or 0) / self.total, text)
                super().update(n)

        return Bar


class Clock:
    """Seconds by name, one after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """What went on since the last lap was ``name``."""
        now = time.monotonic()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now - self._last, 2)
        self._last = now


def stage_main(total: float, run: Callable[[DemoSettings, Reporter], None]) -> None:
    """The body of a stage's process: ``argv[1]`` is its ``settings.json``. What goes wrong is told to the parent in one line."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} settings.json")
    reporter = Reporter(total)
    try:
        run(DemoSettings.read(sys.argv[1]), reporter)
    except Exception as error:
        traceback.print_exc()
        reporter.fail(str(error) if isinstance(error, QcapError) else f"{type(error).__name__}: {error}")
        sys.exit(1)
