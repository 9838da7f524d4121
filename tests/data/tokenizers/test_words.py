"""`encode_batch` gives the tokens of SentencePiece's own `encode` for every text, for models of many kinds."""

import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from pretrain.commands.corpus import python_corpus
from pretrain.data.tokenizers import sentencepiece_encoder, word_cache
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.data.tokenizers.train_tokenizer import train_sentencepiece

LINES = ["the quick brown fox jumps over the lazy dog", "    return self.value + 1234  # comment", "a  b   c\td",
         "na\u00efve caf\u00e9 \u4f60\u597d\u4e16\u754c \u043f\u0440\u0438", "if (x == y) { z(); } // !!!",
         "http://example.org/a?b=c&d=%20", "e\u0301 and \u00e9, \ufb01ne \u00bd"] * 30
IDENTITY: dict[str, Any] = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**IDENTITY, "add_dummy_prefix": True, "allow_whitespace_only_pieces": True, "split_digits": True},
    "nmt_nfkc": {},
    "nfkc_casefold": {"normalization_rule_name": "nmt_nfkc_cf", "remove_extra_whitespaces": False},
    "suffix": {"treat_whitespace_as_suffix": True},
    "phrases": {**IDENTITY, "split_by_whitespace": False},  # pieces of several words
    "symbols": {**IDENTITY, "add_dummy_prefix": False, "user_defined_symbols": ["\n", "<a b>", "fox j", "\t\t"]},
    "no bytes": {"byte_fallback": False},
    "unigram": {"model_type": "unigram"},
    "unigram lines": {**IDENTITY, "model_type": "unigram", "add_dummy_prefix": False, "user_defined_symbols": ["\n"]},
}
BY_WORDS = ("llama", "nmt_nfkc", "nfkc_casefold", "suffix", "phrases", "symbols")
RARE = [" ", "  ", " " * 70, "\t", "\n", "\r\n", "\0", "\x01", "\x02", "\u2581", "\u2581 ", "a\u0301\u0323", "\ufeff",
        "\u1112\u1161\u11ab", "\u200b", "\x85", "\u2028", "\U0001f468\u200d\U0001f469", "<a b>", "<s></s><unk>",
        "<0x41>", "fox jump", "aaa" * 40, "\uffff", "\u2582", "\u4f60\u597d\u4e16\u754c", "the", "return"]
TEXTS = st.lists(st.one_of(st.text(max_size=30), st.sampled_from(RARE)), max_size=20).map("".join)
EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models by name, each in a folder of its own; "ours" is a model of tools/train_tokenizer.py."""
    base = tmp_path_factory.mktemp("models")
    corpus = base / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps({"text": line}) for line in LINES))
    train_sentencepiece([str(corpus)], base / "ours", vocab_size=460)
    for name, options in MODELS.items():
        written = io.BytesIO()
        values = {"vocab_size": 420, "model_type": "bpe", "byte_fallback": True, "minloglevel": 3,
                  "hard_vocab_limit": False, **options}
        if not values["byte_fallback"]:
            values["vocab_size"] = 150
        SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=written, **values)
        (base / name).mkdir()
        (base / name / "tokenizer.model").write_bytes(written.getvalue())
    return base


@pytest.fixture(scope="module")
def tokenizers(folder: Path) -> dict[str, Tokenizer]:
    return {name: load_tokenizer(folder / name / "tokenizer.model") for name in ("ours", *MODELS)}


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, Any]:
    return {name: SentencePieceProcessor(model_file=str(folder / name / "tokenizer.model"))
            for name in ("ours", *MODELS)}


def reference(name: str, processor: Any, text: str) -> list[int]:
    """Return SentencePiece's tokens of the complete text. Models that encode lines encode U+2581 as its bytes."""
    if name not in ("ours", "symbols", "unigram lines"):
        return list(processor.encode(text))
    symbol = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in "\u2581".encode()]
    parts = [processor.encode(part) for part in text.split("\u2581")]
    return list(itertools.chain(*(part + symbol for part in parts[:-1]), parts[-1]))


def batch(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    tokens, ends = tokenizer.encode_batch(texts)
    assert tokens.dtype == tokenizer.ids.dtype
    assert len(ends) == len(texts)
    return [part.tolist() for part in np.split(tokens, ends)[: len(texts)]]


@pytest.mark.parametrize("name", ["ours", *MODELS])
@EXAMPLES
@given(texts=st.lists(TEXTS, max_size=5))
def test_tokens_are_those_of_sentencepiece(tokenizers: dict[str, Tokenizer], references: dict[str, Any], name: str,
                                           texts: list[str]) -> None:
    expected = [reference(name, references[name], text) for text in texts]
    assert batch(tokenizers[name], texts) == expected
    assert [tokenizers[name].encode(text) for text in texts] == expected


@EXAMPLES
@given(texts=st.lists(TEXTS, max_size=5))
def test_small_windows_and_a_small_cache_change_no_token(folder: Path, references: dict[str, Any],
                                                         texts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("_WINDOW_BYTES", 8), ("_MOST_WORDS", 20), ("_LONGEST_WORD", 16), ("_TABLE_BITS", 4),
                            ("_WHOLE_WINDOWS", 2)):
            patch.setattr(word_cache, name, value)
        loaded = load_tokenizer(folder / "ours" / "tokenizer.model")
        for _ in range(2):
            assert batch(loaded, texts) == [reference("ours", references["ours"], text) for text in texts]


def test_words_are_cached_again_after_a_text_without_repeated_words() -> None:
    """Of 60 windows of one text, the 16 after the first window are encoded without the cache, and then one with it."""
    can_cut = np.zeros((256, 256), np.bool_)
    can_cut[:, ord(" ")] = can_cut[255, :] = can_cut[:, 255] = True
    encoded: list[int] = []

    def encode_words(words: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        encoded.append(sum(map(len, words)))
        return np.frombuffer(b"".join(words), np.uint8), np.array([len(word) for word in words])

    cache = word_cache.WordCache(can_cut.reshape(-1), encode_words, dtype=np.uint16, space_symbol=())
    window = 1 << 16
    texts = [b"a few words that are new", b"".join(b" %x" % (number * 7919) for number in range(30_000))[:window],
             b" words of a text" * (60 * window // 16)]
    tokens, ends = cache.encode(texts)
    assert tokens.tolist() == list(b"".join(texts))
    assert ends.tolist() == list(itertools.accumulate(map(len, texts)))
    assert window * 15 < sum(encoded) < window * 18


def test_models_are_encoded_by_words_if_their_words_are_independent(folder: Path, references: dict[str, Any]) -> None:
    found = [name for name, processor in references.items() if sentencepiece_encoder.words_encoder(
        processor, (folder / name / "tokenizer.model").read_bytes(), dtype=np.uint16, space_symbol=None)]
    assert found == ["ours", *BY_WORDS]


def test_tokens_of_real_texts(tmp_path: Path, tokenizers: dict[str, Tokenizer], references: dict[str, Any]) -> None:
    """Source code, prose, a word of 1 MB, and a text without repeated words."""
    corpus = python_corpus(tmp_path, megabytes=1)
    texts = [json.loads(line)["text"] for line in corpus.train.read_text().splitlines()]
    texts += [str(module.__doc__) for module in (np, pytest, json, itertools)]
    texts += ["", "x" * 2**20, " ".join(f"{number * 7919:x}" for number in range(40_000)), "", "end"]
    for name in ("ours", "llama", "nmt_nfkc", "unigram", "unigram lines"):
        assert batch(tokenizers[name], texts) == [reference(name, references[name], text) for text in texts]
    lines = [*"".join(texts[:3]).split("\n"), "\u2581", " \u2581a", ""]  # many short texts
    for name in ("unigram", "unigram lines", "no bytes"):
        assert batch(tokenizers[name], lines) == [reference(name, references[name], text) for text in lines]
