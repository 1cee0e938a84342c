"""Transfer and compute overlap, layer by layer: who waits for whom. Knows no engine, no files and no keys beyond splitting them.

:class:`LayerwiseLoad` and :class:`LayerwiseStore` are objects with named steps. On a GPU there are these streams: compute (whatever is
current), load and store; events order them, and the host waits for none. A load fetches layer i + 1 on a few threads while layer i is
being copied and layers before it compute::

    executor    fetch 0 | fetch 1 | fetch 2 | ...          into host buffers [planes, T, H], a chunk each to its slice
    load stream          | copy 0 | copy 1 | ...           one copy and one scatter a layer, all chunks at once
    compute                        | layer 0 | layer 1     waits for the event behind copy i, once a layer for all loads of the step

Chunks that lie in page-locked memory of this process need no fetching: :class:`RestingPipe` copies them from where they lie.

:class:`LayerwiseEngine` puts generators on top, by token ids, with fixed yield counts: L + 2 to retrieve, L + 1 to store.
"""

from qcap.connectors.streams import CudaStreams, DeviceStreams, NullStreams, Streams, device_module, streams_for
from qcap.layerwise.connector import HostPool, LayerConnector
from qcap.layerwise.engine import LayerwiseEngine, leading_mask, masked_tokens
from qcap.layerwise.fetch import ChunkFailed, LayerFetch, LayerMissing, LazyReader, ReaderFetch, open_readers
from qcap.layerwise.layers import BackendLayers, LayerStore, MemoryLayers, layer_major
from qcap.layerwise.load import LayerwiseLoad, LoadBatch, LoadGear, Span
from qcap.layerwise.parts import merged
from qcap.layerwise.resting import EarlyCopies, RestingPipe, RestingSpan
from qcap.layerwise.save import LayerSink, LayerwiseStore

__all__ = [
    "BackendLayers",
    "ChunkFailed",
    "CudaStreams",
    "DeviceStreams",
    "EarlyCopies",
    "HostPool",
    "LayerConnector",
    "LayerFetch",
    "LayerMissing",
    "LayerSink",
    "LayerStore",
    "LayerwiseEngine",
    "LayerwiseLoad",
    "LayerwiseStore",
    "LazyReader",
    "LoadBatch",
    "LoadGear",
    "MemoryLayers",
    "NullStreams",
    "ReaderFetch",
    "RestingPipe",
    "RestingSpan",
    "Span",
    "Streams",
    "device_module",
    "layer_major",
    "leading_mask",
    "masked_tokens",
    "merged",
    "open_readers",
    "streams_for",
]
