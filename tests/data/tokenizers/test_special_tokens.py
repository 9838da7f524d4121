"""Special tokens of a tokenizer in the files next to it, and whether a tokenizer fits a model."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models

from pretrain.data.tokenizers.special_tokens import EOD_PIECE, TokenIds, check_tokenizer_fits
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import ConfigError


def test_the_end_of_document_token_is_found(tmp_path: Path) -> None:
    library = Library(models.WordLevel({EOD_PIECE: 0, "b": 1, "a": 2}, unk_token=EOD_PIECE))
    library.save(str(tmp_path / "tokenizer.json"))
    token = library.token_to_id("a")

    def eos(file: str, **values: Any) -> int | None:
        (tmp_path / file).write_text(json.dumps(values))
        found = load_tokenizer(tmp_path).eod_token
        (tmp_path / file).unlink()
        return found

    assert eos("config.json", eos_token_id=token) == 0  # its usual name is more reliable than the model's config.json
    assert eos("special_tokens_map.json", eos_token="a") == token
    content = (tmp_path / "tokenizer.json").read_text().replace(EOD_PIECE, "<|other|>")
    (tmp_path / "tokenizer.json").write_text(content)
    assert eos("generation_config.json", eos_token_id=[token, 1]) == token
    assert eos("config.json", eos_token_id=token) == token
    assert eos("config.json", eos_token_id=50256) is None


def test_fit_of_tokenizer_and_model() -> None:
    ids = TokenIds(100, bos=None, eos=5)

    def check(config: dict[str, Any], vocab_size: int = 100) -> list[str]:
        return check_tokenizer_fits(ids, config, vocab_size=vocab_size, where="tok", remedy="train another")

    assert check({"bos_token_id": 0, "eos_token_id": [4, 5]}) == check({}) == []
    assert check({"eos_token_id": 0}) == [
        "the config.json's eos_token_id is 0, and the tokenizer's is 5: the tokenizer's is used"]
    with pytest.raises(ConfigError, match=r"tok: its largest token is 99, .* only 99 tokens\. Train another"):
        check({}, vocab_size=99)
