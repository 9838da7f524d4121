"""Encoding and decoding give back every text exactly. Text is never encoded as special tokens."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from pretrain.data.text_inputs.chunk import ReadSettings
from pretrain.data.tokenizers.special_tokens import EOD_PIECE, TokenIds, check_tokenizer_fits
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.data.tokenizers.train_tokenizer import train_sentencepiece
from pretrain.errors import ConfigError
from tests.support.launch import ROOT
from tests.support.rejection import rejection
from tests.wrong_inputs.case import main_of

SOURCES = [str(path) for path in (Path(json.__file__).parent).glob("*.py")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_sentencepiece(SOURCES, tmp_path_factory.mktemp("tok"), vocab_size=600)


@pytest.fixture(scope="module")
def huggingface(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    library = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    library.enable_truncation(5)
    library.enable_padding()
    folder = tmp_path_factory.mktemp("hf")
    library.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def byte_level(words: Any, normalizer: Any = None) -> Library:
    """Return a trained byte-level BPE with 500 tokens."""
    library = Library(models.BPE())
    library.pre_tokenizer, library.decoder = words, decoders.ByteLevel()
    if normalizer:
        library.normalizer = normalizer
    library.train(SOURCES, trainers.BpeTrainer(vocab_size=500, special_tokens=[EOD_PIECE, "<|im_end|>"],
                                               show_progress=False, limit_alphabet=256,
                                               initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return library


HARD = [
    "", " ", "  a  b  ", "\n", "\n\n\n", " \n ", "\t\ta\t", "a\r\nb\r\rc", "\0", "a\0b", "\x0b\x0c\x1f\x7f",
    "\ufeffbom", "\ufffd", "\ufffe\uffff", "\u2047", "\x85\u2028\u2029\xa0\u3000", "\U0010ffff\ue000",
    "e\u0301 é", "👩\u200d👩\u200d👧🏳\ufe0f\u200d🌈", "12345 1٣", "مرحبا שלום 你好", "a" * 5000, " " * 5000,
    "\u2581", " \u2581 ", "\u2581\n\u2581", "\u2581\u2581a", "\u2585",
    "<unk>", "<s></s>", "<0x41><0x0A>", EOD_PIECE,
]  # fmt: skip


def random_texts(count: int) -> list[str]:
    chance = random.Random(0)
    alphabets = [
        [" ", "\n", "\t", "\r", "\u2581", "\u2585", "a", "0", "\0"],
        [chr(code) for code in range(0x20, 0x7F)],
        ["<", ">", "0", "x", "A", "|", "s", "/", "endoftext", "unk", EOD_PIECE],
        ["é", "e", "\u0301", "\u200d", "👩", "🏽", "\ufe0f", "ﬁ", "Å", "\u212b", " "],
    ]

    def character() -> str:
        while 0xD800 <= (code := chance.randrange(0x110000)) < 0xE000:
            pass
        return chr(code)

    def text() -> str:
        alphabet = chance.choice([*alphabets, None])
        return "".join(chance.choice(alphabet) if alphabet else character() for _ in range(chance.randrange(40)))

    return [text() for _ in range(count)]


@pytest.mark.parametrize("kind", ["tokenizer", "huggingface"])
def test_any_text_is_decoded_exactly(kind: str, request: pytest.FixtureRequest) -> None:
    loaded: Tokenizer = request.getfixturevalue(kind)
    for text in HARD + random_texts(3000):
        tokens = loaded.encode(text)
        assert loaded.decode(tokens) == text
        assert loaded.eod_token not in tokens
        assert all(0 <= token < loaded.vocab_size for token in tokens)


@pytest.mark.parametrize("kind", ["tokenizer", "huggingface"])
def test_lone_surrogates_are_rejected(kind: str, request: pytest.FixtureRequest) -> None:
    loaded: Tokenizer = request.getfixturevalue(kind)
    with pytest.raises(ConfigError, match=r"lone surrogate U\+D800 at character 1"):
        loaded.encode("a\ud800")


@pytest.mark.parametrize("kind", ["tokenizer", "huggingface"])
def test_the_end_of_document_token_decodes_to_no_text(kind: str, request: pytest.FixtureRequest) -> None:
    loaded: Tokenizer = request.getfixturevalue(kind)
    assert loaded.eod_token is not None
    assert loaded.decode([*loaded.encode("a"), loaded.eod_token, *loaded.encode("b")]) == "ab"


def test_trained_pieces_of_digits_and_spaces(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.eod_token) == (600, 1)
    assert len(tokenizer.encode("\n\t")) == 2
    assert len(tokenizer.encode("1234")) == 4, "one piece per digit"
    assert len(tokenizer.encode("        ")) <= 2, "runs of spaces have pieces"


def test_training_is_reproducible_and_the_fingerprint_hashes_the_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    again = train_sentencepiece(SOURCES, tmp_path, vocab_size=600)
    names = ["tokenizer.json", "tokenizer.model", "tokenizer.vocab", "tokenizer_config.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        assert (tmp_path / name).read_bytes() == tokenizer.path.with_name(name).read_bytes()
    assert again.fingerprint == tokenizer.fingerprint
    assert train_sentencepiece(SOURCES, tmp_path, vocab_size=601).fingerprint != tokenizer.fingerprint


def test_training_uses_long_lines_and_lines_with_reserved_characters(tmp_path: Path) -> None:
    """SentencePiece itself silently drops long lines and lines with U+2585."""
    text = "walrus \u2585 walrus hippopotamus zebrafish " * 4000
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}), encoding="utf-8")
    loaded = train_sentencepiece([str(tmp_path / "a.jsonl")], tmp_path, vocab_size=300)
    assert len(loaded.encode(" walrus")) <= 2


def test_max_megabytes_samples_all_files(tmp_path: Path) -> None:
    for word in ("walrus", "giraffe"):
        (tmp_path / f"{word}.txt").write_text(f"the {word}\n" * 20_000)
    files = [str(tmp_path / "walrus.txt"), str(tmp_path / "giraffe.txt")]
    loaded = train_sentencepiece(files, tmp_path, vocab_size=300, max_megabytes=0.05)
    assert len(loaded.encode("the walrus")) <= 3
    assert len(loaded.encode("the giraffe")) <= 3


def test_errors_of_the_text_end_the_training_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SentencePiece raises a RuntimeError instead, which holds the error as text."""
    wrong = tmp_path / "a.jsonl"
    wrong.write_text('{"text": "the quick brown fox jumps over lazy dogs"}\n{"text": null}\n' * 99)
    own = rf"^{wrong}:2: the value of 'text' is null\. [^-]*"
    with pytest.raises(ConfigError, match=f"{own}$"):
        train_sentencepiece([str(wrong)], tmp_path / "out", vocab_size=300)
    with pytest.raises(ConfigError, match=rf"{own}--on_error skip leaves out such documents\.$"):
        train_sentencepiece([str(wrong)], tmp_path / "out", vocab_size=300, reading=ReadSettings(can_skip=True))
    train_sentencepiece([str(wrong)], tmp_path / "out", vocab_size=300, reading=ReadSettings(skip_errors=True))
    assert load_tokenizer(tmp_path / "out").vocab_size == 300

    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("pretrain.data.tokenizers.train_tokenizer.read_pieces", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_sentencepiece([str(wrong)], tmp_path / "out", vocab_size=300)


def test_eos_is_read_from_tokenizer_config_json(huggingface: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(huggingface.path.read_bytes())
    for eos in ("a", {"content": "a"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert [load_tokenizer(tmp_path).eod_token] == huggingface.encode("a")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("none", None, "there is no such file"),
    ("a.model", b"nonsense", "SentencePiece cannot read its 8 bytes"),
    ("a.model", b"", "SentencePiece cannot read its 0 bytes"),
    ("a.json", b"{}", "it is not a tokenizer.json"),
    ("a.json", b"\xff", "it is not a tokenizer.json"),
    (".", None, "the folder contains neither tokenizer.model nor tokenizer.json"),
])  # fmt: skip
def test_bad_tokenizers_are_rejected(tmp_path: Path, name: str, content: bytes | None, message: str,
                                     capfd: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path / name)
    assert capfd.readouterr().err == ""


def test_the_tool_trains_without_warnings(tmp_path: Path) -> None:
    (tmp_path / "doubt").write_text('{"text": "a"}\nwords\n')
    words = [*SOURCES, str(tmp_path / "doubt"), "--format", "text", "--out", str(tmp_path / "new" / "tok"),
             "--vocab-size", "400", "--threads", "1"]
    done = subprocess.run([sys.executable, "tools/train_tokenizer.py", *words], capture_output=True, text=True,
                          cwd=ROOT, timeout=900)
    assert (done.returncode, done.stderr) == (0, "")
    assert load_tokenizer(tmp_path / "new" / "tok").vocab_size == 400


@pytest.mark.parametrize(("words", "message"), [
    (["SRC", "--vocab_size", "99999"], "--vocab_size: found 99999; expected at most"),
    (["CHARS", "--vocab_size", "300"], "--vocab_size: 300 pieces are too few for all frequent characters"),
    (["SRC", "--threads", "0"], "--threads: found '0'"),
    (["SRC", "--max_megabytes", "0"], "--max_megabytes: found '0'"),
    (["nowhere.txt"], "nowhere.txt: there is no such file"),
    (["EMPTY"], "empty.txt: there is no text"),
    (["BLANK"], "SentencePiece training: it failed: "),
    ([], "INPUT: neither an input nor --dataset is given"),
    (["SRC", "--vocab-sise", "4"], 'Did you mean "--vocab_size"?'),
    (["SRC", "--vocab_size", "many"], "--vocab_size: found 'many'; expected a whole number from 300"),
    (["SRC", "--out", "EMPTY"], "empty.txt is a file"),
])  # fmt: skip
def test_the_tool_rejects_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str],
                                      message: str) -> None:
    contents = {"EMPTY": "", "BLANK": "\n\n", "CHARS": " ".join(chr(0x4E00 + code) for code in range(3000))}
    paths = {"SRC": SOURCES[0], **{name: str(tmp_path / f"{name.lower()}.txt") for name in contents}}
    for name, content in contents.items():
        Path(paths[name]).write_text(content, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["train_tokenizer.py", "--vocab_size", "320", "--out", str(tmp_path / "tok"),
                                      *(paths.get(word, word) for word in words)])
    assert message in rejection(main_of("tokenizer"))


def test_the_end_of_document_token_is_found(tmp_path: Path) -> None:
    library = Library(models.WordLevel({EOD_PIECE: 0, "b": 1, "a": 2}, unk_token=EOD_PIECE))
    library.save(str(tmp_path / "tokenizer.json"))
    token = library.token_to_id("a")

    def eos(file: str, **values: Any) -> int | None:
        (tmp_path / file).write_text(json.dumps(values))
        found = load_tokenizer(tmp_path).eod_token
        (tmp_path / file).unlink()
        return found

    assert eos("config.json", eos_token_id=token) == 0  # its usual name is more reliable than the model's config.json
    assert eos("special_tokens_map.json", eos_token="a") == token
    content = (tmp_path / "tokenizer.json").read_text().replace(EOD_PIECE, "<|other|>")
    (tmp_path / "tokenizer.json").write_text(content)
    assert eos("generation_config.json", eos_token_id=[token, 1]) == token
    assert eos("config.json", eos_token_id=token) == token
    assert eos("config.json", eos_token_id=50256) is None


def test_fit_of_tokenizer_and_model() -> None:
    ids = TokenIds(100, bos=None, eos=5)

    def check(config: dict[str, Any], vocab_size: int = 100) -> list[str]:
        return check_tokenizer_fits(ids, config, vocab_size=vocab_size, where="tok", remedy="train another")

    assert check({"bos_token_id": 0, "eos_token_id": [4, 5]}) == check({}) == []
    assert check({"eos_token_id": 0}) == [
        "the config.json's eos_token_id is 0, and the tokenizer's is 5: the tokenizer's is used"]
    with pytest.raises(ConfigError, match=r"tok: its largest token is 99, .* only 99 tokens\. Train another"):
        check({}, vocab_size=99)
