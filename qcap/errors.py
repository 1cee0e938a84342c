"""The error tree. Every message says what was wrong and what to do next.

QcapError
├── ConfigError            a setting is unknown, of the wrong type or out of range          (also a ValueError)
├── ShapeError             a tensor has the wrong shape, dtype, stride or device            (also a ValueError)
├── TokenError             token ids, masks, salts or chunk bounds are not usable           (also a ValueError)
├── StoreError             the store could not do what was asked
│   ├── StoreUnavailable   the URL cannot be opened or has gone away
│   ├── ObjectCorrupt      an object is there, but it is not what its header says
│   └── EditConflict       an object with other content is already stored under this salt
├── ModelNotFound          the store holds nothing for this model and kind
├── GeometryMismatch       what is stored does not fit what was asked
├── CaptureEmpty           a capture wrote no row
├── Unsupported            this model, layer, layout or vLLM version is not supported       (names which)
└── StepOrderError         the named steps of an object were called in the wrong order
"""

from __future__ import annotations


class QcapError(Exception):
    """Base of everything qcap raises on purpose."""


class ConfigError(QcapError, ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class ShapeError(QcapError, ValueError):
    """A tensor has the wrong shape, dtype, stride or device."""


class TokenError(QcapError, ValueError):
    """Token ids, masks, salts or chunk bounds are not usable."""


class StoreError(QcapError):
    """The store could not do what was asked."""


class StoreUnavailable(StoreError):
    """The store URL cannot be opened, or the store has gone away."""


class ObjectCorrupt(StoreError):
    """An object is there, but it is not what its header says."""


class EditConflict(StoreError):
    """An object with other content is already stored under this salt."""


class ModelNotFound(QcapError):
    """The store holds nothing for this model and kind."""


class GeometryMismatch(QcapError):
    """What is stored does not fit what was asked."""


class CaptureEmpty(QcapError):
    """A capture wrote no row."""


class Unsupported(QcapError):
    """This model, layer, layout or vLLM version is not supported; the message names which and why."""


class StepOrderError(QcapError):
    """The named steps of an object were called in the wrong order."""
