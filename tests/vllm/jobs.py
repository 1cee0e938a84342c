"""What runs inside a fresh process with one engine. Parents call these through ``qcap.testing.engine.run_in_process``."""

from __future__ import annotations

import gc
import random
import time
from pathlib import Path
from typing import Any


def make_prompts(lengths: list[int], vocab: int, seed: int = 0, shared: int = 0) -> list[list[int]]:
    """Random token ids; the first ``shared`` of each prompt are the same."""
    rng = random.Random(seed)
    head = [rng.randrange(3, vocab) for _ in range(shared)]
    return [(head + [rng.randrange(3, vocab) for _ in range(n)])[:n] for n in lengths]


def build(p: dict[str, Any]) -> Any:
    """An engine with the connector, from a job's description."""
    import qcap.vllm
    from qcap.testing.engine import build_llm

    config = qcap.vllm.transfer_config(p["store"], **{"query": True, "chunk_size": 32, **p.get("qcap", {})})
    engine = {"block_size": 32, "enable_prefix_caching": False, **p.get("engine", {})}
    return build_llm(p["model"], kv_transfer_config=config, **engine)


def worker_of(llm: Any) -> Any:
    """This process's WorkerSide."""
    from qcap.vllm import worker

    (side,) = list(worker._local.values())
    return side


def state(llm: Any) -> dict[str, Any]:
    """What must be back where it was once nothing is served."""
    side = worker_of(llm)
    return {
        "counters": dict(side.counters),
        "store": side.capture.backend.counters(),
        "ring_held": _held(side._query),
        "memory": side.memory_report(),
        "tracks": len(side.capture._tracks),
        "buffers_out": _settled(side.capture._arena),
        "refused": dict(side.refused),
        "followed": len(_scheduler(llm)._followed),
    }


def _held(query: Any) -> int:
    """Ring blocks in use, or what a streaming ring keeps of requests."""
    if query is None:
        return 0
    ring = getattr(query, "ring", None)
    return ring.usage().used if ring is not None else len(query.ledger._requests)


def _settled(arena: Any) -> int:
    """Pieces that do not come back within some seconds: rows that are being moved do so by themselves."""
    for _ in range(100):
        if not arena.outstanding:
            break
        time.sleep(0.05)
    return int(arena.outstanding)


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler


def sampling(n: int, **more: Any) -> Any:
    """Greedy, ``n`` tokens whatever they are."""
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "max_tokens": n, "ignore_eos": True, "detokenize": False, **more})


def generate(llm: Any, requests: list[dict[str, Any]]) -> list[Any]:
    """Requests: ``ids``, ``n``, optional ``salt`` and further sampling parameters under ``params``."""
    import qcap.vllm

    prompts = [qcap.vllm.prompt(r["ids"], r.get("salt", "")) for r in requests]
    params = [sampling(r["n"], **r.get("params", {})) for r in requests]
    return llm.generate(prompts, params, use_tqdm=False)


def told(outputs: list[Any]) -> list[dict[str, Any]]:
    """The parts of vLLM's outputs that tests look at."""
    return [
        {
            "tokens": list(o.outputs[0].token_ids),
            "cached": o.num_cached_tokens,
            "finish": o.outputs[0].finish_reason,
            "params": o.kv_transfer_params,
        }
        for o in outputs
    ]


def file_of(store: str, key: Any) -> Path:
    """Where a ``file://`` store keeps the object of ``key``."""
    from qcap.store.objects import object_path

    return Path(store.removeprefix("file://")) / object_path(key)


def close(llm: Any) -> None:
    """End the engine as a user's process would."""
    llm.llm_engine.engine_core.shutdown()
    gc.collect()


def serve(p: dict[str, Any]) -> dict[str, Any]:
    """One engine; each of ``p["batches"]`` (lists of requests) is served at once, one after the other."""
    import qcap.vllm

    llm = build(p)
    rounds = []
    for batch in p["batches"]:
        outputs = generate(llm, batch)
        receipt = qcap.vllm.receipt(outputs)
        rounds.append({"outputs": told(outputs), "stored": receipt.stored, "skipped": receipt.skipped, "whole": receipt.whole})
    left = state(llm)
    close(llm)
    return {"rounds": rounds, "state": left}


def damaged_edit(p: dict[str, Any]) -> dict[str, Any]:
    """An edit with one damaged object: what the engine serves and stores under its salt before and after it is stored again."""
    import torch

    import qcap
    import qcap.vllm
    from qcap.backends import open_backend
    from qcap.kinds import CacheKind
    from qcap.tokens import ChunkedTokenDatabase, chunk_key
    from qcap.vllm import scheduler

    scheduler.RETRY_LOAD_S = 0.0  # else the repaired edit would not be offered for a minute
    llm = build(p)
    ids, n, size = p["ids"], p["n"], 32
    whole = (len(ids) - 1) // size * size
    (cold,) = generate(llm, [{"ids": ids, "n": n}])
    qcap.vllm.receipt([cold])
    found: dict[str, Any] = {"cold": told([cold])[0]}
    with qcap.connect(p["store"], model=p["model"]) as ctx:
        edited = ctx.retrieve(ids[:whole]) * 0.25
        assert ctx.store(edited, ids[:whole], salt="edit")
    backend = open_backend(p["store"])
    ((geometry, _, _),) = backend.manifests(p["model"])
    key = chunk_key(CacheKind.KV, geometry, ChunkedTokenDatabase(size).chunks(ids)[3].digest, "edit")
    path = file_of(p["store"], key)
    good = path.read_bytes()
    path.write_bytes(good[:-16] + bytes(b ^ 255 for b in good[-16:]))
    for name in ("first", "second"):
        (out,) = generate(llm, [{"ids": ids, "n": n, "salt": "edit"}])
        try:
            found[name] = {**told([out])[0], "skipped": qcap.vllm.receipt([out]).skipped}
        except qcap.errors.CaptureEmpty as error:
            found[name] = {**told([out])[0], "skipped": {"all": str(error)}}
    found["still_damaged"] = path.read_bytes() != good and open_backend(p["store"]).edit_of(key) != ""
    path.write_bytes(good)
    (out,) = generate(llm, [{"ids": ids, "n": n, "salt": "edit"}])
    found["repaired"] = told([out])[0]
    (out,) = generate(llm, [{"ids": ids, "n": n, "salt": "edit"}])
    found["believed"] = {**told([out])[0], "skipped": qcap.vllm.receipt([out]).skipped}
    longer = [*ids, *found["repaired"]["tokens"]]  # a whole chunk behind the edit, which the engine has stored
    for name, rows in (("gone on", None), ("overwritten", edited * 2), ("gone on from that", None), ("as before", edited)):
        if rows is not None:
            with qcap.connect(p["store"], model=p["model"]) as ctx:
                assert ctx.store(rows, ids[:whole], salt="edit", overwrite=True)
        before = state(llm)["counters"].get("load.tokens", 0)
        (out,) = generate(llm, [{"ids": longer, "n": n, "salt": "edit"}])
        found[name] = {**told([out])[0], "loaded": state(llm)["counters"]["load.tokens"] - before}
        qcap.vllm.receipt([out])
    torch.save(edited, p["tensors"])
    found["errors"] = state(llm)["counters"].get("errors", 0)
    close(llm)
    return found


def replaced_meanwhile(p: dict[str, Any]) -> dict[str, Any]:
    """Three requests of an edit's salt, one served at a time; the edit is replaced while the first one is: what is served, how much of it
    was loaded and how much came from vLLM's own cache; then the first edit's rows come back, and one more is served."""
    import torch

    import qcap
    import qcap.vllm

    llm = build(p)
    ids, n, size = p["ids"], p["n"], 32
    whole = (len(ids) - 1) // size * size
    (cold,) = generate(llm, [{"ids": ids, "n": n}])
    qcap.vllm.receipt([cold])
    with qcap.connect(p["store"], model=p["model"]) as ctx:
        edited = ctx.retrieve(ids[:whole]) * 0.25
        assert ctx.store(edited, ids[:whole], salt="edit")
        engine, outputs = llm.llm_engine, {}
        for name in ("first", "second", "third"):
            engine.add_request(name, qcap.vllm.prompt(ids, "edit"), sampling(n))
        steps = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = output
            steps += 1
            if steps == 4:
                assert ctx.store(edited * 2, ids[:whole], salt="edit", overwrite=True)
        found = {name: told([outputs[name]])[0] for name in outputs}
        receipts = [record for record in ctx.sequences() if record.salt == "edit"]
        found["skipped"] = [dict(record.skipped) for record in receipts]
        assert ctx.store(edited, ids[:whole], salt="edit", overwrite=True)
    (out,) = generate(llm, [{"ids": ids, "n": n, "salt": "edit"}])
    found["back"] = told([out])[0]
    torch.save(edited, p["tensors"])
    found["counters"] = {name: count for name, count in state(llm)["counters"].items() if name.startswith(("load.", "errors"))}
    close(llm)
    return found


def lost_chunks(p: dict[str, Any]) -> dict[str, Any]:
    """Edits that lost a chunk, each under a salt of its own: what is served and told, what is then in the chunk's place, and what is served
    after the edit was stored again."""
    import torch

    import qcap
    import qcap.vllm
    from qcap.kinds import CacheKind
    from qcap.store.verify import verify_store
    from qcap.tokens import ChunkedTokenDatabase, chunk_key

    llm = build(p)
    ids, n, size = p["ids"], p["n"], 32
    whole = (len(ids) - 1) // size * size
    (cold,) = generate(llm, [{"ids": ids, "n": n}])
    qcap.vllm.receipt([cold])
    found: dict[str, Any] = {"cold": told([cold])[0]}
    with qcap.connect(p["store"], model=p["model"]) as ctx:
        edited = ctx.retrieve(ids[:whole]) * 0.25
        for number in p["lost"]:
            salt = f"lost-{number}"
            assert ctx.store(edited, ids[:whole], salt=salt)
            digest = ChunkedTokenDatabase(size).chunks(ids)[number].digest
            path = file_of(p["store"], chunk_key(CacheKind.KV, ctx.geometry, digest, salt))
            path.unlink()
            (out,) = generate(llm, [{"ids": ids, "n": n, "salt": salt}])
            try:
                said = repr(qcap.vllm.receipt([out]))
            except qcap.errors.CaptureEmpty as error:
                said = str(error)
            holed = {
                **told([out])[0],
                "said": said,
                "filled": path.exists(),
                "verified": [e.salt for e in verify_store(p["store"]).broken_edits],
            }
            assert ctx.store(edited, ids[:whole], salt=salt), "stored again, and no conflict"
            (out,) = generate(llm, [{"ids": ids, "n": n, "salt": salt}])
            found[salt] = {"holed": holed, "whole": {**told([out])[0], "skipped": qcap.vllm.receipt([out]).skipped}}
    torch.save(edited, p["tensors"])
    found["sound"] = verify_store(p["store"]).ok
    found["errors"] = state(llm)["counters"].get("errors", 0)
    close(llm)
    return found


def write_back(p: dict[str, Any]) -> dict[str, Any]:
    """Capture one prompt; then go on in the same engine from the cache unchanged, from a shortened one, and from one with other values.

    Every cache is written back by the SDK under a salt of its own and loaded by the engine for the request that carries the salt.
    """
    import torch

    import qcap
    import qcap.vllm
    from qcap.sdk import edits

    llm = build(p)
    ids, n, size = p["ids"], p["n"], 32
    (cold,) = generate(llm, [{"ids": ids, "n": n}])
    qcap.vllm.receipt([cold])
    found: dict[str, Any] = {"cold": told([cold])[0]}
    with qcap.connect(p["store"], model=p["model"]) as ctx:
        kv = ctx.retrieve(ids[: (len(ids) - 1) // size * size])
        whole = kv.shape[2]
        rest = ids[whole:]

        assert ctx.store(kv, ids[:whole], salt="unchanged")
        index = torch.tensor(p["keep"])
        shorter = edits.keep(kv, index, geometry=ctx.geometry, positions="renumber")
        kept = [ids[i] for i in p["keep"]]
        assert ctx.store(shorter, kept, salt="shorter")
        other = kv.clone()
        other[1] *= 0.5
        other[0, :, 5:40] *= 1.5
        assert ctx.store(other, ids[:whole], salt="other")
    for salt, prompt in (("unchanged", ids), ("shorter", kept + rest), ("other", ids), ("", ids), ("never-stored", kept + rest)):
        (out,) = generate(llm, [{"ids": prompt, "n": n, "salt": salt}])
        found[salt or "plain"] = {**told([out])[0], "ids": prompt}
        qcap.vllm.receipt([out])
    both = generate(llm, [{"ids": ids, "n": n, "salt": "other"}, {"ids": ids, "n": n}, {"ids": ids, "n": n, "salt": "unchanged"}])
    found["together"] = told(both)
    torch.save({"shorter": shorter, "other": other, "whole": whole}, p["tensors"])
    found["state"] = state(llm)
    close(llm)
    return found


def staggered(p: dict[str, Any]) -> dict[str, Any]:
    """Requests that arrive while others are served, and some that are aborted: ``p["requests"]`` in order, each with ``after`` (a number of
    steps) and optionally ``abort_after`` (generated tokens). Returns what each got and what is left behind."""
    import qcap.vllm

    llm = build(p)
    engine = llm.llm_engine
    waiting = [(i, r) for i, r in enumerate(p["requests"])]
    live: dict[str, dict[str, Any]] = {}
    outputs: dict[int, Any] = {}
    aborted: list[int] = []
    steps = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and (waiting[0][1].get("after", 0) <= steps or not engine.has_unfinished_requests()):
            number, request = waiting.pop(0)
            params = sampling(request["n"], **request.get("params", {}))
            engine.add_request(str(number), qcap.vllm.prompt(request["ids"], request.get("salt", "")), params)
            live[str(number)] = request
        for output in engine.step():
            request = live[output.request_id]
            if output.finished:
                outputs[int(output.request_id)] = output
            elif len(output.outputs[0].token_ids) >= request.get("abort_after", 10**9):
                engine.abort_request([output.request_id])
                aborted.append(int(output.request_id))
        steps += 1
    scheduler = engine.engine_core.engine_core.scheduler
    finished = [outputs[i] for i in sorted(outputs)]
    receipt = qcap.vllm.receipt(finished)
    left = state(llm)
    result = {
        "outputs": {i: told([outputs[i]])[0] for i in outputs},
        "aborted": aborted,
        "stored": receipt.stored,
        "skipped": receipt.skipped,
        "whole": receipt.whole,
        "state": left,
        "steps": steps,
        "preemptions": _preemptions.get(id(scheduler), 0),
    }
    close(llm)
    return result


_preemptions: dict[int, int] = {}


def hard(p: dict[str, Any]) -> dict[str, Any]:
    """``staggered`` with a count of vLLM's preemptions."""
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler._preempt_request

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        _preemptions[id(self)] = _preemptions.get(id(self), 0) + 1
        return original(self, *args, **kwargs)

    Scheduler._preempt_request = counting
    return staggered(p)


def separate_processes(p: dict[str, Any]) -> dict[str, Any]:
    """vLLM's default: the engine core and its workers are other processes, and only the store is shared with them."""
    import qcap.vllm

    llm = build({**p, "qcap": {"chunk_size": 64}})
    outputs = generate(llm, [{"ids": ids, "n": p["n"]} for ids in p["prompts"]])
    receipt = qcap.vllm.receipt(outputs)
    return {
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "stored": receipt.stored,
        "skipped": receipt.skipped,
        "whole": receipt.whole,
    }


def layerwise(p: dict[str, Any]) -> dict[str, Any]:
    """All of ``p["prompts"]`` at once, cold, then again in every way in which their stored KV can be loaded layer by layer."""

    import qcap.vllm
    from qcap.kinds import CacheKind
    from qcap.store.engine import StoreEngine
    from qcap.tokens import ChunkedTokenDatabase, chunk_key
    from qcap.vllm import scheduler

    llm = build(p)
    side = worker_of(llm)
    prompts, n, size = p["prompts"], p["n"], p["qcap"]["chunk_size"]
    found: dict[str, Any] = {"rounds": {}, "graphs": str(side._vllm_config.compilation_config.cudagraph_mode)}
    calls: list[str] = []
    asked = type(side).layer_needed
    type(side).layer_needed = lambda self, name: (calls.append(name), asked(self, name))[1]  # type: ignore[method-assign]

    def again(name: str, salt: str = "") -> None:
        before, steps = dict(side.counters), len(calls)
        outputs = generate(llm, [{"ids": ids, "n": n, "salt": salt} for ids in prompts])
        receipt = qcap.vllm.receipt(outputs)
        counters = {key: value - before.get(key, 0) for key, value in side.counters.items() if value != before.get(key, 0)}
        found["rounds"][name] = {
            "outputs": told(outputs), "counters": counters, "skipped": receipt.skipped, "layers_asked": len(calls) - steps,
        }  # fmt: skip

    again("cold")
    again("loaded")
    real_read, real_open = StoreEngine.read_layer, StoreEngine.open_layers

    def slow(real: Any) -> Any:
        return lambda *args, **kwargs: (time.sleep(p["slow_s"]), real(*args, **kwargs))[1]

    StoreEngine.read_layer, StoreEngine.open_layers = slow(real_read), slow(real_open)  # type: ignore[method-assign]
    if "slow" in p["ways"]:
        again("slow")
    StoreEngine.open_layers = real_open  # type: ignore[method-assign]

    geometry = side.capture.geometry
    dying = {chunk.digest for i in p["dying"] for chunk in ChunkedTokenDatabase(size).chunks(prompts[i])}

    def dies(self: Any, key: Any, header: Any, layer: int, out: Any) -> None:
        if key.digest in dying and layer >= p["dies_at"]:
            raise OSError("the store has gone away")
        real_read(self, key, header, layer, out)

    if "dying" in p["ways"]:
        StoreEngine.read_layer = dies  # type: ignore[method-assign]
        again("dying")
    StoreEngine.read_layer = real_read  # type: ignore[method-assign]
    again("not offered for a while")
    scheduler.RETRY_LOAD_S = 0.0
    if "damaged" in p["ways"]:
        chunks = ChunkedTokenDatabase(size).chunks(prompts[p["damaged"]])
        key = chunk_key(CacheKind.KV, geometry, chunks[len(chunks) // 2].digest)
        path = file_of(p["store"], key)
        good = path.read_bytes()
        layer = geometry.chunk_bytes(CacheKind.KV) // geometry.num_layers
        at = len(good) - layer * (geometry.num_layers - 1) - layer // 2  # in the middle of layer 1
        path.write_bytes(good[:at] + bytes([good[at] ^ 255]) + good[at + 1 :])
        again("damaged")
        path.write_bytes(good)
    again("recovered")
    loads = side._layer_loads
    found["pool_out"], found["pool"] = _settled(loads.arena), loads.arena.nbytes
    found["state"] = state(llm)
    close(llm)
    return found


def consumer(p: dict[str, Any]) -> dict[str, Any]:
    """An engine with the role ``kv_consumer``: what it serves from the store, and what it stores; and a step without metadata."""
    import logging

    import qcap.errors
    import qcap.vllm
    from qcap.store.engine import StoreEngine
    from qcap.testing.engine import build_llm
    from qcap.vllm.connector import QcapConnector

    stores: list[Any] = []
    real = StoreEngine.store
    StoreEngine.store = lambda self, *args, **kw: (stores.append(args), real(self, *args, **kw))[1]  # type: ignore[method-assign]
    config = qcap.vllm.transfer_config(p["store"], **p["qcap"])
    config.kv_role = "kv_consumer"
    llm = build_llm(p["model"], kv_transfer_config=config, **p["engine"])
    side = worker_of(llm)
    outputs = generate(llm, [{"ids": ids, "n": p["n"]} for ids in p["prompts"]])
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("qcap.vllm").addHandler(handler)
    logging.getLogger("qcap.vllm").setLevel(logging.WARNING)
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    for _ in range(3):
        connector.bind_connector_metadata(None)
        connector.start_load_kv(None)
        connector.wait_for_layer_load(p["layer"])
        connector.wait_for_save()

    def piecewise(value: Any) -> bool | str:
        try:
            return QcapConnector.requires_piecewise_for_cudagraph({} if value is None else {"qcap.layerwise": value})
        except qcap.errors.ConfigError as error:
            return type(error).__name__

    found = {
        "outputs": told(outputs),
        "counters": dict(side.counters),
        "stores": len(stores),
        "warnings": lines,
        "features": len(side.capture.features),
        "piecewise": [piecewise(value) for value in (None, True, "TRUE", "off", "perhaps")],
    }
    close(llm)
    return found


def edits_beside_others(p: dict[str, Any]) -> dict[str, Any]:
    """An edit, asked for at once with a request that computes in its place: because vLLM refuses its load, because it ends with the edit,
    and because a chunk was lost. Tokens and loaded tokens of each, and the receipts' skipped kinds."""
    import qcap
    import qcap.vllm
    from qcap.errors import CaptureEmpty
    from qcap.kinds import CacheKind
    from qcap.store.verify import verify_store
    from qcap.tokens import ChunkedTokenDatabase, chunk_key

    llm, ids, n, size = build(p), p["ids"], p["n"], 32
    whole = (len(ids) - 1) // size * size

    def both(first: dict[str, Any], salt: str) -> list[dict[str, Any]]:
        outputs = generate(llm, [{"ids": ids, "n": 2, "salt": salt, **first}, {"ids": ids, "n": n, "salt": salt}])
        found = []
        for output, one in zip(outputs, told(outputs), strict=True):
            try:
                skipped = qcap.vllm.receipt([output]).skipped
            except CaptureEmpty as error:
                skipped = {"nothing": str(error)}
            found.append({"tokens": one["tokens"], "cached": one["cached"], "skipped": {str(k): v for k, v in skipped.items()}})
        return found

    (cold,) = generate(llm, [{"ids": ids, "n": n}])
    qcap.vllm.receipt([cold])
    found: dict[str, Any] = {"cold": told([cold])[0]["tokens"]}
    with qcap.connect(p["store"], model=p["model"]) as ctx:
        edited = ctx.retrieve(ids[:whole]) * 0.25
        for salt in ("alone", "refused", "short", "lost"):
            assert ctx.store(edited, ids[:whole], salt=salt)
        (served,) = generate(llm, [{"ids": ids, "n": n, "salt": "alone"}])
        found["alone"] = told([served])[0]["tokens"]
        found["refused"] = both({"params": {"prompt_logprobs": 1}}, "refused")
        found["short"] = both({"ids": ids[:whole]}, "short")
        digest = ChunkedTokenDatabase(size).chunks(ids)[3].digest
        lost = file_of(p["store"], chunk_key(CacheKind.KV, ctx.geometry, digest, "lost"))
        lost.unlink()
        found["lost"] = both({}, "lost")
        found["filled"] = lost.exists()
    found["broken"] = [edit.salt for edit in verify_store(p["store"]).broken_edits]
    close(llm)
    return found
