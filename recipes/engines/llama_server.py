"""A stock llama-server answers ten questions about three documents, or your own, both ways.

    python recipes/engines/llama_server.py LLAMA_SERVER FILE.gguf --policy smollm2-135m-instruct-kv

Reads the GGUF file in transformers, compresses the documents and writes their slot files; starts
the server, restores one slot per document, asks over the server's own HTTP interface, asks the same
about the whole documents, and prints what the server says of both (docs/engines.md).
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from questions import add_flags, documents, print_and_score
from servers import answering, free_port

from kvp import load_model, load_policy
from kvp.budgets import parse_budget
from kvp.errors import KvpError, UsageError
from kvp.hf.contexts import compress
from kvp.llamacpp.slots import write_slot


def main() -> None:
    """Compress, start the server, ask, print, stop the server."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("server", help="the program llama-server")
    parser.add_argument("gguf", help="the model's file")
    parser.add_argument("--policy", default="smollm2-135m-instruct-kv", help="default: %(default)s")
    add_flags(parser, "tokens that every KV head keeps")
    given = parser.parse_args()
    if shutil.which(given.server) is None:
        raise UsageError(f"{given.server} is no program: give the path of llama-server")
    if not Path(given.gguf).is_file():
        raise UsageError(f"{given.gguf}: no such file: recipes/real_models/fetch.py --to FILE.gguf")
    parse_budget(given.budget)
    print("transformers reads and compresses the documents ...", flush=True)
    model, tokenizer = load_model(given.gguf, dtype="float32")
    policy = load_policy(given.policy)
    texts = documents(given.rows, given.prompts, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        contexts = [compress(model, tokenizer, text, policy, given.budget) for text, _ in texts]
        slots = [write_slot(context, given.gguf, folder).name for context in contexts]
        took = time.perf_counter() - started
        print(f"{len(texts)} documents read and compressed in {took:.1f} s")
        with server(given.server, given.gguf, folder) as url:
            for compressed in (True, False):
                print(f"{f'{given.budget} of each document' if compressed else 'whole documents'}:")
                scores, timings = [], []
                for (text, samples), context, slot in zip(texts, contexts, slots, strict=True):
                    if compressed:
                        post(f"{url}/slots/0?action=restore", {"filename": slot})
                    for sample in samples:
                        asked = sample.question + sample.answer_prefix
                        question = tokenizer(asked, add_special_tokens=False)
                        before = context.placeholders if compressed else tokenizer(text).input_ids
                        body = {
                            "prompt": [*before, *question.input_ids],
                            "cache_prompt": True,
                            "n_predict": sample.max_new_tokens,
                            "temperature": 0,
                        }
                        answer = post(f"{url}/completion", body)
                        timings.append(answer["timings"])
                        scores.append(print_and_score(sample, answer["content"]))
                used = {name: sum(one[name] for one in timings) for name in timings[0]}
                print(f"  {sum(scores):g} of {len(scores)} right; by the server's own timings one")
                print(
                    f"  evaluated {used['prompt_n'] / len(scores):.0f} tokens and took "
                    f"{used['prompt_ms'] / len(scores) / 1000:.2f} s to the first token (means),"
                )
                rate = 1000 * used["predicted_n"] / used["predicted_ms"]
                print(f"  and answers came at {rate:.1f} tokens/s")


def server(program: str, gguf: str, folder: str) -> AbstractContextManager[str]:
    """A server of `gguf` whose slot files are in `folder`; its address, once it answers."""
    port = free_port()
    command = [program, "-m", gguf, "-c", "4096", "-np", "1", "-fa", "on", "--port", str(port)]
    return answering("llama-server", [*command, "--slot-save-path", folder], port, Path(folder))


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The server's answer to a body; both are JSON objects."""
    with urlopen(Request(url, json.dumps(body).encode()), timeout=600) as answer:
        return json.load(answer)


if __name__ == "__main__":
    try:
        main()
    except (KvpError, OSError) as error:
        sys.exit(f"llama_server.py: {error}")
