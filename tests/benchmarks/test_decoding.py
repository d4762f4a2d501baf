"""The benchmark of decoding runs, and its caches hold what their names say."""

import pytest

CACHES = ["full", "uniform", "ragged:auto", "ragged:torch"]


def test_every_cache_is_a_row_of_its_case(run_benchmark):
    cases = ["--cases", "wide:64,nano:32,attention:48", "--backends", "auto,torch"]
    report = run_benchmark("decoding", *cases, "--rounds", "1", "--steps", "3")
    assert report["machine"]["torch"]
    rows = report["results"]
    found = [(row["device"], row["model"], row["tokens"], row["cache"]) for row in rows]
    assert found == [
        ("cpu", model, tokens, cache)
        for model, tokens in (("wide", 64), ("nano", 32), ("attention", 48))
        for cache in CACHES
    ]
    for first in range(0, len(rows), len(CACHES)):
        full = rows[first]
        assert full["speedup"] == 1
        for row in rows[first : first + len(CACHES)]:
            assert 0 < row["fastest"] <= row["milliseconds"]
            assert row["wall_milliseconds"] > 0
            expected = full["milliseconds"] / row["milliseconds"]
            assert row["speedup"] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cases", "nano:8"], "--cases: 'nano:8' is not"),
        (["--cases", "gpt:64"], "--cases: 'gpt:64' is not"),
    ],
)
def test_cases_that_cannot_run_are_refused(flags, message, run_benchmark, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_benchmark("decoding", *flags)
    assert message in capsys.readouterr().err
