"""Sampled eviction measured: errors against masked attention, correlations by hand, the tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.sampled_eviction import LEVELS, correlations, errors_of, main, outputs_of
from eval.decode import Kept, Prefix, all_kept
from eval.evaluate import Bench
from kvp.hf import load_model, observe


def test_errors_of_a_cache_against_the_full_one(model_folder: Path) -> None:
    model, tokenizer = load_model(str(model_folder))
    bench = Bench(
        model=model, tokenizer=tokenizer, name="m", split="test", length=40, seed=0,
        decode_batch=8, max_new_tokens=5,
    )  # fmt: skip
    ids = torch.arange(4, 44)
    seen = observe(model, ids[None, :32])
    prefix = Prefix(keys=seen.keys, values=seen.values)
    full = outputs_of(bench, prefix, all_kept(prefix), ids[32:])
    truth = [output for output, _, _ in full]
    for output, error, whole in full:
        torch.testing.assert_close(output, whole)
        assert not error.any()
    kept = all_kept(prefix).indices[..., ::2]
    plain = errors_of(bench, prefix, Kept(indices=kept), ids[32:], truth)
    weights = torch.full(kept.shape, 0.7)
    weights[..., :4] = 0
    drawn = errors_of(bench, prefix, Kept(indices=kept, log_weights=weights), ids[32:], truth)
    heads = sum(output.shape[1] for output in truth)
    assert [len(part) for part in (*plain, *drawn)] == [heads] * 6
    assert not plain[0].any()
    assert (drawn[0] > 0).all()
    assert all((part > 0).all() for part in (*plain[1:], *drawn[1:]))
    first = truth[0].shape[1]  # the first layer's queries are those of the full cache
    torch.testing.assert_close(drawn[1][:first], drawn[2][:first], atol=1e-5, rtol=1e-4)


def test_correlations_by_hand() -> None:
    certificate = np.array([[1.0, 10.0, 5.0], [2.0, 20.0, 5.0], [3.0, 30.0, 5.0]])
    error = np.array([[1.0, 30.0, 1.0], [2.0, 20.0, 2.0], [3.0, 10.0, 3.0]])
    found = correlations(certificate, error)
    assert found["within"] == pytest.approx(0.0)  # 1 and -1; the third is constant
    assert found["between"] == pytest.approx(0.75**0.5)  # ranks 1 3 2 and 1.5 3 1.5
    assert found["prompts"] == pytest.approx(-1.0)
    assert np.isnan(correlations(np.ones((3, 2)), np.ones((3, 2)))["pooled"])


def test_tables_and_numbers_of_every_cache(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--tasks", "niah_single_1", "--length", "260", "--prompts", "2", "--budgets", "25%"]
    flags += ["--methods", "keydiff+uniform", "--draws", "share=0.5", "--max_new_tokens", "2"]
    flags += ["--spearman_resamples", "3", "--out", str(tmp_path / "found.json")]
    main(["--model", str(model_folder), *flags])
    lines = capsys.readouterr().out.splitlines()
    answers, errors = lines[2 : lines.index("")], lines[lines.index("") + 3 :]
    kinds = [line.split(" | ")[3].strip() for line in answers]
    assert kinds == 2 * ["", "deterministic", "share=0.5"]
    assert [line.split(" | ")[4] for line in errors] == 2 * ["drawing", "total"]
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["cache"] for row in rows].count("share=0.5") == 2
    for row in rows:
        if row["cache"] == "share=0.5":
            assert set(row["spearman_total"]) == set(LEVELS)
            assert row["error"]["certificate"] > 0
            assert 0 <= row["covered"] <= 1
