"""From a URL or a path to an object tier."""

from __future__ import annotations

import difflib
import os
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

import obstore

from qcap.errors import ConfigError, StoreUnavailable
from qcap.store.buckets import STAGING, LocalBucket, ObstoreBucket
from qcap.store.memory import MemoryTier
from qcap.store.objects import MODELS, OBJECTS, SEQUENCES, ObjectTier

CLOUD_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")
SCHEMES = ("file", "memory", *CLOUD_SCHEMES)


def check_url(url: str) -> None:
    """That :func:`open_tier` knows what ``url`` names. Nothing is opened, and no client is made.

    Raises:
        ConfigError: not a URL of a known scheme; the message lists them.
    """
    if not isinstance(url, str) or not url.strip():
        raise ConfigError(f"a store's URL is a text like 'file:///data/captures', got {url!r}")
    if "://" not in url:
        if (scheme := url.partition(":")[0]) in SCHEMES and ":" in url:
            raise ConfigError(f"{url!r} is not a URL: did you mean {scheme + '://' + url.partition(':')[2].lstrip('/')!r}?")
        return
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a URL ({error}): write one like 'file:///data/captures'") from None
    if parts.scheme == "memory":
        _memory_name(url)
    elif parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise ConfigError(f"{url!r} has no absolute path: write file:///{parts.netloc}{parts.path} (three slashes)")
    elif parts.scheme.startswith("qcap"):
        raise ConfigError(f"{url!r}: this version of qcap has no store server; open the store itself, for instance file:///data/captures")
    elif parts.scheme not in CLOUD_SCHEMES:
        near = difflib.get_close_matches(parts.scheme, SCHEMES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(
            f"unknown scheme {parts.scheme!r} in {url!r}{hint}: qcap opens a plain path or {', '.join(s + '://' for s in SCHEMES)}"
        )


def check_writable(url: str) -> None:
    """That the folder ``url`` can be written to or made, as far as permissions tell. Nothing is written; other stores are not asked.

    Raises:
        ConfigError: as :func:`check_url`.
        StoreUnavailable: it cannot.
    """
    check_url(url)
    if "://" in url and urlsplit(url).scheme != "file":
        return
    bucket = _local_bucket(url)
    bucket.check()
    for folder in (bucket.root, *(bucket.root / name for name in (STAGING, OBJECTS, MODELS, SEQUENCES))):
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            raise StoreUnavailable(f"{folder} cannot be written to: see to its permissions (ls -ld {folder}), or give another store")


def open_tier(url: str) -> ObjectTier:
    """The object tier at ``url``.

    Args:
        url: ``file:///absolute/path``, a plain path, ``memory://name`` (of this process), or ``s3://``, ``gs://``, ``az://`` with the
            credentials that the environment gives.

    Raises:
        ConfigError: not a URL of a known scheme; the message lists them.
        StoreUnavailable: it cannot be opened.
    """
    check_url(url)
    scheme = urlsplit(url).scheme if "://" in url else ""
    if scheme == "memory":
        return MemoryTier(_memory_name(url))
    if scheme in CLOUD_SCHEMES:
        return ObjectTier(_cloud_bucket(url), url)
    bucket = _local_bucket(url)
    bucket.check()
    return ObjectTier(bucket, url if scheme else bucket.root.as_uri())


def _local_bucket(url: str) -> LocalBucket:
    if "://" not in url:
        return LocalBucket(Path(url).expanduser().absolute())
    return LocalBucket(Path(unquote(urlsplit(url).path)))


def _memory_name(url: str) -> str:
    name = url.partition("://")[2].strip("/")
    if not name:
        raise ConfigError("memory:// needs a name, for instance memory://scratch: two openers of one name share it")
    return name


def _cloud_bucket(url: str) -> ObstoreBucket:
    try:
        store = obstore.store.from_url(
            url,
            client_options={"connect_timeout": "10s", "timeout": "120s"},
            retry_config={"max_retries": 4, "retry_timeout": timedelta(seconds=60)},
        )
    except Exception as error:  # obstore has no common base for what a URL can be refused for
        reason = str(error).split("\n", 1)[0]
        raise StoreUnavailable(f"{url} cannot be opened: {reason}") from error
    bucket = ObstoreBucket(store, url)
    bucket.check()
    return bucket
