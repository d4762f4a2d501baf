"""Numbers of a comparison in columns."""

import io
import re
from pathlib import Path

import pandas
from toy_results import compare_records, hand_answers

from eval.results.frame import tidy


def test_every_number_has_its_column():
    records = [
        row
        for task, full, knorm in (("all", 40, 30), ("vt", 4, 8))
        for row in hand_answers(
            ("full", None, range(full)), ("knorm", "25%", range(knorm)), ("random", "25%", 0.0),
            task=task,
        )
    ]  # fmt: skip
    table = tidy(compare_records(records)[0])
    columns = {re.sub("_(low|high|differs)$", "", name) for name in table.columns}
    page = Path("docs/formats.md").read_text(encoding="utf-8")
    assert not [name for name in columns if f"`{name}`" not in page]
    assert table.duplicated(["task", "method", "setting", "budget"]).sum() == 0
    knorm = table[table["method"] == "knorm"].set_index("task")
    assert list(knorm.index) == ["all", "task all", "vt"]  # the second is of the task "all"
    assert list(knorm["apart"]) == [False, False, True]  # vt: full answers 10 %
    assert list(knorm["estimate"]) == [0.75, 0.75, 0.2]
    assert list(knorm["n"]) == [40, 40, 40]
    assert list(knorm["share_of_full"].fillna(-1)) == [0.75, 0.75, -1]
    assert list(knorm["minus_full"].fillna(-1)) == [-0.25, -0.25, -1]
    assert knorm["minus_full_low"]["all"] < -0.25 < knorm["minus_full_high"]["all"] < 0
    assert list(knorm["minus_full_differs"]) == [True, True, False]
    others = table[(table["task"] == "all") & (table["method"] == "random")].iloc[0]
    assert others["minus_lead"] == -0.75  # knorm leads
    assert pandas.read_csv(io.StringIO(table.to_csv()))["estimate"].dtype.kind == "f"
