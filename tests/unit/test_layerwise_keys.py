"""Keys of single layers."""

from __future__ import annotations

import dataclasses
import random

import pytest

from qcap.errors import TokenError
from qcap.tokens import ChunkKey, LayerKey

KEY = ChunkKey("org/m##query", 2, 1, "bfloat16", "d" * 64, "s", (("lora", "x"),))


def test_split_layers() -> None:  # K21
    keys = KEY.split_layers(3)
    assert [k.layer_id for k in keys] == [0, 1, 2] and all(k.chunk == KEY for k in keys)
    assert keys == tuple(KEY.layer(i) for i in range(3))
    for bad in (0, -1):
        with pytest.raises(TokenError, match="at least one layer"):
            KEY.split_layers(bad)
    with pytest.raises(TokenError, match="from 0"):
        KEY.layer(-1)


def test_a_layer_key_equals_no_other() -> None:  # K22
    zero, one = KEY.split_layers(2)
    assert len({KEY, zero, one}) == 3 and KEY != zero and zero != one and zero == KEY.layer(0)
    assert len({str(zero), str(one), str(KEY), KEY.fingerprint()}) == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        zero.layer_id = 1


def test_tags_and_salts_are_part_of_it() -> None:  # K21 L45
    others = [dataclasses.replace(KEY, **change) for change in ({"tags": ()}, {"tags": (("lora", "y"),)}, {"salt": "t"}, {"tp_rank": 0})]
    assert len({key.layer(0) for key in [KEY, *others]}) == len({str(key.layer(0)) for key in [KEY, *others]}) == 5


def test_a_sibling_is_the_key_of_other_tokens() -> None:
    for asked in (False, True):  # what a key remembers of itself is not the sibling's
        key = dataclasses.replace(KEY)
        if asked:
            key.fingerprint()
        sibling, plain = key.sibling("e" * 64), dataclasses.replace(KEY, digest="e" * 64)
        assert sibling == plain != key and hash(sibling) == hash(plain)
        assert sibling.fingerprint() == plain.fingerprint() != key.fingerprint()


def test_the_text_form_reads_back() -> None:  # K22
    rng = random.Random(0)
    texts = ["a", "@", "=", "%", "a@b=c%40", "é", "\n", " ", "##query", "1", "org/m", "-1", "~."]
    seen: dict[str, LayerKey] = {}
    for _ in range(500):
        tags = tuple((rng.choice(texts), rng.choice(["", *texts])) for _ in range(rng.randrange(3)))
        salt = rng.choice(["", "s", "é=%", " "])
        size, rank, layer = rng.randrange(1, 300), rng.randrange(300), rng.randrange(99)
        key = ChunkKey(rng.choice(texts), size, rank, "float16", rng.choice(texts), salt, tags).layer(layer)
        text = str(key)
        assert LayerKey.parse(text) == key and "\n" not in text
        assert seen.setdefault(text, key) == key


BAD = ["", "a", "m@1@0@t@d@s", "m@1@0@t@d@s@x", "m@1@0@t@d@s@-1", "m@1@0@t@d@s@01", "m@1@0@t@d@s@0@tag", "m@1@0@t@d@s@0@a=b=c"]
BAD += ["m@+1@0@t@d@s@0", "@1@0@t@d@s@0", "m m@1@0@t@d@s@0", KEY.fingerprint()]


@pytest.mark.parametrize("bad", BAD)
def test_other_texts_are_refused(bad: str) -> None:
    with pytest.raises(TokenError, match="not a layer key"):
        LayerKey.parse(bad)
