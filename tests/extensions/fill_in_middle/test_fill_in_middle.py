"""Fill-in-the-middle: every rearranged document can be put together again, and depends on seed and text alone."""

import io
import itertools
import json
import math
import sys
from collections import Counter
from pathlib import Path

import pytest
from sentencepiece import SentencePieceTrainer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library
from transformers import AutoTokenizer

import pretrain.data.prepare.partial_output
import pretrain.data.prepare.tokenize_batch
import pretrain.data.text_inputs.reader
from pretrain.data.prepare.prepare import PrepareSettings, prepare
from pretrain.data.prepare.shards import Shard
from pretrain.data.prepare.summary import read_summary, summary_text
from pretrain.data.source_facts import end_notes, learnable_notes, source_facts
from pretrain.data.token_files.indexed_dataset import IndexedDataset, read_meta
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.data.tokenizers.train_tokenizer import train_sentencepiece
from pretrain.errors import ConfigError
from pretrain.extensions.fill_in_middle.fill_in_middle import KNOWN_NAMES, FillInMiddle, divide_document
from pretrain.extensions.fill_in_middle.step import FillInMiddleStep
from tests.data.prepare.helpers import SOURCES, TEXTS, jsonl, output
from tests.data.prepare.test_resume import in_child, kill_at_call
from tests.support.rejection import rejection
from tests.wrong_inputs.case import main_of

_NAMES = KNOWN_NAMES[0]
_OWN_TEXTS = [*TEXTS, "".join(_NAMES), f"a {KNOWN_NAMES[1][0]} b{KNOWN_NAMES[1][2]}", "x", "  two  spaces  ",
              *(f"def f{number}(x):\n    return x + {number}\n" for number in range(40))]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of `ds-pretrain tokenizer --special_tokens`."""
    return train_sentencepiece([str(path) for path in SOURCES], tmp_path_factory.mktemp("tok"), vocab_size=600,
                               special_tokens=_NAMES)


def rearranged(choice: FillInMiddle | None) -> PrepareSettings:
    return PrepareSettings(steps=[FillInMiddleStep(choice)])


def _sentencepiece(folder: Path, model_type: str, names: tuple[str, str, str], **options: object) -> Path:
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(TEXTS).split("\n")), model_writer=written, vocab_size=600,
        model_type=model_type, byte_fallback=True, normalization_rule_name="identity", minloglevel=3,
        **{"remove_extra_whitespaces": False, "control_symbols": list(names), **options})
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    return folder / "tokenizer.model"


def _byte_level(folder: Path, names: tuple[str, str, str], *, special: bool, add_prefix_space: bool) -> Path:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator(TEXTS, trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|endoftext|>"],
        show_progress=False))
    library.add_tokens([AddedToken(name, special=special, normalized=False) for name in names])
    library.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture(scope="module", params=["own", "bpe with dummy prefix", "unigram with dummy prefix", "byte-level",
                                        "byte-level, names are no special tokens", "byte-level with prefix space"])
def tokenizer(request: pytest.FixtureRequest, own: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("other")
    if request.param == "own":
        return own
    if "dummy prefix" in request.param:
        return load_tokenizer(_sentencepiece(folder, request.param.split()[0], KNOWN_NAMES[2]))
    return load_tokenizer(_byte_level(folder, KNOWN_NAMES[1], special="no special" not in request.param,
                                      add_prefix_space="prefix space" in request.param))


def _documents(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [data.tokens(start, stop).tolist() for start, stop in itertools.pairwise(data.document_offsets().tolist())]


def _original(tokens: list[int], tokenizer: Tokenizer, ids: dict[str, int]) -> tuple[str, str]:
    """Return the format and the text of a document, its end-of-document token included."""
    *tokens, last = tokens
    assert last == tokenizer.eod_token
    counts = {tokens.count(token) for token in ids.values()}
    if counts == {0}:
        return "plain", tokenizer.decode(tokens)
    assert counts == {1}
    assert tokens[0] == ids["prefix"]
    suffix, middle = tokens.index(ids["suffix"]), tokens.index(ids["middle"])
    assert suffix < middle
    in_order = [*tokens[1:suffix], *tokens[middle + 1:], *tokens[suffix + 1:middle]]  # SPM: nothing before the suffix
    return "SPM" if suffix == 1 else "PSM", tokenizer.decode(in_order)


def test_the_parts_of_every_document_give_its_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = jsonl(tmp_path / "a.jsonl", _OWN_TEXTS)
    prepare([source], tokenizer=str(tokenizer.path), out=str(tmp_path / "out"), workers=1,
            settings=rearranged(FillInMiddle(0.9, 0.5, 7)))
    meta = read_meta(tmp_path / "out")
    assert meta is not None
    ids = meta["fill_in_middle"]["tokens"]
    assert [tokenizer.token_of(name) for name in meta["fill_in_middle"]["names"]] == list(ids.values())
    found = [_original(tokens, tokenizer, ids) for tokens in _documents(tmp_path / "out")]
    names = meta["fill_in_middle"]["names"]
    whole = [text if any(name in text for name in names) else tokenizer.decode(tokenizer.encode(text))
             for text in _OWN_TEXTS]
    prefix = " " if tokenizer.decode(tokenizer.encode("a")) == " a" else ""
    assert [text.removeprefix(prefix) for _, text in found] == [text.removeprefix(prefix) for text in whole]
    counts = Counter(kind for kind, _ in found)
    assert min(counts.values()) > 0
    assert len(counts) == 3
    assert meta["fill_in_middle"]["documents"] == counts["PSM"] + counts["SPM"]


def test_rates_are_those_of_independent_draws() -> None:
    settings = FillInMiddle(0.3, 0.2, 5)
    divided = [divide_document(f"document {number}", settings) for number in range(20_000)]
    rearranged = [parts for parts in divided if parts is not None]
    for count, total, rate in ((len(rearranged), len(divided), 0.3),
                               (sum(parts.is_spm for parts in rearranged), len(rearranged), 0.2)):
        assert abs(count - rate * total) < 5 * math.sqrt(total * rate * (1 - rate))
    cuts = [(len(parts.prefix), len(parts.suffix)) for parts in rearranged if len(parts.prefix + parts.middle +
                                                                                 parts.suffix) == 14]
    # the shorter of two uniform positions of 0 to 14 is 0 with the probability 29/225
    zero = sum(prefix == 0 for prefix, _ in cuts)
    assert abs(zero - len(cuts) * 29 / 225) < 5 * math.sqrt(len(cuts) * 29 / 225 * 196 / 225)
    assert divide_document("", FillInMiddle(1, 0.5, 0)) is None
    assert None not in [divide_document(str(number), FillInMiddle(1, 0.5, 0)) for number in range(100)]


def test_documents_do_not_depend_on_workers_order_or_kills(tmp_path: Path, own: Tokenizer,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain.data.text_inputs.reader, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(pretrain.data.prepare.partial_output, "_LARGEST_COST", float("inf"))
    settings = rearranged(FillInMiddle(0.5, 0.5, 1))
    sources = [jsonl(tmp_path / "a.jsonl", _OWN_TEXTS), jsonl(tmp_path / "b.jsonl", _OWN_TEXTS[:9])]

    def run(name: str, inputs: list[str], workers: int = 1) -> None:
        prepare(inputs, tokenizer=str(own.path), out=str(tmp_path / name), settings=settings, workers=workers,
                seconds_between_states=0)

    run("one", sources)
    run("three", sources, workers=3)
    assert output(tmp_path / "one") == output(tmp_path / "three")
    run("backwards", sources[::-1])
    assert sorted(_documents(tmp_path / "backwards")) == sorted(_documents(tmp_path / "one"))
    kills = 0
    while in_child(lambda: (kill_at_call(45), run("killed", sources))) == -9:
        kills += 1
        assert kills < 200
    assert kills > 3
    assert output(tmp_path / "one") == output(tmp_path / "killed")
    summary = read_summary(tmp_path / "one")
    assert summary["duplicate_documents"] == 9  # equal texts are rearranged alike
    assert {documents[0] for documents in map(tuple, _documents(tmp_path / "one")[-9:])} >= {own.token_of(_NAMES[0])}


def test_a_complete_shard_is_not_made_again(tmp_path: Path, own: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    for _ in range(2):
        prepare([source], tokenizer=str(own.path), out=str(tmp_path / "out"), workers=1, shard=Shard(0, 2),
                settings=rearranged(FillInMiddle(0.5, 0.5, 1)))
    assert "out.shard-00000-of-00002 is complete already" in capsys.readouterr().err


def test_a_resume_with_another_rate_or_none_is_rejected(tmp_path: Path, own: Tokenizer,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain.data.text_inputs.reader, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(pretrain.data.prepare.partial_output, "_LARGEST_COST", float("inf"))
    source = jsonl(tmp_path / "a.jsonl", TEXTS)

    def run(middle: FillInMiddle | None) -> None:
        prepare([source], tokenizer=str(own.path), out=str(tmp_path / "out"), workers=1, seconds_between_states=0,
                settings=rearranged(middle))

    assert in_child(lambda: (kill_at_call(60), run(FillInMiddle(0.5, 0.5, 1)))) == -9
    with pytest.raises(ConfigError, match=r"was different: --fim_seed\."):
        run(FillInMiddle(0.5, 0.5, 2))
    with pytest.raises(ConfigError, match="--fim_rate, --fim_spm_rate, --fim_seed, --fim_tokens"):
        run(None)


def test_long_documents_remain_as_they_are_and_are_counted(tmp_path: Path, own: Tokenizer,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are divided for the tokenizer, and some by the chunks of the input."""
    monkeypatch.setattr(pretrain.data.prepare.tokenize_batch, "LONGEST_TEXT", 1000)
    monkeypatch.setattr(pretrain.data.text_inputs.reader, "CHUNK_BYTES", 4096)
    texts = ["short", "s" * 900, "word " * 300, "another", *(f"text {number}" for number in range(20))]
    (tmp_path / "long.txt").write_text("line of a long file\n" * 1000)
    settings = rearranged(FillInMiddle(1.0, 0.0, 1))
    prepare([jsonl(tmp_path / "a.jsonl", texts), str(tmp_path / "long.txt"), jsonl(tmp_path / "b.jsonl", ["end"])],
            tokenizer=str(own.path), out=str(tmp_path / "out"), settings=settings, workers=1)
    documents = _documents(tmp_path / "out")
    ids = {"prefix": 2, "middle": 3, "suffix": 4}
    assert [number for number, tokens in enumerate(documents) if _original(tokens, own, ids)[0] == "plain"] == [
        2, len(texts)]
    made = read_summary(tmp_path / "out")["fill_in_middle"]
    assert (made["documents"], made["documents_read_in_parts"]) == (len(texts) - 1 + 1, 2)
    assert "fill-in-the-middle 24 documents (92.3%); 2 long ones" in summary_text(tmp_path / "out", settings.steps)


def test_rate_0_writes_the_same_files_as_before(tmp_path: Path, own: Tokenizer,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    for name, words in (("plain", []), ("zero", ["--fim_rate", "0", "--fim_seed", "3"])):
        monkeypatch.setattr(sys, "argv", ["prepare", source, "--tokenizer", str(own.path), "--out",
                                          str(tmp_path / name), *words])
        main_of("prepare")()
    assert output(tmp_path / "plain") == output(tmp_path / "zero")


def test_nothing_in_such_data_looks_wrong_to_a_run(tmp_path: Path, own: Tokenizer) -> None:
    settings = rearranged(FillInMiddle(0.9, 0.5, 1))
    prepare([jsonl(tmp_path / "a.jsonl", _OWN_TEXTS)], tokenizer=str(own.path), out=str(tmp_path / "out"),
            settings=settings)
    data = IndexedDataset(tmp_path / "out")
    facts = source_facts(data)
    assert end_notes("data", facts, own.eod_token) == learnable_notes(data, "data", facts) == []


@pytest.mark.parametrize(("words", "message"), [
    (["--fim_rate", "0.5", "--tokenizer", "bytes"], "--tokenizer bytes: it has no tokens such as <fim_prefix>"),
    (["--fim_rate", "0.5", "--fim_tokens", "<a>,<b>"], "--fim_tokens: found '<a>,<b>'; expected the names of three"),
    (["--fim_rate", "0.5", "--fim_tokens", "<a>,<b>,<c>"], "tokenizer.model has no token '<a>'"),
    (["--fim_rate", "0.5", "--fim_tokens", "<fim_prefix>,<fim_prefix>,<fim_middle>"], "are the same token"),
    (["--fim_seed", "1"], "--fim_seed: it has no effect without --fim_rate"),
    (["--fim_rate", "0.5", "--tokenizer", "STRIP"], "do not add up to the text"),
])  # fmt: skip
def test_what_is_not_possible_is_rejected_in_one_line(tmp_path: Path, own: Tokenizer, words: list[str], message: str,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    strips = _sentencepiece(tmp_path, "bpe", _NAMES, remove_extra_whitespaces=True)
    monkeypatch.setattr(sys, "argv", ["prepare", jsonl(tmp_path / "a.jsonl", TEXTS[:2]), "--tokenizer", str(own.path),
                                      "--out", str(tmp_path / "out"),
                                      *(str(strips) if word == "STRIP" else word for word in words)])
    assert message in rejection(main_of("prepare"))


def test_trained_special_tokens_are_special_in_transformers_too(own: Tokenizer) -> None:
    library = AutoTokenizer.from_pretrained(own.path.parent)
    assert [library.convert_tokens_to_ids(name) for name in _NAMES] == list(map(own.token_of, _NAMES)) == [2, 3, 4]
    for text in _OWN_TEXTS:
        assert library(text, add_special_tokens=False)["input_ids"] == own.encode(text)
    assert library.decode([2, *own.encode("x = 1"), 4], skip_special_tokens=True) == "x = 1"
    assert own.token_of("no such piece") is None


@pytest.mark.parametrize("names", ["<a> <b>", "<a>,<a>", "x", "<|endoftext|>", "<0x41>"])
def test_names_that_no_special_token_can_have_are_rejected(tmp_path: Path, names: str,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tokenizer", str(SOURCES[0]), "--out", str(tmp_path), "--special_tokens", names])
    with pytest.raises(ConfigError, match="--special_tokens: found"):
        main_of("tokenizer")()


def test_prepare_trains_a_tokenizer_with_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.setattr(sys, "argv", ["prepare", source, "--tokenizer", str(tmp_path / "new"), "--vocab_size", "600",
                                      "--out", str(tmp_path / "out"), "--fim_rate", "1"])
    main_of("prepare")()
    assert json.loads((tmp_path / "out.meta.json").read_text())["fill_in_middle"]["documents"] == len(TEXTS)
