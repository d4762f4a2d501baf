"""The benchmark of future attention runs, and the forms it compares compute the same label."""

import pytest


def test_forms_agree_and_skipped_ones_are_named(run_benchmark):
    quick = ["--forms", "naive,blocked,triton", "--rounds", "1", "--seconds", "0"]
    # 3 matrices of 7 x 50 x 100 numbers are 0.0004 GiB, of 100 x 200 four times as much.
    limits = ["--lengths", "100,200", "--naive-gib", "0.001"]
    report = run_benchmark("future_attention", *quick, *limits)
    assert report["machine"]["torch"]
    naive, blocked, triton, skipped, last, _ = report["results"]
    assert triton["skipped"] == "needs --device cuda"
    assert naive["sum"] == pytest.approx(blocked["sum"], rel=1e-6)
    assert 0 < blocked["fastest"] <= blocked["seconds"]
    assert 0 <= blocked["working_mib"] < blocked["peak_mib"]
    assert skipped["skipped"] == "needs about 0.0 GiB"
    assert "seconds" not in skipped
    assert last["length"] == 200


def test_lengths_that_would_take_too_long_are_named(run_benchmark):
    quick = ["--forms", "blocked", "--rounds", "1", "--seconds", "0"]
    limits = ["--lengths", "64,65536", "--limit", "0.001"]
    ran, skipped = run_benchmark("future_attention", *quick, *limits)["results"]
    assert ran["processor_seconds"] > 0
    said = f"not run: 64 tokens took {ran['fastest']:.3g} s, more would be over 0.001 s"
    assert skipped["skipped"] == said


def test_a_form_that_fails_is_named_and_the_others_are_measured(run_benchmark, monkeypatch):
    monkeypatch.setattr("kvp.ops.future_attention.receive_by_tiles", lambda *_: [][0])
    flags = ["--forms", "blocked,naive", "--lengths", "64", "--seconds", "0"]
    blocked, naive = run_benchmark("future_attention", *flags)["results"]
    assert blocked["skipped"] == "failed: list index out of range"
    assert naive["seconds"] > 0
