"""The nano recipe's parts that can be checked without training: sequences, schedule, counting."""

import importlib
import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from kvp import nano

Recipe = dict[str, Any]
RECIPE = Path(__file__).parents[2] / "recipes" / "nano_lm"
MODULES = (
    "corpus", "data", "dense", "kneser_ney", "model", "phases", "prepare", "prompts", "run",
    "tokenizer",
)  # fmt: skip


@pytest.fixture(scope="module")
def recipe() -> Iterator[Recipe]:
    """The recipe's modules, importable only inside these tests."""
    sys.path.insert(0, str(RECIPE))
    yield {name: importlib.import_module(name) for name in MODULES}
    sys.path.remove(str(RECIPE))
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def encoder(recipe: Recipe) -> Any:
    return recipe["dense"].Encoder(Tokenizer.from_file(str(nano.path() / "tokenizer.json")))


def text_of(encoder: Any, ids: list[int]) -> str:
    return str(encoder.tokenizer.decode(ids, skip_special_tokens=False))


def test_answers_weigh_the_first_digit_most(encoder: Any) -> None:
    ids, weights = encoder.answer(" a is: 407.")
    digits = [w for i, w in zip(ids, weights, strict=True) if i in encoder.digits]
    assert digits == [3.0, 1.0, 1.0]
    assert encoder.given("x 1")[1] == [0.0] * len(encoder.ids("x 1"))


def test_a_loop_repeats_and_its_first_turn_is_given(recipe: Recipe) -> None:
    for seed in range(20):
        text_ids = np.arange(3, 500, dtype=np.uint16)
        ids, weights = recipe["dense"].loop(random.Random(seed), 96, text_ids, 4096)
        period = weights.index(1.0)
        assert 4 <= period <= 32
        assert ids[period:] == ids[:-period]


def test_every_requested_value_is_in_the_context(recipe: Recipe, encoder: Any) -> None:
    for seed in range(30):
        ids, weights = recipe["dense"].recall(
            random.Random(seed), 256, encoder, lambda rng, count: "plain " * count, brief=0.5
        )
        assert len(ids) == len(weights) <= 256
        firsts = [at for at, weight in enumerate(weights) if weight == 3.0]
        given = text_of(encoder, ids[: firsts[0]])
        values = [text_of(encoder, ids[at : at + 7]) for at in firsts if at + 7 <= len(ids)]
        assert values
        assert all(f"is: {value}." in given for value in values)


def test_ruler_sequences_fit_and_supervise_only_the_answer(recipe: Recipe, encoder: Any) -> None:
    words = ["Somebody said so."] * 4000
    for task in ("niah_single_2", "niah_multivalue", "vt_0shot", "fwe"):
        ids, weights = recipe["prompts"].ruler(random.Random(1), 512, encoder, words, task)
        assert len(ids) <= 512
        start = next(at for at, weight in enumerate(weights) if weight > 0)
        assert "<|im_start|>assistant\n" in text_of(encoder, ids[:start])
        assert text_of(encoder, ids[start:]).endswith("<|im_end|>")
        assert min(weights[start:]) > 0


def test_learning_rate_by_hand(recipe: Recipe) -> None:
    phase = recipe["phases"].Phase(name="x", steps=110, lr=1.0, final_lr=0.5, warmup=10, buckets=())
    rate = recipe["run"].learning_rate
    assert rate(phase, 0) == pytest.approx(0.1)
    assert rate(phase, 10) == pytest.approx(1.0)
    assert rate(phase, 60) == pytest.approx(0.75)
    assert rate(phase, 110) == pytest.approx(0.5)


def test_shipped_phases_are_read_and_name_known_sequences(recipe: Recipe) -> None:
    phases = recipe["phases"].read_phases(RECIPE / "phases.toml")
    assert [phase.name for phase in phases][:2] == ["A", "B"]
    known = {"loop", "recall", "values", "text", "chat", "prose", *recipe["data"].RULER_TASKS}
    assert {name for phase in phases for b in phase.buckets for name in b.mix} <= known


def test_batches_are_a_function_of_the_step(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "book.txt").write_text("A plain sentence follows another one. " * 5000)
    (text / "notes.jsonl").write_text(
        "\n".join(
            json.dumps({"turns": [["USER", f"Is it {n}?"], ["SYSTEM", "It is."]]})
            for n in range(200)
        )
    )
    out = tmp_path / "run"
    monkeypatch.setattr(recipe["prepare"], "KEY_COPIES", 1)
    monkeypatch.setattr(recipe["prepare"], "TEMPLATE_COPIES", 10)
    recipe["prepare"].prepare([text], out)
    phases = [
        recipe["phases"].Phase(
            name="x", steps=2, lr=1.0, final_lr=1.0, warmup=0,
            buckets=(
                recipe["phases"].Bucket(
                    length=128, rows=3, share=1.0, mix={"loop": 1.0, "text": 1.0, "recall": 1.0}
                ),
            ),
        )
    ]  # fmt: skip
    first, again = (recipe["data"].Curriculum(phases, 5, out) for _ in range(2))
    first[0]
    assert len(first) == 2
    for mine, other in zip(first[1], again[1], strict=True):
        assert mine.shape == (3, 128)
        assert (mine == other).all()


def test_documents_are_held_out_by_name_and_hash(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "validation.txt").write_text("never trained on")
    (tmp_path / "LICENSE.txt").write_text("not text")
    lines = [json.dumps({"text": f"note {n}"}) for n in range(400)]
    (tmp_path / "notes.jsonl").write_text("\n".join([*lines, json.dumps({"other": 1})]))
    documents = list(recipe["corpus"].read_documents([tmp_path]))
    assert len(documents) == 401
    held_out = [d.source for d in documents if d.held_out]
    assert "validation" in held_out
    assert 10 <= held_out.count("notes") <= 45
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no \.txt or \.jsonl file"):
        list(recipe["corpus"].read_documents([tmp_path / "empty"]))


def test_kneser_ney_bigram_by_hand(recipe: Recipe) -> None:
    # Bigrams of 0 1 0 1 0 2: (0 1) twice, (1 0) twice, (0 2) once, so the discount is
    # 1 / (1 + 2 * 2) = 1/5. Distinct predecessors: 0 has one, 1 has one, 2 has one; all are
    # singletons, so the unigram discount is 1 and the unigrams are uniform over four ids.
    counting = recipe["kneser_ney"].KneserNey(np.array([0, 1, 0, 1, 0, 2]), order=2, vocab_size=4)
    got = np.exp(counting.log_probability(np.array([0, 1, 0, 3])))
    after_0_1 = (2 - 0.2) / 3 + 0.2 * 2 / 3 * 0.25
    after_1_0 = (2 - 0.2) / 2 + 0.2 * 1 / 2 * 0.25
    after_0_3 = 0.2 * 2 / 3 * 0.25
    assert got == pytest.approx([after_0_1, after_1_0, after_0_3])
    total = sum(math.exp(float(counting.log_probability(np.array([0, w]))[0])) for w in range(4))
    assert total == pytest.approx(1.0)
    with pytest.raises(ValueError, match="does not fit"):
        recipe["kneser_ney"].KneserNey(np.array([1]), order=6, vocab_size=4)
