"""An HTTP server that gets the messages of a run, and receivers that fail in several ways."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.launch import free_port

SECRET = "Pl4nt3dS3cret"


class Receivers:
    """A server on the loopback. `messages` are those to /good; the URLs hold SECRET."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        ended = self._ended = threading.Event()
        messages = self.messages

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path.startswith("/close"):
                    self.connection.close()
                    return
                if self.path.startswith("/slow"):
                    ended.wait()
                if self.path.startswith("/good"):
                    messages.append(body)
                self.send_response(500 if self.path.startswith("/error") else 200)
                self.end_headers()

            def log_message(self, *words: Any) -> None:
                del words

        class Server(ThreadingHTTPServer):
            def handle_error(self, *words: Any) -> None:
                """Print no traceback if a client on a busy machine has not waited for the answer."""
                del words

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def url(self, name: str) -> str:
        """Return the URL of a receiver: good, slow, error, close or refused."""
        port = free_port() if name == "refused" else self._server.server_address[1]
        return f"json://user:{SECRET}@127.0.0.1:{port}/{name}/{SECRET}"

    def titles(self) -> list[str]:
        return [message["title"] for message in self.messages]

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def receivers() -> Iterator[Receivers]:
    """Run the server while the context is open."""
    server = Receivers()
    try:
        yield server
    finally:
        server.close()
