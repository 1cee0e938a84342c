"""Counters and a logger that cannot storm."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable


class Counters:
    """Named counts. Thread-safe; the names are fixed at birth, so a typo raises and readers can rely on the keys."""

    def __init__(self, names: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(names, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Add ``amount``. Raises ``KeyError`` for a name not given at birth."""
        with self._lock:
            self._values[name] += amount

    def high_water(self, name: str, value: int) -> None:
        """Keep the largest ``value`` seen."""
        with self._lock:
            self._values[name] = max(self._values[name], value)

    def snapshot(self) -> dict[str, int]:
        """All counts at one moment."""
        with self._lock:
            return dict(self._values)


class RateLimitedLog:
    """A logger that passes one record per message template and interval, and says how many it held back.

    Args:
        logger: where records go.
        interval_s: seconds between two records of one template.
        clock: seconds, monotonic; for tests.
    """

    MAX_TEMPLATES = 256

    def __init__(self, logger: logging.Logger, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, int]] = {}  # template -> (last passed, held back since)

    def log(self, level: int, template: str, *args: object) -> bool:
        """Log ``template % args`` unless this template was passed less than ``interval_s`` ago. True if it was passed."""
        with self._lock:
            now = self._clock()
            last, suppressed = self._seen.pop(template, (None, 0))
            passes = last is None or now - last >= self._interval_s
            self._seen[template] = (now, 0) if passes else (last or 0.0, suppressed + 1)
            while len(self._seen) > self.MAX_TEMPLATES:  # oldest first: pop above re-inserts what is in use
                del self._seen[next(iter(self._seen))]
        if passes:
            if suppressed:
                template, args = template + " (and %d more like it since the last such message)", (*args, suppressed)
            self._logger.log(level, template, *args)
        return passes

    def warning(self, template: str, *args: object) -> bool:
        """:meth:`log` at WARNING."""
        return self.log(logging.WARNING, template, *args)

    def error(self, template: str, *args: object) -> bool:
        """:meth:`log` at ERROR."""
        return self.log(logging.ERROR, template, *args)
