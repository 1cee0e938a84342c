"""What every Backend must do. Subclass it and give a ``backend`` factory."""

from __future__ import annotations

import dataclasses
import json
import threading

import pytest
import torch
from store_makers import SMALL, chunk, equal_bits, geometry

from qcap.errors import GeometryMismatch, ObjectCorrupt, ShapeError
from qcap.kinds import CacheKind
from qcap.store import objects
from qcap.store.objects import NUMERICS
from qcap.store.tiers import Backend, SequenceRecord, StoreOutcome

T_S = 30.0


class HeldEvent:
    """A device event that has not happened until it is told so."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.release = threading.Event()
        self.thread: threading.Thread | None = None

    def synchronize(self) -> None:
        self.thread = threading.current_thread()
        self.asked.set()
        assert self.release.wait(T_S)


class LostEvent:
    def synchronize(self) -> None:
        raise RuntimeError("device lost")


def receipt(request: str, at: float = 0.0, model: str = SMALL.model) -> SequenceRecord:
    return SequenceRecord(
        model=model, request_id=request, engine_id="engine/0", salt="", token_ids=(1, 2, 3), prompt_tokens=2, computed_tokens=2,
        chunk_size=16, stored={"kv": (0, 1)}, skipped={"query": {"ring_full": 1}}, finished_at=at,
    )  # fmt: skip


class BackendSuite:
    """Subclass, and define the fixture ``opener``: ``opener(**open_backend's arguments) -> Backend``, each time on the same empty store."""

    @pytest.fixture
    def backend(self, opener):
        backend = opener()
        yield backend
        backend.close()

    def test_round_trip(self, backend: Backend) -> None:
        for kind in CacheKind:
            for index in range(2):
                record, tensor = chunk(1, kind, index=index, salt="s", tags=(("lora", "a@%b"),), edit='{"name":"é"}')
                assert backend.store(record, tensor).result(T_S) is StoreOutcome.STORED
                loaded = backend.load(record.key)
                assert loaded is not None and loaded.record == record
                assert equal_bits(loaded.tensor, tensor)

    def test_loaded_tensor_is_the_callers_own(self, backend: Backend) -> None:
        record, tensor = chunk(1)
        backend.store(record, tensor).result(T_S)
        first = backend.load(record.key)
        first.tensor.zero_()
        assert equal_bits(backend.load(record.key).tensor, tensor)

    def test_kv_and_query_of_the_same_tokens_do_not_collide(self, backend: Backend) -> None:  # K4
        kv, query = chunk(1, CacheKind.KV), chunk(1, CacheKind.QUERY)
        for record, tensor in (kv, query):
            assert backend.store(record, tensor).result(T_S) is StoreOutcome.STORED
        for record, tensor in (kv, query):
            assert equal_bits(backend.load(record.key).tensor, tensor)

    def test_nothing_stored_is_a_miss(self, backend: Backend) -> None:  # S51
        record, _ = chunk(1)
        assert backend.load(record.key) is None
        assert backend.contains([record.key]) == [False]
        assert backend.lookup([record.key]) == 0
        assert backend.lookup([]) == 0
        assert backend.manifests() == [] and backend.sequences() == []
        assert backend.counters()["load_missing"] == 1

    def test_lookup_ends_at_the_first_hole(self, backend: Backend) -> None:
        chunks = [chunk(1, index=i) for i in range(4)]
        for i in (0, 1, 3):
            backend.store(*chunks[i]).result(T_S)
        keys = [record.key for record, _ in chunks]
        assert backend.contains(keys) == [True, True, False, True]
        assert backend.lookup(keys) == 2
        assert backend.lookup(keys[3:]) == 1

    def test_second_store_changes_nothing(self, backend: Backend) -> None:
        record, tensor = chunk(1)
        assert backend.store(record, tensor).result(T_S) is StoreOutcome.STORED
        assert backend.store(record, torch.zeros_like(tensor)).result(T_S) is StoreOutcome.EXISTS
        assert equal_bits(backend.load(record.key).tensor, tensor)
        counts = backend.counters()
        assert (counts["stored"], counts["exists"], counts["tokens_stored"]) == (1, 1, SMALL.chunk_size)  # O6

    def test_layers_are_read_one_by_one(self, backend: Backend) -> None:
        for kind in CacheKind:
            record, tensor = chunk(1, kind, salt="s", edit='{"name":"é"}')
            backend.store(record, tensor).result(T_S)
            before = backend.counters()
            reader = backend.open_layers(record.key)
            assert reader is not None and reader.record == record
            for layer in (11, 0, 5):
                assert equal_bits(reader.read(layer), tensor[:, layer])
            assert equal_bits(backend.open_layers(record.key).read(3), tensor[:, 3])
            after = backend.counters()
            assert after["layers_loaded"] - before["layers_loaded"] == 4 and after["loaded"] == before["loaded"]
            assert after["bytes_loaded"] - before["bytes_loaded"] == 4 * tensor[:, 0].nbytes
            for layer in (-1, 12):
                with pytest.raises(IndexError, match="of 12"):
                    reader.read(layer)

    def test_layers_into_a_slice_of_a_buffer(self, backend: Backend) -> None:
        chunks = [chunk(1, index=i) for i in range(3)]
        for c in chunks:
            backend.store(*c).result(T_S)
        readers = [backend.open_layers(record.key) for record, _ in chunks]
        size = SMALL.chunk_size
        buffer = torch.zeros((2, 3 * size + 2, chunks[0][1].shape[-1]), dtype=SMALL.torch_dtype)
        for i, reader in enumerate(readers):
            out = buffer[:, i * size : (i + 1) * size]
            assert reader.read(7, out) is out
        assert equal_bits(buffer[:, : 3 * size], torch.cat([tensor[:, 7] for _, tensor in chunks], dim=1))
        assert not buffer[:, 3 * size :].view(torch.uint8).any()

    def test_layers_into_what_does_not_fit(self, backend: Backend) -> None:
        record, tensor = chunk(1)
        backend.store(record, tensor).result(T_S)
        reader, good = backend.open_layers(record.key), torch.empty_like(tensor[:, 0])
        for out in (good[:1], good[:, 1:], good.view(torch.float16), good.transpose(1, 2).contiguous().transpose(1, 2), good.to("meta")):
            with pytest.raises(ShapeError, match="a layer of this object is"):
                reader.read(0, out)
        assert backend.contains([record.key]) == [True]

    def test_layers_of_nothing(self, backend: Backend) -> None:
        assert backend.open_layers(chunk(1)[0].key) is None
        assert backend.counters()["load_missing"] == 1

    def test_an_object_replaced_between_two_layers(self, backend: Backend) -> None:
        """Never two versions in one load; and what is there now is sound, so it stays a hit."""
        record, tensor = chunk(1)
        backend.store(record, tensor).result(T_S)
        reader = backend.open_layers(record.key)
        assert equal_bits(reader.read(0), tensor[:, 0])
        other = dataclasses.replace(record, edit="x" * 1000)  # a longer header: the layers lie elsewhere
        for newer in (record, other):
            assert backend.store(newer, torch.zeros_like(tensor), overwrite=True).result(T_S) is StoreOutcome.STORED
            with pytest.raises(ObjectCorrupt, match="replaced"):
                reader.read(1)
            assert backend.contains([record.key]) == [True]
            assert not backend.open_layers(record.key).read(1).view(torch.uint8).any()

    def test_layers_from_many_threads(self, backend: Backend) -> None:
        record, tensor = chunk(1)
        backend.store(record, tensor).result(T_S)
        reader, wrong = backend.open_layers(record.key), []

        def work(first: int) -> None:
            wrong.extend(i for i in range(first, 12) for _ in range(5) if not equal_bits(reader.read(i), tensor[:, i]))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(T_S)
        assert wrong == [] and backend.counters()["layers_loaded"] == 5 * (12 + 11 + 10 + 9)

    def test_overwrite(self, backend: Backend) -> None:
        record, tensor = chunk(1)
        backend.store(record, tensor).result(T_S)
        assert backend.store(record, torch.zeros_like(tensor), overwrite=True).result(T_S) is StoreOutcome.STORED
        assert not backend.load(record.key).tensor.any()

    def test_another_opener_sees_it(self, backend: Backend, opener) -> None:
        record, tensor = chunk(1)
        backend.store(record, tensor).result(T_S)
        other = opener()
        assert other.contains([record.key]) == [True]
        assert equal_bits(other.load(record.key).tensor, tensor)
        other.close()

    def test_not_visible_before_the_device_is_done(self, backend: Backend) -> None:  # S40
        event, (record, tensor) = HeldEvent(), chunk(1)
        wanted = tensor.clone()
        tensor.zero_()
        future = backend.store(record, tensor, event)
        assert event.asked.wait(T_S)
        assert event.thread is not threading.current_thread()
        assert backend.contains([record.key]) == [False] and backend.load(record.key) is None
        assert backend.poll() == 1 and not future.done()
        tensor.copy_(wanted)  # the device finishes its copy now
        event.release.set()
        assert future.result(T_S) is StoreOutcome.STORED
        assert backend.contains([record.key]) == [True]
        assert equal_bits(backend.load(record.key).tensor, wanted)

    def test_failed_copy_leaves_nothing_and_a_retry_works(self, backend: Backend) -> None:  # S41 S42
        record, tensor = chunk(1)
        assert backend.store(record, tensor, LostEvent()).result(T_S) is StoreOutcome.FAILED
        assert backend.contains([record.key]) == [False]
        assert backend.counters()["failed"] == 1
        assert backend.store(record, tensor).result(T_S) is StoreOutcome.STORED

    @pytest.mark.parametrize("spoil", ["shape", "dtype", "stride", "digest", "token", "not a tensor"])
    def test_a_bad_chunk_fails_and_never_raises(self, backend: Backend, spoil: str) -> None:
        record, tensor = chunk(1)
        if spoil == "digest":
            record = dataclasses.replace(record, digest="0" * 64)
        if spoil == "token":
            record = dataclasses.replace(record, token_ids=(-1, *record.token_ids[1:]))
        bad = {
            "shape": tensor[:, :-1],
            "dtype": tensor.view(torch.float16),
            "stride": tensor.transpose(-1, -2).contiguous().transpose(-1, -2),
            "not a tensor": None,
        }.get(spoil, tensor)
        assert backend.store(record, bad).result(T_S) is StoreOutcome.FAILED
        assert backend.contains([record.key]) == [False]
        assert backend.drain(T_S) and backend.counters()["failed"] == 1

    def test_same_key_in_flight_is_written_once(self, backend: Backend) -> None:
        event, (record, tensor) = HeldEvent(), chunk(1)
        first = backend.store(record, tensor, event)
        assert event.asked.wait(T_S)
        second = backend.store(record, tensor)
        assert not second.done()
        event.release.set()
        assert (first.result(T_S), second.result(T_S)) == (StoreOutcome.STORED, StoreOutcome.EXISTS)
        assert backend.drain(T_S)
        assert backend.counters()["stored"] == 1 and backend.counters()["exists"] == 1

    def test_attached_to_a_write_that_fails(self, backend: Backend) -> None:
        class Late(HeldEvent):
            def synchronize(self) -> None:
                super().synchronize()
                raise RuntimeError("device lost")

        event, (record, tensor) = Late(), chunk(1)
        futures = [backend.store(record, tensor, event), backend.store(record, tensor)]
        event.release.set()
        assert [f.result(T_S) for f in futures] == [StoreOutcome.FAILED] * 2
        assert backend.store(record, tensor).result(T_S) is StoreOutcome.STORED

    def test_published_in_the_order_of_the_queue(self, backend: Backend) -> None:
        held, chunks = HeldEvent(), [chunk(1, index=i) for i in range(3)]
        futures = [backend.store(*chunks[0], held)] + [backend.store(*c) for c in chunks[1:]]
        receipt_done = backend.put_sequence(receipt("r"))
        assert held.asked.wait(T_S)
        threading.Event().wait(0.05)  # time for a wrong order to happen
        assert backend.contains([r.key for r, _ in chunks]) == [False] * 3
        assert backend.sequences() == [] and not receipt_done.done()
        held.release.set()
        receipt_done.result(T_S)
        assert backend.lookup([r.key for r, _ in chunks]) == 3
        assert [s.request_id for s in backend.sequences()] == ["r"]
        assert [f.result(T_S) for f in futures] == [StoreOutcome.STORED] * 3

    def test_a_failed_chunk_does_not_hold_up_the_queue(self, backend: Backend) -> None:
        futures = [backend.store(*chunk(seed), LostEvent() if seed % 2 else None) for seed in range(9)]
        backend.put_sequence(receipt("r")).result(T_S)
        assert [f.result(T_S) is StoreOutcome.STORED for f in futures] == [seed % 2 == 0 for seed in range(9)]
        assert backend.drain(T_S) and backend.poll() == 0

    def test_wait_holds_the_caller_until_there_is_room(self, opener) -> None:
        size = SMALL.chunk_bytes(CacheKind.KV)
        backend, held = opener(on_pressure="wait", host_bytes=2 * size), HeldEvent()
        backend.store(*chunk(0), held)
        backend.store(*chunk(1))
        got: list[StoreOutcome] = []
        caller = threading.Thread(target=lambda: got.append(backend.store(*chunk(2)).result(T_S)))
        caller.start()
        caller.join(0.1)
        assert caller.is_alive() and backend.poll() == 2
        held.release.set()
        caller.join(T_S)
        assert got == [StoreOutcome.STORED]
        assert backend.drain(T_S)
        assert backend.counters()["bytes_waiting_max"] == 2 * size
        assert backend.counters()["waits"] == 1 and backend.counters()["refused"] == 0
        backend.close()

    def test_a_failure_wakes_who_waits_for_room(self, opener) -> None:
        class Late(HeldEvent):
            def synchronize(self) -> None:
                super().synchronize()
                raise RuntimeError("device lost")

        backend, late = opener(on_pressure="wait", host_bytes=1), Late()
        backend.store(*chunk(0), late)
        got: list[StoreOutcome] = []
        caller = threading.Thread(target=lambda: got.append(backend.store(*chunk(1)).result(T_S)))
        caller.start()
        late.release.set()
        caller.join(T_S)
        assert got == [StoreOutcome.STORED]
        backend.close()

    def test_closing_wakes_who_waits_for_room(self, opener) -> None:
        backend, held = opener(on_pressure="wait", host_bytes=1), HeldEvent()
        first = backend.store(*chunk(0), held)
        got: list[StoreOutcome] = []
        caller = threading.Thread(target=lambda: got.append(backend.store(*chunk(1)).result(T_S)))
        caller.start()
        caller.join(0.1)
        assert caller.is_alive()
        closer = threading.Thread(target=backend.close)
        closer.start()
        caller.join(T_S)
        assert got == [StoreOutcome.FAILED] and not first.done()
        held.release.set()
        closer.join(T_S)
        assert first.result(T_S) is StoreOutcome.STORED

    def test_skip_refuses_and_never_waits(self, opener) -> None:
        backend, held = opener(on_pressure="skip", host_bytes=SMALL.chunk_bytes(CacheKind.KV)), HeldEvent()
        first = backend.store(*chunk(0), held)
        assert backend.store(*chunk(1)).result(0) is StoreOutcome.REFUSED
        held.release.set()
        assert first.result(T_S) is StoreOutcome.STORED
        assert backend.counters()["refused"] == 1
        assert backend.store(*chunk(1)).result(T_S) is StoreOutcome.STORED
        backend.close()

    @pytest.mark.parametrize("on_pressure", ["wait", "skip"])
    def test_a_chunk_larger_than_the_bound_is_taken_alone(self, opener, on_pressure: str) -> None:
        backend = opener(on_pressure=on_pressure, host_bytes=1)
        assert backend.store(*chunk(0)).result(T_S) is StoreOutcome.STORED
        backend.close()

    def test_close_drains_and_may_be_called_twice(self, opener) -> None:
        backend = opener()
        futures = [backend.store(*chunk(seed)) for seed in range(8)]
        done = backend.put_sequence(receipt("r"))
        backend.close()
        backend.close()
        assert done.done() and [f.result(0) for f in futures] == [StoreOutcome.STORED] * 8
        assert backend.store(*chunk(9)).result(0) is StoreOutcome.FAILED
        assert backend.put_sequence(receipt("late")).result(0) is None
        assert backend.counters()["sequences_failed"] == 1

    def test_drain_gives_up(self, backend: Backend) -> None:
        held = HeldEvent()
        backend.store(*chunk(0), held)
        assert backend.drain(0.01) is False
        held.release.set()
        assert backend.drain(T_S) is True

    def test_manifest(self, backend: Backend, opener) -> None:
        backend.put_manifest(SMALL.for_rank(1), [CacheKind.KV], {"vllm": "0.32"})
        backend.put_manifest(SMALL, [CacheKind.KV, CacheKind.QUERY], {"vllm": "other"})
        backend.put_manifest(geometry(chunk_size=32), [CacheKind.KV], {})
        backend.put_manifest(geometry(model="org/other"), [CacheKind.KV], {})
        other = opener()
        found = other.manifests(SMALL.model)
        assert len(found) == 2 and len(other.manifests()) == 3 and other.manifests("org/none") == []
        assert (SMALL, (CacheKind.KV, CacheKind.QUERY), {"vllm": "0.32"}) in found
        other.close()

    @pytest.mark.parametrize("kinds", [[CacheKind.KV], [CacheKind.QUERY]])
    def test_manifest_of_another_geometry(self, backend: Backend, kinds: list[CacheKind]) -> None:
        backend.put_manifest(SMALL, [CacheKind.KV], {})
        with pytest.raises(GeometryMismatch, match=r"num_kv_heads: 2 here, 4 there|num_kv_heads: 4 here, 2 there"):
            backend.put_manifest(geometry(num_kv_heads=4), kinds, {})
        assert backend.manifests() == [(SMALL, (CacheKind.KV,), {})]

    @pytest.mark.parametrize("kinds", [[], [CacheKind.KV], [CacheKind.QUERY]])
    def test_manifest_of_another_configuration(self, backend: Backend, kinds: list[CacheKind]) -> None:
        """Rows that another configuration of the model computed must not be served for this one's."""
        mine, theirs = (
            {NUMERICS: json.dumps({"rms_norm_eps": eps, "hidden_act": "silu", only: 1})} for eps, only in ((1e-5, "a"), (0.5, "b"))
        )
        backend.put_manifest(SMALL, [CacheKind.KV], mine)
        with pytest.raises(GeometryMismatch, match=r"rms_norm_eps: 0\.5 here, 1e-05 there\. Give another store, or model_name="):
            backend.put_manifest(SMALL, kinds, theirs)
        backend.put_manifest(SMALL, kinds, {NUMERICS: json.dumps({"rms_norm_eps": 1e-5, "c": 2})})  # what one alone says is not compared
        backend.put_manifest(SMALL, kinds, {})  # an older qcap's
        assert backend.manifests()[0][2] == mine

    def test_a_manifest_that_is_gone_is_written_again(self, backend: Backend, monkeypatch) -> None:
        """With the next receipt: somebody emptied the store of an engine that goes on."""
        monkeypatch.setattr(objects, "LOOK_S", 0.0)
        backend.put_manifest(SMALL, [CacheKind.KV], {"vllm": "0.32"})
        tier = backend._tier
        for path in tier.list_manifests():
            tier.bucket.delete(path)
        assert backend.manifests() == []
        backend.put_sequence(receipt("r", 1.0)).result(T_S)
        assert backend.manifests() == [(SMALL, (CacheKind.KV,), {"vllm": "0.32"})]

    def test_how_often_a_far_store_is_asked_for_its_manifests(self, backend: Backend, monkeypatch) -> None:
        backend.put_manifest(SMALL, [CacheKind.KV], {})
        tier = backend._tier
        monkeypatch.setattr(type(tier), "cheap_exists", False)
        (path,) = tier.list_manifests()
        tier.bucket.delete(path)
        backend.put_sequence(receipt("r", 1.0)).result(T_S)
        assert tier.list_manifests() == [], "it was looked at a moment ago"
        monkeypatch.setattr(objects, "LOOK_S", 0.0)
        backend.put_sequence(receipt("s", 1.0)).result(T_S)
        assert tier.list_manifests() == [path]

    def test_a_receipt_is_stored_though_manifests_cannot_be_looked_for(self, backend: Backend, monkeypatch) -> None:
        monkeypatch.setattr(objects, "LOOK_S", 0.0)
        backend.put_manifest(SMALL, [CacheKind.KV], {})
        exists = backend._tier.bucket.exists

        def refused(path: str) -> bool:
            if path.startswith("models/"):
                raise PermissionError("403")
            return exists(path)

        monkeypatch.setattr(backend._tier.bucket, "exists", refused)
        backend.put_sequence(receipt("r", 1.0)).result(T_S)
        assert [r.request_id for r in backend.sequences(SMALL.model)] == ["r"] and backend.counters()["sequences_failed"] == 0

    @pytest.mark.parametrize("text", ["", "{", "null", "3", '{"rms_norm_eps": null}'])
    def test_a_manifest_with_strange_numerics(self, backend: Backend, text: str) -> None:
        backend.put_manifest(SMALL, [CacheKind.KV], {NUMERICS: text})
        backend.put_manifest(SMALL, [CacheKind.KV], {NUMERICS: text})
        backend.put_manifest(SMALL, [CacheKind.QUERY], {NUMERICS: json.dumps({"hidden_act": "silu"})})

    def test_receipts_oldest_first(self, backend: Backend) -> None:
        for name, at in (("b", 2.0), ("../../a b\0", 3.0), ("c", 1.0)):
            backend.put_sequence(receipt(name, at)).result(T_S)
        backend.put_sequence(receipt("x", 0.0, "org/other")).result(T_S)
        assert [r.request_id for r in backend.sequences(SMALL.model)] == ["c", "b", "../../a b\0"]
        assert [r.request_id for r in backend.sequences()] == ["x", "c", "b", "../../a b\0"]
        assert backend.sequences(SMALL.model)[1] == receipt("b", 2.0)

    def test_many_threads(self, backend: Backend) -> None:
        chunks = [chunk(seed) for seed in range(12)]
        outcomes: list[StoreOutcome] = []

        def work(order: list[int]) -> None:
            outcomes.extend(f.result(T_S) for f in [backend.store(*chunks[i]) for i in order])

        threads = [
            threading.Thread(target=work, args=(order,)) for order in (list(range(12)), list(range(11, -1, -1)), [*range(6, 12), *range(6)])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(T_S)
        assert sorted(o.value for o in outcomes) == ["exists"] * 24 + ["stored"] * 12
        for record, tensor in chunks:
            assert equal_bits(backend.load(record.key).tensor, tensor)
