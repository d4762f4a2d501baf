"""`kvp store merge` and `subset`: the sequences they name, bit for bit, or one line of refusal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvp.geometry import Geometry
from kvp.store import TraceReader
from trace_collect.store_tools.config import SubsetConfig, parse_indices

MakeStore = Callable[..., Path]
Program = Callable[..., tuple[int, str, str]]
KINDS: list[dict[str, Any]] = [
    {},
    {"dtype": "float32", "labels": ("kvzip", "kvzip_plus")},
    {"store": "kv", "gram": False},
    {"store": "importance", "grid": 6, "grid_labels": ("max_reply_attention",)},
    {
        "store": "importance",
        "grid": 6,
        "grid_labels": ("max_reply_attention",),
        "grid_dtype": "float32",
        "dtype": "float16",
    },
]


@pytest.mark.parametrize("settings", KINDS)
def test_two_stores_as_one(
    make_store: MakeStore,
    kvp_store: Program,
    tmp_path: Path,
    assert_same_tensors: Callable[..., None],
    settings: dict[str, Any],
) -> None:
    one, two = make_store("one", **settings), make_store("two", seed=1, sequences=3, **settings)
    code, output, _ = kvp_store("merge", one, two, "--out", tmp_path / "both")
    assert code == 0
    assert f"{tmp_path / 'both'}: 9 sequences" in output
    both, first, second = TraceReader(tmp_path / "both"), TraceReader(one), TraceReader(two)
    assert both.complete
    assert both.plan == replace(first.plan, sequences=9)
    expected = [(first, index) for index in range(6)] + [(second, index) for index in range(3)]
    for index, (source, old) in enumerate(expected):
        record, theirs = both.record(index), source.record(old)
        name = theirs.id if source is first else f"{theirs.id}~2"
        assert record == replace(theirs, index=index, id=name)
        assert_same_tensors(both, index, source, old)
    assert (both.output_gram() is None) == (first.output_gram() is None)
    assert kvp_store("verify", tmp_path / "both")[0] == 0


def test_where_a_merged_store_comes_from(
    make_store: MakeStore, kvp_store: Program, tmp_path: Path
) -> None:
    one, two = make_store("one"), make_store("two", seed=1, sequences=3)
    three = make_store("three", seed=2, sequences=1)
    assert kvp_store("merge", one, two, "--out", tmp_path / "both")[0] == 0
    assert kvp_store("merge", tmp_path / "both", three, "--out", tmp_path / "all")[0] == 0
    manifest = TraceReader(tmp_path / "both").manifest
    identity = manifest["identity"]
    assert identity["model"] == TraceReader(one).manifest["identity"]["model"]
    assert identity["seed"] == [0, 1]
    assert identity["data"] == {
        "name": "one,two", "tasks": ["a", "b"], "length": 20,
        "sequences": {"train": 5, "validation": 3, "test": 1},
    }  # fmt: skip
    assert [source["path"] for source in manifest["sources"]] == [str(one), str(two)]
    assert [source["sequences"] for source in manifest["sources"]] == ["0-5", "0-2"]
    assert manifest["sources"][1]["command"][0] == "kvp-collect"
    assert manifest["model"] == {"id": "tiny", "revision": None}
    assert manifest["rope_frequencies"] == [1.0, 0.1]
    whole = TraceReader(tmp_path / "all")
    assert len({record.id for record in whole.records()}) == 10
    assert whole.manifest["sources"][0]["sources"][0]["path"] == str(one)


def test_the_longer_store_gives_the_length(
    make_store: MakeStore,
    kvp_store: Program,
    tmp_path: Path,
    assert_same_tensors: Callable[..., None],
) -> None:
    grid = {"store": "importance", "grid": 5, "grid_labels": ("max_reply_attention",)}
    one = make_store("one", **grid)
    two = make_store("two", seed=1, max_tokens=90, **grid)  # another scale of the float16 grid
    assert kvp_store("merge", one, two, "--out", tmp_path / "both")[0] == 0
    both = TraceReader(tmp_path / "both")
    assert both.plan.max_tokens == 90
    for index in range(6):
        assert_same_tensors(both, index, TraceReader(one), index)
        assert_same_tensors(both, index + 6, TraceReader(two), index)


MODEL = {"id": "other", "revision": None, "weights": "2" * 64, "tokenizer": "1" * 64}
GEOMETRY = Geometry(layers=2, query_heads=8, kv_heads=2, head_dim=4)


@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        ({"dtype": "float32"}, "dtype: bfloat16 there, float32 here"),
        ({"geometry": GEOMETRY, "gram": False}, "geometry.query_heads: 4 there, 8 here"),
        ({"store": "kv"}, "store: qkv there, kv here"),
        ({"labels": ("kvzip",)}, "labels: the default there, ['kvzip'] here"),
        ({"identity": {"continuation": "reference"}}, "continuation: model there, reference here"),
        ({"identity": {"model": MODEL}}, f"model.weights: {'0' * 64} there, {'2' * 64} here"),
        ({"identity": {"model": {"id": "other"}}}, "model.id: tiny there, other here"),
        ({"frequencies": (1.0, 0.2)}, "the frequencies of their rotary embeddings differ"),
    ],
)
def test_other_settings_are_refused_in_one_line(
    make_store: MakeStore,
    kvp_store: Program,
    tmp_path: Path,
    settings: dict[str, Any],
    difference: str,
) -> None:
    one, two = make_store("one"), make_store("two", seed=1, **settings)
    code, _, error = kvp_store("merge", one, two, "--out", tmp_path / "both")
    assert code == 2
    assert f"{two} cannot be joined to {one}: " in error
    assert difference in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "both").exists()


def test_one_model_in_two_folders(
    make_store: MakeStore, kvp_store: Program, tmp_path: Path
) -> None:
    copied = {"id": "elsewhere/tiny", "revision": "main"}
    model = {**copied, "weights": "0" * 64, "tokenizer": "1" * 64}
    one, two = make_store("one"), make_store("two", seed=1, identity={"model": model})
    assert kvp_store("merge", one, two, "--out", tmp_path / "both")[0] == 0


def test_stores_that_cannot_be_joined(
    make_store: MakeStore, kvp_store: Program, tmp_path: Path
) -> None:
    one, same = make_store("one"), make_store("same")
    part, out = make_store("part", seed=1, write=2), tmp_path / "out"
    _, _, error = kvp_store("merge", one, same, "--out", out)
    assert f"sequences 0-5 of {same} are in {one} already: leave it out" in error
    assert kvp_store("subset", one, "--indices", "1,3-4", "--out", tmp_path / "few")[0] == 0
    _, _, error = kvp_store("merge", tmp_path / "few", same, "--out", out)
    assert f"sequences 1,3-4 of {same} are in {tmp_path / 'few'} already: join" in error
    assert error.endswith(f"kvp store subset {same} --indices 0,2,5")
    _, _, error = kvp_store("merge", one, part, "--out", out)
    assert f"{part} lacks 4 of 6 sequences; let kvp-collect finish" in error
    _, _, error = kvp_store("merge", one, part, "--out", one)
    assert f"--out {one} is the store that is read" in error
    _, _, error = kvp_store("merge", one, part, "--allow_incomplete", "--out", one / "inside")
    assert f"lies inside {one}" in error
    assert "name two stores" in kvp_store("merge", one, "--out", out)[2]
    assert "names a store twice" in kvp_store("merge", one, one, "--out", out)[2]
    assert not out.exists()
    assert kvp_store("merge", one, part, "--allow_incomplete", "--out", out)[0] == 0
    assert len(TraceReader(out).records()) == 8


@pytest.mark.parametrize("tool", ["merge", "subset", "to-importance"])
def test_a_damaged_sequence_ends_it_and_mending_continues_it(
    make_store: MakeStore,
    kvp_store: Program,
    tmp_path: Path,
    assert_same_tensors: Callable[..., None],
    tool: str,
) -> None:
    one, two, out = make_store("one"), make_store("two", seed=1), tmp_path / "out"
    sources = [one, two] if tool == "merge" else [one]
    shard = one / "k/c.3.0.0.0.0"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    code, _, error = kvp_store(tool, *sources, "--out", out)
    assert code == 2
    assert f"{shard} is damaged" in error
    assert not TraceReader(out).complete
    assert len(TraceReader(out).records()) == 3
    shard.write_bytes(whole)
    code, output, _ = kvp_store(tool, *sources, "--out", out)
    assert code == 0
    assert "3 of" in output
    assert TraceReader(out).complete
    assert kvp_store("verify", out)[0] == 0
    if tool != "to-importance":
        assert_same_tensors(TraceReader(out), 3, TraceReader(one), 3)


def test_another_source_does_not_continue_a_store(
    make_store: MakeStore, kvp_store: Program, tmp_path: Path
) -> None:
    one, two, out = make_store("one"), make_store("two", seed=1), tmp_path / "out"
    assert kvp_store("subset", one, "--train", 2, "--out", out)[0] == 0
    assert kvp_store("subset", one, "--train", 2, "--out", out)[0] == 0
    for arguments in (["subset", one], ["subset", two, "--train", 2], ["merge", one, two]):
        code, _, error = kvp_store(*arguments, "--out", out)
        assert code == 2
        assert "was begun with other settings" in error


@pytest.mark.parametrize(
    ("flags", "taken", "settings"),
    [
        ([], [0, 1, 2, 3, 4, 5], KINDS[0]),
        (["--train", 2], [0, 1, 2, 4, 5], KINDS[1]),
        (["--train", 1, "--validation", 1, "--test", 0], [0, 2], KINDS[2]),
        (["--indices", "3,1-2"], [1, 2, 3], KINDS[3]),
        (["--indices", "1-5", "--train", 1], [1, 2, 4, 5], KINDS[4]),
    ],
)
def test_a_subset_is_the_sequences_it_names(
    make_store: MakeStore,
    kvp_store: Program,
    tmp_path: Path,
    assert_same_tensors: Callable[..., None],
    flags: list[Any],
    taken: list[int],
    settings: dict[str, Any],
) -> None:
    whole = TraceReader(make_store("whole", **settings))
    assert kvp_store("subset", whole.path, *flags, "--out", tmp_path / "part")[0] == 0
    part = TraceReader(tmp_path / "part")
    assert part.complete
    assert part.plan == replace(whole.plan, sequences=len(taken))
    for index, old in enumerate(taken):
        assert part.record(index) == replace(whole.record(old), index=index)
        assert_same_tensors(part, index, whole, old)
    counts = part.manifest["identity"]["data"]["sequences"]
    assert sum(counts.values()) == len(taken)
    assert part.manifest["seed"] == 0
    assert kvp_store("verify", part.path)[0] == 0


def test_a_subset_of_a_longer_collection_is_a_shorter_one(
    run: Callable[..., int],
    tmp_path: Path,
    kvp_store: Program,
    assert_same_tensors: Callable[..., None],
) -> None:
    assert run("--train=3", "--validation=1") == 0
    assert run("--train=2", "--validation=1", "--out", str(tmp_path / "short")) == 0
    flags = ("--train", 2, "--out", tmp_path / "part")
    assert kvp_store("subset", tmp_path / "out", *flags)[0] == 0
    part, short = TraceReader(tmp_path / "part"), TraceReader(tmp_path / "short")
    assert part.records() == short.records()
    assert part.manifest["identity"]["data"] == short.manifest["identity"]["data"]
    for index in range(3):
        assert_same_tensors(part, index, short, index)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--train", 4], "--train 4: "),
        (["--test", 2], "has 1 sequences of that split"),
        (["--indices", "4,6-8"], "has no sequence 6-8"),
        (["--indices", "a"], "'a' is neither an index nor a range"),
        (["--indices", "5-3"], "5-3 ends before it begins"),
        (["--indices", ","], "--indices names no sequence"),
        (["--train", "-1"], "--train must be at least 0"),
        (["--train", 0, "--validation", 0, "--test", 0], "leave no sequence"),
    ],
)
def test_subsets_that_cannot_be(
    make_store: MakeStore, kvp_store: Program, tmp_path: Path, flags: list[Any], complaint: str
) -> None:
    code, _, error = kvp_store("subset", make_store("whole"), *flags, "--out", tmp_path / "part")
    assert code == 2
    assert complaint in error
    assert not (tmp_path / "part").exists()


def test_indices() -> None:
    assert parse_indices("3, 5-7,6") == {3, 5, 6, 7}
    assert SubsetConfig("a", out="b").index_set is None
