"""Counters and the logger that cannot storm."""

from __future__ import annotations

import logging
import threading

import pytest

from qcap.store.metrics import Counters, RateLimitedLog


def test_counters_add_up_over_threads() -> None:
    counters = Counters(["a", "b"])
    threads = [threading.Thread(target=lambda: [counters.add("a", 2) for _ in range(1000)]) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    counters.high_water("b", 5)
    counters.high_water("b", 3)
    assert counters.snapshot() == {"a": 8000, "b": 5}
    with pytest.raises(KeyError):
        counters.add("c")


def test_one_record_a_template_and_interval(caplog) -> None:  # O14
    now = [0.0]
    log = RateLimitedLog(logging.getLogger("qcap.test"), interval_s=10, clock=lambda: now[0])
    for i in range(1000):
        log.warning("skipped %d", i)
    log.error("other")
    now[0] = 9.9
    assert log.warning("skipped %d", 1) is False
    now[0] = 10.0
    assert log.warning("skipped %d", 7) is True
    now[0] = 20.0
    assert log.warning("skipped %d", 8) is True
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "skipped 0"),
        ("ERROR", "other"),
        ("WARNING", "skipped 7 (and 1000 more like it since the last such message)"),
        ("WARNING", "skipped 8"),
    ]


def test_templates_are_bounded() -> None:
    log = RateLimitedLog(logging.getLogger("qcap.test"), clock=lambda: 0.0)
    for i in range(1000):
        log.warning(f"template {i}")
    assert len(log._seen) <= RateLimitedLog.MAX_TEMPLATES
