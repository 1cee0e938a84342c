"""What moves cache between host objects and an engine's memory, one small file a case.

Which one moves it is a question of engine, device and flags, answered by a table that each file enters itself into:
``choose(engine="vllm", device="cuda", layerwise=True)``. Nothing here knows an engine's code; pages come as a ``PageTable``, a token
pool as the object that has ``k_buffer`` and ``v_buffer``.
"""

from __future__ import annotations

from qcap.connectors.base import Connector
from qcap.connectors.buffered import BufferedConnector
from qcap.connectors.formats import LayerFormat, LayerObject, layer_format
from qcap.connectors.layer import LayerConnector
from qcap.connectors.musa import MusaConnector
from qcap.connectors.paged import PagedConnector
from qcap.connectors.registry import Case, UnknownPlatform, build, check_layerwise, choose, register, table
from qcap.connectors.sglang import SGLangConnector, pool_table
from qcap.connectors.whole import BatchConnector, ChunkConnector

__all__ = [
    "BatchConnector",
    "BufferedConnector",
    "Case",
    "ChunkConnector",
    "Connector",
    "LayerConnector",
    "LayerFormat",
    "LayerObject",
    "MusaConnector",
    "PagedConnector",
    "SGLangConnector",
    "UnknownPlatform",
    "build",
    "check_layerwise",
    "choose",
    "layer_format",
    "pool_table",
    "register",
    "table",
]
