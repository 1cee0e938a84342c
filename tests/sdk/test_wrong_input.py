"""What a newcomer gives by mistake is told as one of qcap's errors, with what to give instead; nothing is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import qcap.vllm
from qcap.errors import ConfigError, TokenError
from qcap.sdk import policies
from qcap.sdk.connect import connect
from qcap.sdk.coverage import Coverage, Sequences, printable
from qcap.sdk.policies.suite import PolicySuite
from qcap.store.tiers import SequenceRecord
from qcap.tokens import as_token_array

IDS = list(range(8))


def rows() -> torch.Tensor:
    return torch.zeros(2, 2, 8, 16)


def test_half_a_surrogate_pair_is_no_salt(bench) -> None:
    ctx = bench.context()
    for call in (
        lambda: ctx.retrieve(IDS, "\ud800"),
        lambda: ctx.coverage(IDS, "\ud800"),
        lambda: ctx.store(rows(), IDS, salt="a\udfff"),
        lambda: qcap.vllm.prompt(IDS, salt="\ud800"),
    ):
        with pytest.raises(TokenError, match="half of a surrogate pair"):
            call()
    assert bench.backend.data_calls == 0
    assert ctx.store(rows(), IDS, salt="\U0001f600")  # a whole one is a character


@pytest.mark.parametrize("positions", [[2**63 - 1] * 8, [2**32] * 8, [0, 1, 2, 3, 4, 5, 6, 2**32], [[0], [1, 2]], [2**70] * 8, ["0"] * 8])
def test_positions_that_no_header_can_say(bench, positions: list) -> None:
    with pytest.raises(TokenError, match="position"):
        bench.context().store(rows(), IDS, salt="s", positions=positions)
    assert bench.backend.data_calls == 0
    assert bench.context().store(rows(), IDS, salt="s", positions=[2**32 - 1] * 8)


@pytest.mark.parametrize("edit", [{"a": {1, 2}}, {"a": torch.zeros(2)}, {"a": object()}])
def test_an_edit_is_described_in_what_json_can_say(bench, edit: dict) -> None:
    with pytest.raises(ConfigError, match="edit must be something JSON can say"):
        bench.context().store(rows(), IDS, salt="s", edit=edit)
    assert bench.backend.data_calls == 0


def test_ids_of_different_lengths(bench) -> None:
    for call in (as_token_array, bench.context().retrieve, bench.context().coverage, qcap.vllm.prompt):
        with pytest.raises(TokenError, match="sequences in a sequence"):
            call([[1, 2], [3]])


@pytest.mark.parametrize("timeout_s", [0, -1, "10", None, True, float("nan"), float("inf")])
def test_a_timeout_is_a_number_of_seconds(timeout_s: object) -> None:
    for call in (lambda: connect("memory://x", timeout_s=timeout_s), lambda: qcap.vllm.receipt([], timeout_s=timeout_s)):
        with pytest.raises(ConfigError, match="timeout_s must be positive, a number of seconds, got"):
            call()


def applied(name: str = "snapkv", **more: object) -> qcap.Edit:
    suite = PolicySuite()
    kv, q = suite.inputs()
    return policies.apply(name, kv, q, list(range(kv.shape[2])), suite.geometry(), **{"keep": 0.5, **more})


def test_a_number_of_numpy_is_a_number() -> None:
    for count in (np.int64(32), np.uint8(32)):
        assert applied(keep=count).salt == applied(keep=32).salt
        assert applied(keep=count, multiple_of=np.int32(16)).token_ids == applied(keep=32, multiple_of=16).token_ids
    assert applied(keep=np.float64(0.5)).salt == applied(keep=0.5).salt
    assert len(applied(keep=np.float32(0.5)).token_ids) == len(applied(keep=0.5).token_ids)


@pytest.mark.parametrize("keep", ["0.5", None, True, np.True_, [0.5], 0.5j])
def test_what_is_no_number_to_keep(keep: object) -> None:
    with pytest.raises(ConfigError, match=r"keep must be a share .* or a number of tokens"):
        applied(keep=keep)


@pytest.mark.parametrize("multiple_of", ["4", 1.5, True, 0])
def test_what_is_no_multiple(multiple_of: object) -> None:
    with pytest.raises(ConfigError, match="multiple_of must be an integer, at least 1"):
        applied(multiple_of=multiple_of)


@pytest.mark.parametrize("seed", ["x", None, 1.5, True, 2**64, -(2**63) - 1])
def test_what_is_no_seed(seed: object) -> None:
    with pytest.raises(ConfigError, match="seed must be an integer"):
        applied("random", seed=seed)


def test_numpy_seeds_are_seeds() -> None:
    assert torch.equal(applied("random", seed=np.int64(3)).tensor, applied("random", seed=3).tensor)


def test_coverage_without_a_whole_chunk_is_not_complete(bench) -> None:
    cov = bench.context().coverage(IDS[:3])
    assert isinstance(cov, Coverage) and cov.fraction == 1.0  # nothing is missing
    for text in (repr(cov), cov._repr_html_()):
        assert "%" not in text and "no whole chunk of 4 in 3 tokens, so nothing of them can be stored" in text
    plots = pytest.importorskip("matplotlib") and qcap.plots
    labels = [label.get_text() for label in plots.coverage_bar(cov).axes[0].get_yticklabels()]
    assert labels == ["kv\nno whole chunk"]


def test_what_others_sent_does_not_steer_a_terminal() -> None:
    record = SequenceRecord("m", "r\x1b]0;x\x07", "e", "s\x1b[31m\x9b\u202e", (1, 2), 1, 1, 4)

    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return "a\x1b[2J\nb"

    shown = repr(Sequences([record], Tokenizer()))
    assert shown.replace("\n", "").isprintable() and "s\\x1b[31m\\x9b\\u202e" in shown and "a\\x1b[2J\\nb" in shown
    assert printable("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b" and printable("\ud800ü€😀") == "\\ud800ü€😀"
