"""Policies by name: folders first, then the bundled one, then the hub and its cache."""

import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from kvp.errors import PolicyError
from policies import load_policy
from policies.policy_files import head_file
from policies.sources import INDEX, find_policy


def same_weights(name, folder):
    ours, theirs = (load_policy(each).rankers.state_dict() for each in (name, folder))
    return all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())


def test_a_policy_in_the_cache_loads_offline(cached, policy_folder):
    policy = load_policy("org/gates")
    assert same_weights("org/gates", policy_folder)
    assert policy.label == "org/gates"
    assert (policy.source.repository, policy.source.commit) == ("org/gates", cached)
    assert load_policy(f"org/gates@{cached}").source == find_policy(f"org/gates@{cached}")
    assert find_policy(f"org/gates@{cached}").label == "gates"


def test_a_path_that_exists_wins(cached, policy_folder, tmp_path):
    shutil.copytree(policy_folder, tmp_path / "org" / "gates")
    source = find_policy("org/gates")
    assert (source.folder, source.commit, source.label) == (Path("org/gates"), None, "gates")
    shutil.copytree(policy_folder, tmp_path / "nano")
    assert find_policy("nano").folder == Path("nano")
    assert find_policy(Path("org/other")).folder == Path("org/other")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/other", "policy org/other: no folder here, and the hub could not give it (Local"),
        ("org/gates@v2", "policy org/gates@v2: no folder here, and the hub could not give it"),
        ("org/a--b", "policy org/a--b: no folder here, and the hub could not give it (HFValid"),
        ("runs/a/policies", "there is no folder 'runs/a/policies': a policy is"),
        ("policies", "there is no folder 'policies': a policy is"),
    ],
)
def test_what_is_nowhere_is_one_line(cached, name, message, one_line):
    with one_line(PolicyError) as raised:
        load_policy(name)
    assert str(raised.value).startswith(message)


def test_a_download_that_was_cut_off_is_no_policy(cache, cached):
    snapshot = cache / "models--org--gates" / "snapshots" / cached
    (snapshot / head_file(1, 0)).unlink()
    with pytest.raises(PolicyError, match=r"layer_01_head_00\.safetensors is missing"):
        load_policy("org/gates")
    (snapshot / INDEX).unlink()
    with pytest.raises(PolicyError, match=r"org/gates holds no policy\.json at its top in main"):
        load_policy("org/gates")


def test_a_policy_is_downloaded_once_and_nothing_else_is(
    hub, cache, policy_folder, monkeypatch, capsys
):
    commit = hub.upload("org/gates", policy_folder)
    source = load_policy("org/gates").source
    assert source.commit == commit
    assert "looking for org/gates on the model hub" in capsys.readouterr().err
    assert same_weights("org/gates", policy_folder)
    fetched = [path for path in hub.requests if path.startswith("GET") and "/resolve/" in path]
    heads = {head_file(layer, head) for layer in range(2) for head in range(2)}
    assert sorted(path.rpartition("/")[2] for path in fetched) == sorted({INDEX, *heads})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.requests)
    assert same_weights("org/gates", policy_folder)
    assert len(hub.requests) == before


def test_a_revision_is_a_tag_or_a_commit(hub, policy_folder):
    first = hub.upload("org/gates", policy_folder)
    repository = hub.repositories["org/gates"]
    repository.tags["v1.0"] = first
    second = repository.add({"README.md": b"new"})
    commits = {
        name: find_policy(name).commit
        for name in ("org/gates", "org/gates@v1.0", f"org/gates@{first}")
    }
    assert commits == {"org/gates": second, "org/gates@v1.0": first, f"org/gates@{first}": first}


def test_what_the_hub_refuses_is_one_line(hub, policy_folder, one_line):
    for name in ("gated", "private", "gates"):
        hub.upload(f"org/{name}", policy_folder)
    hub.repositories["org/gated"].gated = True
    hub.repositories["org/private"].private = True
    hub.repositories["org/gates"].add({INDEX: b"{}"})
    (hub.repositories.setdefault("org/model", type(hub.repositories["org/gates"])())).add(
        {"config.json": b"{}"}
    )
    messages = {
        "org/gated": "could not give it (GatedRepoError: ",
        "org/private": "could not give it (RepositoryNotFoundError: ",
        "org/none": "could not give it (RepositoryNotFoundError: ",
        "org/gates@v9": "could not give it (RevisionNotFoundError: ",
        "org/model": "the repository org/model holds no policy.json at its top in main",
        "org/gates": "is damaged or not what kvp writes (ValueError: no checksum in it)",
    }
    for name, message in messages.items():
        with one_line(PolicyError, message):
            load_policy(name)


def test_a_hub_that_does_not_answer_is_one_line(hub, monkeypatch, one_line):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with one_line(PolicyError, match="no folder here, and the hub could not give it"):
        load_policy("org/gates")
