"""A hub on this machine, which huggingface_hub's client talks to over HTTP, and a small policy."""

import hashlib
import threading
from dataclasses import dataclass, field
from pathlib import Path

import flask
import pytest
import torch
from huggingface_hub import constants
from werkzeug.serving import make_server

from kvp.geometry import Geometry
from policies.policy_files import PolicyMeta, save_policy
from policies.ranker import HeadRankers, RankerSpec

GEOMETRY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)


@dataclass
class Repository:
    """Commits of a repository, the newest last, and who may read it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def add(self, files):
        """Commit files on top of what is there; returns the commit's hash."""
        merged = next(reversed(self.commits.values()), {}) | files
        digest = hashlib.sha1(repr(sorted(merged.items())).encode()).hexdigest()
        self.commits[digest] = merged
        return digest

    def resolve(self, revision):
        """Commit of a branch, tag or commit."""
        if revision == "main":
            return list(self.commits)[-1]
        found = self.tags.get(revision, revision)
        return found if found in self.commits else None


@dataclass
class Hub:
    """Repositories by name, and the requests that were answered."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def upload(self, name, folder):
        """Commit the files of a folder to a repository."""
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        return self.repositories.setdefault(name, Repository()).add(files)


def _answers(hub):
    """What a hub says over HTTP, as a WSGI application."""
    app = flask.Flask("hub")

    def refuse(code, kind):
        return {"error": kind}, code, {"X-Error-Code": kind, "X-Error-Message": kind}

    @app.before_request
    def note():
        hub.requests.append(f"{flask.request.method} {flask.request.path}")

    @app.get("/api/models/<org>/<name>")
    @app.get("/api/models/<org>/<name>/revision/<path:revision>")
    def info(org, name, revision="main"):
        repository = hub.repositories.get(f"{org}/{name}")
        if repository is None or repository.private:
            return refuse(401, "RepoNotFound")
        if repository.gated:
            return refuse(403, "GatedRepo")
        if (commit := repository.resolve(revision)) is None:
            return refuse(404, "RevisionNotFound")
        siblings = [{"rfilename": each} for each in repository.commits[commit]]
        return {"id": f"{org}/{name}", "sha": commit, "siblings": siblings}

    @app.get("/api/models/<org>/<name>/tree/<commit>")
    def tree(org, name, commit):
        files = hub.repositories[f"{org}/{name}"].commits[commit]
        return [
            {"type": "file", "path": file, "size": len(data), "oid": _oid(data)}
            for file, data in files.items()
        ]

    @app.get("/<org>/<name>/resolve/<commit>/<file>")
    def resolve(org, name, commit, file):
        data = hub.repositories[f"{org}/{name}"].commits[commit][file]
        return data, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": commit}

    return app


def _oid(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub; nobody can be asked."""
    folder = tmp_path / "hub-cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def hub(cache, monkeypatch):
    """A hub that listens on this machine, and a client that knows no other."""
    found = Hub()
    server = make_server("127.0.0.1", 0, _answers(found), threaded=True)
    url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def policy_folder(tmp_path):
    """A policy of random weights in `mine/`, and a pickle next to it that nobody may fetch."""
    folder = tmp_path / "mine"
    spec = RankerSpec(head_dim=8, hidden=12, max_positions=64)
    rankers = HeadRankers(spec, 4, torch.Generator().manual_seed(5))
    meta = PolicyMeta(
        geometry=GEOMETRY,
        model={"id": "nano", "revision": None},
        training={"seed": 3, "command": ["kvp", "train", "--seed", "3"]},
        held_out=[{"skill": 0.5 + head / 10, "best_heuristic_skill": 0.4} for head in range(4)],
    )
    save_policy(folder, rankers, meta)
    (folder / "evil.pkl").write_bytes(b"cos\nsystem\n")
    (folder / "logs").mkdir()
    (folder / "logs" / "events").write_text("private")
    return folder


@pytest.fixture
def place_in_cache(cache):
    """Puts a folder where the client keeps a repository: blobs, snapshots, refs."""

    def place(name, folder, commit):
        repository = cache / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / commit
        for path in (repository / "blobs", snapshot, repository / "refs"):
            path.mkdir(parents=True)
        (repository / "refs" / "main").write_text(commit)
        for path in folder.iterdir():
            if path.is_file():
                data = path.read_bytes()
                (repository / "blobs" / _oid(data)).write_bytes(data)
                (snapshot / path.name).symlink_to(Path("../../blobs") / _oid(data))
        return snapshot

    return place


@pytest.fixture
def cached(place_in_cache, policy_folder):
    """Commit of the policy as `org/gates` in the cache, with nobody to ask."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    place_in_cache("org/gates", policy_folder, commit)
    return commit
