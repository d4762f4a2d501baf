"""`kvp store verify`: whatever happens to a file is found, named, and can be mended as said."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvp.manifest import read_sealed_json, write_sealed_json
from kvp.programs import collect
from kvp.store import TraceReader, TraceWriter
from kvp.store.sequence_records import load_record

MakeStore = Callable[..., Path]
Program = Callable[..., tuple[int, str, str]]
SHARDS = ["q/c.2.0.0.0.0.0", "k/c.2.0.0.0.0", "v/c.2.0.0.0.0", "label_kvzip/c.2.0.0.0"]
METADATA = ["manifest.json", "k/zarr.json", "output_gram.safetensors"]


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    return make_store("traces", labels=("kvzip",))


def flip(path: Path, position: int) -> bytes:
    whole = path.read_bytes()
    path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
    return whole


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"store": "kv"},
        {"store": "importance", "grid": 5, "grid_labels": ("max_reply_attention",)},
    ],
)
def test_a_whole_store(
    make_store: MakeStore, kvp_store: Program, settings: dict[str, object]
) -> None:
    code, output, error = kvp_store("verify", make_store("traces", **settings))
    assert (code, error) == (0, "")
    assert "6 of 6 sequences, every byte as it was written" in output


@pytest.mark.parametrize("name", [*SHARDS, "sequences/000002.json"])
def test_any_flipped_bit_of_a_sequence_is_found(store: Path, kvp_store: Program, name: str) -> None:
    draw = random.Random(name)
    size = (store / name).stat().st_size
    for position in (0, size - 2, *draw.sample(range(size - 1), 3)):
        whole = flip(store / name, position)
        code, output, error = kvp_store("verify", store)
        assert code == 2
        (line,) = output.splitlines()
        assert line.startswith("sequence 2: ")
        assert str(store / name) in line
        assert "of 6 sequences 1 damaged (2)" in error
        (store / name).write_bytes(whole)
    assert kvp_store("verify", store)[0] == 0


def test_every_damaged_sequence_has_a_line(store: Path, kvp_store: Program) -> None:
    shard = store / "k/c.0.0.0.0.0"
    shard.write_bytes(shard.read_bytes()[:-7])
    (store / "v/c.3.0.0.0.0").unlink()
    flip(store / "q/c.5.0.0.0.0.0", 20)
    (store / "sequences/000004.json").unlink()
    code, output, error = kvp_store("verify", store)
    assert code == 2
    first, second, third, last = output.splitlines()
    assert first.startswith("sequence 0: ")
    assert "bytes instead of" in first
    assert second.startswith("sequence 3: ")
    assert "is missing" in second
    assert third.startswith("sequence 5: ")
    assert "checksum" in third
    assert last == "missing: 4"
    assert "3 damaged (0,3,5) and 1 missing (4)" in error
    assert f"delete {store}/sequences/000000.json, " in error
    assert error.endswith(
        f"then repeat, with the paths of this machine, kvp-collect --model tiny --out {store}"
    )


@pytest.mark.parametrize("name", METADATA)
def test_damaged_metadata_is_one_line_that_names_the_file(
    store: Path, kvp_store: Program, name: str
) -> None:
    flip(store / name, (store / name).stat().st_size // 2)
    code, output, error = kvp_store("verify", store)
    assert (code, output) == (2, "")
    assert str(store / name) in error
    assert "restore that file from a copy, or collect anew" in error


def test_a_missing_sequence_can_be_allowed(make_store: MakeStore, kvp_store: Program) -> None:
    store = make_store("traces", write=4)
    code, output, error = kvp_store("verify", store)
    assert code == 2
    assert output.splitlines() == ["missing: 4-5"]
    assert "of 6 sequences 2 missing (4-5)" in error
    assert kvp_store("verify", store, "--allow_incomplete")[0] == 0


def test_checksums_do_not_vouch_for_content(make_store: MakeStore, kvp_store: Program) -> None:
    store = make_store("traces", store="importance", grid=5, grid_labels=("future_attention",))
    path = store / "sequences/000001.json"
    content = read_sealed_json(path)
    content["record"]["id"] = "train/0"
    write_sealed_json(path, content)
    content = read_sealed_json(store / "sequences/000002.json")
    content["record"]["split"] = "holdout"
    write_sealed_json(store / "sequences/000002.json", content)
    content = read_sealed_json(store / "sequences/000003.json")
    content["record"]["peak_edges"] = content["record"]["peak_edges"][:1]
    write_sealed_json(store / "sequences/000003.json", content)
    code, output, _ = kvp_store("verify", store)
    lines = output.splitlines()
    assert code == 2
    assert len(lines) == 3
    assert "has the id train/0 of sequence 0" in lines[0]
    assert "split 'holdout' is none of" in lines[1]
    assert "boundaries" in lines[2]


def test_numbers_that_no_writer_writes(
    make_store: MakeStore, kvp_store: Program, tmp_path: Path
) -> None:
    store = make_store("traces", dtype="float32", sequences=1)
    import zarr

    array = zarr.open_array(store / "v", mode="r+", zarr_format=3)
    array[0, 1, 0, 3, 2] = float("nan")
    shard = store / "v/c.0.0.0.0.0"
    content = read_sealed_json(store / "sequences/000000.json")
    content["shards"]["v"] = {"bytes": shard.stat().st_size}
    write_sealed_json(store / "sequences/000000.json", content)
    load_record(store, TraceReader(store).plan, 0)
    code, output, _ = kvp_store("verify", store)
    assert code == 2
    assert "v of sequence 0 (train/0) is not finite" in output


def test_the_advice_mends_a_collection(
    run: Callable[..., int], model_folder: Path, tmp_path: Path, kvp_store: Program
) -> None:
    assert run("--train=2", "--validation=1") == 0
    out = tmp_path / "out"
    before = TraceReader(out).trace(1)
    flip(out / "k/c.1.0.0.0.0", 99)
    code, _, error = kvp_store("verify", out)
    assert code == 2
    assert f"delete {out}/sequences/000001.json" in error
    (out / "sequences/000001.json").unlink()
    assert TraceReader(out).manifest["config"]["model"] == model_folder.name
    flags = ["--length=300", "--train=2", "--validation=1", "--max-new-tokens=4"]
    flags += [
        "--model",
        str(model_folder),
        "--tasks=niah_single_1,niah_single_2",
        "--out",
        str(out),
    ]
    assert collect(flags) == 0
    assert kvp_store("verify", out)[0] == 0
    assert torch.equal(TraceReader(out).trace(1).keys, before.keys)


def test_a_store_that_is_being_written_is_only_read(
    make_store: MakeStore, kvp_store: Program
) -> None:
    store = make_store("traces", write=3)
    manifest = TraceReader(store).manifest
    with TraceWriter.resume(store, manifest):
        assert kvp_store("verify", store, "--allow_incomplete")[0] == 0
        assert (store / "writer.lock").exists()
