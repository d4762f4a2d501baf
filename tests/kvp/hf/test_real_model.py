"""A pretrained model answers, with a policy too, and the conversation of the docs runs.

`make test-real` fetches it; without it these tests are skipped.
"""

import os
import warnings
from pathlib import Path

import pytest

import kvp

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


def test_the_conversation_of_the_docs(folder, tmp_path, run_python):
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].partition("```")[0]
    code = code.replace("models/smollm2-135m-instruct", folder)
    _, gate, _, phone, *kept = run_python(
        code, tmp_path
    ).stdout.splitlines()  # each after its question
    assert "48213" in gate
    assert "5550173" in phone
    assert len(kept) == 3
    assert (tmp_path / "kept.png").stat().st_size > 10_000
