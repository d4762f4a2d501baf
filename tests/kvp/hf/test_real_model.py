"""A pretrained model: it answers, evicts exactly, and goes through every program of the loop.

`make test-real` fetches it; without it these tests are skipped.
"""

import os
import subprocess
import sys
import warnings
from copy import deepcopy
from pathlib import Path

import pytest

import kvp
from kvp.program.table import run_program

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[3]
DEFAULT = ROOT / "models/smollm2-135m-instruct"


@pytest.fixture(scope="module")
def folder():
    path = Path(os.environ.get("KVP_REAL_MODEL", DEFAULT))
    if not path.is_dir():
        pytest.skip(
            "no pretrained model: recipes/real_models/fetch.py could not fetch it, or did not run"
        )
    return str(path)


@pytest.fixture(scope="module")
def loaded(folder):
    return kvp.load_model(folder)


def test_its_chat_template_is_there(loaded):
    _, tokenizer = loaded
    asked = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_what_serving_combines(loaded, combined, request):
    """A chat of four turns, of two for four rows; prompts and questions differ in length.

    In float64: in float32 scores that are nearly equal are ordered otherwise on some processors
    when rows are computed together.
    """
    model, tokenizer = deepcopy(loaded[0]).double(), loaded[1]
    facts = "The grass is green. The sky is blue. The code of the gate is 48213. Here we go. " * 2

    def opening(text):
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        options = {"add_generation_prompt": True, "return_tensors": "pt"}
        return tokenizer.apply_chat_template(chat, return_dict=True, **options).input_ids[0]

    def turn(text):
        text = f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        return tokenizer(text, return_tensors="pt").input_ids[0]

    prompts = [opening(facts + "There and back. What is the code?"), opening(facts + "The code?")]
    questions = ["Which colour has the sky, green or red?", "Why?", "And the grass?", "Who?"]
    more = range(1 if "fork-None" in request.node.name else 3)
    turns = [list(map(turn, questions[asked:] + questions[:asked])) for asked in more]
    combined(model, kvp.make_scorer("snapkv"), prompts, turns, 2e-3)


def test_it_answers_and_its_bundled_policy_with_a_sixteenth_of_the_cache(loaded):
    model, tokenizer = loaded
    policy = kvp.load_policy("smollm2-135m-instruct")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*was trained on.*")
        table = kvp.evaluate(
            model, tokenizer=tokenizer, methods=["full", (policy, "global")],
            tasks=["niah_single_2"], prompts=2, length=512, budgets=["6%"],
            protocols=["query_agnostic"], protection="off",
        )  # fmt: skip
    assert dict(table.groupby("method")["score"].mean()) == {"full": 1, "kvp": 1}


def test_the_conversation_of_the_docs(folder, tmp_path):
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].partition("```")[0]
    code = code.replace("models/smollm2-135m-instruct", folder)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    _, gate, _, phone, *kept = done.stdout.splitlines()  # each after its question
    assert "48213" in gate
    assert "5550173" in phone
    assert len(kept) == 3
    assert (tmp_path / "kept.png").stat().st_size > 10_000


def test_collect_train_and_evaluate(folder, tmp_path):
    def run(program, *arguments):
        assert run_program(program, list(arguments)) == 0

    data = ("--model", folder, "--dtype", "bfloat16", "--tasks", "niah_single_2", "--length", "256")
    run(
        "collect", *data, "--train", "3", "--validation", "1", "--answers", "reference",
        "--out", f"{tmp_path}/traces",
    )  # fmt: skip
    run(
        "train", "--traces", f"{tmp_path}/traces", "--out", f"{tmp_path}/policy", "--steps",
        "4", "--hidden", "16", "--contexts", "2", "--validate_every", "2",
    )  # fmt: skip
    run(
        "eval", *data, "--policies", f"{tmp_path}/policy", "--methods", "full,kvp+global",
        "--budgets", "25%", "--prompts", "1", "--timing_prompts", "0", "--out", f"{tmp_path}/out",
    )  # fmt: skip
    assert (tmp_path / "out/rows.jsonl").exists()
