"""A stock vLLM answers ten questions about three documents, or your own, compressed and whole.

    python recipes/engines/on_vllm.py --model FOLDER --policy smollm2-135m-instruct-kv

Starts vLLM's own OpenAI-compatible server with kvp's connector, lets it read and compress the
documents, asks through the plain `openai` client, asks the same about the whole documents, and
prints what the server's own metrics say of both. Needs vLLM and openai beside kvp
(docs/engines.md).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.request import urlopen

try:
    from openai import OpenAI, OpenAIError
except ImportError:
    sys.exit("on_vllm.py needs vllm and openai: README, Serve it, has the commands")
from questions import add_flags, documents, print_and_score
from servers import answering, free_port
from transformers import AutoConfig

from kvp.budgets import parse_budget
from kvp.errors import KvpError, UsageError
from kvp.hf.loading import load_tokenizer
from kvp.hf.model_config import geometry_of
from kvp.nano import path as nano
from kvp.vllm.engine import policy_of


def main() -> None:
    """Start the server, compress, ask, print, stop the server."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", default="nano", help="a folder or a hub id; default: %(default)s"
    )
    parser.add_argument(
        "--policy",
        default="nano",
        help="reads keys and values alone; or POLICY+ALLOCATOR; default: %(default)s",
    )
    add_flags(parser, "tokens that stay of each document")
    given = parser.parse_args()
    model = str(nano()) if given.model == "nano" else given.model
    policy_of(given.policy, geometry_of(AutoConfig.from_pretrained(model)))
    parse_budget(given.budget)
    tokenizer = load_tokenizer(model)
    texts = [
        (tokenizer(text).input_ids, samples)
        for text, samples in documents(given.rows, given.prompts, tokenizer)
    ]
    print("starting vLLM, a minute or more ...", flush=True)
    with tempfile.TemporaryDirectory() as folder, server(model, given.policy, folder) as url:
        openai = OpenAI(base_url=f"{url}/v1", api_key="none")
        started = time.perf_counter()
        contexts = []
        for number, (ids, _) in enumerate(texts, 1):
            print(f"vLLM reads and compresses document {number} of {len(texts)} ...", flush=True)
            contexts.append(remember(openai, model, ids, given.budget))
        took = time.perf_counter() - started
        print(f"{len(texts)} documents read and compressed in {took:.1f} s")
        for compressed in (True, False):
            print(f"{f'{given.budget} of each document' if compressed else 'whole documents'}:")
            before, space, scores = metrics(url), 0.0, []
            for (whole, samples), context in zip(texts, contexts, strict=True):
                for sample in samples:
                    question = sample.question + sample.answer_prefix
                    ids = tokenizer(question, add_special_tokens=False).input_ids
                    prompt = [*(context if compressed else whole), *ids]
                    answer = ""
                    for piece in openai.completions.create(
                        model=model, prompt=prompt, max_tokens=sample.max_new_tokens,
                        temperature=0, stream=True,
                    ):  # fmt: skip
                        answer += piece.choices[0].text
                        space = max(space, metrics(url)["space"])
                    scores.append(print_and_score(sample, answer))
            used = {name: value - before[name] for name, value in metrics(url).items()}
            print(f"  {sum(scores):g} of {len(scores)} right; by the server's own metrics one took")
            first = used["first"] / used["firsts"]
            print(f"  {space:.1%} of the KV space, {first:.2f} s to the first token (mean),")
            tokens = used["tokens"] - len(scores)
            print(f"  and answers came at {tokens / used['decode']:.1f} tokens/s")


def server(model: str, policy: str, folder: str) -> AbstractContextManager[str]:
    """A server of `model` whose contexts are in `folder`; its address, once it answers."""
    port = free_port()
    connector = {
        "kv_connector": "KvpConnector",
        "kv_connector_module_path": "kvp.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"contexts": folder, "policy": policy},
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--port", str(port), "--enforce-eager", "--block-size", "32"]
    command += ["--kv-transfer-config", json.dumps(connector)]
    cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return answering("vLLM", command, port, Path(folder), cpu | os.environ)


def remember(openai: OpenAI, model: str, ids: list[int], budget: str) -> list[int]:
    """Placeholders of a document that the server reads and compresses, from its token ids.

    They are sent, and no text, because vLLM's own tokenizer may be another (docs/engines.md).
    Raises UsageError, with what the server says of it, where the document is not compressed.
    """
    answer = openai.completions.create(
        model=model,
        prompt=ids,
        max_tokens=4,  # what was compressed comes after the first one
        extra_body={"min_tokens": 4, "kv_transfer_params": {"kvp_compress": budget}},
    )
    told = (getattr(answer, "kv_transfer_params", None) or {}).get("kvp_context") or {}
    if "placeholders" not in told:
        raise UsageError(f"vLLM compresses nothing: {told.get('error', 'it has no connector')}")
    return list(told["placeholders"])


def metrics(url: str) -> Mapping[str, float]:
    """Sums and counts of the server's own metrics."""
    with urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    names = {
        "first": "time_to_first_token_seconds_sum",
        "firsts": "time_to_first_token_seconds_count",
        "decode": "request_decode_time_seconds_sum",
        "tokens": "generation_tokens_total",
        "space": "kv_cache_usage_perc",
    }
    found = {}
    for name, metric in names.items():
        values = re.findall(rf"^vllm:{metric}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        found[name] = sum(map(float, values))
    return found


if __name__ == "__main__":
    try:
        main()
    except (KvpError, OpenAIError) as error:
        sys.exit(f"on_vllm.py: {error}")
