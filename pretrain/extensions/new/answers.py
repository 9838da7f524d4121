"""The answers that describe a run: data, tokenizer, model and machines. Each one is validated when it is given."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pretrain.cli import whole_number
from pretrain.data.data_spec import parse_split, split_documents
from pretrain.data.text_inputs.chunk import ReadSettings
from pretrain.data.text_inputs.documents import read_pieces
from pretrain.data.text_inputs.find import find_inputs
from pretrain.data.text_inputs.formats import STDIN
from pretrain.data.token_files.indexed_dataset import open_checked
from pretrain.data.token_schedules import parse_token_count
from pretrain.data.tokenizers.tokenizer import BYTES, load_tokenizer
from pretrain.distributed.device import nvidia_smi
from pretrain.errors import ConfigError, shorten
from pretrain.extensions.new.sizes import LLAMA, llama_shape, vocabulary_for
from pretrain.memory.hardware import Cluster, find_gpu, gpu_by_label, make_cluster, this_cpu_cluster
from pretrain.model.config import load_model_config, preset_names
from pretrain.model.description import ModelConfig
from pretrain.remote import without_credentials

TRAIN, CPU = "train", "cpu"  # values of --tokenizer and --gpu
BYTES_PER_TOKEN = 4  # of text in an alphabet, with a vocabulary of some ten thousand tokens: an assumption
_USUAL_VOCABULARY = 32000  # Llama 2's
_BYTES_PER_PIECE = 500  # of the text that a tokenizer is trained on: with less, there are too few different words
_VOCABULARY_MULTIPLE = 128  # as in Megatron-LM: sizes that divide among ranks, and fast matrix products
Answer = TypeVar("Answer")


def answer(flag: str, given: str | None, parse: Callable[[str], Answer], question: str,
           default: str | None = None) -> Answer:
    """Return the value of a flag. If it is not given, ask on the terminal, and ask again after a wrong answer.

    Without a terminal the default is used. Raises ConfigError for a wrong flag, and for a missing one without default.
    """
    if given is not None or (default is not None and not _is_terminal()):
        return parse(given if given is not None else str(default))
    if not _is_terminal():
        raise ConfigError(f"--{flag}", problem="the flag is missing", remedy=f"give it, or answer on a terminal: "
                                                                             f"{question}")
    while True:
        try:
            word = input(f"{question}{f' [{default}]' if default else ''}: ").strip() or default
        except EOFError:
            raise KeyboardInterrupt from None
        try:
            if word:
                return parse(word)
        except (ConfigError, argparse.ArgumentTypeError) as error:
            print(f"  {error}")


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


@dataclass(frozen=True)
class Data:
    """The data of the run: token files, or text to prepare."""

    prefix: str  # of the token files
    inputs: tuple[str, ...] = ()  # text to prepare; empty: the token files exist
    text_bytes: int = 0  # approximate size of the text
    num_tokens: int = 0  # of the token files
    tokenizer: str = ""  # with which they were prepared; "": unknown

    def tokens(self, tokenizer: str) -> int:
        """Return the number of tokens: of text, an estimate from its size."""
        return self.num_tokens or self.text_bytes // (1 if tokenizer == BYTES else BYTES_PER_TOKEN)

    def validation_tokens(self, split: str, tokenizer: str) -> int:
        """Return the number of tokens in the validation part of --split.

        Of text it is half the estimate: the part has complete documents, which may be shorter than others.
        """
        fractions = parse_split(split)
        if self.inputs:
            return int(fractions[1] * self.tokens(tokenizer)) // 2
        files = open_checked(self.prefix)
        first, last = split_documents(files.num_documents, fractions)[1]
        return files.document_offset(last) - files.document_offset(first)


def data_of(words: Sequence[str], settings: ReadSettings, new_prefix: str) -> Data:
    """Return the data that a prefix of token files, or files, folders and globs of text name. Raises ConfigError.

    new_prefix: of the token files to prepare.
    """
    if len(words) == 1 and os.path.exists(f"{words[0].removesuffix('.idx').removesuffix('.bin')}.idx"):
        prefix = words[0].removesuffix(".idx").removesuffix(".bin")
        files = open_checked(prefix)
        return Data(prefix, num_tokens=files.num_tokens, tokenizer=str(files.meta.get("tokenizer", "")))
    if STDIN in words:
        raise ConfigError("--data -", problem="standard input has no size, and can be read only once",
                          remedy="`ds-pretrain prepare` reads it; then give --data the prefix of the token files")
    for word in words:
        if (shown := without_credentials(word)) != word:
            raise ConfigError(f"--data {shown}", problem="its password or signature would be written into the YAML",
                              remedy="give it to `ds-pretrain prepare`, and here the prefix of the token files")
    found = find_inputs(words, settings)
    next(read_pieces(found.files, settings), None)  # a wrong key, now rather than in `ds-pretrain prepare`
    return Data(new_prefix, tuple(words), sum(file.text_bytes for file in found.files))


@dataclass(frozen=True)
class TokenizerOfRun:
    """The tokenizer: its value of --tokenizer, and the size of its vocabulary."""

    value: str
    vocab_size: int
    to_train: bool = False
    can_be_smaller: bool = False  # the number of tokens was not asked for


def tokenizer_of(word: str, data: Data, vocab_size: int | None, new_folder: str) -> TokenizerOfRun:
    """Return the tokenizer that a value of --tokenizer names. `new_folder`: of a tokenizer to train."""
    if word != TRAIN:
        if vocab_size is not None:
            raise ConfigError("--vocab_size", problem="it has no effect without --tokenizer train")
        return TokenizerOfRun(word, load_tokenizer(word).vocab_size)
    if not data.inputs:
        raise ConfigError("--tokenizer train", problem="the data has been prepared with a tokenizer already",
                          remedy="give that tokenizer")
    enough = max(300, data.text_bytes // _BYTES_PER_PIECE // 100 * 100)
    return TokenizerOfRun(new_folder, vocab_size or min(_USUAL_VOCABULARY, enough), to_train=True,
                          can_be_smaller=vocab_size is None)


@dataclass(frozen=True)
class ModelOfRun:
    """The model, with its values of --model and --model_overrides."""

    value: str
    overrides: str
    config: ModelConfig
    tokenizer: TokenizerOfRun
    why: str


def model_of(word: str, tokenizer: TokenizerOfRun) -> ModelOfRun:
    """Return the model that a value of --model names, with a vocabulary for the tokenizer. Raises ConfigError.

    A tokenizer that will be trained gets fewer tokens if its rows were more than a third of a small model.
    """
    size = _size_of(word)
    if size is not None:
        if tokenizer.can_be_smaller:
            tokenizer = replace(tokenizer, vocab_size=vocabulary_for(size, tokenizer.vocab_size, _padded))
        overrides, model = llama_shape(size, _padded(tokenizer.vocab_size), f"--model {shorten(word)}")
        return ModelOfRun(LLAMA, overrides, model, tokenizer,
                          f"a Llama of {model.num_parameters():,} parameters; {_rows(tokenizer)}")
    model = load_model_config(word)
    if tokenizer.vocab_size <= model.vocab_size <= _padded(tokenizer.vocab_size):
        return ModelOfRun(word, "", model, tokenizer, f"{model.num_parameters():,} parameters")
    overrides = f"{model.key('vocab_size')}={_padded(tokenizer.vocab_size)}"
    model = load_model_config(word, overrides)
    return ModelOfRun(word, overrides, model, tokenizer,
                      f"{model.num_parameters():,} parameters; {_rows(tokenizer)}")


def _padded(vocab_size: int) -> int:
    return -(-vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE


def _rows(tokenizer: TokenizerOfRun) -> str:
    return f"{_padded(tokenizer.vocab_size):,} rows for the {tokenizer.vocab_size:,} tokens of the tokenizer"


def _size_of(word: str) -> int | None:
    """Return the number of parameters of a word such as 1.3B; None for the name of a model."""
    return None if word in preset_names() or os.path.exists(word) else parse_token_count(word)


def tokens_of(word: str) -> int:
    """Return a value of --tokens. Raises ConfigError."""
    count = parse_token_count(word)
    if not count:
        raise ConfigError("--tokens", found=repr(word), expected="a number of tokens, such as 26B")
    return count


def machines_of(flags: argparse.Namespace) -> Cluster:
    """Return the machines that --gpu, --world_size, --nodes and --gpus_per_node describe. Raises ConfigError."""
    counts = {name: getattr(flags, name) for name in ("world_size", "nodes", "gpus_per_node")}
    own, number = _gpus_here()
    is_given = any(counts.values())
    kind = answer("gpu", flags.gpu, _check_gpu, "GPUs: a100, h100, v100, ... (their memory in GiB), or cpu",
                  None if is_given and own == CPU else own)
    if not is_given:
        what = "ranks on this machine" if kind == CPU else "GPUs of a node"
        counts["gpus_per_node"] = answer("gpus_per_node", None, whole_number(1, 10**4), what,
                                         str(number) if kind == own else "1" if kind == CPU else None)
        counts["nodes"] = answer("nodes", None, whole_number(1, 10**5), "nodes", "1")
    cluster = make_cluster(gpu=None if kind == CPU else kind, **counts)
    return this_cpu_cluster(cluster) if kind == CPU else cluster


def _gpus_here() -> tuple[str | None, int]:
    """Return the value of --gpu for this machine, and the number of its GPUs; ("cpu", 1) without GPUs.

    The value is None for a GPU whose memory nvidia-smi does not report.
    """
    gpus = nvidia_smi("name,memory.total") if os.environ.get("DS_ACCELERATOR") != CPU else []
    if not gpus:
        return CPU, 1
    label, _, mebibytes = gpus[0].rpartition(",")
    if not mebibytes.strip().isdigit():
        return None, len(gpus)
    known = gpu_by_label(label, int(mebibytes) * 2**20)
    return known.name if known else f"{int(mebibytes) / 1024:.3g}", len(gpus)


def _check_gpu(word: str) -> str:
    if word.lower() == CPU:
        return CPU
    find_gpu(word)
    return word


def run_file(word: str) -> Path:
    """Argparse type: the YAML file to write."""
    path = Path(word)
    if path.suffix not in (".yaml", ".yml"):
        raise argparse.ArgumentTypeError(f"found {shorten(word)!r}; expected a file name such as run.yaml")
    return path
