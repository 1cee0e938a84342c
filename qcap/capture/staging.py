"""Host memory for what is on its way to the store, and how pages get there.

One :class:`HostArena` a rank: page-locked where the device is a GPU, made once, bounded, reported. :class:`PageStager` brings blocks of
a :class:`~qcap.kernels.PageTable` into it, layer by layer if it is asked to: a *pack* stream gathers into small device slots, two *copy*
streams in turns move each slot to the host while the next one is being packed. The compute stream is never made to wait for any of them,
and the host waits for nothing.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from qcap import kernels
from qcap.connectors.streams import Turns
from qcap.errors import ConfigError, Unsupported
from qcap.kernels import PageTable

_PAGE = 4096
SLOT_BYTES = 32 << 20
"""Size of one device slot. Two of them keep a PCIe link busy: packing one takes 3 % of the time that copying one does."""
GRACE_S = 0.005
"""Who had to wait for a step's copies waits so much longer: its end has woken up the engine's thread too, which goes first."""


class RowsMissing(Unsupported):
    """Rows that the scheduler announced never reached the device buffer; the chunk is not published."""


class HostArena:
    """One block of host memory, lent piece by piece.

    Args:
        nbytes: its size.
        pinned: page-lock it, so that copies from a GPU need no wait.
        waits: with no room left, :meth:`take` waits as long as something that was lent is on its way back (``on_pressure="wait"``),
            and then takes memory beyond the bound rather than lose a row; else it returns None.

    :attr:`over_budget` counts the bytes ever taken beyond the bound.
    """

    def __init__(self, nbytes: int, *, pinned: bool, waits: bool) -> None:
        self.nbytes = -(-max(nbytes, _PAGE) // _PAGE) * _PAGE
        self.waits, self.pinned = waits, pinned
        self.may_rest = self.nbytes // (2 if waits else 4)  # in use without haste to get it back: where nobody waits, room must be there
        with torch.inference_mode(False):  # an engine's steps run in inference mode; the writers' threads, which may patch rows in, do not
            self._block = torch.empty(self.nbytes, dtype=torch.uint8)
        if pinned:
            _lock_pages(self._block)
            self._unlock = weakref.finalize(self, _unlock_pages, self._block)  # memory that stays locked can never be locked again
            self._unlock.atexit = False  # the driver is gone by then, and the process with it
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]  # (offset, size), by offset
        self._lent: dict[int, tuple[int, int] | torch.Tensor] = {}  # data_ptr -> extent, or a tensor of its own
        self._late: list[tuple[Any, int]] = []  # (event, data_ptr): given back while a copy into it was running
        self._busy: list[Callable[[], bool]] = []
        self._changed = threading.Condition()
        self._beyond = 0  # pieces of their own that are out: one that is larger than the arena is lent if there is none
        self.used = self.high_water = self.over_budget = 0

    @property
    def outstanding(self) -> int:
        """Pieces that have not come back."""
        with self._changed:
            self._sweep()
            return len(self._lent)

    def watch(self, busy: Callable[[], bool]) -> None:
        """``busy()`` is True while it will give something back by itself."""
        self._busy.append(busy)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """An uninitialised, contiguous tensor; None if there is no room and the arena does not wait. Any thread."""
        nbytes = math.prod(shape) * dtype.itemsize
        size = max(-(-nbytes // _PAGE) * _PAGE, _PAGE)
        while True:
            with self._changed:
                self._sweep()
                offset = self._fit(size)
                if offset is not None:
                    with torch.inference_mode(False):  # or it could not be written to outside of inference mode, being a view
                        piece = self._block[offset : offset + nbytes].view(dtype).view(shape)
                    self._lend(piece, (offset, size))
                    return piece
                alone = size > self.nbytes and not self._beyond
                coming = bool(self._late)
            if alone or (self.waits and not coming and not any(busy() for busy in self._busy)):
                with torch.inference_mode(False):
                    own = torch.empty(shape, dtype=dtype, pin_memory=self.pinned)
                with self._changed:
                    self.over_budget += own.nbytes
                    self._beyond += 1
                    self._lend(own, own)
                return own
            if not self.waits:
                for busy in self._busy:  # too late for this one; the next finds what they make room for
                    busy()
                return None
            with self._changed:
                self._changed.wait(0.02)

    def give(self, piece: torch.Tensor, after: Any = None) -> None:
        """``piece`` is no longer read or written by anyone once ``after`` (a device event, or None) is over."""
        with self._changed:
            if after is not None and not after.query():
                self._late.append((after, piece.data_ptr()))
            else:
                self._take_back(piece.data_ptr())

    def close(self) -> None:
        """Unlock the memory once nothing of it is out. What still is (another engine loads from it) unlocks it when it comes back."""
        if self.pinned:
            torch.cuda.synchronize()
            if self.outstanding == 0:
                self._unlock()
                self.pinned = False

    def _fit(self, size: int) -> int | None:
        for index, (offset, room) in enumerate(self._free):
            if room >= size:
                if room == size:
                    del self._free[index]
                else:
                    self._free[index] = (offset + size, room - size)
                return offset
        return None

    def _lend(self, piece: torch.Tensor, what: tuple[int, int] | torch.Tensor) -> None:
        self._lent[piece.data_ptr()] = what
        self.used += what.nbytes if isinstance(what, torch.Tensor) else what[1]
        self.high_water = max(self.high_water, self.used)

    def _sweep(self) -> None:
        late, self._late = self._late, []
        for event, pointer in late:
            if event.query():
                self._take_back(pointer)
            else:
                self._late.append((event, pointer))

    def _take_back(self, pointer: int) -> None:
        what = self._lent.pop(pointer)
        self.used -= what.nbytes if isinstance(what, torch.Tensor) else what[1]
        if isinstance(what, torch.Tensor):
            self._beyond -= 1
        else:
            self._free.append(what)
            self._free.sort()
            merged: list[tuple[int, int]] = []
            for offset, size in self._free:
                if merged and merged[-1][0] + merged[-1][1] == offset:
                    merged[-1] = (merged[-1][0], merged[-1][1] + size)
                else:
                    merged.append((offset, size))
            self._free = merged
        self._changed.notify_all()


class Ready:
    """Waits for a chunk's copies, then runs ``check`` (once, on the writer's thread). ``failure`` says what the check found."""

    def __init__(self, events: Sequence[Any] = (), check: Callable[[], None] | None = None) -> None:
        self._events, self._check = tuple(events), check
        self.failure = ""

    def done(self) -> bool:
        """Whether the copies are over; waits for nothing."""
        return all(event.query() for event in self._events)

    def synchronize(self) -> None:
        """Block until the chunk is on the host, checked and whole.

        Raises:
            RowsMissing: it is there, but not whole.
        """
        if not self.done():
            for event in self._events:
                event.synchronize()
            time.sleep(GRACE_S)
        if self._check is not None:
            check, self._check = self._check, None
            try:
                check()
            except RowsMissing:
                self.failure = "rows-missing"
                raise


class Staged:
    """A whole chunk on its way, and the lease (:class:`~qcap.store.tiers.Lease`) of where it goes: held by who made it.

    Args:
        host: ``[planes, L, CH, H]``; each ``[CH, H]`` is contiguous. Good once ``ready`` is over.
        ready: what to wait for.
        give_back: called once, when nobody needs ``host`` any more. A store may keep it for long: it should refer to little else.
        pinned: whether ``host`` is page-locked.
        lent: False if ``host`` was made for this chunk alone.
    """

    def __init__(self, host: torch.Tensor, ready: Ready, give_back: Callable[[], None], *, pinned: bool = False, lent: bool = True) -> None:
        self.host, self.ready, self.pinned, self.lent = host, ready, pinned, lent
        self._give_back = give_back
        self._lock = threading.Lock()
        self._holders = 1

    def hold(self) -> None:
        """One more needs it."""
        with self._lock:
            if not self._holders:
                raise RuntimeError("a chunk's memory was given back before")
            self._holders += 1

    def release(self) -> None:
        """One less needs it; the last one gives it back."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        self._give_back()


class PageJob:
    """Blocks of all layers on their way to the host. Made by :meth:`PageStager.start`.

    Attributes:
        host: ``[planes, L, T, H]`` in the arena, contiguous as ``[L, planes, T, H]``.
        queued: layers that are on their way.
        packed: event after which the pages may be written over; None on the CPU, and before the last layer was queued.
        copied: event after which ``host`` is whole.
    """

    def __init__(self, stager: PageStager, table: PageTable, block_ids: np.ndarray, host: torch.Tensor, shares: int) -> None:
        self._arena, self._shares = stager.arena, shares
        self._lock = threading.Lock()
        self.block_ids, self.host = block_ids, host
        self._way: tuple[PageStager, PageTable, torch.Tensor] | None = (stager, table, stager.send_to_pack(block_ids))
        self.queued = 0
        self.packed: Any = None
        self.copied: Any = None

    def advance(self, num_layers: int) -> None:
        """Queue layers below ``num_layers``. Their pages must have been written by what is queued on the current stream so far."""
        if num_layers > self.queued and self._way is not None:
            stager, table, ids = self._way
            stager.pack(table, ids, self.host, self.queued, num_layers)
            self.queued = num_layers
            if num_layers == table.num_layers:
                self.packed, self.copied = stager.events()
                self._way = None  # a chunk that rests in a store refers to this job, and shall not keep an engine's pages

    def release(self) -> None:
        """One of the chunks in it is no longer read; the last one gives the memory back."""
        with self._lock:
            self._shares -= 1
            if self._shares:
                return
        self._arena.give(self.host, self.copied)


class PageStager:
    """Moves blocks of pages to the host.

    Args:
        device: of the pages.
        arena: where they go.
        slot_bytes: the least size of a device slot; one chunk of one layer must fit.
    """

    def __init__(self, device: torch.device, arena: HostArena, *, slot_bytes: int = SLOT_BYTES) -> None:
        self.device, self.arena = device, arena
        self._cuda = device.type == "cuda"
        self._index: Any = device if device.index is None else device.index  # asked with a number, torch does not look for the device
        self.nbytes = 0
        self._now: Any = None  # recorded again and again: who waits for an event waits for its last record before that
        if self._cuda:
            self._pack = torch.cuda.Stream(device)
            two = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._turns = Turns(*two, torch.cuda.Stream.record_event, torch.cuda.Stream.wait_event)
            self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
            self._slot_events = [(torch.cuda.Event(), torch.cuda.Event()) for _ in range(2)]  # packed; may be packed again
            self._turn = 0
            self.nbytes = 2 * slot_bytes

    @property
    def copy(self) -> Any:
        """The copy stream whose turn it is: an event on it is behind all that was queued on both."""
        return self._turns.current

    def send(self, values: Sequence[int] | np.ndarray) -> torch.Tensor:
        """int64 indices on the device, sent on the current stream without waiting for it."""
        host = torch.as_tensor(np.asarray(values, dtype=np.int64))
        return host.pin_memory().to(self.device, non_blocking=True) if self._cuda else host

    def send_to_pack(self, values: np.ndarray) -> torch.Tensor:
        """The same, for the pack stream."""
        if not self._cuda:
            return self.send(values)
        with torch.cuda.stream(self._pack):
            return self.send(values)

    def start(self, table: PageTable, block_ids: Sequence[int] | np.ndarray, shares: int = 1) -> PageJob | None:
        """Reserve host memory for ``block_ids`` of all layers; None if there is none. ``shares``: chunks, to be released one by one.

        The planes of a layer lie side by side in it: so a layer is one copy, both on its way here and on its way back."""
        ids = np.asarray(block_ids, dtype=np.int64)
        planes, layers, *rows = table.rows_shape(len(ids))
        host = self.arena.take((layers, planes, *rows), table.dtype)
        return None if host is None else PageJob(self, table, ids, host.transpose(0, 1), shares)

    def stage(
        self,
        table: PageTable,
        block_ids: Sequence[int] | np.ndarray,
        extras: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        check: Callable[[torch.Tensor], None] | None = None,
    ) -> tuple[Staged, Any] | None:
        """One chunk, all its layers now, and the event after which its blocks may be written over (None on the CPU).

        ``extras``: further (device, host) pairs to copy; ``check`` runs on the writer's thread when all is there.
        """
        job = self.start(table, block_ids)
        if job is None:
            return None
        job.advance(table.num_layers)
        for source, target in extras:
            self.copy_out(source, target)
        if extras:
            _, job.copied = self.events()
        finish = None if check is None else (lambda: check(job.host))
        events = [] if job.copied is None else [job.copied]
        return Staged(job.host, Ready(events, finish), job.release, pinned=self.arena.pinned), job.packed

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, *, keep: bool = False) -> None:
        """Copy ``source`` (device), as the current stream leaves it, to ``target`` (host) on the copy stream. Both contiguous.

        ``keep``: the caller keeps ``source`` and writes to it again only after the copy.
        """
        if not self._cuda:
            target.copy_(source)
            return
        copy = self._turns.take(source.nbytes)
        engine = self._follow_engine(copy)
        torch.cuda.set_stream(copy)  # what torch.cuda.stream() does, without the object that it makes
        try:
            target.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(engine)
        if not keep:
            self.keep_until_copied(source)

    def _follow_engine(self, stream: Any) -> Any:
        """``stream`` goes on after all that was queued on the current stream, which is given back."""
        if self._now is None:
            self._now = torch.cuda.Event()
        engine = torch.cuda.current_stream(self._index)
        self._now.record(engine)
        stream.wait_event(self._now)
        return engine

    def layers_at_once(self, host: torch.Tensor) -> int:
        """How many layers of ``host`` ``[planes, L, T, H]`` fill a slot: fewer would only cost the host more calls. All of them on the CPU,
        where nothing is gained by starting early."""
        planes, layers, tokens, width = host.shape
        return max(1, self._slots[0].numel() // max(planes * tokens * width * host.element_size(), 1)) if self._cuda else int(layers)

    def pack(self, table: PageTable, ids: torch.Tensor, host: torch.Tensor, first: int, last: int) -> None:
        """Layers ``[first, last)`` of the blocks ``ids`` into ``host`` ``[planes, L, T, H]``, contiguous as ``[L, planes, T, H]``."""
        planes, _, tokens, width = host.shape
        if not self._cuda:
            kernels.gather_pages(table, ids, host[:, first:last], first)
            return
        n, size = table.block_size, planes * width * host.element_size()
        room = self._slots[0].numel() // size  # tokens of one layer that fit into a slot
        together = min(max(1, room // max(tokens, 1)), last - first)
        per_slot = min(tokens, room // n * n)
        self._follow_engine(self._pack)
        for layer in range(first, last, together):
            layers = min(together, last - layer)
            for token in range(0, tokens, per_slot):
                count = min(per_slot, tokens - token)
                self._pack_one(table, ids[token // n : (token + count) // n], host, layer, layers, token, count)

    def _pack_one(self, table: PageTable, ids: torch.Tensor, host: torch.Tensor, layer: int, layers: int, token: int, count: int) -> None:
        planes, width = host.shape[0], host.shape[3]
        turn = self._turn = (self._turn + 1) % len(self._slots)
        nbytes = planes * layers * count * width * host.element_size()
        slot = self._slots[turn][:nbytes].view(host.dtype).view(layers, planes, count, width)
        target = host.transpose(0, 1)[layer : layer + layers, :, token : token + count]
        engine, packed, free = torch.cuda.current_stream(self._index), *self._slot_events[turn]
        copy = self._turns.take(nbytes)
        torch.cuda.set_stream(self._pack)
        try:
            self._pack.wait_event(free)
            kernels.gather_pages(table, ids, slot.transpose(0, 1), layer)
            packed.record()
            copy.wait_event(packed)
            torch.cuda.set_stream(copy)
            if target.is_contiguous():
                target.copy_(slot, non_blocking=True)
            else:  # a part of one layer
                for plane in range(planes):
                    target[0, plane].copy_(slot[0, plane], non_blocking=True)
            free.record()
        finally:
            torch.cuda.set_stream(engine)

    def copied(self) -> Any:
        """An event after all that was queued on the copy stream so far; None on the CPU."""
        if not self._cuda:
            return None
        event = torch.cuda.Event(blocking=True)  # writers sleep on it, rather than spin
        event.record(self.copy)
        return event

    def copied_so_far(self, event: Any = None) -> Any:
        """The same for the device alone: ``event`` used again, or a new one; None on the CPU."""
        if not self._cuda:
            return None
        event = event or torch.cuda.Event()
        event.record(self.copy)
        return event

    def wait_for(self, event: Any) -> None:
        """What is queued on the current stream from now on comes after ``event``."""
        if event is not None:
            torch.cuda.current_stream(self._index).wait_event(event)

    def keep_until_copied(self, source: torch.Tensor) -> None:
        """``source``, once freed, is not used again before all copies queued so far are over."""
        if self._cuda:
            source.record_stream(self.copy)

    def events(self) -> tuple[Any, Any]:
        """(all that was packed so far, all that was copied so far)."""
        if not self._cuda:
            return None, None
        packed = torch.cuda.Event()
        packed.record(self._pack)
        return packed, self.copied()


def _lock_pages(block: torch.Tensor) -> None:
    """Not by torch's own allocator: its page-locked memory comes in powers of two, up to twice as much as was asked for."""
    try:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0)))
    except RuntimeError as error:
        try:
            torch.zeros(1, device="cuda")  # takes the error off the device, or the next who launches anything would be told of it
        except RuntimeError:
            pass
        raise ConfigError(
            f"{block.nbytes / 2**20:.0f} MiB of host memory cannot be page-locked ({str(error).splitlines()[0]}): lower qcap.host_bytes, "
            "or raise the limit on locked memory (ulimit -l)"
        ) from error


def _unlock_pages(block: torch.Tensor) -> None:
    torch.cuda.synchronize()
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(block.data_ptr())))
