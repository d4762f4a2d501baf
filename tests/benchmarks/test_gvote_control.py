"""The control of GVote: its voters are the queries that come, and its table has every setting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gvote_control import RealQueries, main, real_queries
from benchmarks.recompute.forward import MaskedModel
from eval.evaluate import Bench
from eval.tasks import load_prompts
from kvp.data.task import TaskSettings
from kvp.hf import load_model
from kvp.rope import Rope
from kvp.scoring import HiddenStates, View

LENGTH = 260


@pytest.mark.parametrize("protocol", ["query_aware", "query_agnostic"])
def test_voters_are_the_queries_after_the_boundary(model_folder: Path, protocol: str) -> None:
    model, tokenizer = load_model(str(model_folder))
    bench = Bench(
        model=model, tokenizer=tokenizer, name="m", split="test", length=LENGTH, seed=0,
        decode_batch=8, max_new_tokens=5,
    )  # fmt: skip
    settings = TaskSettings(split="test", count=1, seed=0, length=LENGTH)
    (prompt,), _ = load_prompts("niah_single_1", settings, tokenizer)
    found = real_queries(bench, prompt, protocol)
    plain = MaskedModel(str(model_folder))
    ids = list(prompt.encoded.ids)
    whole = plain.record([*ids, *plain.greedy(ids, None, 5)])
    for layer, queries in zip(whole, found, strict=True):
        torch.testing.assert_close(queries[0], layer.queries[:, prompt.boundary(protocol) :])


def test_every_token_to_come_votes_for_its_largest_logits() -> None:
    keys = torch.randn(1, 2, 30, 8)
    queries, last = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 1, 8)
    view = View(
        layer=0, keys=keys, values=keys, positions=torch.arange(30)[None], budget=8, queries=last,
        rope=Rope(frequencies=torch.ones(4)),
        hidden=HiddenStates(mean=keys[:, 0, 0], variance=keys[:, 0, 0] ** 2, project=lambda x: x),
    )  # fmt: skip
    scores = RealQueries(queries=(queries,), samples=3).score(view)
    for head in range(2):
        chosen = set()
        for query in range(2 * head, 2 * head + 2):
            attention = (keys[0, head] @ last[0, query, 0] / 8**0.5).softmax(0)
            nucleus = attention.sort(descending=True)
            size = int((nucleus.values.cumsum(0) < 0.95).sum()) + 1
            chosen |= set(nucleus.indices[:size].tolist())
            for token in range(3):
                logits = keys[0, head] @ queries[0, query, token]
                chosen |= set(logits.topk(size).indices.tolist())
        assert set((scores[0, head] >= 1).nonzero()[:, 0].tolist()) == chosen


def test_the_table_has_a_line_per_protocol_and_setting(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--tasks", "niah_single_1", "--length", "260", "--prompts", "1", "--seeds", "2"]
    main(["--model", str(model_folder), *flags, "--samples", "2,3", "--max_new_tokens", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[1] for line in lines[2:6]] == [
        "full cache", "2 samples", "3 samples", "real future queries",
    ]  # fmt: skip
    assert len(lines) == 2 + 2 * 4
    assert all(line.endswith(" | 100 |") for line in (lines[2], lines[6]))
