"""The one place where the version stands: the package, its objects' headers and ``pyproject.toml`` read it here."""

__version__ = "0.1.0"
