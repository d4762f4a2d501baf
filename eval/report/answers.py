"""Answers to read: of a few prompts, what every method answered at every budget, and what it kept.

The page holds them compressed, and its script shows one prompt at a time.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from eval.comparison import Comparison, method_of
from eval.records import FULL, READABLE, Record, value_of

LETTERS = 400
"""Of an answer, a reference or a question on the page at most."""
BYTES = 900_000
"""Of all compressed answers of a run at most; where they are more, fewer prompts are shown."""

Prompt = tuple[str, str, str]
"""Protocol, task and example."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers that the page shows of one run."""

    kind: ClassVar[str] = "answers"

    caption: str
    methods: tuple[str, ...]
    """Families, in display order."""
    ident: str = ""
    """Its name in the page."""
    content: str
    """JSON, a list of prompts (`_prompt`)."""


def packed(text: str) -> str:
    """A text as the page holds it: UTF-8, compressed by gzip, in base64."""
    data = gzip.compress(text.encode("utf-8", "backslashreplace"), mtime=0)
    return base64.b64encode(data).decode()


def answers(comparisons: Sequence[Comparison]) -> Answers | None:
    """The first prompts of every task, each method in its chosen setting; None without any.

    `READABLE` prompts per task at most, and as few as make less than `BYTES`.
    """
    records: dict[Prompt, list[Record]] = defaultdict(list)
    families: dict[int, str] = {}
    for comparison in comparisons:
        chosen = {choice.setting for choice in comparison.choices.values()}
        for record in comparison.records:
            setting = method_of(record, comparison.groups)
            if setting in chosen:
                records[comparison.protocol, record["task"], record["example"]].append(record)
                families[id(record)] = setting.family
    tasks: dict[tuple[str, str], list[Prompt]] = defaultdict(list)
    for prompt in sorted(records, key=lambda each: "excerpt" not in records[each][0]):
        tasks[prompt[:2]].append(prompt)
        records[prompt].sort(key=lambda record: record["method"] != FULL)
    content, count = "", READABLE
    while records and count:
        shown = [
            _prompt(prompt, records[prompt], families)
            for prompts in tasks.values()
            for prompt in prompts[:count]
        ]  # fmt: skip
        content = json.dumps(shown, separators=(",", ":"))
        if len(packed(content)) <= BYTES:
            break
        count //= 2
    if not content:
        return None
    most = max(map(len, tasks.values()))
    return Answers(
        caption=f"{min(count, most)} of up to {most} prompts per task, each method in the setting "
        f"of the tables; every answer is in rows.jsonl.",
        methods=tuple(dict.fromkeys(
            family for each in comparisons for family in each.choices
        )),
        content=content,
    )  # fmt: skip


def _prompt(prompt: Prompt, records: Sequence[Record], families: Mapping[int, str]) -> Any:  # noqa: ANN401
    """What the script of the page reads."""
    protocol, task, example = prompt
    first = records[0]
    several = len({record["policy"] for record in records} - {None}) > 1
    return {
        "protocol": protocol,
        "task": task,
        "example": example,
        "question": str(first.get("question") or "")[-LETTERS:],
        "references": [
            str(each)[:LETTERS] for each in first["references"] or [first.get("reply") or ""]
        ],
        "given": first["nll"] is not None,
        **{name: first.get(name) for name in ("excerpt", "excerpt_question", "excerpt_evidence")},
        "answers": [
            {
                "method": families[id(record)],
                "policy": record["policy"] if several and record["policy"] else "",
                "budget": record["budget_spec"] or "",
                "value": round(value_of(record), 4),
                "text": str(record["prediction"] or "")[:LETTERS],
                "kept": record.get("excerpt_kept") or "",
                "evidence": _evidence(record),
            }
            for record in records
        ],
    }


def _evidence(record: Record) -> float | None:
    """Share of the evidence that heads keep, mean over heads; None without evidence."""
    if not record.get("evidence_tokens"):
        return None
    heads: list[float] = [kept for layer in record["evidence_kept"] for kept in layer]
    return round(sum(heads) / len(heads) / int(record["evidence_tokens"]), 3)
