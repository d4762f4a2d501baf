"""A results folder small enough to check every number of its report by hand."""

from pathlib import Path

from eval.results.captions import describe_data
from eval.results.comparison import compare_all, compare_methods
from eval.results.folder import Results
from eval.results.sentences import sentences
from kvp.artifacts.files import JsonLines
from kvp.artifacts.manifest import write_sealed_json

PROTOCOLS = ("query_aware", "query_agnostic")
TASKS = {"one": ("e1", "e2"), "two": ("e3", "e4")}

# (method, protected, policy label, policy seed, budget) -> scores of e1, e2, e3, e4
SCORES = {
    ("full", False, None, None, None): (1, 1, 1, 1),
    ("oracle", True, None, None, "25%"): (1, 1, 1, 0),
    ("oracle", True, None, None, "50%"): (1, 1, 1, 1),
    ("kvp", True, "seed0", 0, "25%"): (1, 0, 1, 1),
    ("kvp", True, "seed1", 1, "25%"): (1, 1, 0, 1),
    ("kvp", True, "seed0", 0, "50%"): (1, 1, 1, 1),
    ("kvp", True, "seed1", 1, "50%"): (1, 1, 1, 1),
    ("knorm", True, None, None, "25%"): (1, 0, 0, 0),
    ("knorm", False, None, None, "25%"): (0, 0, 1, 0.5),
    ("knorm", True, None, None, "50%"): (1, 1, 1, 1),
    ("knorm", False, None, None, "50%"): (1, 0, 1, 0),
    ("random", True, None, None, "25%"): (0, 0, 0, 0),
    ("random", True, None, None, "50%"): (0, 0, 1, 0),
    ("snapkv", True, None, None, "25%"): (1, 1, 1, 1),
    ("snapkv", True, None, None, "50%"): (1, 1, 1, 1),
}
TOKENS = 16
FACTORS = (1.0, 1.2, 0.8, 1.0, 0.9, 1.1)
"""Seconds of the timed prompts, as multiples of their median."""


def result_record(
    method="knorm",
    *,
    protected=True,
    policy=None,
    policy_seed=None,
    budget_spec="25%",
    protocol="query_aware",
    **changes,
):
    share = None if budget_spec is None else float(budget_spec.rstrip("%")) / 100
    return {
        "model": "toy", "method": method, "variant": "auto", "allocator": "uniform",
        "protected": protected,
        "policy": policy, "policy_seed": policy_seed, "protocol": protocol, "task": "one",
        "split": "test", "length": 20, "budget_spec": budget_spec,
        "budget": share and round(share * TOKENS), "example": "e1", "prompt_tokens": TOKENS + 1,
        "cached_tokens": TOKENS, "kept_tokens": round((share or 1) * TOKENS), "score": None,
        "nll": None, "reply_tokens": None, "prediction": "", "references": [], "seconds": None,
        "cache_bytes": None, "seed": 0, "prompt_digest": "0" * 16, "metric": "all",
        "evidence_tokens": None, "evidence_kept": None, "evidence_lost": None, **changes,
    }  # fmt: skip


def answer_records():
    """Generated answers of both protocols; everything scores zero in query_agnostic but full."""
    records = []
    for protocol in PROTOCOLS:
        for (method, protected, policy, seed, budget), scores in SCORES.items():
            units = [(task, example) for task, names in TASKS.items() for example in names]
            for (task, example), score in zip(units, scores, strict=True):
                seen = protocol == "query_aware" or method == "full"
                records.append(
                    result_record(
                        method, protected=protected, policy=policy, policy_seed=seed,
                        budget_spec=budget, protocol=protocol, task=task, example=example,
                        score=float(score) if seen else 0.0,
                    )
                )  # fmt: skip
    return records


def reply_records():
    """Given replies: two dialogues of 10 and 30 tokens."""
    records = []
    for method, budget, nll in (
        ("full", None, (10.0, 30.0)),
        ("knorm", "25%", (20.0, 60.0)),
        ("knorm", "50%", (10.0, 50.0)),
    ):
        for example, tokens, loss in zip(("e1", "e3"), (10, 30), nll, strict=True):
            records.append(
                result_record(
                    method, protected=method != "full", budget_spec=budget, task="chat",
                    example=example, nll=loss, reply_tokens=tokens,
                )
            )  # fmt: skip
    return records


def timing_records():
    """The full cache, and one method at half of it."""
    return [
        {
            "model": "toy", "method": method, "variant": "auto", "allocator": "uniform",
            "protected": method != "full",
            "policy": None, "policy_seed": None, "protocol": "query_aware",
            "budget_spec": budget and "50%", "budget": budget, "prompts": 6, "prompt_tokens": 17,
            "kept_tokens": budget or TOKENS,
            "cache_bytes": 64 * (budget or TOKENS), "prefill_seconds": 0.0125,
            "evict_seconds": 0.001, "decode_seconds_per_token": decode,
            "by_prompt": {
                "prefill_seconds": [0.0125 * factor for factor in FACTORS],
                "evict_seconds": [0.001] * len(FACTORS),
                "decode_seconds_per_token": [decode * factor for factor in FACTORS],
            },
        }
        for method, budget, decode in (("full", None, 0.004), ("knorm", 8, 0.003))
    ]  # fmt: skip


def manifest(*, policies=None, **changes):
    identity = {
        "model": "toy", "revision": None, "length": 20, "split": "test", "essays": None,
        "chat": None, "seed": 0, "dtype": "float32", "sinks": 1, "recents": 2,
        "max_new_tokens": None, **changes,
    }  # fmt: skip
    return {
        "format": "kvp-results", "format_version": 3, "config": {**identity, "out": "r"},
        "seed": 0, "kvp": "0.1.0", "python": "3.11.0", "packages": {"torch": "2.9.0"},
        "command": ["kvp", "eval", "--out", "two words"], "created": "2026-01-01T00:00:00+00:00",
        "identity": identity, "policies": policies or {}, "notes": [], "earlier_runs": [],
    }  # fmt: skip


def write_results(folder, *, records=None, timing=None, policies=None, **identity):
    """Write a results folder; a timing pass only where it is given."""
    folder.mkdir(parents=True)
    write_sealed_json(folder / "manifest.json", manifest(policies=policies, **identity))
    JsonLines(folder / "rows.jsonl").rewrite(answer_records() if records is None else records)
    if timing is not None:
        JsonLines(folder / "timing.jsonl").rewrite(timing)
    return folder


def compare_answers(records=None, **identity):
    """The accuracies of query_aware answers, compared."""
    results = Results(
        folder=Path(), manifest=manifest(**identity), timing=(), tuned=(), notes=(),
        records=tuple(answer_records() if records is None else records),
    )  # fmt: skip
    return compare_methods(results, "answers", "query_aware")


LEARNED = {"policy": "seed0", "policy_seed": 0}
IDENTITY = {"model": "nano", "length": 512, "split": "test", "seed": 3}


def hand_record(method, budget, example="a", **fields):
    return {
        "method": method, "variant": "auto", "allocator": "uniform", "protected": False,
        "policy": None, "protocol": "query_aware", "task": "niah_single_1", "budget_spec": budget,
        "example": example, "score": None, "nll": None, "reply_tokens": None, "budget": 10,
        "kept_tokens": 10, "cached_tokens": 100, **fields,
    }  # fmt: skip


def hand_answers(*scores, prompts=40, **fields):
    """Records of every method at its budget; a score is that of all prompts, or those answered."""
    return [
        hand_record(method, budget, str(n), **fields, **(LEARNED if method == "kvp" else {}),
                score=float(n in score) if isinstance(score, range) else score)
        for method, budget, score in scores for n in range(prompts)
    ]  # fmt: skip


def compare_records(records, tuned=(), planned=(), **recorded):
    results = Results(
        folder=Path(), manifest={"planned": planned, "identity": IDENTITY, **recorded},
        records=tuple(records), timing=(), tuned=tuned, notes=(),
    )  # fmt: skip
    return compare_all(results)


def sentences_of(records, tuned=()):
    comparison = compare_records(records, tuned)[0]
    return "\n".join(each for each in sentences(comparison) if each != describe_data(comparison))
