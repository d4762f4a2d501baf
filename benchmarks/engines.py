"""Compressed contexts in vLLM: first tokens, tokens per processor second, contexts at once.

    python -m benchmarks.engines --model FOLDER --policies NAME,NAME+uniform --text FOLDER
        --length 4096 --out FILE

One engine for each policy, in a process of its own (in one, vLLM would give all the same
connector), with KV space for four whole contexts of `--length` tokens of the texts. It reads and
compresses `--contexts` of them (`kv_transfer_params`). Then, in `--rounds` turns of all engines, it
answers a first and a later question about one context, and `--tokens` tokens about as many contexts
at once as fit, whole (ordinary requests) and compressed, from its prefix cache. Seconds are of the
processor, of all threads; of the rounds the medians.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

import vllm
from vllm.config import KVTransferConfig

from benchmarks.measuring import write_report
from kvp.budgets import parse_budget
from kvp.contexts import kept_rows
from kvp.hf.loading import load_tokenizer

ResultT = TypeVar("ResultT")
BLOCK = 32
QUESTION = "\n\nIn one sentence, what happens in this text?\n"


def main() -> None:
    """Measure one length and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--policies", required=True, help="read keys and values alone")
    parser.add_argument("--text", required=True, help="folder of text files")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a context")
    parser.add_argument("--contexts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--budgets", default="12.5%,25%")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_report(given, results=measure(given, folder))


class Engine:
    """vLLM with kvp's connector and a policy."""

    def __init__(self, given: argparse.Namespace, policy: str, folder: str, blocks: int) -> None:
        self.llm = vllm.LLM(
            given.model, dtype=given.dtype, enforce_eager=True, block_size=BLOCK,
            num_gpu_blocks_override=blocks, max_model_len=min(blocks // 4 * BLOCK, 8192),
            enable_prefix_caching=True, max_num_batched_tokens=2048,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KvpConnector", kv_connector_module_path="kvp.vllm.connector",
                kv_role="kv_both",
                kv_connector_extra_config={"contexts": folder, "policy": policy},
            ),
        )  # fmt: skip
        self.ask([[*range(100, 356)]], 4)  # what is done once

    def ask(self, prompts: list[list[int]], tokens: int, **extra: object) -> tuple[Any, float]:
        """Answers to prompts of token ids, and processor seconds."""
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, **extra
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        before = time.process_time()
        found = self.llm.generate(requests, sampling, use_tqdm=False)
        seconds = time.process_time() - before
        assert all(len(one.outputs[0].token_ids) == tokens for one in found), "a request failed"
        return found, seconds

    def read(self, document: list[int], **extra: object) -> tuple[Any, float]:
        """The answer to a context that no cache holds, and processor seconds."""
        self.llm.reset_prefix_cache()
        (found,), seconds = self.ask([document], 4, **extra)
        return found, seconds

    def reading(self, documents: list[list[int]]) -> float:
        """Median processor seconds to read one of these contexts."""
        return median(self.read(document)[1] for document in documents)

    def compress(self, documents: list[list[int]], budget: str) -> tuple[list[list[int]], float]:
        """Placeholders of the contexts, and seconds to read and compress one."""
        asked = {"extra_args": {"kv_transfer_params": {"kvp_compress": budget}}}
        answers, seconds = zip(
            *[self.read(document, **asked) for document in documents], strict=True
        )
        told = [answer.kv_transfer_params["kvp_context"]["placeholders"] for answer in answers]
        return told, median(seconds)

    def answer(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        """Seconds to a first and a later question's first token; tokens per second of all."""
        self.llm.reset_prefix_cache()
        first, later = (self.ask(prompts[:1], 1)[1] for _ in range(2))
        self.ask(prompts, 1)
        seconds = self.ask(prompts, tokens)[1]
        return {
            "first_question": first,
            "later_question": later,
            "tokens_per_second": len(prompts) * tokens / seconds,
        }


_ENGINE: list[Engine] = []
"""The engine of this process."""


def _start(given: argparse.Namespace, policy: str, folder: str, blocks: int) -> None:
    _ENGINE.append(Engine(given, policy, folder, blocks))


def _run(method: Callable[..., ResultT], *given: object) -> ResultT:
    return method(_ENGINE[0], *given)


def _call(process: ProcessPoolExecutor, method: Callable[..., ResultT], *given: object) -> ResultT:
    """The result of a method of the engine in another process."""
    return process.submit(_run, method, *given).result()


def measure(given: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """A row of each policy and budget; 100 % is a whole context."""
    tokenizer = load_tokenizer(given.model)
    question = tokenizer(QUESTION, add_special_tokens=False).input_ids
    text = "\n".join(
        path.read_text(errors="replace") for path in sorted(Path(given.text).glob("*.txt"))
    )
    ids = tokenizer(text[: given.length * given.contexts * 8]).input_ids
    documents = [ids[i * given.length : (i + 1) * given.length] for i in range(given.contexts)]
    assert len(documents[-1]) == given.length, "give more text"
    rest = len(question) + given.tokens
    blocks = 4 * -(-(given.length + rest) // BLOCK) + 1
    cases = []
    for policy in given.policies.split(","):
        process = ProcessPoolExecutor(
            1, get_context("spawn"), _start, (given, policy, folder, blocks)
        )
        whole = [[*document, *question] for document in documents[:4]]
        reading = _call(process, Engine.reading, documents[:3])
        cases.append((process, whole, {"policy": policy, "budget": "100%", "reading": reading}))
        for budget in given.budgets.split(","):
            told, seconds = _call(process, Engine.compress, documents, budget)
            kept = kept_rows(parse_budget(budget), given.length)
            fit = min((blocks - 1) // -(-(kept + rest) // BLOCK), given.contexts)
            prompts = [[*placeholders, *question] for placeholders in told[:fit]]
            row = {"policy": policy, "budget": budget, "kept": kept}
            cases.append((process, prompts, {**row, "compression": seconds - reading}))
    turns = []
    for number in range(given.rounds):
        step = -1 if number % 2 else 1  # every other turn in the opposite order
        turn = [_call(one[0], Engine.answer, one[1], given.tokens) for one in cases[::step]]
        turns.append(turn[::step])
    return [
        {
            **row,
            "at_once": len(prompts),
            **{name: median(turn[name] for turn in each) for name in each[0]},
        }
        for (_, prompts, row), each in zip(cases, zip(*turns, strict=True), strict=True)
    ]


if __name__ == "__main__":
    main()
