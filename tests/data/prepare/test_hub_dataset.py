"""Datasets of the Hugging Face Hub: streamed from a server on this machine, and from folders."""

import csv
import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pretrain.data.prepare.prepare import PrepareSettings, prepare
from pretrain.data.text_inputs.chunk import LONG_BYTES, ReadSettings
from tests.data.prepare.helpers import TEXTS as SHORT
from tests.data.prepare.helpers import merge_shards_of
from tests.data.prepare.hub_jobs import ROOT, Jobs, hub_jobs
from tests.support.dataset_hub import TOKEN, DatasetHub, Repository, dataset_hub

OLD, NEW = "0d" * 20, "1e" * 20
FORMATS = ("parquet", "jsonl", "jsonl.gz", "jsonl.zst", "csv")
TEXTS = [path.read_text(encoding="utf-8") for path in sorted(Path(os.__file__).parent.glob("a*.py"))] + SHORT
LONG = "a long document of a line \n" * (LONG_BYTES // 25)
FILES = [[*TEXTS[:6], "\n"], [*TEXTS[6:9], LONG, *TEXTS[9:11]], [*TEXTS[11:], *TEXTS[:4]]]
"""the texts of each data file"""


def write(path: Path, texts: list[str]) -> Path:
    """Write a data file with the texts, in the format of its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ending = path.name.partition(".")[2]
    lines = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)).encode()
    if ending == "parquet":
        table = pa.table({"id": [os.urandom(3000) for _ in texts], "text": texts})
        pq.write_table(table, path, row_group_size=5)
    elif ending == "csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["id", "text"], *enumerate(texts)])
    elif ending == "jsonl.zst":
        half = lines.index(b"\n") + 1
        frames = [pa.compress(part, codec="zstd", asbytes=True) for part in (lines[:half], lines[half:])]
        path.write_bytes(b"".join(frames))
    else:
        path.write_bytes(gzip.compress(lines) if ending == "jsonl.gz" else lines)
    return path


def card(configs: dict[str, dict[str, str]]) -> str:
    """Return a README.md with configs: {name: {split: pattern of its files}}."""
    lines = ["---", "configs:"]
    for name, splits in configs.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        lines += [f"  - split: {split}\n    path: {pattern}" for split, pattern in splits.items()]
    return "\n".join([*lines, "---", "# A dataset"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of folders in the format of the Hub, one for each format of data files, with two configs."""
    folder = tmp_path_factory.mktemp("datasets")
    for ending in FORMATS:
        for number, texts in enumerate(FILES):
            write(folder / ending / "data" / f"part-{number}.{ending}", texts)
        write(folder / ending / "held_out" / f"a.{ending}", TEXTS[:3])
        (folder / ending / "README.md").write_text(card({
            "large": {"train": "data/*", "test": "held_out/*"}, "small": {"train": "data/part-0*"}}))
    return folder


@pytest.fixture(scope="module")
def hub(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetHub]:
    old = tmp_path_factory.mktemp("old")
    write(old / "train.jsonl", TEXTS[:9])
    new = shutil.copytree(old, tmp_path_factory.mktemp("new") / "new")
    write(new / "train.jsonl", TEXTS[:12])
    moving = Repository({OLD: old, NEW: new}, {"main": OLD, "v1": OLD, "v2": NEW})
    formats = {f"org/{ending}": Repository({NEW: folder / ending}, {"main": NEW}) for ending in FORMATS}
    with dataset_hub({**formats, "org/moving": moving,
                      "org/gated": Repository({NEW: new}, {"main": NEW}, "gated"),
                      "org/private": Repository({NEW: new}, {"main": NEW}, "private")}) as running:
        yield running


@pytest.fixture(scope="module")
def jobs(hub: DatasetHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with hub_jobs(hub.url, tmp_path_factory.mktemp("home")) as running:
        yield running


def tokens(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def local(files: list[Path], out: Path, reading: ReadSettings | None = None) -> tuple[bytes, bytes]:
    """Prepare the same files as inputs."""
    prepare([str(file) for file in files], tokenizer="bytes", out=str(out), workers=1,
            settings=PrepareSettings(reading or ReadSettings()))
    return tokens(out)


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Return the bytes of the local files, which do not depend on their format."""
    out = tmp_path_factory.mktemp("local")
    results = [local(sorted((folder / ending / "data").iterdir()), out / ending) for ending in FORMATS[:4]]
    assert results[1:] == results[:-1]
    return results[0]


@pytest.mark.parametrize("ending", FORMATS)
def test_bytes_are_those_of_local_files_also_after_kills(ending: str, hub: DatasetHub, jobs: Jobs, tmp_path: Path,
                                                         expected: tuple[bytes, bytes]) -> None:
    assert jobs.run(f"org/{ending}", tmp_path / "whole", config="large") == ""
    assert tokens(tmp_path / "whole") == expected
    names = [f"data/part-{number}.{ending}" for number in range(3)]
    hub.sent.clear()
    assert jobs.run(f"org/{ending}", tmp_path / "out", config="large", kill_in=1, kill_in_parts=True) == "killed"
    assert set(hub.bytes_of_files()) & set(names) == set(names[:2])
    hub.sent.clear()
    assert jobs.run(f"org/{ending}", tmp_path / "out", config="large", kill_in=2) == "killed"
    assert set(hub.bytes_of_files()) & set(names) == set(names[1:])
    hub.sent.clear()
    assert jobs.run(f"org/{ending}", tmp_path / "out", config="large") == ""
    assert set(hub.bytes_of_files()) & set(names) == {names[2]}
    assert tokens(tmp_path / "out") == expected
    for other in ("meta.json", "summary.json"):
        assert Path(f"{tmp_path / 'out'}.{other}").read_bytes() == Path(f"{tmp_path / 'whole'}.{other}").read_bytes()


@pytest.mark.parametrize("ending", FORMATS)
def test_a_local_folder_has_configs_and_splits(ending: str, folder: Path, jobs: Jobs, tmp_path: Path,
                                               expected: tuple[bytes, bytes]) -> None:
    dataset = str(folder / ending)
    assert jobs.run(dataset, tmp_path / "out", config="large", kill_in=1) == "killed"
    assert jobs.run(dataset, tmp_path / "out", config="large") == ""
    assert tokens(tmp_path / "out") == expected
    if ending == "parquet":
        assert jobs.run(dataset, tmp_path / "test", config="large", split="test") == ""
        assert tokens(tmp_path / "test") == local([folder / ending / "held_out" / "a.parquet"], tmp_path / "local")
        assert jobs.run(dataset, tmp_path / "small", config="small") == ""
        assert tokens(tmp_path / "small") == local([folder / ending / "data" / "part-0.parquet"], tmp_path / "local-0")
        assert "has no revisions" in jobs.run(dataset, tmp_path / "none", revision="main")
        assert "has several configs: large, small" in jobs.run(dataset, tmp_path / "none")


def test_the_commit_is_recorded_and_a_resume_uses_it(hub: DatasetHub, jobs: Jobs, tmp_path: Path) -> None:
    moving = hub.repositories["org/moving"]
    moving.refs["main"] = OLD
    assert jobs.run("org/moving", tmp_path / "out", kill_in=0) == "killed"
    moving.refs["main"] = NEW
    assert "different: --dataset_revision" in jobs.run("org/moving", tmp_path / "out", revision="v1")
    assert jobs.run("org/moving", tmp_path / "out") == ""
    assert tokens(tmp_path / "out") == local([moving.commits[OLD] / "train.jsonl"], tmp_path / "local")
    found = {"name": "org/moving", "config": "default", "split": "train", "revision": None, "commit": OLD}
    assert json.loads((tmp_path / "out.meta.json").read_text())["sources"]["dataset"] == found
    summary = json.loads((tmp_path / "out.summary.json").read_text())
    assert (summary["settings"]["--dataset"], summary["settings"]["dataset_commit"]) == ("org/moving", OLD)
    assert f"commit {OLD}: 1 file of JSON lines" in summary["inputs"]
    for revision, commit in (("v1", OLD), ("", NEW), (OLD, OLD)):
        out = tmp_path / f"at-{revision}"
        assert jobs.run("org/moving", out, revision=revision) == ""
        assert json.loads(Path(f"{out}.meta.json").read_text())["sources"]["dataset"]["commit"] == commit
        assert tokens(out) == local([moving.commits[commit] / "train.jsonl"], tmp_path / f"local-{revision}")


def test_all_shards_read_the_commit_of_the_first_one(hub: DatasetHub, jobs: Jobs, tmp_path: Path) -> None:
    moving = hub.repositories["org/moving"]
    moving.refs["main"], out = OLD, tmp_path / "out"
    assert jobs.run("org/moving", out, shard=(0, 2)) == ""
    moving.refs["main"] = NEW
    assert jobs.run("org/moving", out, shard=(0, 2)) == ""  # it is complete
    assert jobs.run("org/moving", out, shard=(1, 2)) == ""
    assert jobs.run("org/moving", out, shard=(0, 2), overwrite=True) == ""
    merge_shards_of(out)
    assert tokens(out) == local([moving.commits[OLD] / "train.jsonl"], tmp_path / "local")


def test_what_does_not_exist_is_named(jobs: Jobs, hub: DatasetHub, tmp_path: Path) -> None:
    def error(name: str, **options: str) -> str:
        return jobs.run(name, tmp_path / "out", **options)

    assert error("org/format") == ("--dataset org/format: the Hub has no such dataset, or it is private, which needs "
                                   "HF_TOKEN. Check the name: ORG/NAME.")
    assert "--dataset ./formats: there is no such folder" in error("./formats")
    assert error("org/csv") == "--dataset_config: org/csv has several configs: large, small. Choose one."
    assert error("org/csv", config="smal") == \
        '--dataset_config smal: org/csv has no such config; it has large, small. Did you mean "small"?'
    assert error("org/csv", config="large", split="dev") == \
        "--dataset_split dev: org/csv has no such split; it has train, test."
    assert error("org/moving", revision="v3") == \
        "--dataset_revision v3: org/moving has no such branch, tag or commit; it has main, v1, v2."
    for ending in FORMATS:
        message = error(f"org/{ending}", config="large", jsonl_key="txet")
        assert message.endswith(f'part-0.{ending}: column \'txet\': there is no such column. Did you mean "text"?')
    assert "column 'id': found values of type int64; expected text" in error("org/moving", jsonl_key="id")
    assert not list(tmp_path.iterdir())


def test_files_outside_of_the_commit_are_rejected(hub: DatasetHub, jobs: Jobs, tmp_path: Path) -> None:
    own = write(tmp_path / "own" / "mine.jsonl", TEXTS[:3])
    (tmp_path / "away").mkdir()
    hub.repositories["org/away"] = Repository({NEW: tmp_path / "away"}, {"main": NEW})
    for outside in (str(own), f"hf://datasets/org/moving@{OLD}/train.jsonl"):
        (tmp_path / "away" / "README.md").write_text(card({"default": {"train": outside}}))
        for name in ("org/away", str(tmp_path / "away")):
            message = jobs.run(name, tmp_path / "out")  # datasets 5.2 rejects some of them itself
            assert "README.md" in message or (name != "org/away" and outside == str(own)), message


def test_gated_and_private_datasets_need_the_token(jobs: Jobs, tmp_path: Path) -> None:
    assert "refuses access (403): the dataset is gated" in jobs.run("org/gated", tmp_path / "out")
    assert "or it is private, which needs HF_TOKEN" in jobs.run("org/private", tmp_path / "out")
    assert "HF_TOKEN may not read it" in jobs.run("org/private", tmp_path / "out", env={"HF_TOKEN": "hf_other"})
    for name in ("gated", "private"):
        assert jobs.run(f"org/{name}", tmp_path / name, env={"HF_TOKEN": TOKEN}) == ""
        assert all(TOKEN.encode() not in path.read_bytes() for path in tmp_path.glob(f"{name}.*"))


def test_no_row_is_lost_or_repeated_when_requests_fail(hub: DatasetHub, jobs: Jobs, tmp_path: Path) -> None:
    folder = tmp_path / "large"
    texts = [f"document {number} " + "word " * 2000 for number in range(2000)]
    files = [write(folder / f"train-{number}.jsonl", texts[number * 1000 : (number + 1) * 1000]) for number in (0, 1)]
    hub.repositories["org/large"] = Repository({NEW: folder}, {"main": NEW})
    requests: list[str] = []

    def fault(path: str) -> str:
        requests.append(path)
        return {1: "drop", 3: "520", 5: "503", 6: "520"}.get(len(requests), "")

    hub.fault = fault
    finished = jobs.run("org/large", tmp_path / "out")
    hub.fault = lambda path: "404"
    missing = jobs.run("org/large", tmp_path / "missing")
    hub.fault = None
    assert finished == ""
    assert len(requests) > 8
    assert tokens(tmp_path / "out") == local(files, tmp_path / "local")
    assert "train-0.jsonl: it cannot be read: " in missing


def test_columns_and_rows_are_those_of_parquet_inputs(hub: DatasetHub, jobs: Jobs, tmp_path: Path) -> None:
    folder = tmp_path / "columns"
    folder.mkdir()
    rows = 40  # of 600 KB
    table = pa.table({
        "wide": [os.urandom(600_000) for _ in range(rows)],
        "meta": pa.array([{"text": f"nested {number}", "n": 1} if number % 9 else None for number in range(rows)]),
        "a.b": [f"dotted {number}" for number in range(rows)],
        "kind": pa.array(["x", "y"] * (rows // 2)).dictionary_encode(),
        "raw": [b"bytes", b"\xff\xfe", b"nul \0", None] * (rows // 4)})
    pq.write_table(table, folder / "train.parquet", row_group_size=20)
    hub.repositories["org/columns"] = Repository({NEW: folder}, {"main": NEW})
    for column in ("meta.text", "a.b", "kind", "raw"):
        hub.sent.clear()
        out = tmp_path / column
        if column in ("meta.text", "raw"):
            error = {"meta.text": "row 1: the value is null", "raw": "row 2: byte 1 of the value, 0xFF, is not valid"}
            assert error[column] in jobs.run("org/columns", out, jsonl_key=column)
            hub.sent.clear()
        faults = iter(["", "", "520"] * (column == "a.b"))
        hub.fault = lambda path, faults=faults: next(faults, "")  # type: ignore[misc]
        assert jobs.run("org/columns", out, jsonl_key=column, skip_errors=True) == ""
        assert next(faults, None) is None  # all were used
        reading = ReadSettings(jsonl_key=column, skip_errors=True)
        assert tokens(out) == local([folder / "train.parquet"], tmp_path / f"local-{column}", reading)
        assert hub.bytes_of_files()["train.parquet"] < 200_000  # of 24 MB: one column
        skipped = json.loads(Path(f"{out}.summary.json").read_text())["skipped_documents"]
        assert skipped == {"meta.text": 5, "raw": 30}.get(column, 0)


def test_files_are_read_one_by_one(hub: DatasetHub, jobs: Jobs, tmp_path: Path) -> None:
    """Other columns may differ between files, and a file without text is named."""
    folder = tmp_path / "own"
    write(folder / "train-0.jsonl", TEXTS[:2])
    (folder / "train-1.jsonl").write_text('{"text": "no id", "more": [1]}\n{"more": []}\n')
    assert "train-1.jsonl: row 2: the value is null" in jobs.run(str(folder), tmp_path / "out")
    assert jobs.run(str(folder), tmp_path / "out", skip_errors=True) == ""
    for content, problem in (('{"text": 5}\n', "found values of type int64; expected text"),
                             ('{"text": "a"}\n{"text": 5}\n', "text"),  # datasets 4.2 rejects the file
                             ('{"text": "a"}\n{"text": \n', "it cannot be read: ArrowInvalid: JSON parse error")):
        (folder / "train-1.jsonl").write_text(content)
        assert problem in jobs.run(str(folder), tmp_path / "other", overwrite=True)
    (folder / "train-1.jsonl").unlink()
    (folder / "own.py").write_text("raise SystemExit('it ran')")
    assert "the dataset is a Python script, and no script is ever run" in jobs.run(str(folder), tmp_path / "other")
    zstd = write(tmp_path / "cut" / "train.jsonl.zst", TEXTS)
    zstd.write_bytes(zstd.read_bytes()[:-100])
    assert "cannot be read: OSError: Truncated compressed stream" in jobs.run(str(tmp_path / "cut"), tmp_path / "not")


def test_folders_of_save_to_disk(jobs: Jobs, tmp_path: Path, expected: tuple[bytes, bytes]) -> None:
    saved = datasets.Dataset.from_dict({"text": [text for texts in FILES for text in texts]})
    saved.save_to_disk(str(tmp_path / "one"), num_shards=3)
    datasets.DatasetDict({"train": saved, "dev": saved.select(range(2))}).save_to_disk(str(tmp_path / "splits"))
    for name in ("one", "splits"):
        assert jobs.run(str(tmp_path / name), tmp_path / f"{name}-out", kill_in=0) == "killed"
        assert jobs.run(str(tmp_path / name), tmp_path / f"{name}-out") == ""
        assert tokens(tmp_path / f"{name}-out") == expected
    assert jobs.run(str(tmp_path / "splits"), tmp_path / "out", split="test") == \
        f"--dataset_split test: {tmp_path / 'splits'} has no such split; it has train, dev."
    assert "it has no configs" in jobs.run(str(tmp_path / "one"), tmp_path / "out", config="x")


def test_the_commands(hub: DatasetHub, tmp_path: Path) -> None:
    """Flags, workers, a tokenizer that is trained on the dataset, and the missing package."""
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment = {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([sys.executable, "-m", "pretrain", *words], env=environment, capture_output=True,
                              text=True, cwd=tmp_path)

    done = run("prepare", "--dataset", "org/jsonl.gz", "--dataset_config", "large", "--tokenizer", "tok",
               "--vocab_size", "500", "--out", "out", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert f"dataset org/jsonl.gz, config large, split train, commit {NEW}: 3 files of JSON lines" in done.stdout
    prepare([str(hub.repositories["org/jsonl.gz"].commits[NEW] / "data")], tokenizer=str(tmp_path / "tok"),
            out=str(tmp_path / "local"), workers=1)
    assert tokens(tmp_path / "out") == tokens(tmp_path / "local")
    done = run("tokenizer", "--dataset", "org/moving", "--dataset_revision", "v1", "--out", "other", "--vocab_size",
               "500")
    assert done.returncode == 0, done.stderr
    assert "next: ds-pretrain prepare --dataset org/moving --dataset_revision v1 --tokenizer other" in done.stdout
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "datasets.py").write_text("raise ImportError\n")
    environment["PYTHONPATH"] = f"{tmp_path / 'none'}:{ROOT}"
    done = run("prepare", "--dataset", "org/moving", "--tokenizer", "bytes", "--out", "out2")
    assert done.returncode == 2
    assert "Run `pip install 'ds-pretrain[hub]'`" in done.stderr


@pytest.mark.parametrize(("words", "problem"), [
    ((), "INPUT: neither an input nor --dataset is given"),
    (("a.txt", "--dataset", "org/data"), "--dataset: inputs are given too: a.txt"),
    (("a.txt", "--dataset_split", "test"), "--dataset_split: it has no effect without --dataset"),
    (("--dataset", "org/data", "--format", "text"), "--format: it has no effect with --dataset"),
    (("--dataset", "org/data", "--document_separator", "x"), "--document_separator: it has no effect with --dataset"),
])
def test_flags_that_contradict_each_other(words: tuple[str, ...], problem: str,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    from pretrain.commands.prepare import prepare_main
    from pretrain.errors import ConfigError

    monkeypatch.setattr(sys, "argv", ["prepare", *words, "--tokenizer", "bytes", "--out", "out"])
    with pytest.raises(ConfigError, match=problem):
        prepare_main()
