"""Inputs by URL: the bytes are those of local files, whatever the servers do, and after kill -9."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet
import pytest

import pretrain.data.text_inputs.reader
import pretrain.extensions.object_stores.block_reader
import pretrain.extensions.object_stores.remote_file
import pretrain.remote
from pretrain.data.prepare.document_writer import DocumentWriter
from pretrain.data.prepare.prepare import PrepareSettings, prepare
from pretrain.data.prepare.shards import Shard
from pretrain.data.text_inputs.formats import HEAD_BYTES
from pretrain.data.text_inputs.stored_file import StoredFile
from pretrain.data.token_files.indexed_dataset import read_meta
from pretrain.data.tokenizers.train_tokenizer import train_sentencepiece
from pretrain.errors import ConfigError
from pretrain.extensions.object_stores.remote_file import RemoteFile
from pretrain.extensions.object_stores.text_files import open_stored
from tests.data.prepare.helpers import TOOL, merge_shards_of
from tests.data.prepare.urls import FORMATS, SEPARATED, hashes, name_in, prepared, put_folder, write_corpus
from tests.support.dataset_hub import TOKEN, DatasetHub, Repository, dataset_hub
from tests.support.range_server import Server, counting_proxy, etag_of, range_server
from tests.support.rejection import rejection
from tests.support.stores import s3_server

BLOCK, CHUNK = 1 << 14, 1 << 13


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks and chunks, and short waits, so that small files have many of them."""
    monkeypatch.setattr(pretrain.extensions.object_stores.block_reader, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(pretrain.data.text_inputs.reader, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(pretrain.remote, "_FIRST_WAIT_S", 0.01)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[str]:
    """An S3 server that has the corpus at s3://bucket/corpus. Yields its address."""
    with s3_server(tmp_path_factory.mktemp("s3"), "bucket", "empty") as url:
        put_folder(corpus, "s3://bucket/corpus")
        yield url


@pytest.fixture
def hub(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DatasetHub]:
    """A Hub with two commits of the dataset org/books; the branch main is the first one."""
    commits = {"a" * 40: corpus, "b" * 40: write_corpus(tmp_path / "later", 40, seed=1)}
    branches = {"main": "a" * 40, "refs/convert/parquet": "b" * 40}
    with dataset_hub({"org/books": Repository(commits, branches)}) as server:
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": server.url})
        yield server


def test_shards_of_a_store_give_the_bytes_of_local_files(corpus: Path, s3: str, tmp_path: Path) -> None:
    """Text, JSON lines and Parquet are divided inside the files."""
    out = str(tmp_path / "out")
    for index in range(3):
        prepare(["s3://bucket/corpus"], tokenizer="bytes", out=out, settings=SEPARATED, workers=1,
                shard=Shard(index, 3))
    merge_shards_of(out)
    assert hashes(tmp_path / "out") == prepared([str(corpus)], tmp_path / "single")
    prepare(["s3://bucket/corpus"], tokenizer="bytes", out=f"{out}1", settings=SEPARATED, workers=1)
    for ending in ("meta.json", "summary.json"):
        assert Path(f"{out}.{ending}").read_bytes() == Path(f"{out}1.{ending}").read_bytes()


def test_all_shards_read_the_commit_of_the_first_one(hub: DatasetHub, corpus: Path, tmp_path: Path) -> None:
    branches, out = hub.repositories["org/books"].refs, str(tmp_path / "out")

    def make(index: int, **flags: Any) -> None:
        prepare(["hf://datasets/org/books"], tokenizer="bytes", out=out, settings=SEPARATED, workers=1,
                shard=Shard(index, 2), **flags)

    make(0)
    branches["main"] = "b" * 40
    make(0)  # it is complete
    make(1)
    make(0, overwrite=True)
    merge_shards_of(out)
    assert hashes(tmp_path / "out") == prepared([str(corpus)], tmp_path / "single")


@pytest.mark.parametrize("source", ["s3", "http", "hf", "file"])
def test_every_source_and_format_gives_the_bytes_of_local_files(source: str, corpus: Path, s3: str, tmp_path: Path,
                                                                hub: DatasetHub) -> None:
    with ExitStack() as stack:
        if source == "http":
            server = stack.enter_context(range_server(corpus))
            server.drop_rate, server.busy_rate = 0.2, 0.1
        root = {"s3": "s3://bucket/corpus", "hf": "hf://datasets/org/books", "file": f"file://{corpus}",
                "http": server.url if source == "http" else ""}[source]
        for name in FORMATS:
            local = prepared([name_in(corpus, name)], tmp_path / "local")
            assert prepared([name_in(root, name)], tmp_path / "out") == local, name
            (entry,) = (read_meta(tmp_path / "out") or {})["sources"]["list"]
            path = name_in(corpus if source == "file" else root, name).replace("org/books", f"org/books@{'a' * 40}")
            assert (entry["path"], entry["bytes"]) == (path, Path(name_in(corpus, name)).stat().st_size)
            assert "modified_ns" in entry if source == "file" else len(entry["version"]) >= 32
            assert entry.get("revision") == ("a" * 40 if source == "hf" else None)
        if source == "http":
            assert server.num_dropped > 5
            assert any(before == after for before, after in zip(server.requests, server.requests[1:], strict=False))
            return
        whole = prepared([str(corpus)], tmp_path / "local")  # order, hidden files and side files as in a local folder
        assert prepared([root], tmp_path / "out") == whole
        assert prepared([f"{root}/**"], tmp_path / "out") == prepared([f"{corpus}/**"], tmp_path / "local")
        lines = prepared([f"{corpus}/*.jsonl*"], tmp_path / "local")
        assert prepared([f"{root}/*.jsonl*"], tmp_path / "out") == lines


_PROGRAM = f"""
import json, os, runpy, sys, time
import pretrain.data.prepare.partial_output as partial_output
import pretrain.extensions.object_stores.block_reader as block_reader
import pretrain.data.text_inputs.reader as reader
import pretrain.remote as remote
block_reader.BLOCK_BYTES, reader.CHUNK_BYTES, remote._FIRST_WAIT_S = {BLOCK}, {CHUNK}, 0.01
partial_output._SECONDS_BETWEEN_STATES, partial_output._LARGEST_COST = 0.0, float("inf")
save = partial_output.PartialOutput.save
def save_and_wait(output, state):
    save(output, state)
    if not state["finished"] and [state["input"], state["position"][0]] >= json.loads(os.environ["WAIT_AT"]):
        time.sleep(3600)  # for SIGKILL
partial_output.PartialOutput.save = save_and_wait
if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def kill_at(words: list[str], out: Path, place: tuple[int, int]) -> dict[str, Any]:
    """Start a preparation, kill it with SIGKILL when it has saved a state at (input, offset), and return the state."""
    process = start(words, place)
    state: dict[str, Any] = {"input": 0, "position": [0]}
    deadline = time.monotonic() + 600
    while (state["input"], state["position"][0]) < place:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
        path = Path(f"{out}.partial/state.json")
        state = json.loads(path.read_text()) if path.exists() else state
    process.kill()
    process.communicate()
    return state


def start(words: list[str], place: tuple[int, int] = (1000, 0)) -> "subprocess.Popen[str]":
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                            env={**os.environ, "WAIT_AT": json.dumps(place)})


@pytest.mark.parametrize("source", ["s3", "http"])
def test_a_killed_preparation_reads_nothing_again(source: str, corpus: Path, s3: str, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    names = FORMATS
    expected = prepared([name_in(corpus, name) for name in names], tmp_path / "local")
    with counting_proxy(s3) if source == "s3" else range_server(corpus) as server:
        server.drop_rate, server.busy_rate = 0.1, 0.05
        if source == "s3":
            monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        root = "s3://bucket/corpus" if source == "s3" else server.url
        out = tmp_path / "out"
        words = [sys.executable, str(tmp_path / "program.py"), str(TOOL), *(name_in(root, name) for name in names),
                 "--tokenizer", "bytes", "--out", str(out), "--workers", "2", "--document_separator", r"\n\n"]
        index, offset, copied = 0, 0, 0
        for place in ((1, 60_000), (2, 60_000), (4, 120)):  # inside JSON lines, gzip, and the third row group
            state = kill_at(words, out, place)
            check_sent(server, names, index, offset, copied)
            index, offset = state["input"], state["position"][0]
            copied = sum(path.stat().st_size for path in Path(f"{out}.partial").glob(f"copy-{index}"))
            server.sent.clear()
        process = start(words)
        printed, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        assert "continues the preparation" in errors
        check_sent(server, names, index, offset, copied)
        metadata = pyarrow.parquet.read_metadata(corpus / "e.parquet")
        done = metadata.row_group(offset // metadata.row_group(0).num_rows).column(1).dictionary_page_offset
        assert min(sent.start for sent in server.sent_of("e.parquet")) >= done > 0
    assert hashes(out) == expected
    assert not list(tmp_path.glob("out.partial"))
    assert "documents by number of tokens" in printed


def check_sent(server: Server, names: tuple[str, ...], index: int, offset: int, copied: int) -> None:
    """Check that a resume at a position did not ask for what had been read."""
    for name in names[:index]:
        assert server.sent_of(name) == [], name
    first = min((sent.start for sent in server.sent_of(names[index])), default=None)
    if names[index] == "b.jsonl":
        assert first == offset
    elif names[index] == "c.jsonl.gz":
        complete = copied // (BLOCK + 8) * BLOCK  # bytes of complete blocks of the copy
        assert complete > 0
        assert first is None or first >= complete


class Stopped(BaseException):
    """The preparation ends here, as by a signal."""


def stop_after(num_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    add, left = DocumentWriter.add, [num_batches]

    def add_some(writer: DocumentWriter, *args: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Stopped
        add(writer, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DocumentWriter, "add", add_some)


def run_stopped(word: str, out: Path, num_batches: int, settings: PrepareSettings | None = None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_after(num_batches, patch)
        with pytest.raises(Stopped):
            prepare([word], tokenizer="bytes", out=str(out), settings=settings, workers=1, seconds_between_states=0)


def test_a_resume_reads_the_commit_with_which_the_preparation_began(hub: DatasetHub, corpus: Path,
                                                                    tmp_path: Path) -> None:
    branches = hub.repositories["org/books"].refs
    word, out = "hf://datasets/org/books@main", tmp_path / "out"
    run_stopped(word, out, 5, SEPARATED)
    branches["main"] = "b" * 40
    hub.sent.clear()
    prepare([word], tokenizer="bytes", out=str(out), settings=SEPARATED, workers=1)
    assert not hub.sent_of("b.jsonl") or min(sent.start for sent in hub.sent_of("b.jsonl")) > 0
    assert hashes(out) == prepared([str(corpus)], tmp_path / "local")
    meta = read_meta(out) or {}
    assert {entry["revision"] for entry in meta["sources"]["list"]} == {"a" * 40}
    assert meta["filters"] == {"on_error": "stop", "deduplicate": False}
    later = prepared([str(tmp_path / "later" / "b.jsonl")], tmp_path / "local")
    quoted = "hf://datasets/org/books@refs%2Fconvert%2Fparquet/b.jsonl"
    assert prepared([quoted], tmp_path / "converted") == later
    # Other settings begin again: with the commit that the branch names now.
    run_stopped(f"{word}/*.jsonl", tmp_path / "new", 1)
    branches["main"] = "a" * 40
    prepare([f"{word}/*.jsonl"], tokenizer="bytes", out=str(tmp_path / "new"), workers=1, overwrite=True,
            settings=PrepareSettings(deduplicate=True))
    assert (read_meta(tmp_path / "new") or {})["sources"]["list"][0]["revision"] == "a" * 40


def change_at(moment: str, change: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `change` when a few batches have been written, or after the last one."""
    add, check, num_batches = DocumentWriter.add, pretrain.data.prepare.prepare.check_unchanged, [0]

    def add_and_change(writer: DocumentWriter, *args: object) -> None:
        num_batches[0] += 1
        if num_batches[0] == 3:
            change()
        add(writer, *args)  # type: ignore[arg-type]

    def change_and_check(*args: object) -> None:
        change()
        check(*args)  # type: ignore[arg-type]

    if moment == "middle":
        monkeypatch.setattr(DocumentWriter, "add", add_and_change)
    else:
        monkeypatch.setattr(pretrain.data.prepare.prepare, "check_unchanged", change_and_check)


@pytest.mark.parametrize("source", ["s3", "http", "http without ETag"])
def test_a_source_that_changes_is_named(source: str, s3: str, tmp_path: Path) -> None:
    """While it is read, between a stop and the resume, and after its last byte was read."""
    folder = tmp_path / "served"
    folder.mkdir()
    lines = b"".join(json.dumps({"text": f"{number} {'x' * 500}"}).encode() + b"\n" for number in range(400))

    def write(content: bytes, hours: int) -> None:
        (folder / "x.jsonl").write_bytes(content)
        os.utime(folder / "x.jsonl", (1e9 + 3600 * hours,) * 2)
        if source == "s3":
            put_folder(folder, "s3://bucket/changing")

    with range_server(folder) as server:
        server.versions = ("Last-Modified",) if source == "http without ETag" else server.versions
        url = "s3://bucket/changing/x.jsonl" if source == "s3" else f"{server.url}/x.jsonl"
        for moment, letter in (("middle", b"y"), ("end", b"z")):
            write(lines, 1)
            with pytest.MonkeyPatch.context() as patch:
                change_at(moment, lambda letter=letter: write(lines.replace(b"x", letter), 2), patch)  # type: ignore[misc]
                with pytest.raises(ConfigError, match=r"x\.jsonl: it was changed while it was read"):
                    prepare([url], tokenizer="bytes", out=str(tmp_path / moment), workers=1)
            assert not list(tmp_path.glob(f"{moment}.idx"))
        write(lines, 1)
        run_stopped(url, tmp_path / "resumed", 4)
        write(lines.replace(b"x", b"y"), 4)
        with pytest.raises(ConfigError, match=r"the following was different: \S*x\.jsonl\. Give the same command"):
            prepare([url], tokenizer="bytes", out=str(tmp_path / "resumed"), workers=1)
        write(lines, 1)
        prepare([url], tokenizer="bytes", out=str(tmp_path / "resumed"), workers=1)
        assert hashes(tmp_path / "resumed") == prepared([str(folder / "x.jsonl")], tmp_path / "local")


@pytest.mark.parametrize("name", FORMATS[1:])
def test_a_change_is_reported_through_every_library(name: str, corpus: Path, tmp_path: Path) -> None:
    """gzip and Arrow read through Python, and must not replace the error."""
    file = tmp_path / "served" / name
    file.parent.mkdir()
    content = (corpus / name).read_bytes()
    file.write_bytes(content)
    with range_server(file.parent) as server, pytest.MonkeyPatch.context() as patch:
        change_at("middle", lambda: file.write_bytes(content[:-1] + b"x"), patch)
        with pytest.raises(ConfigError, match=rf"{name}: it was changed while it was read: the store has another"):
            prepare([f"{server.url}/{name}"], tokenizer="bytes", out=str(tmp_path / "out"), workers=1)


def test_an_answer_that_stalls_is_continued(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain.extensions.object_stores.remote_file, "_ANSWER_S", 1.0)
    with range_server(corpus) as server:
        server.stalls = 2
        local = prepared([str(corpus / "b.jsonl")], tmp_path / "local")
        assert prepared([f"{server.url}/b.jsonl"], tmp_path / "out") == local
        starts = [sent.start for sent in server.sent_of("b.jsonl")]
        assert any(start % BLOCK for start in starts), "the rest of a block was asked for"


def test_a_signature_opens_a_file_and_is_written_nowhere(corpus: Path, s3: str, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch,
                                                         capfd: pytest.CaptureFixture[str]) -> None:
    """Also when another signature continues the work, and the server refuses HEAD."""
    signed = str(fsspec.filesystem("s3").sign("bucket/corpus/c.jsonl.gz"))
    assert "Signature=" in signed
    assert prepared([signed], tmp_path / "out") == prepared([str(corpus / "c.jsonl.gz")], tmp_path / "local")
    with range_server(corpus) as server:
        server.allows_head = False
        server.password = "key=secret*1"
        url = f"{server.url}/b.jsonl"
        run_stopped(f"{url}?key=secret*1", tmp_path / "b", 4)
        written = {path: path.read_bytes() for path in tmp_path.glob("b.partial/*")}
        server.password = "key=secret*2"
        with pytest.raises(ConfigError, match="the store refuses access: 403") as failure:
            prepare([f"{url}?key=secret*1"], tokenizer="bytes", out=str(tmp_path / "b"), workers=1)
        prepare([f"{url}?key=secret*2"], tokenizer="bytes", out=str(tmp_path / "b"), workers=1)
        assert max(sent.num_bytes for sent in server.sent) == HEAD_BYTES  # its size is asked for without reading it
        assert hashes(tmp_path / "b") == prepared([str(corpus / "b.jsonl")], tmp_path / "local")
        server.password = "Basic bWU6cGFAc3M="
        assert prepared([url.replace("//", "//me:pa%40ss@")], tmp_path / "c") == hashes(tmp_path / "b")
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password pa@ss")
        (tmp_path / "netrc").chmod(0o600)
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        assert prepared([url], tmp_path / "d") == hashes(tmp_path / "b")
        (tmp_path / "netrc").unlink()
    written |= {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert len(written) > 15
    texts = [*written.values(), *map(str.encode, capfd.readouterr()), str(failure.value).encode()]
    assert not [text for text in texts if b"secret*" in text or b"Signature" in text or b"pa%40" in text]


@pytest.mark.parametrize(("url", "shown"), [
    ("https://me:p@ss@host/a?X-Amz-Signature=1&x=2", "https://host/a"), ("https://host/a?token", "https://host/a"),
    ("https://token@host/a", "https://host/a"), ("ftp://me:pass@host/a", "ftp://host/a"),
    ("403, url='HTTPS://host/a?b=c'", "403, url='HTTPS://host/a"), ("s3://bucket/a?versionId=1", "s3://bucket/a"),
    ("s3://bucket/part-?.jsonl", "s3://bucket/part-?.jsonl"),
    ("hf://datasets/org/name@v1/*", "hf://datasets/org/name@v1/*"),
    ("abfs://box@account/a?sv=1&sig=2 other", "abfs://box@account/a other")])
def test_names_have_no_credentials(url: str, shown: str) -> None:
    assert pretrain.remote.without_credentials(url) == shown


def test_only_the_end_and_the_column_of_a_parquet_file_are_read(corpus: Path, tmp_path: Path) -> None:
    metadata = pyarrow.parquet.read_metadata(corpus / "e.parquet")
    column = sum(metadata.row_group(group).column(1).total_compressed_size for group in range(metadata.num_row_groups))
    with range_server(corpus) as server:
        prepared([f"{server.url}/e.parquet"], tmp_path / "out")
        read = [sent for sent in server.sent_of("e.parquet") if sent.num_bytes <= BLOCK]
        assert sum(sent.num_bytes for sent in read) == column
        assert len(server.sent_of("e.parquet")) - len(read) == 3  # the beginning, and the end twice


def test_a_damaged_copy_of_a_compressed_file_is_fetched_again_from_there(corpus: Path, tmp_path: Path) -> None:
    whole = (corpus / "c.jsonl.gz").read_bytes()
    with range_server(corpus) as server:
        stored = StoredFile(f"{server.url}/c.jsonl.gz", len(whole), etag_of(whole), opener=open_stored)
        copy = tmp_path / "copy"
        for damaged_at, first in ((None, 0), (None, None), (3 * BLOCK, 2 * BLOCK), (20, 0)):
            if damaged_at is not None:
                content = bytearray(copy.read_bytes())
                content[damaged_at : damaged_at + 9] = bytes(9)
                copy.write_bytes(content)
            server.sent.clear()
            reader = stored.open(copy)
            assert reader.read(100) + reader.read() == whole
            reader.close()
            assert min((sent.start for sent in server.sent_of(".gz")), default=None) == first


def test_a_server_without_ranges(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with range_server(corpus) as server:
        server.has_ranges = False
        url = f"{server.url}/b.jsonl"
        assert prepared([url], tmp_path / "out") == prepared([str(corpus / "b.jsonl")], tmp_path / "local")
        assert len(server.sent_of("b.jsonl")) <= 3  # to detect the format, and to read it: two blocks at the same time
        monkeypatch.setattr(pretrain.extensions.object_stores.remote_file, "_WHOLE_BYTES", 100_000)
        with pytest.raises(ConfigError, match=r"sends the complete file instead of the range .* curl -O, and give the"):
            prepared([url], tmp_path / "out")


def test_a_tokenizer_is_trained_on_a_url(corpus: Path, s3: str, tmp_path: Path) -> None:
    local = train_sentencepiece([str(corpus / "b.jsonl")], tmp_path / "local", vocab_size=320)
    words = [sys.executable, str(TOOL), "s3://bucket/corpus/b.jsonl", "--tokenizer", str(tmp_path / "new"),
             "--vocab_size", "320", "--out", str(tmp_path / "out"), "--workers", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "new" / "tokenizer.model").read_bytes() == local.path.read_bytes()
    prepare([str(corpus / "b.jsonl")], tokenizer=str(local.path), out=str(tmp_path / "local"), workers=1)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "local")


WRONG_OF_S3 = {
    "s3://missing/x": "s3://missing/x: The specified bucket does not exist.",
    "s3://missing": "s3://missing: there is no such file or folder.",
    "s3://bucket/none.txt": "s3://bucket/none.txt: there is no such file or folder; for all names that begin like "
                            "this, add a *.",
    "s3://bucket/corp": "there is no such file or folder",
    "s3://bucket/none/": "there is no such file or folder",
    "s3://empty": "s3://empty: there are no files to read below it.",
    "s3://bucket/corpus/*.csv": "s3://bucket/corpus/*.csv: no file matches this pattern.",
    "s3://bucket/corpus/part-?.csv": "s3://bucket/corpus/part-?.csv: no file matches this pattern.",
    "https:///a": "https:///a: it names no server. Give a URL such as https://host/file.",
    "s3://": "s3://: it names no file of a store. Give a URL such as s3://bucket/name.",
    "s4://bucket/x": "s4://bucket/x: found the protocol s4://; expected a URL that fsspec knows such as",
    "abfs://container/x": "abfs://container/x: abfs:// needs a package: Install adlfs",
}
WRONG_OF_WEB = {
    "URL/none.txt": "URL/none.txt: there is no such file.",
    "URL/*.txt": "URL/*.txt: a web server has no list of its files, so * cannot be used. Give the URL of each file",
    "URL/index.html": "URL/index.html: the server sends a web page (HTML). Give the URL of the file itself",
    "URL/empty.txt": "URL/empty.txt: there is no text.",
    "URL/busy?key=secret": "URL/busy: no answer for ",
    "http://127.0.0.1:9/x": "http://127.0.0.1:9/x: no answer for ",
    "ftp://127.0.0.1:9/x": "ftp://127.0.0.1:9/x: the server cannot be reached: [Errno 111] Connection refused",
}
WRONG_OF_HUB = {
    "hf://datasets/org/none/x": "(repository not found)",
    "hf://datasets/org/books@v9/x": "(revision not found)",
    "hf://datasets/org/books/none": "hf://datasets/org/books/none: there is no such file or folder",
    "hf://datasets/org/books/*.csv": "hf://datasets/org/books/*.csv: no file matches this pattern",
    "hf://datasets/books": "Repository id must be 'namespace/name', got 'books'",
}


def error_of(word: str, out: Path) -> str:
    error = rejection(prepare, [word], tokenizer="bytes", out=str(out), workers=1)
    assert not list(out.parent.glob(f"{out.name}*"))
    return error


def test_wrong_urls(corpus: Path, s3: str, tmp_path: Path, hub: DatasetHub,
                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RemoteFile.__init__.__kwdefaults__, "patience_s", 0.3)
    for word, message in {**WRONG_OF_S3, **WRONG_OF_HUB}.items():
        assert message in error_of(word, tmp_path / "out"), word
    hub.repositories["org/books"].access = "private"
    assert "the store refuses access: 401" in error_of("hf://datasets/org/books/b.jsonl", tmp_path / "out")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert prepared(["hf://datasets/org/books/b.jsonl"], tmp_path / "hf") == prepared([str(corpus / "b.jsonl")],
                                                                                      tmp_path / "local")
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "index.html").write_text("<!DOCTYPE html>\n<html>\n")
    (tmp_path / "web" / "empty.txt").write_bytes(b"")
    with range_server(tmp_path / "web") as server:
        for word, message in WRONG_OF_WEB.items():
            server.busy_rate = float("busy" in word)
            found = error_of(word.replace("URL/", f"{server.url}/"), tmp_path / "out")
            assert message.replace("URL/", f"{server.url}/") in found, word
            assert "secret" not in found


def test_missing_credentials_and_packages(corpus: Path, s3: str, tmp_path: Path) -> None:
    fsspec.filesystem("s3").chmod("bucket/corpus/b.jsonl", acl="public-read")
    (tmp_path / "s3fs.py").write_text("raise ImportError('no s3fs here')")
    without = {name: value for name, value in os.environ.items() if name not in ("AWS_ACCESS_KEY_ID",)}
    without |= {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)}
    words = [sys.executable, str(TOOL), "s3://bucket/corpus/b.jsonl", "--tokenizer", "bytes", "--out",
             str(tmp_path / "out"), "--workers", "1"]
    missing = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    for environment, code, message in (
            (without, 2, "Unable to locate credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
             "AWS_PROFILE; for a public bucket, set FSSPEC_S3_ANON=true.\n"),
            (missing, 2, "run `pip install 'ds-pretrain[s3]'`"),
            ({**without, "FSSPEC_S3_ANON": "true"}, 0, "")):
        done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=environment)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        assert message.lower() in done.stderr.lower()


def test_google_storage(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gcsfs with an emulator: the client's own retries, and errors of Google's servers, are not tested."""
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    # gcsfs 2026.10 would ask for the kind of the bucket through gRPC, which no emulator has.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    pytest.importorskip("gcsfs")
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    try:
        port = server._api._httpd.server_address[1]
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        put_folder(corpus, "gs://bucket/corpus")
        expected = prepared([str(corpus)], tmp_path / "local")
        assert prepared(["gs://bucket/corpus"], tmp_path / "out") == expected
        lines = prepared([f"{corpus}/*.jsonl*"], tmp_path / "local")
        assert prepared(["gs://bucket/corpus/*.jsonl*"], tmp_path / "out") == lines
    finally:
        server.stop()
