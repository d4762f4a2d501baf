"""Learned eviction in llama.cpp: answers, bytes and tokens per second, and a book in few cells.

    python -m benchmarks.llama_cpp quality --gguf FILE --model FOLDER --out FILE
    python -m benchmarks.llama_cpp speed --gguf FILE --text FILE --out FILE
    python -m benchmarks.llama_cpp book --gguf FILE --model FOLDER --books FOLDER --out FILE

`quality` shrinks the cache of RULER prompts, at the end of the context (query_agnostic) or of the
prompt, and scores the answers as kvp eval does. `speed` times reading, shrinking and answering at
every `--lengths`, whole and shrunk, and beyond the last one in a bounded cache. `book` reads whole
books within `--cells` and asks for a number told in their last chapter, which is a RULER prompt of
`--length` tokens; `alone` is the same chapter without the book. `resident_bytes` is what the
process holds after every 10,240 tokens, and after the last.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import Llama

from benchmarks.long_answers import by_tasks
from benchmarks.measuring import timed, write_report
from eval.evaluate import Prompt
from eval.prepare import load_all
from kvp.data.task import TaskSettings
from kvp.hf.loading import load_tokenizer
from kvp.llamacpp import bounded, shrink
from kvp.llamacpp.engine import Engine
from kvp.program.names import split_list
from kvp.ranking import UNPROTECTED
from kvp.scoring import Scorer
from policies import load_policy, make_scorer

BUDGET = "25%"
ANSWER = 64
"""Tokens that are decoded to be timed."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one part and write the JSON file."""
    given = _parser().parse_args(arguments)
    write_report(given, results=list(PARTS[given.part](given)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--gguf", required=True, help="the model in llama.cpp")
    parser.add_argument("--model", help="the same model's folder, for its tokenizer")
    parser.add_argument("--policy", default="smollm2-135m-instruct")
    parser.add_argument("--methods", default="kvp,keydiff,knorm,streaming_llm,random")
    parser.add_argument("--budgets", default="6%,12.5%,25%,50%")
    parser.add_argument("--protocols", default="query_agnostic,query_aware")
    parser.add_argument(
        "--tasks",
        default="niah_single_1,niah_single_2,niah_single_3,niah_multikey_1,niah_multivalue,"
        "niah_multiquery",
    )
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=8, help="of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lengths", default="2048,4096,8192", help="of `speed`")
    parser.add_argument("--cells", type=int, default=2048)
    parser.add_argument("--text", help="running text for `speed`")
    parser.add_argument("--books", help="folder of text files, a book each")
    parser.add_argument("--essays", help="folder of text files that chapters are made of")
    parser.add_argument("--most", type=int, default=4, help="books")
    parser.add_argument("--book_tokens", type=int, default=60_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", default="benchmarks/results/llama_cpp", help="of `draw`")
    parser.add_argument("--picture", default="docs/llama_cpp.png")
    parser.add_argument("--out", required=True)
    return parser


def _llama(given: argparse.Namespace, cells: int) -> Llama:
    return Llama(
        given.gguf, n_ctx=cells, n_batch=512, flash_attn=True, verbose=False,
        n_threads=given.threads, n_threads_batch=given.threads,
    )  # fmt: skip


def _scorer(given: argparse.Namespace, name: str) -> Scorer:
    return load_policy(given.policy) if name == "kvp" else make_scorer(name)


def _prompts(given: argparse.Namespace, count: int) -> list[Prompt]:
    settings = TaskSettings(
        tasks=split_list(given.tasks), count=count, split="test", seed=given.seed,
        length=given.length, essays=given.essays,
    )  # fmt: skip
    return load_all(settings, load_tokenizer(given.model))[0]


def _answer(llama: Llama, rest: Sequence[int], tokens: int = ANSWER) -> str:
    """Greedy answer after `rest`; the cache is left behind it."""
    found: list[int] = []
    while len(found) < tokens:
        llama.eval(found[-1:] or rest)
        logits = np.ctypeslib.as_array(llama._ctx.get_logits_ith(-1), (llama.n_vocab(),))
        if (best := int(logits.argmax())) == llama.token_eos():
            break
        found.append(best)
    return str(llama.detokenize(found), errors="replace")


def quality(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Scores of every protocol, method and budget."""
    llama = _llama(given, 2 * given.length)
    scorers = {name: _scorer(given, name) for name in split_list(given.methods)}
    budgets = split_list(given.budgets)
    settings = [("full", "100%"), *((name, budget) for budget in budgets for name in scorers)]
    for protocol in split_list(given.protocols):
        scores: dict[tuple[str, str], list[tuple[Prompt, float]]] = {each: [] for each in settings}
        for prompt in _prompts(given, given.prompts):
            ids, boundary = list(prompt.encoded.ids), prompt.boundary(protocol)
            llama.reset()
            llama.eval(ids[:boundary])
            whole = Engine.of(llama).read()
            for name, budget in settings:
                Engine.of(llama).write(whole)
                llama.n_tokens = boundary
                if name != "full":
                    shrink(llama, scorers[name], budget, UNPROTECTED)
                score = prompt.scored_by(prompt.sample, _answer(llama, ids[boundary:]))
                scores[name, budget].append((prompt, score))
        for (name, budget), of_setting in scores.items():
            row = {"protocol": protocol, "method": name, "budget": budget, **by_tasks(of_setting)}
            print(json.dumps(row), flush=True)
            yield row


def speed(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Seconds, bytes and rates at every length, and in a bounded cache at twice the last one."""
    lengths = [int(one) for one in split_list(given.lengths)]
    text = Path(given.text).read_bytes()
    for length in lengths:
        llama = _llama(given, length + 2 * ANSWER)
        ids = llama.tokenize(text)[:length]
        _, reading = timed(partial(llama.eval, ids))
        whole = Engine.of(llama).read()
        before = _rate(llama, ids)
        for name in ("kvp", "keydiff"):
            scorer = _scorer(given, name)
            for _ in range(2):  # the first one also loads
                Engine.of(llama).write(whole)
                llama.n_tokens = length
                kept, shrinking = timed(partial(shrink, llama, scorer, BUDGET))
            after = _rate(llama, ids)
            yield _shown({
                "method": name, "tokens": length, "read_per_second": length / reading.wall,
                "bytes": kept.full_nbytes, "kept_bytes": kept.nbytes,
                "shrink_share": shrinking.processor / reading.processor,
                "decode_per_second": before, "shrunk_decode_per_second": after,
            })  # fmt: skip
        llama.close()
    llama = _llama(given, given.cells)
    ids = llama.tokenize(text)[: 2 * lengths[-1]]
    with bounded(llama, _scorer(given, "kvp")) as kept:
        _, reading = timed(partial(llama.eval, ids))
        yield _shown({
            "method": "kvp", "bounded": given.cells, "tokens": len(ids),
            "read_per_second": len(ids) / reading.wall, "evictions": kept.evictions,
            "evicting_share": kept.seconds / reading.wall, "bytes": kept.nbytes,
            "decode_per_second": _rate(llama, ids),
        })  # fmt: skip


def _rate(llama: Llama, ids: Sequence[int]) -> float:
    """Tokens per second of decoding, one at a time, from where the cache is."""
    _, seconds = timed(lambda: [llama.eval([token]) for token in ids[:ANSWER]])
    return ANSWER / seconds.wall


def book(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """For every chapter, whether its number is found, after a book and alone.

    A book is read once; each of its chapters goes on from there in a process of its own.
    """
    llama = _llama(given, given.cells)
    scorer = _scorer(given, split_list(given.methods)[0])
    books = sorted(Path(given.books).glob("*.txt"))[: given.most]
    prompts = _prompts(given, given.prompts)
    for number, path in enumerate(books):
        pages = llama.tokenize(path.read_bytes())[: given.book_tokens]
        with bounded(llama, scorer) as kept:
            start, resident = time.perf_counter(), []
            for first in range(0, len(pages), 20 * 512):  # 20 batches each
                llama.eval(pages[first : first + 20 * 512])
                resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
            facts = {
                "book": path.stem, "book_tokens": len(pages), "evictions": kept.evictions,
                "read_seconds": time.perf_counter() - start, "evict_seconds": kept.seconds,
                "bytes": kept.nbytes, "resident_bytes": resident,
            }  # fmt: skip
            after = [
                _forked(partial(_answer, llama, prompt.encoded.ids))
                for prompt in prompts[number :: len(books)]
            ]
        for prompt, answer in zip(prompts[number :: len(books)], after, strict=True):
            with bounded(llama, scorer):
                alone = _answer(llama, prompt.encoded.ids)
            answers = {"after_book": answer, "alone": alone}
            scores = {name: prompt.scored_by(prompt.sample, one) for name, one in answers.items()}
            yield _shown({**facts, "task": prompt.task, **scores, "answers": answers})


def _forked(act: Callable[[], str]) -> str:
    """What `act` returns in a copy of this process."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, act().encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def draw(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Answers by budget, and decoding by length, of the files in `--results`, as `--picture`."""
    from matplotlib import pyplot

    quality_rows, speed_rows = (
        json.loads(Path(given.results, f"{part}.json").read_text())["results"]
        for part in ("quality", "speed")
    )
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    rows = [row for row in quality_rows if row["protocol"] == "query_agnostic"]
    for name in dict.fromkeys(row["method"] for row in rows if row["method"] != "full"):
        line = [(float(row["budget"][:-1]), row["mean"]) for row in rows if row["method"] == name]
        left.plot(*zip(*sorted(line), strict=True), marker="o", label=name)
    left.axhline(rows[0]["mean"], color="black", linestyle=":", label="full cache")
    left.set(xlabel="cells kept, %", ylabel="answers, %", title="question not seen", ylim=(0, 100))
    left.legend()
    lines = [row for row in speed_rows if row["method"] == "kvp" and "bounded" not in row]
    lengths = [row["tokens"] for row in lines]
    for key, name in (("decode_per_second", "full"), ("shrunk_decode_per_second", BUDGET)):
        right.plot(lengths, [row[key] for row in lines], marker="o", label=name)
    right.set(xlabel="tokens read", ylabel="tokens per second", title="decoding", ylim=(0, None))
    right.legend()
    figure.savefig(given.picture, dpi=110)
    yield {"picture": given.picture}


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    rounded = {key: round(one, 3) if isinstance(one, float) else one for key, one in row.items()}
    print(json.dumps(rounded), flush=True)
    return rounded


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "quality": quality, "speed": speed, "book": book, "draw": draw,
}  # fmt: skip


if __name__ == "__main__":
    main()
