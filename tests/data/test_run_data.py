"""What a run says about its data before training: ends of documents, and data from which there is little to learn."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from tokenizers.trainers import BpeTrainer, UnigramTrainer

from pretrain.data.data_spec import parse_data_spec
from pretrain.data.run_data import RunData, open_run_data
from pretrain.data.source_facts import sampled_tokens, tokenizer_notes
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.errors import ConfigError
from tests.support.launch import ROOT

RANDOM = np.random.default_rng(0)
LENGTH, EOD = 64, 0
FLAGS = ("--eod_mask_loss", "--document_attention")
SOURCES = [path.read_text() for path in sorted((ROOT / "pretrain").rglob("*.py"))[:80]]
WORDS: dict[str, int] = {}


def as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64) + 1


def as_words(text: str) -> np.ndarray:
    """Return the numbers of the words: a vocabulary of thousands, most of which are rare."""
    return np.array([WORDS.setdefault(word, len(WORDS) + 1) for word in re.findall(r"\w+|\s+|.", text)])


def write(prefix: Path, documents: Sequence[np.ndarray], *, end: int | None = EOD, **meta: object) -> Path:
    with IndexedWriter(prefix, np.int32) as writer:
        for document in documents:
            writer.add_document(document if end is None else np.append(document, end))
        writer.finalize({"vocab_size": 60_000, "max_token": 59_999, **meta} if meta else None)
    return prefix


def opened(*prefixes: Path, needs_ends: Sequence[str] = (), valid: Path | None = None) -> RunData:
    spec = parse_data_spec([str(prefix) for prefix in prefixes], split="1,0,0",
                           valid_data=str(valid) if valid else None)
    return open_run_data(spec, seq_length=LENGTH, seed=1, tokenizer=None, vocab_size=60_000, needs_ends=needs_ends)


HEALTHY: dict[str, list[np.ndarray]] = {
    "bytes": [as_bytes(text) for text in SOURCES], "words": [as_words(text) for text in SOURCES],
    "few tokens": [as_words(text)[:200] for text in SOURCES[:3]],
    "four symbols": [RANDOM.choice(4, 400, p=p) + 1 for p in np.eye(4)[RANDOM.permutation(4)] * 0.7 + 0.075] * 20,
    "rising": [np.arange(500) % 97 + 1 for _ in range(20)],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_data_gets_no_note(tmp_path: Path, name: str) -> None:
    data = opened(write(tmp_path / "a", HEALTHY[name], eod_token=EOD), needs_ends=FLAGS)
    assert data.notes == ()


def shuffled_inside(length: int) -> list[np.ndarray]:
    """Return documents of this length whose words are in random order: each still has the words of its topic."""
    texts = [as_words(text) for text in SOURCES]
    return [RANDOM.permutation(text[start:start + length]) for text in texts for start in range(0, len(text), length)]


UNLEARNABLE: dict[str, tuple[Callable[[], list[np.ndarray]], str]] = {
    "random tokens": (lambda: [RANDOM.integers(1, 50_000, 500) for _ in range(100)], "random order"),
    "random bytes": (lambda: [RANDOM.integers(1, 257, 500) for _ in range(100)], "random order"),
    "unequal frequencies": (lambda: [RANDOM.zipf(1.3, 500).clip(1, 50_000) for _ in range(100)], "random order"),
    "shuffled inside long documents": (lambda: shuffled_inside(10**6), "random order"),
    "shuffled inside short documents": (lambda: shuffled_inside(80), "random order"),
    "shuffled bytes": (lambda: [RANDOM.permutation(as_bytes(text)) for text in SOURCES], "random order"),
    "constant": (lambda: [np.full(999, 7) for _ in range(20)], "nearly all of its tokens are the same one"),
    "short documents": (lambda: [as_bytes(text)[:LENGTH - 10] for text in SOURCES * 2],
                        f"all 160 sampled documents are shorter than --seq_length {LENGTH} (the longest has 55 "),
}


@pytest.mark.parametrize("name", UNLEARNABLE)
def test_data_from_which_there_is_little_to_learn_is_noted(tmp_path: Path, name: str) -> None:
    make, expected = UNLEARNABLE[name]
    (note,) = opened(write(tmp_path / "a", make(), eod_token=EOD)).notes
    assert note.startswith(f"--train_data {tmp_path / 'a'}: ")
    assert expected in note


def test_duplicates_of_the_summary_and_copies_of_the_training_data_are_noted(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", HEALTHY["bytes"], eod_token=EOD)
    for suffix in (".bin", ".idx", ".meta.json"):
        shutil.copy(f"{prefix}{suffix}", tmp_path / f"copy{suffix}")
    assert opened(prefix, valid=tmp_path / "copy").notes == (
        f"{tmp_path / 'copy'} is training data and validation data: its losses are those of data that the model has "
        "seen",)
    summary = {"documents": 80, "duplicate_documents": 60, "duplicates_removed": False}
    (tmp_path / "a.summary.json").write_text(json.dumps(summary))
    (note,) = opened(prefix).notes
    assert "75% of its documents are exact duplicates of others" in note
    for wrong in ("", "[]", "{}", json.dumps({**summary, "documents": 0}), json.dumps({**summary, "documents": "x"}),
                  json.dumps({**summary, "duplicate_documents": None}), "[" * 10**5):
        (tmp_path / "a.summary.json").write_text(wrong)
        assert opened(prefix).notes == ()


@pytest.mark.parametrize(("end", "known", "found"), [
    (2, 1, "documents end with token 2"), (None, 1, "80 sampled documents end with"),
    (0, 59_000, "80 of 80 sampled documents end with token 0")])
def test_an_end_token_that_the_data_does_not_have(tmp_path: Path, end: int | None, known: int, found: str) -> None:
    documents = [as_words(text)[:300] + 10 for text in SOURCES]
    prefix = write(tmp_path / "a", documents, end=end, eod_token=known)
    (note,) = opened(prefix).notes
    assert f"the end-of-document token is {known}, but " in note
    assert found in note
    for flag in FLAGS:
        with pytest.raises(ConfigError, match=f"{flag}: it would have no effect: the end-of-document token is {known}"):
            opened(prefix, needs_ends=[flag])


def test_some_ends_are_enough_for_the_flags(tmp_path: Path) -> None:
    mixed = [np.append(as_bytes(text), EOD if number % 2 else 5) for number, text in enumerate(SOURCES)]
    inside = [np.concatenate([np.append(as_bytes(text), [EOD, 5]) for text in SOURCES])]
    for name, documents, expected in (("mixed", mixed, "40 of 80 sampled documents do not end with"),
                                      ("inside", inside, "1 of 1 sampled documents end with token 5")):
        (note,) = opened(write(tmp_path / name, documents, end=None, eod_token=EOD), needs_ends=FLAGS).notes
        assert expected in note
    with pytest.raises(ConfigError, match=r"inside\.idx has a single document: there is nothing to pack"):
        open_run_data(parse_data_spec(str(tmp_path / "inside"), split="1,0,0", packing="best_fit"), seq_length=LENGTH,
                      seed=1, tokenizer=None, vocab_size=60_000)
    unknown = write(tmp_path / "unknown", mixed, end=None)  # of Megatron-LM: without .meta.json
    assert opened(unknown).notes == ()
    with pytest.raises(ConfigError, match="the end-of-document token is unknown"):
        opened(unknown, needs_ends=FLAGS)


def encoded(text: str, tokenizer: Tokenizer) -> list[np.ndarray]:
    return [np.array(tokenizer.encode(part).ids) + 1 for part in text.split("\n\n") if part]


def byte_level(text: str) -> Tokenizer:
    """Return a tokenizer like that of GPT-2, whose first tokens are the bytes, whatever the text."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([text], BpeTrainer(vocab_size=2000, initial_alphabet=ByteLevel.alphabet(),
                                                     show_progress=False))
    return tokenizer


def unigram(text: str) -> Tokenizer:
    tokenizer = Tokenizer(Unigram())
    tokenizer.pre_tokenizer = Metaspace()
    tokenizer.train_from_iterator(text.split("\n"), UnigramTrainer(vocab_size=2000, unk_token="<unk>",
                                                                   special_tokens=["<unk>"], show_progress=False))
    return tokenizer


def test_a_blend_of_unknown_tokenizers(tmp_path: Path) -> None:
    """The same kind of text with one tokenizer gets no note; with another one, or of another kind, it does."""
    pages = "\n\n".join(path.read_text() for path in sorted(ROOT.glob("pretrain/pages/*.md")))
    code = "\n\n".join(SOURCES)
    first, second = byte_level(pages), byte_level(code)
    half = pages.index("\n\n", len(pages) // 2)
    data = {"pages": encoded(pages[:half], first), "more": encoded(pages[half:], first),
            "bytes": encoded(pages[half:], second), "unigram": encoded(pages[half:], unigram(code)),
            "code": encoded(code, first)}
    prefixes = {name: write(tmp_path / name, documents) for name, documents in data.items()}
    assert not [note for note in opened(prefixes["pages"], prefixes["more"]).notes if "tokenizer" in note]
    for name in ("bytes", "unigram", "code"):
        for blend in ((prefixes["pages"], prefixes[name]), (prefixes["pages"], prefixes["more"], prefixes[name])):
            (note,) = [note for note in opened(*blend).notes if "tokenizer" in note]
            assert note.startswith("whether these sources have the tokenizer of --train_data "
                                   f"{tmp_path / 'pages'} is unknown, ")
            assert re.search(rf": --train_data {tmp_path / name} \(\d\d?%; largest token \d+\)\. It may be another "
                             "tokenizer, ", note), note
    sources = [(name, IndexedDataset(prefixes[name])) for name in ("pages", "unigram")]
    notes = tokenizer_notes([(name, data, sampled_tokens(data)) for name, data in sources])
    assert notes[0].startswith("whether ")
    same = [write(tmp_path / f"known{i}", data[name], tokenizer_sha256="a" * 64, eod_token=EOD)
            for i, name in enumerate(("pages", "code"))]
    assert not [note for note in opened(*same).notes if "tokenizer" in note], "both .meta.json name the same one"
