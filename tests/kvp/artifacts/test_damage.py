"""Whatever happens to a file: an error of one line that names it, or the same content.

One table says what is read, one what happens to its bytes, and one what is changed behind its seal.
Files made to harm their reader are sealed as kvp seals them, with anything else in them: nothing is
imported, nothing written elsewhere. The page of a report is in `tests/eval/report`.
"""

import copy
import json
import os
import random
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import kvp
from eval.card import model_card
from eval.evolve.search import Journal, SearchPlan, search
from eval.methods import build_methods
from eval.results.folder import RESULTS, load_results
from eval.results.records import RecordFile
from eval.tune.tuned_settings import load_settings
from kvp import nano
from kvp.artifacts.addresses import read_ranges
from kvp.artifacts.claim import OutputFolder
from kvp.artifacts.files import SEAL, JsonLines, digest_json
from kvp.artifacts.manifest import read_sealed_json, sha256_file, sha256_input, write_sealed_json
from kvp.artifacts.tensors import read_safetensors, write_safetensors, write_sealed_safetensors
from kvp.budgets import parse_budget
from kvp.contexts import Context, ContextFacts, read_context, read_facts
from kvp.errors import KvpError, PolicyError, StoreError, UsageError, first_line
from kvp.geometry import Geometry
from kvp.llamacpp.slots import read_gguf
from kvp.program.table import main, report
from kvp.store import SequenceRecord, StorePlan, Trace, TraceReader, TraceWriter
from policies import load_policy, make_allocator
from policies.allocators.evolved import load_budgets
from policies.learned import Calibration
from policies.policy_files import PolicyMeta, load_shard, save_policy
from policies.ranker import HeadRankers, RankerSpec
from train.job.run_folder import RunFolder

CODE = "hostile_code:Scorer"
FOREIGN = (None, -1, 2**70, CODE, "../../x", [["[/b]\x1b[2J\n<script>"]])
SIZE = Geometry(layers=1, query_heads=2, kv_heads=2, head_dim=4)
POLICY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)
HEAD = "layer_01_head_00.safetensors"
MISSING = object()
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
    "prompt_digest": "0", "metric": "all",
    "evidence_tokens": 1, "evidence_kept": [[1]],
}  # fmt: skip


def _bits(*tensors):
    return [part if part is None else part.view(torch.uint8).tolist() for part in tensors]


def _make_policy(folder):
    rankers = HeadRankers(RankerSpec(head_dim=8, hidden=4), 4, torch.Generator().manual_seed(0))
    text = {"data": {"name": "d", "tasks": ["t"], "length": 8}, "answers": "a", "command": []}
    recipe = {"objective": CODE, "label": "l", "steps": 9}
    meta = PolicyMeta(geometry=POLICY, model={"id": "m"}, held_out=[{"skill": 1}] * 4,
                      training={"seed": 3, "recipe": recipe, "text": text})  # fmt: skip
    knots = torch.arange(1.0, 13).view(4, 3)
    save_policy(
        folder,
        rankers,
        meta,
        calibration=Calibration(target="share", scores=knots, values=knots - 9),
    )

    def read():
        policy = load_policy(folder)
        assert "<script>" not in model_card(load_shard(folder), "a/b", license=None)
        knots = policy.calibration and policy.calibration.to_dict()
        return repr(policy), policy.metadata, knots, _bits(*policy.rankers.state_dict().values())

    return folder / "policy.json", read


def _make_store(folder):
    plan = StorePlan(geometry=SIZE, dtype="float32", max_tokens=5, sequences=1)
    record = SequenceRecord(index=0, id="a", task="t", split="train", length=5,
                            context_length=2, prompt_length=4, token_ids=(1,) * 5)  # fmt: skip
    keys, gram = torch.rand(1, 2, 5, 4), torch.ones(1, 2, 4, 4)
    with TraceWriter.create_or_resume(folder, plan, {"identity": {}}, gram) as writer:
        writer.write(Trace(record=record, queries=keys[:, :, None], keys=keys, values=keys + 1))

    def read():
        reader = TraceReader(folder)
        trace = reader.trace(0)
        tensors = (trace.queries, trace.keys, trace.values, reader.output_gram())
        return reader.manifest, reader.complete, reader.records(), _bits(*tensors)

    return folder / "manifest.json", read


def _make_context(folder, counts):
    """A context of which heads keep 64 tokens, or other counts."""
    facts = ContextFacts(
        model={"id": "m", "weights": "w", "norms": "n", "dtype": "float32"},
        geometry={"layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 8, "layer_indices": []},
        vocabulary=1000, rope={"rope_type": "default", "rope_theta": 1e4}, tokenizer="t",
        policy="knorm", budget="50%", tokens=128, kept=64, counts=counts,
    )  # fmt: skip
    shapes = [(64, 2, 8)] * 4 if counts is None else [(96, 8), (128, 8)] * 2
    parts = [torch.rand(shape) for shape in shapes]
    context = Context(facts=facts, keys=parts[:2], values=parts[2:], token_ids=torch.arange(128))
    folder.mkdir()
    path = context.write(folder)

    def read():
        told, again = read_facts(path), read_context(path)
        assert told == (facts, again.digest)
        return again.digest, _bits(*again.keys, *again.values, again.token_ids)

    return path, read


def _make_run(folder):
    run = RunFolder(folder, {"seed": 0})
    run.prepare({})
    run.checkpoint.parent.mkdir()
    torch.save({"weights": torch.arange(500.0)}, run.checkpoint)
    run.release()

    def read():
        run.prepare({})
        try:
            return _bits(*torch.load(run.start, weights_only=True).values())
        except Exception as problem:  # as `train.job.fit` answers it
            raise UsageError(f"{run.start}: {first_line(problem)}") from None
        finally:
            run.release()

    return folder / "run.json", read


def _make_results(folder):
    folder.mkdir()
    write_sealed_json(folder / "manifest.json", copy.deepcopy(RESULT))
    JsonLines(folder / "rows.jsonl").rewrite([ROW])
    assert report([str(folder)]) == 0

    def read():
        results = load_results(folder)
        report([str(folder)])
        OutputFolder.claim(folder, RESULTS, RESULT["identity"]).release()
        return results

    return folder / "manifest.json", read


def _make_file(name, write, read, folder):
    folder.mkdir()
    write(folder / name)
    return folder / name, lambda: read(folder / name)


RECORDS = [{"name": "é\n", "score": 0.1, "inner": {"2": [1, None]}}, {"name": "b", "score": 1}]
COUNTS = [[32, 64], [96, 32]]
"""224 rows, which two blocks in every layer and head hold."""
KINDS = {
    "policy": _make_policy,
    "store": _make_store,
    "results": _make_results,
    "run": _make_run,
    "context": partial(_make_context, counts=None),
    "uneven": partial(_make_context, counts=COUNTS),
    "settings": partial(
        _make_file, "settings.json", lambda path: write_sealed_json(path, copy.deepcopy(SETTINGS)),
        lambda path: build_methods([f"tuned:{path.parent}"]) and load_settings(path).to_json(),
    ),
    "budgets": partial(
        _make_file, "budgets.json", lambda path: write_sealed_json(path, copy.deepcopy(BUDGETS)),
        lambda path: (load_budgets(path), make_allocator(f"evolved:{path.parent}")),
    ),
    "json": partial(
        _make_file, "x.json", lambda path: write_sealed_json(path, {"b": [1, 2.5, None], "a": "✓"}),
        lambda path: read_sealed_json(path, PolicyError),
    ),
    "records": partial(
        _make_file, "rows.jsonl", lambda path: JsonLines(path).append(RECORDS),
        lambda path: list(JsonLines(path)),
    ),
    "tensors": partial(
        _make_file, "x.safetensors", lambda path: write_safetensors(path, {"a": torch.ones(9)}),
        lambda path: read_safetensors(path, StoreError) and None,
    ),
}  # fmt: skip
"""What is made in a folder: its sealed file, and what reads all of it."""


def _make(kind, folder):
    """A sound artefact: its sealed file, and what reads it."""
    file, read = KINDS["store" if kind == "sequence" else kind](folder)
    return folder / "sequences" / "000000.json" if kind == "sequence" else file, read


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


SHARDS = ("q/c.0.0.0.0.0.0", "k/c.0.0.0.0.0", "v/c.0.0.0.0.0")
ARRAYS = ("q/zarr.json", "k/zarr.json", "v/zarr.json", "zarr.json", "output_gram.safetensors")
RECORD, CHECKPOINT, CONTEXT = "sequences/000000.json", "checkpoints/last.ckpt", "*.context"
FILES = {
    "policy": ("policy.json", HEAD),
    "store": ("manifest.json", RECORD, *ARRAYS, *SHARDS),
    "results": ("manifest.json", "rows.jsonl"),
    "run": ("run.json", CHECKPOINT),
    "context": (CONTEXT,), "uneven": (CONTEXT,), "settings": ("settings.json",),
    "budgets": ("budgets.json",), "json": ("x.json",), "records": ("rows.jsonl",),
}  # fmt: skip
"""All files that a reader takes, by kind."""


def _flipped(whole, position, mask=1):
    return whole[:position] + bytes([whole[position] ^ mask]) + whole[position + 1 :]


def _flips(whole, draw, every):
    """Positions and masks: every one, or many, at both ends above all."""
    size = len(whole)
    if every:
        return [(position, 1 << bit) for position in range(size) for bit in range(8)]
    edges = {*range(16), *range(size - 20, size), *range(0, size, max(size // 150, 1))}
    return [(position, 1 << draw.randrange(8)) for position in sorted(edges)]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in FILES for name in FILES[kind]])
def test_no_flipped_bit_is_read_as_other_content(tmp_path, kind, name):
    _, read = _make(kind, tmp_path / "a")
    (path,) = tmp_path.glob(f"a/{name}")
    expected, whole, contents, refused = read(), path.read_bytes(), [], 0
    for position, mask in _flips(whole, random.Random(name), every=kind in ("json", "records")):
        path.write_bytes(_flipped(whole, position, mask))
        if line := _line(lambda: contents.append(read())):
            refused += 1
            assert path.name in line
            assert "\n" not in line
            continue
        content = contents.pop()
        if (kind, name) == ("records", "rows.jsonl") and position == len(whole) - 1:
            assert content == expected[:-1], "the last line lost its end"
        else:
            assert content == expected, f"bit {mask} of byte {position}"
    assert refused > 20
    path.write_bytes(whole)
    assert read() == expected


CHANGED = {
    "empty": lambda whole: b"",
    "half": lambda whole: whole[: len(whole) // 2],
    "short": lambda whole: whole[:-3],
    "last bit": lambda whole: _flipped(whole, len(whole) - 1),
}
DAMAGED = "is damaged or not what kvp writes"
DAMAGES = [
    *((kind, name, damage, ())
      for kind, names in FILES.items() for name in names if not name.endswith("l")
      for damage in ("empty", "half", "short")),
    *((kind, name, "gone", ()) for kind in ("store", "results") for name in FILES[kind]
      if name != "rows.jsonl"),
    *(("policy", HEAD, damage, ("is truncated",)) for damage in ("empty", "short", "half")),
    ("policy", HEAD, "last bit", ("is damaged", "checksum")),
    ("policy", HEAD, "gone", ("is missing",)),
    ("policy", "policy.json", "gone", ("has no policy.json: it is not a policy directory",)),
    ("store", RECORD, "gone", ("no sequence 0",)),
    ("store", "manifest.json", "gone", ("is not a trace store",)),
    *(("store", shard, damage, (f"{shard} is damaged or missing", f"delete {{}}/{RECORD}"))
      for shard in SHARDS for damage in ("empty", "short", "gone")),
    ("run", CHECKPOINT, "half", ("is damaged; delete it",)),
    *((kind, CONTEXT, "last bit", ("does not match its tensors",))
      for kind in ("context", "uneven")),
    *((kind, CONTEXT, "gone", ("is missing",)) for kind in ("context", "uneven")),
    ("budgets", "budgets.json", "gone", ("is no budget file",)),
    *(("results", "rows.jsonl", content, ())
      for content in (b"\xff\xfe\n", b"[1]\n", "empty")),
    ("results", "manifest.json", bytes(64), ()),
    *(("json", "x.json", text, ("is damaged",))
      for text in ("empty", b"{", b"[1]", b"{}", b"\0", b'{"sha256": 3}')),
    ("json", "x.json", "gone", ("is missing",)),
    *(("records", "rows.jsonl", (line,), ("line 3", DAMAGED, words))
      for line, words in ((b"{", ""), (b"", ""), (b"[1]", "it is no JSON object"),
                          (b'{"a": 1, "checksum": "00"}', "its checksum does not match"),
                          (b'{"a": 1}', "no checksum in it"))),
    ("records", "rows.jsonl", "gone", ("does not exist",)),
    ("tensors", "x.safetensors", b"\xff" * 100, ("is not a readable safetensors file",)),
    ("tensors", "x.safetensors", "gone", ("is missing",)),
]  # fmt: skip
"""Kind, file, its new content, or a line more, and what is said of it beside the file's name."""


@pytest.mark.parametrize(("kind", "name", "damage", "words"), DAMAGES)
def test_damage_is_one_line(tmp_path, kind, name, damage, words):
    _, read = _make(kind, tmp_path / "a")
    (path,) = tmp_path.glob(f"a/{name}")
    whole = path.read_bytes()
    path.unlink()
    if damage != "gone":
        line = damage[0] + b"\n" if isinstance(damage, tuple) else b""
        path.write_bytes(whole + line if line else CHANGED.get(damage, lambda _: damage)(whole))
    line = _line(read)
    assert "\n" not in line
    for word in (path.name.removesuffix(".json"), *words):
        assert word.format(tmp_path / "a") in line


SIMPLE = {"scores": [[0.0, 1.0]] * 4, "values": [[0.0, 1.0]] * 4, "target": "share"}
CHANGES = [
    *((kind, "format", ["kvp-x"], "is of format 'kvp-x', not 'kvp-")
      for kind in ("policy", "store", "results", "settings", "budgets", "context", "uneven")),
    *((kind, "format_version", [version], f"has format version {version}, this kvp reads")
      for kind, version in {"policy": 2, "store": 2, "results": 2, "settings": 2, "budgets": 2,
                            "context": 3, "uneven": 0}.items()),
    ("context", "format_version", [2], "is damaged"),
    ("uneven", "format_version", [1], "is damaged"),
    ("store", "identity/model", [["nano"]], f"{DAMAGED} (identity.model: "),
    ("store", "rope_frequencies", [{"0": 1}], f"{DAMAGED} (rope_frequencies: "),
    ("store", "files", [["k/zarr.json"]], f"{DAMAGED} (files: "),
    ("sequence", "record/split", [True], f"{DAMAGED} (split: "),
    ("sequence", "record/token_ids", [["1"] * 5], f"{DAMAGED} (token_ids.0: "),
    ("results", "files", [[], [1], None, {"rows.jsonl": [1]}, {"x": 1}, "x"], DAMAGED),
    ("policy", "", [{"held_out": [], "calibration": None,
       "geometry": {**POLICY.to_dict(), "layers": 3}}],
     "do not cover 3 layers"),
    ("policy", "architecture", [None, 3, "forest"], DAMAGED),
    ("policy", "architecture", ["forest"], "forest"),
    ("policy", "hyperparameters", [None, [], {}], ""),
    ("policy", "hyperparameters/head_dim", [True, 8.0, "8", -8, 2**40], ""),
    ("policy", "hyperparameters/hidden", [True, 0], ""),
    ("policy", "hyperparameters/reference_length", [MISSING, 2.5, -1, None], ""),
    ("policy", "hyperparameters/frequencies", [MISSING, True], ""),
    ("policy", "hyperparameters/inputs",
     [MISSING, [], "key", ["key", "key"], ["query"], 3], ""),
    ("policy", "hyperparameters/blocks", [3, None], ""),
    ("policy", "hyperparameters/neighbours", [-1, 10**9], ""),
    ("policy", "hyperparameters/key_frequencies", [[True], ["1"], [-1.0], [1e300], 0.5], ""),
    ("policy", "hyperparameters/temperature", [1.0], ""),
    ("policy", "geometry", [MISSING, [2, 4, 2, 8], {"layers": 2}], DAMAGED),
    ("policy", "geometry/layers", [True, 2.0, "2", -2, 2**40], ""),
    ("policy", "geometry/query_heads", [MISSING, 3], ""),
    ("policy", "heads",
     [MISSING, [0], [0, 4, 2], [0, 5], [4, 0], [False, True], "0:4", [-4, 0]], ""),
    ("policy", "model", [None, [], {"id": 3}, {"id": "a\nb"}], ""),
    ("policy", "rope", [MISSING, None, "pre", 1], ""),
    ("policy", "weights", [MISSING, None, "int8"], ""),
    ("policy", "weights", ["int8"], "weights: Input should be 'float32' or 'bfloat16'"),
    ("policy", "weights", ["bfloat16"], "_head_00.safetensors holds a ranker of another"),
    ("policy", "files", [MISSING, [], {}], ""),
    ("policy", f"files/{HEAD}", [None, {"bytes": 1}], ""),
    ("policy", f"files/{HEAD}/bytes", [True, 1.5, -1, "1"], ""),
    ("policy", f"files/{HEAD}/sha256", [None, "", "0" * 63], ""),
    ("policy", "calibration", [MISSING, [], {}, "share"], ""),
    ("policy", "calibration", [{**SIMPLE, "values": [[2.0, 1.0]] * 4}], "knots do not increase"),
    ("policy", "calibration",
     [{**SIMPLE, "scores": [[0.0, 1.0]] * 3, "values": [[0.0, 1.0]] * 3}],
     "a calibration of 3 heads is not of 4"),
    ("policy", "calibration",
     [{**SIMPLE, "scores": [[0.0, 1.0], [0.0]]}, {**SIMPLE, "scores": None}], DAMAGED),
    ("policy", "calibration/target", [None, 3, "a\nb"], ""),
    ("policy", "calibration/scores",
     [[[True, False]] * 4, [["1", "2"]] * 4, [[0.0, 1e300]] * 4], ""),
    ("policy", "training", [MISSING, None, []], ""),
    ("policy", "training/seed", [True, 1.5, -1, "1"], ""),
    ("policy", "training/recipe", [None, {"steps": "many"}], ""),
    ("policy", "held_out",
     [MISSING, {}, [{}], [{}] * 5, [None] * 4, [{"skill": True}] * 4], ""),
]  # fmt: skip
"""Kind, an entry of its sealed object, what it becomes, and what the line says."""


def _change(file, path, value):
    """Change a sealed object, and seal it again: a JSON file, or the header of tensors."""
    tensors = load_file(file) if file.suffix == ".context" else None
    if tensors:
        with safe_open(file, "pt") as opened:
            content = json.loads(opened.metadata()["kvp"])
        del content[SEAL]
    else:
        content = read_sealed_json(file)
    part, (*above, last) = content, path.split("/")
    for key in above:
        part = part[key]
    if path == "":
        part |= value
    elif value is MISSING:
        del part[last]
    else:
        part[last] = value
    if tensors:
        write_sealed_safetensors(file, tensors, content)
    else:
        write_sealed_json(file, content)


@pytest.mark.parametrize(
    ("kind", "path", "value", "words"),
    [(kind, path, value, words) for kind, path, values, words in CHANGES for value in values],
)
def test_facts_that_cannot_be_are_refused(tmp_path, kind, path, value, words):
    file, read = _make(kind, tmp_path / "a")
    _change(file, path, value)
    line = _line(read)
    assert str(tmp_path) in line
    assert words in line
    assert "\n" not in line


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


PLAN = SearchPlan(layers=2, target=parse_budget("4"), budget=4, minimum=1, maximum=8, group=2,
                  generations=1, constraint="project", seed=0)  # fmt: skip
READERS = {
    "report": lambda file: report([str(file.parent)]),
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


PIPES = {
    "config": lambda path: main(["train", "--config", str(path)]),
    "text": lambda path: main(["compress", str(path), "--policy", "nano", "--out", "x"]),
    "rows": lambda path: kvp.evaluate(tasks="data", data=str(path), out="x"),
    "mixture": lambda path: kvp.collect(data=f"chat:1,{path}:1", out="x"),
    "essays": lambda path: kvp.evaluate(tasks="niah_single_2", essays=str(path), out="x"),
    "squad": lambda path: kvp.evaluate(tasks="qa_1", squad=str(path), out="x"),
    "GGUF file": read_gguf,
    "policy": lambda path: load_policy(path.parent),
    "settings": load_settings,
    "budgets": lambda path: make_allocator(f"evolved:{path}"),
    "store": lambda path: TraceReader(path.parent),
    "results": lambda path: load_results(path.parent),
    "context": read_context,
    "digest": sha256_input,
    "records": lambda path: list(JsonLines(path)),
    "tensors": lambda path: read_safetensors(path, KvpError),
    "ranges": lambda path: read_ranges(path, [(0, 4)]),
    "model": lambda path: kvp.load_model(str(path.parent)),
    "model.gguf": lambda path: kvp.load_model(str(path)),
}


@pytest.mark.parametrize("kind", PIPES)
def test_no_reader_waits_for_a_pipe(tmp_path, kind, monkeypatch, capsys, quiet_pipes):
    monkeypatch.chdir(tmp_path)
    names = {"policy": "policy.json", "store": "manifest.json", "results": "manifest.json",
             "text": "a.txt", "rows": "a.jsonl", "essays": "a.txt",
             "model": "tokenizer.json", "model.gguf": "model.gguf"}  # fmt: skip
    path = tmp_path / "made" / names.get(kind, "a.json")
    path.parent.mkdir()
    if kind == "model":
        (path.parent / "config.json").write_text((nano.path() / "config.json").read_text())
    os.mkfifo(path)
    quiet_pipes(path.parent)
    try:
        assert PIPES[kind](path) == 2
        said = capsys.readouterr().err
    except (KvpError, OSError) as refusal:
        said = str(refusal)
    assert "regular file" in said or "no such file" in said or "no budget file" in said
    assert path.name in said
    assert not Path("x").exists()


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
