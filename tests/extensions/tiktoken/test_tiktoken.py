"""Tiktoken files: tokens, special tokens, exports, and how an encoding is found.

The published files cannot be downloaded here. The files of these tests have ranks that tiktoken's own trainer made,
with the patterns of the published encodings.
"""

import base64
import hashlib
import json
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
import tiktoken_ext.openai_public
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiktoken._educational import bpe_train
from transformers import AutoTokenizer

from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.tokenizers.export_tokenizer import ORDINARY, RARE, export_tokenizer, files_to_copy
from pretrain.data.tokenizers.special_tokens import TokenIds
from pretrain.data.tokenizers.tokenizer import Tokenizer, absolute_tokenizer, file_of_tokenizer, load_tokenizer
from pretrain.errors import ConfigError
from pretrain.extensions.tiktoken import encodings as tiktoken_encodings
from tests.support.launch import ROOT
from tests.support.programs import run_program, run_programs

ENCODINGS = tiktoken_encodings.ENCODINGS
TRAINING = ("def train(model, data):\n    for step in range(1000):\n        loss = model(data[step])\n" * 3 +
            "The quick brown fox doesn't jump; it's LAZY, isn't it? \u4f60\u597d\u4e16\u754c \u043f\u0440\u0438 " * 3)
TEXTS = st.lists(st.one_of(st.text(max_size=30), st.sampled_from(
    ["<|endoftext|>", "<|im_start|>", " " * 40, "\n \n", "\t", "12345678", "e\u0301", "\uac00\u1100", "'LL", "don't",
     "a/\n/"])), max_size=12).map("".join)  # fmt: skip
EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def file_of(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(text) + b" %d\n" % rank for text, rank in ranks.items())


@pytest.fixture(scope="module")
def ranks() -> dict[str, dict[bytes, int]]:
    return {name: bpe_train(TRAINING, 330, encoding.export_pattern, visualise=None)
            for name, encoding in ENCODINGS.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ranks: dict[str, dict[bytes, int]]) -> Path:
    """Files of ranks whose names end with their encodings."""
    base = tmp_path_factory.mktemp("tiktoken")
    for name, values in ranks.items():
        (base / f"mine.{name}.tiktoken").write_bytes(file_of(values))
    return base


@pytest.fixture(scope="module")
def loaded(folder: Path) -> dict[str, Tokenizer]:
    return {name: load_tokenizer(folder / f"mine.{name}.tiktoken") for name in ENCODINGS}


@pytest.mark.parametrize("name", ENCODINGS)
@EXAMPLES
@given(texts=st.lists(TEXTS, max_size=4))
def test_tokens_are_those_of_tiktoken(loaded: dict[str, Tokenizer], ranks: dict[str, dict[bytes, int]], name: str,
                                      texts: list[str]) -> None:
    reference = tiktoken.Encoding("reference", pat_str=ENCODINGS[name].export_pattern, mergeable_ranks=ranks[name],
                                  special_tokens={"<|endoftext|>": 330})
    form = "NFC" if name == "qwen" else None
    texts_read = [unicodedata.normalize(form, text) if form else text for text in texts]
    expected = [reference.encode_ordinary(text) for text in texts_read]
    tokens, ends = loaded[name].encode_batch(texts)
    assert tokens.dtype == np.uint16
    assert [part.tolist() for part in np.split(tokens, ends)[: len(texts)]] == expected
    eod = loaded[name].eod_token
    assert eod is not None
    assert [loaded[name].decode([*part, eod]) for part in expected] == texts_read


def test_facts_are_those_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patterns, special tokens, hashes and addresses of tiktoken_ext.openai_public."""
    read: list[tuple[str, str]] = []

    def load(url: str, expected_hash: str) -> dict[bytes, int]:
        read.append((url, expected_hash))
        return {}

    monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", load)
    for name in ("r50k_base", "p50k_base", "cl100k_base", "o200k_base"):
        theirs, ours = tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS[name](), ENCODINGS[name]
        assert (theirs["pat_str"], theirs["special_tokens"]) == (ours.pattern, ours.published_tokens)
        assert read.pop() == (ours.url, ours.sha256)
        if "explicit_n_vocab" in theirs:
            assert theirs["explicit_n_vocab"] == ours.num_ranks + len(theirs["special_tokens"])
    tokens = ENCODINGS["llama3"].special_tokens(128000, 128000)
    assert (len(tokens), tokens["<|end_of_text|>"], tokens["<|eot_id|>"]) == (256, 128001, 128009)
    assert tokens["<|reserved_special_token_250|>"] == 128255
    tokens = ENCODINGS["qwen"].special_tokens(151643, 151643)
    assert (len(tokens), tokens["<|im_end|>"], tokens["<|extra_204|>"]) == (208, 151645, 151850)


def test_special_tokens_and_fingerprints(loaded: dict[str, Tokenizer], folder: Path, tmp_path: Path) -> None:
    assert {name: tokenizer.ids for name, tokenizer in loaded.items()} == {
        **dict.fromkeys(("r50k_base", "p50k_base", "cl100k_base", "o200k_base"), TokenIds(331, eos=330)),
        "llama3": TokenIds(330 + 256, bos=330, eos=331), "qwen": TokenIds(330 + 208, eos=330)}
    path = folder / "mine.cl100k_base.tiktoken"
    (tmp_path / "ranks").write_bytes(path.read_bytes())
    named = load_tokenizer(f"cl100k_base:{tmp_path / 'ranks'}")
    assert named.name == f"cl100k_base:{tmp_path / 'ranks'}"
    assert named.fingerprint == loaded["cl100k_base"].fingerprint != load_tokenizer(f"llama3:{path}").fingerprint
    (name, source), = files_to_copy(named).items()  # of an average of checkpoints
    assert (name, source) == ("tokenizer.cl100k_base.tiktoken", tmp_path / "ranks")
    (tmp_path / name).write_bytes(source.read_bytes())
    assert load_tokenizer(tmp_path).fingerprint == named.fingerprint
    # a character of several tokens is decoded as soon as it is complete
    tokens = named.encode("\U0001f600")
    assert [named.decode(tokens[:count]) for count in range(1, 5)] == ["\ufffd"] * 3 + ["\U0001f600"]


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> bytes:
    """Make two files of these tests published ones. Their addresses cannot be reached."""
    content = (folder / "mine.cl100k_base.tiktoken").read_bytes()
    for name in ("cl100k_base", "llama3"):
        text = (folder / f"mine.{name}.tiktoken").read_bytes()
        if name == "llama3":
            text += base64.b64encode(b"a longer text") + b" 330\n"
        url = "http://127.0.0.1:9/ranks" if ENCODINGS[name].url else ""
        monkeypatch.setitem(ENCODINGS, name, replace(
            ENCODINGS[name], sha256=hashlib.sha256(text).hexdigest(), url=url, num_ranks=text.count(b"\n")))
        (tmp_path / f"{name}.file").write_bytes(text)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    return content


def test_published_files_are_found_by_their_content(published: bytes, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes((tmp_path / "llama3.file").read_bytes())  # Llama 3's file has this name
    assert load_tokenizer(tmp_path).ids == TokenIds(331 + 256, bos=331, eos=332)
    by_content = load_tokenizer(tmp_path / "cl100k_base.file")
    assert (by_content.vocab_size, by_content.eod_token) == (100277, 100257)
    assert by_content.fingerprint == hashlib.sha256(published).hexdigest()
    with pytest.raises(ConfigError, match=r"tiktoken cannot download http\S+ \(.*TIKTOKEN_CACHE_DIR"):
        load_tokenizer("cl100k_base")
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "cache" / hashlib.sha1(ENCODINGS["cl100k_base"].url.encode()).hexdigest()).write_bytes(published)
    by_name = load_tokenizer("cl100k_base")
    assert (by_name.name, by_name.has_file, by_name.fingerprint) == ("cl100k_base", False, by_content.fingerprint)
    assert by_name.encode("the quick") == by_content.encode("the quick")
    assert export_tokenizer("cl100k_base", tmp_path) == TokenIds(100277, eos=100257)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    for value in ("cl100k_base", str(tmp_path / "cl100k_base.file")):
        with pytest.raises(ConfigError, match=r"pip install 'ds-pretrain\[tiktoken\]'"):
            load_tokenizer(value)


@pytest.mark.parametrize("name", ENCODINGS)
def test_transformers_gives_the_same_tokens(folder: Path, loaded: dict[str, Tokenizer], tmp_path: Path,
                                            name: str) -> None:
    ids = export_tokenizer(folder / f"mine.{name}.tiktoken", tmp_path, max_length=64)
    assert ids == loaded[name].ids
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("<|endoftext|> a")["input_ids"] == loaded[name].encode("<|endoftext|> a")
    assert theirs.decode([*loaded[name].encode("a b"), ids.eos], skip_special_tokens=True) == "a b"
    again = load_tokenizer(tmp_path)
    assert all(again.encode(text) == loaded[name].encode(text) for text in (*ORDINARY, *RARE))
    assert again.eod_token == loaded[name].eod_token


DAMAGED: list[tuple[str, Any, str]] = [
    ("x.tiktoken", None, "none of the published ones. Such files do not say how they divide .* cl100k_base:"),
    ("o200k_base.tiktoken", None, "not the published file of o200k_base"),
    ("qwen.tiktoken", lambda text: b"x", "line 1 of the tiktoken file is not the base64 of a new token and its number"),
    ("tokenizer.model", lambda text: base64.b64encode(b"!") + b" 0\n", "it is a tiktoken file, and none of the"),
    ("x.llama3.tiktoken", lambda text: text[:500], "it has no token for the byte"),
    ("x.llama3.tiktoken", lambda text: text + b"YWJjZGVm 5\n", "two tokens have the same number"),
    ("x.llama3.tiktoken", lambda text: text + b"YWJj\n", "line 331 of the tiktoken file"),
    ("x.llama3.tiktoken", lambda text: text + b"!! 7\n", "line 331 of the tiktoken file"),
    ("x.llama3.tiktoken", lambda text: text[:-1] + b"0\n" + text.splitlines()[-1], "line 331 of the tiktoken file"),
]


@pytest.mark.parametrize(("name", "change", "message"), DAMAGED)
def test_unknown_and_damaged_files_are_rejected(folder: Path, tmp_path: Path, name: str, change: Any,
                                                message: str) -> None:
    text = (folder / "mine.llama3.tiktoken").read_bytes()
    (tmp_path / name).write_bytes(change(text) if change else text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_tokenizer(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_values_of_the_flag(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_tokenizer("o200k_base") == "o200k_base"
    assert absolute_tokenizer("qwen:x/y") == f"qwen:{tmp_path}/x/y"
    assert [file_of_tokenizer(value) for value in ("o200k_base", "qwen:x", "bytes", "a.model")] == [
        None, "x", None, "a.model"]
    with pytest.raises(ConfigError, match="there is no such file"):
        load_tokenizer("qwen")  # without an address, this is a path
    with pytest.raises(ConfigError, match="there is no such file"):
        load_tokenizer("llama3:none")
    (tmp_path / "text").write_text("no ranks")
    with pytest.raises(ConfigError, match=r"not a tiktoken file.*Leave out llama3:"):
        load_tokenizer("llama3:text")
    several = tmp_path / "several"
    several.mkdir()
    for name in ("a", "b"):
        (several / f"{name}.qwen.tiktoken").write_bytes((folder / "mine.qwen.tiktoken").read_bytes())
    with pytest.raises(ConfigError, match=r"a\.qwen\.tiktoken is one of several tiktoken files"):
        load_tokenizer(several)


def test_a_run_with_a_tiktoken_file(folder: Path, tmp_path: Path) -> None:
    """Real programs: prepare with one and two workers, train, generate, evaluate and export."""
    documents = [{"text": f"number {number} is {number * number}. \u4f60 " * (number % 9 + 1)} for number in range(300)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps(document) for document in documents))
    (tmp_path / "ranks").write_bytes((folder / "mine.cl100k_base.tiktoken").read_bytes())
    (tmp_path / "ds.json").write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}))

    value = "cl100k_base:ranks"
    run_programs(tmp_path, [
        [f"{ROOT}/tools/prepare_data.py", "text.jsonl", "--tokenizer", value, "--workers", str(workers), "--out",
         f"data{workers}"] for workers in (1, 2)])
    assert (tmp_path / "data1.bin").read_bytes() == (tmp_path / "data2.bin").read_bytes()
    assert json.loads((tmp_path / "data1.meta.json").read_text())["tokenizer"] == f"cl100k_base:{tmp_path}/ranks"
    data, tokenizer = IndexedDataset(tmp_path / "data1"), load_tokenizer(f"cl100k_base:{tmp_path}/ranks")
    tokens = data.tokens(0, data.document_offset(2)).tolist()
    assert tokens == [*tokenizer.encode(documents[0]["text"]), 330, *tokenizer.encode(documents[1]["text"]), 330]
    run_program(tmp_path, f"{ROOT}/pretrain/train.py", "--deepspeed_config", "ds.json", "--model", "tiny",
                "--model_overrides", "vocab_size=331,n_layer=1", "--train_data", "data1", "--tokenizer", value,
                "--eval_steps", "1", "--save", "run", "--seq_length", "64", "--train_steps", "2")
    run_programs(tmp_path, [
        [f"{ROOT}/tools/generate.py", "run", "--prompt", "number", "--max_new_tokens", "3"],
        [f"{ROOT}/tools/export_hf.py", "run", "--output", "export"],
        [f"{ROOT}/tools/evaluate.py", "run", "--json", "losses.json"]])
    assert AutoTokenizer.from_pretrained(tmp_path / "export")("a b")["input_ids"] == tokenizer.encode("a b")
