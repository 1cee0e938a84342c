"""qcap: capture attention queries, keys and values from a stock vLLM; look at them, edit them, write them back.

``import qcap`` needs neither a GPU nor vLLM and loads neither torch nor matplotlib: what needs them is loaded when first used.

CacheKind      what a stored chunk holds: ``KV`` or ``QUERY``
CacheContext   what :func:`connect` returns
Edit           an edited cache and all that is needed to store it
QcapError      base of everything qcap raises on purpose; the tree is in ``qcap.errors``
__version__    this package's version
connect        open a store and read one model's cache
edits          keep or drop tokens, re-rotating the keys
hf             to and from a ``transformers`` cache
plots          figures (needs ``pip install qcap[notebook]``)
policies       which tokens to keep: ready policies, and how to write one
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qcap._version import __version__
from qcap.errors import QcapError
from qcap.kinds import CacheKind

if TYPE_CHECKING:
    from qcap.sdk import edits, hf, plots, policies
    from qcap.sdk.connect import connect
    from qcap.sdk.context import CacheContext
    from qcap.sdk.edits import Edit

__all__ = ["CacheContext", "CacheKind", "Edit", "QcapError", "__version__", "connect", "edits", "hf", "plots", "policies"]

_LAZY = {
    "CacheContext": ("qcap.sdk.context", "CacheContext"),
    "Edit": ("qcap.sdk.edits", "Edit"),
    "connect": ("qcap.sdk.connect", "connect"),
    "edits": ("qcap.sdk.edits", None),
    "hf": ("qcap.sdk.hf", None),
    "plots": ("qcap.sdk.plots", None),
    "policies": ("qcap.sdk.policies", None),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'qcap' has no attribute {name!r}; it has {', '.join(__all__)}")
    module_name, attribute = _LAZY[name]
    module = importlib.import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
