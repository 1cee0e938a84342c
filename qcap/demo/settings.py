"""What a demo run does, and where its files lie: one frozen value that every stage reads from ``settings.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qcap.config import parse_int
from qcap.errors import ConfigError, StoreError

POLICIES = ("full", "snapkv", "random")
"""The caches that are gone on from. ``full`` is the captured one, written back unchanged, so that all three take the same way."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """One run of the demo.

    Args:
        out: folder of everything that is written.
        model: a Hugging Face folder with a tokenizer.
        model_name: the name to store under.
        dtype: of weights and cache.
        new_tokens: generated per prompt, greedily.
        chunk_size: tokens in a stored chunk (CH), also the engine's block size.
        step_tokens: the engine's token budget for one step while capturing; the longest prompt needs several.
        keep: share of the prompt's stored tokens that the policies keep, in (0, 1).
        seed: of the random policy.
    """

    out: str
    model: str
    model_name: str
    dtype: str = "float32"
    new_tokens: int = 40
    chunk_size: int = 32
    step_tokens: int = 256
    keep: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        parse_int("new_tokens", self.new_tokens, 1)
        parse_int("chunk_size", self.chunk_size, 1)
        parse_int("step_tokens", self.step_tokens, self.chunk_size)
        if not 0 < self.keep < 1:
            raise ConfigError(f"keep is a share in (0, 1), got {self.keep}")

    @property
    def folder(self) -> Path:
        """``out`` as a path."""
        return Path(self.out)

    @property
    def store_url(self) -> str:
        """The demo's own store, inside ``out``."""
        return self.store_folder.as_uri()

    @property
    def store_folder(self) -> Path:
        """Where that store lies."""
        return self.folder.absolute() / "store"

    @property
    def work(self) -> Path:
        """Settings, what the stages tell each other, and their logs."""
        return self.folder.absolute() / "work"

    def write(self) -> Path:
        """Make the folders and ``settings.json``; its path."""
        self.work.mkdir(parents=True, exist_ok=True)
        path = self.work / "settings.json"
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
        return path

    @classmethod
    def read(cls, path: str | Path) -> DemoSettings:
        """From a ``settings.json``."""
        return cls(**json.loads(Path(path).read_text()))

    def put(self, stage: str, result: dict[str, Any]) -> None:
        """What ``stage`` found out, for the stages after it."""
        (self.work / f"{stage}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")

    def get(self, stage: str) -> dict[str, Any]:
        """What ``stage`` left.

        Raises:
            StoreError: it has not run.
        """
        path = self.work / f"{stage}.json"
        if not path.exists():
            raise StoreError(f"{path} is not there: run `python -m qcap.demo.{stage} {self.work / 'settings.json'}` first")
        result: dict[str, Any] = json.loads(path.read_text())
        return result


def find_model(model: str, dtype: str) -> tuple[Path, str]:
    """The folder of ``model`` and the name to store under: ``smollm2`` is built on its first use.

    Raises:
        ConfigError: neither ``smollm2`` nor a folder with a model and a tokenizer.
        Unsupported: ``smollm2`` is asked for and its weights are not installed.
    """
    if model == "smollm2":
        from qcap.testing.smollm2 import smollm2_path

        return smollm2_path(dtype), "SmolLM2-135M-Instruct"
    folder = Path(model).expanduser().absolute()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{model!r} is neither 'smollm2' nor a folder with a config.json: give a Hugging Face model's folder")
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ConfigError(f"{folder} holds no tokenizer: the demo's prompts are texts")
    return folder, folder.name
