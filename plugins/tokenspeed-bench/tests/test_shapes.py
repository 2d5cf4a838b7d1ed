"""The dummy models that `--shape` writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenspeed_bench.shapes import SHAPES, write

from tokenspeed_core.text.detokenizer import ByteDetokenizer
from tokenspeed_core.text.tokenizer import load_tokenizer


@pytest.mark.parametrize("shape", SHAPES)
def test_shape_tokens_decode_as_words(shape: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(shape, tmp_path))
    ids = [5, 99_000, 7]
    assert tokenizer.decode(ids) == " w5 w99000 w7"
    assert tokenizer.encode("w5 w99000 w7", add_special_tokens=False).tolist() == ids
    detokenizer = tokenizer.detokenizer()
    assert isinstance(detokenizer, ByteDetokenizer)
    assert [detokenizer.push([token]) for token in ids] == [" w5", " w99000", " w7"]
