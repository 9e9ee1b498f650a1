"""The part of the Hugging Face Hub that its own client needs to read a repository: trees, and files in ranges."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0" * 40


class Hub(ThreadingHTTPServer):
    """Serves one folder as the repository `org/model`. `fetched` records whether each file was sent as a range."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.root = root
        self.fetched: list[tuple[str, bool]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def entry(self, path: Path) -> dict[str, Any]:
        kind, size = ("directory", 0) if path.is_dir() else ("file", path.stat().st_size)
        return {"type": kind, "oid": COMMIT, "size": size, "path": path.relative_to(self.root).as_posix()}


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        """Do not log requests."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        if path.startswith("/api/models/org/model/tree/main"):
            folder = self.server.root / path.removeprefix("/api/models/org/model/tree/main").strip("/")
            deep = parse_qs(url.query).get("recursive", [""])[0].lower() == "true"
            found = sorted(folder.rglob("*") if deep else folder.iterdir()) if folder.is_dir() else None
            self._answer(404 if found is None else 200, [self.server.entry(entry) for entry in found or ()])
        elif path.startswith("/api/models/org/model"):
            self._answer(200, {"id": "org/model", "sha": COMMIT, "siblings": [], "private": False, "tags": []})
        elif path.startswith("/org/model/resolve/main/"):
            self._file(path.removeprefix("/org/model/resolve/main/"))
        else:
            self._answer(404, {})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        wanted = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        paths = [self.server.root / name for name in wanted]
        self._answer(200, [self.server.entry(path) for path in paths if path.exists()])

    def _file(self, name: str) -> None:
        path = self.server.root / name
        if not path.is_file():
            self._answer(404, {})
            return
        data = path.read_bytes()
        first, last = 0, len(data) - 1
        if "Range" in self.headers:
            low, _, high = self.headers["Range"].removeprefix("bytes=").partition("-")
            first, last = int(low), min(last, int(high or last))
        if self.command != "HEAD":
            self.server.fetched.append((name, "Range" in self.headers))
        headers = {"ETag": '"x"', "X-Repo-Commit": COMMIT, "Content-Range": f"bytes {first}-{last}/{len(data)}"}
        self._send(206 if "Range" in self.headers else 200, data[first : last + 1], headers)

    def _answer(self, status: int, value: object) -> None:
        failed = {"X-Error-Code": "EntryNotFound"} if status == 404 else {}
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **failed})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
