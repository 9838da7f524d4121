"""Find the tokenizer files of a transformers folder, and check that the tokenizer fits the model. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint.load.hf_folder import HFFolder
from pretrain.data.tokenizers.special_tokens import check_tokenizer_fits
from pretrain.data.tokenizers.tokenizer import TOKENIZER_FILES, find_tokenizer_file, load_tokenizer


@dataclass(frozen=True)
class HFTokenizer:
    """The tokenizer files of a transformers folder."""

    files: tuple[Path, ...]
    fingerprint: str  # of the file that load_tokenizer reads
    notes: tuple[str, ...] = ()  # special tokens that differ from the config.json


def find_hf_tokenizer(found: HFFolder) -> HFTokenizer | None:
    """Return the tokenizer files of a folder; None if there is no file that load_tokenizer reads.

    Raises ConfigError if the tokenizer cannot be read, or has tokens beyond the model's vocabulary.
    """
    readable = find_tokenizer_file(found.folder)
    if readable is None:
        return None
    loaded = load_tokenizer(readable)
    notes = check_tokenizer_fits(loaded.ids, found.config.hf_config, vocab_size=found.config.vocab_size,
                                 where=str(readable), remedy="use the tokenizer that belongs to the weights, or remove "
                                 "its files")
    files = (found.folder / name for name in TOKENIZER_FILES)
    return HFTokenizer(tuple(path for path in files if path.is_file()), loaded.fingerprint, tuple(notes))
