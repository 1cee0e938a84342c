"""vLLM on Moore Threads GPUs: the same pages, and streams of ``torch.musa``, which ``import torch_musa`` puts there."""

from __future__ import annotations

from qcap.connectors.layer import LayerConnector
from qcap.connectors.registry import register


@register("vllm", "musa", layerwise=True)
class MusaConnector(LayerConnector):
    """Layer by layer into pages, by index operations, since the kernels are for CUDA. There is no other layerwise way on MUSA."""
