"""Speed of tokenizing, next to a plain loop over the same library."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from pretrain.bench.sections.data.figures import DataBench, DataFigure, least_cpu_seconds
from pretrain.data.prepare.python_corpus import python_corpus
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.data.tokenizers.train_tokenizer import train_sentencepiece

_MEGABYTES = 8.0  # of text that is tokenized
_TRAINING_MEGABYTES = 4.0
_VOCAB_SIZE = 4096
_BATCH = 32  # documents


def tokenizing(bench: DataBench) -> list[DataFigure]:
    """Tokenize Python's standard library with a SentencePiece BPE model, and with its tokenizer.json."""
    corpus = python_corpus(bench.folder / "corpus", megabytes=_MEGABYTES * bench.scale)
    texts = [json.loads(line)["text"] for line in corpus.train.read_text().splitlines()]
    folder = bench.folder / "tokenizer"
    train_sentencepiece([str(corpus.train)], folder, vocab_size=_VOCAB_SIZE,
                      max_megabytes=_TRAINING_MEGABYTES)
    (bench.folder / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    return [_compare(bench, texts, "SentencePiece BPE", folder / "tokenizer.model", _sentencepiece_loop,
                     "encode() of each line"),
            _compare(bench, texts, "Hugging Face BPE", bench.folder / "tokenizer.json", _huggingface_loop,
                     "encode() of each document")]


def _compare(bench: DataBench, texts: list[str], name: str, file: Path, plain: Callable[[Path, Sequence[str]], object],
             plain_name: str) -> DataFigure:
    expected = _project(file, texts)
    seconds = least_cpu_seconds([lambda: _project(file, texts), lambda: plain(file, texts)], bench.repetitions)
    ours, theirs = (expected / 1e6 / value for value in seconds)
    return DataFigure(f"tokenizing, {name}", ours, theirs, "M tokens/s", plain_name,
                      note=f"Tokenizing: source files of Python's standard library, {_VOCAB_SIZE:,} pieces; "
                           "each repetition loads the tokenizer again.")


def _project(file: Path, texts: Sequence[str]) -> int:
    """Tokenize as the preparation does, and return the number of tokens."""
    tokenizer = load_tokenizer(file)
    batches = (texts[first : first + _BATCH] for first in range(0, len(texts), _BATCH))
    return sum(len(tokenizer.encode_batch(batch)[0]) for batch in batches)


def _sentencepiece_loop(file: Path, texts: Sequence[str]) -> None:
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(file))
    for text in texts:
        for line in text.split("\n"):
            processor.encode(line)


def _huggingface_loop(file: Path, texts: Sequence[str]) -> None:
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(file))
    for text in texts:
        library.encode(text, add_special_tokens=False).ids  # noqa: B018
