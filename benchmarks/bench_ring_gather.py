"""Ring blocks of all layers to chunk objects on the device: one chunk, and those of a whole step, one launch a chunk."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Case, Context, benchmark
from qcap import kernels

LAYERS, WIDTH, N, CHUNK = 32, 4096, 16, 256


@benchmark(tests=("tests/kernels/test_paged_copy.py",))
def cases(context: Context) -> Iterator[Case]:
    """With ``--vs lmcache``, its paged kernel on the same ring and into objects of the same shape, if the installed one is compiled."""
    for chunks in (1, 32):
        theirs, peer_name = None, ""
        blocks = torch.randperm(chunks * CHUNK // N)
        ids = [part.cuda() for part in blocks.split(CHUNK // N)]
        ring = [torch.randn(len(blocks), N, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
        table = kernels.PageTable([[layer.unsqueeze(1)] for layer in ring])
        ours, others = ([torch.empty(1, LAYERS, CHUNK, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in ids] for _ in range(2))

        def run(table: kernels.PageTable = table, ids: list[torch.Tensor] = ids, ours: list[torch.Tensor] = ours) -> None:
            for index, out in zip(ids, ours, strict=True):
                kernels.gather_pages(table, index, out)

        if context.vs == "lmcache":
            from benchmarks import peer_lmcache

            tiny = peer_lmcache.step_inputs(1, CHUNK, layers=LAYERS, hidden=WIDTH)
            peer = peer_lmcache.Peer(tiny)
            peer.ring.num_blocks = len(blocks)
            for i, layer in enumerate(ring):
                peer.ring.tensors[f"lmcache_q_layer_{i}"] = layer
            theirs, peer_name = (peer.gather(blocks.tolist(), CHUNK, others), peer.name) if peer.native else (None, "")
            if not peer.native:
                print(f"{peer.name}: its paged kernel is not compiled for this machine: not compared")

        def check(run=run, theirs=theirs, ours=ours, others=others) -> None:  # type: ignore[no-untyped-def]
            run()
            if theirs is not None:
                theirs()
                assert all(torch.equal(a, b) for a, b in zip(ours, others, strict=True)), "the two gathers differ"

        nbytes = 2 * chunks * ours[0].nbytes
        yield Case(
            "ring_gather",
            f"{chunks} x {CHUNK} tokens, {LAYERS} layers",
            run,
            nbytes,
            floor=context.copy_us(nbytes),
            floor_name="copy",
            check=check,
            peer=theirs,
            peer_name=peer_name,
        )
