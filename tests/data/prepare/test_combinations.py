"""Flags of a preparation together: shards, kills and sources change no byte of any file, whatever else is asked for."""

import json
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pretrain.data.text_inputs.reader
from pretrain.data.prepare.prepare import PrepareSettings, prepare
from pretrain.data.prepare.shards import Shard
from pretrain.data.prepare.summary import summary_text
from pretrain.data.text_inputs.chunk import ReadSettings
from pretrain.data.text_inputs.hub_dataset import DatasetName
from pretrain.data.tokenizers.train_tokenizer import train_sentencepiece
from tests.data.prepare.helpers import SOURCES, content, edited, merge_shards_of, sentence
from tests.data.prepare.steps import Length, Shout
from tests.data.prepare.test_resume import in_child, kill_at_call
from tests.data.prepare.urls import put_folder
from tests.support.stores import s3_server

ALL = PrepareSettings(ReadSettings(skip_errors=True), deduplicate=True, steps=[Length(), Shout()])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain.data.text_inputs.reader, "CHUNK_BYTES", 4096)
    monkeypatch.setattr("pretrain.data.prepare.partial_output._LARGEST_COST", float("inf"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dataset of two formats, with exact duplicates, near-duplicates, empty documents, and errors."""
    folder = tmp_path_factory.mktemp("corpus") / "data"
    folder.mkdir()
    generator = random.Random(0)
    words = [sentence(generator, generator.randrange(5, 120)) for _ in range(60)]
    words += [edited(generator.choice(words), 0.01, generator) for _ in range(40)]
    texts: list[str | None] = [" ".join(text) for text in words]
    texts += [*generator.sample(texts, 15), "", "\n", None, None, "word " * 3000]
    for name in ("a", "b"):
        generator.shuffle(texts)
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def parquet(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the same texts as Parquet."""
    folder = tmp_path_factory.mktemp("parquet") / "data"
    folder.mkdir()
    for path in sorted(corpus.iterdir()):
        texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
        pq.write_table(pa.table({"text": texts}), folder / f"{path.stem}.parquet", row_group_size=30)
    return folder


@pytest.fixture(scope="module")
def special_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(train_sentencepiece([str(path) for path in SOURCES], tmp_path_factory.mktemp("tok"), vocab_size=600,
                                   special_tokens=("<a>", "<b>")).path)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3"), "bucket"):
        put_folder(corpus, "s3://bucket/corpus")
        yield "s3://bucket/corpus"


@pytest.mark.parametrize("source", ["files", "s3", "dataset"])
@pytest.mark.parametrize("exact", ["remove", "count", ""])
def test_merged_shards_of_any_source(source: str, exact: str, corpus: Path, parquet: Path, special_tokenizer: str,
                                     s3: str, tmp_path: Path) -> None:
    settings = replace(ALL, steps=[Length(exact), Shout()], deduplicate=not exact)
    inputs = {"files": [str(corpus), str(parquet)], "s3": [s3], "dataset": DatasetName(str(parquet.parent))}[source]
    prepare(inputs, tokenizer=special_tokenizer, out=str(tmp_path / "single"), settings=settings, workers=1)
    expected, out = content(tmp_path / "single"), str(tmp_path / "out")
    summary = json.loads(expected["summary.json"])
    assert summary["documents"] > 50
    assert summary["skipped_documents"] >= 4
    for index in range(3):
        shard = Shard(index, 3)

        def make(shard: Shard = shard) -> None:
            prepare(inputs, tokenizer=special_tokenizer, out=out, settings=settings, workers=1, shard=shard,
                    seconds_between_states=0)

        if source != "dataset":
            assert in_child(lambda: (kill_at_call(120 + 40 * index), make())) in (0, -signal.SIGKILL)  # noqa: B023
        make()
        make()  # it is complete
        assert json.loads(Path(f"{shard.prefix(out)}.meta.json").read_text())["num_documents"] > 20  # files are divided
    merge_shards_of(out, steps=settings.steps)
    merged = content(tmp_path / "out")
    assert [name for name in expected if merged[name] != expected[name]] == []


def test_all_flags_and_kills(corpus: Path, parquet: Path, special_tokenizer: str, tmp_path: Path) -> None:
    """Shards give the same as one preparation, which gives the same after any kill."""
    tokenizer, settings = special_tokenizer, ALL
    inputs = [str(corpus), str(parquet)]
    prepare(inputs, tokenizer=tokenizer, out=str(tmp_path / "single"), settings=settings, workers=2)
    expected, out = content(tmp_path / "single"), str(tmp_path / "out")

    def make(name: str = out, shard: Shard | None = None) -> None:
        prepare(inputs, tokenizer=tokenizer, out=name, settings=settings, workers=1, shard=shard,
                seconds_between_states=0)

    statuses = [in_child(lambda: (kill_at_call(call), make())) for call in (100, 160, 230, 300)]  # noqa: B023
    assert statuses.count(-signal.SIGKILL) >= 3
    make()
    assert content(tmp_path / "out") == expected
    for index in range(2):
        make(f"{out}2", Shard(index, 2))
    merge_shards_of(f"{out}2", steps=settings.steps)
    assert content(tmp_path / "out2") == expected


def test_what_another_version_left_is_replaced_with_a_note(corpus: Path, tmp_path: Path, special_tokenizer: str,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "state.json").write_text(json.dumps({"version": 1, "finished": False, "sizes": {"tokens": 4}}))
    (partial / "tokens").write_bytes(b"1234")
    for name in ("out", "single"):
        prepare([str(corpus)], tokenizer=special_tokenizer, out=str(tmp_path / name), settings=ALL, workers=1)
        noted = f"{partial} is of another version of this program: begins again" in capsys.readouterr().err
        assert noted == (name == "out")
    assert content(tmp_path / "out") == content(tmp_path / "single")


def test_an_empty_shard_has_a_summary(special_tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("def f(x):\n    return x\n")
    for index in range(2):
        prepare([str(tmp_path / "a.txt")], tokenizer=special_tokenizer, out=str(tmp_path / "out"), settings=ALL,
                workers=1, shard=Shard(index, 2))
        assert f"documents          {1 - index}\n" in summary_text(tmp_path / f"out.shard-0000{index}-of-00002")
