"""What the harness's `--model_args` say about eviction: one method, one budget, one boundary."""

import json

from eval.digests import file_digests
from eval.methods import Method, build_methods
from eval.results.record_names import QUERY_AGNOSTIC, QUERY_AWARE
from kvp.budgets import Budget, parse_budget
from kvp.errors import KvpError, UsageError
from kvp.protection import UNPROTECTED, Protection, check_budget
from kvp.scoring import needs_of
from kvp.specification import split_list

QUESTIONS = {"inside": QUERY_AWARE, "outside": QUERY_AGNOSTIC}
"""Values of `question=` and the protocol of kvp eval that each is."""
CONTEXT_FIELDS = ("passage", "context", "report")
"""Fields of a document that may hold what is compressed without the question, in this order."""


def parse_compression(
    *, method: str = "full", budget: str | int | None = None, policies: str = "",
    protection: str = "on", sinks: int = 4, recents: int = 16, question: str = "inside",
    seed: int = 0,
) -> tuple[Method, str, str]:  # fmt: skip
    """The method at its budget, `question`, and JSON of what else decides about an answer.

    Parameters: docs/lm_eval.md. UsageError on anything unfit, PolicyError on a damaged policy.
    """
    for name, value, known in (
        ("question", question, tuple(QUESTIONS)),
        ("protection", protection, ("on", "off")),
    ):
        if value not in known:
            raise UsageError(f"{name}={value} is not one of {', '.join(known)}")
    chosen = _method(method, policies, seed, QUESTIONS[question])
    protected = chosen.protected if chosen.tuned else protection == "on"
    kept = Protection(sinks=sinks, recents=recents) if protected else UNPROTECTED
    chosen = chosen.at(_budget(chosen, budget, kept), kept, protected and chosen.scorer is not None)
    identity = {
        "method": chosen.spec,
        "budget": chosen.budget_spec,
        "protection": [kept.sinks, kept.recents],
        "files": file_digests(split_list(policies), [chosen]),
        "question": question,
        "seed": seed,
    }
    return chosen, question, json.dumps(identity, sort_keys=True)


def _method(spec: str, policies: str, seed: int, protocol: str) -> Method:
    try:
        built = build_methods([spec], policies=split_list(policies), seed=seed)
    except KvpError as error:
        raise type(error)(f"method={spec}, read as flags of kvp eval: {error}") from error
    methods = [method for method in built if method.protocol in (None, protocol)]
    if len(methods) != 1:
        names = ", ".join(method.spec for method in methods) or "nothing"
        raise UsageError(f"method={spec} means {names} here: the harness runs one method at a time")
    (method,) = methods
    if method.scorer is not None and needs_of(method.scorer).future:
        raise UsageError(f"method={spec} needs the future, which only kvp eval can show it")
    return method


def _budget(method: Method, budget: str | int | None, protection: Protection) -> Budget | None:
    if method.scorer is None or method.self_sized:
        return None
    if budget is None:
        raise UsageError(
            f"budget= is missing: tokens per KV head that {method.spec} keeps, as a number "
            "(128) or a share (12.5%)"
        )
    parsed = parse_budget(budget)
    check_budget(parsed, protection)
    return parsed
