"""Small copies of an engine get through while large ones are queued the same way."""

from __future__ import annotations

import pytest
import torch

from qcap.connectors.streams import Turns

MIB = 1 << 20
PIECE, PIECES = 32 * MIB, 48

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("to_host", [False, True], ids=["to the device", "to the host"])
def test_a_small_copy_does_not_wait_for_all_large_ones(to_host: bool) -> None:
    def pair(nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        host, device = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True), torch.ones(nbytes, dtype=torch.uint8, device="cuda")
        return (host, device) if to_host else (device, host)

    (target, source), (small, small_source) = pair(PIECE), pair(64)
    engine = torch.cuda.Stream()
    first, second, over = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    how = torch.cuda.Stream.record_event, torch.cuda.Stream.wait_event
    for turns in (Turns(first, second, *how), Turns(first, first, *how)):  # the first round warms up too
        torch.cuda.synchronize()
        for _ in range(PIECES):
            with torch.cuda.stream(turns.take(PIECE)):
                target.copy_(source, non_blocking=True)
        over.record(turns.current)
        with torch.cuda.stream(engine):
            small.copy_(small_source, non_blocking=True)
        engine.synchronize()
        if turns._other is not turns.current:
            assert not over.query(), "the small copy came behind all large ones"
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), source.cpu()) and torch.equal(small.cpu(), small_source.cpu())
