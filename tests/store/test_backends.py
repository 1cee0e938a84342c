"""The Backend suite on each scheme, and what ``open_backend`` accepts."""

from __future__ import annotations

import os
import uuid

import pytest
from store_makers import chunk, object_store
from store_suite import BackendSuite

from qcap.backends import open_backend
from qcap.errors import ConfigError, StoreUnavailable
from qcap.store.engine import StoreEngine
from qcap.store.tiers import StoreOutcome


class TestFile(BackendSuite):
    @pytest.fixture
    def opener(self, tmp_path):
        return lambda **kw: open_backend(f"file://{tmp_path}/deep/store", **kw)


class TestObjectStore(BackendSuite):
    @pytest.fixture
    def opener(self):
        opened = object_store()
        return lambda **kw: StoreEngine(opened(), **kw)


class TestMemory(BackendSuite):
    @pytest.fixture
    def opener(self):
        url = f"memory://{uuid.uuid4().hex}"
        return lambda **kw: open_backend(url, **kw)


def test_plain_and_encoded_paths_are_one_store(tmp_path, monkeypatch) -> None:
    record, tensor = chunk(0)
    folder = tmp_path / "a b"
    backend = open_backend(str(folder))
    assert backend.store(record, tensor).result(30) is StoreOutcome.STORED
    backend.close()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for url in (folder.as_uri(), "a b", "./a b/", "~/a b", f"file://localhost{tmp_path}/a%20b"):
        assert open_backend(url).contains([record.key]) == [True], url


def test_opening_a_mistyped_path_leaves_no_folder(tmp_path) -> None:
    backend = open_backend(f"file://{tmp_path}/typo")
    assert backend.manifests() == [] and backend.sequences() == [] and backend.lookup([chunk(0)[0].key]) == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "file:///data/captures"),
        (None, "file:///data/captures"),
        ("fil:///x", "did you mean 'file'"),
        ("redis://h", r"file://, memory://, s3://"),
        ("file://data/x", "file:///data/x"),
        ("file:/data/x", "file://data/x"),
        ("memory://", "needs a name"),
        ("qcap+tcp://h:1", "no store server"),
        ("qcap://h:1", "no store server"),
    ],
)
def test_bad_url(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_backend(url)


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="'wait', 'skip'"):
        open_backend("memory://x", on_pressure="waits")
    with pytest.raises(ConfigError, match="at least 1"):
        open_backend("memory://x", host_bytes=0)


def test_unopenable(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="not a directory"):
        open_backend(f"file://{tmp_path}/file")
    with pytest.raises(StoreUnavailable, match="cannot be created"):
        open_backend(f"file://{tmp_path}/file/below")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_parent(tmp_path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreUnavailable, match="cannot be created"):
        open_backend(f"file://{tmp_path}/store")


def test_receipts_of_chunks_in_flight_are_stored_at_close(tmp_path) -> None:
    """A receipt is queued when its chunks are done, which may be while the store closes."""
    import time

    from qcap.store.tiers import SequenceRecord

    class Slow:
        def synchronize(self) -> None:
            time.sleep(0.3)

    record, tensor = chunk()
    receipt = SequenceRecord("m", "r", "e", "", record.token_ids, 4, 4, len(record.token_ids))
    backend = open_backend(str(tmp_path))
    backend.store(record, tensor, Slow()).add_done_callback(lambda done: backend.put_sequence(receipt))
    backend.close()
    assert [r.request_id for r in open_backend(str(tmp_path)).sequences()] == ["r"]
