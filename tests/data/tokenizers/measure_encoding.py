"""Measure how fast tokenizers encode: python -m tests.data.tokenizers.measure_encoding [TEXT ...]

Trains a model of each kind on Python source files and the given texts, and encodes all of them in one process. CPU
time, median of interleaved repetitions, with warm caches. "library" is a loop over the texts that calls the library
and makes an array of its list. "tokenizers" is the same model, exported, in the tokenizers library with one thread.
"""

import argparse
import base64
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
from pretrain.data.tokenizers.tiktoken_encodings import ENCODINGS
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import ConfigError

_PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "BPE, identity": {"model_type": "bpe", "byte_fallback": True, **_PLAIN},
    "BPE, nmt_nfkc": {"model_type": "bpe", "byte_fallback": True},
    "unigram, identity": {"model_type": "unigram", "byte_fallback": True, **_PLAIN},
    "unigram, nmt_nfkc": {"model_type": "unigram"},
}
TIKTOKEN = ("cl100k_base", "o200k_base")


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
    for encoding in TIKTOKEN:
        paths[encoding] = folder / f"{vocab_size}.{encoding}.tiktoken"
        paths[encoding].write_bytes(train_ranks(texts, encoding, vocab_size))
    return paths


def train_ranks(texts: Sequence[str], encoding: str, vocab_size: int) -> bytes:
    """Train byte-level BPE with the pattern of an encoding. Return its file of ranks."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(ENCODINGS[encoding].export_pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    library.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    tokens = sorted(library.get_vocab(), key=library.get_vocab().__getitem__)
    return b"".join(base64.b64encode(bytes(map(byte_of.__getitem__, token))) + b" %d\n" % rank
                    for rank, token in enumerate(tokens))


def library_loop(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Return the function of the library that encodes one text."""
    if tokenizer.tiktoken is not None:
        encode: Callable[[str], list[int]] = tokenizer.tiktoken.library.encode_ordinary
        return encode
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


def measure(path: Path, texts: Sequence[str], rounds: int) -> list[float]:
    """Return MB/s of CPU time: of the library, of this package, and of the tokenizers library (0: no equivalent)."""
    tokenizer, exported = load_tokenizer(path), tokenizers_library(path)
    encode = library_loop(tokenizer)

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


def main(words: Sequence[str] | None = None) -> None:
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
        models = train_models([text for parts in texts.values() for text in parts], Path(name), args.vocab_size)
        print(f"| {'model':17} | {'text':20} | library | this package | tokenizers |")
        for kind, path in models.items():
            for text, parts in texts.items():
                found = [f"{rate:.1f}" if rate else "" for rate in measure(path, parts, args.rounds)]
                print(f"| {kind:17} | {text:20} | {found[0]:>7} | {found[1]:>12} | {found[2]:>10} |", flush=True)


if __name__ == "__main__":
    main()
