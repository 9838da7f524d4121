"""Texts, a tokenizer, and functions that several tests of the preparation share."""

import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from pretrain.data.prepare.document_step import DocumentStep
from pretrain.data.token_files.hashes import hashes_path, read_hashes
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.tokenizers.tokenizer import Tokenizer
from tests.support.extensions import modules_of_extensions

TOOL = Path(__file__).parents[3] / "tools" / "prepare_data.py"
SOURCES = sorted((Path(json.__file__).parent).glob("*.py"))
TEXTS = [path.read_text(encoding="utf-8") for path in SOURCES] + ["one line", "ünï\u2581cödé \u2028 😀\r\n", "\n\n"]
WORDS = sorted({word for path in SOURCES for word in re.findall(r"[a-z]{3,}", path.read_text())})
ENDINGS = ("bin", "idx", "meta.json", "sha256.json", "summary.json")


def jsonl(path: Path, texts: list[str], key: str = "text") -> str:
    path.write_text("".join(json.dumps({key: text, "other": 1}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def sentence(generator: random.Random, num_words: int) -> list[str]:
    return generator.choices(WORDS, k=num_words)


def edited(words: list[str], fraction: float, generator: random.Random) -> list[str]:
    """Replace, remove or insert a fraction of the words."""
    result: list[str] = []
    for word in words:
        kind = generator.choice(["replace", "remove", "insert"]) if generator.random() < fraction else "keep"
        result += {"replace": [generator.choice(WORDS)], "remove": [], "insert": [word, generator.choice(WORDS)],
                   "keep": [word]}[kind]
    return result


def word_tokenizer(folder: Path, vocab_size: int) -> Path:
    """Write a tokenizer.json of words: <s>, </s>, <unk>, w3, w4, ..."""
    names = ["<s>", "</s>", "<unk>", *(f"w{number}" for number in range(3, vocab_size))]
    library = Library(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}))
    return folder / "tokenizer.json"


def documents(prefix: Path, tokenizer: Tokenizer, *, bos: int | None = None, eod: bool = True) -> list[str]:
    """Return the text of each document, and check its first and its last token."""
    data = IndexedDataset(prefix)
    bounds = data.document_offsets().tolist()
    texts = []
    for start, stop in itertools.pairwise(bounds):
        tokens = data.tokens(start, stop).tolist()
        assert (tokens[-1] == tokenizer.eod_token) == eod
        assert tokens.count(tokenizer.eod_token) == eod
        assert bos is None or (tokens[0], tokens.count(bos)) == (bos, 1)
        texts.append(tokenizer.decode(tokens))
    return texts


def output(prefix: Path) -> dict[str, bytes]:
    """Return the files of a prepared data set, apart from PREFIX.sha256.json, which has modification times."""
    return {ending: Path(f"{prefix}.{ending}").read_bytes() for ending in ENDINGS if ending != "sha256.json"}


def content(out: Path) -> dict[str, bytes]:
    """Return the files of a data set; of .sha256.json all but the modification times, which are checked here."""
    hashes = read_hashes(hashes_path(out))
    assert hashes is not None
    assert hashes.describes_bin(Path(f"{out}.bin").stat())
    assert hashes.describes_idx(Path(f"{out}.idx").stat())
    return {**output(out), "sha256.json": repr((hashes.sha256, hashes.blocks, hashes.idx_sha256)).encode()}


def merge_shards_of(out: Path | str, *, steps: Sequence[DocumentStep] | None = None, overwrite: bool = False) -> None:
    """Merge the shards of a preparation. Skips the test if no extension does so."""
    found = next(modules_of_extensions("shards"), None)
    if found is None:
        pytest.skip("no extension merges shards")
    found.merge_shards_of(str(out), steps=steps, overwrite=overwrite)


def run_tool(*words: str, **options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *words], capture_output=True, text=True, timeout=900, **options)
