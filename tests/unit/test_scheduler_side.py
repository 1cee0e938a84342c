"""The scheduler's half: what it says of a step, of tokens, of loads and of ends. Outputs are shaped as vLLM 0.32's."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from qcap.attribution import NO_EDIT, FinishedRequest, LoadRequest, TokenUpdate
from qcap.config import CaptureConfig
from qcap.errors import StoreUnavailable
from qcap.kinds import CacheKind
from qcap.store.extents import with_extent
from qcap.tokens import ChunkedTokenDatabase, behind_rows
from qcap.vllm import scheduler as scheduler_module
from qcap.vllm.scheduler import KeyParts, SchedulerSide

N, CH = 4, 8


class Store:
    def __init__(self):
        self.keys, self.asked, self.closed, self.down = set(), 0, False, False

        self.edits, self.rows, self.headers, self.cheap_contains = {}, {}, 0, True

    def edit_of(self, key):
        self.headers += 1
        if self.down:
            raise StoreUnavailable("gone away")
        return self.edits.get(key, "") if key in self.keys else None

    def open_layers(self, key):
        text = self.edit_of(key)
        if text is None:
            return None
        rows = self.rows.get(key, "")
        behind = behind_rows(key.digest, rows) if text and rows else ""
        return SimpleNamespace(record=SimpleNamespace(edit=text, behind=behind, follows=lambda before: True))

    def contains(self, keys):
        self.asked += 1
        if self.down:
            raise StoreUnavailable("gone away")
        return [k in self.keys for k in keys]

    def lookup(self, keys):
        return next((i for i, key in enumerate(keys) if not self.contains([key])[0]), len(keys))

    def close(self):
        self.closed = True


class Rig:
    def __init__(self, *, load="all", query=False, in_process=False, speculative=False, tp=1, group=0, early=None):
        self.store, self.told, self.in_process, self.group = Store(), [], in_process, group
        self.parts = KeyParts("m", tp, "float32")
        self.side = SchedulerSide(
            CaptureConfig(store="memory://s", query=query, chunk_size=CH, load=load), self.parts, group=group, block_size=N,
            backend=lambda: self.store, speculative=speculative, finish_now=self._finish, note={"store": "memory://s", "engine_id": "e"},
            early=early,
        )  # fmt: skip

    def _finish(self, update, done):
        if self.in_process:
            self.told.append((update, done))
        return self.in_process

    def put(self, tokens, salt="", kinds=(CacheKind.KV,)):
        for chunk in ChunkedTokenDatabase(CH).chunks(tokens):
            for kind in kinds:
                self.store.keys.update(self.parts.keys(kind, chunk.digest, salt))

    def admit(self, request, blocks, n, *, computed=0, local=0, external=None):
        """matched -> allocated -> the step in which it is new."""
        matched = self.side.matched_tokens(request, local)
        self.side.allocated(request, matched if external is None else external)
        return self.step(new=[(request, blocks, computed)], scheduled={request.request_id: n})

    def step(self, *, new=(), cached=(), scheduled=None, resumed=(), preempted=None):
        groups = [[]] * self.group
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id, block_ids=(*groups, list(b)), num_computed_tokens=c) for r, b, c in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r, _, _ in cached], resumed_req_ids=set(resumed),
                new_block_ids=[None if b is None else (*groups, list(b)) for _, b, _ in cached],
                num_computed_tokens=[c for _, _, c in cached],
            ),
            num_scheduled_tokens=dict(scheduled or {}),
            preempted_req_ids=preempted,
        )  # fmt: skip
        return self.side.step(output)


def make_request(name="a", prompt=range(10), **more):
    ids = list(prompt)
    values = {
        "request_id": name, "prompt_token_ids": ids, "all_token_ids": list(ids), "num_prompt_tokens": len(ids), "num_computed_tokens": 0,
        "cache_salt": None, "mm_features": [], "lora_request": None, "prompt_embeds": None, "pooling_params": None, **more,
    }  # fmt: skip
    return SimpleNamespace(**values)


# ---- steps ------------------------------------------------------------------------------------------------------------------------


def test_a_new_request():  # A2 A3 A24 A25
    rig = Rig()
    request = make_request(cache_salt="u1")
    step = rig.admit(request, [7, 2, 5], 10)
    (r,) = step.requests
    assert (r.request_id, r.salt, r.start, r.end, r.first_block, tuple(r.block_ids)) == ("a", "u1", 0, 10, 0, (7, 2, 5))
    assert r.admitted and not r.skip and step.number == 1
    assert [update[:3] for update in step.tokens] == [(r.uid, 0, tuple(range(10)))]


def test_blocks_of_the_captured_group_are_taken():  # A24
    assert Rig(group=1).admit(make_request(), [7, 2, 5], 10).requests[0].block_ids.tolist() == [7, 2, 5]


def test_decode_names_only_the_blocks_of_its_chunk():  # A3
    rig = Rig()
    request = make_request(prompt=range(15))
    rig.admit(request, [7, 2, 5, 9], 15)
    request.all_token_ids.append(50)
    step = rig.step(cached=[(request, None, 15)], scheduled={"a": 1})
    (r,) = step.requests
    assert (r.start, r.end, r.first_block, tuple(r.block_ids), r.admitted) == (15, 16, 2, (5, 9), False)
    assert step.tokens == (TokenUpdate(r.uid, 15, (50,)),)
    request.all_token_ids.append(51)
    (r,) = rig.step(cached=[(request, [11], 16)], scheduled={"a": 1}).requests
    assert (r.first_block, tuple(r.block_ids)) == (4, (11,))


def test_more_blocks_than_are_computed_are_left_out():  # A6: lookahead slots of drafts
    (r,) = Rig().admit(make_request(), [7, 2, 5, 9], 6).requests
    assert tuple(r.block_ids) == (7, 2)


@pytest.mark.parametrize("blocks", [[7, 2], []])
def test_a_block_table_that_is_too_short(blocks):  # A13 A12: never a read out of bounds: nothing of it is stored, others go on
    rig = Rig()
    good = make_request("b")
    rig.side.matched_tokens(good, 0)
    request = make_request()
    rig.side.matched_tokens(request, 0)
    step = rig.step(new=[(request, blocks, 0), (good, [1, 3, 4], 0)], scheduled={"a": 10, "b": 10})
    assert {r.request_id: r.skip for r in step.requests} == {"a": "block-table-unknown", "b": ""}


def test_requests_nobody_asked_about_are_left_out():
    rig = Rig()
    stranger = make_request("x")
    step = rig.step(new=[(stranger, [1], 0)], cached=[(make_request("y"), None, 3)], scheduled={"x": 4, "y": 1})
    assert step.requests == () and step.tokens == ()


def test_an_empty_step():  # A17 A19
    step = Rig().step()
    assert (step.number, step.requests, step.tokens, step.finished, step.preempted, step.loads) == (1, (), (), (), (), ())


@pytest.mark.parametrize("second_runner", [False, True])
def test_preemption_and_resume(second_runner):  # A30: fresh blocks replace the old table, in both ways vLLM tells it
    rig = Rig()
    request = make_request(prompt=range(7))
    uid = rig.admit(request, [7, 2], 7).requests[0].uid
    assert rig.step(preempted={"a"}).preempted == (uid,)
    assert rig.side._followed["a"].block_ids.tolist() == []
    request.all_token_ids += [50, 51]
    rig.side.matched_tokens(request, 4)
    rig.side.allocated(request, 0)
    if second_runner:
        step = rig.step(new=[(request, [9, 4, 6], 4)], scheduled={"a": 5})
    else:
        step = rig.step(cached=[(request, [9, 4, 6], 4)], scheduled={"a": 5}, resumed=["a"])
    (r,) = step.requests
    assert (r.uid, r.start, r.end, r.first_block, tuple(r.block_ids), r.admitted) == (uid, 4, 9, 0, (9, 4, 6), True)


def test_preempted_and_resumed_in_one_step():  # reset_prefix_cache
    rig = Rig()
    request = make_request(prompt=range(7))
    uid = rig.admit(request, [7, 2], 7).requests[0].uid
    request.drop_stale_output = True
    step = rig.step(cached=[(request, [9, 4], 0)], scheduled={"a": 7}, resumed=["a"], preempted={"a"})
    assert step.preempted == (uid,) and step.resampled == (uid,) and step.requests[0].block_ids.tolist() == [9, 4]
    assert rig.side._followed["a"].block_ids.tolist() == [9, 4]


def test_discarded_tokens_that_the_engine_counts():  # 0.24, in every step until they have come and gone
    rig = Rig()
    request = make_request(prompt=range(7), async_tokens_to_discard=0)
    uid = rig.admit(request, [7, 2], 7).requests[0].uid
    assert rig.step().resampled == ()
    request.async_tokens_to_discard = 2
    assert rig.step().resampled == (uid,) and rig.step().resampled == (uid,)
    request.async_tokens_to_discard = 0
    assert rig.step().resampled == ()


def test_drafts_are_rows_like_others():
    rig = Rig(speculative=True)
    request = make_request(prompt=range(7))
    rig.admit(request, [7, 2], 7)
    request.all_token_ids.append(50)
    step = rig.step(cached=[(request, [3], 7)], scheduled={"a": 4})
    assert step.speculative and (step.requests[0].start, step.requests[0].end) == (7, 11)
    assert step.tokens[0].ids == (50,)


# ---- token ids --------------------------------------------------------------------------------------------------------------------


def test_ids_of_a_request_that_could_not_be_admitted_yet():  # D11: asked for, no blocks free, admitted later
    rig = Rig()
    request = make_request()
    rig.side.matched_tokens(request, 0)
    assert rig.step().tokens == ()
    assert rig.step().tokens == ()
    step = rig.admit(request, [1, 2, 3], 10)
    assert [update[:3] for update in step.tokens] == [(step.requests[0].uid, 0, tuple(range(10)))]


def test_chunks_are_told_with_the_prompt_that_they_were_cut_of():  # a worker need not hash 32 thousand ids again
    rig = Rig()
    request = make_request(prompt=range(21))
    first = rig.admit(request, [1, 2, 3, 4, 5, 6], 21).tokens[0]
    assert first.chunks == tuple(ChunkedTokenDatabase(8).chunks(list(range(21))))
    request.all_token_ids += [50, 51, 52]
    assert rig.step(cached=[(request, None, 21)], scheduled={"a": 1}).tokens[0].chunks == ()  # none are told twice


def test_no_chunk_is_told_of_ids_that_were_sampled():  # a request that was preempted before the worker knew it: they may change
    rig = Rig()
    request = make_request(prompt=range(9), all_token_ids=list(range(24)))
    assert rig.admit(request, [1, 2, 3, 4, 5, 6], 24).tokens[0].chunks == tuple(ChunkedTokenDatabase(8).chunks(list(range(9))))


def test_ids_are_told_once_and_late_ones_when_they_are_known():
    rig = Rig()
    request = make_request()
    uid = rig.admit(request, [1, 2, 3], 10).requests[0].uid
    assert rig.step(cached=[(request, None, 10)], scheduled={"a": 1}).tokens == ()  # asynchronous: a placeholder was fed
    request.all_token_ids += [50, 51]
    assert rig.step(cached=[(request, None, 11)], scheduled={"a": 1}).tokens == (TokenUpdate(uid, 10, (50, 51)),)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_token_ids": None}, "no-token-ids"),
        ({"prompt_embeds": object()}, "no-token-ids"),
        ({"mm_features": ["image"]}, "multimodal"),
        ({"lora_request": object()}, "lora"),
        ({"resumable": True}, "streaming"),
        ({"cache_salt": "a/b"}, "salt"),
        ({"cache_salt": "@"}, "salt"),
        ({"cache_salt": "x" * 129}, "salt"),
    ],
)
def test_requests_that_are_not_stored(change, reason):  # D11 A11: one client's odd request bars itself and nobody else
    rig = Rig()
    request = make_request(**change)
    step = rig.admit(request, [1, 2, 3], 10)
    assert step.requests[0].skip == reason and step.tokens == () and step.loads == ()
    assert rig.store.asked == 0
    assert rig.admit(make_request("b"), [4, 5, 6], 10).requests[0].skip == ""


# ---- ends -------------------------------------------------------------------------------------------------------------------------


def test_an_end_is_told_at_once_in_this_process():
    rig = Rig(in_process=True)
    request = make_request()
    uid = rig.admit(request, [1, 2, 3], 10).requests[0].uid
    request.all_token_ids.append(50)
    request.num_computed_tokens = 10
    answer = rig.side.finished(request)
    assert answer == {"qcap": {"store": "memory://s", "engine_id": "e", "request_id": "a", "tp_size": 1}}
    assert rig.told == [(TokenUpdate(uid, 10, (50,)), FinishedRequest(uid, 11, 10, 10))]
    step = rig.step()
    assert step.finished == () and step.tokens == ()


def test_an_end_is_told_in_the_next_step_elsewhere():
    rig = Rig()
    request = make_request()
    uid = rig.admit(request, [1, 2, 3], 10).requests[0].uid
    request.all_token_ids.append(50)
    request.num_computed_tokens = 10
    rig.side.finished(request)
    step = rig.step()
    assert step.tokens == (TokenUpdate(uid, 10, (50,)),) and step.finished == (FinishedRequest(uid, 11, 10, 10),)
    assert rig.step().finished == ()


@pytest.mark.parametrize(
    ("total", "computed", "pooling", "wanted"),
    [(11, 10, None, 10), (11, 11, None, 10), (11, 13, None, 10), (10, 6, None, 6), (10, 10, object(), 10), (1, 0, None, 0)],
)
def test_computed_tokens_at_the_end(total, computed, pooling, wanted):  # extra row in flight, drafts, an abort in the prompt, pooling
    rig = Rig(in_process=True)
    request = make_request(prompt=range(min(total, 10)), pooling_params=pooling)
    rig.admit(request, [1, 2, 3], 6)
    request.all_token_ids += list(range(50, 50 + total - 10)) if total > 10 else []
    request.num_computed_tokens = computed
    rig.side.finished(request)
    if wanted and computed > 0:
        assert rig.told[0][1].computed_tokens == wanted


def test_an_end_while_preempted():  # vLLM sets num_computed_tokens to 0 at preemption
    rig = Rig(in_process=True)
    request = make_request()
    rig.admit(request, [1, 2, 3], 10)
    rig.step(preempted={"a"})
    request.all_token_ids.append(50)
    rig.side.finished(request)
    assert rig.told[0][1].computed_tokens == 10


def test_ids_that_never_ran_leave_no_receipt():
    rig = Rig(in_process=True)
    request = make_request()
    rig.side.matched_tokens(request, 0)
    assert rig.side.finished(request) is None and rig.told == []
    assert rig.side.finished(make_request("never seen")) is None
    assert rig.step().finished == () and not rig.side._followed


def test_a_request_id_used_again_is_another_request():
    rig = Rig()
    first = make_request()
    a = rig.admit(first, [1, 2, 3], 10).requests[0].uid
    rig.side.finished(first)
    step = rig.admit(make_request(prompt=range(20, 30)), [1, 2, 3], 10)
    assert step.requests[0].uid != a
    assert [t.ids for t in step.tokens if t.uid == step.requests[0].uid] == [tuple(range(20, 30))]


def test_close_closes_the_store_it_opened():
    rig = Rig()
    rig.side.close()
    assert not rig.store.closed  # never opened
    rig.side.matched_tokens(make_request(), 0)
    rig.side.close()
    assert rig.store.closed


# ---- loads ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "stored", "local", "wanted"), [
    (20, 16, 0, 16), (16, 16, 0, 12), (17, 16, 0, 16), (20, 16, 8, 8), (20, 16, 16, 0), (20, 0, 0, 0), (20, 8, 0, 8), (4, 8, 0, 0),
    (1, 0, 0, 0),
])  # fmt: skip
def test_how_much_can_be_loaded(tokens, stored, local, wanted):  # block aligned, and one token at least is left to compute
    rig = Rig()
    rig.put(range(stored))
    assert rig.side.matched_tokens(make_request(prompt=range(tokens)), local) == wanted


def test_a_hole_ends_the_prefix():
    rig = Rig()
    rig.put(range(24))
    chunk = ChunkedTokenDatabase(CH).chunks(range(24))[1]
    rig.store.keys.difference_update(rig.parts.keys(CacheKind.KV, chunk.digest, ""))
    assert rig.side.matched_tokens(make_request(prompt=range(30)), 0) == 8


def test_a_chunk_is_there_only_if_all_ranks_have_it():
    rig = Rig(tp=2)
    rig.put(range(16))
    assert rig.side.matched_tokens(make_request(prompt=range(20)), 0) == 16
    rig.store.keys.remove(rig.parts.keys(CacheKind.KV, ChunkedTokenDatabase(CH).chunks(range(16))[1].digest, "")[1])
    assert rig.side.matched_tokens(make_request(prompt=range(20)), 0) == 8


@pytest.mark.parametrize(
    ("load", "salt", "wanted"), [("off", "s", 0), ("salted", "", 0), ("salted", "s", 8), ("all", "", 8), ("all", "s", 8)]
)
def test_who_may_load(load, salt, wanted):
    rig = Rig(load=load)
    rig.put(range(8), salt)
    assert rig.side.matched_tokens(make_request(cache_salt=salt or None), 0) == wanted


def test_salts_keep_apart():
    rig = Rig()
    rig.put(range(8), "mine")
    assert rig.side.matched_tokens(make_request(), 0) == 0
    assert rig.side.matched_tokens(make_request("b", cache_salt="yours"), 0) == 0


def test_with_query_capture_a_chunk_without_queries_is_computed():
    rig = Rig(query=True)
    rig.put(range(8))
    assert rig.side.matched_tokens(make_request(), 0) == 0
    rig.put(range(8), kinds=(CacheKind.QUERY,))
    assert rig.side.matched_tokens(make_request(), 0) == 8


def test_asking_has_no_side_effect():
    rig = Rig()
    rig.put(range(8))
    request = make_request()
    assert [rig.side.matched_tokens(request, 0) for _ in range(3)] == [8, 8, 8]
    assert rig.step().loads == ()


def test_what_a_load_says():
    rig = Rig()
    rig.put(range(16))
    step = rig.admit(make_request(prompt=range(15)), [7, 2, 5, 9], 3, computed=12)
    chunks = ChunkedTokenDatabase(CH).chunks(range(15))
    assert len(chunks) == 1  # the second chunk is not whole in this request: nothing of it can be asked for
    (load,) = step.loads
    assert (load.start, load.end, load.block_ids, load.digests) == (0, 8, (7, 2), (chunks[0].digest,))
    rig = Rig()
    rig.put(range(16))
    step = rig.admit(make_request(prompt=range(16)), [7, 2, 5, 9], 4, computed=12)
    uid = step.requests[0].uid
    digests = tuple(c.digest for c in ChunkedTokenDatabase(CH).chunks(range(16)))
    assert step.loads == (LoadRequest(uid, "a", "", 0, 12, (7, 2, 5), digests, tuple(range(16))),)
    assert rig.step().loads == ()


def test_a_load_behind_a_local_hit():
    rig = Rig()
    rig.put(range(16))
    (load,) = rig.admit(make_request(prompt=range(20)), [7, 2, 5, 9, 3], 4, computed=16, local=4).loads
    assert (load.start, load.end, load.block_ids) == (4, 16, (7, 2, 5, 9))


def test_vllm_may_refuse_the_load():  # skip_reading_prefix_cache: asked, then zero external tokens
    rig = Rig()
    rig.put(range(8))
    assert rig.admit(make_request(), [1, 2, 3], 10, external=0).loads == ()


def test_a_failed_load_is_not_offered_again(monkeypatch):  # or the engine would try for ever
    rig = Rig()
    rig.put(range(8))
    request = make_request()
    rig.admit(request, [7, 2, 5], 2, computed=8)
    rig.side.load_failed({2})
    assert rig.side.matched_tokens(request, 0) == 0
    assert rig.side.matched_tokens(make_request("b"), 0) == 0  # nor to others: each failure costs a recompute
    now = scheduler_module.time.monotonic()
    monkeypatch.setattr(scheduler_module.time, "monotonic", lambda: now + scheduler_module.RETRY_LOAD_S + 1)
    assert rig.side.matched_tokens(make_request("c"), 0) == 8  # but not for ever
    rig.side.finished(request)
    assert not rig.side._load_failed


def test_a_store_that_cannot_be_asked(caplog):  # O14: computed in full, told once
    scheduler_module.logger._seen.clear()
    rig = Rig()
    rig.put(range(8))
    rig.store.down = True
    request = make_request()
    assert [rig.side.matched_tokens(request, 0) for _ in range(100)] == [0] * 100
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    rig.store.down = False
    assert rig.side.matched_tokens(request, 0) == 8


# ---- against the real thing ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.filterwarnings("ignore")
def test_vllm_still_has_the_fields_that_are_read():
    import ast

    root = next(iter(importlib.util.find_spec("vllm").submodule_search_locations))
    fields = {}
    for path in ("v1/core/sched/output.py", "v1/request.py"):
        for node in ast.walk(ast.parse(Path(root, path).read_text())):
            if isinstance(node, ast.ClassDef):
                fields[node.name] = {
                    *(s.target.id for s in node.body if isinstance(s, ast.AnnAssign)),
                    *(t.attr for a in ast.walk(node) if isinstance(a, ast.Assign | ast.AnnAssign)
                      for t in (a.targets if isinstance(a, ast.Assign) else [a.target]) if isinstance(t, ast.Attribute)),
                    *(f.name for f in node.body if isinstance(f, ast.FunctionDef)),
                }  # fmt: skip
    assert fields["SchedulerOutput"] >= {"scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "preempted_req_ids"}
    assert fields["NewRequestData"] >= {"req_id", "block_ids", "num_computed_tokens"}
    assert fields["CachedRequestData"] >= {"req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"}
    assert fields["Request"] >= {
        "request_id", "prompt_token_ids", "prompt_embeds", "mm_features", "lora_request", "cache_salt", "all_token_ids",
        "num_prompt_tokens", "num_computed_tokens", "pooling_params", "resumable",
    }  # fmt: skip


# ---- edits: vLLM's own prefix cache must not stand in for them, and what is computed in their place is not stored ----------------------


class Pool:
    def __init__(self, cached):
        self.cached, self.evicted = cached, set()

    def get_cached_block(self, block_hash, group_ids):
        assert group_ids == [0]
        return [SimpleNamespace(block_id=self.cached[block_hash])] if block_hash in self.cached else None

    def evict_blocks(self, block_ids):
        self.evicted |= block_ids
        self.cached = {one: block for one, block in self.cached.items() if block not in block_ids}


EDIT = ChunkedTokenDatabase(CH).chunks(range(24))  # 3 chunks, of which a prompt of 26 tokens has all
UNTOLD, KEPT, LISTED = '{"name": "x"}', '{"name": "x", "kept": 27}', with_extent('{"name": "x"}', EDIT)


def edited_rig(text=LISTED, tp=1):
    rig = Rig(load="salted", tp=tp)
    rig.put(range(24), salt="e")
    rig.store.edits = dict.fromkeys(rig.store.keys, text)
    rig.side.bind_block_pool(Pool({"h0": 7, "h2": 9}))
    return rig


def salted(name="a", ids=range(26), salt="e"):
    request = make_request(name, list(ids), cache_salt=salt)
    request.block_hashes = ["h0", "h1", "h2"]
    return request


def test_an_edits_salt_forgets_vllms_cache_on_arrival():
    rig = edited_rig()
    rig.side.arrived(salted())
    assert rig.side._block_pool.evicted == {7, 9}
    rig.side._block_pool.evicted.clear()
    rig.side.arrived(salted("b", salt="tenant"))  # nothing is stored under it: a salt as any other
    assert rig.side._block_pool.evicted == set()


def lose(rig, *numbers, rank=0):
    for number in numbers:
        rig.store.keys.discard(rig.parts.keys(CacheKind.KV, EDIT[number].digest, "e")[rank])


def bar_of(rig, ids=range(26), salt="e", *, name="a", arrives=True):
    """What bars the storing of a new request's rows, and how much it loads."""
    request = salted(name, ids, salt)
    if arrives:
        rig.side.arrived(request)
    matched = rig.side.matched_tokens(request, 0)
    return rig.side._followed[name].bar, matched


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("text", [UNTOLD, KEPT, LISTED])
@pytest.mark.parametrize(("lost", "matched"), [((0,), 0), ((1,), 8), ((0, 1), 0), ((2,), 16), ((1, 2), 8)])
def test_an_edit_that_lost_chunks_is_not_filled(text, lost, matched, arrives):
    rig = edited_rig(text)
    assert bar_of(rig, name="whole", arrives=arrives) == ("", 24)
    lose(rig, *lost)
    nobody_knows = text == UNTOLD and 2 in lost  # of an older qcap, or of an editor of one's own: it does not say how far it goes
    assert bar_of(rig, arrives=arrives) == ("" if nobody_knows else "edit-not-loaded", matched)


def test_an_edit_that_lost_one_ranks_chunk_is_not_filled():
    for number in range(3):
        for rank in range(2):
            rig = edited_rig(tp=2)
            lose(rig, number, rank=rank)
            assert bar_of(rig) == ("edit-not-loaded", 8 * number), (number, rank)
    for rank in range(2):
        rig = edited_rig(with_extent(UNTOLD, EDIT[:1]), tp=2)
        lose(rig, 1, 2)
        lose(rig, 1, 2, rank=1)
        lose(rig, 0, rank=rank)
        assert bar_of(rig) == ("edit-not-loaded", 0), "it has no other chunk by which it could be known"


def test_a_chunk_that_an_engine_computed_in_an_edits_place_bars():
    rig = edited_rig()
    rig.store.edits.pop(rig.parts.keys(CacheKind.KV, EDIT[2].digest, "e")[0])
    assert bar_of(rig) == ("edit-not-loaded", 24)


def test_what_is_computed_behind_a_whole_edit_may_be_stored():
    rig = edited_rig()
    longer = [*range(24), *range(100, 120)]
    assert bar_of(rig, longer) == ("", 24)
    rig.put(longer[:32], salt="e")  # an engine stored one chunk more
    assert bar_of(rig, longer, name="again") == ("", 32)


LONGER = [*range(24), *range(100, 120)]


def with_rows(rig, rows):
    """The edit's last chunk as it is, and the first chunk behind it as an engine computes it, if the edit's rows are ``rows``."""
    rig.store.rows = dict.fromkeys(rig.store.edits, rows)
    end = replace(EDIT[2], behind=behind_rows(EDIT[2].digest, rows))
    return end, ChunkedTokenDatabase(CH).extend([*EDIT[:2], end], LONGER)[3]


def test_what_is_computed_behind_an_edit_is_found_behind_its_rows_alone():
    rig = edited_rig()
    rig.put(LONGER[:32], salt="e")  # under a key that says nothing of rows
    end, behind = with_rows(rig, "one")
    assert bar_of(rig, LONGER) == ("", 24)
    rig.store.keys.update(rig.parts.keys(CacheKind.KV, behind.digest, "e"))
    assert bar_of(rig, LONGER, name="again") == ("", 32)
    request = rig.side._followed["again"].request
    rig.side.allocated(request, 32)
    step = rig.step(new=[(request, range(1, 12), 32)], scheduled={"again": 12})
    assert step.loads[0].digests == (*(c.digest for c in EDIT), behind.digest) and step.loads[0].behind == end.behind
    (told,) = (update for update in step.tokens if update.uid == step.requests[0].uid)
    assert told.chunks[2:4] == (end, behind), "the worker hashes on from there"
    with_rows(rig, "two")
    assert bar_of(rig, LONGER, name="other") == ("", 24)


def test_a_hole_behind_an_edit_is_filled():
    rig = edited_rig()
    end, _ = with_rows(rig, "one")
    later = ChunkedTokenDatabase(CH).extend([*EDIT[:2], end], LONGER)[4]
    rig.store.keys.update(rig.parts.keys(CacheKind.KV, later.digest, "e"))
    assert bar_of(rig, LONGER) == ("", 24)


def test_an_edit_that_lost_a_chunk_which_its_text_does_not_list_is_missed():
    rig = edited_rig(with_extent('{"name": "x"}', EDIT[:1]))  # the text of another sequence that begins alike
    with_rows(rig, "one")
    assert bar_of(rig, LONGER, name="whole") == ("", 24)
    lose(rig, 1)
    assert bar_of(rig, LONGER) == ("edit-not-loaded", 8)
    end = replace(EDIT[0], behind=behind_rows(EDIT[0].digest, "one"))
    for chunk in ChunkedTokenDatabase(CH).extend([end], LONGER)[1:]:  # what was computed behind the part that is left
        rig.store.keys.update(rig.parts.keys(CacheKind.KV, chunk.digest, "e"))
    assert bar_of(rig, LONGER, name="again") == ("edit-not-loaded", 40)


def test_what_an_engine_stored_before_there_was_an_edit_does_not_bar():
    """Under the edit's salt, and behind it: its keys say nothing of rows, so it is not found; nor is it the edit's."""
    rig = edited_rig()
    rig.put(LONGER, salt="e")
    with_rows(rig, "one")
    assert bar_of(rig, LONGER) == ("", 24)


def test_a_load_that_ends_before_the_edit_does_says_nothing_of_its_rows():
    rig = edited_rig()
    with_rows(rig, "one")
    lose(rig, 1)
    request = salted("a", LONGER)
    rig.side.arrived(request)
    step = rig.admit(request, range(1, 12), 44 - 8, computed=8)
    assert step.loads[0].end == 8 and step.loads[0].behind == "" and step.requests[0].skip == "edit-not-loaded"


class Own:
    """vLLM with a prefix cache: what blocks it has of a salted prompt, and what it asks of us when it takes a request up."""

    def __init__(self):
        self.rig, self.next = edited_rig(), 1
        self.pool = self.rig.side._block_pool = Pool({})

    def arrives(self, name, ids=LONGER):
        request = salted(name, ids)
        request.block_hashes = [tuple(ids[: (i + 1) * N]) for i in range(len(ids) // N)]
        self.rig.side.arrived(request)
        return request

    def local(self, request):
        hashes = request.block_hashes[: (len(request.all_token_ids) - 1) // N]
        return next((i for i, one in enumerate(hashes) if one not in self.pool.cached), len(hashes)) * N

    def takes_up(self, request):
        """(tokens in its own blocks, tokens that are loaded or None); given blocks, which are found from now on, if it is not put off."""
        local = self.local(request)
        external = self.rig.side.matched_tokens(request, local)
        if external is None:
            return local, None
        blocks = [self.pool.cached[one] for one in request.block_hashes[: local // N]]
        while len(blocks) * N < len(request.all_token_ids):
            blocks.append(self.next)
            self.next += 1
        self.rig.side.allocated(request, external, SimpleNamespace(get_block_ids=lambda: (blocks,)))
        for one, block in zip(request.block_hashes, blocks, strict=False):
            self.pool.cached.setdefault(one, block)
        request.blocks = blocks
        return local, external

    def runs(self, request, computed):
        return self.rig.step(
            new=[(request, request.blocks, computed)], scheduled={request.request_id: len(request.all_token_ids) - computed}
        )


def bar_in(own, name):
    return own.rig.side._followed[name].bar


@pytest.mark.parametrize("ran", [True, False])
@pytest.mark.parametrize("ids", [LONGER, [*range(16), *range(60, 80)]])
def test_vllms_own_blocks_of_an_edit_that_was_replaced_are_not_gone_on_from(ids, ran):
    """Not even in the same step, nor by a prompt that leaves the edit midway: they are forgotten, and the edit is loaded."""
    own = Own()
    with_rows(own.rig, "one")
    first, second, third = own.arrives("first"), own.arrives("second", ids), own.arrives("third", ids)
    assert own.takes_up(first) == (0, 24)
    if ran:
        own.runs(first, 24)
    with_rows(own.rig, "two")
    assert own.takes_up(second)[1] is None and own.local(second) == 0
    loaded = 24 if ids is LONGER else 16
    assert own.takes_up(second) == (0, loaded) and bar_in(own, "second") == ""
    assert own.takes_up(third)[1] == 0 and bar_in(own, "third") == "", "it shares the second one's blocks"
    assert bar_in(own, "first") == ""


def test_vllms_own_blocks_of_an_edit_are_shared():
    own = Own()
    with_rows(own.rig, "one")
    first, second = own.arrives("first"), own.arrives("second")
    assert own.takes_up(first) == (0, 24)
    own.runs(first, 24)
    assert own.takes_up(second) == (40, 0) and bar_in(own, "second") == "" and not own.pool.evicted
    step = own.runs(second, 40)
    assert not step.loads and step.requests[0].skip == ""


def test_blocks_that_a_request_computed_on_the_rows_before_are_not_found_behind_the_new_ones():
    own = Own()
    with_rows(own.rig, "one")
    old, new, last = own.arrives("old"), None, None
    assert own.takes_up(old) == (0, 24)
    own.pool.cached = {one: block for one, block in own.pool.cached.items() if len(one) <= 24}
    with_rows(own.rig, "two")
    new, last = own.arrives("new", LONGER[:33]), own.arrives("last")
    assert not own.pool.cached, "forgotten on arrival"
    assert own.takes_up(new) == (0, 24)
    own.pool.cached.update({one: block for one, block in zip(old.block_hashes, old.blocks, strict=False) if len(one) > 32})  # it goes on
    assert own.takes_up(last)[1] is None and own.local(last) == 32
    assert own.takes_up(last) == (32, 0) and bar_in(own, "last") == ""


def test_a_request_is_not_put_off_for_ever():
    own = Own()
    with_rows(own.rig, "one")
    first, second = own.arrives("first"), own.arrives("second")
    own.takes_up(first)
    with_rows(own.rig, "two")
    own.pool.evict_blocks = lambda blocks: None
    most = scheduler_module.MAX_PUT_OFF
    for _ in range(2):  # counted anew once it was taken up
        assert [own.takes_up(second)[1] for _ in range(most + 1)] == [None] * most + [0]
        assert bar_in(own, "second") == "edit-not-loaded"


def test_who_arrived_before_an_edit_does_not_go_on_from_blocks_that_hold_it_unseen():
    own = Own()
    kept, own.rig.store.keys = own.rig.store.keys, set()  # nothing is stored yet
    tenant = own.arrives("tenant")
    assert not own.rig.side._followed["tenant"].is_edit
    own.rig.store.keys = kept
    with_rows(own.rig, "one")
    other = own.arrives("other")
    assert own.takes_up(other) == (0, 24)
    assert own.takes_up(tenant) == (40, 0) and own.rig.side._followed["tenant"].is_edit and bar_in(own, "tenant") == ""


def test_blocks_of_a_load_that_failed_are_of_no_rows():
    own = Own()
    with_rows(own.rig, "one")
    first, second = own.arrives("first"), own.arrives("second")
    own.takes_up(first)
    own.runs(first, 24)
    own.rig.side.load_failed({first.blocks[2]})
    assert own.takes_up(second)[1] is None


def test_an_edit_that_was_stored_after_a_request_had_arrived_is_not_loaded_unseen():
    rig = Rig(load="salted")
    request = salted("a", LONGER)
    rig.side.arrived(request)
    rig.put(range(24), salt="e")
    rig.store.edits = dict.fromkeys(rig.store.keys, LISTED)
    assert rig.admit(request, range(1, 12), 20, computed=24).loads[0].behind == NO_EDIT


@pytest.mark.parametrize("replaced", [False, True])
def test_a_request_that_resumes_behind_other_rows_stores_no_more(replaced):
    rig = edited_rig()
    with_rows(rig, "one")
    request = salted("a", LONGER)
    rig.side.arrived(request)
    rig.admit(request, range(1, 12), 44 - 24, computed=24)
    if replaced:
        with_rows(rig, "two")
    rig.step(preempted={"a"})
    assert rig.side.matched_tokens(request, 0) == 24
    assert rig.side._followed["a"].bar == ("edit-not-loaded" if replaced else "")


def test_an_edit_goes_on_behind_what_its_text_lists():
    """Sequences that begin alike share the text that was stored first."""
    rig = edited_rig(with_extent('{"name": "x"}', EDIT[:1]))
    end, behind = with_rows(rig, "one")
    rig.store.keys.update(rig.parts.keys(CacheKind.KV, behind.digest, "e"))
    assert bar_of(rig, LONGER) == ("", 32) and rig.side._followed["a"].end == end


@pytest.mark.parametrize(("ids", "salt", "matched"), [
    ([*range(8), *range(50, 70)], "e", 8),  # goes its own way after the edit's first chunk
    (range(50, 80), "e", 0),  # nothing in common
    (range(18), "e", 16),  # ends before the edit does
    (range(26), "tenant", 0),
])  # fmt: skip
def test_a_prompt_that_is_not_the_edits_is_as_any_other(ids, salt, matched):
    assert bar_of(edited_rig(), ids, salt) == ("", matched)


def test_a_prompt_that_leaves_the_edit_behind_a_lost_chunk_does_not_fill_it():
    rig = edited_rig()
    lose(rig, 1)
    assert bar_of(rig, [*range(16), *range(50, 70)]) == ("edit-not-loaded", 8)


def test_what_asking_costs():
    rig = edited_rig()
    bar_of(rig, salt=None)
    rig.side.finished(salted(salt=None))
    assert (rig.store.headers, rig.store.asked) == (0, 0), "a request without a salt costs nothing"
    bar_of(rig, name="b")
    assert rig.store.headers == 2, "an edit's first chunk, and its last"
    rig.put(range(24), salt="tenant")
    rig.store.headers = rig.store.asked = 0
    rig.side.arrived(salted("t", salt="tenant"))
    assert (rig.store.headers, rig.store.asked) == (1, 0), "a tenant's: its first chunk is there, and no edit"
    for cheap, most in ((True, scheduler_module.PROBES_CHEAP + 6), (False, scheduler_module.PROBES + 9)):
        rig.store.cheap_contains, rig.store.asked = cheap, 0
        rig.side.arrived(salted(f"t{cheap}", range(900, 900 + 1000 * CH), "new tenant"))
        assert 0 < rig.store.asked <= most


def test_a_store_that_comes_back_is_asked_again():
    rig = edited_rig()
    rig.store.down = True
    request = salted()
    rig.side.arrived(request)
    rig.store.down = False
    lose(rig, 2)
    assert rig.side.matched_tokens(request, 0) == 16 and rig.side._followed["a"].bar == "edit-not-loaded"
    rig.store.down = True
    tenant = salted("t", salt="tenant")
    rig.side.arrived(tenant)
    rig.store.down = False
    assert rig.side.matched_tokens(tenant, 0) == 0 and rig.side._followed["t"].bar == "", "no edit after all"


def test_an_edit_whose_load_vllm_refuses_is_not_gone_on_from():  # skip_reading_prefix_cache
    rig = edited_rig()
    request = salted()
    rig.side.arrived(request)
    (planned,) = rig.admit(request, [4, 5, 6, 7, 8, 9, 10], 26, external=0).requests
    assert planned.skip == "edit-not-loaded"


def test_after_a_failed_load_of_an_edit_nothing_is_stored_under_its_salt():
    rig = edited_rig()
    first = salted("first")
    rig.side.arrived(first)
    rig.admit(first, [4, 5, 6, 7, 8, 9, 10], 26, computed=24, external=24)
    rig.side.load_failed({5})
    later = salted("later")
    rig.side.arrived(later)
    assert rig.side._followed["first"].bar == rig.side._followed["later"].bar == "load-failed"
    (planned,) = rig.admit(later, [4, 5, 6, 7, 8, 9, 10], 26).requests
    assert planned.skip == "load-failed"


class Failed:
    """An edit's rig after a load of it failed, with the request whose load that was still there. Time has passed: it is offered again."""

    def __init__(self, monkeypatch, **more):
        self.rig, self.first = edited_rig(**more), salted("first")
        self.serve(self.first, 4)
        self.rig.side.load_failed({5})
        now = scheduler_module.time.monotonic()
        monkeypatch.setattr(scheduler_module.time, "monotonic", lambda: now + scheduler_module.RETRY_LOAD_S + 1)

    def serve(self, request, block, *, local=0):
        self.rig.side.arrived(request)
        self.rig.admit(request, range(block, block + 7), 26 - 24, computed=24, local=local)

    def end(self, request, *, tokens=1):
        request.all_token_ids += [7] * tokens
        request.num_computed_tokens = 26
        self.rig.side.finished(request)

    def bars(self):
        """Whether a new request's rows are not stored for the failure's sake."""
        request = salted("new")
        self.rig.side.arrived(request)
        bar = self.rig.side._followed["new"].bar
        self.rig.side.finished(request)
        assert bar in ("", "load-failed")
        return bool(bar)


def test_a_later_load_of_the_whole_edit_makes_receipts_true_again(monkeypatch):
    failed = Failed(monkeypatch)
    failed.end(failed.first)
    second = salted("second")
    failed.serve(second, 20)
    assert failed.rig.side._followed["second"].bar == "load-failed", "not known yet"
    assert failed.bars()
    failed.end(second)
    assert not failed.bars()
    third = salted("third")
    failed.serve(third, 30)
    assert failed.rig.side._followed["third"].bar == ""
    failed.rig.side.load_failed({31})  # and may fail again
    assert failed.bars()


def test_a_load_is_not_believed_while_rows_computed_in_the_edits_place_are_in_use(monkeypatch):
    failed = Failed(monkeypatch)
    second, third = salted("second"), salted("third")
    failed.serve(second, 20)
    failed.serve(third, 30)
    failed.end(second)
    assert failed.bars(), "the first request's blocks may get into vLLM's cache after another's arrival"
    failed.end(failed.first)
    assert failed.bars(), "a failed load proves nothing"
    failed.end(third)
    assert not failed.bars()


@pytest.mark.parametrize("how", ["failed too", "no token yet", "from vllm's cache", "not whole", "before the failure", "no block pool"])
def test_what_is_no_proof_of_a_whole_load(monkeypatch, how):
    failed, second = Failed(monkeypatch), salted("second")
    if how == "no block pool":
        failed.rig.side.bind_block_pool(None)
    if how == "not whole":
        lose(failed.rig, 2)
    failed.serve(second, 20, local=8 if how == "from vllm's cache" else 0)
    if how == "failed too":
        failed.rig.side.load_failed({21})
    if how == "before the failure":
        failed.rig.side.load_failed({5})
    failed.end(failed.first)
    failed.end(second, tokens=0 if how == "no token yet" else 1)
    assert failed.bars()


def test_a_request_that_goes_on_from_vllms_cache_after_preemption_is_no_proof(monkeypatch):
    failed, second = Failed(monkeypatch), salted("second")
    failed.serve(second, 20)
    failed.rig.step(preempted={"second"})
    failed.rig.side.matched_tokens(second, 16)  # whose blocks these are cannot be told: the first request's, perhaps
    failed.end(failed.first)
    failed.end(second)
    assert failed.bars()


def test_a_store_that_cannot_be_opened_bars_and_does_not_raise():
    rig = edited_rig()

    def refuse():
        raise StoreUnavailable("gone away")

    rig.side._open_backend = refuse
    request = salted()
    rig.side.arrived(request)
    assert rig.side.matched_tokens(request, 0) == 0
    assert rig.side._followed["a"].bar == "edit-not-loaded", "whether it is an edit cannot be told: it is not filled"


# ---- loads that a worker may begin early --------------------------------------------------------------------------------------------


class Early:
    """Takes note; ``takes`` pieces are welcome, then no more."""

    def __init__(self, takes=99):
        self.takes, self.pieces, self.ends = takes, [], []

    def more(self, uid, salt, start, end, chunks, token_ids):
        assert [c.digest for c in chunks] == [c.digest for c in ChunkedTokenDatabase(CH).chunks(token_ids)][: len(chunks)]
        assert len(chunks) * CH >= end - CH + 1 and type(token_ids) is list
        self.pieces.append((salt, start, end))
        self.takes -= 1
        return self.takes >= 0

    def told(self, uid):
        self.ends.append(uid)


@pytest.mark.parametrize(("stored", "prompt", "local", "pieces"), [
    (5, 5 * CH + 1, 0, [(0, CH), (CH, 2 * CH), (2 * CH, 4 * CH), (4 * CH, 5 * CH)]),
    (5, 5 * CH, 0, [(0, CH), (CH, 2 * CH), (2 * CH, 4 * CH), (4 * CH, 5 * CH - N)]),
    (3, 5 * CH + 1, 0, [(0, CH), (CH, 2 * CH), (2 * CH, 3 * CH)]),
    (4, 5 * CH + 1, 3 * CH + N, [(3 * CH + N, 4 * CH)]),
    (5, 5 * CH + 1, 2 * CH, [(2 * CH, 3 * CH), (3 * CH, 4 * CH), (4 * CH, 5 * CH)]),
    (3, 5 * CH + 1, 3 * CH, []),
    (0, 5 * CH + 1, 0, []),
    (1, CH + 1, 0, [(0, CH)]),
])  # fmt: skip
def test_a_worker_is_told_of_chunks_as_they_are_found(monkeypatch, stored, prompt, local, pieces):
    monkeypatch.setattr(scheduler_module, "MATCH_FIRST", (1, 2))
    monkeypatch.setattr(scheduler_module, "MATCH_CHUNKS", 2)
    early = Early()
    rig, ids = Rig(early=early), range(prompt)
    rig.put(ids[: stored * CH])
    request = make_request(prompt=ids)
    matched = rig.side.matched_tokens(request, local)
    assert matched == max(0, min(stored * CH, (prompt - 1) // N * N) - local) == sum(end - start for _, start, end in early.pieces)
    assert early.pieces == [("", *piece) for piece in pieces] and len(early.ends) == bool(pieces)
    rig.side.allocated(request, matched)
    blocks = list(range(-(-prompt // N)))
    step = rig.step(new=[(request, blocks, local + matched)], scheduled={"a": prompt - local - matched})
    assert [(load.start, load.end) for load in step.loads] == ([(local, local + matched)] if matched else [])
    assert all(early.ends == [load.uid] for load in step.loads)


def test_a_load_for_which_there_are_no_blocks_is_told_of_once():
    early = Early()
    rig, request = Rig(early=early), make_request(prompt=range(3 * CH + 1), cache_salt="s")
    rig.put(range(3 * CH), salt="s")
    for _ in range(3):
        assert rig.side.matched_tokens(request, 0) == 3 * CH
    assert early.pieces == [("s", 0, 3 * CH)]
    rig.admit(request, list(range(7)), 1, computed=3 * CH)
    assert len(early.pieces) == 1
    rig.step(preempted={"a"})
    assert rig.side.matched_tokens(request, 0) == 3 * CH and len(early.pieces) == 2, "after it ran, it may be told of again"


def test_a_worker_that_wants_no_more(monkeypatch):
    monkeypatch.setattr(scheduler_module, "MATCH_FIRST", (1, 2))
    monkeypatch.setattr(scheduler_module, "MATCH_CHUNKS", 1)
    early = Early(takes=1)
    rig = Rig(early=early)
    rig.put(range(4 * CH))
    assert rig.side.matched_tokens(make_request(prompt=range(4 * CH + 1)), 0) == 4 * CH
    assert early.pieces == [("", 0, CH), ("", CH, 2 * CH)] and not early.ends


def test_only_what_is_looked_for_is_hashed(monkeypatch):
    monkeypatch.setattr(scheduler_module, "MATCH_CHUNKS", 2)
    rig, request = Rig(), make_request(prompt=range(9 * CH))
    assert rig.side.matched_tokens(request, 0) == 0
    assert len(rig.side._followed["a"].chunks) == 2, "nothing is stored: the rest need not be known"


# ---- an edit's neighbours -----------------------------------------------------------------------------------------------------------


def go_on(rig, request, local, *, blocks=(20, 21, 22, 23, 24, 25, 26), computed=None):
    """Match and admit a request that found ``local`` tokens in vLLM's own blocks; why nothing of it may be stored."""
    matched = rig.side.matched_tokens(request, local)
    rig.side.allocated(request, matched, SimpleNamespace(get_block_ids=lambda: (list(blocks),)))
    start = local + matched if computed is None else computed
    total = len(request.all_token_ids)
    (planned,) = rig.step(new=[(request, list(blocks)[: -(-total // N)], start)], scheduled={request.request_id: total - start}).requests
    return planned.skip


@pytest.mark.parametrize("suffix", [26, 40])
@pytest.mark.parametrize("how", ["lost", "refused", "short"])
def test_who_goes_on_from_rows_in_an_edits_place_is_barred_too(how, suffix):
    """A computes in the edit's place; B arrived before that, and finds A's blocks in vLLM's prefix cache."""
    rig = edited_rig()
    first, second = salted("a", range(24 if how == "short" else 26)), salted("b", range(suffix))
    rig.side.arrived(first)
    rig.side.arrived(second)
    if how == "lost":
        lose(rig, 2)
    matched = rig.side.matched_tokens(first, 0)
    assert matched == {"lost": 16, "refused": 24, "short": 20}[how]
    rig.side._block_pool.evicted.clear()
    rig.side.allocated(first, 0 if how == "refused" else matched, SimpleNamespace(get_block_ids=lambda: ([4, 5, 6, 7, 8, 9, 10],)))
    assert rig.side._block_pool.evicted == {4, 5, 6, 7, 8, 9, 10}, "nobody is to find them"
    local = 24  # in the very same pass, before the step is planned
    rig.side.matched_tokens(second, local)
    assert rig.side._followed["b"].bar == "edit-not-loaded"
    total = len(first.all_token_ids)
    (planned,) = rig.step(new=[(first, [4, 5, 6, 7, 8, 9, 10][: -(-total // N)], 0)], scheduled={"a": total}).requests
    assert planned.skip == "edit-not-loaded"
    assert go_on(rig, second, local) == "edit-not-loaded"


def test_who_arrives_after_them_is_believed():
    rig = edited_rig()
    first = salted("a")
    rig.side.arrived(first)
    assert go_on(rig, first, 0, computed=0) == ""  # the whole edit, loaded
    second = salted("b")
    rig.side.arrived(second)
    assert go_on(rig, second, 24) == "", "the blocks of one that loaded the whole edit"
    third = salted("c")
    rig.side.arrived(third)
    rig.side.matched_tokens(third, 0)
    rig.side.allocated(third, 0)  # vLLM refused its load
    rig.step(new=[(third, [1, 2, 3, 4, 5, 6, 7], 0)], scheduled={"c": 26})
    rig.side.finished(third)
    fourth = salted("d")
    rig.side.arrived(fourth)  # what the third left is forgotten now
    assert go_on(rig, fourth, 0) == ""
    fifth = salted("f")
    rig.step()
    rig.side.arrived(fifth)
    assert go_on(rig, fifth, 24) == ""


def test_as_long_as_someone_computes_in_an_edits_place_its_blocks_are_not_to_be_found():
    rig = edited_rig()
    lose(rig, 1)
    request = salted("a")
    rig.side.arrived(request)
    assert go_on(rig, request, 0) == "edit-not-loaded"
    rig.side._block_pool.evicted.clear()
    request.all_token_ids.append(77)
    rig.step(cached=[(request, [30], 26)], scheduled={"a": 1})
    assert {20, 30} <= rig.side._block_pool.evicted and rig.side._in_place["e"] == 2
    late = salted("b")
    rig.side.arrived(late)
    rig.store.keys.update(rig.parts.keys(CacheKind.KV, EDIT[1].digest, "e"))  # stored again
    rig.step(cached=[(request, None, 27)], scheduled={"a": 1})
    assert go_on(rig, late, 8) == "edit-not-loaded", "the first one goes on, and so may its blocks"


@pytest.mark.parametrize("length", [24, 25, 28])
def test_a_prompt_that_ends_with_the_edit_computes_its_last_block(length):
    rig = edited_rig()
    assert bar_of(rig, range(length)) == (("edit-not-loaded", 20) if length == 24 else ("", 24))


def test_an_edit_whose_text_cannot_be_read_is_not_gone_on_from(monkeypatch):
    rig = edited_rig()

    def gone(key):
        raise StoreUnavailable("gone away")

    monkeypatch.setattr(rig.store, "edit_of", gone, raising=False)
    assert bar_of(rig) == ("edit-not-loaded", 24)


def test_the_last_chunk_tells_of_an_edit_whose_storing_was_cut_off():
    rig = edited_rig()
    ids = range(8 * CH)
    chunks = ChunkedTokenDatabase(CH).chunks(ids)
    rig.store.keys, rig.store.edits, rig.store.cheap_contains = set(), {}, False
    for chunk in chunks[5:]:
        for key in rig.parts.keys(CacheKind.KV, chunk.digest, "e"):
            rig.store.keys.add(key)
            rig.store.edits[key] = UNTOLD
    assert bar_of(rig, range(8 * CH + 2))[0] == "edit-not-loaded"


def test_a_tenants_neighbours_are_left_alone():
    rig = edited_rig()
    rig.put(range(24), salt="tenant")
    for name in ("a", "b"):
        request = salted(name, salt="tenant")
        rig.side.arrived(request)
        assert go_on(rig, request, 24 if name == "b" else 0, computed=0) == ""
    assert not rig.side._in_place
