"""The benchmarks' own logic, as far as it needs no GPU: what is registered, what a row shows, and whether the ways that are compared copy
what they should."""

import ctypes
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import bench_to_host, cudart, engine, harness, layerwise, ncu, peer_lmcache  # noqa: E402
from benchmarks.__main__ import table_of  # noqa: E402
from qcap import kernels  # noqa: E402

ROW = harness.Row(
    op="x",
    shape="y",
    us_p20=1.0,
    us_p50=2.0,
    us_p80=3.0,
    nbytes=4,
    gb_s=5.0,
    share=0.5,
    share_of_same_copy=None,
    clock="host",
    rate="device",
    host_waits=0,
    floor_us=None,
    floor_name="",
    over_floor_us=None,
    peer="",
    peer_us_p20=None,
    peer_us_p50=None,
    peer_us_p80=None,
    peer_host_waits=None,
    ratio=None,
    copy_rates={"device": 1.23456789},
    commit="c",
    device="d",
    torch="t",
    cuda="u",
    triton="v",
)


def printed(rows, failed=()):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table_of(list(rows), list(failed), "title"))
    return capture.get()


def test_every_benchmark_registers_and_its_tests_exist():
    harness.load_all()
    files = {path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert set(harness.REGISTRY) == files
    for op, bench in harness.REGISTRY.items():
        named = [argument for argument in bench.tests if argument.endswith(".py")]
        assert named and all((ROOT / path).is_file() for path in named), f"{op}: {bench.tests}"


def test_a_generator_may_take_the_context():
    context = harness.Context("lmcache", {"device": 2.0})
    case = harness.Case("x", "y", lambda: None, 8)
    assert list(harness.Bench(lambda: iter([case]), ()).of(context)) == [case]
    (got,) = harness.Bench(lambda ctx: iter([replace(case, peer_name=ctx.vs, floor=ctx.copy_us(8000))]), ()).of(context)
    assert (got.peer_name, got.floor) == ("lmcache", 4.0)


def test_columns_of_what_no_row_has_are_left_out():
    plain = printed([ROW])
    assert all(name not in plain for name in ("floor", "host waits", "peer", "same size"))
    assert "host waits" in printed([replace(ROW, host_waits=2)])
    full = printed(
        [
            ROW,
            replace(ROW, peer="them 1", peer_us_p50=9.0, peer_host_waits=16, ratio=4.5, floor_us=1.5, floor_name="copy", over_floor_us=0.5),
        ],
        ["broken"],
    )
    for text in ("4.50x", "them 1", "16", "1.5 copy", "+0.5", "broken", "tests failed"):
        assert text in full


def test_a_row_is_a_line_of_json():
    line = harness.to_json(ROW)
    assert "\n" not in line
    assert json.loads(line)["copy_rates"] == {"device": 1.2346} and json.loads(line)["us_p50"] == 2.0


def test_percentiles_of_few_values():
    assert harness.spread([1.0]) == (1.0, 1.0, 1.0)
    assert harness.spread([float(i) for i in range(10)]) == (2.0, 5.0, 8.0)


def test_ncu_output_is_split_into_cases():
    metrics = ",".join(f'"{metric}"' for metric in ncu.METRICS)
    output = "\n".join(
        [
            "==PROF== Connected to process 1",
            "case\t0\t100\tsmall, with a comma",
            "case\t1\t200\tlarge",
            "==PROF== Disconnected from process 1",
            f'"ID","Kernel Name",{metrics}',
            '"","","byte","byte","ns"',
            '"0","spin_kernel(long)","0","0","1"',
            '"1","row_scatter_kernel","1,024","512","2000"',
            '"2","spin_kernel(long)","0","0","1"',
            '"3","a","1","2","3"',
            '"4","b","4","5","6"',
        ]
    )
    cases, launched = ncu.parse(output)
    assert cases == [(100, "small, with a comma"), (200, "large")]
    assert [[list(kernel.values()) for kernel in of_case] for of_case in launched] == [[[1024, 512, 2000]], [[1, 2, 3], [4, 5, 6]]]


def test_summary_says_how_much_slower_than_off():
    figures = {("ttft 8 ms", "off"): [100.0, 90.0, 110.0], ("ttft 8 ms", "both"): [103.0], ("decode tok/s", "both"): [99.0]}
    figures[("decode tok/s", "off")] = [100.0]
    figures[("ttft 9 ms", "off")], figures[("ttft 9 ms", "off again")], figures[("ttft 9 ms", "both")] = [100.0], [102.0], [104.03]
    rows = {(row["measure"], row["config"]): row for row in engine.summary(figures, {"commit": "c"})}
    assert rows["ttft 8 ms", "both"]["slower_pct"] == pytest.approx(3.0)
    assert rows["ttft 9 ms", "off again"]["slower_pct"] == pytest.approx(2.0) and rows["ttft 9 ms", "both"]["slower_pct"] == pytest.approx(
        3.0
    )
    assert rows["decode tok/s", "both"]["slower_pct"] == pytest.approx(100 / 99 * 100 - 100)
    assert rows["ttft 8 ms", "off"]["slower_pct"] is None and rows["ttft 8 ms", "off"]["commit"] == "c"


class FakeCopies:
    """What ``cudart.Copies`` does, on host memory."""

    def __init__(self, targets, sources, nbytes, *, to_host):
        self._pairs, self._nbytes = list(zip(targets.tolist(), sources.tolist(), strict=True)), nbytes

    def one_by_one(self, stream):
        for target, source in self._pairs:
            ctypes.memmove(target, source, self._nbytes)

    batch = one_by_one


@pytest.fixture(params=["NHD", "K|V"])
def small(request, monkeypatch):
    """A small setting in host memory."""
    layers, heads, size, n, chunk, blocks = 3, 2, 8, 4, 16, 24
    sizes = {"LAYERS": layers, "HEADS": heads, "SIZE": size, "N": n, "CHUNK": chunk, "BLOCKS": blocks, "TOKENS": 64}
    for name, value in sizes.items():
        monkeypatch.setattr(bench_to_host, name, value)
    monkeypatch.setattr(cudart, "Copies", FakeCopies)
    monkeypatch.setattr(cudart, "why_no_batches", lambda: "")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    views = []
    for _ in range(layers):
        if request.param == "NHD":
            t = torch.randn(blocks, 2, n, heads, size)
            views.append([t[:, 0].transpose(1, 2), t[:, 1].transpose(1, 2)])
        else:
            t = torch.randn(blocks, heads, n, 2 * size)
            views.append([t[..., :size], t[..., size:]])
    host_ids = torch.randperm(blocks)[: 64 // n]
    shape = (2, layers, chunk, heads * size)
    ids = list(host_ids.split(chunk // n))
    objects, slots = [torch.empty(shape) for _ in ids], [torch.empty(shape) for _ in range(2)]
    return bench_to_host.Setting(request.param, views, kernels.PageTable(views), host_ids, ids, objects, slots, [None, None])


def test_all_ways_to_and_from_the_host_copy_the_same(small):
    to_host, from_host = list(bench_to_host.to_host_ways(small)), list(bench_to_host.from_host_ways(small))
    assert len(to_host) == len(from_host) == (7 if small.layout == "NHD" else 4)
    for _, run in to_host:
        bench_to_host.check_to_host(small, run)
    for _, run in from_host:
        bench_to_host.check_from_host(small, run)
    with pytest.raises(AssertionError):
        bench_to_host.check_to_host(small, lambda: None)  # poisoned before
    with pytest.raises(AssertionError):
        bench_to_host.check_from_host(small, lambda: None)


def test_the_peers_inputs_name_the_rows_of_each_request():
    inputs = peer_lmcache.step_inputs(3, 32, layers=2, hidden=8, tail=5, block_size=4, device="cpu", dtype=torch.float32)
    assert inputs.slot_mapping.numel() == 3 * 37 and len(inputs.queries) == 2 and inputs.queries[0].shape == (111, 8)
    assert inputs.slot_mapping.unique().numel() == 111 and int(inputs.slot_mapping.max()) < inputs.kv_blocks * 4
    seen = torch.cat([inputs.rows_of(request) for request in inputs.requests])
    assert seen.unique().numel() == 96
    for request in inputs.requests:
        slots = inputs.slot_mapping[inputs.rows_of(request)]
        assert slots.tolist() == [request.block_ids[i // 4] * 4 + i % 4 for i in range(32)]
    assert inputs.nbytes == 2 * 96 * 2 * 8 * 4


def test_without_the_peer_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lmcache", None)
    assert "lmcache" in peer_lmcache.why_missing() and "Install" in peer_lmcache.why_missing()
    with pytest.raises(ImportError):
        peer_lmcache.Peer(peer_lmcache.step_inputs(1, 16, layers=1, hidden=4, device="cpu"))


def test_the_model_is_a_readable_config(tmp_path):
    engine.write_model(tmp_path, engine.LLAMA_8B)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["hidden_size"], config["num_key_value_heads"], config["rope_theta"]) == (4096, 8, 5e5)


def test_a_profile_names_qcaps_kernels_whatever_their_share():
    assert {"row_scatter_kernel", "slot_attribution_kernel", "paged_copy_kernel"} <= set(engine.kernel_names())
    spent = {f"gemm_{i}": [1000.0 + i, 1] for i in range(9)} | {"row_scatter_kernel": [2.0, 32], "Memcpy DtoH (Device -> Pinned)": [1.0, 4]}
    console = Console(width=160)
    with console.capture() as capture:
        engine.show_profile("both", {"prefill 8": spent}, console)
    said = capture.get()
    assert "row_scatter_kernel" in said and "DtoH" in said and "gemm_8" in said and "gemm_2" not in said


class FakeChildren:
    """Notes who was asked what."""

    def __init__(self):
        self.asked = []

    def ask(self, config, name, *arguments):
        self.asked.append((config, name, *arguments))
        return {f"{name} ms": float(len(self.asked))}


def test_warm_up_rounds_are_no_figures():
    def one_round(number):
        yield "off", {"x ms": float(number)}
        yield "both", {}

    assert engine.measure(one_round, 3, 2, float("inf")) == {("x ms", "off"): [2.0, 3.0, 4.0]}
    assert engine.measure(one_round, 3, 2, 0.0) == {("x ms", "off"): [2.0]}  # no time left, but one round there is


def test_engines_take_turns_and_get_the_same_prompts():
    children = FakeChildren()
    got = list(engine.capture_round(children, ["off", "both"], [8], 4))
    turns = [("both", "False"), ("off", "True"), ("off", "False")]  # the second of the three is first in round 4
    assert children.asked == [
        (c, *what, f"{seed} {again}") for *what, seed in (("ttft", 8, "8 4"), ("decode", "decode 4")) for c, again in turns
    ]
    assert [config for config, _ in got] == ["both", "off again", "off"] * 2
    children = FakeChildren()
    list(engine.capture_round(children, ["query", "both"], [], 3))
    assert [config for config, *_ in children.asked] == ["both", "query"]
    children = FakeChildren()
    names = ["off", "both", "off 2", "both 2"]
    got = list(engine.capture_round(children, names, [], 1))
    assert [name for name, _ in got] == ["both", "off 2", "both 2", "off"], "with two that capture nothing, neither has two turns"


def test_an_engine_that_captures_is_compared_with_itself():
    class Switched(FakeChildren):
        def ask(self, config, name, *arguments):
            got = super().ask(config, name, *arguments)
            return {label: {"ttft 8 ms": ms} for label, ms in ((engine.ON, 3.0), (engine.OFF, 2.0))} if name == "switched" else got

    children = Switched()
    got = list(engine.capture_round(children, ["off", "both", "off 2", "both 2"], [8], 1, switch=True))
    assert [asked for asked in children.asked if asked[1] == "switched"] == [
        ("both", "switched", 8, "8 1 both", False), ("both 2", "switched", 8, "8 1 both 2", False),
    ]  # fmt: skip
    assert got[-4:] == [(f"both{label}", {"ttft 8 ms": ms}) for label, ms in ((engine.ON, 3.0), (engine.OFF, 2.0))] * 2
    ours = {engine.ON: [3.0, 5.0, 2.5], engine.OFF: [2.0, 2.0, 2.0]}
    figures = {**{("ttft 8 ms", "both" + label): values for label, values in ours.items()}, ("ttft 8 ms", "off"): [1.0]}
    slower = {row["config"]: row["slower_pct"] for row in engine.summary(figures, {})}
    assert slower == {"both" + engine.ON: pytest.approx(50.0), "both" + engine.OFF: None, "off": None}
    console = Console(width=200)
    with console.capture() as capture:
        engine.show_pairs(figures, console)
    assert "ttft 8 ms, both, pairs in one engine: +1.000 ms (+50.00 %), p20 +0.500, p80 +3.000" in capture.get()


def test_figures_of_several_engines_of_a_configuration_count_together():
    figures = {
        ("x ms", "off"): [1.0],
        ("x ms", "off again"): [2.0],
        ("x ms", "off 2"): [3.0],
        ("x ms", "both 12"): [4.0],
        ("y", "off"): [5.0],
    }
    assert engine.together(figures) == {
        ("x ms", "off"): [1.0, 3.0], ("x ms", "off again"): [2.0], ("x ms", "both"): [4.0], ("y", "off"): [5.0],
    }  # fmt: skip


def test_turns_of_the_benchmark_of_loads():
    children = FakeChildren()
    got = list(layerwise.load_round(children, ["layerwise", "whole", "off"], 512, [64], 3))
    named = [(config, name) for config, name, *_ in children.asked]
    assert named[:3] == [("layerwise", "prefill"), ("whole", "prefill"), ("off", "prefill")]
    assert named[3:9] == [
        ("layerwise", "load"), ("layerwise", "compute"), ("whole", "load"), ("whole", "compute"), ("off", "compute"), ("layerwise", "copy"),
    ]  # fmt: skip
    assert [name for _, name in named[9:]] == ["forget"] * 3 and [config for config, _ in got] == [config for config, _ in named]
    seeds = {name: {asked[-1] for asked in children.asked if asked[1] == name} for name in ("prefill", "load", "compute")}
    assert all(len(of_one) == 1 for of_one in seeds.values()) and seeds["load"] != seeds["compute"]


def test_a_run_that_loaded_something_else_is_told():
    def check(counted, cached, **more):
        return layerwise.why_wrong(counted, cached, **{"loaded": 448, "in_cache": 0, "layerwise": True, **more})

    assert check({"load.tokens": 448, "load.layerwise": 1}, 448) == ""
    assert check({"load.tokens": 448}, 448, layerwise=False) == ""
    assert check({}, 448, loaded=0, in_cache=448) == "" and check({}, 0, loaded=0) == ""
    assert "load.tokens is 0, not 448" in check({}, 448)  # vLLM's own cache had it
    assert "load.layerwise is 0, not 1" in check({"load.tokens": 448}, 448)
    assert "load.layerwise is 1, not 0" in check({"load.tokens": 448, "load.layerwise": 1}, 448, layerwise=False)
    assert "load.failed is 1" in check({"load.tokens": 448, "load.layerwise": 1, "load.failed": 1}, 448)
    assert "load.tokens is 448, not 0" in check({"load.tokens": 448, "load.layerwise": 1}, 448, loaded=0, in_cache=448)
    assert "512 tokens were not computed" in check({"load.tokens": 448, "load.layerwise": 1}, 512)
    assert "None tokens" in check({"load.tokens": 448, "load.layerwise": 1}, None)


FIGURES = {
    ("load 64 ms", "layerwise"): [104.0, 120.0, 106.0],
    ("load 64 ms", "whole"): [300.0, 318.0, 330.0],
    ("compute 64 ms", "layerwise"): [60.0, 50.0, 55.0],
    ("copy 64 ms", "layerwise"): [100.0, 90.0, 110.0],
    ("prefill 512 ms", "layerwise"): [1014.0, 1013.0, 2000.0],
    ("prefill 512 ms", "off"): [1000.0, 999.0, 1001.0],
}


def test_the_acceptance_of_loads_is_of_medians():
    assert layerwise.limit_ms(100.0, 55.0) == layerwise.limit_ms(55.0, 100.0) == pytest.approx(108.0)
    (row,) = layerwise.accept_loads(FIGURES, [64])
    assert (row["load_ms"], row["compute_ms"], row["p50"], row["p80"], row["whole_ms"]) == (100.0, 55.0, 106.0, 120.0, 318.0)
    assert row["held"] and row["over_ms"] == pytest.approx(-2.0) and row["ratio"] == pytest.approx(3.0)
    slow = FIGURES | {("load 64 ms", "layerwise"): [108.5]}
    alone = {name: values for name, values in slow.items() if name[1] == "layerwise"}
    (row,) = layerwise.accept_loads(alone, [64])
    assert not row["held"] and row["whole_ms"] is None and row["ratio"] is None


def test_the_acceptance_of_stores_is_against_off():
    row = layerwise.accept_store(FIGURES, 512)
    assert row["slower_pct"] == pytest.approx(1.4) and row["held"]
    assert not layerwise.accept_store(FIGURES | {("prefill 512 ms", "layerwise"): [1016.0]}, 512)["held"]
    assert layerwise.accept_store({("prefill 512 ms", "layerwise"): [1.0]}, 512) is None


@pytest.mark.parametrize("on_device", [True, False])
def test_the_tables_say_what_held_and_what_means_nothing(on_device):
    console = Console(width=200)
    with console.capture() as capture:
        layerwise.show_acceptance(layerwise.accept_loads(FIGURES, [64]), layerwise.accept_store(FIGURES, 512), on_device, console)
    said = " ".join(capture.get().split())
    for text in ("108.00", "106.00", "318.00", "3.00x", "-2.00", "+1.40 %"):
        assert text in said
    assert ("figures mean nothing" in said) is not on_device and said.count("yes") == 2 * on_device


@pytest.mark.parametrize(
    "options",
    [
        ["--tails", "1000"],  # no whole chunks are left
        ["--tails", "16384"],  # more than one step
        ["--tails", "32768"],  # nothing to load
        ["--configs", "whole,off"],
        ["--configs", "layerwise,other"],
        ["--tiny", "--tails", "1024"],
    ],
)
def test_arguments_that_could_not_be_measured_are_refused(options, monkeypatch, capsys):
    monkeypatch.setattr(engine, "engines", lambda *_: pytest.fail("an engine was started"))
    with pytest.raises(SystemExit):
        layerwise.main(options)
    assert "tail" in capsys.readouterr().err or "--configs" in options


def test_engines_differ_in_how_they_load_alone(monkeypatch):
    seen = {}

    def engines(module, args, capture, options):
        seen.update(module=module, capture=capture, options=options, kv_gib=args.kv_gib)
        raise InterruptedError

    monkeypatch.setattr(engine, "engines", engines)
    with pytest.raises(InterruptedError):
        layerwise.main([])
    ours, whole = seen["capture"]["layerwise"], seen["capture"]["whole"]
    assert seen["capture"]["off"] is None and ours == {**whole, "layerwise": True} and not whole["layerwise"]
    assert ours["host_bytes"] == 12 << 30 and ours["load"] == "all"
    assert seen["options"]["enable_prefix_caching"] and seen["options"]["max_num_batched_tokens"] == 8192
    assert (seen["module"], seen["kv_gib"]) == ("benchmarks.layerwise", 10.0) and seen["options"]["max_model_len"] > 32768 + layerwise.MORE


def test_calls_within_calls_are_part_of_them():
    class Connector:
        def outer(self, x):
            return self.inner(x) + 1

        def inner(self, x):
            return 2 * x

        def fails(self):
            raise KeyError

        @classmethod
        def of_class(cls):
            return cls

    before, calls = dict(vars(Connector)), []
    with layerwise.timed_calls(Connector, calls):
        it = Connector()
        assert it.outer(3) == 7 and it.inner(1) == 2 and it.of_class() is Connector
        with pytest.raises(KeyError):
            it.fails()
    assert [name for name, _, _ in calls] == ["outer", "inner", "fails"] and all(took >= 0 for _, _, took in calls)
    assert {name: vars(Connector)[name] for name in ("outer", "inner", "fails")} == {n: before[n] for n in ("outer", "inner", "fails")}
    console = Console(width=160)
    with console.capture() as capture:
        found = {"ms": 9.0, "calls": [["outer", 1.0, 2.5], ["inner", 4.0, 0.5], ["outer", 5.0, 3.0]]}
        layerwise.show_calls("load 64", {**found, "copies": [[2.0, 50_000_000], [3.0, 100_000_000], [5.0, 7_000_000]]}, console)
    said = capture.get()
    assert "copies: first after 2.00 ms, last (7.0 MB) after 5.00; 50.00 GB/s until then" in said
    assert "load 64: first token after 9.00 ms, 6.00 ms" in said and "8.000" in said and "longest: outer at 5.00 for 3.00" in said
