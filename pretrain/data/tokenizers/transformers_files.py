"""Make the files from which transformers loads a tokenizer."""

import hashlib
import json
from typing import Any

from pretrain.data.tokenizers.convert_sentencepiece import convert_sentencepiece
from pretrain.data.tokenizers.sentencepiece_model import parse_model
from pretrain.data.tokenizers.special_tokens import TokenIds
from pretrain.data.tokenizers.tokenizer import HASHES_KEY, encodes_by_lines, sentencepiece_ids


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
