"""A Hugging Face hub on this machine: serves a folder as data sets, as far as reading needs, with faults on demand."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SHA = "0123456789abcdef0123456789abcdef01234567"  # the one revision of everything


class Hub(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root  # root/OWNER/NAME/...
        self.faults: list[str] = []  # how the next reads of file contents fail: "503" or "cut"
        self.down = False  # every request is answered with 503
        self.requests: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        self.server.requests.append(f"{self.command} {url.path}")
        asked = r"(?:/api)?/datasets/([^/]+/[^/]+)(?:/(resolve|tree|revision)/[^/]+/?(.*))?"
        match = re.fullmatch(asked, urllib.parse.unquote(url.path))
        if self.server.down:
            self.send(503)
            return
        folder = self.server.root / match[1] if match else None
        if match is None or folder is None or not folder.is_dir():
            self.send(404, headers={"X-Error-Code": "RepoNotFound"})
        elif match[2] == "resolve":
            self.send_file(folder / match[3])
        elif match[2] == "tree":
            found = (folder / match[3]).glob("**/*" if "recursive=true" in url.query.lower() else "*")
            self.send_json([self.entry(folder, p) for p in sorted(found)])
        else:
            files = [self.entry(folder, p) for p in sorted(folder.rglob("*")) if p.is_file()]
            siblings = [f | {"rfilename": f["path"]} for f in files]
            self.send_json({"id": match[1], "sha": SHA, "siblings": siblings, "private": False})

    def entry(self, folder: Path, path: Path) -> dict[str, Any]:
        """Return what the hub lists of a file or a folder."""
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "0" * 40}
        return {"type": "file", "path": name, "oid": "0" * 40, "size": path.stat().st_size}

    def send_file(self, path: Path) -> None:
        if not path.is_file():
            self.send(404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA})
            return
        content = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        if self.command == "GET" and self.server.faults and path.suffix != ".md":
            if self.server.faults.pop(0) == "503":
                self.send(503)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        elif match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            self.send(206, content[first : last + 1], headers)
        else:
            self.send(200, content, headers)

    def send_json(self, value: Any) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def serve(root: Path) -> Iterator[Hub]:
    hub = Hub(root)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
