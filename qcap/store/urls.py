"""From a URL or a path to an object tier."""

from __future__ import annotations

import difflib
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

import obstore

from qcap.errors import ConfigError, StoreUnavailable
from qcap.store.buckets import Bucket, LocalBucket, ObstoreBucket
from qcap.store.memory import MemoryTier
from qcap.store.objects import ObjectTier

CLOUD_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")
SCHEMES = ("file", "memory", *CLOUD_SCHEMES)


def open_tier(url: str) -> ObjectTier:
    """The object tier at ``url``.

    Args:
        url: ``file:///absolute/path``, a plain path, ``memory://name`` (of this process), or ``s3://``, ``gs://``, ``az://`` with the
            credentials that the environment gives.

    Raises:
        ConfigError: not a URL of a known scheme; the message lists them.
        StoreUnavailable: it cannot be opened.
    """
    if isinstance(url, str) and "://" in url and urlsplit(url).scheme == "memory":
        return MemoryTier(_memory_name(url))
    bucket, url = _bucket(url)
    bucket.check()
    return ObjectTier(bucket, url)


def _bucket(url: str) -> tuple[Bucket, str]:
    if not isinstance(url, str) or not url.strip():
        raise ConfigError(f"a store's URL is a text like 'file:///data/captures', got {url!r}")
    if "://" not in url:
        if (scheme := url.partition(":")[0]) in SCHEMES and ":" in url:
            raise ConfigError(f"{url!r} is not a URL: did you mean {scheme + '://' + url.partition(':')[2].lstrip('/')!r}?")
        path = Path(url).expanduser().absolute()
        return LocalBucket(path), path.as_uri()
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise ConfigError(f"{url!r} has no absolute path: write file:///{parts.netloc}{parts.path} (three slashes)")
        return LocalBucket(Path(unquote(parts.path))), url
    if parts.scheme in CLOUD_SCHEMES:
        return _cloud_bucket(url)
    if parts.scheme.startswith("qcap"):
        raise ConfigError(f"{url!r}: this version of qcap has no store server; open the store itself, for instance file:///data/captures")
    near = difflib.get_close_matches(parts.scheme, SCHEMES, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ConfigError(
        f"unknown scheme {parts.scheme!r} in {url!r}{hint}: qcap opens a plain path or {', '.join(s + '://' for s in SCHEMES)}"
    )


def _memory_name(url: str) -> str:
    name = url.partition("://")[2].strip("/")
    if not name:
        raise ConfigError("memory:// needs a name, for instance memory://scratch: two openers of one name share it")
    return name


def _cloud_bucket(url: str) -> tuple[Bucket, str]:
    try:
        store = obstore.store.from_url(
            url,
            client_options={"connect_timeout": "10s", "timeout": "120s"},
            retry_config={"max_retries": 4, "retry_timeout": timedelta(seconds=60)},
        )
    except Exception as error:  # obstore has no common base for what a URL can be refused for
        reason = str(error).split("\n", 1)[0]
        raise StoreUnavailable(f"{url} cannot be opened: {reason}") from error
    return ObstoreBucket(store, url), url
