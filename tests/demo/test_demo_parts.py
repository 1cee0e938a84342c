"""The demo's parts that need no engine."""

from __future__ import annotations

import base64
import html as html_module
import io
import json
import math
import os
import re
import subprocess
import sys
import time
import types

import pytest
import torch
from demo_reports import analysed, good_report
from rich.console import Console

from qcap.demo import analyse, progress, run
from qcap.demo.fidelity import average, fidelity
from qcap.demo.html import page
from qcap.demo.prompts import TEXTS, prompt_ids, readable
from qcap.demo.report import problems, summary_table
from qcap.demo.settings import DemoSettings, find_model
from qcap.errors import CaptureEmpty, ConfigError, QcapError, ShapeError
from qcap.geometry import Geometry, Rope
from qcap.store.tiers import SequenceRecord


def settings(tmp_path, **more) -> DemoSettings:
    return DemoSettings(**{"out": str(tmp_path), "model": "/m", "model_name": "m", **more})


# -- fidelity


def test_fidelity_against_a_calculation_by_hand():
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.125, 0.625, 0.25]])
    found = fidelity(p.log() + 3.0, q.log() - 7.0)  # constants in a row of logits mean nothing
    assert found.same_top.tolist() == [False]
    assert float(found.kl[0]) == pytest.approx(0.5 * math.log(4) + 0.25 * math.log(0.4), abs=1e-6), (
        "the reference's own probabilities weigh"
    )
    assert float(fidelity(q.log(), p.log()).kl[0]) == pytest.approx(0.125 * math.log(0.25) + 0.625 * math.log(2.5), abs=1e-6)


def test_fidelity_of_equal_logits_is_exactly_zero_also_with_impossible_tokens():
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    logits[:, 7] = float("-inf")
    found = fidelity(logits, logits.clone())
    assert found.same_top.all() and torch.equal(found.kl, torch.zeros(5, dtype=torch.float64))
    shifted = fidelity(logits, logits + torch.arange(5.0)[:, None])
    assert shifted.same_top.all() and shifted.kl.max() < 1e-12


def test_average_is_over_positions_not_over_prompts():
    logits = torch.eye(4) * 9
    good, bad = fidelity(logits, logits), fidelity(logits[:1], logits[1:2])
    top1, kl = average([good, bad])
    assert top1 == pytest.approx(4 / 5) and kl == pytest.approx(float(bad.kl[0]) / 5)


@pytest.mark.parametrize("other", [torch.zeros(3, 4), torch.zeros(2, 5), torch.full((2, 4), float("nan"))])
def test_fidelity_refuses_what_cannot_be_compared(other):
    with pytest.raises(ShapeError):
        fidelity(torch.zeros(2, 4), other)
    with pytest.raises(ShapeError):
        fidelity(torch.zeros(0, 4), torch.zeros(0, 4))


# -- analyse


def record(ids, salt="", skipped=None):
    return SequenceRecord("m", "r", "e", salt, tuple(ids), 2, len(ids) - 1, 4, {}, skipped or {})


def test_captured_finds_sequences_by_their_ids_and_only_unsalted_ones():
    records = [record([1, 2, 3]), record([4, 5], salt="edit"), record([6, 7])]
    assert analyse.captured(records, [[6, 7], [1, 2, 3]]) == [records[2], records[0]]
    with pytest.raises(CaptureEmpty, match=r"\[1\]"):
        analyse.captured(records, [[1, 2, 3], [4, 5]])


def test_fraction_weighs_by_tokens_and_never_calls_nothing_complete():
    assert analyse.fraction([{"stored": 32, "whole": 32}, {"stored": 0, "whole": 96}]) == 0.25
    with pytest.raises(CaptureEmpty):
        analyse.fraction([{"stored": 0, "whole": 0}])


def test_skipped_adds_up_reasons_over_receipts():
    receipts = [
        record([1], skipped={"kv": {"ring-full": 2}}),
        record([2], skipped={"kv": {"ring-full": 1, "x": 0}, "query": {"partial": 4}}),
    ]
    assert analyse.skipped(receipts) == {"kv:ring-full": 3, "query:partial": 4}


@pytest.mark.parametrize(("tokens", "rows"), [(1, 0), (32, 0), (33, 32), (64, 32), (65, 64), (142, 128)])
def test_prompt_rows_leave_a_token_to_compute(tokens, rows):
    assert analyse.prompt_rows(tokens, 32) == rows


def test_edits_take_the_same_way_and_keep_whole_chunks_of_the_prompt(tmp_path):
    geometry = Geometry(
        model="m", layer_names=("a.0", "a.1"), num_q_heads=4, num_kv_heads=2, head_size=8, dtype="float32", block_size=4, chunk_size=4,
        rope=Rope(rotary_dim=8, max_position=512), scale=8**-0.5,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    kv, query = torch.randn(2, 2, 88, 16, generator=generator), torch.randn(1, 2, 88, 32, generator=generator)
    prompt = list(range(1000, 1090))
    made = analyse.make_edits(settings(tmp_path, keep=0.5), kv, query, prompt, geometry)
    assert list(made) == ["full", "snapkv", "random"]
    whole, index = made["full"]
    assert torch.equal(whole.tensor, kv) and index == list(range(88)) and whole.prompt() == prompt
    for name in ("snapkv", "random"):
        edit, index = made[name]
        assert len(index) == 44 and len(edit.token_ids) % 4 == 0 and sorted(set(index)) == index
        assert edit.prompt() == [prompt[i] for i in index] + prompt[88:]
        assert edit.positions == tuple(range(44)), "renumbered, so that an engine takes them"
        assert torch.equal(edit.tensor[1], kv[1][:, index]), "values carry no position"
        assert not torch.equal(edit.tensor[0], kv[0][:, index]), "keys are rotated to where they now stand"
    assert made["snapkv"][1] != made["random"][1]
    assert len({edit.salt for edit, _ in made.values()}) == 3


# -- prompts


class Words:
    """A tokenizer of words."""

    eos_token_id = 7

    def __call__(self, text):
        return {"input_ids": [len(word) for word in text.split()]}

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(map(str, ids)) + " "


def test_prompts_grow_and_early_facts_come_early():
    sizes = [len(prompt_ids(Words(), text)) for _, text in TEXTS]
    assert sizes == sorted(sizes) and sizes[0] > 80 and sizes[-1] > 400
    assert len({name for name, _ in TEXTS}) == len(TEXTS) == 3
    for (_, text), fact in zip(TEXTS, ("strongest hive is yellow", "left engine loses oil", "brass clock"), strict=True):
        assert 0 <= text.index(fact) < len(text) / 2, fact


def test_readable_ends_at_the_end_of_sequence_token():
    assert readable(Words(), [1, 2, 7, 3]) == "1 2" and readable(Words(), [1, 2]) == "1 2"


# -- settings


def test_settings_survive_their_file(tmp_path):
    made = settings(tmp_path, new_tokens=3, keep=0.25)
    assert DemoSettings.read(made.write()) == made
    made.put("capture", {"text": "ü"})
    assert made.get("capture") == {"text": "ü"}
    with pytest.raises(QcapError, match=r"qcap\.demo\.resume"):
        made.get("resume")


@pytest.mark.parametrize("wrong", [{"keep": 0.0}, {"keep": 1.0}, {"new_tokens": 0}, {"step_tokens": 16}])
def test_settings_are_checked_at_birth(tmp_path, wrong):
    with pytest.raises(ConfigError):
        settings(tmp_path, **wrong)


def test_find_model_wants_a_folder_with_a_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match="neither"):
        find_model(str(tmp_path), "float32")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer"):
        find_model(str(tmp_path), "float32")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert find_model(str(tmp_path), "float32") == (tmp_path, tmp_path.name)


# -- the parent


def test_an_old_store_is_cleared_and_nothing_else(tmp_path):
    made = settings(tmp_path)
    (made.store_folder / "objects").mkdir(parents=True)
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "report.json").write_text("old")
    run._clear(made)
    assert not made.store_folder.exists() and (tmp_path / "mine.txt").exists() and not (tmp_path / "report.json").exists()


def test_a_folder_that_is_no_store_is_left_alone(tmp_path):
    made = settings(tmp_path)
    made.store_folder.mkdir(parents=True)
    (made.store_folder / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="--out"):
        run._clear(made)
    assert (made.store_folder / "thesis.txt").exists()


def test_a_stage_that_fails_is_told_with_its_reason_and_its_log(tmp_path):
    made = settings(tmp_path)
    path, console = made.write(), Console(file=io.StringIO())
    with (
        run._progress(console) as shown,
        pytest.raises(run.DemoFailed, match=r"analyse.*ended with code 1.*capture\.json is not there.*analyse\.log"),
    ):
        (tmp_path / "work" / "capture.json").unlink(missing_ok=True)
        run._run_stage("analyse", path, made, console, shown, shown.add_task("analyse", now=""))
    assert "opening the store" in console.file.getvalue(), "plain lines where there is no terminal"


SLOW = """
import os, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
os.write(int(os.environ["QCAP_DEMO_PROGRESS_FD"]), b'{"text": "slow"}\\n')
time.sleep(300)
"""


@pytest.mark.timeout(60)
def test_an_interrupt_ends_the_stage_that_says_nothing_and_takes_away_what_it_made(tmp_path, monkeypatch):
    made, pid_file, real = settings(tmp_path / "out"), tmp_path / "pid", subprocess.Popen
    monkeypatch.setattr(run.subprocess, "Popen", lambda command, **how: real([sys.executable, "-c", SLOW, str(pid_file)], **how))

    def interrupt(seconds):
        time.sleep(0.02)
        if pid_file.exists() and console.file.getvalue():  # its line has been read: the listener waits for the next one
            (made.store_folder / "objects").mkdir(parents=True)
            raise KeyboardInterrupt

    monkeypatch.setattr(run, "time", types.SimpleNamespace(sleep=interrupt, monotonic=time.monotonic))
    console = Console(file=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        run.run(made, console)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert [p for p in (tmp_path / "out").rglob("*") if p.is_file()] == [] and not made.store_folder.exists()


def test_reporter_writes_lines_that_the_parent_understands():
    read_fd, write_fd = os.pipe()
    program = (
        "from qcap.demo.progress import Reporter\nr = Reporter(10)\nr.step(0, 'begin')\nr.step(4)\n"
        "bar = r.bar(6, 'requests')\n"
        "other = bar(total=2, desc='Rendering prompts'); other.update(2); other.close()\n"
        "b = bar(total=2, desc='Processed prompts', dynamic_ncols=True, postfix='')\nb.update(1); b.update(1); b.close()\n"
    )
    env = {**os.environ, progress.LISTENER: str(write_fd)}
    subprocess.run([sys.executable, "-c", program], env=env, pass_fds=(write_fd,), check=True, timeout=120)
    os.close(write_fd)
    heard = run._Heard()
    with os.fdopen(read_fd) as stream:
        heard.listen(stream)
    assert (heard.total, heard.done, heard.text, heard.error) == (10, 10.0, "requests", "")


def test_reporter_without_a_listener_is_silent(monkeypatch, capfd):
    monkeypatch.delenv(progress.LISTENER, raising=False)
    progress.Reporter(3).step(1, "x")
    assert capfd.readouterr() == ("", "")


# -- the report


def test_a_good_report_has_no_problems():
    assert problems(good_report()) == []


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda r: r["coverage"].update(query=0.5), "coverage of query is 50.00%"),
        (lambda r: r["skipped"].update({"kv:ring-full": 3}), "kv:ring-full 3"),
        (lambda r: r["policies"]["snapkv"].update(loaded_tokens=[0]), "'snapkv'"),
        (lambda r: r["reference"].update(loaded_tokens=[32]), "reference"),
        (lambda r: r["policies"]["full"].update(same_tokens_as_capture=False), "other tokens"),
        (lambda r: r.update(analysed_without_vllm=False), "imported vLLM"),
    ],
)
def test_each_problem_is_named(spoil, said):
    report = good_report()
    spoil(report)
    (problem,) = problems(report)
    assert said in problem


def test_the_page_is_one_file_and_escapes_what_models_say():
    png = b"\x89PNG not really"
    text = page(good_report(), {"analyse": analysed()}, {"attention-one.png": png})
    assert base64.b64encode(png).decode() in text
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)|@import|url\(|<script|<link""", text), "something is loaded from elsewhere"
    assert "captured &lt;text&gt;" in text and "captured <text>" not in text and "text of full <b>" not in text
    blocks = re.findall(r'<div class="tokens">(.*?)</div>', text, re.S)
    assert len(blocks) == 2
    for block in blocks:
        assert html_module.unescape(re.sub(r"</?span[^>]*>", "", block)) == "".join(f"<{i}>" for i in range(70)), "no token is lost"
    assert re.findall(r'<span class="(\w)">', blocks[0])[:4] == ["k", "g", "k", "g"]
    assert re.findall(r'<span class="(\w)">', blocks[1]) == ["k", "g", "r"]


def test_a_share_that_was_rounded_down_says_so():
    report = good_report()
    args = {"analyse": analysed()}, {"attention-one.png": b""}
    assert "rounded down" not in page(report, *args)
    report["policies"]["snapkv"]["kept"] = 0.455
    assert "45.5%" in page(report, *args) and page(report, *args).count("50% asked for, rounded down to whole chunks") == 1
    console = Console(file=io.StringIO(), width=200)
    console.print(summary_table(report))
    assert "rounded down to whole chunks" in " ".join(console.file.getvalue().split())


def test_generated_text_never_leaves_its_box():
    text = page(good_report(), {"analyse": analysed()}, {"attention-one.png": b""})
    for box in ("td", r"\.tokens", r"\.tile"):
        assert re.search(rf"^{box}\b[^\n]*overflow-wrap: anywhere", text, re.M), box


def test_the_table_shows_all_three_texts_and_figures():
    console = Console(file=io.StringIO(), width=200)
    console.print(summary_table(good_report()))
    shown = console.file.getvalue()
    for text in ("full", "snapkv", "random", "text of full [bold]", "90.0%", "50.0%", "0.25", "1.5", "kv 100%, query 100%", "nothing"):
        assert text in shown, text


def test_the_second_stage_does_not_need_vllm():
    program = "import sys; sys.modules['vllm'] = None; import qcap.demo.analyse, qcap.demo.run; assert sys.modules['vllm'] is None"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_reports_are_plain_json():
    assert json.loads(json.dumps(good_report())) == good_report()
