"""What every method answered to a few prompts at every budget, compressed for the page."""

import base64
import gzip
import json
from collections.abc import Sequence
from operator import itemgetter

from eval.results.comparison import Comparison
from eval.results.method_setting import MethodSetting
from eval.results.record_names import READABLE_PROMPTS, SEEN
from eval.results.records import Record, evidence_share
from kvp.grouping import group_by
from kvp.names import FULL

SHOWN_CHARACTERS = 400
"""Most characters of an answer on the page."""
MOST_BYTES = 500_000
"""Most bytes of all compressed answers; fewer prompts are shown where they would be more."""
_PROMPT_FIELDS = ("protocol", "task", "example", "question", "references", "reply", "nll")
_ANSWER_FIELDS = ("family", "label", "policy", "budget_spec", "score", "nll", "reply_tokens")


def pack_text(text: str) -> str:
    """A text as the page holds it: UTF-8, compressed by gzip, in base64."""
    data = gzip.compress(text.encode("utf-8", "backslashreplace"), compresslevel=6, mtime=0)
    return base64.b64encode(data).decode()


def pack_answers(comparisons: Sequence[Comparison]) -> tuple[str, str] | None:
    """The first prompts of every task, those set apart last, each method in its chosen setting.

    Returns a caption and JSON, a list of prompts (`_shown_prompt`); None without prompts. At most
    `READABLE_PROMPTS` prompts per task, fewer if they are more than `MOST_BYTES`.
    """
    tasks = []
    for comparison in comparisons:
        groups = comparison.results.policy_groups
        chosen = [
            {**record, "family": setting.family, "label": setting.label}
            for record in comparison.records
            if (setting := MethodSetting.of(record, groups)) in comparison.choices
        ]
        by_task = group_by(chosen, itemgetter("task"))
        in_order = [by_task[task] for task in comparison.task_sort.tasks if task in by_task]
        tasks += [[*group_by(records, itemgetter("example")).values()] for records in in_order]
    if not tasks:
        return None
    for count in (READABLE_PROMPTS, READABLE_PROMPTS // 2, READABLE_PROMPTS // 4, 1):
        shown = [
            _shown_prompt(records)
            for prompts in tasks
            for records in sorted(prompts, key=lambda rows: "question" not in rows[0])[:count]
        ]
        content = json.dumps(shown, separators=(",", ":"))
        if len(pack_text(content)) <= MOST_BYTES:
            break
    most = max(map(len, tasks))
    which = f"{min(count, most)} of up to {most} prompts per task, each method in the setting of "
    return f"{which}the tables; every answer is in rows.jsonl.", content


def _shown_prompt(records: Sequence[Record]) -> Record:
    records = sorted(records, key=lambda record: record["method"] != FULL)
    answers = [
        {name: record.get(name) for name in _ANSWER_FIELDS}
        | {
            "evidence": evidence_share(record),
            "text": (record["prediction"] or "")[:SHOWN_CHARACTERS],
        }
        for record in records
    ]
    first = records[0]
    title = f"{first['task']}: {first['example']}, {SEEN[first['protocol']]}"
    return {name: first.get(name) for name in _PROMPT_FIELDS} | {"title": title, "answers": answers}
