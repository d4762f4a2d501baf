"""Hostile values for flags and rows for data files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.artefacts import COLLECT, EVAL, EVOLVE, TRAIN, Artefacts

VALUES = ("-1", "0", "nan", "inf", "1e30", "99999999999", "", "x", "[/x]", "{", "a" * 1000, "../..")
"""Values handed to every flag in turn."""

FLAGS = {
    "kvp-collect": "tasks length train validation test max_new_tokens seed device dtype data "
    "answers store labels essays model revision out",
    "kvp-train": "steps lr hidden contexts seed device devices heads label objective preset "
    "permutations temperature reward blocks inputs key_frame "
    "optimizer compress_prompt "
    "compress_uniform min_prefix future_max traces memory_gb activation_gb "
    "validate_every calibration calibration_contexts validation_contexts out",
    "kvp-eval": "methods allocators tasks budgets protocols protection sinks recents prompts "
    "length split essays squad hotpotqa chat text where tree_paths measure seed device dtype "
    "decode_batch timing_prompts traces "
    "curve_sequences bootstrap policies model out",
    "kvp evolve": "scorer policies tasks budget protocol protection sinks recents search_prompts "
    "holdout length split group generations sigma constraint lambda_ gamma seed out",
    "kvp-report": "out png bootstrap",
    "kvp merge": "shards out",
}
"""Flags of each program."""


def flag_trials(made: Artefacts, scratch: Path) -> Iterator[tuple[str, list[str]]]:
    """(program, arguments): a small working command with one flag given a hostile value.

    The working command stops early where a program can (`--dry_run`).
    """
    out = scratch / "flags"
    base = {
        "kvp-collect": f"{COLLECT} --dry_run=true --out {out}",
        "kvp-train": f"{TRAIN} --dry_run=true --traces {made.traces} --out {out}",
        "kvp-eval": f"{EVAL} --dry_run=true --out {out}",
        "kvp evolve": f"{EVOLVE} --generations 1 --search_prompts 1 --out {out}",
        "kvp-report": str(made.results),
        "kvp merge": f"--shards {made.policy} --out {out}",
    }
    for name, names in FLAGS.items():
        for flag in names.split():
            for value in VALUES:
                yield name, [*base[name].split(), f"--{flag}={value}"]


def _lines(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


_TEXT = "The fox went to the market in the morning and met a friend of the baker there. " * 8
_MESSAGE = {"message_id": "a", "parent_id": None, "text": _TEXT, "role": "prompter"}
_REPLY = {"message_id": "b", "parent_id": "a", "text": _TEXT, "role": "assistant"}
_CHAT = {"messages": [{"role": "user", "content": _TEXT}, {"role": "assistant", "content": _TEXT}]}

ROWS: tuple[tuple[str, bytes], ...] = (
    ("texts", _lines(*({"text": f"{n} {_TEXT}"} for n in range(60)))),
    ("chats", _lines(*({**_CHAT, "id": n} for n in range(60)))),
    ("nothing", b""),
    ("a blank line", b"\n"),
    ("no JSON", b"hello\n"),
    ("half a row", _lines({"text": _TEXT})[:40]),
    ("an array", b"[1, 2]\n"),
    ("a number", b"5\n"),
    ("null", b"null\n"),
    ("NaN", b'{"text": NaN}\n'),
    ("no known column", _lines({"words": _TEXT})),
    ("an empty text", _lines({"text": ""})),
    ("text null", _lines({"text": None}, {"text": _TEXT})),
    ("text a number", _lines({"text": 5})),
    ("text a list", _lines({"text": [_TEXT]})),
    ("nested text", _lines({"text": {"text": _TEXT}})),
    ("one bad row of thirty", _lines(*({"text": f"{n} {_TEXT}"} for n in range(60)), {"no": 1})),
    ("a long row", _lines({"text": _TEXT * 200}, *({"text": f"{n} {_TEXT}"} for n in range(60)))),
    ("messages null", _lines({"messages": None})),
    ("no messages", _lines({"messages": []})),
    ("content null", _lines({"messages": [{"role": "user", "content": None}]})),
    ("content a list", _lines({"messages": [{"role": "user", "content": [{"type": "text"}]}]})),
    ("an unknown role", _lines({"messages": [{"role": "wizard", "content": _TEXT}]})),
    ("no role", _lines({"messages": [{"content": _TEXT}]})),
    ("only questions", _lines({"messages": [{"role": "user", "content": _TEXT}]})),
    ("messages a text", _lines({"messages": _TEXT})),
    ("a tree", _lines(_MESSAGE, _REPLY)),
    (
        "a tree without ids",
        _lines({"message_id": None, "parent_id": None, "text": "x", "role": "prompter"}),
    ),
    ("its own parent", _lines({**_MESSAGE, "parent_id": "a"})),
    ("a cycle", _lines({**_MESSAGE, "parent_id": "b"}, _REPLY)),
    ("an orphan", _lines({**_REPLY, "parent_id": "nobody"})),
    ("twice the same id", _lines(_MESSAGE, _MESSAGE, _REPLY)),
    ("a tree export", _lines({"prompt": {**_MESSAGE, "replies": [{**_REPLY, "replies": []}]}})),
    ("replies null", _lines({"prompt": {**_MESSAGE, "replies": None}})),
    ("a prompt", _lines(*({"prompt": f"{n} {_TEXT}"} for n in range(60)))),
    (
        "prompt and completion",
        _lines(*({"prompt": f"{n} {_TEXT}", "completion": "yes"} for n in range(60))),
    ),
    (
        "ShareGPT",
        _lines(
            {"conversations": [{"from": "human", "value": _TEXT}, {"from": "gpt", "value": _TEXT}]}
        ),
    ),
    (
        "question and answer",
        _lines(
            *({"context": _TEXT, "question": f"Who {n}?", "answer": ["fox"]} for n in range(60))
        ),
    ),
    ("an answer null", _lines({"context": _TEXT, "question": "Who?", "answer": None})),
    ("a question null", _lines({"context": _TEXT, "question": None, "answer": "fox"})),
    ("mixed kinds", _lines({"text": _TEXT}, _CHAT)),
    ("no UTF-8", b'{"text": "\xff\xfe"}\n'),
    ("UTF-16", _lines({"text": _TEXT}).decode().encode("utf-16")),
    ("a byte order mark", b"\xef\xbb\xbf" + _lines(*({"text": f"{n} {_TEXT}"} for n in range(60)))),
    ("a lone surrogate", b'{"text": "\\ud800"}\n'),
    ("control characters", _lines({"text": "\x00\x07" + _TEXT})),
    ("special tokens", _lines(*({"text": f"<|im_end|> {n} {_TEXT}"} for n in range(60)))),
    ("rich markup", _lines(*({"text": f"[/x] {n} {_TEXT}"} for n in range(60)))),
    ("a placeholder", _lines(*({"text": f"\ue0000\ue001 {n} {_TEXT}"} for n in range(60)))),
    ("deeply nested", b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"),
    ("a long number", b'{"text": ' + b"9" * 10_000 + b"}\n"),
    ("the same key twice", b'{"text": "a", "text": "b"}\n'),
    (
        "carriage returns",
        _lines(*({"text": f"{n} {_TEXT}"} for n in range(60))).replace(b"\n", b"\r\n"),
    ),
    ("zero bytes", bytes(1000)),
    ("a picture", b"\x89PNG\r\n\x1a\n" + bytes(200)),
    ("one row only", _lines({"text": _TEXT})),
    ("thirty equal rows", _lines(*({"text": _TEXT} for _ in range(60)))),
)
"""Contents of `--data` files: (kind, bytes)."""
