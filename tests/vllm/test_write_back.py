"""Real vLLM goes on from caches that the SDK wrote back, exactly as transformers does from the same tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import pytest
import torch

import qcap
from qcap.sdk.hf import to_dynamic_cache
from qcap.testing.engine import hf_greedy, run_in_process
from qcap.testing.tiny import tiny_model_path

pytestmark = pytest.mark.vllm

TOKENS, NEW = 250, 24
KEEP = sorted([*range(4), *range(9, 60, 3), *range(61, 160, 2), *range(160, 224, 1)])[:96]


def test_a_damaged_edit_is_never_filled_with_other_rows(tmp_path: Path) -> None:
    """A load that fails is recomputed and told; nothing computed in the edit's place is stored under its salt; vLLM's own prefix cache
    never stands in for the edit, neither after the failure nor after the edit was replaced; and what was computed behind the edit is not
    used behind another."""
    model, store = str(tiny_model_path("llama")), f"file://{tmp_path}/store"
    (ids,) = jobs.make_prompts([TOKENS], 1000, seed=7)
    engine = {"max_num_batched_tokens": 128, "enable_prefix_caching": True}
    job = {"model": model, "store": store, "ids": ids, "n": NEW, "tensors": str(tmp_path / "tensors.pt"), "engine": engine}
    found = run_in_process(jobs.damaged_edit, job)
    cold = found["cold"]["tokens"]
    for name in ("first", "second"):
        assert found[name]["tokens"] == cold, "computed, since it could not be loaded"
        assert found[name]["skipped"], "and told"
    assert found["still_damaged"], "nothing was written in the edit's place"
    edited = torch.load(tmp_path / "tensors.pt")
    with qcap.connect(store, model=model) as ctx:
        geometry = ctx.geometry
        assert torch.equal(ctx.retrieve(ids, salt="edit"), edited)
        whole = [*ids, *found["repaired"]["tokens"]][: edited.shape[2] + 32]
        assert ctx.coverage(whole, "edit").fraction == 1.0, "the chunk behind it too"
    assert found["repaired"]["tokens"] == hf_greedy(model, ids, NEW, cache=to_dynamic_cache(edited, geometry)) != cold
    assert found["believed"]["tokens"] == found["repaired"]["tokens"]
    assert not any("load-failed" in reason for reason in found["believed"]["skipped"]), "the repaired edit was loaded whole before"
    longer = [*ids, *found["repaired"]["tokens"]]
    one, other = (hf_greedy(model, longer, NEW, cache=to_dynamic_cache(rows, geometry)) for rows in (edited, edited * 2))
    assert one != other
    for name, wanted, chunks in (("gone on", one, 8), ("overwritten", other, 7), ("gone on from that", other, 8), ("as before", one, 8)):
        assert (found[name]["tokens"], found[name]["loaded"]) == (wanted, 32 * chunks), name
    assert found["errors"] == 0


def test_an_edit_that_is_replaced_while_requests_wait(tmp_path: Path) -> None:
    """Who began with its rows ends with them; who comes later gets the new ones, though vLLM's own blocks hold the old; and those are
    shared again."""
    model, store = str(tiny_model_path("llama")), f"file://{tmp_path}/store"
    (ids,) = jobs.make_prompts([TOKENS], 1000, seed=7)
    engine = {"max_num_batched_tokens": 128, "enable_prefix_caching": True, "max_num_seqs": 1}
    job = {"model": model, "store": store, "ids": ids, "n": NEW, "tensors": str(tmp_path / "tensors.pt"), "engine": engine}
    found = run_in_process(jobs.replaced_meanwhile, job)
    edited = torch.load(tmp_path / "tensors.pt")
    with qcap.connect(store, model=model) as ctx:
        geometry = ctx.geometry
    one, other = (hf_greedy(model, ids, NEW, cache=to_dynamic_cache(rows, geometry)) for rows in (edited, edited * 2))
    assert one != other
    assert [found[name]["tokens"] for name in ("first", "second", "third", "back")] == [one, other, other, one]
    assert found["third"]["cached"] == 224 and found["counters"]["load.tokens"] == 3 * 224, "the third shares the second one's blocks"
    assert found["skipped"] == [{"query": {"prefix-cached": 7}}] * 3, "of the edit; keys and values behind it are stored for all of them"
    assert found["counters"].get("load.failed", 0) == found["counters"].get("errors", 0) == 0


def test_an_edit_that_lost_a_chunk_is_not_completed(tmp_path: Path) -> None:
    """Its first, a middle or its last chunk is not there: the receipt says so, nothing is stored in its place, and the edit can be stored
    again and is then served whole."""
    model, store = str(tiny_model_path("llama")), f"file://{tmp_path}/store"
    (ids,) = jobs.make_prompts([TOKENS], 1000, seed=7)
    lost = [0, 3, 6]
    job = {
        "model": model,
        "store": store,
        "ids": ids,
        "n": NEW,
        "lost": lost,
        "tensors": str(tmp_path / "tensors.pt"),
        "engine": {"max_num_batched_tokens": 128, "enable_prefix_caching": True},
    }
    found = run_in_process(jobs.lost_chunks, job)
    edited = torch.load(tmp_path / "tensors.pt")
    with qcap.connect(store, model=model) as ctx:
        wanted = hf_greedy(model, ids, NEW, cache=to_dynamic_cache(edited, ctx.geometry))
        assert wanted != found["cold"]["tokens"]
        for number in lost:
            salt = f"lost-{number}"
            holed, whole = found[salt]["holed"], found[salt]["whole"]
            assert "edit-not-loaded" in holed["said"] and not holed["filled"] and holed["verified"] == [salt], salt
            assert holed["cached"] == 32 * number
            assert whole["tokens"] == wanted and whole["cached"] == 224, salt
            assert not any("edit-not-loaded" in reason for reason in whole["skipped"]), salt
            assert torch.equal(ctx.retrieve(ids[:224], salt=salt), edited)
    assert found["sound"] and found["errors"] == 0


@pytest.mark.parametrize("kind", ["llama", "llama3", "phi3", "yarn"])  # acceptance 3, 4, 5: default, llama3-scaled, partial rotary
def test_go_on_from_edited_caches(kind: str, tmp_path: Path) -> None:
    """Acceptance 3: unchanged KV gives the cold tokens and is loaded. 4: shortened KV goes on as in transformers. 5: no mixing of salts."""
    model, store = str(tiny_model_path(kind)), f"file://{tmp_path}/store"
    (ids,) = jobs.make_prompts([TOKENS], 1000, seed=7)
    job: dict[str, Any] = {
        "model": model,
        "store": store,
        "ids": ids,
        "n": NEW,
        "keep": KEEP,
        "tensors": str(tmp_path / "tensors.pt"),
        "engine": {"max_num_batched_tokens": 128, "enable_prefix_caching": True},
    }
    found = run_in_process(jobs.write_back, job)
    cold = found["cold"]["tokens"]
    assert cold == hf_greedy(model, ids, NEW)
    assert found["cold"]["cached"] == 0

    assert found["unchanged"]["tokens"] == cold
    assert found["unchanged"]["cached"] == 224, "vLLM must report the stored tokens as loaded"
    assert found["plain"]["tokens"] == cold

    tensors = torch.load(tmp_path / "tensors.pt")
    with qcap.connect(store, model=model) as ctx:
        geometry = ctx.geometry
        assert torch.equal(ctx.retrieve(found["shorter"]["ids"], salt="shorter")[:, :, : len(KEEP)], tensors["shorter"])
    shorter = hf_greedy(model, found["shorter"]["ids"], NEW, cache=to_dynamic_cache(tensors["shorter"], geometry))
    assert found["shorter"]["tokens"] == shorter
    assert found["shorter"]["cached"] == len(KEEP)
    never = hf_greedy(model, found["shorter"]["ids"], NEW)
    assert found["never-stored"]["tokens"] == never, "a salt that nothing was stored under is computed in full"
    assert found["never-stored"]["cached"] == 0
    assert shorter != never and shorter != cold, "this model must tell the caches apart, or the test shows nothing"

    other = hf_greedy(model, ids, NEW, cache=to_dynamic_cache(tensors["other"], geometry))
    assert found["other"]["tokens"] == other and other != cold
    assert [r["tokens"] for r in found["together"]] == [other, cold, cold], "served at once, each from its own cache"

    assert found["state"]["ring_held"] == 0 and found["state"]["tracks"] == 0
    assert found["state"]["counters"].get("load.failed", 0) == 0 and found["state"]["counters"].get("errors", 0) == 0


def test_an_edit_is_served_whole_whoever_is_served_beside_it(tmp_path: Path) -> None:
    """vLLM's prefix cache hands the blocks of one request to the next. What one computes in an edit's place reaches nobody else;
    nothing of it is stored under the edit's salt."""
    model = str(tiny_model_path("llama"))
    (ids,) = jobs.make_prompts([TOKENS], 1000, seed=7)
    engine = {"max_num_batched_tokens": 128, "enable_prefix_caching": True}
    job = {"model": model, "store": f"file://{tmp_path}/store", "ids": ids, "n": NEW, "engine": engine}
    found = run_in_process(jobs.edits_beside_others, job)
    edited = found["alone"]
    assert edited != found["cold"], "this model must tell the caches apart, or the test shows nothing"
    for how in ("refused", "short"):
        first, second = found[how]
        assert second["tokens"] == edited, f"{how}: served from rows that are not the edit's"
        assert second["cached"] == 224 and "edit-not-loaded" not in str(second["skipped"])
        assert "edit-not-loaded" in str(first["skipped"])
    for one in found["lost"]:
        assert "edit-not-loaded" in str(one["skipped"])
    assert not found["filled"] and found["broken"] == ["lost"]
