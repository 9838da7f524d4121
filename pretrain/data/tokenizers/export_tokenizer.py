"""Write a tokenizer's files for transformers, and check that transformers tokenizes with them as training did.

Also the files of a copy.
"""

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrain.data.tokenizers.convert_sentencepiece import json_bytes, sentencepiece_files, to_bytes, tokenizer_config
from pretrain.data.tokenizers.huggingface_tokenizer import byte_library, read_library
from pretrain.data.tokenizers.special_tokens import TokenIds, read_object
from pretrain.data.tokenizers.tokenizer import TOKENIZER_FILES, Tokenizer, load_tokenizer
from pretrain.errors import ConfigError, shorten

_CONFIG = "tokenizer_config.json"
_OWN_CLASS = ("qwen2",)
"""model types for which transformers 5.23 ignores the tokenizer_class of tokenizer_config.json, and rebuilds the
tokenizer with a class of its own (MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS in models/auto/tokenization_auto.py).
It does not if there is an "auto_map". test_export_tokenizer.py has a test that fails once this is not needed."""
_MAX_PIECES = 2000  # pieces of the vocabulary that the check tokenizes


def export_tokenizer(tokenizer: str | Path, folder: Path, *, max_length: int | None = None,
                     texts: Sequence[str] = ()) -> TokenIds:
    """Write the files from which `transformers.AutoTokenizer` loads `tokenizer`, and return its special tokens.

    `tokenizer` is what `load_tokenizer` accepts. `folder` should already contain the model's config.json, because
    AutoTokenizer's choice of a class depends on it. A published tokenizer keeps its own tokenizer_config.json, except
    for a class with which transformers would tokenize differently. For other tokenizers this file is written, with
    `max_length` as the longest text in tokens. AutoTokenizer and `load_tokenizer` must then give the same tokens for
    `texts` and for many other texts. For rare texts that differ, `notes` has a line.

    Raises ConfigError, and leaves none of the files, if the tokens of ordinary texts would differ.
    """
    loaded = load_tokenizer(tokenizer)
    files = _files(loaded, max_length)
    try:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        with contextlib.suppress(ConfigError):
            ids = _check(loaded, folder, texts)
            if not ids.notes and ids.vocab_size <= loaded.vocab_size:
                return ids
        (folder / _CONFIG).write_bytes(_with_general_class(files[_CONFIG], folder))
        return _check(loaded, folder, texts)
    except BaseException:
        for name in files:
            (folder / name).unlink(missing_ok=True)
        raise


def _files(loaded: Tokenizer, max_length: int | None) -> dict[str, bytes]:
    """Return the contents of the files to write, by name."""
    if loaded.is_bytes:
        bytes_library = byte_library()
        config = tokenizer_config(bytes_library, loaded.ids, max_length=max_length)
        return {"tokenizer.json": to_bytes(bytes_library), _CONFIG: json_bytes(config)}
    if loaded.exported_files is not None:
        return loaded.exported_files(max_length)
    content, where = loaded.path.read_bytes(), f"--tokenizer {loaded.path}"
    if loaded.path.suffix != ".json":
        return sentencepiece_files(content, where, max_length=max_length)
    library = read_library(loaded.path, content)
    published = read_object(loaded.path.with_name(_CONFIG))
    ours = tokenizer_config(library, loaded.ids, max_length=max_length)
    if published:  # complete its special tokens
        missing = {key: value for key, value in ours.items() if key.endswith("_token") and isinstance(value, str)
                   and published.get(key) is None}
        ours = published | missing
    files = {name: loaded.path.with_name(name).read_bytes() for name in TOKENIZER_FILES
             if published and loaded.path.with_name(name).is_file()}
    return files | {"tokenizer.json": to_bytes(library) if loaded.path.name == "vocab.json" else content,
                    _CONFIG: json_bytes(ours)}


def _with_general_class(content: bytes, folder: Path) -> bytes:
    """Return a tokenizer_config.json with which AutoTokenizer loads tokenizer.json as it is."""
    config = json.loads(content) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.pop("auto_map", None)  # names a class in a Python file, which is not exported
    if read_object(folder / "config.json").get("model_type") in _OWN_CLASS:
        config["auto_map"] = {"AutoTokenizer": ["PreTrainedTokenizerFast", None]}
    return json_bytes(config)


def _check(loaded: Tokenizer, folder: Path, texts: Sequence[str]) -> TokenIds:
    """Compare AutoTokenizer with the tokenizer, and return the special tokens that transformers has.

    Raises ConfigError for other tokens of ordinary texts, or for another end-of-document token.
    """
    where = f"--tokenizer {loaded.path}"
    theirs = _load(folder, where)
    added = list(theirs.added_tokens_encoder)
    pieces = _pieces(loaded)
    ordinary = [*ORDINARY, *texts, *(piece for piece in pieces if piece not in added)]
    rare = [*RARE, *added, *(f"a {name} b{name}{name}" for name in added),
            *map("".join, zip(pieces, pieces[::-1], strict=True))]
    if differing := _differing(loaded, theirs, ordinary):
        raise _difference(where, loaded, theirs, differing[0])
    if theirs.eos_token_id != loaded.ids.eos:
        raise ConfigError(where, problem=f"export would change the end-of-document token from {loaded.ids.eos} to "
                          f"{theirs.eos_token_id}", remedy="correct the eos_token of its tokenizer_config.json")
    notes = []
    if differing := _differing(loaded, theirs, rare):
        example = min(differing, key=len)
        notes = [f"{where}: transformers tokenizes some rare texts differently, for example {shorten(ascii(example))}: "
                 "its tokenizers library has no exact equivalent"]
    return replace(_ids(theirs), notes=tuple(notes))


def _load(folder: Path, where: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise any class
        raise ConfigError(where, problem=f"transformers cannot load the exported tokenizer: {error}") from None


def _ids(theirs: Any) -> TokenIds:
    vocab_size = max(theirs.get_vocab().values(), default=-1) + 1
    return TokenIds(vocab_size, theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id, theirs.unk_token_id)


def _pieces(loaded: Tokenizer) -> list[str]:
    """Return the texts of single tokens."""
    step = max(loaded.vocab_size // _MAX_PIECES, 1)
    return [loaded.decode([token]) for token in range(0, loaded.vocab_size, step)]


def _differing(loaded: Tokenizer, theirs: Any, texts: Iterable[str]) -> list[str]:
    return [text for text in texts if _encode(theirs, text) != loaded.encode(text)]


def _encode(theirs: Any, text: str) -> list[int]:
    return list(theirs(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"])


def _difference(where: str, loaded: Tokenizer, theirs: Any, text: str) -> ConfigError:
    return ConfigError(where, problem=f"export would tokenize differently: {shorten(ascii(text), 60)} gives the tokens "
                       f"{loaded.encode(text)[:8]}, and {_encode(theirs, text)[:8]} in transformers",
                       remedy="transformers' tokenizers library has no equivalent for this tokenizer")


ORDINARY = (
    "", "a", " ", "The quick brown fox jumps over the lazy dog.", " leading space", "trailing space ", "two  spaces",
    "   three leading", "a\nb", "\n", "\n\n", "a\n\n\nb\n", "\ta\tb", "a \n b", "a\r\nb\r\n",
    "Hello, world! It's 9:30.",
    "def main() -> None:\n    for i in range(10):\n        print(f'{i:>3}')\n",
    "#include <stdio.h>\nint main(void) {\n\treturn 0; // done\n}\n", '{"key": [1, 2.5e-3, null], "b": "\\n"}',
    "<p class=\"x\">1 &lt; 2</p>", "https://example.org/a_b?c=d&e=%20#f", "x = 12345678901234567890 + 3.14159",
    "naïve café, Ünïcödé, straße, señor, œuvre, ţară, Żółć", "Привет, мир! Съешь ещё этих мягких булок.",
    "Καλημέρα κόσμε", "你好,世界。這是一個測試。", "こんにちは世界。カタカナ", "안녕하세요 세계",
    "مرحبا بالعالم", "שלום עולם",
    "नमस्ते दुनिया", "สวัสดีชาวโลก", "Xin chào thế giới", "Hello 👋 world 🎉", "½ + ¼ = ¾, x² → ∞, “quotes” — dash …",
    "ALL CAPS and CamelCase and snake_case", "I'm you're we've they'll he'd", "a,b;c:d.e!f?g(h)i[j]k{l}m",
)  # fmt: skip

RARE = (
    "  a  b  ", "\t\t", "\x0b\x0c", "a\x00b", "\x7f\x80\x9f", "\u2581", " \u2581a\u2581 ", "\u00a0a\u3000b", "\ufeffa",
    "\ufffd", "\ufffe\uffff", "\u200b\u200d\u2060", "\U0010ffff\ue000", "e\u0301 a\u0308\u0323", "\u304b\u3099",
    "\u1112\u1161\u11ab", "\ufb01\u0301", "\u212b\u0301", "\ufb2a\u05b0", "①②㎏ﬁﬂ",
    "\uff46\uff55\uff4c\uff4c\u3000\uff11",
    "👩\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 👍🏽", "<s></s><unk><pad>", "<|endoftext|>", "a<|endoftext|>b", "<0x41><0x0A>",
    *(character * count for character in " a0-=\n#" for count in (3, 7, 16, 61)), "=== === ====  =\n" * 3,
    "0101010010001000" * 4, "abababa aaaa abab" * 3,
)  # fmt: skip


def files_to_copy(tokenizer: Tokenizer) -> dict[str, Path]:
    """Return name -> path of the files from which `load_tokenizer` loads the same tokenizer."""
    if tokenizer.name_of_copy:
        return {tokenizer.name_of_copy: tokenizer.path}
    if tokenizer.path.suffix != ".json":
        return {"tokenizer.model": tokenizer.path}
    main = tokenizer.path.name if tokenizer.path.name in TOKENIZER_FILES else "tokenizer.json"
    files = {main: tokenizer.path}
    for name in TOKENIZER_FILES:  # special tokens, and the merges of a vocab.json
        if name not in (main, "tokenizer.json", "tokenizer.model") and tokenizer.path.with_name(name).is_file():
            files[name] = tokenizer.path.with_name(name)
    return files
