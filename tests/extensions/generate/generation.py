"""A tokenizer in which each token is a letter, and tools/generate.py in this process."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.wrong_inputs.case import main_of

VOCAB = 256
LETTERS = [chr(0x100 + token) for token in range(VOCAB)]  # the text of each token
END = "<|endoftext|>"


def write_letters(folder: Path, *, leading: str | None = None) -> Path:
    """Write a tokenizer.json and return its path. Token 0 ends a document.

    `leading` is the letter of the token that the tokenizer adds before each text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {END: 0, **{letter: token for token, letter in enumerate(LETTERS) if token}}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": vocab[text], "content": text, **special} for text in (END, leading) if text]
    template = None if leading is None else {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": leading, "type_id": 0}},
                                                 {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {leading: {"id": leading, "ids": [vocab[leading]], "tokens": [leading]}}}
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": split, "post_processor": template, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": LETTERS[1]}}))
    return folder / "tokenizer.json"


def text_of(tokens: list[int]) -> str:
    """Return the text of tokens."""
    return "".join(LETTERS[token] for token in tokens)


class GenerateTool:
    """Runs tools/generate.py in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def text(self, *words: Any) -> str:
        """Return what the program prints."""
        self.monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, words)])
        main_of("generate")()
        out, err = self.capsys.readouterr()
        print(err, file=sys.stderr)
        return out

    def rows(self, *words: Any) -> list[dict[str, Any]]:
        """Return the rows of --json."""
        return [json.loads(line) for line in self.text(*words, "--json").splitlines()]
