"""data/fineweb_edu/prepare.py with a Hugging Face hub on this machine, whose connections break."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import subprocess
import threading
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import assert_one_line, shell
from fineweb import PREPARE, SMALL, as_bytes, tokens, write_documents

from data.meta_files import read_record

pytestmark = pytest.mark.slow
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


@pytest.fixture
def hub(tmp_path, documents):
    root = tmp_path / "hub"
    repo = root / "HuggingFaceFW" / "fineweb-edu"
    third = len(documents) // 3
    for i in range(3):
        part = documents[i * third : (i + 1) * third if i < 2 else None]
        write_documents(repo / "sample" / "10BT" / f"{i:03}_00000.parquet", part)
    server = Hub(root)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def online(hub: Hub, tmp_path: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs prepare.py against our hub, in a process of its own: the hub's address is read on import."""
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "no_proxy": "127.0.0.1"}
    env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return shell("python", PREPARE, *SMALL, *args, "--out", tmp_path / "out", env=env)


def test_subset_streams_from_the_hub_in_parts_of_one_revision_through_faults_of_the_network(tmp_path, hub, documents):
    for number, faults in ((1, ["503"]), (0, ["cut"])):
        hub.faults = faults
        for _ in range(3):  # where the hub's own library gives up, the same command continues
            done = online(hub, tmp_path, f"--part={number}/2")
            if done.returncode == 0:
                break
            assert_one_line(done.stderr.splitlines()[-1], "same command continues")
        assert done.returncode == 0, done.stderr
    meta = read_record(tmp_path / "out")
    assert (meta["source"], meta["revision"]) == ("HuggingFaceFW/fineweb-edu, sample-10BT", SHA)
    assert tokens(tmp_path / "out").astype(np.uint8).tobytes() == as_bytes(documents)
    assert "already prepared" in online(hub, tmp_path, "--part=0/2").stdout


def test_what_the_hub_does_not_have_and_a_network_that_stays_away_are_one_line(tmp_path, hub):
    assert_one_line(online(hub, tmp_path, "--subset=nope").stderr, "--subset nope", "sample-10BT")
    (hub.root / "HuggingFaceFW").rename(hub.root / "gone")
    assert_one_line(online(hub, tmp_path).stderr, "404")
    hub.down = True
    done = online(hub, tmp_path)
    assert done.returncode == 1
    assert_one_line(done.stderr, "network", "--source FILE")
