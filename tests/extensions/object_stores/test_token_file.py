"""Token files on a server: the tokens are those of the local file, whatever the server, the cache and others do."""

import multiprocessing
import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pretrain.active_extensions import check_extensions, extensions
from pretrain.cli import new_prefix
from pretrain.commands.data import main as data_main
from pretrain.config.flags.parse import parse_arguments
from pretrain.data.data_spec import absolute_words, parse_data_spec
from pretrain.data.loader import Loader
from pretrain.data.open_datasets import open_datasets
from pretrain.data.samples.dataset import file_record
from pretrain.data.samples.shuffled import ShuffledWindows
from pretrain.data.token_files.check_hashes import check_blocks, find_hashes
from pretrain.data.token_files.hashes import hashes_path
from pretrain.data.token_files.indexed_dataset import IndexedDataset, read_meta
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.errors import ConfigError
from pretrain.extensions.object_stores import page_cache
from pretrain.extensions.object_stores.extension import ObjectStores
from pretrain.extensions.object_stores.page_cache import PAGE_BYTES, WAYS, PageCache, cache_folder
from pretrain.extensions.object_stores.remote_file import RemoteFile
from pretrain.extensions.object_stores.token_file import RemoteTokenFile
from pretrain.remote import StoreError
from tests.support.launch import ROOT
from tests.support.range_server import Server, range_server

FEW_PAGES = 2 * WAYS * (PAGE_BYTES + 64)
TOKENS = 1_500_000  # 46 pages of uint16
KEY = b"k" * 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the data set "data"."""
    folder = tmp_path_factory.mktemp("served")
    tokens = np.random.default_rng(0).integers(0, 60_000, TOKENS, dtype=np.uint16)
    with IndexedWriter(folder / "data", np.uint16) as writer:
        for part in np.array_split(tokens, 300):
            writer.add_document(part)
        writer.finalize()
    (folder / "data.meta.json").write_text(f'{{"vocab_size": 60000, "num_tokens": {TOKENS}, "max_token": 59999}}')
    return folder


@pytest.fixture
def served(folder: Path, tmp_path: Path) -> Iterator[tuple[str, Server]]:
    """Serve a copy of the data. Yields the URL of its prefix, and the server."""
    shutil.copytree(folder, tmp_path / "served")
    with range_server(tmp_path / "served") as server:
        yield f"{server.url}/data", server


def settings(tmp_path: Path, gigabytes: float = 0.1) -> dict[str, ObjectStores]:
    return {"object_stores": ObjectStores(str(tmp_path / "cache"), gigabytes)}


def read_pieces(file: RemoteTokenFile, pieces: list[tuple[int, int]]) -> bytes:
    buffer = np.empty(sum(size for _, size in pieces), np.uint8)
    file.read_pieces([start for start, _ in pieces], [size for _, size in pieces], buffer)
    return buffer.tobytes()


def check_reads(file: RemoteTokenFile, content: bytes, *, seed: int, reads: int = 15) -> None:
    """Read random pieces, and compare them with the content of the local file."""
    numbers = random.Random(seed)
    for _ in range(reads):
        starts = [numbers.randrange(len(content) - 1) for _ in range(8)]
        pieces = [(start, min(numbers.choice([1, 500, 4096, 3 * PAGE_BYTES]), len(content) - start))
                  for start in starts]
        assert read_pieces(file, pieces) == b"".join(content[start:start + size] for start, size in pieces)


def read_in_process(url: str, cache: Path, content_path: Path, seed: int) -> None:
    check_reads(RemoteTokenFile(url, PageCache(cache, FEW_PAGES)), content_path.read_bytes(), seed=seed)


@pytest.mark.parametrize("version", ["ETag", "Last-Modified", "none"])
def test_data_on_a_server_is_the_local_data(served: tuple[str, Server], folder: Path, tmp_path: Path,
                                            version: str) -> None:
    url, server = served
    server.versions = (version,)
    local, remote = IndexedDataset(folder / "data"), IndexedDataset(url, settings(tmp_path))
    assert (remote.fingerprint, remote.sampled_bytes()) == (local.fingerprint, local.sampled_bytes())
    assert (str(remote.prefix), remote.prefix.name, str(remote.bin_path)) == (url, "data", f"{url}.bin")
    assert remote.meta == local.meta == read_meta(url) == read_meta(folder / "data")
    assert np.array_equal(remote.document_offsets(), local.document_offsets())
    assert np.array_equal(remote.tokens(0, TOKENS), local.tokens(0, TOKENS))
    found = find_hashes(remote, tmp_path / "none")
    assert found.current is not None
    check_blocks(remote, found, seconds=0.1)
    local.hashes = find_hashes(local, tmp_path / "none").current
    remote.hashes = found.current
    same = ("sha256", "bin_bytes", "idx_bytes")
    assert [file_record(remote)[key] for key in same] == [file_record(local)[key] for key in same]
    before = len(server.sent_of())
    again = IndexedDataset(url, settings(tmp_path))
    assert np.array_equal(again.tokens(0, TOKENS), local.tokens(0, TOKENS))
    assert (len(server.sent_of()) == before) == (version != "none"), "without a version, nothing is kept"


def test_a_loader_gives_the_local_batches_at_any_position(served: tuple[str, Server], folder: Path,
                                                          tmp_path: Path) -> None:
    """The server is slow, drops connections and fails for a while, and the cache has 16 of the 46 pages."""
    url, server = served
    remote = IndexedDataset(url, settings(tmp_path))
    remote.file = RemoteTokenFile(f"{url}.bin", PageCache(tmp_path / "few", FEW_PAGES))
    loaders = [Loader(ShuffledWindows(data, seq_length=512, seed=3), micro_batch_size=2, gradient_accumulation_steps=2)
               for data in (IndexedDataset(folder / "data"), remote)]
    server.latency_s, server.drops = 0.02, 5
    for step in [*range(0, 20), 7, 8, 9, 400, *range(100, 110)]:
        if step == 105:
            server.status = 503
            threading.Timer(1.0, lambda: setattr(server, "status", 0)).start()
        expected, found = (loader.step(4 * step) for loader in loaders)
        for (tokens, (labels, _)), (remote_tokens, (remote_labels, _)) in zip(expected, found, strict=True):
            assert tokens.equal(remote_tokens)
            assert labels.equal(remote_labels)
    for loader in loaders:
        loader.close()


def test_threads_and_processes_share_a_cache_of_few_pages(served: tuple[str, Server], folder: Path,
                                                          tmp_path: Path) -> None:
    """Two processes, of which one is killed, and four threads of a third one write the same slots."""
    url, _ = served
    content = (folder / "data.bin").read_bytes()
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=read_in_process, args=(f"{url}.bin", tmp_path / "few", folder / "data.bin",
                                                               seed)) for seed in range(2)]
    for process in processes:
        process.start()
    file = RemoteTokenFile(f"{url}.bin", PageCache(tmp_path / "few", FEW_PAGES))
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(check_reads, file, content, seed=10 + number) for number in range(2)]:
            future.result()
        assert processes[1].pid is not None
        os.kill(processes[1].pid, signal.SIGKILL)
        for future in [pool.submit(check_reads, file, content, seed=20 + number) for number in range(4)]:
            future.result()
    processes[0].join()
    processes[1].join()
    assert (processes[0].exitcode, (tmp_path / "few" / "pages").stat().st_size) == (0, 4096 + FEW_PAGES)


def test_a_damaged_cache_gives_no_wrong_tokens(served: tuple[str, Server], folder: Path, tmp_path: Path) -> None:
    url, server = served
    content = (folder / "data.bin").read_bytes()
    cache = PageCache(tmp_path / "large", 64 * FEW_PAGES)
    file = RemoteTokenFile(f"{url}.bin", cache)
    assert file.read(0, len(content)) == content
    before = len(server.sent_of())
    damaged = np.fromfile(cache.path, np.uint8)
    used = np.flatnonzero(damaged[4096:]) + 4096
    flipped = np.random.default_rng(1).choice(used, 3000, replace=False)
    for place in flipped.tolist():  # in pages and in their headers
        damaged[place] ^= 1 << place % 8
    with cache.path.open("r+b") as written:
        written.write(damaged.tobytes())
    assert file.read(0, len(content)) == content
    assert len(server.sent_of()) > before, "damaged pages are requested again"
    with cache.path.open("r+b") as written:
        written.truncate(10_000)
    assert file.read(0, len(content)) == content
    assert PageCache(tmp_path / "large", 64 * FEW_PAGES).get(KEY, 0) is None, "it is made anew"


def test_a_full_disk_costs_requests_only(served: tuple[str, Server], folder: Path, tmp_path: Path,
                                         capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    url, _ = served
    content = (folder / "data.bin").read_bytes()
    file = RemoteTokenFile(f"{url}.bin", PageCache(tmp_path / "full", FEW_PAGES))

    def full(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page_cache.os, "pwrite", full)
    for _ in range(2):
        assert file.read(0, len(content)) == content
    assert capfd.readouterr().err.count("cannot be written (No space left on device)") == 1


def test_pages_of_another_process_are_not_requested_again(served: tuple[str, Server], tmp_path: Path) -> None:
    """Ranks that read the same samples, such as those of tensor parallelism, share one request."""
    url, server = served
    server.latency_s = 0.2
    program = f"""
import sys
from pathlib import Path
from pretrain.extensions.object_stores.page_cache import PageCache
from pretrain.extensions.object_stores.token_file import RemoteTokenFile
file = RemoteTokenFile("{url}.bin", PageCache(Path("{tmp_path}/shared"), {64 * FEW_PAGES}))
print("open", flush=True)
sys.stdin.readline()
file.read(0, 1000)
"""
    processes = [subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(server.sent_of()) == 1


def test_the_oldest_page_of_a_set_is_replaced(tmp_path: Path) -> None:
    cache = PageCache(tmp_path, PAGE_BYTES)  # one set
    for page in range(WAYS + 2):
        cache.put(KEY, page, b"%d" % page)
    cache.put(KEY, 5, b"again")
    assert [cache.get(KEY, page) for page in (0, 1)] == [None, None]
    assert [cache.get(KEY, page) for page in range(2, WAYS + 2)] == [b"2", b"3", b"4", b"again", b"6", b"7", b"8", b"9"]
    assert cache.get(b"other".ljust(16), 5) is None


@pytest.mark.parametrize("version", ["ETag", "Last-Modified"])
def test_a_file_that_changes_in_the_store_ends_the_reading(served: tuple[str, Server], tmp_path: Path,
                                                           version: str) -> None:
    url, server = served
    server.versions = (version,)
    data = IndexedDataset(url, settings(tmp_path))
    file = RemoteTokenFile(f"{url}.bin", PageCache(tmp_path / "few", FEW_PAGES))
    file.wait_without_limit(lambda line, waits: None)
    path = tmp_path / "served" / "data.bin"
    path.write_bytes(bytes(path.stat().st_size))
    os.utime(path, (1, 1))
    with pytest.raises(ConfigError, match="another version now"):
        file.read(0, 100)
    path.unlink()
    with pytest.raises(ConfigError, match=r"data\.bin: there is no such file"):
        IndexedDataset(url, settings(tmp_path))
    assert data.num_tokens == TOKENS


def test_a_store_that_is_silent_is_named_and_waited_for(served: tuple[str, Server], folder: Path, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.remote._SILENT_S", 0.2)
    monkeypatch.setattr("pretrain.remote.LONGEST_WAIT_S", 0.6)
    url, server = served
    file = RemoteTokenFile(f"{url}.bin", None)
    lines: list[tuple[str, bool]] = []
    file.wait_without_limit(lambda line, waits: lines.append((line, waits)))
    server.status = 503
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(file.read, 100_000, 100)
        while not lines:
            time.sleep(0.05)
        server.status = 0
        assert future.result() == (folder / "data.bin").read_bytes()[100_000:100_100]
    assert f"{url}.bin: waits for the store since" in lines[0][0]
    assert "503" in lines[0][0]
    assert ("answers again" in lines[-1][0], lines[-1][1]) == (True, False)
    assert file.remote.last_wait[0] > 0
    server.status = 503
    with pytest.raises(StoreError, match="no answer for"):
        RemoteFile(f"{url}.bin", patience_s=0.5)


def test_wrong_prefixes_and_uploads(served: tuple[str, Server], tmp_path: Path) -> None:
    url, _ = served
    copy = tmp_path / "served"
    with pytest.raises(ConfigError, match=r"nothing\.idx: there is no such file.*Give the prefix"):
        IndexedDataset(url.replace("/data", "/nothing"), settings(tmp_path))
    for word, problem in ((f"{url}?token=secret", "neither"), (f"{url}.bin", r"without \.bin"),
                          ("nosuch://a/b", "protocol nosuch")):
        with pytest.raises(ConfigError, match=problem) as error:
            IndexedDataset(parse_data_spec(word).train[0])
        assert "secret" not in str(error.value)
    assert absolute_words(f"valid={url}") == f"valid={url}"
    assert absolute_words("https://me:word@host/a") == "https://host/a"
    for flags, problem in ((["--train_data=data/corpus", "--data_cache_gb=1"], "--data_cache_gb 1.0: it has no effect"),
                           ([f"--train_data={url}", "--data_cache=s3://bucket/c"], "--data_cache: found s3://bucket/c;"),
                           (["--dataset_module=a:b", "--data_cache=c"], "--dataset_module / --data_cache: found both")):
        with pytest.raises(ConfigError, match=problem):
            check_extensions(parse_arguments([*flags, "--deepspeed_config=x", "--model=tiny", "--save=y"]))
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigError, match="--data_cache"):
        IndexedDataset(url, settings(blocked))
    with pytest.raises(ConfigError, match="--data_cache_gb"):
        IndexedDataset(url, settings(tmp_path / "huge", 1e9))
    with pytest.raises(ArgumentTypeError, match="s3://bucket/out' is a URL"):
        new_prefix("s3://bucket/out")
    idx = (copy / "data.idx").read_bytes()
    (copy / "data.idx").write_bytes(idx[:-8] + b"\1" + idx[-7:])
    with pytest.raises(ConfigError, match=r"data\.(idx|sha256\.json)"):
        IndexedDataset(url, settings(tmp_path))
    (copy / "data.idx").write_bytes(idx)
    with (copy / "data.bin").open("ab") as file:
        file.write(b"12")
    with pytest.raises(ConfigError, match=r"data\.bin: found 3000002 bytes"):
        IndexedDataset(url, settings(tmp_path))


@pytest.mark.parametrize("words", [{"packing": "best_fit"}, *(
    {"sample_order": name} for each in extensions() for name in each.sample_orders)])
def test_other_orders_of_samples(served: tuple[str, Server], folder: Path, tmp_path: Path,
                                 words: dict[str, str]) -> None:
    url, _ = served
    batches = []
    for prefix in (str(folder / "data"), url):
        spec = parse_data_spec(prefix, settings=settings(tmp_path), **words)
        dataset = open_datasets(spec, seq_length=700, seed=1, num_samples={"train": 400})["train"]
        loader = Loader(dataset, micro_batch_size=2, gradient_accumulation_steps=1, eod_token=0)
        batches.append([loader.step(2 * step)[0] for step in range(40)])
        loader.close()
    for (tokens, (labels, weights)), (other_tokens, (other_labels, other_weights)) in zip(*batches, strict=True):
        assert tokens.equal(other_tokens)
        assert labels.equal(other_labels)
        assert weights.equal(other_weights)


def test_a_blend_of_local_files_and_files_on_a_server(served: tuple[str, Server], folder: Path,
                                                      tmp_path: Path) -> None:
    url, _ = served
    with IndexedWriter(tmp_path / "second", np.uint16) as writer:
        for start in range(0, 9000, 100):
            writer.add_document(np.arange(start, start + 100, dtype=np.uint16))
        writer.finalize()
    words = ["0.5", "", "0.5", str(tmp_path / "second")]
    datasets = []
    for prefix in (str(folder / "data"), url):
        words[1] = prefix
        spec = parse_data_spec(words, settings=settings(tmp_path))
        datasets.append(open_datasets(spec, seq_length=64, seed=1)["train"])
    assert datasets[0].fingerprint == datasets[1].fingerprint
    assert np.array_equal(datasets[0].samples(range(300)), datasets[1].samples(range(300)))


def test_commands_read_a_url(served: tuple[str, Server], folder: Path, tmp_path: Path,
                             monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    url, _ = served
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    shown = []
    for prefix in (str(folder / "data"), url):
        for command in ("info", "verify"):
            monkeypatch.setattr(sys, "argv", ["ds-pretrain data", command, prefix])
            assert data_main() == 0
        shown.append(capsys.readouterr().out.replace(prefix, "PREFIX"))
    assert shown[0] == shown[1]
    assert "every byte has its hash" in shown[1]
    monkeypatch.setattr(sys, "argv", ["ds-pretrain data", "hash", url])
    with pytest.raises(ConfigError, match="not written to an object store"):
        data_main()
    assert hashes_path(folder / "data").is_file()


def test_an_empty_home_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "")
    assert cache_folder(None) == Path(pwd.getpwuid(os.getuid()).pw_dir, ".cache/ds-pretrain/data")
