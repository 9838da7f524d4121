"""Why token files have a cache of their own: what fsspec's block cache on the disk does. If this fails, look again."""

import inspect
import os
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.cached import CachingFileSystem

from tests.support.range_server import range_server

BLOCK, SIZE = 2**16, 30 * 2**16


def test_its_block_cache_returns_damaged_bytes_and_mixes_versions(tmp_path: Path) -> None:
    content, path = os.urandom(SIZE), tmp_path / "served" / "data.bin"
    path.parent.mkdir()
    path.write_bytes(content)

    def opened(url: str) -> Any:
        system = fsspec.filesystem("blockcache", target_protocol="http", cache_storage=str(tmp_path / "cache"),
                                   check_files=True, skip_instance_cache=True)
        return system.open(url, block_size=BLOCK)

    def read(file: Any) -> bytes:
        return b"".join(iter(lambda: file.read(BLOCK), b""))

    with range_server(path.parent) as server:
        with opened(f"{server.url}/data.bin") as file:
            assert read(file) == content
        [pages] = [each for each in (tmp_path / "cache").iterdir() if each.name != "cache"]
        with pages.open("r+b") as damaged:
            damaged.seek(BLOCK)
            damaged.write(bytes(1000))
        with opened(f"{server.url}/data.bin") as file:
            assert read(file) == content[:BLOCK] + bytes(1000) + content[BLOCK + 1000:]
        (tmp_path / "cache" / "cache").unlink()
        pages.unlink()
        with opened(f"{server.url}/data.bin") as file:
            first = file.read(BLOCK)
            path.write_bytes(bytes(SIZE))
            os.utime(path, (1, 1))
            assert first == content[:BLOCK]
            assert read(file)[-BLOCK:] == bytes(BLOCK)
    assert not [name for name in inspect.signature(CachingFileSystem.__init__).parameters if "size" in name]
