"""Bytes by path, with exclusive publish: a local directory, or anything obstore opens.

A local directory is used through the operating system directly, because that gathers a chunk's layers from the caller's tensor into the
file and scatters them back into a tensor without a copy in between, which an object-store client does not. Its exclusive publish is a
hard link, which is also what obstore's ``LocalStore`` uses.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import obstore

from qcap.errors import StoreUnavailable
from qcap.store.chunkfile import Buffer, copy_bytes

STAGING = "staging"
_IOV = 512
"""Buffers in one gathering write or scattering read; systems allow 1024."""


@dataclass(frozen=True)
class Entry:
    """One stored file: path from the store's root, bytes, and age in seconds when it was listed."""

    path: str
    nbytes: int
    age_s: float


class Reader(Protocol):
    """An open file that stays what it was when opened, whatever is published or deleted meanwhile."""

    nbytes: int

    def readinto(self, buffers: Sequence[memoryview]) -> int:
        """Fill ``buffers`` with what comes next; how many bytes there were."""

    def take(self, scratch: memoryview) -> memoryview:
        """The next ``scratch.nbytes`` bytes, fewer at the end: read into ``scratch``, or where they lie if that is in memory already."""

    def close(self) -> None:
        """Let go."""


class Staged(Protocol):
    """Bytes written beside, not yet visible. Exactly one of ``publish`` and ``discard`` ends it; ``discard`` after either does nothing."""

    def open(self) -> Reader:
        """Read it back."""

    def publish(self, path: str, *, overwrite: bool = False) -> bool:
        """Make it visible whole as ``path``; False, and nothing changed, if something is there and not ``overwrite``."""

    def discard(self) -> None:
        """Remove it."""


class Bucket(Protocol):
    """Bytes by path. Paths are relative, with ``/``. All methods may be called from any thread."""

    cheap_exists: bool
    """``exists`` costs microseconds: no need to remember its answers."""

    def stage(self, buffers: Sequence[Buffer]) -> Staged:
        """Write beside. Raises ``OSError`` and leaves nothing when that fails."""

    def open(self, path: str, head: int | None = None) -> Reader | None:
        """Open for reading; None if there is no such file. With ``head``, only so many bytes from the start are sure to be readable."""

    def read_range(self, path: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill ``buffers`` with the bytes from ``offset`` on, of what is published now; how many there were (0 for no such file)."""

    def exists(self, path: str) -> bool:
        """Whether ``path`` is published."""

    def delete(self, path: str) -> None:
        """Remove ``path``, if it is there."""

    def list(self, prefix: str) -> Iterator[Entry]:
        """All files below ``prefix`` (a folder), in no order. What goes away meanwhile is left out."""

    def check(self) -> None:
        """Raises :class:`StoreUnavailable` if this cannot be read, or neither read nor created."""


class LocalBucket:
    """A directory. It is created by the first write, not by opening it: a mistyped path must not leave a folder behind."""

    cheap_exists = True

    def __init__(self, root: Path) -> None:
        self.root = root

    def stage(self, buffers: Sequence[Buffer]) -> LocalStaged:
        path = self.root / STAGING / uuid.uuid4().hex
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            write_all(fd, buffers)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return LocalStaged(self.root, path)

    def open(self, path: str, head: int | None = None) -> LocalReader | None:
        try:
            return LocalReader(os.open(self.root / path, os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            return None

    def read_range(self, path: str, offset: int, buffers: Sequence[memoryview]) -> int:
        try:
            fd = os.open(f"{self.root}/{path}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            return read_all_at(fd, buffers, offset)
        finally:
            os.close(fd)

    def exists(self, path: str) -> bool:
        return _is_something(f"{self.root}/{path}")

    def delete(self, path: str) -> None:
        (self.root / path).unlink(missing_ok=True)

    def list(self, prefix: str) -> Iterator[Entry]:
        folders = [self.root / prefix]
        now = time.time()
        while folders:
            try:
                with os.scandir(folders.pop()) as entries:
                    found = list(entries)
            except FileNotFoundError:
                continue
            for entry in found:
                try:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    else:
                        stat = entry.stat()
                        yield Entry(os.path.relpath(entry.path, self.root), stat.st_size, now - stat.st_mtime)
                except FileNotFoundError:
                    continue

    def check(self) -> None:
        if self.root.is_dir():
            if not os.access(self.root, os.R_OK | os.X_OK):
                raise StoreUnavailable(f"{self.root} cannot be read: check its permissions")
            return
        if self.root.exists():
            raise StoreUnavailable(f"{self.root} is not a directory: give the path of a folder")
        parent = next(p for p in self.root.parents if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise StoreUnavailable(f"{self.root} does not exist and cannot be created below {parent}: check path and permissions")


class LocalStaged:
    """A file under ``staging/``."""

    def __init__(self, root: Path, path: Path) -> None:
        self._root = root
        self._path: Path | None = path

    def open(self) -> LocalReader:
        if self._path is None:
            raise RuntimeError("already published or discarded")
        return LocalReader(os.open(self._path, os.O_RDONLY | os.O_CLOEXEC))

    def publish(self, path: str, *, overwrite: bool = False) -> bool:
        if self._path is None:
            raise RuntimeError("already published or discarded")
        target = self._root / path
        try:
            return self._move(self._path, target, overwrite)
        except FileNotFoundError:
            target.parent.mkdir(parents=True, exist_ok=True)
            return self._move(self._path, target, overwrite)
        finally:
            self.discard()

    def _move(self, source: Path, target: Path, overwrite: bool) -> bool:
        if overwrite:
            os.rename(source, target)
            return True
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:
            # Something is there, or the file system has no hard links. Of two writers at one moment both may rename then, which is whole
            # but not exclusive.
            if _is_something(target):
                return False
            os.rename(source, target)
        return True

    def discard(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


class LocalReader:
    """An open file descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.nbytes = os.fstat(fd).st_size

    def readinto(self, buffers: Sequence[memoryview]) -> int:
        return read_all(self._fd, buffers)

    def take(self, scratch: memoryview) -> memoryview:
        return scratch[: read_all(self._fd, [scratch])]

    def close(self) -> None:
        os.close(self._fd)


class ObstoreBucket:
    """Anything obstore opens. A staged file is kept in this process; publishing is one conditional put, which is atomic by itself.

    obstore takes the staged bytes and gives stored ones by the buffer protocol: with its ``MemoryStore`` the one copy is that of staging.
    """

    cheap_exists = False

    def __init__(self, store: Any, name: str) -> None:
        self._store = store
        self._name = name

    def stage(self, buffers: Sequence[Buffer]) -> ObstoreStaged:
        views = [memoryview(b) for b in buffers]
        data, at = np.empty(sum(v.nbytes for v in views), dtype=np.uint8).data, 0
        for view in views:  # not `b"".join`, which holds the GIL
            copy_bytes(data[at : at + view.nbytes], view)
            at += view.nbytes
        return ObstoreStaged(self._store, data.toreadonly())

    def open(self, path: str, head: int | None = None) -> BytesReader | None:
        try:
            if head is None:
                return BytesReader(memoryview(obstore.get(self._store, path).bytes()))
            try:
                found = obstore.get(self._store, path, options={"range": (0, head)})
            except FileNotFoundError:
                raise
            except Exception:  # an empty object has no first byte, which stores answer in ways of their own
                return self.open(path)
            return BytesReader(memoryview(found.bytes()), found.meta["size"])
        except FileNotFoundError:
            return None

    def read_range(self, path: str, offset: int, buffers: Sequence[memoryview]) -> int:
        try:
            data = obstore.get_range(self._store, path, start=offset, length=sum(b.nbytes for b in buffers))
        except FileNotFoundError:
            return 0
        except Exception:
            if obstore.head(self._store, path)["size"] > offset:
                raise
            return 0  # it was replaced by a shorter one
        return BytesReader(memoryview(data)).readinto(buffers)

    def exists(self, path: str) -> bool:
        try:
            obstore.head(self._store, path)
        except FileNotFoundError:
            return False
        return True

    def delete(self, path: str) -> None:
        try:
            obstore.delete(self._store, path)
        except FileNotFoundError:
            pass

    def list(self, prefix: str) -> Iterator[Entry]:
        now = time.time()
        for batch in obstore.list(self._store, prefix):
            for meta in batch:
                yield Entry(meta["path"], meta["size"], now - meta["last_modified"].timestamp())

    def check(self) -> None:
        try:
            next(iter(obstore.list(self._store, chunk_size=1)), None)
        except Exception as error:  # obstore has no common base for "not there", "not allowed" and "no network"
            reason = str(error).split("\n", 1)[0]
            raise StoreUnavailable(f"{self._name} cannot be opened: {reason}. Check the URL, the credentials and the network") from error


class ObstoreStaged:
    """Bytes in this process."""

    def __init__(self, store: Any, data: memoryview) -> None:
        self._store = store
        self._data: memoryview | None = data

    def open(self) -> BytesReader:
        if self._data is None:
            raise RuntimeError("already published or discarded")
        return BytesReader(self._data[:])  # a view of its own, which the reader releases

    def publish(self, path: str, *, overwrite: bool = False) -> bool:
        if self._data is None:
            raise RuntimeError("already published or discarded")
        data, self._data = self._data, None
        try:
            obstore.put(self._store, path, data, mode="overwrite" if overwrite else "create", use_multipart=False)
        except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError):
            return False
        return True

    def discard(self) -> None:
        self._data = None


class BytesReader:
    """Bytes in memory, all or the first of ``nbytes``."""

    def __init__(self, data: memoryview, nbytes: int | None = None) -> None:
        self._data = data
        self._at = 0
        self.nbytes = data.nbytes if nbytes is None else nbytes

    def readinto(self, buffers: Sequence[memoryview]) -> int:
        start = self._at
        for buffer in buffers:
            piece = self._data[self._at : self._at + buffer.nbytes]
            copy_bytes(buffer[: piece.nbytes], piece)
            self._at += piece.nbytes
        return self._at - start

    def take(self, scratch: memoryview) -> memoryview:
        piece = self._data[self._at : self._at + scratch.nbytes]
        self._at += piece.nbytes
        return piece

    def close(self) -> None:
        self._data.release()


def _is_something(path: str | Path) -> bool:
    """Whether a file is there. An empty one is nothing: a machine that lost its power leaves such behind, since files are not flushed."""
    try:
        return os.stat(path).st_size > 0
    except OSError:
        return False


def write_all(fd: int, buffers: Sequence[Buffer]) -> None:
    """Write all of ``buffers`` at the file's position. Raises ``OSError``."""
    todo = [memoryview(b) for b in buffers]
    at = 0
    while at < len(todo):
        at = _advance(todo, at, os.writev(fd, todo[at : at + _IOV]))


def read_all(fd: int, buffers: Sequence[memoryview]) -> int:
    """Fill ``buffers`` from the file's position on; how many bytes there were (fewer only at the file's end)."""
    todo = list(buffers)
    at = total = 0
    while at < len(todo):
        done = os.readv(fd, todo[at : at + _IOV])
        if done == 0:
            break
        total += done
        at = _advance(todo, at, done)
    return total


def read_all_at(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """As :func:`read_all`, from ``offset`` on."""
    todo = list(buffers)
    at = total = 0
    while at < len(todo):
        done = os.preadv(fd, todo[at : at + _IOV], offset + total) if hasattr(os, "preadv") else _pread(fd, todo[at], offset + total)
        if done == 0:
            break
        total += done
        at = _advance(todo, at, done)
    return total


def _pread(fd: int, buffer: memoryview, offset: int) -> int:
    """One ``preadv``, where the system has none."""
    data = os.pread(fd, buffer.nbytes, offset)
    buffer[: len(data)] = data
    return len(data)


def _advance(todo: list[memoryview], at: int, done: int) -> int:
    """Take ``done`` bytes off ``todo[at:]``; the index of the first buffer with bytes left."""
    while at < len(todo) and done >= todo[at].nbytes:
        done -= todo[at].nbytes
        at += 1
    if done:
        todo[at] = todo[at][done:]
    return at


_memory_stores: dict[str, Any] = {}
_memory_lock = threading.Lock()


def memory_bucket(name: str) -> ObstoreBucket:
    """The bucket behind ``memory://name`` in this process: the same one for every opener, kept until the process ends."""
    with _memory_lock:
        if name not in _memory_stores:
            _memory_stores[name] = obstore.store.MemoryStore()
        return ObstoreBucket(_memory_stores[name], f"memory://{name}")
