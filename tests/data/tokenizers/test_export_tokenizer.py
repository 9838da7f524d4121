"""transformers.AutoTokenizer loads an exported tokenizer, and gives the same tokens as in training for every text."""

import functools
import io
import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceTrainer
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library
from transformers import AutoTokenizer

from pretrain.data.tokenizers.export_tokenizer import export_tokenizer
from pretrain.data.tokenizers.huggingface_tokenizer import _QWEN_WORDS
from pretrain.data.tokenizers.special_tokens import EOD_PIECE, TokenIds
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.data.tokenizers.train_tokenizer import train_sentencepiece
from pretrain.errors import ConfigError
from tests.data.tokenizers.test_tokenizer import HARD, SOURCES, byte_level, random_texts

LINES = [line for path in SOURCES for line in Path(path).read_text().splitlines() if line.strip()] + [
    "naïve café straße Å ½ ﬁne", "Привет, мир!", "你好,世界。", "こんにちは世界", "안녕하세요", "مرحبا", "👋 🎉 x²"] * 3
SYMBOLS = ["<sym>", "[SEP]"]
DECOMPOSED = [unicodedata.normalize("NFD", text) for text in ("Ünïcödé tiếng Việt", "がぎぐ ガギグ", "안녕하세요")]
TEXTS = [*HARD, *SYMBOLS, *DECOMPOSED, *random_texts(500), *LINES[:100],
         *(c * n for c in " a=0\n" for n in range(2, 40)),
         *(f"{a}{b}{c}" for a in ("", " ", "x", "\n") for b in ("<sym>", "</s>", "[SEP]<s>") for c in (" y", "</s>"))]
FAMILIES = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "gemma2")  # each has another class of tokenizers
EXACT_TEXT = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
LLAMA = {"model_type": "bpe", "byte_fallback": True, **EXACT_TEXT}


def train(path: Path, **settings: Any) -> Path:
    written = io.BytesIO()
    SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=written, minloglevel=3, num_threads=1,
                               hard_vocab_limit=False, **{"vocab_size": 700, **settings})
    path.write_bytes(written.getvalue())
    return path


def model_folder(path: Path, model_type: str = "llama") -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return path


def differing(loaded: Tokenizer, folder: Path, *, split_special_tokens: bool | None = None) -> list[str]:
    """Return the texts that AutoTokenizer encodes or decodes differently."""
    theirs = AutoTokenizer.from_pretrained(folder)
    options = {} if split_special_tokens is None else {"split_special_tokens": split_special_tokens}

    def differs(text: str) -> bool:
        tokens = loaded.encode(text)
        decodes = loaded.ids.unk in tokens or theirs.decode(tokens, skip_special_tokens=True) == loaded.decode(tokens)
        return theirs(text, add_special_tokens=False, verbose=False, **options)["input_ids"] != tokens or not decodes

    return [text for text in TEXTS if differs(text)]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_sentencepiece(SOURCES, tmp_path_factory.mktemp("ours"), vocab_size=600)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_our_tokenizer_is_exact_with_every_family(ours: Tokenizer, tmp_path: Path, model_type: str) -> None:
    folder = model_folder(tmp_path / "hf", model_type)
    assert export_tokenizer(ours.path, folder, max_length=128) == TokenIds(600, bos=None, eos=1, pad=None, unk=0)
    assert differing(ours, folder) == []
    theirs = AutoTokenizer.from_pretrained(folder)
    assert (theirs.eos_token, theirs.all_special_ids, theirs.model_max_length) == (EOD_PIECE, [1, 0], 128)
    assert (theirs.bos_token_id, theirs.pad_token_id, len(theirs)) == (None, None, 600)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert [config[key] for key in ("add_bos_token", "add_prefix_space")] == [False, False]  # llama.cpp reads these
    assert theirs("a").input_ids == ours.encode("a")  # as in training, no token is added
    assert theirs(EOD_PIECE, split_special_tokens=False).input_ids == [1]
    assert all(theirs.decode(ours.encode(text)) == text for text in HARD)


def test_the_folder_of_the_training_tool_works_in_transformers(ours: Tokenizer) -> None:
    folder = ours.path.parent
    assert differing(ours, folder) == []
    read = load_tokenizer(folder)
    assert (read.path, read.fingerprint) == (ours.path, ours.fingerprint)


def test_qwen2_ignores_the_tokenizer_class_without_the_workaround(ours: Tokenizer, tmp_path: Path) -> None:
    """If this fails, transformers honors tokenizer_class: delete _OWN_CLASS in export_tokenizer.py."""
    folder = model_folder(tmp_path / "hf", "qwen2")
    export_tokenizer(ours.path, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["auto_map"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert AutoTokenizer.from_pretrained(folder)("  a").input_ids != ours.encode("  a")


@pytest.mark.parametrize("settings", [
    pytest.param(LLAMA | {"split_digits": True}, id="llama"),
    pytest.param(LLAMA | {"add_dummy_prefix": False, "user_defined_symbols": ["\n", "\n\n", *SYMBOLS, "▁▁", "▁▁▁"]},
                 id="gemma"),
    pytest.param({"model_type": "bpe", "normalization_rule_name": "identity"}, id="collapsed spaces"),
    pytest.param(LLAMA | {"user_defined_symbols": ["\n", "\t"]}, id="symbols of one character"),
    pytest.param(LLAMA | {"pad_id": 3, "bos_id": -1, "eos_id": 5, "unk_id": 0}, id="other ids"),
])  # fmt: skip
def test_bpe_models_without_normalization_are_exact(tmp_path: Path, settings: dict[str, Any]) -> None:
    loaded = load_tokenizer(train(tmp_path / "m.model", **settings))
    folder = model_folder(tmp_path / "hf")
    assert export_tokenizer(loaded.path, folder) == loaded.ids
    assert differing(loaded, folder) == []
    assert (folder / "tokenizer.model").read_bytes() == loaded.path.read_bytes()
    assert load_tokenizer(folder).fingerprint == loaded.fingerprint


def has_marks(text: str) -> bool:
    return any(unicodedata.category(character)[0] == "M" for character in text)


def is_run(text: str) -> bool:
    """Return whether some character is there three times in a row: several sequences of pieces are equally likely."""
    return re.search(r"(.)\1\1", text, re.DOTALL) is not None


@pytest.mark.parametrize(("settings", "is_rare"), [
    pytest.param({"model_type": "bpe"}, has_marks, id="default bpe"),
    pytest.param({"model_type": "unigram"}, lambda text: has_marks(text) or is_run(text), id="default unigram"),
    pytest.param({"model_type": "unigram", "byte_fallback": True, "add_dummy_prefix": False, **EXACT_TEXT}, is_run,
                 id="exact unigram"),
    pytest.param(LLAMA | {"user_defined_symbols": SYMBOLS}, SYMBOLS.__contains__, id="symbols and dummy prefix"),
])  # fmt: skip
def test_rare_texts_that_differ_are_noted(tmp_path: Path, settings: dict[str, Any],
                                          is_rare: Callable[[str], bool]) -> None:
    loaded = load_tokenizer(train(tmp_path / "m.model", **settings))
    folder = model_folder(tmp_path / "hf")
    ids = export_tokenizer(loaded.path, folder, texts=LINES[:200])
    assert len(ids.notes) == 1
    assert "transformers tokenizes some rare texts differently, for example" in ids.notes[0]
    found = differing(loaded, folder)
    assert found
    assert [text for text in found if not is_rare(text)] == []
    assert [text for text in found if text in DECOMPOSED] == []


@pytest.mark.parametrize(("settings", "message"), [
    ({"model_type": "char"}, "no equivalent for a char model"),
    ({"model_type": "word"}, "no equivalent for a word model"),
    ({"treat_whitespace_as_suffix": True}, "no equivalent for treat_whitespace_as_suffix"),
    ({"denormalization_rule_tsv": "RULES"}, "no equivalent for rules of its own for decoding"),
    ({"normalization_rule_tsv": "RULES", "remove_extra_whitespaces": False},
     "export would tokenize differently: .* gives the tokens"),
])  # fmt: skip
def test_models_without_an_equivalent_are_rejected(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    rules = tmp_path / "rules.tsv"
    rules.write_text("6D 61 69 6E\t78\n" "E9\t65 65\n")  # "main" becomes "x"
    settings = {key: str(rules) if value == "RULES" else value for key, value in settings.items()}
    path = train(tmp_path / "m.model", **settings)
    folder = model_folder(tmp_path / "hf")
    with pytest.raises(ConfigError, match=message):
        export_tokenizer(path, folder)
    assert [file.name for file in folder.iterdir()] == ["config.json"]


@functools.cache
def gpt2() -> Library:
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


@functools.cache
def qwen2() -> Library:
    return byte_level(pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_QWEN_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), normalizers.NFC())


TOOL_CALL = {"content": "<tool>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
             "special": False}
GPT2_CONFIG = {"tokenizer_class": "GPT2Tokenizer", "bos_token": EOD_PIECE, "unk_token": EOD_PIECE,
               "eos_token": {"__type": "AddedToken", **TOOL_CALL, "content": EOD_PIECE, "special": True}}
QWEN_CONFIG = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": EOD_PIECE,
               "bos_token": None, "unk_token": None, "added_tokens_decoder": {"500": TOOL_CALL}}


@pytest.mark.parametrize(("make", "config", "model_type", "ids"), [
    pytest.param(gpt2, GPT2_CONFIG, "gpt2", TokenIds(500, 0, 0, None, 0), id="gpt2"),
    pytest.param(gpt2, GPT2_CONFIG | {"tokenizer_class": "GPTNeoXTokenizer"}, "gpt_neox", TokenIds(500, 0, 0, None, 0),
                 id="neox"),
    pytest.param(qwen2, QWEN_CONFIG, "qwen2", TokenIds(501, None, 1, 0, None), id="qwen2"),
    pytest.param(qwen2, {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_end|>"}, "llama",
                 TokenIds(500, 1, 0, None, None), id="llama3"),
])  # fmt: skip
@pytest.mark.parametrize("with_json", [True, False])
def test_published_byte_level_tokenizers(tmp_path: Path, make: Callable[[], Library], config: dict[str, Any],
                                         model_type: str, ids: TokenIds, with_json: bool) -> None:
    library, source = make(), model_folder(tmp_path / "source", model_type)
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    if with_json:
        library.save(str(source / "tokenizer.json"))
    else:
        library.model.save(str(source))  # vocab.json and merges.txt
        if config["tokenizer_class"] not in ("GPT2Tokenizer", "Qwen2Tokenizer"):
            with pytest.raises(ConfigError, match=r"vocab\.json and merges\.txt of a \w+ are not supported"):
                load_tokenizer(source)
            return
    loaded, folder = load_tokenizer(source), model_folder(tmp_path / "hf", model_type)
    assert export_tokenizer(source, folder) == loaded.ids == ids
    assert differing(loaded, folder, split_special_tokens=True) == []
    if config["tokenizer_class"] != "GPTNeoXTokenizer":  # this class normalizes, and tokenizer.json does not
        assert differing(loaded, source, split_special_tokens=True) == []
        written = json.loads((folder / "tokenizer_config.json").read_text())
        assert written == config | {"eos_token": config.get("eos_token", EOD_PIECE)}
    assert loaded.encode(EOD_PIECE) != [0]


def llama2_folder(path: Path) -> Path:
    """Write a folder as Llama 2 and Mistral publish it: tokenizer.model, and a tokenizer.json made from it."""
    model = train(path.with_suffix(".model"), **LLAMA)
    export_tokenizer(model, model_folder(path, "mistral"))
    library = json.loads((path / "tokenizer.json").read_text())
    vocab, merges = library["model"]["vocab"], library["model"]["merges"]
    library["model"]["vocab"] = {piece.replace(" ", "\u2581"): token for piece, token in vocab.items()}
    library["model"]["merges"] = [[piece.replace(" ", "\u2581") for piece in pair] for pair in merges]
    library["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"}, {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}
    library["decoder"]["decoders"].insert(
        0, {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "})
    (path / "tokenizer.json").write_text(json.dumps(library))
    (path / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}))
    return path


def test_a_folder_with_both_files_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    folder = llama2_folder(tmp_path / "hf")
    loaded = load_tokenizer(folder)
    assert loaded.path.name == "tokenizer.json"
    assert differing(loaded, folder, split_special_tokens=True) == []
    model = load_tokenizer(folder / "tokenizer.model")
    assert [text for text in TEXTS if model.encode(text) != loaded.encode(text)] == []
    assert model.ids == loaded.ids


def test_an_export_avoids_a_class_that_changes_the_tokens(tmp_path: Path) -> None:
    """With model type llama, transformers 5.23 rebuilds this tokenizer, and drops a leading space."""
    source = llama2_folder(tmp_path / "source")
    loaded, folder = load_tokenizer(source), model_folder(tmp_path / "hf")
    assert export_tokenizer(source, folder) == loaded.ids
    assert differing(loaded, folder, split_special_tokens=True) == []
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"]


def test_a_class_in_a_python_file_is_not_needed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    gpt2().save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "eos_token": EOD_PIECE}))
    folder = model_folder(tmp_path / "hf")
    assert export_tokenizer(source, folder) == TokenIds(500, eos=0)
    assert differing(load_tokenizer(source), folder, split_special_tokens=True) == []
    assert "auto_map" not in (folder / "tokenizer_config.json").read_text()


@pytest.mark.parametrize(("files", "message"), [
    ({"tekken.json": b"{}"}, "a tekken file"),
    ({"vocab.json": b"{}"}, r"vocab\.json is a vocabulary without merges\.txt, which is not supported"),
    ({"vocab.json": b"{}", "merges.txt": b"a b\n"}, "not the files of a byte-level BPE"),
    ({"vocab.json": b"[]", "merges.txt": b""}, "not the files of a byte-level BPE"),
    ({"tokenizer.json": None, "tokenizer_config.json": b'{"added_tokens_decoder": {"0": 1}}'}, "cannot be read"),
    ({"tokenizer.json": None, "added_tokens.json": b'{"<new>": 700}'},
     "the added token '<new>' gets the id 500, and this file says 700"),
    ({"tokenizer.json": None, "tokenizer_config.json": b'{"eos_token": "<none>"}'},
     "export would change the end-of-document token|transformers cannot load"),
])  # fmt: skip
def test_wrong_folders_are_rejected_in_one_line(tmp_path: Path, files: dict[str, bytes | None], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(gpt2().to_str().encode() if content is None else content)
    with pytest.raises(ConfigError, match=message) as caught:
        export_tokenizer(tmp_path, model_folder(tmp_path / "hf"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "values"), [
    ("added_tokens.json", {"<pad>": 600}), ("tokenizer_config.json", {"added_tokens_decoder": {"600": TOOL_CALL}})])
def test_tokens_added_to_a_sentencepiece_model_are_rejected(ours: Tokenizer, tmp_path: Path, name: str,
                                                            values: dict[str, Any]) -> None:
    (tmp_path / "tokenizer.model").write_bytes(ours.path.read_bytes())
    (tmp_path / name).write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="the files next to it add token 600 to its 600 tokens"):
        load_tokenizer(tmp_path)
    (tmp_path / name).write_text(json.dumps(values).replace("600", "599"))
    assert load_tokenizer(tmp_path).vocab_size == 600
