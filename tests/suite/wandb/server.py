"""A stand-in of W&B's server on loopback: it answers what the SDK asks, and keeps what the SDK sends.

GraphQL by the name of the operation, the stream of a run's files, and uploads; written down from what wandb
0.31 sends. It may be slow, refuse, or be away for a while.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from urllib.parse import unquote

ENTITY, KEY = "tester", "0123456789" * 4


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that hangs up in the middle is no matter of ours."""


@dataclass
class Run:
    """What a run has sent: ``history`` and ``events`` by the number of the line, ``files`` by name."""

    id: str
    fields: dict = field(default_factory=dict)
    history: dict[int, dict] = field(default_factory=dict)
    summary: dict = field(default_factory=dict)
    events: dict[int, dict] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    alerts: list[dict] = field(default_factory=list)
    exit_code: int | None = None
    resumed: int = 0

    @property
    def config(self) -> dict:
        return {k: v["value"] for k, v in json.loads(self.fields.get("config") or "{}").items()}

    @property
    def rows(self) -> list[dict]:
        return [self.history[line] for line in sorted(self.history)]


class Server:
    """As ``with Server() as server``; ``server.environment`` points the SDK at it.

    Attributes:
        trouble: asked before each answer, of the path and the operation: a status to refuse with, or None; it
            may sleep.
        unanswered: operations that it knows no answer to.
    """

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.artifacts: dict[str, dict] = {}
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

    def run(self, ending: str) -> Run:
        """The only one whose name ends so, ``-0`` that of seed 0."""
        (found,) = (run for run in self.runs.values() if run.id.endswith(ending))
        return found

    def _run(self, name: str) -> Run:
        return self.runs.setdefault(name, Run(name))

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

    def _on_viewer(self, given: dict) -> dict:
        who = {"id": "u", "entity": ENTITY, "username": ENTITY, "name": ENTITY, "email": "", "flags": "{}"}
        return {"viewer": who | {"admin": False, "teams": {"edges": []}, "apiKeys": {"edges": []}}}

    def _on_upsert_bucket(self, given: dict) -> dict:
        inserted = given["name"] not in self.runs
        run = self._run(given["name"])
        run.fields |= {key: value for key, value in given.items() if value is not None}
        return {"upsertBucket": {"bucket": self._bucket(run), "inserted": inserted}}

    def _bucket(self, run: Run) -> dict:
        project = {"id": "p", "name": run.fields["project"], "entity": {"id": "e", "name": ENTITY}}
        return {
            **{"id": f"id-{run.id}", "name": run.id, "displayName": run.fields.get("displayName")},
            **{"description": None, "config": run.fields.get("config"), "sweepName": run.fields.get("sweep")},
            **{"project": project, "historyLineCount": len(run.history)},
        }

    def _on_run_resume_status(self, given: dict) -> dict:
        run = self.runs.get(given["name"])
        project = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": ENTITY}}
        if run is None:
            return {"model": project | {"bucket": None}}
        run.resumed += 1
        bucket = self._bucket(run) | {
            **{"historyLineCount": len(run.history), "eventsLineCount": len(run.events), "logLineCount": 0},
            **{"historyTail": _tail(run.history), "eventsTail": _tail(run.events)},
            **{"summaryMetrics": json.dumps(run.summary), "config": run.fields.get("config"), "tags": []},
            "wandbConfig": json.dumps({"t": 1}),
        }
        return {"model": project | {"bucket": bucket}}

    def _on_organization_core_weave_organization_id(self, given: dict) -> dict:
        return {"entity": {"organization": {"coreWeaveOrganizationId": None}}}

    def _on_notify_scriptable_run_alert(self, given: dict) -> dict:
        self._run(given["runName"]).alerts.append(given)
        return {"notifyScriptableRunAlert": {"success": True}}

    def _on_create_run_files(self, given: dict) -> dict:
        files = [{"name": n, "uploadUrl": self._upload(given["run"], n)} for n in given["files"]]
        return {"createRunFiles": {"runID": f"id-{given['run']}", "uploadHeaders": [], "files": files}}

    def _on_server_features_query(self, given: dict) -> dict:
        return {"serverInfo": {"features": []}}

    def _on_artifact_type(self, given: dict) -> dict:
        return {"project": {"artifact": None}}

    def _on_create_artifact(self, given: dict) -> dict:
        name = f"artifact-{given['artifactCollectionName']}"
        self.artifacts[name] = {"asked": given, "files": {}, "committed": False}
        made = {"id": name, "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
        return {"createArtifact": {"artifact": made}}

    def _on_create_artifact_manifest(self, given: dict) -> dict:
        file = {"id": "f", "uploadUrl": self._upload(given["artifactID"], given["name"]), "uploadHeaders": []}
        return {"createArtifactManifest": {"artifactManifest": {"id": "m", "file": file}}}

    def _on_create_artifact_files(self, given: dict) -> dict:
        none = {"storagePath": None, "uploadHeaders": [], "uploadMultipartUrls": None}
        files = [(f["artifactID"], f["name"]) for f in given["artifactFiles"]]
        nodes = [none | {"uploadUrl": self._upload(i, n), "artifact": {"id": i}} for i, n in files]
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}

    def _on_commit_artifact(self, given: dict) -> dict:
        self.artifacts[given["artifactID"]]["committed"] = True
        return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": "d"}}}

    def _upload(self, owner: str, name: str) -> str:
        return f"{self.url}/upload/{owner}/{name}"


def _in_snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _tail(lines: dict[int, dict]) -> str:
    """The last line, as the SDK reads it: JSON of a list of JSON."""
    return json.dumps([json.dumps(lines[max(lines)])] if lines else [])


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
