"""The benchmark of a training step runs, and its parts make up the step."""

PARTS = ("forward", "loss", "backward", "clipping", "optimizer", "clearing", "averaging")


def test_parts_add_up_to_the_step(run_benchmark):
    shapes = ["--heads", "2", "--tokens", "64", "--head_dim", "8", "--contexts", "2"]
    rest = ["--hidden", "8", "--objective", "listwise", "--network", "loop", "--steps", "1"]
    report = run_benchmark("ranker_training", *shapes, *rest)
    assert report["machine"]["torch"]
    assert report["settings"]["heads"] == "2"
    (record,) = report["results"]
    assert (record["heads"], record["objective"], record["network"]) == (2, "listwise", "loop")
    assert all(record[part] >= 0 for part in PARTS)
    assert 0 < sum(record[part] for part in PARTS) <= record["seconds"] * 1.001
    assert record["peak_gb"] > 0
