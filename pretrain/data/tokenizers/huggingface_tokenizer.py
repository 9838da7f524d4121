"""Tokenizers of the tokenizers library: read from a tokenizer.json, or from vocab.json and merges.txt; of bytes."""

from pathlib import Path
from typing import Any

from pretrain.data.tokenizers.special_tokens import EOD_PIECE, read_object
from pretrain.errors import ConfigError, shorten

_BOS_PIECE = "<|startoftext|>"  # of the byte tokenizer
_QWEN_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
               r"|\s+(?!\S)|\s+")  # transformers 5.23, models/qwen2/tokenization_qwen2.py


def read_library(path: Path, content: bytes) -> Any:
    """Return the tokenizers.Tokenizer of a tokenizer.json or vocab.json. Raises ConfigError.

    Added tokens that only tokenizer_config.json or added_tokens.json name are added, as transformers does.
    """
    from tokenizers import Tokenizer as Library

    if path.name == "vocab.json":
        library = _from_merges(path)
    else:
        try:
            library = Library.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"--tokenizer {path}",
                              problem="it is not a tokenizer.json of the tokenizers library: "
                              f"{shorten(str(error))}") from None
    library.no_truncation()
    library.no_padding()
    _add_tokens(library, path.parent)
    library.encode_special_tokens = True  # "<|endoftext|>" in a text is encoded as plain text
    return library


def _from_merges(path: Path) -> Any:
    """Build the byte-level BPE of GPT-2 or Qwen2."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Library

    config = read_object(path.with_name("tokenizer_config.json"))
    name = str(config.get("tokenizer_class") or "GPT2Tokenizer").removesuffix("Fast")
    if name not in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        raise ConfigError(f"--tokenizer {path}", problem=f"the vocab.json and merges.txt of a {name} are not supported",
                          remedy="save the tokenizer with transformers, which writes a tokenizer.json")
    try:
        library = Library(models.BPE.from_file(str(path), str(path.with_name("merges.txt"))))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"--tokenizer {path}",
                          problem="it and merges.txt are not the files of a byte-level BPE: "
                          f"{shorten(str(error))}") from None
    prefix = bool(config.get("add_prefix_space", False))
    words: Any = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=name == "GPT2Tokenizer")
    if name == "Qwen2Tokenizer":
        library.normalizer = normalizers.NFC()
        words = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_QWEN_WORDS), "isolated"), words])
    library.pre_tokenizer = words
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([token for token in ("<|endoftext|>",) if library.token_to_id(token) is not None])
    return library


def _add_tokens(library: Any, folder: Path) -> None:
    """Add the tokens of tokenizer_config.json, or of added_tokens.json, that the library does not have."""
    from tokenizers import AddedToken

    config = read_object(folder / "tokenizer_config.json")
    entries = config.get("added_tokens_decoder")
    where = folder / ("added_tokens.json" if entries is None else "tokenizer_config.json")
    try:
        if entries is None:
            special = {config.get(f"{kind}_token") for kind in ("bos", "eos", "pad", "unk")
                       if isinstance(config.get(f"{kind}_token"), str)}
            tokens = {int(token): AddedToken(name, normalized=name not in special, special=name in special)
                      for name, token in read_object(where).items()}
        else:
            tokens = {int(token): AddedToken(**entry) for token, entry in entries.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(str(where), problem=f"its added tokens cannot be read: {error}") from None
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    for number, token in sorted(tokens.items()):
        if token.content not in known:
            (library.add_special_tokens if token.special else library.add_tokens)([token])
            if library.token_to_id(token.content) != number:
                raise ConfigError(str(where), problem=f"the added token {token.content!r} gets the id "
                                  f"{library.token_to_id(token.content)}, and this file says {number}")


def byte_library() -> Any:
    """Return the tokenizers.Tokenizer with the same tokens, for transformers: a byte-level BPE without merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # in byte-level BPE, a printable byte is the character with its number, and other bytes follow from U+0100 on
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}
    library = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(name, special=True) for name in (EOD_PIECE, _BOS_PIECE)])
    library.encode_special_tokens = True
    return library
