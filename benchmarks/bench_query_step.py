"""One step of query capture: plan, attribution and a scatter a layer, from the scheduler's numbers on the host to the last row in place.

All layers go to memory of their own, as in a resident ring, so that no copy to the host is in the figure; the peer's ring is that too.
Ten steps in a row are timed by the host's clock, from a device at rest to a device at rest: an engine's steps follow each other like that.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import torch

from benchmarks.harness import Case, Context, benchmark
from benchmarks.peer_lmcache import Peer, StepInputs, step_inputs
from qcap import kernels
from qcap.attribution import RequestStep, Step
from qcap.capture.plan import PlanBuffer
from qcap.capture.stream_ledger import StreamLedger

CHUNK = 256


class Ours:
    """qcap's side of a step over ``inputs``."""

    def __init__(self, inputs: StepInputs) -> None:
        self.inputs = inputs
        device, n = inputs.slot_mapping.device, inputs.block_size
        self.rows = sum(r.end - r.start for r in inputs.requests)
        self.layers = [torch.empty((self.rows, q.shape[1]), dtype=q.dtype, device=device) for q in inputs.queries]
        self.slots = torch.empty_like(inputs.slot_mapping)
        self.stamps = torch.zeros(self.rows, dtype=torch.int64, device=device)
        self.plan = PlanBuffer(inputs.kv_blocks, len(inputs.requests), device)
        self.ledger = StreamLedger(n, CHUNK, inputs.kv_blocks, lambda *_: None)
        requests = (RequestStep(i, r.request_id, "", r.start, r.end, 0, array("q", r.block_ids)) for i, r in enumerate(inputs.requests))
        self.step = Step(1, tuple(requests))

    def attribute(self) -> None:
        """From the scheduler's numbers to where each row goes."""
        table = self.plan.next()
        requests, blocks, _ = self.ledger.plan(self.step, table)  # flattens the step first: what a scheduler does beforehand counts here
        self.plan.send(1, requests, blocks)
        kernels.slot_attribution(self.inputs.slot_mapping, self.plan.device, self.inputs.block_size, self.slots, self.stamps)

    def run(self) -> None:
        """The same, and every layer's rows."""
        self.attribute()
        for query, layer in zip(self.inputs.queries, self.layers, strict=True):
            kernels.row_scatter(query, self.slots, layer)

    def check(self) -> None:
        """Every row of every request lies where the plan says: requests one after another, tokens in order."""
        self.stamps.zero_()
        self.layers[-1].fill_(float("nan"))
        self.run()
        wanted = torch.cat([self.inputs.rows_of(r) for r in self.inputs.requests])
        for query, layer in ((self.inputs.queries[0], self.layers[0]), (self.inputs.queries[-1], self.layers[-1])):
            if not torch.equal(layer, query[wanted]):
                raise AssertionError("a row lies in another token's place")
        if not bool((self.stamps == 1).all()):
            raise AssertionError("a row was not stamped")


@benchmark(tests=("tests/kernels/test_row_scatter.py", "tests/kernels/test_slot_attribution.py"))
def cases(ctx: Context) -> Iterator[Case]:
    """A long prompt, some, and many short ones, of an 8B model: 32 layers of 4,096 bf16."""
    for requests, tokens in ((1, 8192), (8, 1024), (64, 256), (64, 1)):
        inputs = step_inputs(requests, tokens, tail=37 if tokens > 1 else 0, block_size=16 if tokens > 1 else 1)
        ours = Ours(inputs)
        theirs: Callable[[], object] | None = None
        name = ""
        if ctx.vs == "lmcache" and tokens > 1:
            peer = Peer(inputs)
            theirs, name = peer.step, peer.name
        shape = f"{requests} x {tokens}"
        yield Case(
            "query_step", f"plan + scatter, {shape}", ours.run, inputs.nbytes, clock="host", floor=ctx.copy_us(inputs.nbytes),
            floor_name="copy", check=ours.check, peer=theirs, peer_name=name, together=10, repeats=20,
        )  # fmt: skip
        plan_bytes = 2 * inputs.slot_mapping.nbytes
        yield Case(
            "query_step", f"plan + attribution, {shape}", ours.attribute, plan_bytes, clock="host",
            peer=peer.plan if theirs is not None else None, peer_name=name, together=10, repeats=20,
        )  # fmt: skip
        del ours, theirs, inputs
        peer = None  # type: ignore[assignment]
