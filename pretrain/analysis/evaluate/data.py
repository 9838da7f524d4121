"""Open the data of an evaluation as windows of tokens, and check that it fits the model. Imports no torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.analysis.evaluate.token_windows import Tokens, WindowSet, rolling_windows, sample_windows
from pretrain.analysis.model_source import EvaluationSource
from pretrain.analysis.recorded_data import open_recorded_data
from pretrain.data.data_spec import names_of_split
from pretrain.data.run_data import check_prepared_data
from pretrain.data.samples.dataset import source_records
from pretrain.data.text_inputs.chunk import ReadSettings
from pretrain.data.text_inputs.documents import read_pieces
from pretrain.data.text_inputs.find import find_inputs
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError
from pretrain.remote import is_url

_LONGEST_DEFAULT = 2048  # tokens; longest default --seq_length for weights that no run of this program trained
_MOST_SAMPLES = 10**8  # most samples of one evaluation; a larger number comes from a damaged record
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class DataFlags:
    """The flags of `ds-pretrain evaluate` that choose the data. None: the run's value, or a default."""

    data: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    tokenizer: str | None = None
    jsonl_key: str = "text"
    seq_length: int | None = None
    stride: int | None = None
    max_samples: int | None = None
    eod_mask_loss: bool | None = None
    document_attention: bool | None = None
    format: str = "auto"


def open_data(source: EvaluationSource, flags: DataFlags, tokenizer: Tokenizer | ConfigError) -> list[WindowSet]:
    """Return the windows of all data that the flags choose. Without --data and --split: the run's own evaluations.

    Raises ConfigError if data is missing or damaged, or does not fit the model.
    """
    length = _seq_length(source, flags)
    stride = length if flags.stride is None else flags.stride
    if stride > length:
        raise ConfigError("--stride", found=stride, expected=f"at most --seq_length, {length}")
    known = tokenizer if isinstance(tokenizer, Tokenizer) else None
    sets = [_named_data(word, source, flags, tokenizer, length=length, stride=stride) for word in flags.data]
    if flags.split or not flags.data:
        sets += _run_data(source, flags, known, length=length, stride=stride)
    return [one if flags.max_samples is None else one.first(flags.max_samples) for one in sets]


def _seq_length(source: EvaluationSource, flags: DataFlags) -> int:
    longest = source.config.longest_sequence()
    length = flags.seq_length or source.trained_length or min(source.config.max_positions, _LONGEST_DEFAULT)
    if length > longest:
        raise ConfigError("--seq_length", found=length,
                          expected=f"at most {longest}, the positions of the model in {source.folder}")
    return length


def _named_data(word: str, source: EvaluationSource, flags: DataFlags, tokenizer: Tokenizer | ConfigError, *,
                length: int, stride: int) -> WindowSet:
    """Return the windows of a value of --data: the prefix of a .bin/.idx pair, or a text file."""
    if word.endswith((".bin", ".idx")):
        raise ConfigError(f"--data {word}", problem=f"give the prefix without {word[-4:]}")
    known = tokenizer if isinstance(tokenizer, Tokenizer) else None
    if is_url(word) or Path(f"{word}.idx").is_file():
        indexed = IndexedDataset(word)
        eod_token = check_prepared_data(indexed, f"--data {indexed.prefix}", vocab_size=source.config.vocab_size,
                                        tokenizer=known, can_change_model=False)
        windows = _rolling(word, indexed, 0, indexed.num_tokens, length=length, stride=stride,
                           masked_after=_eod_for("eod_mask_loss", source, flags, eod_token, known))
        return replace(windows, document_end=_eod_for("document_attention", source, flags, eod_token, known))
    if not Path(word).is_file():
        raise ConfigError(f"--data {word}", problem=f"there is neither {word}.idx nor a text file {word}",
                          remedy="give the prefix of a .bin/.idx pair, or a file with text, JSON lines or Parquet")
    if flags.eod_mask_loss:
        raise ConfigError("--eod_mask_loss", problem=f"it has no effect on the text {word}: the first token of a "
                          "document always counts", remedy="leave it out, or give prepared data")
    if isinstance(tokenizer, ConfigError):
        raise tokenizer
    bos, eos = tokenizer.ids.bos, tokenizer.ids.eos
    context = bos if source.published and bos is not None else eos
    reading = ReadSettings(flags.format, flags.jsonl_key)
    windows = _text_windows(word, tokenizer, reading, context, length=length, stride=stride)
    return replace(windows, document_end=_eod_for("document_attention", source, flags, None, tokenizer))


def _rolling(name: str, indexed: IndexedDataset, first: int, last: int, *, length: int, stride: int,
             masked_after: int | None) -> WindowSet:
    if last - first < 2:
        raise ConfigError(name, found=f"{last - first} tokens", expected="at least 2, to predict one of them",
                          remedy="give more data")
    return rolling_windows(name, indexed.tokens, [(first, last)], seq_length=length, stride=stride,
                           masked_after=masked_after)


def _eod_for(name: str, source: EvaluationSource, flags: DataFlags, eod_of_data: int | None,
             tokenizer: Tokenizer | None) -> int | None:
    """Return the end-of-document token if the flag `name` is on, or without the flag, if it was on in the run.

    With eod_mask_loss, no prediction after this token counts; with document_attention, it ends a document.
    """
    value: bool | None = getattr(flags, name)
    if value is None:
        value = bool(source.run is not None and source.run["flags"].get(name))
    if not value:
        return None
    token = tokenizer.eod_token if tokenizer is not None else eod_of_data
    if token is None:
        raise ConfigError(f"--{name}", problem="the end-of-document token is unknown: there is no --tokenizer, "
                          "and the data's .meta.json does not name the token",
                          remedy=f"give --tokenizer, or --no-{name}")
    return token


def _text_windows(path: str, tokenizer: Tokenizer, reading: ReadSettings, context: int | None, *, length: int,
                  stride: int) -> WindowSet:
    """Tokenize a text file. Each document follows the token `context`, if there is one."""
    import numpy as np

    prefix = [] if context is None else [context]
    documents, num_bytes = _documents(path, tokenizer, reading)
    if not documents:
        raise ConfigError(path, problem="there is no text", remedy="give a file that is not empty")
    flat = np.concatenate([np.array([*prefix, *document], np.int64) for document in documents])
    ends = np.cumsum([len(prefix) + len(document) for document in documents]).tolist()

    def tokens(start: int, stop: int) -> Tokens:
        return flat[start:stop]

    return rolling_windows(path, tokens, list(zip([0, *ends], ends, strict=False)), seq_length=length, stride=stride,
                           first_token_counts=not prefix, text_bytes=num_bytes)


def _documents(path: str, tokenizer: Tokenizer, reading: ReadSettings) -> tuple[list[list[int]], int]:
    """Return the tokens of each document with text, and the UTF-8 bytes of the text."""
    documents: list[list[int]] = [[]]
    num_bytes = 0
    for piece in read_pieces(find_inputs([path], reading).files, reading):
        documents[-1] += tokenizer.encode(piece.text)
        num_bytes += len(piece.text.encode())
        if piece.ends_document:
            documents.append([])
    return [document for document in documents if document], num_bytes


def _run_data(source: EvaluationSource, flags: DataFlags, tokenizer: Tokenizer | None, *, length: int,
              stride: int) -> list[WindowSet]:
    """Return the windows of --split, or the samples of the run's own evaluations."""
    run = source.run
    if run is None:
        raise ConfigError("--split" if flags.split else "--data",
                          problem=f"{source.path} belongs to no run, so it has no data of its own",
                          remedy="give --data with the prefix of a .bin/.idx pair or a text file")
    if not flags.split and flags.stride is not None:
        raise ConfigError("--stride", problem="the samples of the run's own evaluation do not overlap",
                          remedy="give --data or --split too")
    recorded = run["flags"]
    data = open_recorded_data(run, seq_length=length, vocab_size=source.config.vocab_size)
    masked_after = _eod_for("eod_mask_loss", source, flags, data.eod_token, tokenizer)
    sets = []
    for split in flags.split or tuple(split for split in SPLITS[1:] if names_of_split(data.datasets, split)) or \
            ("valid",):
        names = names_of_split(data.datasets, split)
        if not names:
            raise ConfigError(f"--split {split}", problem=f"the run of {source.path} has no {split} data",
                              remedy="give --data with the prefix of a .bin/.idx pair or a text file")
        for name in names:
            dataset = data.datasets[name]
            if flags.split:
                sets += [_rolling(name if len(dataset.sources) == 1 else f"{name} of {indexed.prefix}", indexed,
                                  record["first_token"], record["last_token"], length=length, stride=stride,
                                  masked_after=masked_after) for indexed, record in source_records(dataset)]
                continue
            if length == recorded.get("seq_length") and run.get("data", {}).get(name) != dataset.fingerprint:
                raise ConfigError(f"{dataset.sources[0].prefix} ({name})",
                                  problem="the data has changed since the run, so its evaluation cannot be repeated",
                                  remedy=f"--split {split} evaluates the data as it is now")
            sets.append(sample_windows(f"{name}, as in training", dataset,
                                       _samples_of_evaluation(source.path, run, flags), masked_after=masked_after))
    document_end = _eod_for("document_attention", source, flags, data.eod_token, tokenizer)
    return [replace(one, document_end=document_end) for one in sets]


def _samples_of_evaluation(path: Path, run: dict[str, Any], flags: DataFlags) -> int:
    """Return the number of samples that one evaluation of the run reads, or --max_samples if that is smaller."""
    try:
        samples = int(run["flags"]["eval_steps"]) * int(run["batch"]["global_batch_size"])
        if not 0 <= samples <= _MOST_SAMPLES:
            raise ValueError(samples)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(f"{path}: run.json", problem="the record of the run's batch size or eval_steps is damaged",
                          remedy="give --data or --split") from None
    return samples if flags.max_samples is None else min(samples, flags.max_samples)
