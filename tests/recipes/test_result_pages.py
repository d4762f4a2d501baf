"""Cells of hand-made tables on pages of results are the numbers of the files beside them.

Each is rounded once: 47.9456 is 47.9, not 47.95 and then 48.0.
"""

import re
from decimal import ROUND_HALF_DOWN, ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from recipes.real_models import pages

ROOT = Path(__file__).parents[2]
PAGES, NUMBERS = ROOT / "docs/results", ROOT / "benchmarks/results"
CELL = re.compile(r"(-?[\d.]+)(?: \((-?[\d.]+) to (-?[\d.]+)\))?")
FREE, GLOBAL, ADA = "unprotected", "+global, unprotected", "+ada, unprotected"
TRAINED = {
    "full cache": ("ruler", "full", None),
    "kvp, trained on these tasks, global": ("trained", "kvp", GLOBAL),
    "kvp, trained on these tasks, equal counts": ("trained", "kvp", FREE),
    "ContrastKV, global, reads twice": ("ruler", "contrastkv", f"beta=0, {GLOBAL}"),
    "KVzip, global, reads twice": ("ruler", "kvzip", GLOBAL),
    "KeyDiff, global": ("ruler", "keydiff", GLOBAL),
    "kvp, former bundled policy, global": ("ruler", "kvp", GLOBAL),
    "kvp, former bundled policy, equal counts": ("ruler", "kvp", FREE),
    "KVzap, global": ("trained", "kvzap", GLOBAL),
    "KVzap, equal counts": ("trained", "kvzap", FREE),
    "KVzip, equal counts": ("trained", "kvzip", FREE),
    "KVzip as published (global:kvzip)": ("published", "kvzip", "+global:kvzip, unprotected"),
    "ContrastKV with beta=0 and that allocator":
        ("published", "contrastkv", "beta=0, +global:kvzip, unprotected"),
    "SnapKV (kernel 31), global": ("snapkv-global", "snapkv", f"kernel=31, {GLOBAL}"),
    "H2O, default, equal counts": ("ruler", "h2o", ADA),  # its ranks are equal in all heads
    "random_pinned (null)": ("ruler", "random_pinned", FREE),
}  # fmt: skip
SEEN = {
    "full cache": ("seen-trained", "full", None),
    "kvp, trained on these tasks, equal counts": ("seen-trained", "kvp", FREE),
    "kvp, trained on these tasks, global": ("seen-trained", "kvp", GLOBAL),
    "SnapKV (window 8, kernel 31), ada": ("seen-snapkv", "snapkv", f"window=8,kernel=31, {ADA}"),
    "ContrastKV, global, reads twice": ("seen-rivals", "contrastkv", f"beta=0, {GLOBAL}"),
    "KVzip, global, reads twice": ("seen-rivals", "kvzip", GLOBAL),
    "KeyDiff, global": ("seen-rivals", "keydiff", GLOBAL),
    "SnapKV as published": ("seen", "snapkv", "paper, unprotected"),
    "PyramidKV, SnapKV's scores": ("seen", "snapkv", "paper, +pyramid, unprotected"),
    "Expected Attention (epsilon=0.1), ada": ("seen", "expected_attention", f"epsilon=0.1, {ADA}"),
    "WindowKV": ("seen", "windowkv", "llama, +windowkv, unprotected"),
    "H2O": ("seen", "h2o", ADA),
}
ROWS = {
    "full cache": ("full", None),
    "kvp, global": ("kvp", "+global, {}"),
    "kvp+global": ("kvp", "+global, {}"),
    "kvp, equal counts": ("kvp", "{}"),
    "ContrastKV, global, reads twice": ("contrastkv", "beta=0, +global, {}"),
    "KVzip, global": ("kvzip", "+global, {}"),
    "KVzip, global, reads twice": ("kvzip", "+global, {}"),
    "KeyDiff, global": ("keydiff", "+global, {}"),
    "KeyDiff, equal counts": ("keydiff", "{}"),
    "Expected Attention, ada": ("expected_attention", "epsilon=0.1, +ada, {}"),
    "SnapKV, ada": ("snapkv", "window=64,kernel=31, +ada, {}"),
    "StreamingLLM (null)": ("streaming_llm", "{}"),
}
"""Methods and settings of tables whose files protect tokens or do not, as `{}` tells."""
UNSEEN = {
    label: (method, setting and setting.format(FREE)) for label, (method, setting) in ROWS.items()
}


@cache
def _table(page, number):
    """Cells of a page's table, without marks: heading, then rows."""
    text = (PAGES / page).read_text(encoding="utf-8")
    table = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)[number]
    lines = table.translate(dict.fromkeys(map(ord, "*`"))).splitlines()
    first, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    return first, rows


@cache
def _numbers(file, protocol):
    frame = pd.read_csv(NUMBERS / f"{file}.csv", dtype=str)
    return frame[(frame["task"] == "all") & (frame["protocol"] == protocol)]


def _check(cell, file, method, setting, budget, scale, protocol="query_agnostic"):
    rows = _numbers(file, protocol)
    rows = rows[(rows["method"] == method) & (rows["budget"] == budget)]
    rows = rows[rows["setting"].isna() if setting is None else rows["setting"] == setting]
    (row,) = rows.to_dict("records")
    _check_rounded(cell, [scale * Decimal(row[name]) for name in ("estimate", "low", "high")])


def _check_rounded(cell, values):
    """A cell is a number, or one with its interval; values are those of a file."""
    match = CELL.fullmatch(cell)
    assert match, cell
    for shown, value in zip(match.groups(), values, strict=True):
        if shown is None:
            continue
        unit = Decimal(1).scaleb(-len(shown.partition(".")[2]))
        once = {value.quantize(unit, rounding=how) for how in (ROUND_HALF_UP, ROUND_HALF_DOWN)}
        assert Decimal(shown) in once, f"{cell}: {value}"


@pytest.mark.parametrize(
    ("page", "number", "known", "folder"),
    [("qwen2.5-coder.md", 0, UNSEEN, "qwen2.5-coder"),
     ("qwen2.5-coder.md", 2, UNSEEN, "qwen2.5-coder-1.5b"),
     ("qwen2.5-coder.md", 3, TRAINED, "qwen2.5-coder"),
     ("qwen2.5-coder.md", 4, SEEN, "qwen2.5-coder"),
     ("qwen2.5-coder_details.md", 0, TRAINED, "qwen2.5-coder"),
     ("qwen2.5-coder_details.md", 2, SEEN, "qwen2.5-coder")],
)  # fmt: skip
def test_answers_by_budget(page, number, known, folder):
    (_, *budgets), rows = _table(page, number)
    protocol = "query_aware" if known is SEEN else "query_agnostic"
    for label, *cells in rows:
        *file, method, setting = known[label]
        (file,) = file or ["length-2048"]
        for budget, cell in zip(budgets, cells, strict=True):
            at = "full" if method == "full" else budget.replace(" ", "")
            if cell:
                _check(cell, f"{folder}/{file}", method, setting, at, 100, protocol)


@pytest.mark.parametrize(
    ("page", "number"), [("qwen2.5-coder.md", 1), ("qwen2.5-coder_details.md", 3)]
)
def test_answers_by_length(page, number):
    """A heading has a length, of the next ones as well, and a budget, 12.5 % without one."""
    (_, *heads), rows = _table(page, number)
    length, places = "", []
    for head in heads:
        length = "".join(re.findall(r"^([\d,]+)(?: tokens|:)", head)).replace(",", "") or length
        budget = "".join(re.findall(r"([\d.]+) %$", head)) or "12.5"
        places.append((f"length-{length}", f"{budget}%"))
    for label, *cells in rows:
        method, setting = UNSEEN[label]
        for (file, budget), cell in zip(places, cells, strict=True):
            at = "full" if method == "full" else budget
            if cell:
                _check(cell, f"qwen2.5-coder/{file}", method, setting, at, 100)


def test_answers_of_the_former_policy():
    """Beside those of the bundled one, at two lengths: `global`, then equal counts."""
    places = [("shorter", "kvp/general"), ("shorter", "kvp/old")]
    places += [("length-2048", "kvp"), ("old-2048", "kvp")]
    rows = _table("qwen2.5-coder_details.md", 6)[1]
    settings = [(setting, budget) for setting in (GLOBAL, FREE) for budget in ("12.5%", "25%")]
    for (_, _, *cells), (file, method) in zip(rows, places, strict=True):
        for cell, (setting, budget) in zip(cells, settings, strict=True):
            _check(cell, f"qwen2.5-coder/{file}", method, setting, budget, 100)


def test_other_tasks():
    files = ("code", "questions", "topics", "novels")
    for label, *cells in _table("qwen2.5-coder_details.md", 4)[1]:
        method, setting = ROWS[label]
        for file, cell in zip(files, cells, strict=True):
            budgets = ["full"] if method == "full" else ["12.5%", "25%"]
            chosen = setting and setting.format("protected" if file == "code" else FREE)
            scale = 100 if file == "topics" else 1
            for budget, number in zip(budgets, cell.split(", ") if cell else (), strict=False):
                _check(number, f"qwen2.5-coder/{file}", method, chosen, budget, scale)


def test_policies_that_were_tried():
    """Several of a file share a name: one of them has the numbers."""
    numbers = _numbers("qwen2.5-coder/lookups", "query_agnostic")
    for _, *cells in _table("qwen2.5-coder_details.md", 5)[1]:
        for budget, cell in zip(2 * ["6.25%", "12.5%", "25%"], cells, strict=True):
            values = numbers[numbers["budget"] == budget]["estimate"].map(Decimal)
            assert not cell or Decimal(cell) in {round(value, 1) for value in values}, cell


ENGINES = {
    "needles": ("quality-needles", "kvp/kv", FREE, 100),
    "the same, first 4 and last 16 kept, as engines do":
        ("quality-protected", "kvp", "protected", 100),
    "WikiText-2": ("quality-text-wiki", "kvp/kv", FREE, 1),
    "articles": ("quality-text-news", "kvp/kv", FREE, 1),
}  # fmt: skip


def test_answers_with_equal_counts():
    (_, _, *budgets), rows = _table("engines.md", 2)
    texts = ""
    for first, label, *cells in rows:
        texts = first or texts
        file, policy, setting, scale = ENGINES[texts]
        method = "keydiff" if label == "KeyDiff" else policy
        for budget, cell in zip(budgets, cells, strict=True):
            chosen = (
                ("full", None, "full")
                if budget == "full"
                else (method, setting, budget.replace(" ", ""))
            )
            if cell:
                _check(cell, f"engines/{file}", *chosen, scale)


def test_answers_from_an_fp8_cache():
    numbers = pd.read_csv(NUMBERS / "engines/fp8.csv", dtype=str).set_index("budget")
    rows = _table("engines.md", 1)[1]
    assert len(rows) == len(numbers)
    for label, *cells in rows:
        (budget,) = re.findall(r"([\d.]+) %", label) or ["100"]
        row = numbers.loc[f"{budget}%"]
        for cell, of in zip(cells, ("transformers", "vllm", "minus_transformers"), strict=True):
            _check_rounded(cell, [Decimal(row[of + end]) for end in ("", "_low", "_high")])


def test_tables_of_the_first_model_are_those_of_its_recipe(monkeypatch):
    monkeypatch.chdir(ROOT)
    text = pages.PAGE.read_text(encoding="utf-8")
    for table in (pages.kept(), pages.texts()):
        assert "\n".join(table) in text


def test_minutes_on_the_card_are_those_of_the_recipe():
    minutes = pd.read_csv(NUMBERS / "qwen2.5-coder/recipe.csv")["minutes"].tolist()
    card = ROOT / "policies/bundled/qwen2.5-coder-0.5b-instruct/README.md"
    text = " ".join(card.read_text(encoding="utf-8").split())
    told = re.search(r"took (\d+) minutes .* traces ([\d.]+) .*, training ([\d.]+)\.", text)
    assert [float(number) for number in told.groups()] == [round(minutes[2]), *minutes[:2]]
