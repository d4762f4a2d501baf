"""Results that somebody else wrote: no script, no path and no traceback gets out of them."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eval.report.load import load_results
from eval.report.run import build, make_runs
from kvp.errors import KvpError, ResultsError
from kvp.programs import report as main

Record = dict[str, Any]
Write = Callable[..., Path]
SCRIPT = "</script><script>alert(1)</script>"
QUOTE = "\"' onmouseover='alert(1)"
TRAVERSAL = "/../../../victim"


@pytest.fixture
def folder(
    tmp_path: Path,
    write_results: Write,
    answers: list[Record],
    replies: list[Record],
    curves: list[Record],
    timing: list[Record],
    tokens: Record,
) -> Path:
    """A folder with every file that kvp-eval writes."""
    folder = write_results(
        tmp_path / "r", records=[*answers, *replies], timing=timing, curves=curves, tokens=tokens
    )
    kept = {
        **{name: curves[-1][name] for name in ("model", "method", "variant", "allocator", "policy",
                                               "policy_seed", "protected", "protocol")},
        "budget_spec": "25%", "kept": 0.5, "low": 0.4, "high": 0.6, "kept_tokens": 4,
        "cached_tokens": 16, "sequences": 3,
    }  # fmt: skip
    _write_lines(folder / "kept.jsonl", [kept])
    return folder


class Attributes(HTMLParser):
    """Names of all attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {name for name, _ in attrs}


def _page(folder: Path) -> str:
    """The page without its figures as files, which take longest; raises what kvp-report raises."""
    return build(make_runs([load_results(folder)], None, 3))


def _digest(content: Record) -> str:
    """As `kvp.manifest.digest_json`, also of what kvp would not write."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _write_lines(path: Path, records: Iterable[Record]) -> None:
    lines = ({**record, "checksum": _digest(record)[:16]} for record in records)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _lines(path: Path) -> list[Record]:
    records: list[Record] = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        del record["checksum"]
    return records


def _change_record(folder: Path, name: str, number: int, **changes: Any) -> None:
    records = _lines(folder / name)
    records[number] |= changes
    _write_lines(folder / name, records)


def _change_json(folder: Path, name: str, **changes: Any) -> None:
    content = {**json.loads((folder / name).read_text()), **changes}
    del content["sha256"]
    if "identity" in changes:
        content["identity_digest"] = _digest(content["identity"])
    (folder / name).write_text(json.dumps({**content, "sha256": _digest(content)}))


@pytest.mark.parametrize("name", ["rows.jsonl", "timing.jsonl", "curves.jsonl", "kept.jsonl"])
@pytest.mark.parametrize("protocol", [SCRIPT, QUOTE, TRAVERSAL, "query_awarex", "", 7, []])
def test_protocols_are_a_closed_set(folder: Path, name: str, protocol: Any) -> None:
    _change_record(folder, name, 0, protocol=protocol)
    with pytest.raises(ResultsError, match=rf"{re.escape(name)} line 1 is damaged: 'protocol'"):
        load_results(folder)


def test_nothing_is_written_outside_of_the_folder(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim.png"
    victim.write_bytes(b"mine")
    path = folder / "rows.jsonl"
    _write_lines(path, [{**record, "protocol": "/../../victim"} for record in _lines(path)])
    assert main([str(folder), "--bootstrap", "3"]) == 2
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("evil", [SCRIPT, QUOTE])
def test_only_the_scripts_of_the_page_may_run(folder: Path, evil: str) -> None:
    """Every free text of every file is the attack; scripts that may run are named by digests."""
    for name in ("rows.jsonl", "timing.jsonl", "curves.jsonl", "kept.jsonl"):
        changed = [
            {**record, "policy": record["policy"] and evil + record["policy"], "variant": evil,
             "task": evil, "example": evil + str(record.get("example")), "model": evil}
            for record in _lines(folder / name)
        ]  # fmt: skip
        _write_lines(folder / name, changed)
    tokens = json.loads((folder / "tokens.json").read_text())
    methods = {f"{evil}/{name}": heads for name, heads in tokens["methods"].items()}
    _change_json(
        folder, "tokens.json", methods=methods, task=evil, protocol=evil,
        tokens=[evil] * len(tokens["tokens"]),
    )  # fmt: skip
    identity = json.loads((folder / "manifest.json").read_text())["identity"]
    _change_json(
        folder, "manifest.json", identity={**identity, "model": evil, "split": evil}, notes=[evil],
        kvp=evil, created=evil, command=evil, earlier_runs=[{"command": [evil]}],
        packages={evil: evil}, config={evil: evil},
    )  # fmt: skip
    page = _page(folder)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert not re.search(r"unsafe|http|data:|blob:|\*", directives["script-src"])
    allowed = directives["script-src"].split()
    run = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    digests = [
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in run
    ]
    assert digests == allowed
    assert len(digests) == 3
    rest = page
    for script in run:
        rest = rest.replace(f"<script>{script}</script>", "")
    data = r'<script type="application/json" data-[a-z]+="[a-z_-]+">[^<]*</script>'
    rest = re.sub(data, "", rest)
    assert "<script" not in rest
    assert "alert" in rest  # shown as text
    attributes = Attributes(rest).names
    assert "content" in attributes
    assert not {name for name in attributes if name.startswith("on") or name == "src"}


def _mutations(seed: int) -> Iterator[tuple[str, str, Any]]:
    """File, field and value of damage: every kind of value in fields drawn at random."""
    generator = random.Random(seed)
    values: list[Any] = [
        None, True, -1, 0, 1e308, 10**400, float("nan"), "", "text", "9%", SCRIPT, "\ud800", "[/x]",
        [], [1], [[1]], ["a"], {}, {"a": 1}, "x" * 10_000,
    ]  # fmt: skip
    fields = {
        "rows.jsonl": (
            "method variant allocator protected policy policy_seed protocol task example budget "
            "budget_spec score nll reply_tokens kept_tokens cached_tokens cache_bytes model"
        ),
        "timing.jsonl": (
            "method protocol budget budget_spec prompts cache_bytes kept_tokens by_prompt"
        ),
        "curves.jsonl": "method policy layer head budgets cost area skill sequences protected",
        "kept.jsonl": "method budget_spec kept low high kept_tokens cached_tokens sequences",
        "tokens.json": "tokens methods prompt_length geometry task protocol",
        "manifest.json": (
            "format_version config identity seed kvp packages command created policies notes "
            "earlier_runs"
        ),
    }
    while True:
        name = generator.choice(list(fields))
        yield name, generator.choice(fields[name].split()), generator.choice(values)


def _error(folder: Path) -> Exception | None:
    try:
        _page(folder)
    except Exception as error:
        return error
    return None


@pytest.mark.filterwarnings("error")
def test_damaged_files_are_one_line_or_a_report(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    refused = 0
    mutations = _mutations(seed=0)
    for _ in range(40):
        name, field, value = next(mutations)
        if name.endswith(".jsonl"):
            _change_record(folder, name, 0, **{field: value})
        else:
            _change_json(folder, name, **{field: value})
        error = _error(folder)
        if error is not None:
            refused += 1
            damage = (name, field, value, error)
            assert isinstance(error, KvpError), damage
            assert name in str(error), damage
            assert "\n" not in str(error), damage
        for path, content in before.items():
            path.write_bytes(content)
    assert refused > 20


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", b"\xff\xfe\n"),
        ("rows.jsonl", b"[1]\n"),
        ("curves.jsonl", b"null\n"),
        ("tokens.json", b"[]"),
        ("tokens.json", b""),
        ("manifest.json", b"\x00" * 64),
    ],
)
def test_foreign_content_is_one_line(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ResultsError, match=re.escape(name)):
        load_results(folder)


def test_curves_of_other_budgets_are_refused(folder: Path) -> None:
    _change_record(folder, "curves.jsonl", 1, budgets=[0.0, 1.0], cost=[1.0, 0.0])
    with pytest.raises(ResultsError, match="curves at different budgets"):
        load_results(folder)


def test_repeated_and_contradicting_lines_are_refused(folder: Path) -> None:
    records = _lines(folder / "rows.jsonl")
    other = {**records[0], "score": 0.25}
    for added, words in ((records[0], "repeats line 1"), (other, "contradicts an earlier line")):
        _write_lines(folder / "rows.jsonl", [*records, added])
        with pytest.raises(ResultsError, match=f"line {len(records) + 1} {words}"):
            load_results(folder)


def test_markup_in_paths_is_text(tmp_path: Path, write_results: Write, capsys: Any) -> None:
    folder = write_results(tmp_path / "[bold]r[/x]")
    assert main([str(folder), "--bootstrap", "3", "--out", str(tmp_path / "[/x].html")]) == 0
    assert str(tmp_path / "[/x].html") in capsys.readouterr().out
    (folder / "rows.jsonl").write_text("")
    assert main([str(folder)]) == 2
    assert "[bold]r[/x]" in capsys.readouterr().err
