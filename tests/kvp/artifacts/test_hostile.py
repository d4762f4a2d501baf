"""Files made to harm their reader: sealed as kvp seals them, with anything else in them.

Each is refused in one line or harmless: nothing is imported, nothing written elsewhere. The page
of a report is in `tests/eval/report`.
"""

import copy
import json
import sys
from functools import partial

import pytest
import torch

from eval.evolve.search import Journal, SearchPlan, search
from eval.methods import build_methods
from eval.push import model_card
from eval.results.folder import RESULTS, load_results
from eval.results.records import RecordFile
from kvp.artifacts.claim import OutputFolder
from kvp.artifacts.files import JsonLines
from kvp.artifacts.manifest import (
    SEAL,
    digest_json,
    read_sealed_json,
    sha256_file,
    write_sealed_json,
)
from kvp.errors import KvpError, UsageError
from kvp.geometry import Geometry
from kvp.program.table import report, run_program
from kvp.store import SequenceRecord, StorePlan, Trace, TraceReader, TraceWriter
from policies import load_policy, make_allocator
from policies.policy_files import PolicyMeta, load_shard, save_policy
from policies.ranker import HeadRankers, RankerSpec

compare = partial(run_program, "compare")
CODE = "hostile_code:Scorer"
FOREIGN = (None, -1, 2**70, CODE, "../../x", [["[/b]\x1b[2J\n<script>"]])
SIZE = Geometry(layers=1, query_heads=2, kv_heads=2, head_dim=4)
SCORED = {"scorer": "snapkv", "variant": "auto", "allocator": "uniform", "protected": False,
          "score": 0.5, "interval": [0.1, 0.9]}  # fmt: skip
SETTINGS = {
    "format": "kvp-settings", "format_version": 1, "split": "test", "data": {}, "run": {},
    "methods": [{"method": "snapkv", "group": "", "requested": "snapkv", "tried": 3,
                 "protocol": "query_aware", "chosen": SCORED, "published": [SCORED]}],
}  # fmt: skip
BUDGETS = {
    "format": "kvp-budgets", "format_version": 1, "run": {}, "model": {"id": "m"}, "seed": 4,
    "geometry": {"layers": 2, "kv_heads": 2}, "scorer": CODE, "protocol": "query_aware",
    "protection": {"sinks": 4, "recents": 16}, "budget": 15, "cached_tokens": 99, "counts": [9, 21],
}  # fmt: skip
RESULT = {"format": "kvp-results", "format_version": 3, "identity": {"model": "m"}, "notes": ["a"],
          "planned": [{"protocol": "query_aware", "prompts": {"t": 2}, "settings": [["full"]]}],
          "policies": {"a": "0"}, "packages": {"torch": "1"}}  # fmt: skip
ROW = {
    "model": "m", "method": "full", "variant": "auto", "allocator": "uniform", "protected": False,
    "policy": None, "policy_seed": None, "protocol": "query_aware", "task": "t", "example": "e",
    "budget_spec": None, "budget": None, "score": 1.0, "nll": None, "reply_tokens": None,
    "length": 8, "cached_tokens": 7, "kept_tokens": 7, "prediction": "x", "references": ["x"],
    "prompt_digest": "0", "metric": "all", "excerpt": "x", "excerpt_kept": "9",
    "evidence_tokens": 1, "evidence_kept": [[1]],
}  # fmt: skip


def _make(kind, folder):
    """A sound artefact: its sealed file, and what reads it."""
    if kind == "policy":
        rankers = HeadRankers(RankerSpec(head_dim=4, hidden=4), 2, torch.Generator().manual_seed(0))
        text = {"data": {"name": "d", "tasks": ["t"], "length": 8}, "answers": "a", "command": []}
        recipe = {"objective": CODE, "label": "l", "steps": 9}
        meta = PolicyMeta(geometry=SIZE, model={"id": "m"}, held_out=[{"skill": 1}] * 2,
                          training={"seed": 3, "recipe": recipe, "text": text})  # fmt: skip
        save_policy(folder, rankers, meta)

        def read():
            policy = load_policy(folder)
            repr(policy)
            assert "<script>" not in model_card(load_shard(folder), "a/b", license=None)

        return folder / "policy.json", read
    if kind in ("store", "sequence"):
        plan = StorePlan(geometry=SIZE, dtype="float32", max_tokens=5, sequences=1)
        record = SequenceRecord(index=0, id="a", task="t", split="train", length=5,
                                context_length=2, prompt_length=4, token_ids=(1,) * 5)  # fmt: skip
        keys, gram = torch.ones(1, 2, 5, 4), torch.ones(1, 2, 4, 4)
        with TraceWriter.create_or_resume(folder, plan, {"identity": {}}, gram) as writer:
            writer.write(Trace(record=record, queries=keys[:, :, None], keys=keys, values=keys))
        name = "manifest.json" if kind == "store" else "sequences/000000.json"
        return folder / name, lambda: TraceReader(folder).trace(0)
    folder.mkdir()
    content = {"settings": SETTINGS, "budgets": BUDGETS, "results": RESULT}[kind]
    file = folder / {"results": "manifest.json"}.get(kind, f"{kind}.json")
    write_sealed_json(file, copy.deepcopy(content))
    if kind == "results":
        JsonLines(folder / "rows.jsonl").rewrite([ROW])
        assert report([str(folder), "--bootstrap", "1"]) == 0
    readers = {
        "settings": lambda: build_methods([f"tuned:{folder}"]),
        "budgets": lambda: make_allocator(f"evolved:{folder}"),
        "results": lambda: (
            load_results(folder),
            report([str(folder), "--bootstrap", "1"]),
            OutputFolder.claim(folder, RESULTS, RESULT["identity"]).release(),
        ),
    }
    return file, readers[kind]


@pytest.fixture(autouse=True)
def ran(tmp_path, monkeypatch):
    """A file that is there once the module of `CODE` was imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    text = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nclass Scorer: pass\n"
    (tmp_path / "hostile_code.py").write_text(text)
    yield tmp_path / "ran"
    sys.modules.pop("hostile_code", None)


def _changed(value, found=None):
    """Copies of a JSON value, each with one part taken out or foreign."""
    root = value if found is None else found
    for key, part in list(value.items() if isinstance(value, dict) else enumerate(value[:1])):
        for other in FOREIGN:
            value[key] = other
            yield copy.deepcopy(root)
        if isinstance(value, dict):
            del value[key]
            yield copy.deepcopy(root)
        value[key] = part
        if isinstance(part, dict | list):
            yield from _changed(part, root)


def _line(read):
    """What refuses it; "" where nothing does."""
    try:
        read()
    except KvpError as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize("kind", ["policy", "store", "sequence", "settings", "budgets", "results"])
def test_any_part_may_be_foreign(tmp_path, ran, kind):
    file, read = _make(kind, tmp_path / "a")
    read()
    sound, before = read_sealed_json(file), sorted(tmp_path.rglob("*"))
    refused = []
    for content in _changed(copy.deepcopy(sound)):
        write_sealed_json(file, content)
        refused.append(_line(read))
    assert sum(map(bool, refused)) > 10
    assert not ran.exists()
    assert sorted(tmp_path.rglob("*")) == before
    text = json.dumps({**sound, SEAL: digest_json(sound)})
    for hostile, words in {
        f'{{"format": 0, "format": 0, {text[1:]}': "a key is there twice",
        f'{{"x": NaN, {text[1:]}': "not what kvp writes",
        '{"x": ' + "[" * 200_000: "not valid JSON",
    }.items():
        file.write_text(hostile)
        assert words in _line(read)


PLAN = SearchPlan(layers=2, budget=4, minimum=1, maximum=8, group=2, generations=1,
                  constraint="project", seed=0)  # fmt: skip
READERS = {
    "report": lambda file: report([str(file.parent), "--bootstrap", "1"]),
    "compare": lambda file: compare([*[str(file.parent)] * 2, "--bootstrap", "1"]),
    "resumed eval": RecordFile,
    "resumed search": lambda file: search(PLAN, lambda some: [0.5] * len(some), Journal(file)),
}


@pytest.mark.parametrize("reader", READERS)
def test_fields_of_rows_may_be_foreign(tmp_path, reader):
    file = _make("results", tmp_path / "a")[0].parent / "rows.jsonl"
    if reader == "resumed search":
        file.unlink()
        READERS[reader](file)
    read, rows = partial(READERS[reader], file), list(JsonLines(file))
    for content in _changed(dict(rows[0])):
        JsonLines(file).rewrite([content, *rows[1:]])
        _line(read)  # or a traceback
    for line in ('{"a": 1, "a": 1}\n', "[" * 200_000 + "\n"):
        file.write_text(line)
        assert "rows.jsonl line 1 is damaged" in _line(lambda: list(JsonLines(file)))


@pytest.mark.parametrize("side", ["scorer", "allocator"])
def test_code_that_a_file_names_needs_the_caller_to_name_it(tmp_path, ran, side):
    file, _ = _make("settings", tmp_path / "a")
    content = read_sealed_json(file)
    chosen = content["methods"][0]["chosen"]
    for chosen[side] in ("kvzap:org/name", f"{CODE}(a=1)"):
        write_sealed_json(file, content)
        refusal = _line(lambda: build_methods([f"tuned:{file}", "json:Other"]))
        assert f"names {chosen[side].partition('(')[0]}, which is not kvp's own" in refusal
    assert not ran.exists()
    named = CODE if side == "scorer" else f"knorm+{CODE}"
    with pytest.raises(UsageError, match="Scorer cannot be made"):
        build_methods([f"tuned:{file}", named])
    assert ran.exists()


@pytest.mark.parametrize("name", ["../secret", "{tmp}/secret", "sequences/000000.json"])
def test_a_manifest_lists_no_other_files(tmp_path, name):
    file, read = _make("store", tmp_path / "a")
    content = read_sealed_json(file)
    content["files"][name.format(tmp=tmp_path)] = "0"
    write_sealed_json(file, content)
    assert "it lists files that no trace store has" in _line(read)


@pytest.mark.parametrize("size", [8, 2**24, 2**62, 2**64 - 1])
def test_headers_of_tensors_may_be_huge(tmp_path, size):
    hostile = (
        size.to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,9]}}'
    )
    file, read = _make("policy", tmp_path / "a")
    index = read_sealed_json(file)
    (head := tmp_path / "a" / next(iter(index["files"]))).write_bytes(hostile)
    index["files"][head.name] = {"sha256": sha256_file(head), "bytes": len(hostile)}
    write_sealed_json(file, index)
    assert "is not a readable safetensors file" in _line(read)
    head.unlink()
    head.symlink_to("/etc/passwd")
    assert "truncated or foreign" in _line(read)
