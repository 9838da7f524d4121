"""Train a SentencePiece BPE tokenizer that decodes any text exactly."""

import io
import os
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pretrain.data.text_inputs.chunk import ReadSettings
from pretrain.data.text_inputs.dataset import NamedDataset
from pretrain.data.text_inputs.documents import read_pieces
from pretrain.data.text_inputs.find import Input, find_inputs
from pretrain.data.tokenizers.convert_sentencepiece import sentencepiece_files
from pretrain.data.tokenizers.special_tokens import EOD_PIECE
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import ConfigError
from pretrain.paths import check_folder, make_folder

LEAST_PIECES = 300  # a tokenizer has each byte and some special tokens
_LARGEST_PIECE_OF_LINE = 1000
"""characters; the trainer silently drops lines of more than max_sentence_length (4192) bytes"""
_RESERVED_NAME = re.compile(r"\s|\u2585|^<0x[0-9A-F]{2}>$")
_RESERVED = re.compile("[\u2581\u2585]+")
"""characters that the trainer reserves; it skips lines that contain them. The encoder encodes them as bytes."""


def train_sentencepiece(inputs: Sequence[str] | NamedDataset, out_dir: str | Path, *, vocab_size: int,
                        reading: ReadSettings | None = None, max_megabytes: float = 100, threads: int | None = None,
                        character_coverage: float = 0.9995, special_tokens: Sequence[str] = (),
                        verbose: bool = False) -> Tokenizer:
    """Train on `inputs`, or on a random sample of their lines if they have more than `max_megabytes`.

    Writes out_dir/tokenizer.model, tokenizer.json and tokenizer_config.json for transformers, and tokenizer.vocab for
    people to read. The result is deterministic for the same input and number of threads. Raises ConfigError.

    special_tokens: names of tokens besides the end-of-document token. These names in a text are plain text.
    """
    from sentencepiece import SentencePieceTrainer

    reading = reading or ReadSettings()
    found = find_inputs(inputs, reading)
    check_folder(Path(out_dir), "--out")
    _check_names(special_tokens)
    written = io.BytesIO()
    failures: list[BaseException] = []
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_recorded(_sample_lines(found.files, reading, max_megabytes), failures),
            model_writer=written, vocab_size=vocab_size, model_type="bpe",
            num_threads=threads or len(os.sched_getaffinity(0)),
            # exact decoding: bytes for characters without a piece, and no normalization
            byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
            add_dummy_prefix=False, character_coverage=character_coverage,
            # pieces for runs of spaces, as in source code; one piece per digit
            allow_whitespace_only_pieces=True, split_digits=True, user_defined_symbols=["\n", "\t"],
            control_symbols=list(special_tokens),  # as the end of a document, which no text is encoded as
            unk_id=0, eos_id=1, eos_piece=EOD_PIECE, bos_id=-1, pad_id=-1, minloglevel=0 if verbose else 3)
    except RuntimeError as error:
        if failures:
            raise failures[0] from None
        raise _vocab_error(vocab_size, str(error)) from None
    return _write(Path(out_dir), written.getvalue())


def _check_names(special_tokens: Sequence[str]) -> None:
    """Raise ConfigError for names that no special token can have."""
    wrong = next((name for name in special_tokens if len(name) < 2 or _RESERVED_NAME.search(name)
                  or list(special_tokens).count(name) > 1 or name in (EOD_PIECE, "<unk>")), None)
    if wrong is not None:
        raise ConfigError("--special_tokens", found=repr(wrong), expected="different names of at least two characters "
                          f"without spaces, and not {EOD_PIECE}, <unk> or <0x00> to <0xFF>")


def _recorded(lines: Iterator[str], failures: list[BaseException]) -> Iterator[str]:
    """Yield the lines, and keep the error that ends them: the trainer raises a RuntimeError with its text instead."""
    try:
        yield from lines
    except (Exception, KeyboardInterrupt) as error:
        failures.append(error)
        raise


def _sample_lines(inputs: Sequence[Input], reading: ReadSettings, max_megabytes: float) -> Iterator[str]:
    """Yield a random sample of the lines, without newlines. Long lines are split into pieces."""
    size = sum(found.text_bytes for found in inputs)
    # The size of standard input is unknown: its beginning is used.
    fraction = max_megabytes * 1e6 / size if all(found.can_resume for found in inputs) else 1
    left = max_megabytes * 1e6
    generator = random.Random(0)
    for piece in read_pieces(inputs, reading):
        for line in piece.text.split("\n"):
            if line and (fraction >= 1 or generator.random() < fraction):
                left -= len(line)
                yield from _pieces(_RESERVED.sub(" ", line))
        if left < 0:
            return


def _pieces(line: str) -> Iterator[str]:
    for start in range(0, len(line), _LARGEST_PIECE_OF_LINE):
        yield line[start : start + _LARGEST_PIECE_OF_LINE]


def _vocab_error(vocab_size: int, message: str) -> ConfigError:
    """Translate the trainer's message, such as "(2000). Please set it to a value <= 1234.", into a ConfigError."""
    limit = re.search(r"<= (\d+)", message)
    needed = re.search(r"required_chars.* (\d+)", message)
    if limit and int(limit[1]) < LEAST_PIECES:
        return ConfigError("--vocab_size", problem=f"this amount of text gives only {limit[1]} pieces, and a tokenizer "
                           f"has at least {LEAST_PIECES}",
                           remedy="give more text; `--tokenizer bytes` needs no training")
    if limit:
        return ConfigError("--vocab_size", found=vocab_size, expected=f"at most {limit[1]} for this amount of text",
                           remedy="give more text or a smaller vocabulary")
    if needed:
        return ConfigError("--vocab_size", problem=f"{vocab_size} pieces are too few for all frequent characters",
                           remedy="give a larger vocabulary, or a lower --character_coverage")
    return ConfigError("SentencePiece training", problem=f"it failed: {message}",
                       remedy="--verbose shows SentencePiece's messages")


def _write(folder: Path, model: bytes) -> Tokenizer:
    """Write tokenizer.vocab, the files for transformers and, last, tokenizer.model. Return the tokenizer."""
    from sentencepiece import SentencePieceProcessor

    make_folder(folder)
    pieces = SentencePieceProcessor(model_proto=model)
    vocab = [f"{pieces.id_to_piece(number)}\t{pieces.get_score(number):g}\n" for number in range(len(pieces))]
    path = folder / "tokenizer.model"
    files = {"tokenizer.vocab": "".join(vocab).encode(), **sentencepiece_files(model, str(path))}
    files[path.name] = files.pop(path.name)  # the last file
    temporary = folder / f"tokenizer.tmp-{os.getpid()}"
    for name, content in files.items():
        temporary.write_bytes(content)
        os.replace(temporary, folder / name)
    return load_tokenizer(path)
