"""LMCache's query capture without vLLM and without its server, on tensors that qcap can be given too.

What runs is the installed package's own: ``QRingBufferCapture._build_q_step_state`` plans a step, ``QRingBuffer.scatter`` writes a layer's
rows, and its paged kernel copies ring blocks to objects. Only the two objects around the planner are stand-ins, which hold the ring.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch


@dataclass(frozen=True)
class Request:
    """One request of a step: the KV blocks of tokens ``[start, end)``, in token order."""

    request_id: str
    block_ids: list[int]
    start: int
    end: int


@dataclass(frozen=True)
class StepInputs:
    """One step of an engine, as both sides get it.

    Args:
        queries: ``[rows, H]`` a layer, slices of fused QKV as in an engine. The rows of all requests, in an order that is not theirs.
        slot_mapping: int64 ``[rows]``, the KV slot of each row.
        requests: what is to be captured; each has a tail of further rows, in further blocks, that is not.
        block_size: tokens in a block.
        kv_blocks: blocks that the slots lie in.
    """

    queries: list[torch.Tensor]
    slot_mapping: torch.Tensor
    requests: list[Request]
    block_size: int
    kv_blocks: int

    @property
    def nbytes(self) -> int:
        """Bytes that the captured rows of all layers take: read once, and written once."""
        rows = sum(request.end - request.start for request in self.requests)
        return 2 * rows * len(self.queries) * self.queries[0].shape[1] * self.queries[0].element_size()

    def rows_of(self, request: Request) -> torch.Tensor:
        """int64 ``[end - start]``: the step's rows of a request's tokens, in token order."""
        blocks = torch.tensor(request.block_ids, device=self.slot_mapping.device)
        slots = (blocks[:, None] * self.block_size + torch.arange(self.block_size, device=blocks.device)).reshape(-1)
        row_of = torch.full((self.kv_blocks * self.block_size,), -1, dtype=torch.int64, device=blocks.device)
        row_of[self.slot_mapping] = torch.arange(self.slot_mapping.numel(), device=blocks.device)
        return row_of[slots]


def step_inputs(
    requests: int,
    tokens: int,
    *,
    layers: int = 32,
    hidden: int = 4096,
    tail: int = 37,
    block_size: int = 16,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> StepInputs:
    """A step of ``requests`` x (``tokens`` + ``tail``) rows; of each request its first ``tokens``, whole blocks, are to be captured."""
    random = torch.Generator().manual_seed(seed)
    rows, wanted, first = [], [], 0
    for number in range(requests):
        count = -(-(tokens + tail) // block_size)
        blocks = torch.randperm(count, generator=random) + first
        first += count
        at = torch.arange(tokens + tail)
        rows.append(blocks[at // block_size] * block_size + at % block_size)
        wanted.append(Request(f"r{number}", blocks[: tokens // block_size].tolist(), 0, tokens))
    order = torch.randperm(requests, generator=random).tolist()
    slots = torch.cat([rows[i] for i in order]).to(device)
    fused = [torch.randn(slots.numel(), hidden * 3 // 2, device=device).to(dtype) for _ in range(layers)]
    return StepInputs([qkv[:, :hidden] for qkv in fused], slots, wanted, block_size, first)


def why_missing() -> str:
    """Why the peer cannot be run here; "" if it can."""
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # read when it is imported
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    try:
        importlib.import_module("lmcache.sdk.qringbuffer")
    except ImportError as error:
        return f"lmcache with query capture (0.5.3 or newer) cannot be imported here: {error}. Install it, or put it on PYTHONPATH"
    return ""


class Peer:
    """LMCache's ring, planner and paged kernel over ``inputs``. Raises ImportError if it is not installed.

    The ring holds two steps, which is its default depth.
    """

    def __init__(self, inputs: StepInputs) -> None:
        problem = why_missing()
        if problem:
            raise ImportError(problem)
        import lmcache
        from lmcache.sdk.qringbuffer import QRingBuffer, QRingBufferCapture

        self.name = f"lmcache {lmcache.__version__}"
        self._inputs = inputs
        query = inputs.queries[0]
        blocks = sum(len(request.block_ids) for request in inputs.requests)
        self.ring = QRingBuffer(len(inputs.queries), 2 * blocks, inputs.block_size, query.shape[1], query.dtype, query.device)
        adapter = SimpleNamespace(q_ring=self.ring, scatter_q_layer=self.ring.scatter)
        self._capture = QRingBufferCapture(SimpleNamespace(is_kv_writer=True), adapter)
        operations = [
            SimpleNamespace(
                request_id=r.request_id,
                direction="STORE",
                cache_salt="",
                request_configs=None,
                op=SimpleNamespace(block_ids=[r.block_ids], start=r.start, end=r.end, token_ids=None),
            )
            for r in inputs.requests
        ]
        self._metadata = SimpleNamespace(requests=operations)
        self._attention = SimpleNamespace(slot_mapping=inputs.slot_mapping)
        self._ops = getattr(lmcache, "device_ops", None) or lmcache.c_ops
        transfer = self._ops.multi_layer_block_kv_transfer
        self.native = not inspect.isfunction(getattr(transfer, "__func__", transfer))

    def _plan(self) -> Any:
        state = self._capture._build_q_step_state(self._inputs.queries[0], self._metadata, self._attention)
        if state is None or len(state.stores) != len(self._inputs.requests):
            raise RuntimeError(f"{self.name} planned {0 if state is None else len(state.stores)} of {len(self._inputs.requests)} requests")
        return state

    def plan(self) -> None:
        """Plan a step and give its blocks back."""
        for store in self._plan().stores:
            self.ring.free(store.ring_block_ids)

    def step(self) -> None:
        """Plan a step, scatter the rows of all layers, give its blocks back."""
        state = self._plan()
        for layer, query in enumerate(self._inputs.queries):
            self.ring.scatter(layer, query, state.ring_slots)
        for store in state.stores:
            self.ring.free(store.ring_block_ids)

    def check(self) -> None:
        """Raises AssertionError if a planned step does not bring every row to its place."""
        state = self._plan()
        by_id = {request.request_id: request for request in self._inputs.requests}
        for layer, query in enumerate(self._inputs.queries):
            self.ring.scatter(layer, query, state.ring_slots)
            for store in state.stores:
                got = self.ring.tensors[f"lmcache_q_layer_{layer}"][store.ring_block_ids].flatten(0, 1)
                assert torch.equal(got, query[self._inputs.rows_of(by_id[store.request_id])]), f"{self.name}: layer {layer}"
        for store in state.stores:
            self.ring.free(store.ring_block_ids)

    def gather(self, block_ids: list[int], chunk_size: int, objects: list[torch.Tensor]) -> Callable[[], None]:
        """What copies ring blocks into ``objects`` (each ``[1, L, CH, H]`` on the ring's device), one call an object, as its store does."""
        try:
            constants = importlib.import_module("lmcache.lmcache_native")
        except ImportError:
            constants = self._ops
        ring, n = self.ring, self.ring.block_size
        shape = self._ops.PageBufferShapeDesc()
        width = ring.hidden_dim
        sizes = {"kv_size": 1, "nl": ring.num_layers, "nb": ring.num_blocks, "bs": n, "nh": 1, "hs": width}
        for name, value in {**sizes, "element_size": ring.dtype.itemsize, "block_stride_elems": n * width}.items():
            setattr(shape, name, value)
        try:
            shape.dtype = ring.dtype
        except (AttributeError, TypeError):
            pass  # the compiled description of older releases has no such field
        device, layers = ring.device, [ring.tensors[f"lmcache_q_layer_{i}"] for i in range(ring.num_layers)]
        cuda = device.type == "cuda"
        pages: Any = torch.tensor([layer.data_ptr() for layer in layers], device=device) if cuda else layers
        ids = torch.tensor(block_ids, device=device).split(chunk_size // n)
        targets: list[Any] = [[out.data_ptr() if cuda else out] for out in objects]
        transfer = self._ops.multi_layer_block_kv_transfer
        more = (constants.TransferDirection.D2H, shape, chunk_size, constants.EngineKVFormat.NL_X_NB_BS_HS, 0)

        def run() -> None:
            for target, blocks in zip(targets, ids, strict=True):
                transfer(pages, target, blocks, device, *more)

        return run
