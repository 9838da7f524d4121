"""An extension outside of the package brings token files and text at URLs of a scheme of its own."""

import hashlib
import json
from pathlib import Path

import pytest

from pretrain import active_extensions
from pretrain.active_extensions import reader_of
from pretrain.data.prepare.prepare import prepare
from pretrain.errors import REJECTED, ConfigError
from pretrain.extension import Extension
from pretrain.train import main
from tests.extensions.test_own_extension import program, train
from tests.support.cases import config, flags
from tests.support.run_rows import rows

CODE = '''
from dataclasses import dataclass
from pathlib import Path

from pretrain.config.flags.flag import Group
from pretrain.data.text_inputs.stored_file import StoredFile
from pretrain.data.token_files.token_file import TokenFile
from pretrain.errors import ConfigError
from pretrain.extension import Extension

GROUP = Group("shelves")


@dataclass(frozen=True)
class Shelves:
    shelf_folder: str = GROUP.flag(".", "folder of the shelves")


class ShelfTokens:
    note = "data on a shelf"

    def __init__(self, url, settings):
        self.prefix = Path(settings.shelf_folder, url.removeprefix("shelf://"))

    def read_small_file(self, suffix):
        path = Path(f"{self.prefix}{suffix}")
        return path.read_bytes() if path.exists() else None

    def copy_small_files(self):
        return self.prefix, ""

    def open_tokens(self):
        return TokenFile(Path(f"{self.prefix}.bin"))


def texts(url, commits, is_left_out):
    folder = Path(url.removeprefix("shelf://"))
    if not folder.is_dir():
        raise ConfigError(url, problem="there is no such shelf")
    for path in sorted(folder.iterdir()):
        if not is_left_out(path.name):
            yield StoredFile(f"shelf://{path}", path.stat().st_size, str(path.stat().st_mtime_ns), opener=open_text)


def open_text(file, copy):
    return open(file.url.removeprefix("shelf://"), "rb")


EXTENSION = Extension("shelves", "Reads shelves.", settings=Shelves, token_files={"shelf": ShelfTokens},
                      text_inputs={"shelf": texts})
'''
LOADED = ("--extension", "shelves:EXTENSION")
COUNTED = '''
from pretrain.data.text_inputs.chunk import Chunk, Position
from pretrain.data.text_inputs.dataset import DataFile, NamedDataset
from pretrain.extension import Extension


class Counted(NamedDataset):
    """The texts "number 0", "number 1" ..."""

    name = flag = "--count"
    files = (DataFile("numbers", 1000, "rows"),)
    commit = "1"

    def __init__(self, count):
        self.count, self.words = count, ["--count", str(count)]

    def pinned(self, record):
        return self

    def open(self):
        return self

    def describe(self):
        return f"{self.count} numbers"

    def record(self):
        return {"--count": self.count}

    facts = record

    def read(self, path, column, start, *, chunk_bytes, long_bytes):
        for row in range(start.offset, self.count, 10):
            stop = min(row + 10, self.count)
            values = tuple(f"number {number}".encode() for number in range(row, stop))
            yield Chunk(path, "values", Position(row, row + 1), Position(stop, stop + 1), 10, values=values)


def add_flag(parser):
    parser.add_argument("--count", type=int)


EXTENSION = Extension("counted", "Counts.", extends={"prepare": add_flag},
                      datasets={"--count": lambda args: Counted(args.count) if args.count else None})
'''


def test_a_run_trains_on_its_token_files(tmp_path: Path, corpus: str) -> None:
    (tmp_path / "shelves.py").write_text(CODE)
    own, local = tmp_path / "own", tmp_path / "local"
    for folder in (own, local):
        folder.mkdir()
    (own / "shelves.py").write_text(CODE)
    path = Path(corpus)
    printed = train(own, corpus, 1, *LOADED, f"--shelf_folder={path.parent}", steps=3,
                    train_data=f"shelf://{path.name}")
    train(local, corpus, 1, steps=3)
    assert "data on a shelf" in printed
    losses = [[(row["step"], row["loss"]) for row in rows(folder / "run") if "loss" in row] for folder in (own, local)]
    assert losses[0] == losses[1] != []


@pytest.mark.parametrize("ending", ["txt", "jsonl.gz", "parquet"])
def test_text_of_its_files_is_prepared(tmp_path: Path, ending: str) -> None:
    import gzip

    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "shelf"
    folder.mkdir()
    texts = [f"text {number} " + "word " * number for number in range(50)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "a.txt.lock").write_text("not read")
    if ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet")
    else:
        (folder / f"a.{ending}").write_bytes(gzip.compress(lines) if ending.endswith("gz") else b"\n".join(
            text.encode() for text in texts))
    (tmp_path / "shelves.py").write_text(CODE)
    done = program(tmp_path, *LOADED, "prepare", "shelf://shelf", "--tokenizer", "bytes", "--out", "out")
    assert done.returncode == 0, done.stderr
    prepare([str(folder)], tokenizer="bytes", out=str(tmp_path / "local"), workers=1)
    contents = [hashlib.sha256((tmp_path / f"{name}.bin").read_bytes()).digest() for name in ("out", "local")]
    assert contents[0] == contents[1]
    missing = program(tmp_path, *LOADED, "prepare", "shelf://none", "--tokenizer", "bytes", "--out", "none")
    assert (missing.returncode, missing.stderr.count("\n")) == (REJECTED, 1)
    assert "shelf://none: there is no such shelf." in missing.stderr


def test_a_flag_names_a_dataset_in_place_of_inputs(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(COUNTED)
    loaded = ("--extension", "counted:EXTENSION", "prepare", "--tokenizer", "bytes", "--out")
    done = program(tmp_path, *loaded, "out", "--count", "35")
    assert done.returncode == 0, done.stderr
    (tmp_path / "numbers.jsonl").write_text("".join(json.dumps({"text": f"number {number}"}) + "\n"
                                                    for number in range(35)))
    prepare([str(tmp_path / "numbers.jsonl")], tokenizer="bytes", out=str(tmp_path / "local"), workers=1)
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "local.bin").read_bytes()
    assert json.loads((tmp_path / "out.summary.json").read_text())["settings"]["--count"] == 35
    missing = program(tmp_path, *loaded, "none")
    assert (missing.returncode, missing.stderr.count("\n")) == (REJECTED, 1)
    assert "--count is given. Name files, or a dataset." in missing.stderr


def test_a_url_that_no_extension_reads_gets_one_line(tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    others = {name: each for name, each in active_extensions._found.items() if not (each.token_files
                                                                                   or each.text_inputs)}
    monkeypatch.setattr(active_extensions, "_found", others)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(config(1, micro=2)))
    given = {**flags(corpus, layers=1, hidden=32, steps=4), "save": "run", "deepspeed_config": "ds.json",
             "train_data": "s3://bucket/corpus"}
    assert main([f"--{key}={value}" for key, value in given.items()]) == REJECTED
    line = "s3://bucket/corpus: no extension reads s3://. Copy the files to a local disk, and give their path"
    printed = capsys.readouterr()
    assert line in printed.err + printed.out
    with pytest.raises(ConfigError, match=line):
        prepare(["s3://bucket/corpus"], tokenizer="bytes", out="out", workers=1)
    assert not list(tmp_path.glob("out*"))


def test_a_scheme_by_name_wins_and_two_extensions_with_it_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {name: Extension(name, "", token_files={scheme: lambda url, settings: url})
            for name, scheme in (("any", "*"), ("first", "shelf"))}
    monkeypatch.setattr(active_extensions, "_found", both)
    assert [reader_of("token_files", url, "")[0].name for url in ("SHELF://a", "other://a")] == ["first", "any"]
    both["second"] = Extension("second", "", token_files={"shelf": lambda url, settings: url})
    with pytest.raises(ConfigError, match="--x: several extensions read shelf://: first, second"):
        reader_of("token_files", "shelf://a", "--x")
