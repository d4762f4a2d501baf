"""A stock vLLM answers ten questions about three documents, compressed and whole.

    python recipes/engines/on_vllm.py --model FOLDER --policy smollm2-135m-instruct-kv

Starts vLLM's own OpenAI-compatible server with kvp's connector, lets it read and compress the
documents (`Client.remember`), asks through the plain `openai` client, asks the same about the whole
documents, and prints what the server's own metrics say of both. Needs vLLM and openai beside kvp
(docs/engines.md).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from openai import OpenAI

from kvp.data.synthetic.text import prose
from kvp.errors import UsageError
from kvp.nano import path as nano
from kvp.vllm.client import Client

THINGS = (
    "lazy-cat",
    "old-lamp",
    "red-boat",
    "tall-tree",
    "quiet-river",
    "green-door",
    "small-bird",
)
THINGS += ("blue-stone", "warm-bread", "last-train")
ASKED = "What is the special magic number for {0}? The special magic number for {0} is"


def main() -> None:
    """Start the server, compress, ask, print, stop the server."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="nano", help="a folder or a hub id; nano is bundled")
    parser.add_argument("--policy", default="nano", help="reads keys and values alone")
    parser.add_argument("--budget", default="12.5%", help="tokens that every KV head keeps")
    parser.add_argument("--words", type=int, default=700, help="of each document")
    given = parser.parse_args()
    model = str(nano()) if given.model == "nano" else given.model
    documents = [document(index, given.words) for index in range(3)]
    with tempfile.TemporaryDirectory() as folder, server(model, given.policy, folder) as url:
        client, openai = Client(url), OpenAI(base_url=f"{url}/v1", api_key="none")
        started = time.perf_counter()
        contexts = [client.remember(text, given.budget) for text, _ in documents]
        print(f"three documents read and compressed in {time.perf_counter() - started:.1f} s")
        for compressed in (True, False):
            before, space, right = metrics(url), 0.0, 0
            for (text, facts), context in zip(documents, contexts, strict=True):
                for thing, number in facts.items():
                    question = ASKED.format(thing)
                    prompt = client.prompt(question, context) if compressed else text + question
                    answer = ""
                    for piece in openai.completions.create(
                        model=client.model, prompt=prompt, max_tokens=12, temperature=0, stream=True
                    ):
                        answer += piece.choices[0].text
                        space = max(space, metrics(url)["space"])
                    right += number in answer
                    print(f"  {thing}: {answer.strip()[:30]!r}, the document says {number}")
            used = {name: value - before[name] for name, value in metrics(url).items()}
            print(f"{f'{given.budget} of each document' if compressed else 'whole documents'}:")
            print(
                f"  {right} of {len(THINGS)} right; by the server's own metrics one question took"
            )
            first = used["first"] / used["firsts"]
            print(f"  {space:.1%} of the KV space, {first:.2f} s to the first token (mean),")
            tokens = used["tokens"] - len(THINGS)
            print(f"  and answers came at {tokens / used['decode']:.1f} tokens/s")


def document(index: int, words: int) -> tuple[str, dict[str, str]]:
    """Prose with three or four facts in it: what stands there, and number by thing."""
    draw = random.Random(index)
    things = THINGS[index * 3 : index * 3 + (4 if index == 2 else 3)]
    facts = {thing: str(draw.randrange(10**6, 10**7)) for thing in things}
    parts = []
    for place, (thing, number) in enumerate(facts.items()):
        parts.append(prose(10 * index + place, words=words // (len(facts) + 1), split="test"))
        parts.append(f"One of the special magic numbers for {thing} is: {number}.")
    parts.append(prose(10 * index + 9, words=words // (len(facts) + 1), split="test"))
    return " ".join(parts) + "\n", facts


@contextmanager
def server(model: str, policy: str, folder: str) -> Iterator[str]:
    """A server of `model` whose contexts are in `folder`; its address, once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    connector = {
        "kv_connector": "KvpConnector", "kv_connector_module_path": "kvp.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"contexts": folder, "policy": policy},
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += [
        "--port",
        str(port),
        "--enforce-eager",
        "--kv-transfer-config",
        json.dumps(connector),
    ]
    cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = Path(folder) / "server.log"
    with log.open("w") as file:
        running = subprocess.Popen(command, env=cpu | os.environ, stdout=file, stderr=file)
        try:
            url = f"http://127.0.0.1:{port}"
            while True:
                if running.poll() is not None:
                    raise UsageError(f"vLLM ended:\n{log.read_text()[-2000:]}")
                try:
                    urlopen(f"{url}/health", timeout=5).close()
                    break
                except (URLError, OSError):
                    time.sleep(1)
            yield url
        finally:
            running.terminate()
            running.wait(60)


def metrics(url: str) -> Mapping[str, float]:
    """Sums and counts of the server's own metrics."""
    with urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    names = {
        "first": "time_to_first_token_seconds_sum", "firsts": "time_to_first_token_seconds_count",
        "decode": "request_decode_time_seconds_sum", "tokens": "generation_tokens_total",
        "space": "kv_cache_usage_perc",
    }  # fmt: skip
    found = {}
    for name, metric in names.items():
        values = re.findall(rf"^vllm:{metric}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        found[name] = sum(map(float, values))
    return found


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(f"on_vllm.py: {error}")
