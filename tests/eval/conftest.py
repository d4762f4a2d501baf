"""kvp eval on the small model of all tests, and an untrained policy for that model."""

import pytest
import torch

from eval.config import EvalConfig
from eval.runner import Runner
from kvp.geometry import Geometry
from kvp.hf import load_model
from kvp.program.table import evaluate
from policies.policy_files import PolicyMeta, save_policy
from policies.ranker import HeadRankers, RankerSpec


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory):
    """An untrained policy with the geometry of `model_folder`."""
    folder = tmp_path_factory.mktemp("policies") / "seed0"
    geometry = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        rankers = HeadRankers(RankerSpec(head_dim=8, hidden=8), heads=geometry.total_kv_heads)
    model = {"id": "tiny", "revision": None}
    for name, seed in (("seed1", 6), (folder.name, 5)):
        meta = PolicyMeta(geometry=geometry, model=model, training={"seed": seed})
        save_policy(folder.with_name(name), rankers, meta)
    return folder


@pytest.fixture(scope="session")
def run_eval(model_folder):
    """Run kvp eval on `model_folder` and prompts of 300 tokens, into a folder; its exit code.

    Settings are flags by name; those that are None are left out.
    """

    def run(out, **settings):
        given = {"model": model_folder, "length": 300, "out": out, **settings}
        return evaluate([f"--{name}={each}" for name, each in given.items() if each is not None])

    return run


@pytest.fixture
def refusal(capsys):
    """Read the last line of a program, what it refuses; by then it has loaded no model."""

    def read(program):
        *progress, line = capsys.readouterr().err.strip().splitlines()
        assert line.startswith(f"kvp {program}: error: ")
        assert "loading the model ..." not in progress
        return line

    return read


@pytest.fixture(scope="module")
def runner(model_folder):
    """`model_folder`, loaded, with answers of at most 8 tokens."""
    model, tokenizer = load_model(str(model_folder))
    return Runner(
        model=model, tokenizer=tokenizer,
        config=EvalConfig(model=str(model_folder), length=300, max_new_tokens=8, dry_run=True),
    )  # fmt: skip
