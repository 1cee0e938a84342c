"""Pages, host objects, a dull reference, and a device module that writes down who waits for whom."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch

from qcap.connectors import LayerFormat, LayerObject
from qcap.kernels import PageTable

L, B, N, H, D = 3, 12, 4, 2, 8
HIDDEN = H * D
POISON = -77.0


def pages(layout="B2NHD", *, layers=L, blocks=B, n=N, heads=H, head_size=D, dtype=torch.float32):
    """A page table of ``layers`` layers with a guard block at both ends of each, all poison; and the whole tensors."""
    whole, views = [], []
    for _ in range(layers):
        if layout == "B2NHD":
            t = torch.full((blocks + 2, 2, n, heads, head_size), POISON, dtype=dtype)
            inner = t[1:-1]
            views.append([inner[:, p].transpose(1, 2) for p in range(2)])
        elif layout == "2BNHD":
            t = torch.full((2, blocks + 2, n, heads, head_size), POISON, dtype=dtype)
            views.append([t[p, 1:-1].transpose(1, 2) for p in range(2)])
        elif layout == "BH(Kt,V)":  # keys transposed within a block
            t = torch.full((blocks + 2, heads, 2 * n * head_size), POISON, dtype=dtype)
            inner = t[1:-1]
            views.append([
                inner[:, :, : n * head_size].unflatten(2, (head_size, n)).transpose(2, 3),
                inner[:, :, n * head_size :].unflatten(2, (n, head_size)),
            ])  # fmt: skip
        else:  # latent rows: one plane, one head
            t = torch.full((blocks + 2, n, heads * head_size), POISON, dtype=dtype)
            views.append([t[1:-1].unsqueeze(1)])
        whole.append(t)
    return PageTable(views), whole


def row(table, layer, plane, slot):
    """One token's row, a view: the dull truth."""
    return table.views[layer][plane][slot // table.block_size, :, slot % table.block_size]


def objects(spans, fmt, *, layers=L, hidden=HIDDEN, dtype=torch.float32, seed=0, positions=False):
    """``[layer][chunk]`` of random host objects."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(layers):
        made.append([])
        for start, end in spans:
            tensor = torch.randn(fmt.shape(end - start, hidden), generator=generator).to(dtype)
            made[-1].append(LayerObject(tensor, fmt, torch.arange(start, end) if positions else None))
    return made


def empty_objects(spans, fmt, *, layers=L, hidden=HIDDEN, dtype=torch.float32):
    return [[LayerObject(torch.full(fmt.shape(b - a, hidden), float("nan"), dtype=dtype), fmt) for a, b in spans] for _ in range(layers)]


def planes_of(obj):
    """``[planes, T, H]``, written out by hand."""
    if obj.format is LayerFormat.KV_T2D:
        return torch.stack([obj.tensor[:, 0], obj.tensor[:, 1]])
    return obj.tensor if obj.format is LayerFormat.KV_2TD else obj.tensor[None]


def dull_load(table, made, spans, slots):
    """What pages are afterwards: every token by itself, in order."""
    for layer, chunks in enumerate(made):
        for (start, end), obj in zip(spans, chunks, strict=True):
            for plane, rows in enumerate(planes_of(obj)):
                for token in range(start, end):
                    slot = int(slots[token])
                    if 0 <= slot < table.num_blocks * table.block_size:
                        row(table, layer, plane, slot).copy_(rows[token - start].view(table.heads, table.head_size))


def run_load(connector, made, spans, slots, sync=True):
    """Drive a load to its end; the number of its yields."""
    steps = connector.batched_to_gpu([a for a, _ in spans], [b for _, b in spans], slot_mapping=slots, sync=sync)
    yields = 0
    assert next(steps) is None
    yields += 1
    for layer in made:
        steps.send(layer)
        yields += 1
    for _ in steps:
        yields += 1
    return yields


def run_store(connector, made, spans, slots, sync=True):
    steps = connector.batched_from_gpu(made, [a for a, _ in spans], [b for _, b in spans], slot_mapping=slots, sync=sync)
    return sum(1 for _ in steps)


class FakeDevice:
    """Stands in for ``torch.cuda``: streams have names, and everything between them is in ``log``. What makes the host wait is an error."""

    def __init__(self):
        self.log = []
        self.over = False  # what events say when asked
        self.compute = SimpleNamespace(name="compute", wait_event=lambda e: self.log.append(("compute waits", e.stream, e.number)))
        self._current = self.compute
        self._made = iter(("load", "store"))
        self._events = 0

    def Stream(self, device=None):
        stream = SimpleNamespace(name=next(self._made))
        stream.wait_event = lambda e: self.log.append((f"{stream.name} waits", e.stream, e.number))
        stream.synchronize = self.synchronize
        return stream

    def current_stream(self, device=None):
        return self._current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self._current = self._current, stream
        self.log.append(("on", stream.name))
        yield
        self._current = before

    def Event(self):
        event = SimpleNamespace(stream=None, number=None, query=lambda: self.over, synchronize=self.synchronize)

        def record(stream):
            self._events += 1
            event.stream, event.number = stream.name, self._events

        event.record = record
        return event

    def synchronize(self, *args):
        raise AssertionError("the host waited")

    def waits(self, who):
        return [entry for entry in self.log if entry[0] == f"{who} waits"]
