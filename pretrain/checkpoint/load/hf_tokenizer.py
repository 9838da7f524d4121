"""Find the tokenizer files of a transformers folder, and check that the tokenizer fits the model. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint.load.hf_folder import HFFolder
from pretrain.data.tokenizer import load_tokenizer
from pretrain.errors import ConfigError

_READABLE = ("tokenizer.model", "tokenizer.json")  # what load_tokenizer reads, in its order
_OTHERS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
           "chat_template.jinja")


@dataclass(frozen=True)
class HFTokenizer:
    """The tokenizer files of a transformers folder."""

    files: tuple[Path, ...]
    fingerprint: str  # of the file that load_tokenizer reads


def find_hf_tokenizer(found: HFFolder) -> HFTokenizer | None:
    """Return the tokenizer files of a folder; None if there is no file that load_tokenizer reads.

    Raises ConfigError if a tokenizer cannot be read, or has tokens beyond the model's vocabulary.
    """
    readable = [found.folder / name for name in _READABLE if (found.folder / name).is_file()]
    if not readable:
        return None
    fingerprint = _check_vocabulary(readable[0], found)
    for path in readable[1:]:
        _check_vocabulary(path, found)
    others = (found.folder / name for name in _OTHERS)
    return HFTokenizer((*readable, *(path for path in others if path.is_file())), fingerprint)


def _check_vocabulary(path: Path, found: HFFolder) -> str:
    """Return the fingerprint of a tokenizer. Raises ConfigError if it has tokens beyond the model's vocabulary."""
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > found.config.vocab_size:
        raise ConfigError(str(path), problem=f"its largest token is {tokenizer.vocab_size - 1}, and the model has only "
                          f"{found.config.vocab_size} tokens ({found.config.key('vocab_size')} of the config.json)",
                          remedy="use the tokenizer that belongs to the weights, or remove its files")
    return tokenizer.fingerprint
