"""A local stand-in for the W&B API: as much of it as an upload needs. It keeps history by file offset, as W&B does."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server:
    """`requests`: every GraphQL request. `runs`: by id, what was sent: {"bucket": variables, "history": {offset: row},
    "summary": last one, "complete": state at the end}."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.runs: dict[str, dict[str, Any]] = {}
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def answer(self, content: Any, status: int = 200) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def content(self) -> bytes:
                data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

            def do_GET(self) -> None:
                self.answer({})

            def do_PUT(self) -> None:
                self.content()
                self.answer({})

            def do_POST(self) -> None:
                data = self.content()
                if stream := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
                    with outer.lock:
                        outer.stream(stream.group(1), json.loads(data))
                    self.answer({"limits": {}})
                elif self.path != "/graphql":
                    self.answer({})
                else:
                    with outer.lock:
                        self.answer({"data": outer.graphql(json.loads(data))})

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def run(self, name: str) -> dict[str, Any]:
        return self.runs.setdefault(name, {"bucket": {}, "history": {}, "summary": {}, "complete": None})

    def history(self, name: str) -> list[dict[str, Any]]:
        rows = self.run(name)["history"]
        return [rows[offset] for offset in sorted(rows)]

    def stream(self, name: str, request: dict[str, Any]) -> None:
        run = self.run(name)
        for file, part in request.get("files", {}).items():
            if file == "wandb-history.jsonl":
                for number, line in enumerate(part["content"]):
                    run["history"][part["offset"] + number] = json.loads(line)
            elif file == "wandb-summary.json":
                run["summary"] = json.loads(part["content"][-1])
        if "complete" in request:
            run["complete"] = (request["complete"], request.get("exitcode"))

    def graphql(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        query, variables = request["query"], request.get("variables") or {}
        if "upsertBucket" in query:
            name = variables["name"]
            self.run(name)["bucket"] |= {k: v for k, v in variables.items() if v is not None}
            project = {"name": variables.get("project") or "p", "entity": {"name": "team"}}
            bucket = {"id": name, "name": name, "displayName": name, "sweepName": None, "historyLineCount": 0,
                      "project": project, "config": None}  # fmt: skip
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "RunResumeStatus" in query or "historyTail" in query:
            name = variables["name"]
            if name not in self.runs:
                return {"model": {"id": "p", "name": "p", "entity": {"id": "e", "name": "team"}, "bucket": None}}
            rows = self.history(name)
            bucket = {
                "id": name, "name": name, "summaryMetrics": json.dumps(self.run(name)["summary"]), "displayName": name,
                "logLineCount": 0, "historyLineCount": len(rows), "eventsLineCount": 0,
                "historyTail": json.dumps([json.dumps(rows[-1])] if rows else []), "eventsTail": "[]",
                "config": self.run(name)["bucket"].get("config") or "{}", "tags": [], "wandbConfig": '{"t": 1}',
            }  # fmt: skip
            return {"model": {"id": "p", "name": "p", "entity": {"id": "e", "name": "team"}, "bucket": bucket}}
        if "viewer" in query:
            return {"viewer": {"id": "v", "entity": "team", "username": "someone", "flags": "{}",
                               "teams": {"edges": []}}}  # fmt: skip
        if "createArtifact" in query:
            return {
                "createArtifact": {
                    "artifact": {
                        "id": "a",
                        "state": "COMMITTED",
                        "artifactSequence": {"id": "s", "latestArtifact": None},
                    }
                }
            }
        if "createRunFiles" in query:
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": [
                {"name": name, "uploadUrl": f"{self.url}/upload"} for name in variables.get("files", [])]}}  # fmt: skip
        if "upsertView" in query:
            project = {"id": "p", "name": variables["projectName"], "entityName": variables["entityName"]}
            view = {key: variables.get(key) for key in ("name", "type", "displayName", "description", "spec")}
            return {"upsertView": {"view": {"id": "view", **view, "project": project}, "inserted": True}}
        if "GetProjects" in query:
            node = {
                "id": "p",
                "name": "race-sweeps",
                "entityName": "team",
                "createdAt": "",
                "isBenchmark": False,
                "user": None,
            }
            return {"models": {"pageInfo": {"endCursor": None, "hasNextPage": False}, "edges": [{"node": node}]}}
        return {}


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
