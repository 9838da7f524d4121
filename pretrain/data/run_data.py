"""Data of a run: its datasets, tokenizer and end-of-document token, checked against the model's vocabulary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pretrain.data.data_spec import DataSpec
from pretrain.data.open_datasets import open_datasets
from pretrain.data.samples.dataset import SampleDataset
from pretrain.data.samples.own import open_own_datasets
from pretrain.data.source_facts import SourceFacts, end_notes, learnable_notes, source_facts, tokenizer_notes
from pretrain.data.token_files.indexed_dataset import IndexedDataset, check_same_tokenizer
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import ConfigError

SCANNED_TOKENS = 16 * 2**20  # at each end of a data file without a .meta.json; a full scan would take minutes
_CHUNK_TOKENS = 2**20
_MOST_NOTES = 8


@dataclass(frozen=True)
class RunData:
    """Datasets by name, the tokenizer, and the end-of-document token if it is known.

    Names: "train"; "valid" and "test", or "valid/NAME" and "test/NAME".
    """

    datasets: dict[str, SampleDataset]
    tokenizer: Tokenizer | None = None
    eod_token: int | None = None
    vocab_size: int | None = None
    """tokens of the tokenizer or, without one, of the tokenizer that prepared the training data; None: not known"""
    notes: tuple[str, ...] = ()
    """differences between the sources, and what looks wrong in them, one line each"""
    unigram_entropy: float | None = None
    """nats, of the training data: the loss of a model that only knows how frequent each token is"""


def open_run_data(spec: DataSpec, *, seq_length: int, seed: int, tokenizer: str | None, vocab_size: int,
                  needs_ends: Sequence[str] = (), num_samples: Mapping[str, int] | None = None,
                  can_change_model: bool = True) -> RunData:
    """Open the data files and the tokenizer of a run. `num_samples`: see `open_datasets`.

    Args:
        needs_ends: flags of the run that act at the ends of documents.
        can_change_model: whether another vocab_size is a remedy; False if the run begins with existing weights.

    Raises:
        ConfigError: for missing or damaged files, for tokens that the model's vocabulary does not have, for data that
            was prepared with another tokenizer, for sources with different end-of-document tokens, and for data without
            this token if `needs_ends`.
    """
    loaded = load_tokenizer(tokenizer) if tokenizer else None
    if loaded is not None and loaded.vocab_size > vocab_size:
        raise ConfigError(f"--tokenizer {tokenizer}", found=f"{loaded.vocab_size} tokens",
                          expected=f"at most the model's vocab_size, {vocab_size}",
                          remedy=_vocabulary_remedy(loaded.vocab_size, can_change_model))
    if spec.module is not None:
        return _own_run_data(spec, loaded, seq_length=seq_length, seed=seed, vocab_size=vocab_size,
                             needs_ends=needs_ends)
    datasets = open_datasets(spec, seq_length=seq_length, seed=seed, num_samples=num_samples)
    if "train" not in datasets:
        raise ConfigError(spec.train_flag, found="no training tokens",
                          expected=f"at least {seq_length + 1} for one sample", remedy="change --split")
    sources = _sources_of(datasets)
    eod_token = _check_sources(sources, vocab_size, loaded, can_change_model)
    facts = [(where, source, source_facts(source, num_sources=len(sources))) for where, source in sources]
    trained = [row for row in facts if row[1] in datasets["train"].sources]
    if spec.packing == "best_fit" and all(source.num_documents == 1 for _, source, _ in trained):
        raise ConfigError("--packing best_fit", problem=f"{trained[0][1].idx_path} has a single document: there is "
                          "nothing to pack", remedy="prepare the data with its documents, or leave the flag out")
    for flag in needs_ends:
        _check_ends(flag, [row[2] for row in trained], eod_token)
    notes = [*dict.fromkeys(source.url_note for _, source in sources if source.url_note),
             *_seen_notes(spec, datasets), *_left_out_notes(spec, datasets),
             *_marker_notes(sources), *tokenizer_notes([(where, source, each.tokens) for where, source, each in facts]),
             *[note for where, _, of_source in facts for note in end_notes(where, of_source, eod_token)][:_MOST_NOTES]]
    for where, source, of_source in trained:
        notes += learnable_notes(source, where, of_source)[:_MOST_NOTES]
        if "--document_attention" not in needs_ends:
            notes += _short_document_notes(where, of_source, seq_length)
    sizes = [source.meta.get("vocab_size") for _, source, _ in trained]
    known = None if None in sizes else max(size for size in sizes if size is not None)
    return RunData(datasets, loaded, eod_token, loaded.vocab_size if loaded is not None else known, tuple(notes),
                   sum(of_source.unigram_entropy for _, _, of_source in trained) / len(trained))


def _own_run_data(spec: DataSpec, tokenizer: Tokenizer | None, *, seq_length: int, seed: int, vocab_size: int,
                  needs_ends: Sequence[str]) -> RunData:
    """Open the datasets of --dataset_module. Only the tokenizer names their end-of-document token."""
    datasets = open_own_datasets(spec, seq_length=seq_length, seed=seed, vocab_size=vocab_size)
    documents, eod_token = "--document_attention", tokenizer.eod_token if tokenizer is not None else None
    for name, dataset in datasets.items():
        if dataset.has_positions and documents not in needs_ends:
            raise ConfigError(spec.train_flag, problem=f"the items of the {name} data have positions, which only "
                              f"{documents} uses", remedy=f"give {documents}, or leave the positions out")
        for flag in needs_ends:
            if eod_token is None and not (flag == documents and dataset.has_positions):
                raise ConfigError(flag, problem=f"the end-of-document token of the {name} data is unknown: there is "
                                  "no --tokenizer", remedy="give the --tokenizer of the items, or "
                                  f"leave {flag} out" + (f"; items with positions need none for {documents}"
                                                         if flag == documents else ""))
    return RunData({**datasets}, tokenizer, eod_token, tokenizer.vocab_size if tokenizer is not None else None)


def _check_ends(flag: str, facts: list[SourceFacts], eod_token: int | None) -> None:
    """Raise ConfigError for a flag that acts at the ends of documents if the data shows no such ends."""
    if eod_token is None:
        raise ConfigError(flag, problem="the end-of-document token is unknown: there is no --tokenizer, and the data's "
                          ".meta.json does not name the token", remedy=f"give --tokenizer, or leave {flag} out")
    if not any(of_source.separates(eod_token) for of_source in facts):
        raise ConfigError(flag, problem=f"it would have no effect: the end-of-document token is {eod_token}, and "
                          f"{facts[0].ends_text()}", remedy="give the --tokenizer with which the data was prepared, "
                          f"prepare the data again, or leave {flag} out")


def _short_document_notes(where: str, facts: SourceFacts, seq_length: int) -> list[str]:
    """Note documents that are all shorter than a sample: without --document_attention, they see each other."""
    if facts.longest_document >= seq_length:
        return []
    return [f"{where}: all {facts.documents} sampled documents are shorter than --seq_length {seq_length} (the longest "
            f"has {facts.longest_document} tokens), so that attention crosses the ends of documents; "
            "--document_attention separates them"]


def _sources_of(datasets: dict[str, SampleDataset]) -> list[tuple[str, IndexedDataset]]:
    """Return each token file once, with the flag that names it."""
    sources: dict[int, tuple[str, IndexedDataset]] = {}
    for name, dataset in datasets.items():
        for source in dataset.sources:
            sources.setdefault(id(source), (f"--{name.partition('/')[0]}_data {source.prefix}", source))
    return list(sources.values())


def _check_sources(sources: list[tuple[str, IndexedDataset]], vocab_size: int, tokenizer: Tokenizer | None,
                   can_change_model: bool) -> int | None:
    """Check each token file, and that all agree. Returns the end-of-document token; None if it is unknown."""
    scanned = max(SCANNED_TOKENS // len(sources), _CHUNK_TOKENS)
    named: tuple[str, int] | None = None  # the first source whose .meta.json names the end-of-document token
    check_same_tokenizer(sources)
    for where, source in sources:
        token = check_prepared_data(source, where, vocab_size=vocab_size, tokenizer=tokenizer, scanned=scanned,
                                    can_change_model=can_change_model)
        if token is not None:
            named = named or (where, token)
            if token != named[1]:
                raise ConfigError(where, problem=f"its end-of-document token is {token}, and that of {named[0]} is "
                                  f"{named[1]}", remedy="prepare all data with the same tokenizer")
    if tokenizer is not None:
        return tokenizer.eod_token
    return named[1] if named else None


def _seen_notes(spec: DataSpec, datasets: dict[str, SampleDataset]) -> list[str]:
    """Note validation and test sets that are also training data, by their fingerprints: a copy has another name."""
    if not spec.valid and not spec.test:
        return []
    trained = {source.fingerprint for source in datasets["train"].sources}
    return [f"{prefix} is training data and {split} data: its losses are those of data that the model has seen"
            for split, named in (("validation", spec.valid), ("test", spec.test)) for name, prefix in named
            if datasets[name].sources[0].fingerprint in trained]


def _left_out_notes(spec: DataSpec, datasets: dict[str, SampleDataset]) -> list[str]:
    """Note sources of a blend that have too few tokens for a validation sample."""
    if "valid" not in datasets or spec.valid:
        return []
    used = {str(source.prefix) for source in datasets["valid"].sources}
    left_out = [prefix for prefix in spec.train if prefix not in used]
    more = f" and {len(left_out) - 8} more sources" if len(left_out) > 8 else ""
    return [f"the validation data has no samples of {', '.join(left_out[:8])}{more}: their part by --split is shorter "
            "than a sample"] if left_out else []


def _marker_notes(sources: list[tuple[str, IndexedDataset]]) -> tuple[str, ...]:
    """Note sources whose documents begin or end with other tokens than the documents of the first source."""
    notes, first = list[str](), dict[str, tuple[str, Any]]()
    for where, source in sources:
        meta = source.meta
        for key, place in (("bos_token", "begin"), ("eod_token", "end")):
            if key not in meta:  # files of other programs
                continue
            there, token = first.setdefault(key, (where, meta[key]))
            if token != meta[key]:
                texts = ["no special token" if value is None else f"token {value}" for value in (meta[key], token)]
                notes.append(f"{where}: its documents {place} with {texts[0]}, and those of {there} with {texts[1]}")
    return tuple(notes[:_MOST_NOTES])


def check_prepared_data(indexed: IndexedDataset, where: str, *, vocab_size: int, tokenizer: Tokenizer | None,
                        can_change_model: bool = True, scanned: int = SCANNED_TOKENS) -> int | None:
    """Return the end-of-document token that the data's .meta.json names; None if it names none.

    Raises ConfigError if the data has tokens beyond the vocabulary, or was prepared with another tokenizer.
    `can_change_model`: whether another vocab_size is a remedy. `scanned`: tokens that are read at each end of data
    without a .meta.json.
    """
    prefix = str(indexed.prefix)
    meta = indexed.meta
    largest = meta.get("max_token")
    if not isinstance(largest, int):
        largest = _largest_token(indexed, scanned)
    if largest >= vocab_size:
        raise ConfigError(where, found=f"token {largest}",
                          expected=f"tokens below the model's vocab_size, {vocab_size}",
                          remedy=_vocabulary_remedy(largest + 1, can_change_model))
    if tokenizer is not None:
        _check_tokenizer(tokenizer, meta, f"--tokenizer {tokenizer.path}", prefix)
    token = meta.get("eod_token")
    return token if isinstance(token, int) else None


def _vocabulary_remedy(needed: int, can_change_model: bool) -> str:
    return f"--model_overrides vocab_size={needed}, or another --model" if can_change_model else \
        "the vocabulary of existing weights is not extended: use data that was prepared with this model's tokenizer"


def _largest_token(indexed: IndexedDataset, scanned: int) -> int:
    """Return the largest of the first and last `scanned` tokens of a file. Raises ConfigError if one is negative."""
    total = indexed.num_tokens
    starts = set(range(0, min(scanned, total), _CHUNK_TOKENS))
    starts |= set(range(max(total - scanned, 0), total, _CHUNK_TOKENS))
    chunks = (indexed.tokens(start, min(start + _CHUNK_TOKENS, total)) for start in sorted(starts))
    ranges = [(int(chunk.min()), int(chunk.max())) for chunk in chunks]
    smallest = min(low for low, _ in ranges)
    if smallest < 0:
        raise ConfigError(f"{indexed.prefix}.bin", found=f"token {smallest}", expected="no token below 0",
                          remedy="write it again with `ds-pretrain prepare`")
    return max(high for _, high in ranges)


def _check_tokenizer(tokenizer: Tokenizer, meta: dict[str, Any], where: str, prefix: str) -> None:
    """Raise ConfigError if the data was prepared with another tokenizer."""
    prepared_with = meta.get("tokenizer_sha256")
    if prepared_with is not None and prepared_with != tokenizer.fingerprint:
        raise ConfigError(where, found=f"sha256 {tokenizer.fingerprint[:12]}...",
                          expected=f"sha256 {prepared_with[:12]}..., with which {prefix} was prepared",
                          remedy=f"use {meta.get('tokenizer', 'the same tokenizer')}, or prepare the data again")
