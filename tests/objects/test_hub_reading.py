"""Traces and policies in a data set repository of the hub, read where they lie."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
from huggingface_hub import constants

from kvp import load_policy
from kvp.artifacts.addresses import files_below, opened
from kvp.errors import AddressError
from kvp.programs import main as kvp
from kvp.store import TraceReader
from trace_collect.config import CollectConfig


def store_tool(argv: list[str]) -> int:
    """Run `kvp store`."""
    return kvp(["store", *argv])


REPOSITORY = "org/some-traces"
COMMIT = "a" * 40


class _Hub(BaseHTTPRequestHandler):
    """What the file system of huggingface_hub asks for, of one data set."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    requests: list[str]

    def log_message(self, *_: object) -> None:
        """Keep quiet."""

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        api, raw = f"/api/datasets/{REPOSITORY}", f"/datasets/{REPOSITORY}/resolve/"
        if re.fullmatch(rf"{api}(/revision/\w+)?", path):
            self._json({"id": REPOSITORY, "sha": COMMIT, "siblings": []})
        elif path.startswith(f"{api}/paths-info/"):
            asked = json.loads(sent)["paths"] if sent[:1] == b"{" else []
            self._json([self._entry(name) for name in asked if self._entry(name)])
        elif match := re.fullmatch(rf"{api}/tree/\w+/?(.*)", path):
            below = [name for name in self.files if name.startswith(f"{match[1]}/")]
            recursive = "recursive=true" in self.path.lower()
            start = len(match[1]) + 1
            shown = {
                name if recursive else name[:start] + name[start:].partition("/")[0]
                for name in below
            }
            self._json([self._entry(name) for name in sorted(shown)])
        elif path.startswith(raw) and path[len(raw) :].partition("/")[2] in self.files:
            self._content(self.files[path[len(raw) :].partition("/")[2]])
        else:
            kind = "RepoNotFound" if REPOSITORY not in path else "EntryNotFound"
            self._send(404, b"{}", {"X-Error-Code": kind, "X-Error-Message": kind})

    def _entry(self, name: str) -> dict[str, Any] | None:
        if name in self.files:
            data = self.files[name]
            oid = hashlib.sha1(data).hexdigest()
            return {"type": "file", "path": name, "size": len(data), "oid": oid}
        if any(one.startswith(f"{name}/") for one in self.files):
            return {"type": "directory", "path": name, "oid": "0" * 40}
        return None

    def _content(self, data: bytes) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        headers = {"ETag": '"x"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if match is None:
            self._send(200, data, headers)
            return
        part = data[int(match[1]) : int(match[2]) + 1]
        headers["Content-Range"] = f"bytes {match[1]}-{match[2]}/{len(data)}"
        self._send(206, part, headers)

    def _json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, code: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


for _method in ("GET", "POST", "HEAD"):
    setattr(_Hub, f"do_{_method}", _Hub.answer)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A hub on this machine with one empty data set."""
    handler = type("Hub", (_Hub,), {"files": {}, "requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    opened.cache_clear()
    yield handler
    opened.cache_clear()
    server.shutdown()
    thread.join()
    server.server_close()


def test_traces_are_read_from_a_data_set(hub: Any, collected: Path) -> None:
    for name, _ in files_below(collected):
        hub.files[f"nano/{name}"] = (collected / name).read_bytes()
    address = f"hf://datasets/{REPOSITORY}/nano"
    local, remote = TraceReader(collected), TraceReader(address)
    assert remote.records() == local.records()
    assert torch.equal(remote.kv(2)[0], local.kv(2)[0])
    some = TraceReader(address, heads=slice(1, 2))
    hub.requests.clear()
    assert torch.equal(some.kv(3)[1], TraceReader(collected, heads=slice(1, 2)).kv(3)[1])
    shards = [each for each in hub.requests if "/c.3." in each and "resolve" in each]
    assert all("bytes=" in each for each in shards)
    assert shards
    assert store_tool(["verify", address]) == 0
    with pytest.raises(AddressError, match=r"only reads from the hub; .*hf upload ORG/NAME"):
        (remote.path / "new").write_bytes(b"")  # type: ignore[union-attr]


def test_a_policy_is_read_from_a_data_set(hub: Any, trained: Path) -> None:
    for path in (path for path in trained.iterdir() if path.is_file()):
        hub.files[f"policy/{path.name}"] = path.read_bytes()
    scorer = load_policy(f"hf://datasets/{REPOSITORY}/policy")
    assert scorer.source is not None
    assert scorer.source.label == "policy"
    for name, weights in load_policy(str(trained)).rankers.state_dict().items():
        assert torch.equal(weights, scorer.rankers.state_dict()[name])


def test_a_missing_repository_is_one_line(hub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert store_tool(["verify", "hf://datasets/org/other/x"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "there is no such bucket or repository that you may see" in line


def test_the_hub_is_refused_as_an_output_before_anything_is_read() -> None:
    with pytest.raises(ValueError, match=r"--out hf://.* then hf upload ORG/NAME FOLDER"):
        CollectConfig(out="hf://datasets/org/name/traces")
