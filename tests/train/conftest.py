"""Small trace stores in which attention follows one key channel per head."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from kvp.geometry import Geometry
from kvp.program.table import train as main
from kvp.store import SequenceRecord, StorePlan, Trace, TraceWriter

GEOMETRY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)
TOKENS, CONTEXT, PROMPT = 96, 70, 80


def synthetic_trace(index, split, *, tokens=TOKENS, noise=0):
    """A trace whose queries all look for one channel (of head a: a mod D) of their keys.

    `noise` changes the random numbers of every head but the first.
    """
    layers, heads, width = GEOMETRY.layers, GEOMETRY.kv_heads, GEOMETRY.head_dim
    drawn = torch.empty(2, layers * heads, tokens, width)  # keys and values
    queries = torch.zeros(layers * heads, GEOMETRY.group, tokens, width)
    for head in range(layers * heads):
        seed = 1000 * index + head + (10**6 * noise if head else 0)
        drawn[:, head] = torch.randn(
            2, tokens, width, generator=torch.Generator().manual_seed(seed)
        )
        queries[head, ..., head % width] = 6.0
    keys, values = drawn.unflatten(1, (layers, heads))
    record = SequenceRecord(
        index=index, id=f"{split}-{index}", task="synthetic", split=split, length=tokens,
        context_length=min(CONTEXT, tokens - 20), prompt_length=min(PROMPT, tokens - 10),
        token_ids=tuple(range(tokens)),
    )  # fmt: skip
    return Trace(
        record=record, queries=queries.unflatten(0, (layers, heads)), keys=keys, values=values
    )


def synthetic_label(trace):
    """A label that follows the second channel after the one that attention follows."""
    prompt = trace.keys[..., : trace.record.prompt_length, :]
    rows = [keys[:, (head + 2) % 8] for head, keys in enumerate(prompt.flatten(0, 1))]
    return torch.stack(rows).unflatten(0, prompt.shape[:2]).exp()


@pytest.fixture(scope="session")
def make_store(tmp_path_factory):
    """Write a store of `train` training and `validation` validation sequences."""

    def make(
        *, train=6, validation=2, write=None, tokens=TOKENS, noise=0, labels=(), frequencies=(0.0,)
    ):
        path = tmp_path_factory.mktemp("store") / "traces"
        splits = ["train"] * train + ["validation"] * validation
        plan = StorePlan(
            geometry=GEOMETRY,
            dtype="float32",
            max_tokens=tokens,
            sequences=len(splits),
            labels=labels,
        )
        manifest = {
            "identity": {"noise": noise},
            "model": {"id": "synthetic", "revision": None},
            "config": {"dtype": "float32", "chat_template": False, "essays": "my essays"},
            "rope_frequencies": frequencies and list(frequencies),
        }
        with TraceWriter.create_or_resume(path, plan, manifest) as writer:
            for index, split in list(enumerate(splits))[:write]:
                trace = synthetic_trace(index, split, tokens=tokens, noise=noise)
                kept = {name: synthetic_label(trace) for name in labels}
                writer.write(replace(trace, labels=kept))
        return path

    return make


@pytest.fixture(scope="session")
def store(make_store):
    """The store that most tests share."""
    return make_store()


@pytest.fixture(scope="module")
def train(request):
    """Train on a store into a folder, with settings beside `TINY` of the module; the exit code."""

    def run(store, out, **settings):
        chosen = {"traces": store, "out": out, **request.module.TINY, **settings}
        return main([f"--{name}={value}" for name, value in chosen.items()])

    return run


@pytest.fixture(scope="session")
def weights():
    """Weights of a policy by file and name."""
    return lambda policy: {
        path.name: load_file(path) for path in sorted(policy.glob("*.safetensors"))
    }


@pytest.fixture(scope="session")
def assert_same(weights):
    """Compare the weights of two policies bit for bit."""

    def compare(first, second):
        ours, theirs = weights(first), weights(second)
        assert ours
        assert ours.keys() == theirs.keys()
        for name, state in ours.items():
            assert all(torch.equal(tensor, theirs[name][key]) for key, tensor in state.items())

    return compare
