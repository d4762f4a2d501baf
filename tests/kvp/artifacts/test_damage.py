"""A changed file gives an error of one line that names it, or its content as before.

`KINDS` has the readers, `DAMAGES` changes of their bytes, and `CHANGES` changes of their entries
under a new seal: whatever such a file holds, no module is imported that it names.
"""

import copy
import json
import random
from functools import partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from small_context import COUNTS, make_context
from toy_results import result_record

from eval.methods import build_methods
from eval.output_folder import RESULTS
from eval.results.folder import load_results
from eval.results.tuned_settings import load_settings
from kvp.artifacts.claim import OutputFolder
from kvp.artifacts.files import SEAL, JsonLines
from kvp.artifacts.manifest import read_sealed_json, write_sealed_json
from kvp.artifacts.tensors import read_safetensors, write_safetensors, write_sealed_safetensors
from kvp.contexts import read_context, read_facts
from kvp.errors import KvpError, PolicyError, StoreError, UsageError, first_line
from kvp.geometry import Geometry
from kvp.program.table import report
from kvp.store import SequenceRecord, StorePlan, Trace, TraceReader, TraceWriter
from policies import load_policy, make_allocator
from policies.budget_files import load_budgets
from policies.learned import Calibration
from policies.policy_files import PolicyMeta, save_policy
from policies.ranker import HeadRankers, RankerSpec
from train.job.run_folder import RunFolder

CODE = "hostile_code:Scorer"
SIZE = Geometry(layers=1, query_heads=2, kv_heads=2, head_dim=4)
POLICY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)
HEAD = "layer_01_head_00.safetensors"
MISSING = object()
SCORED = {"scorer": "snapkv", "variant": "auto", "allocator": "uniform", "protected": False,
          "score": 0.5, "interval": [0.1, 0.9]}  # fmt: skip
SETTINGS = {
    "format": "kvp-settings", "format_version": 1, "split": "test", "data": {}, "run": {},
    "methods": [{"method": "snapkv", "requested": "snapkv", "tried": 3, "protocol": "query_aware",
                 "chosen": SCORED, "published": [SCORED]}],
}  # fmt: skip
BUDGETS = {
    "format": "kvp-budgets", "format_version": 1, "run": {}, "model": {"id": "m"}, "seed": 4,
    "geometry": {"layers": 2, "kv_heads": 2}, "scorer": CODE, "protocol": "query_aware",
    "protection": {"sinks": 4, "recents": 16}, "budget": 15, "cached_tokens": 99, "counts": [9, 21],
}  # fmt: skip
RESULT = {"format": "kvp-results", "format_version": 3, "identity": {"model": "m"}, "notes": ["a"],
          "planned": [{"protocol": "query_aware", "prompts": {"t": 2}, "settings": [["full"]]}],
          "policies": {"a": "0"}, "packages": {"torch": "1"}}  # fmt: skip
ROW = result_record("full", protected=False, budget_spec=None, task="t", score=1.0, prediction="x",
                    references=["x"], evidence_tokens=1, evidence_kept=[[1]])  # fmt: skip


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
    context = make_context(counts)
    folder.mkdir()
    path = context.write(folder)

    def read():
        again = read_context(path)
        assert read_facts(path) == again.facts == context.facts
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
"""Makes files in a folder: the sealed one, and a function that reads all of them."""


@pytest.fixture(autouse=True)
def ran(own_module, tmp_path):
    """A file that exists once the module of `CODE` was imported."""
    text = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nclass Scorer: pass\n"
    own_module("hostile_code", text)
    return tmp_path / "ran"


def _line(read):
    """The message of the error; "" where nothing is refused."""
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
    _, read = KINDS[kind](tmp_path / "a")
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
    *(("policy", HEAD, damage, ("is damaged", "checksum")) for damage in ("short", "last bit")),
    ("policy", HEAD, "gone", ("is missing: copy or train this incomplete policy again",)),
    ("policy", "policy.json", "gone", ("has no policy.json: it is not a policy directory",)),
    ("store", RECORD, "gone", ("no sequence 0",)),
    ("store", "manifest.json", "gone", ("is not a trace store", "kvp collect was stopped")),
    *(("store", shard, damage, (f"{shard} is damaged or missing", f"delete {{}}/{RECORD}"))
      for shard in SHARDS for damage in ("empty", "short", "gone")),
    ("run", CHECKPOINT, "half", ("is damaged; delete it",)),
    *((kind, CONTEXT, "last bit", ("does not match its tensors",))
      for kind in ("context", "uneven")),
    *(("context", CONTEXT, damage, ("damaged or half-written",))
      for damage in ("empty", "half", "short", b"{")),
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
"""Kind, file, its new content or a further line, and words of the error beside the file's name."""


@pytest.mark.parametrize(("kind", "name", "damage", "words"), DAMAGES)
def test_damage_is_one_line(tmp_path, kind, name, damage, words):
    _, read = KINDS[kind](tmp_path / "a")
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


KNOTS = [[0.0, 1.0]] * 3
CHANGES = [
    *((kind, "format", ["kvp-x"], "is of format 'kvp-x', not 'kvp-")
      for kind in ("policy", "store", "results", "settings", "budgets", "context", "uneven")),
    *((kind, "format_version", [version], f"has format version {version}, this kvp reads")
      for kind, version in {"policy": 2, "store": 2, "results": 2, "settings": 2, "budgets": 2,
                            "context": 3, "uneven": 0}.items()),
    ("policy", "", [{"calibration": None, "geometry": {**POLICY.to_dict(), "layers": 3}}],
     "do not cover 3 layers"),
    ("policy", "geometry/head_dim", [4], "do not cover 2 layers"),
    ("policy", "architecture", ["forest"], f"{DAMAGED} (ValueError: unknown architecture 'forest'"),
    ("policy", "hyperparameters/reference_length", [MISSING], "hyperparameters are missing"),
    ("policy", "rope", ["pre"], "keys are not those after RoPE"),
    ("settings", "methods", [2 * SETTINGS["methods"]], "is of several policies: tune each of them"),
    ("policy", "weights", ["bfloat16"], "_head_00.safetensors holds a ranker of another"),
    ("policy", "calibration/values", [[[2.0, 1.0, 3.0]] * 4], "knots do not increase"),
    ("policy", "calibration", [{"target": "share", "scores": KNOTS, "values": KNOTS}],
     "a calibration of 3 heads is not of 4"),
]  # fmt: skip
"""Kind, an entry of its sealed object, its new values, and words of the error."""


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
def test_sealed_files_with_impossible_entries_are_refused(tmp_path, kind, path, value, words):
    file, read = KINDS[kind](tmp_path / "a")
    _change(file, path, value)
    line = _line(read)
    assert str(tmp_path) in line
    assert words in line
    assert "\n" not in line


@pytest.mark.parametrize("side", ["scorer", "allocator"])
def test_code_that_a_file_names_needs_the_caller_to_name_it(tmp_path, ran, side):
    file, _ = KINDS["settings"](tmp_path / "a")
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
