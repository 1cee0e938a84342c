"""Capture: what is taken in a step, and how it leaves the device.

:class:`Capture` fans a step out to its features. :class:`StreamingQueryFeature` streams queries off the device within a budget,
:class:`QueryFeature` keeps them in a ring until their chunk is whole, :class:`KVFeature` reads keys and values from the engine's pages.
Host memory is one :class:`HostArena`.
"""

from qcap.capture.core import Capture
from qcap.capture.features import Feature, RequestTrack
from qcap.capture.pages import KVFeature
from qcap.capture.resident import QueryFeature
from qcap.capture.staging import HostArena, PageStager, Ready, RowsMissing, Staged
from qcap.capture.streaming import StreamBudget, StreamingQueryFeature

__all__ = [
    "Capture",
    "Feature",
    "HostArena",
    "KVFeature",
    "PageStager",
    "QueryFeature",
    "Ready",
    "RequestTrack",
    "RowsMissing",
    "Staged",
    "StreamBudget",
    "StreamingQueryFeature",
]
