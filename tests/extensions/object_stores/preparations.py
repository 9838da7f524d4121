"""An S3 server as a source of preparations: see tests/data/prepare/test_combinations.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.data.prepare.urls import put_folder
from tests.support.stores import s3_server


@contextmanager
def _s3(corpus: Path, parquet: Path, folder: Path) -> Iterator[list[str]]:
    with s3_server(folder, "bucket"):
        put_folder(corpus, "s3://bucket/corpus")
        yield ["s3://bucket/corpus"]


SOURCES = {"s3": _s3}
