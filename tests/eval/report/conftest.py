"""The report of `toy_results`."""

import pytest
from toy_results import answer_records, reply_records, timing_records, write_results

from kvp.program.table import report as main


@pytest.fixture(scope="session")
def reported(tmp_path_factory):
    """A complete results folder with its report, made once: report.html and figures/.

    Answers are their method and budget.
    """
    folder = write_results(
        tmp_path_factory.mktemp("reported") / "results",
        records=[
            *({**record, "question": "Which?", "reply": None,
               "prediction": f"{record['method']} at {record['budget_spec']}"}
              for record in answer_records()),
            *reply_records(),
        ],
        timing=timing_records(),
    )  # fmt: skip
    assert main([str(folder), "--png", str(folder / "figures")]) == 0
    return folder
