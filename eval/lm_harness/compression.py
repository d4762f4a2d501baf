"""What the harness's `--model_args` say about eviction: one method, one budget, one boundary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eval.methods import Method, Setting, build_methods, file_digests
from kvp.budgets import Budget, parse_budget
from kvp.config_groups import split_list
from kvp.errors import UsageError
from kvp.ranking import UNPROTECTED, Protection, kept_tokens

QUESTIONS = {
    "inside": "query_aware", "outside": "query_agnostic", "few_shot": "query_agnostic",
}  # fmt: skip
"""Values of `question=` and the protocol of kvp-eval that each is."""
CONTEXT_FIELDS = "passage:context:report"
"""Fields of a document that may hold what is compressed without the question."""


@dataclass(frozen=True, kw_only=True)
class Compression:
    """How the context of every request is compressed."""

    setting: Setting
    question: str = "inside"
    """What the cache holds when it is compressed: the whole prompt, what ends with the document's
    context, or the few-shot examples before the document."""
    context_fields: tuple[str, ...] = ()
    """Fields of a document, of which the first that it has ends the context, or begins the part
    that is fed after few-shot examples."""
    rolling_chunk: int = 64
    """Tokens of a running text between two evictions."""
    identity: str = ""
    """JSON of everything that decides about an answer besides the request."""

    @property
    def method(self) -> Method:
        """The method; its scorer is None for the full cache."""
        return self.setting.method


def compression(
    *,
    method: str = "full",
    budget: str | int | None = None,
    policies: str = "",
    protection: str = "on",
    sinks: int = 4,
    recents: int = 16,
    question: str = "inside",
    context_field: str = CONTEXT_FIELDS,
    rolling_chunk: int = 64,
    seed: int = 0,
) -> Compression:
    """Check the settings and build the method.

    Args:
        method: one method of kvp-eval: `full`, `snapkv+global`, `kvp`, `tuned:FILE`.
        budget: tokens kept per KV head on average: `128`, or a share of what is compressed,
            `12.5%`.
        policies: policy directory of the method `kvp`.
        protection: `on` or `off`, whether the first `sinks` and last `recents` tokens stay.
        sinks: first tokens that protection keeps.
        recents: last tokens that protection keeps.
        question: `inside`, the whole prompt is read before it is compressed; `outside`, only what
            ends with the text of `context_field`; `few_shot`, only the examples before that text.
            The rest is fed afterwards.
        context_field: fields of a document, joined by `:`; the first that it has counts.
        rolling_chunk: tokens between two evictions of a running text, at least 3.
        seed: of random methods and allocators.

    Raises:
        UsageError: anything unknown, missing or ambiguous, by the name of its argument.
        PolicyError: a damaged policy.
    """
    _check(question=question, protection=protection, rolling_chunk=rolling_chunk)
    chosen = _method(method, policies, seed, QUESTIONS[question])
    protected = protection == "on" if chosen.protected is None else chosen.protected
    kept = Protection(sinks=sinks, recents=recents) if protected else UNPROTECTED
    setting = Setting(
        method=chosen,
        budget=_budget(chosen, budget, kept),
        protected=protected and chosen.scorer is not None,
        protection=kept,
    )
    identity = {
        "method": method, "budget": setting.spec, "protection": [kept.sinks, kept.recents],
        "files": file_digests(split_list(policies), [chosen]),
        "question": question, "context_field": context_field, "rolling_chunk": rolling_chunk,
        "seed": seed,
    }  # fmt: skip
    return Compression(
        setting=setting,
        question=question,
        context_fields=tuple(field for field in context_field.split(":") if field),
        rolling_chunk=rolling_chunk,
        identity=json.dumps(identity, sort_keys=True),
    )


def _check(*, question: str, protection: str, rolling_chunk: int) -> None:
    for name, value, known in (
        ("question", question, tuple(QUESTIONS)),
        ("protection", protection, ("on", "off")),
    ):
        if value not in known:
            raise UsageError(f"{name}={value} is not one of {', '.join(known)}")
    if rolling_chunk < 3:
        raise UsageError(f"rolling_chunk={rolling_chunk} is below 3 tokens")


def _method(spec: str, policies: str, seed: int, protocol: str) -> Method:
    """The one method that a specification names."""
    try:
        methods = build_methods([spec], policies=split_list(policies), seed=seed)
    except UsageError as error:
        text = str(error).replace("--methods, --allocators", "method=")
        raise UsageError(
            text.replace("--methods", "method=").replace("--policies", "policies=")
        ) from None
    methods = tuple(each for each in methods if each.protocol in (None, protocol))
    if len(methods) != 1:
        names = ", ".join(each.label for each in methods) or "nothing"
        raise UsageError(f"method={spec} means {names} here: the harness runs one method at a time")
    (method,) = methods
    if method.scorer is not None and method.scorer.needs.future:
        raise UsageError(f"method={spec} needs the future, which only kvp-eval can show it")
    return method


def _budget(method: Method, budget: str | int | None, protection: Protection) -> Budget | None:
    if method.scorer is None or method.self_sized:
        return None
    if budget is None:
        raise UsageError(f"budget= is missing: tokens per KV head that {method.label} keeps, "
                         "as a number (128) or a share (12.5%)")  # fmt: skip
    parsed = parse_budget(budget)
    if parsed.count is not None:  # refuse before any work
        kept_tokens(parsed, parsed.count + protection.tokens, protection)
    return parsed


def compressed_text(document: Mapping[str, Any], prompt: str, how: Compression) -> int:
    """Characters at the beginning of `prompt` that are compressed: up to the end of the context,
    the last time the document's is there, or up to its beginning (`few_shot`).

    Raises UsageError where the document has none of the fields, the prompt does not hold it, or
    there are no examples before it.
    """
    for field in how.context_fields:
        text = document.get(field)
        if not isinstance(text, str) or not text.strip():
            continue
        start = prompt.rfind(text.strip())
        if start < 0:
            raise UsageError(
                f"question={how.question}: the prompt does not hold the document's {field!r} as it "
                "is; use question=inside, or context_field=FIELD with another one"
            )
        if how.question == "outside":
            return start + len(text.strip())
        if not prompt[:start].strip():
            raise UsageError("question=few_shot: no examples to compress; set --num_fewshot")
        return start
    raise UsageError(
        f"question={how.question}: a document has no text in {'/'.join(how.context_fields)} (it "
        f"has {', '.join(document)}); set context_field=FIELD, or question=inside"
    )
