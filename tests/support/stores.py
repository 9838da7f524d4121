"""Servers of files on this machine: moto's S3, in a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest

from tests.support.launch import free_port


@contextmanager
def s3_server(folder: Path, *buckets: str) -> Iterator[str]:
    """Start an S3 server with empty buckets, whose log is in `folder`. Yields the server's URL.

    Environment variables give the clients of this process, and of those that it starts, the address and credentials.
    """
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    settings = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_DEFAULT_REGION": "us-east-1"}
    before = dict(os.environ)
    with open(folder / "log", "w") as log:
        server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stdout=log, stderr=log)
        os.environ.update(settings)
        fsspec.filesystem("s3").clear_instance_cache()  # an earlier server had another address
        try:
            for bucket in buckets:
                _make_bucket(bucket)
            yield url
        finally:
            os.environ.clear()
            os.environ.update(before)
            server.terminate()
            server.wait()


def _make_bucket(name: str) -> None:
    for _ in range(3000):
        try:
            return fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
        except Exception:  # the server is not up yet
            time.sleep(0.2)
    raise TimeoutError("the S3 server did not start")
