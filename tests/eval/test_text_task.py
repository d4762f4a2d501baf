"""The task `text`: stretches of running text in disjoint splits."""

import random
import shutil

import pytest

from eval.config import EvalConfig
from eval.prompts import load_prompts
from eval.results.records import read_records
from kvp.data.splits import split_of
from kvp.data.task import TaskSettings
from kvp.errors import UsageError
from kvp.hf import load_model

WORDS = ["green", "grass", "blue", "sky", "yellow", "sun", "there", "and", "back", "again"]


def _text(seed, words):
    draw = random.Random(seed)
    return " ".join(f"{draw.choice(WORDS)}{draw.randrange(100)}" for _ in range(words))


def _documents(count, words=120):
    return [_text(seed, words) for seed in range(count)]


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return load_model(str(model_folder))[1]


@pytest.fixture(scope="module")
def texts(tmp_path_factory, jsonl):
    """A file of 40 rows with running text."""
    rows = ({"text": text} for text in _documents(40))
    return jsonl(tmp_path_factory.mktemp("texts") / "rows.jsonl", *rows)


def _load(tokenizer, text, positions=None, **fields):
    settings = {"tasks": "text", "prompts": 3, "length": 64, "continuation_tokens": 16, **fields}
    config = EvalConfig(out="unused", text=text and str(text), **settings)
    return load_prompts(TaskSettings.of(config, count=config.prompts, seed=0), tokenizer, positions)


def test_context_and_continuation_are_one_stretch(tokenizer, texts):
    prompts, notes = _load(tokenizer, texts)
    owned = [text for text in _documents(40) if split_of(text) == "test"]
    starts = {tuple(tokenizer.encode(text)[:64]) for text in owned}
    assert len(prompts) == 3
    for prompt in prompts:
        assert prompt.teacher_forced
        assert (prompt.encoded.prompt_length, len(prompt.reply)) == (48, 16)
        assert (*prompt.ids.tolist(), *prompt.reply.tolist()) in starts
        assert prompt.cached_tokens("query_aware") == prompt.cached_tokens("query_agnostic") == 47
    assert "both protocols are the same" in notes[0]


def test_a_plain_text_is_shared_out_by_position(tokenizer, tmp_path):
    path = tmp_path / "book.txt"
    whole = _text(9, 4000)
    path.write_text(whole)
    parts = {}
    for split in ("train", "validation", "test"):
        prompts, _ = _load(tokenizer, path, split=split, prompts=1000)
        parts[split] = [
            tokenizer.decode([*prompt.ids.tolist(), *prompt.reply.tolist()]) for prompt in prompts
        ]
    indices = {split: [whole.index(text) for text in texts] for split, texts in parts.items()}
    assert max(indices["train"]) < 0.8 * len(whole) <= min(indices["validation"])
    assert max(indices["validation"]) < 0.9 * len(whole) <= min(indices["test"])
    assert max(whole.index(text) + len(text) for text in parts["train"]) <= 0.8 * len(whole)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": None}, "--tasks text needs --text"),
        ({"text": ""}, "--text is empty"),
        ({"length": 2000}, "--length 2000: the model has 1024 positions"),
        ({"length": 900}, "no text of 900 tokens in the test split"),
        ({"continuation_tokens": 63}, "leaves no context before --continuation_tokens 63"),
        ({"tasks": "chat"}, "--text is what the task text reads"),
    ],
)
def test_texts_that_do_not_fit_are_refused(fields, message, tokenizer, texts):
    text = fields.get("text", texts)
    changes = {name: value for name, value in fields.items() if name != "text"}
    with pytest.raises(UsageError, match=message):
        _load(tokenizer, text, positions=1024, **changes)


def test_a_reply_beyond_the_models_positions_is_refused(tokenizer, texts):
    given = {"tasks": "data", "data": texts, "split": "all"}
    assert _load(tokenizer, None, positions=4096, **given)[0][0].teacher_forced
    with pytest.raises(UsageError, match=r"--length 64: a prompt with its given reply has \d+ tok"):
        _load(tokenizer, None, positions=80, **given)


def test_a_model_without_chat_template_is_measured_on_text(model_folder, texts, tmp_path, run_eval):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").unlink()
    assert run_eval(
        tmp_path / "results", model=folder, tasks="text", text=texts, length=64,
        continuation_tokens=16, methods="full,snapkv+ada", budgets="50%", protection="off",
        prompts=2, timing_prompts=1,
    ) == 0  # fmt: skip
    records = list(read_records(tmp_path / "results/rows.jsonl"))
    assert {record["protocol"] for record in records} == {"query_agnostic"}
    assert len(records) == 2 * 2
    assert {record["reply_tokens"] for record in records} == {16}
