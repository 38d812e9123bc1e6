"""Models by name: huggingface_hub itself against a server of this machine that answers as the Hub does."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tiny import saved

SHA = "a" * 40
FILES = {"consolidated.safetensors": b"x" * 100, "original/model.safetensors": b"y" * 100, "pytorch_model.bin": b"z"}


class Hub(BaseHTTPRequestHandler):
    """The few answers of the Hub that a download needs, for one model."""

    files: dict[str, bytes]
    asked: list[str]

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.asked.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/me/model/revision/"):
            if path.rpartition("/")[2] not in ("main", SHA, "v1"):
                return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            siblings = [{"rfilename": name} for name in self.files]
            return self.answer(200, json.dumps({"id": "me/model", "sha": SHA, "siblings": siblings}).encode())
        if path.startswith("/api/models/me/model/tree/"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in self.files.items()]
            return self.answer(200, json.dumps(tree).encode())
        if path.startswith("/api/models/me/gated/"):
            return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        name = path.removeprefix(f"/me/model/resolve/{SHA}/")
        if name in self.files:
            data = self.files[name]
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
            return self.answer(200, data, headers)
        return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, code, body, headers=None):
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", **(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def hub():
    _, folder = saved("llama")
    files = {path.name: path.read_bytes() for path in folder.iterdir()} | FILES | {"tokenizer.json": b"{}"}
    handler = type("Served", (Hub,), {"files": files, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server, handler
    server.shutdown()


def fetch(hub, home, model="me/model", offline=False, address=None, **arguments):
    """What `fetched` gives or says, in a process of its own: huggingface_hub reads its settings once."""
    address = address or f"http://127.0.0.1:{hub[0].server_address[1]}"
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"HF_HUB_OFFLINE": "1"} if offline else {}
    code = f"from flexgen.runtime.loading.hub import fetched; print(fetched({model!r}, **{arguments!r}))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_a_model_is_fetched_once_and_then_found(hub, tmp_path):
    got = fetch(hub, tmp_path)
    assert os.path.isfile(f"{got}/config.json"), got
    names = set(os.listdir(got))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names and not names & {*FILES, "original"}
    hub[1].asked.clear()
    assert fetch(hub, tmp_path) == fetch(hub, tmp_path, offline=True) == got
    assert hub[1].asked == []
    assert fetch(hub, tmp_path, revision="v1") == got
    other = fetch(hub, tmp_path, download_dir=str(tmp_path / "other"))
    assert other.startswith(str(tmp_path / "other")) and os.path.isfile(f"{other}/config.json")


def test_what_cannot_be_had_says_why(hub, tmp_path):
    assert "HubError: me/nothing is neither a directory here nor a model on the Hub" in fetch(hub, tmp_path, "me/nothing")
    assert "me/gated is gated: accept its terms" in fetch(hub, tmp_path, "me/gated")
    assert "me/model has no revision 'v9'" in fetch(hub, tmp_path, revision="v9")
    offline = fetch(hub, tmp_path / "empty", offline=True)
    assert "me/model is no directory here, the cache holds nothing of it" in offline and "hf download me/model" in offline
    unreachable = fetch(hub, tmp_path / "empty", address="http://127.0.0.1:9")
    assert "me/model is no directory here, the cache holds nothing of it, and the Hub did not give it" in unreachable


def test_a_directory_is_taken_as_it_is(hub, tmp_path):
    assert fetch(hub, tmp_path, str(tmp_path)) == str(tmp_path)
    assert "revision='v1' is of a model on the Hub" in fetch(hub, tmp_path, str(tmp_path), revision="v1")
    assert fetch(hub, tmp_path, "no/such/folder") == "no/such/folder"
