"""A stand-in of W&B's server on loopback: it answers what the SDK asks, and keeps what the SDK sends.

GraphQL by the name of the operation, the stream of a run's files, and uploads; written down from what wandb
0.31 sends. It may be slow, refuse, or be away for a while.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from urllib.parse import unquote

from tests.suite.wandb.answers import Answers, Run

KEY = "0123456789" * 4


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that hangs up in the middle is no matter of ours."""


class Server(Answers):
    """As ``with Server() as server``; ``server.environment`` points the SDK at it.

    Attributes:
        trouble: asked before each answer, of the path and the operation: a status to refuse with, or None; it
            may sleep.
        unanswered: operations that it knows no answer to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unanswered: list[str] = []
        self.trouble: Callable[[str, str], int | None] = lambda path, operation: None
        self._lock = Lock()

    def __enter__(self) -> Server:
        self._http = _Quiet(("127.0.0.1", 0), self._handler())
        Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_away()

    def go_away(self) -> None:
        """Nobody listens any more."""
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self._http.server_address[:2])

    @property
    def environment(self) -> dict[str, str]:
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": KEY, "WANDB_MODE": "online"}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def answer(self) -> None:
                body = _body(self)
                asked = json.loads(body) if self.path == "/graphql" else {}
                operation = _operation(asked.get("query", ""))
                status = server.trouble(self.path, operation)
                with server._lock:
                    said = {} if status else server._answer(self.path, operation, _given(asked), body)
                content = json.dumps(said).encode()
                self.send_response(status or 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        for method in ("GET", "POST", "PUT"):
            setattr(Handler, f"do_{method}", Handler.answer)
        return Handler

    def _answer(self, path: str, operation: str, given: dict, body: bytes) -> dict:
        if path == "/graphql":
            answer = getattr(self, f"_on_{_in_snake_case(operation)}", None)
            if answer is None:
                self.unanswered.append(operation)
            try:
                return {"data": answer(given) if answer else {}}
            except Exception as error:  # of this stand-in: the SDK would only ask again
                self.unanswered.append(f"{operation}: {error!r}")
                return {"errors": [{"message": repr(error)}]}
        if path.endswith("/file_stream"):
            self._stream(self._run(path.split("/")[4]), json.loads(body))
        elif path.startswith("/upload/"):
            _, _, owner, name = path.split("/", 3)
            files = self.artifacts[owner]["files"] if owner in self.artifacts else self._run(owner).files
            files[unquote(name)] = body
        return {"exitcode": None, "limits": {}}

    def _stream(self, run: Run, sent: dict) -> None:
        for name, part in (sent.get("files") or {}).items():
            lines = {part["offset"] + i: json.loads(text) for i, text in enumerate(part["content"])}
            if name == "wandb-history.jsonl":
                run.history |= lines
            elif name == "wandb-events.jsonl":
                run.events |= lines
            elif name == "wandb-summary.json":
                run.summary = lines[max(lines)]
        if sent.get("complete"):
            run.exit_code = sent.get("exitcode")


def _in_snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _given(asked: dict) -> dict:
    variables = asked.get("variables") or {}
    return variables.get("input", variables)


def _operation(query: str) -> str:
    named = re.search(r"(?:query|mutation)\s+(\w+)", query)
    return named[1] if named else re.sub(r"\s+", " ", query)[:80]


def _body(request: BaseHTTPRequestHandler) -> bytes:
    read = request.rfile
    if request.headers.get("Transfer-Encoding") == "chunked":
        body = b""
        while size := int(read.readline(), 16):
            body += read.read(size)
            read.readline()
        read.readline()
    else:
        body = read.read(int(request.headers.get("Content-Length") or 0))
    return gzip.decompress(body) if request.headers.get("Content-Encoding") == "gzip" else body
