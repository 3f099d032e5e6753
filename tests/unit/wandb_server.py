"""Minimal W&B server on loopback for its real client: it stores what it receives."""

from __future__ import annotations

import base64
import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer(ThreadingHTTPServer):
    """Answers at `address` while entered. `runs`: id → what was received of that run."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.runs: dict[str, Run] = {}
        self.keys: set[str] = set()  # presented by clients

    def __enter__(self) -> WandbServer:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Ignore clients that disconnect early, which tests do on purpose."""

    def run(self, name: str) -> Run:
        return self.runs.setdefault(name, Run())


class Run:
    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.exit_codes: list[int] = []

    @property
    def losses(self) -> dict[int, float]:
        return {record["step"]: record["loss"] for record in self.history if "loss" in record}


class Handler(BaseHTTPRequestHandler):
    server: WandbServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """No log in the tests' output."""

    def _body(self) -> bytes:
        scheme, _, shown = self.headers.get("Authorization", "").partition(" ")
        if scheme == "Basic":
            self.server.keys.add(base64.b64decode(shown).decode().partition(":")[2])
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._answer({})

    def do_PUT(self) -> None:
        self._body()
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/graphql":
            self._answer({"data": self._graphql(json.loads(body))})
            return
        if stream := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
            self._stream(self.server.run(stream[1]), json.loads(body))
        self._answer({"exitcode": None, "limits": {}})

    def _stream(self, run: Run, sent: dict[str, Any]) -> None:
        files = sent.get("files") or {}
        if history := files.get("wandb-history.jsonl"):
            at, lines = history["offset"], [json.loads(line) for line in history["content"]]
            run.history[at : at + len(lines)] = lines
        for line in files.get("wandb-summary.json", {}).get("content", []):
            run.summary.update(json.loads(line))
        if sent.get("complete"):
            run.exit_codes.append(sent["exitcode"])

    def _graphql(self, asked: dict[str, Any]) -> dict[str, Any]:
        values = asked.get("variables") or {}
        name = values.get("name") or "x"
        if "UpsertBucket" in asked["query"]:
            config = json.loads(values.get("config") or "{}")
            self.server.run(name).config.update(
                {key: value["value"] for key, value in config.items() if "value" in value}
            )
        project = {"id": "p", "name": "duet", "entity": {"id": "e", "name": "me"}}
        bucket = {
            "id": "r",
            "name": name,
            "displayName": name,
            "description": "",
            "config": "{}",
            "sweepName": None,
            "historyLineCount": 0,
        }
        uploads = [
            {"name": f, "uploadUrl": f"{self.server.address}/upload/{i}"}
            for i, f in enumerate(values.get("files") or [])
        ]
        return {
            "viewer": {
                "id": "v",
                "entity": "me",
                "username": "me",
                "flags": "{}",
                "teams": {"edges": []},
            },
            "upsertBucket": {
                "bucket": bucket | {"project": project},
                "inserted": True,
                "sweep": None,
            },
            "serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None, "features": []},
            "createRunFiles": {"runID": "r", "uploadHeaders": [], "files": uploads},
            "model": self._resumed(name) if "RunResumeStatus" in asked["query"] else None,
            "entity": None,
            "project": None,
        }

    def _resumed(self, name: str) -> dict[str, Any] | None:
        """What a client that continues a run asks for."""
        if (run := self.server.runs.get(name)) is None:
            return None
        bucket = {
            "id": "r",
            "name": name,
            "displayName": name,
            "config": "{}",
            "wandbConfig": '{"t": 1}',
            "summaryMetrics": json.dumps(run.summary),
            "historyLineCount": len(run.history),
            "historyTail": json.dumps([json.dumps(record) for record in run.history[-1:]]),
            "eventsLineCount": 0,
            "eventsTail": "[]",
            "logLineCount": 0,
            "tags": [],
            "notes": "",
        }
        return {
            "id": "m",
            "name": "duet",
            "entity": {"id": "e", "name": "me"},
            "bucket": bucket,
        }
