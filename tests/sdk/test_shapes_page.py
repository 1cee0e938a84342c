"""The code in docs/shapes.md runs, and says what is true."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from qcap.sdk.mass import layer_mass

SHAPES = Path(__file__).parents[2] / "docs" / "shapes.md"


def test_shapes_page(geometry):
    code = re.search(r"```python\n(.*?)```", SHAPES.read_text(), re.S).group(1)
    kv, q = torch.randn(2, 2, 6, 16), torch.randn(1, 2, 6, 32)
    names = {"kv": kv, "q": q, "geometry": geometry, "layer": 1, "h": 3, "t": 5}
    exec(code, names)
    assert names["k"].shape == names["v"].shape == (2, 6, 2, 8) and names["queries"].shape == (2, 6, 4, 8)
    assert torch.allclose(names["logits"].softmax(-1), layer_mass(q, kv, geometry, 1, window=1)[3], atol=1e-6)
