"""Convert a SentencePiece model to a tokenizer of the tokenizers library that gives the same tokens.

Pieces are written with spaces instead of U+2581. Then the encoder needs no rule for spaces, and a U+2581 of the text
can be encoded as bytes, as `load_tokenizer` does for models of `ds-pretrain tokenizer`.
"""

import hashlib
import json
import re
from typing import Any

from pretrain.data.tokenizers.sentencepiece_encoder import encodes_by_lines, sentencepiece_ids
from pretrain.data.tokenizers.sentencepiece_model import BPE, UNIGRAM, Kind, SentencePieceModel, parse_model
from pretrain.data.tokenizers.special_tokens import TokenIds
from pretrain.data.tokenizers.tokenizer import HASHES_KEY
from pretrain.errors import ConfigError

_SPACE = "\u2581"  # SentencePiece's symbol for a space
_RESERVED = (Kind.CONTROL, Kind.UNKNOWN, Kind.BYTE)  # pieces whose names in a text are encoded as plain text
_LEADING_SPACES = 1 << 20  # more than any text has


def convert_sentencepiece(model: SentencePieceModel, *, space_is_bytes: bool, where: str) -> Any:
    """Return a tokenizers.Tokenizer. With `space_is_bytes`, a U+2581 of the text is encoded as bytes.

    Raises ConfigError that names `where` for a model that the tokenizers library cannot represent.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers

    _check_supported(model, where)
    names = _names(model, where)
    library = Tokenizer(_bpe(model, names, where) if model.model_type == BPE else _unigram(model, names))
    steps = _normalizers(model, names, space_is_bytes=space_is_bytes)
    if steps:
        library.normalizer = normalizers.Sequence(steps)
    leading = _LEADING_SPACES if model.remove_extra_whitespaces else int(model.add_dummy_prefix)  # removed by decoding
    library.decoder = decoders.Sequence([
        *([decoders.ByteFallback()] if model.byte_fallback else []), decoders.Fuse(),
        *([decoders.Strip(" ", leading, 0)] if leading else [])])
    library.add_tokens([AddedToken(name, normalized=True, special=False) for name in _user_defined(model, names)])
    library.add_special_tokens([AddedToken(name, normalized=False, special=True)
                                for name, piece in zip(names, model.pieces, strict=True)
                                if piece.kind in (Kind.CONTROL, Kind.UNKNOWN)])
    return library


def _check_supported(model: SentencePieceModel, where: str) -> None:
    unused = next((piece.text for piece in model.pieces if piece.kind == Kind.UNUSED), None)
    problems = {
        f"a {model.type_name} model": model.model_type not in (BPE, UNIGRAM),
        "treat_whitespace_as_suffix": model.whitespace_as_suffix,
        "escape_whitespaces=false": not model.escape_whitespaces,
        "rules of its own for decoding": model.denormalizes,
        f"the unused piece {unused!r}": unused is not None,
        "no piece for unknown text": not any(piece.kind == Kind.UNKNOWN for piece in model.pieces),
    }
    for name, found in problems.items():
        if found:
            raise _not_supported(where, name)


def _not_supported(where: str, what: str) -> ConfigError:
    return ConfigError(where, problem="export would tokenize differently: transformers' tokenizers library has no "
                       f"equivalent for {what}")


def _names(model: SentencePieceModel, where: str) -> list[str]:
    """Return the pieces' names in the tokenizer.json: with spaces, except for control and byte pieces."""
    names = [piece.text if piece.kind in _RESERVED else piece.text.replace(_SPACE, " ") for piece in model.pieces]
    if len(set(names)) < len(names):
        raise _not_supported(where, f"the piece {max(names, key=names.count)!r}, which occurs twice")
    return names


def _user_defined(model: SentencePieceModel, names: list[str]) -> list[str]:
    """Return the user-defined symbols that must be cut out of a text before it is encoded.

    Cutting out single characters only makes the encoder faster, because no other piece contains them. With a dummy
    prefix they are not cut out, because the library would add no prefix to a text that is exactly such a symbol.
    """
    return [name for name, piece in zip(names, model.pieces, strict=True)
            if piece.kind == Kind.USER_DEFINED and not (len(name) == 1 and model.add_dummy_prefix)]


def _bpe(model: SentencePieceModel, names: list[str], where: str) -> Any:
    """Return a BPE model. SentencePiece merges the pair whose result has the highest score first."""
    from tokenizers import models

    scores = {name: piece.score for name, piece in zip(names, model.pieces, strict=True)
              if piece.kind == Kind.NORMAL}
    merges = [(score, name[:cut], name[cut:]) for name, score in scores.items() for cut in range(1, len(name))
              if name[:cut] in scores and name[cut:] in scores]
    merged = {left + right: score for score, left, right in merges}
    if len(set(merged.values())) < len(merged):
        raise _not_supported(where, "BPE pieces of the same score")
    merges.sort(key=lambda merge: -merge[0])
    unknown = next(name for name, piece in zip(names, model.pieces, strict=True) if piece.kind == Kind.UNKNOWN)
    return models.BPE(vocab={name: token for token, name in enumerate(names)},
                      merges=[(left, right) for _, left, right in merges], unk_token=unknown, fuse_unk=True,
                      byte_fallback=model.byte_fallback)


def _unigram(model: SentencePieceModel, names: list[str]) -> Any:
    """Return a unigram model. Control and byte pieces get a score so low that no text is encoded as their name."""
    from tokenizers import models

    smallest = min(piece.score for piece in model.pieces if piece.kind == Kind.NORMAL)
    never = (smallest - 20) * (max(map(len, names)) + 1)  # below the score of a text of unknown characters
    vocab = [(name, never if piece.kind in _RESERVED else piece.score)
             for name, piece in zip(names, model.pieces, strict=True)]
    unknown = next(token for token, piece in enumerate(model.pieces) if piece.kind == Kind.UNKNOWN)
    return models.Unigram(vocab, unk_id=unknown, byte_fallback=model.byte_fallback)


def _normalizers(model: SentencePieceModel, names: list[str], *, space_is_bytes: bool) -> list[Any]:
    """Return the steps of SentencePiece's normalizer (src/normalizer.cc)."""
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if model.charsmap:
        rules = normalizers.Precompiled(model.charsmap)
        if rules.normalize_str("\r") == rules.normalize_str("\n"):
            steps.append(normalizers.Replace("\r", "\n"))  # the library normalizes "\r\n" as one character
        if rules.normalize_str("e\u0301") == "\u00e9":
            steps.append(normalizers.NFC())  # Precompiled applies no rule to two characters of more than 5 bytes
        steps.append(rules)
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r"\A "), ""),
                  normalizers.Replace(Regex(f"[ {_SPACE}]+\\z"), "")]
    if model.add_dummy_prefix:
        # The library also normalizes the names of user-defined symbols, which must not get a prefix.
        symbols = "|".join(re.escape(name) for name in _user_defined(model, names))
        exceptions = f"(?!(?:{symbols})\\z)" if symbols else ""
        steps.append(normalizers.Replace(Regex(f"\\A{exceptions}(?m:(?=.))"), " "))
    if not space_is_bytes:
        steps.append(normalizers.Replace(_SPACE, " "))
    return steps


def sentencepiece_files(content: bytes, where: str, *, max_length: int | None = None) -> dict[str, bytes]:
    """Return the files of a SentencePiece model for transformers, by name. `content` is the .model file.

    transformers reads tokenizer.json. tokenizer.model is for programs such as llama.cpp. Raises ConfigError that names
    `where` if the tokenizers library cannot represent the model.
    """
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_proto=content)
    model = parse_model(content, where)
    library = convert_sentencepiece(model, space_is_bytes=encodes_by_lines(processor), where=where)
    files = {"tokenizer.json": to_bytes(library), "tokenizer.model": content}
    config = tokenizer_config(library, sentencepiece_ids(processor), max_length=max_length)
    config["add_prefix_space"] = model.add_dummy_prefix  # for llama.cpp; its default is true
    config[HASHES_KEY] = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    return files | {"tokenizer_config.json": json_bytes(config)}


def tokenizer_config(library: Any, ids: TokenIds, *, max_length: int | None = None) -> dict[str, Any]:
    """Return the tokenizer_config.json of a tokenizers.Tokenizer that this package wrote.

    Special tokens in a text are plain text, and none is added to a text, as in training. llama.cpp reads the two
    add_..._token keys. "PreTrainedTokenizerFast" names the general class in transformers 4 and 5.
    """
    tokens = {"bos_token": ids.bos, "eos_token": ids.eos, "pad_token": ids.pad, "unk_token": ids.unk}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {key: library.id_to_token(token) for key, token in tokens.items() if token is not None}
    if max_length is not None:
        config["model_max_length"] = max_length
    return config | {"add_bos_token": False, "add_eos_token": False, "clean_up_tokenization_spaces": False,
                     "split_special_tokens": True}


def to_bytes(library: Any) -> bytes:
    """Return the tokenizer.json of a tokenizers.Tokenizer."""
    return str(library.to_str(pretty=True)).encode()


def json_bytes(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
