"""``qcap bench layerwise``: its trace says that layers are loaded while others compute, by the order of events, never by times."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import sys
import threading
from types import SimpleNamespace

import pytest

from qcap.cli import main
from qcap.demo import timeline as module
from qcap.demo.timeline import Piece, Timeline, TimelineSettings, trace_events

L = 4
NS = 0.0015
"""Microseconds: times in a trace are rounded to a nanosecond."""


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def end(event):
    return event["ts"] + event["dur"]


def by_row(events):
    """``{row: {layer: event}}``; a layer that comes twice in a row fails."""
    rows = {}
    for event in events:
        if event["ph"] == "X":
            layers = rows.setdefault(event["cat"], {})
            assert event["args"]["layer"] not in layers, f"{event['name']} is twice in {event['cat']}"
            layers[event["args"]["layer"]] = event
    return rows


class Gated:
    """Layer i computes until the store is reading layer i + 1, however slow this machine is; in a pipeline without overlap, too long."""

    def __init__(self):
        self.reading = [threading.Event() for _ in range(L)]
        self.computed = 0

    def stand_in(self, device, milliseconds):
        return self

    def run(self):
        self.computed += 1
        if self.computed < L:
            assert self.reading[self.computed].wait(30), f"layer {self.computed} is not read while layer {self.computed - 1} computes"

    def reader(self, inner):
        def fetch(layer, out, chunks):
            self.reading[layer].set()
            return inner.fetch(layer, out, chunks)

        return SimpleNamespace(fetch=fetch)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """One run by the command line: trace, picture, what was printed."""
    path, out, gate, reader = tmp_path_factory.mktemp("bench") / "out.json", io.StringIO(), Gated(), module.MemoryLayers.reader
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        patch.setenv("COLUMNS", "200")
        patch.setattr(module, "_StandIn", gate.stand_in)
        patch.setattr(module.MemoryLayers, "reader", lambda self, chunks: gate.reader(reader(self, chunks)))
        main(["bench", "layerwise", "--trace", str(path), "--layers", str(L), "--tokens", "128", "--read-ms", "2"])
    assert not ended.value.code
    return json.loads(path.read_text()), path.with_suffix(".png"), out.getvalue()


def test_the_trace_is_complete_events_with_named_rows(ran):
    events, _, _ = ran
    assert isinstance(events, list) and {e["ph"] for e in events} == {"X", "M"}
    names = {(e["name"], e["tid"]): e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")}
    assert names["process_name", 0].startswith("qcap layerwise")
    assert {e["pid"] for e in events} == {1}
    done = [e for e in events if e["ph"] == "X"]
    for e in done:
        assert names["thread_name", e["tid"]].split(" ")[0] == e["cat"]
        assert e["name"] == f"layer {e['args']['layer']}" and e["dur"] >= 0 and e["ts"] >= 0
    last = max(end(e) for e in done)
    assert all(end(e) <= last for e in done) and [e["ts"] for e in done] == sorted(e["ts"] for e in done)


def test_every_layer_comes_once_in_each_row(ran):
    rows = by_row(ran[0])
    assert {row: sorted(layers) for row, layers in rows.items()} == {row: list(range(L)) for row in ("compute", "load", "store")}


def test_a_layer_is_loaded_before_it_computes_and_stored_after(ran):
    rows = by_row(ran[0])
    for i in range(L):
        assert end(rows["load"][i]) <= rows["compute"][i]["ts"] + NS, i
        assert end(rows["compute"][i]) <= rows["store"][i]["ts"] + NS, i


def test_the_next_layer_is_loaded_while_one_computes(ran):
    rows = by_row(ran[0])
    for i in range(L - 1):
        load, compute = rows["load"][i + 1], rows["compute"][i]
        assert load["args"]["asked_us"] <= compute["ts"] + NS, f"layer {i + 1} was not asked for before layer {i} computed"
        assert load["ts"] < end(compute), f"layer {i + 1} was not being read while layer {i} computed"


def test_no_line_of_the_trace_has_bars_that_overlap(ran):
    lines = {}
    for event in ran[0]:
        if event["ph"] == "X":
            lines.setdefault(event["tid"], []).append(event)
    for events in lines.values():
        for before, after in itertools.pairwise(events):
            assert end(before) <= after["ts"] + NS


def test_the_picture_is_a_png_and_the_table_is_printed(ran):
    _, picture, out = ran
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.rstrip().endswith(b"IEND\xaeB`\x82")
    for text in ("total", "sum of load", "sum of compute", "sum of store", "overlap", "out.json", "out.png", f"{L} layers of 128 tokens"):
        assert text in out, text


@pytest.mark.skipif(module.torch.cuda.is_available(), reason="on a GPU the stand-in spins on the device")
def test_the_settings_reach_store_and_stand_in(monkeypatch):
    slept = []
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=slept.append, perf_counter_ns=module.time.perf_counter_ns))
    module.record(TimelineSettings(layers=3, tokens=64, read_ms=7, compute_ms=2))
    assert sorted(slept) == [0.002] * 3 + [0.007] * 3


# -- numbers of a timeline that is written down here


def made(*pieces):
    return Timeline(TimelineSettings(layers=2, tokens=64), "cpu", tuple(Piece(*p) for p in pieces))


def test_numbers_of_a_timeline():
    both = made(
        ("load", 0, 0, 10, 9), ("load", 1, 8, 20, 12), ("compute", 0, 10, 15, 5), ("compute", 1, 20, 30, 10), ("store", 1, 30, 31, 1)
    )
    assert both.total == 31 and both.work("load") == 21 and both.work("compute") == 15
    assert both.overlap == 5 / 20, "time that two loads share counts once"
    assert made(("load", 0, 0, 10, 10), ("compute", 0, 10, 20, 10)).overlap == 0
    lines = {e["args"]["layer"]: e["tid"] for e in trace_events(both) if e.get("cat") == "load"}
    assert lines[0] != lines[1], "loads that overlap are on two lines"


def test_the_title_says_total_and_sequence():
    figure = module.draw(made(("load", 0, 0, 7000, 6000), ("compute", 0, 7000, 9000, 2000)))
    (axis,) = figure.axes
    assert "9.0 ms" in axis.get_title() and "8.0 ms" in axis.get_title()
    assert [label.get_text() for label in axis.get_yticklabels()] == ["compute", "load", "store"]
    assert [text.get_text() for text in axis.texts] == ["0", "0"]


# -- what is refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--layers", 0), "layers"),
        (("--layers", "many"), "layers"),
        (("--tokens", 100), "whole chunks of 64"),
        (("--read-ms", -1), "read-ms"),
        (("--compute-ms", "nan"), "compute-ms"),
        (("--compute-ms", "inf"), "compute-ms"),
        (("--layers", 1000, "--tokens", 64000), "lower --layers"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_runs(tmp_path, qcap_command, monkeypatch, arguments, says):
    monkeypatch.setattr(module, "record", lambda settings: pytest.fail("it ran"))
    code, _, err = qcap_command("bench", "layerwise", "--trace", tmp_path / "out.json", *arguments)
    assert code == 2 and says in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_is_refused_before_anything_runs(tmp_path, qcap_command, monkeypatch):
    monkeypatch.setattr(module, "record", lambda settings: pytest.fail("it ran"))
    for path, says in ((tmp_path / "no" / "out.json", "no folder"), (tmp_path, "folder"), (tmp_path / "out.png", "another ending")):
        code, _, err = qcap_command("bench", "layerwise", "--trace", path)
        assert code == 2 and says in err and err.count("\n") == 1, path
    code, _, err = qcap_command("bench", "layerwise")
    assert code == 2 and "--trace" in err


def test_a_file_that_cannot_be_written_is_told(tmp_path, qcap_command, monkeypatch):
    (tmp_path / "out.json").symlink_to(tmp_path / "gone" / "out.json")
    code, _, err = qcap_command("bench", "layerwise", "--trace", tmp_path / "out.json", "--layers", 1, "--tokens", 64, "--read-ms", 0)
    assert code == 2 and "cannot be written" in err and err.count("\n") == 1


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, qcap_command, monkeypatch):
    monkeypatch.setattr(module, "record", lambda settings: pytest.fail("it ran"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = qcap_command("bench", "layerwise", "--trace", tmp_path / "out.json")
    assert code == 2 and "pip install 'qcap[notebook]'" in err
    assert list(tmp_path.iterdir()) == []


def test_wrong_rows_fail_the_run(monkeypatch):
    def nothing_arrives(self, layer, source, blocks):
        mark = self._marks.clock.mark()
        self._marks.put("copy", layer, mark, mark)

    monkeypatch.setattr(module._MarkedConnector, "to_device", nothing_arrives)
    with pytest.raises(module.QcapError, match="loaded is not what was there"):
        module.record(TimelineSettings(layers=2, tokens=64, read_ms=0, compute_ms=0))


def test_a_load_that_fails_is_told(monkeypatch):
    def gone(self, layer, out, chunks):
        raise OSError("the store has gone away")

    monkeypatch.setattr(module._SlowFetch, "_read", gone)
    with pytest.raises(module.QcapError, match="the store has gone away"):
        module.record(TimelineSettings(layers=2, tokens=64, read_ms=0, compute_ms=0))
