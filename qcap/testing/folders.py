"""Folders that are built once and then shared by every process of this user."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("qcap.testing")


def cache_dir() -> Path:
    """Where built models lie: ``$QCAP_CACHE``, or ``~/.cache/qcap``. Created if missing."""
    root = os.environ.get("QCAP_CACHE") or "~/.cache/qcap"
    folder = Path(root).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """The folder ``cache_dir()/name``, made by ``build(empty_folder)`` if it is not there yet.

    The folder is built beside its place and renamed, so that whoever finds it finds all of it. One process
    builds at a time and the others wait; a build that was cut off is cleared by the next one.

    Args:
        name: a plain folder name, without a slash.
        build: fills the empty folder that it is given; what it raises goes through, and nothing is left under ``name``.
    """
    root = cache_dir()
    target = root / name
    if target.is_dir():
        return target
    with open(root / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        for leftover in root.glob(f".{name}.part-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        logger.info("building %s (once)", target)
        beside = Path(tempfile.mkdtemp(prefix=f".{name}.part-", dir=root))
        try:
            build(beside)
            beside.chmod(0o755)  # mkdtemp makes it private; a shared cache folder is readable like its files
            beside.rename(target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return target
