"""vLLM's pages, a layer at a time: host objects to a staging buffer in one run each, from there to the pages in one launch."""

from __future__ import annotations

from qcap.connectors.layer import LayerConnector
from qcap.connectors.registry import register


@register("vllm", "cuda", "xpu", "cpu", layerwise=True)
class PagedConnector(LayerConnector):
    """Layer by layer into pages of any strides; latent attention's one plane included."""
