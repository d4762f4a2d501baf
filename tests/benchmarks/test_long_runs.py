"""The benchmark of long runs, at the smallest size that shows that it runs."""

import json

from benchmarks.long_runs import main


def test_memory_of_a_conversation_is_noted_and_drawn(tmp_path):
    out, picture = tmp_path / "long.json", tmp_path / "long.png"
    threads = {"settings": {"scale": 1}, "mib": [1, 2]}
    out.write_text(json.dumps({"results": {"threads": threads}, "failed": {"turns": "before"}}))
    main([
        "--model", "nano", "--policy", "nano", "--parts", "turns,collect",
        "--scale", "0.015",
        "--out", str(out),
    ])  # fmt: skip
    report = json.loads(out.read_text())
    assert report["failed"] == {}
    assert report["results"].pop("threads") == threads
    turns = report["results"].pop("turns")
    assert turns["turns"] == 3
    assert turns["settings"] == {"model": "nano", "policy": "nano", "scale": 0.015}
    assert turns["machine"]["torch"]
    assert report["results"]["collect"]["prompts"] == 15
    assert all(mib > 100 for mib in turns["mib"])
    main(["--out", str(out), "--draw", str(picture)])
    assert picture.stat().st_size > 5_000
