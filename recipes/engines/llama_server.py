"""A stock llama-server answers ten questions about three documents, compressed and whole.

    python recipes/engines/llama_server.py LLAMA_SERVER FILE.gguf --policy smollm2-135m-instruct

Reads the GGUF file in transformers, compresses the documents and writes their slot files; starts
the server, restores one slot per document, asks over the server's own HTTP interface, asks the same
about the whole documents, and prints what the server says of both (docs/engines.md).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from servers import answering, free_port

from kvp import load_model, load_policy
from kvp.data.synthetic.text import prose
from kvp.errors import KvpError, UsageError
from kvp.hf.contexts import compress
from kvp.llamacpp.slots import write_slot

THINGS = (
    ("lazy-cat", "old-lamp", "red-boat"),
    ("tall-tree", "quiet-river", "green-door"),
    ("small-bird", "blue-stone", "warm-bread", "last-train"),
)
ASKED = "What is the special magic number for {0}? The special magic number for {0} is"


def main() -> None:
    """Compress, start the server, ask, print, stop the server."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("server", help="the program llama-server")
    parser.add_argument("gguf", help="the model's file")
    parser.add_argument("--policy", default="smollm2-135m-instruct")
    parser.add_argument("--budget", default="12.5%", help="tokens that every KV head keeps")
    parser.add_argument("--words", type=int, default=700, help="of each document")
    given = parser.parse_args()
    if shutil.which(given.server) is None:
        raise UsageError(f"{given.server} is no program: give the path of llama-server")
    if not Path(given.gguf).is_file():
        raise UsageError(f"{given.gguf}: no such file: recipes/real_models/fetch.py --to FILE.gguf")
    print("transformers reads and compresses three documents ...", flush=True)
    model, tokenizer = load_model(given.gguf, dtype="float32")
    policy = load_policy(given.policy)
    documents = [document(things, given.words) for things in THINGS]
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        contexts = [compress(model, tokenizer, text, policy, given.budget) for text, _ in documents]
        slots = [write_slot(context, given.gguf, folder).name for context in contexts]
        print(f"three documents read and compressed in {time.perf_counter() - started:.1f} s")
        with server(given.server, given.gguf, folder) as url:
            for compressed in (True, False):
                right, told = 0, []
                for (text, facts), context, slot in zip(documents, contexts, slots, strict=True):
                    if compressed:
                        post(f"{url}/slots/0?action=restore", {"filename": slot})
                    for thing, number in facts.items():
                        question = tokenizer(ASKED.format(thing), add_special_tokens=False)
                        before = context.placeholders if compressed else tokenizer(text).input_ids
                        body = {
                            "prompt": [*before, *question.input_ids], "cache_prompt": True,
                            "n_predict": 12, "temperature": 0,
                        }  # fmt: skip
                        answer = post(f"{url}/completion", body)
                        told.append(answer["timings"])
                        right += number in answer["content"]
                        shown = answer["content"].strip()[:30]
                        print(f"  {thing}: {shown!r}, the document says {number}", flush=True)
                used = {name: sum(one[name] for one in told) for name in told[0]}
                print(f"{f'{given.budget} of each document' if compressed else 'whole documents'}:")
                print(f"  {right} of {len(told)} right; by the server's own timings one question")
                print(
                    f"  evaluated {used['prompt_n'] / len(told):.0f} tokens and took "
                    f"{used['prompt_ms'] / len(told) / 1000:.2f} s to the first token (means),"
                )
                rate = 1000 * used["predicted_n"] / used["predicted_ms"]
                print(f"  and answers came at {rate:.1f} tokens/s")


def document(things: tuple[str, ...], words: int) -> tuple[str, dict[str, str]]:
    """Prose with a fact for each thing in it: what stands there, and number by thing."""
    draw = random.Random(things[0])
    facts = {thing: str(draw.randrange(10**6, 10**7)) for thing in things}
    seeds = [draw.randrange(1000) for _ in range(len(things) + 1)]
    parts = [prose(seed, words=words // len(seeds), split="test") for seed in seeds]
    for place, (thing, number) in enumerate(facts.items()):
        parts.insert(2 * place + 1, f"One of the special magic numbers for {thing} is: {number}.")
    return " ".join(parts) + "\n", facts


def server(program: str, gguf: str, folder: str) -> AbstractContextManager[str]:
    """A server of `gguf` whose slot files are in `folder`; its address, once it answers."""
    port = free_port()
    command = [program, "-m", gguf, "-c", "4096", "-np", "1", "-fa", "on", "--port", str(port)]
    return answering("llama-server", [*command, "--slot-save-path", folder], port, Path(folder))


def post(url: str, body: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """The server's answer to a JSON body."""
    with urlopen(Request(url, json.dumps(body).encode()), timeout=600) as answer:
        return json.load(answer)


if __name__ == "__main__":
    try:
        main()
    except KvpError as error:
        sys.exit(f"llama_server.py: {error}")
