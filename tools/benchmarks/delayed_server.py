"""An HTTP server of one folder, with ranges, whose answers all come with a delay. For `--what store`.

    python -m tools.benchmarks.delayed_server FOLDER SECONDS

prints its port. It ends when its stdin is closed.
"""

import asyncio
import hashlib
import os
import re
import sys
from pathlib import Path


async def _serve(folder: Path, delay_s: float) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await _request(reader):
            await asyncio.sleep(delay_s)
            writer.write(_response(folder, request))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)  # connections are still open


async def _request(reader: asyncio.StreamReader) -> str:
    try:
        return (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, ConnectionError):
        return ""


def _response(folder: Path, request: str) -> bytes:
    method, name, _ = request.split(" ", 2)
    path = folder / Path(name).name
    if not path.is_file():
        return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    size = path.stat().st_size
    etag = hashlib.sha256(f"{path} {size} {path.stat().st_mtime_ns}".encode()).hexdigest()[:32]
    found = re.search(r"\r\nRange: *bytes=(\d+)-(\d+)\r\n", request, re.IGNORECASE)
    first, last = (int(found[1]), min(int(found[2]), size - 1)) if found else (0, size - 1)
    head = f"HTTP/1.1 {'206 Partial Content' if found else '200 OK'}\r\nETag: \"{etag}\"\r\nAccept-Ranges: bytes\r\n" \
           f"Content-Length: {last - first + 1}\r\n" \
           + (f"Content-Range: bytes {first}-{last}/{size}\r\n" if found else "")
    if method == "HEAD":
        return f"{head}\r\n".encode()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return f"{head}\r\n".encode() + os.pread(descriptor, last - first + 1, first)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), float(sys.argv[2])))
