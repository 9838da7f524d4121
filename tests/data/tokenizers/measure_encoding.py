"""Measure how fast tokenizers encode: python -m tests.data.tokenizers.measure_encoding [TEXT ...]

Trains a model of each kind on Python source files and the given texts, and encodes all of them in one process. CPU
time, median of interleaved repetitions, with warm caches. "library" is a loop over the texts that calls the library
and makes an array of its list. "tokenizers" is the same model, exported, in the tokenizers library with one thread.
"""

import argparse
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pretrain.commands.corpus import python_corpus
from pretrain.data.tokenizers.export_tokenizer import export_tokenizer
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import ConfigError

_PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "BPE, identity": {"model_type": "bpe", "byte_fallback": True, **_PLAIN},
    "BPE, nmt_nfkc": {"model_type": "bpe", "byte_fallback": True},
    "unigram, identity": {"model_type": "unigram", "byte_fallback": True, **_PLAIN},
    "unigram, nmt_nfkc": {"model_type": "unigram"},
}
Train = Callable[[Sequence[str], Path, int], dict[str, Path]]


def train_models(texts: Sequence[str], folder: Path, vocab_size: int) -> dict[str, Path]:
    """Train a model of each kind. Return kind -> path."""
    from sentencepiece import SentencePieceTrainer

    lines = [line[:1000] for text in texts for line in text.split("\n") if line.strip()]
    paths = {}
    for number, (name, options) in enumerate(SENTENCEPIECE.items()):
        written = io.BytesIO()
        SentencePieceTrainer.train(sentence_iterator=iter(lines[:100_000]), model_writer=written, minloglevel=3,
                                   vocab_size=vocab_size, hard_vocab_limit=False, num_threads=1, **options)
        paths[name] = folder / f"{number}.model"
        paths[name].write_bytes(written.getvalue())
    return paths


def library_loop(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Return the function of the library that encodes one text."""
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_file=str(tokenizer.path)).encode


def tokenizers_library(path: Path) -> Tokenizer | None:
    """Load the export of a tokenizer; None if the tokenizers library has no equivalent."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            export_tokenizer(path, Path(folder))
        except ConfigError:
            return None
        return load_tokenizer(Path(folder) / "tokenizer.json")


def measure(path: Path, texts: Sequence[str], rounds: int,
            loop_of: Callable[[Tokenizer], Callable[[str], list[int]]]) -> list[float]:
    """Return MB/s of CPU time: of the library, of this package, and of the tokenizers library (0: no equivalent)."""
    tokenizer, exported = load_tokenizer(path), tokenizers_library(path)
    encode = loop_of(tokenizer)

    def loop() -> Any:
        return np.concatenate([np.array(encode(text), tokenizer.ids.dtype) for text in texts])

    functions: list[Callable[[], Any]] = [loop, lambda: tokenizer.encode_batch(texts)[0]]
    functions += [lambda: exported.encode_batch(texts)[0]] if exported is not None else []
    assert np.array_equal(functions[0](), functions[1]())  # also warms the caches
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, found in zip(functions, times, strict=True):
            start = time.process_time()
            function()
            found.append(time.process_time() - start)
    size = sum(len(text.encode()) for text in texts) / 1e6
    return [*(size / median(found) for found in times), 0.0][:3]


def main(words: Sequence[str] | None = None, *, train: Train = train_models,
         loop_of: Callable[[Tokenizer], Callable[[str], list[int]]] = library_loop) -> None:
    """Print the table. `train`: trains the models; `loop_of`: the function of the library that encodes one text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", metavar="TEXT", nargs="*", type=Path, help="more texts, UTF-8")
    parser.add_argument("--megabytes", type=float, default=8, help="of Python source files")
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(words)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as name:
        corpus = python_corpus(Path(name), megabytes=args.megabytes).train.read_text()
        texts = {"Python source": [json.loads(line)["text"] for line in corpus.splitlines()],
                 **{path.name: [path.read_text()] for path in args.texts}}
        models = train([text for parts in texts.values() for text in parts], Path(name), args.vocab_size)
        print(f"| {'model':17} | {'text':20} | library | this package | tokenizers |")
        for kind, path in models.items():
            for text, parts in texts.items():
                found = [f"{rate:.1f}" if rate else "" for rate in
                         measure(path, parts, args.rounds, loop_of)]
                print(f"| {kind:17} | {text:20} | {found[0]:>7} | {found[1]:>12} | {found[2]:>10} |", flush=True)


if __name__ == "__main__":
    main()
