"""The commands that look at a store, against a small one; no engine."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import qcap
from qcap.backends import open_backend
from qcap.cli import _print_table
from qcap.demo.run import DemoFailed
from qcap.errors import ModelNotFound, StoreUnavailable
from qcap.store.tiers import SequenceRecord
from qcap.tokens import ChunkedTokenDatabase, chunk_key


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def parsed(result):
    code, out, _ = result
    return code, json.loads(out)


# -- ls


def test_ls_lists_models_and_sequences(small_store, qcap_command):
    code, out, err = qcap_command("ls", small_store.url)
    assert (code, err) == (0, "")
    for text in ("9 objects", "org/tiny", "kv, query", "req-whole", "kv 3/3, query 3/3", "kv 2/2, query 1/2", "query:ring-full 1"):
        assert text in out, text
    assert "req-[red]holed" in out, "what a store holds is not read as markup"


def test_ls_where_no_request_has_ended(store_cut_off, qcap_command):  # its engine was killed, say
    _, out, _ = qcap_command("ls", store_cut_off.url)
    assert "3 objects" in out and "No request has ended here" in out and "retrieve(token_ids)" in out


def test_the_package_is_the_command_line(small_store):
    done = subprocess.run([sys.executable, "-m", "qcap", "ls", small_store.url], check=False, capture_output=True, text=True)
    assert done.returncode == 0 and "req-whole" in done.stdout, done.stderr


def test_ls_json(small_store, qcap_command):
    code, found = parsed(qcap_command("ls", small_store.url, "--json"))
    assert code == 0
    assert found["objects"] == len(small_store.objects()) == 9
    assert found["bytes"] == sum(p.stat().st_size for p in small_store.objects())
    (model,) = found["models"]
    assert model["kinds"] == ["kv", "query"] and model["layers"] == 2 and model["chunk_size"] == 4 and model["sequences"] == 2
    assert model["query_heads"] == 4 and model["kv_heads"] == 2 and model["head_size"] == 8 and model["dtype"] == "float32"
    assert [s["request_id"] for s in found["sequences"]] == ["req-whole", "req-[red]holed"]
    assert found["sequences"][0]["tokens"] == 14 and found["sequences"][0]["computed_tokens"] == 13


def test_ls_limit_lists_the_newest(small_store, qcap_command):
    _, out, _ = qcap_command("ls", small_store.url, "--limit", 1)
    assert "req-[red]holed" in out and "req-whole" not in out and "1 of 2" in out


def test_ls_of_a_store_that_is_not_there_makes_none(tmp_path, qcap_command):
    code, out, _ = qcap_command("ls", tmp_path / "nothing")
    assert code == 1 and "nothing of qcap" in out and "does not exist" in out
    assert not (tmp_path / "nothing").exists()
    code, found = parsed(qcap_command("ls", tmp_path / "nothing", "--json"))
    assert code == 1 and found["models"] == []
    (tmp_path / "bare").mkdir()
    code, out, _ = qcap_command("ls", tmp_path / "bare")
    assert code == 0 and "nothing of qcap" in out and "exists" in out


# -- show


def test_show_asks_the_store_for_each_chunk(small_store, qcap_command):
    code, found = parsed(qcap_command("show", small_store.url, "--request", "req-[red]holed", "--json"))
    assert code == 0
    assert found["tokens"] == 10 and found["prompt_tokens"] == 6 and found["salt"] == "" and found["token_ids"] == list(range(200, 210))
    assert found["coverage"]["kv"]["chunks"] == [True, True] and found["coverage"]["kv"]["fraction"] == 1.0
    query = found["coverage"]["query"]
    assert query["chunks"] == [False, True] and query["fraction"] == 0.5 and query["holes"] == [0] and query["prefix_tokens"] == 0
    assert found["skipped"] == {"query": {"ring-full": 1}}
    small_store.objects()[0].unlink()  # a receipt may promise what is no longer there
    everything = [parsed(qcap_command("show", small_store.url, "-r", i, "--json"))[1] for i in (0, 1)]
    assert sum(sum(c["chunks"]) for s in everything for c in s["coverage"].values()) == 8


def test_show_by_number_id_and_from_the_end(small_store, qcap_command):
    by = {r: parsed(qcap_command("show", small_store.url, "-r", r, "--json"))[1]["request_id"] for r in ("0", "req-whole", "1", "-1", "-2")}
    assert by == {"0": "req-whole", "req-whole": "req-whole", "1": "req-[red]holed", "-1": "req-[red]holed", "-2": "req-whole"}


def test_show_in_words(small_store, qcap_command):
    code, out, _ = qcap_command("show", small_store.url, "-r", 1)
    assert code == 0
    stored = ("8 of 8 whole-chunk tokens stored (100%)", "4 of 8 whole-chunk tokens stored (50%)")
    for text in ("10: 6 prompt, 4 generated", *stored, "██", "·█", "ring-full"):
        assert text in out, text


def test_show_without_a_request_lists_them(small_store, qcap_command):
    code, out, _ = qcap_command("show", small_store.url)
    assert code == 0 and "req-whole" in out and "--request" in out
    assert len(parsed(qcap_command("show", small_store.url, "--json"))[1]["sequences"]) == 2


@pytest.mark.parametrize("request_id", ["2", "-3", "req", "nonsense"])
def test_show_of_an_unknown_request_is_one_line(small_store, qcap_command, request_id):
    code, out, err = qcap_command("show", small_store.url, "--request", request_id)
    assert code == 2 and not out
    assert err.count("\n") == 1 and err.startswith("qcap: ") and repr(request_id) in err and "qcap ls" in err


def test_show_of_an_unknown_model(small_store, qcap_command):
    code, _, err = qcap_command("show", small_store.url, "--model", "org/other")
    assert code == 2 and "org/other" in err


def test_show_with_a_tokenizer_gives_the_text(small_store, qcap_command, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(300)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0").save_pretrained(tmp_path / "tok")
    _, found = parsed(qcap_command("show", small_store.url, "-r", 0, "--tokenizer", tmp_path / "tok", "--json"))
    assert found["text"]["prompt"].split() == [f"w{i}" for i in range(100, 108)]
    assert found["text"]["generated"].split() == [f"w{i}" for i in range(108, 114)]
    code, _, err = qcap_command("show", small_store.url, "-r", 0, "--tokenizer", tmp_path / "missing")
    assert code == 2 and "is not a folder" in err


# -- verify


def test_verify_of_a_sound_store(small_store, qcap_command):
    code, found = parsed(qcap_command("verify", small_store.url, "--json"))
    assert code == 0 and found["ok"] and found["objects"] == 9 and found["bad"] == [] and found["sequences"] == 2
    code, out, _ = qcap_command("verify", small_store.url)
    assert code == 0 and "all sound" in out


def test_verify_names_what_is_damaged_and_ends_with_1(small_store, qcap_command):
    victim = small_store.objects()[3]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    code, found = parsed(qcap_command("verify", small_store.url, "--json"))
    assert code == 1 and not found["ok"]
    (bad,) = found["bad"]
    assert Path(bad["path"]).name == victim.name and "checksum" in bad["reason"]
    code, out, _ = qcap_command("verify", small_store.url)
    assert code == 1 and "1 bad" in out and "checksum" in out


def test_verify_of_an_edit_that_is_not_whole(small_store, qcap_command):
    with qcap.connect(small_store.url) as kv:
        assert kv.store(torch.zeros(kv.shape_of(12)), list(range(12)), salt="my-edit")
    before = set(small_store.objects())
    code, found = parsed(qcap_command("verify", small_store.url, "--json"))
    assert code == 0 and found["broken_edits"] == []
    key = chunk_key(kv.kind, kv.geometry, ChunkedTokenDatabase(4).chunks(list(range(12)))[2].digest, "my-edit")
    (victim,) = [path for path in before if path.stem == key.fingerprint()]
    victim.write_bytes(victim.read_bytes()[:-1])
    code, out, _ = qcap_command("verify", small_store.url, "--delete")
    assert code == 1 and "1 bad, 1 edits not whole" in out and "my-edit" in out and not victim.exists()
    for _ in range(2):  # and again, after the deletion
        code, found = parsed(qcap_command("verify", small_store.url, "--json", "--delete"))
        (edit,) = found["broken_edits"]
        assert code == 1 and not found["ok"] and found["bad"] == []
        assert edit["salt"] == "my-edit" and edit["reason"].startswith("chunk 2 (tokens 8..11) of 3: not there. Store the edit again")


def test_verify_of_objects_that_nothing_can_connect_to(small_store, qcap_command):
    for path in (small_store.folder / "models").rglob("*.json"):
        path.unlink()
    code, found = parsed(qcap_command("verify", small_store.url, "--json"))
    assert code == 1 and not found["ok"] and found["bad"] == [] and sum(found["unlisted"].values()) == found["objects"] == 9
    code, out, _ = qcap_command("verify", small_store.url)
    assert code == 1 and "9 without a manifest" in out and "no manifest, so nothing can connect" in out and "sound" not in out
    with pytest.raises(ModelNotFound, match="has objects or receipts, but no manifest"):
        qcap.connect(small_store.url)


@pytest.mark.parametrize(("name", "said"), [("nothing", "does not exist"), ("bare", "exists; is it the one")])
def test_verify_of_no_store_is_not_sound(tmp_path, qcap_command, name, said):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "thesis.txt").write_text("mine")
    code, out, _ = qcap_command("verify", tmp_path / name)
    assert code == 1 and "nothing of qcap" in out and said in out and "sound" not in out
    code, out, err = qcap_command("verify", tmp_path / name, "--json")
    found = json.loads(out)
    assert code == 1 and not found["ok"] and found["empty"] and said in err
    assert not (tmp_path / "nothing").exists()


def test_an_interrupted_demo_says_one_line_and_ends_with_130(monkeypatch, tmp_path, qcap_command):
    def interrupted(settings, console):
        raise KeyboardInterrupt

    monkeypatch.setattr("qcap.demo.settings.find_model", lambda model, dtype: (tmp_path, "m"))
    monkeypatch.setattr("qcap.demo.run.run", interrupted)
    code, out, err = qcap_command("demo", "--out", tmp_path / "out")
    assert (code, out) == (130, "") and err == "interrupted; nothing of this run is kept\n"


# -- edits


def test_ls_lists_stored_edits(store_with_edits, qcap_command):
    code, found = parsed(qcap_command("ls", store_with_edits.url, "--json"))
    assert code == 0 and found["objects"] == 13
    assert found["edits"] == [
        {"model": "org/tiny", "kind": "kv", "salt": "half-1", "edit": "snapkv", "tokens": 8, "chunks": 2},
        {"model": "org/tiny", "kind": "kv", "salt": "red\x1b[31m", "edit": "by hand", "tokens": 4, "chunks": 1},
    ], "a tenant's chunks are what an engine computed"
    code, out, _ = qcap_command("ls", store_with_edits.url)
    assert code == 0 and "half-1" in out and "snapkv" in out and "tenant" not in out
    assert parsed(qcap_command("ls", store_with_edits.url, "--json", "--model", "other"))[1]["edits"] == []
    assert parsed(qcap_command("ls", store_with_edits.url, "--json", "--no-edits"))[1]["edits"] == []


def test_ls_says_that_objects_cannot_be_read(store_with_edits, qcap_command):
    for path in store_with_edits.objects():
        if b'"salt":"half-1"' in path.read_bytes():
            path.write_bytes(path.read_bytes()[:200])
    code, out, _ = qcap_command("ls", store_with_edits.url)
    assert code == 0 and "half-1" not in out and "2 objects cannot be read" in out and "qcap verify" in out


# -- what a store holds may not steer the terminal, and can be copied


def test_nothing_steers_the_terminal(store_with_edits, qcap_command):
    backend = open_backend(store_with_edits.url)
    name = "a\x1b]0;x\x07\nb\x9b31m\u202e"
    backend.put_sequence(SequenceRecord("org/tiny", name, "e", "s\x1b[31m", (1, 2, 3, 4, 5), 2, 4, 4, {"kv": ()}))
    backend.close()
    for command in (("ls",), ("ls", "--json"), ("show", "-r", "0"), ("show", "-r", "0", "--json"), ("show",)):
        code, out, err = qcap_command(command[0], store_with_edits.url, *command[1:])
        assert code == 0 and not err
        assert out.replace("\n", "").isprintable(), command
        assert "s\\x1b[31m" in out or '"s\\u001b[31m"' in out, command
    code, _, err = qcap_command("show", store_with_edits.url, "-r", "x\x1b[31m")
    assert code == 2 and err.replace("\n", "").isprintable()


LONG_SALT, LONG_MODEL = "tenant-" + "0123456789" * 12, "/models/" + "some-folder/" * 9 + "m"


@pytest.fixture
def long_names(small_store):
    backend = open_backend(small_store.url)
    backend.put_sequence(SequenceRecord(LONG_MODEL, "req-long", "e", LONG_SALT, (1, 2, 3, 4, 5), 2, 4, 4, {"kv": (0,)}))
    backend.close()
    return small_store


@pytest.mark.parametrize("columns", ["80", "40"])
def test_what_is_piped_is_complete(long_names, qcap_command, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    for command in ("ls", "show"):
        _, out, _ = qcap_command(command, long_names.url)
        (line,) = [line for line in out.splitlines() if "req-long" in line]
        assert LONG_SALT in line and LONG_MODEL in line
    _, out, _ = qcap_command("show", long_names.url, "-r", "req-long")
    assert LONG_SALT in out and LONG_MODEL in out


def test_a_narrow_terminal_gets_a_line_a_cell():
    def printed(width):
        console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        _print_table(console, "sequences", ("#", "salt", "skipped", "model"), [(0, LONG_SALT, "", "[b]m\x1b"), (1, "s", "x 1", "m")])
        return console.file.getvalue()

    narrow = printed(80).splitlines()
    assert narrow == [
        "sequences", "#        0", f"  salt     {LONG_SALT}", "  model    [b]m\\x1b", "#        1", "  salt     s",
        "  skipped  x 1", "  model    m",
    ]  # fmt: skip
    assert "│" in printed(200) and LONG_SALT in printed(200)


def test_show_of_less_than_a_chunk_is_not_complete(small_store, qcap_command):
    backend = open_backend(small_store.url)
    backend.put_sequence(SequenceRecord("org/tiny", "req-short", "e", "", (1, 2, 3), 2, 2, 4))
    backend.close()
    code, out, _ = qcap_command("show", small_store.url, "-r", "req-short")
    assert code == 0 and "%" not in out and "kv: no whole chunk of 4 in 2 computed tokens, so nothing of them can be stored" in out


def test_demo_into_a_folder_that_cannot_be_written(tmp_path, qcap_command, monkeypatch):
    import qcap.demo.settings

    monkeypatch.setattr(qcap.demo.settings, "find_model", lambda model, dtype: (tmp_path, "m"))
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below", "/proc/x"):
        code, _, err = qcap_command("demo", "--out", out)
        assert code == 2 and err.count("\n") == 1 and f"qcap: {out} cannot be written to" in err and "another folder with --out" in err


def test_a_store_out_of_reach_says_what_to_try(small_store, qcap_command, monkeypatch):
    from qcap.store.buckets import LocalBucket

    def refuses(self, prefix):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalBucket, "list", refuses)
    with pytest.raises(StoreUnavailable, match=f"PermissionError: .*`qcap doctor --store {small_store.url}` tries to write and to read"):
        open_backend(small_store.url).manifests()
    code, _, err = qcap_command("ls", small_store.url)
    assert code == 2 and err.startswith("qcap: ") and err.count("\n") == 1 and "see to the permissions" in err


# -- doctor


def test_doctor_checks_a_store_and_leaves_it_as_it_was(small_store, qcap_command, without_vllm):
    before = sorted(p.relative_to(small_store.folder) for p in small_store.folder.rglob("*") if p.is_file())
    code, found = parsed(qcap_command("doctor", "--store", small_store.url, "--json"))
    assert code == 0 and found["ok"]
    findings = {f["name"]: f for f in found["findings"]}
    assert findings[f"store {small_store.url}"]["status"] == "ok" and "9 objects" in findings[f"store {small_store.url}"]["found"]
    assert sorted(p.relative_to(small_store.folder) for p in small_store.folder.rglob("*") if p.is_file()) == before
    for name in ("qcap", "torch", "triton", "transformers", "page layouts"):
        assert findings[name]["found"], name
    assert "BH(Kt,V)" in findings["page layouts"]["found"] and "2BNHD" in findings["page layouts"]["found"]


def test_doctor_of_a_store_that_cannot_be_written(tmp_path, qcap_command, without_vllm):
    (tmp_path / "file").write_text("not a folder")
    code, found = parsed(qcap_command("doctor", "--store", (tmp_path / "file").as_uri(), "--json"))
    assert code == 1 and not found["ok"]
    (bad,) = [f for f in found["findings"] if f["status"] == "bad"]
    assert bad["name"].startswith("store") and bad["next_step"]


@pytest.fixture
def without_vllm(monkeypatch):
    """As on a machine where vLLM was never installed."""
    from qcap import doctor

    installed = doctor._installed
    monkeypatch.setattr(doctor, "_installed", lambda name: "" if name.startswith("vllm") else installed(name))


def test_doctor_without_vllm_says_so_and_what_to_do(qcap_command, without_vllm):
    code, found = parsed(qcap_command("doctor", "--json"))
    assert code == 0
    (vllm,) = [f for f in found["findings"] if f["name"] == "vLLM"]
    assert vllm["status"] == "missing" and "pip install" in vllm["next_step"]
    code, out, _ = qcap_command("doctor")
    assert code == 0 and "not installed" in out


@pytest.mark.parametrize(("installed", "status"), [("0.19.1", "bad"), ("0.20.0", "ok"), ("0.32.0+cpu", "ok"), ("0.33.0", "bad")])
def test_doctor_knows_which_vllm_it_was_made_for(monkeypatch, installed, status):
    from qcap import doctor

    monkeypatch.setattr(doctor, "_installed", lambda name: installed if name == "vllm" else "")
    assert next(doctor._vllm()).status.value == status


@pytest.mark.vllm
def test_doctor_looks_at_the_attention_backends(tmp_path):
    pytest.importorskip("vllm")
    done = subprocess.run([sys.executable, "-m", "qcap.cli", "doctor", "--json"], capture_output=True, text=True, timeout=300, check=False)
    findings = {f["name"]: f for f in json.loads(done.stdout[done.stdout.index("{") :])["findings"]}
    assert findings["vLLM"]["status"] == "ok"
    good = [name for name, f in findings.items() if name.startswith("backend ") and f["status"] == "ok"]
    assert good and (good == ["backend CPU"] or "backend CPU" not in good), "only what runs on this machine's device is good here"


# -- errors, version


def test_an_error_is_one_line_and_code_2(qcap_command):
    code, out, err = qcap_command("ls", "fiel:///data")
    assert code == 2 and not out and err.startswith("qcap: ") and err.count("\n") == 1 and "'file'" in err and "Traceback" not in err


def test_debug_shows_where_it_came_from(qcap_command):
    code, _, err = qcap_command("ls", "fiel:///data", "--debug")
    assert code == 2 and "Traceback" in err and "qcap: " in err


def test_a_wrong_option_is_told(qcap_command, small_store):
    code, _, err = qcap_command("ls", small_store.url, "--jsn")
    assert code == 2 and "--jsn" in err


def test_version(qcap_command):
    assert qcap_command("--version") == (0, f"qcap {qcap.__version__}\n", "")


def test_a_failed_demo_ends_with_1(qcap_command, monkeypatch, tmp_path):
    import qcap.demo.run
    import qcap.demo.settings

    def fail(settings, console):
        raise DemoFailed("coverage of kv is 50.00%")

    monkeypatch.setattr(qcap.demo.run, "run", fail)
    monkeypatch.setattr(qcap.demo.settings, "find_model", lambda model, dtype: (tmp_path, "m"))
    code, _, err = qcap_command("demo", "--out", tmp_path)
    assert code == 1 and err == "qcap: coverage of kv is 50.00%\n"


def test_help_names_every_command(qcap_command):
    code, out, _ = qcap_command("--help")
    assert code == 0
    for name in ("ls", "show", "verify", "doctor", "demo"):
        assert f"\n  {name} " in out, name


def test_looking_at_a_store_loads_no_engine(small_store):
    program = (
        "import sys\nfrom qcap.cli import main\n"
        f"try:\n    main(['ls', {small_store.url!r}])\nexcept SystemExit as e:\n    assert not e.code, e.code\n"
        "assert not {'vllm', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
