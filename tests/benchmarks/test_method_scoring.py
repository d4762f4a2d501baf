"""The benchmark of methods next to a prefill: every method is there, and shares are of one run."""

from policies.registry import SCORERS


def test_every_registered_method_is_a_share_of_the_prefill(run_benchmark):
    sizes = ["--tokens", "96", "--width", "512", "--layers", "1", "--repeats", "2"]
    report = run_benchmark("method_scoring", *sizes)
    assert report["machine"]["cores"]
    rows = {row["method"].partition(":")[0]: row for row in report["results"]}
    assert set(rows) == {*SCORERS, "kvp", "kvzap"}
    assert rows.pop("oracle")["skipped"] == "reads the future"
    for row in rows.values():
        assert row["source"] == "kvp"
        assert 0 < row["share_low"] <= row["share"] <= row["share_high"]
        assert row["whole_share"] > row["share_low"]
        assert row["seconds"] > 0
        assert row["prefill_processor_seconds"] > 0
    assert rows["snapkv"]["method"] == "snapkv:kvpress"
    # Repeating the prompt is a prefill and more; the newest tokens cost next to nothing.
    assert rows["kvzip"]["share"] > 10 * rows["ring"]["share"]
