"""The nano recipe's parts that can be checked without training: sequences, schedule, counting."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from kvp import nano

RECIPE = Path(__file__).parents[2] / "recipes" / "nano_lm"
MODULES = (
    "corpus", "data", "dense", "export", "model",
    "phases", "prepare", "prompts", "run", "tokenizer",
)  # fmt: skip


@pytest.fixture(scope="module")
def encoder(recipe):
    return recipe["dense"].Encoder(Tokenizer.from_file(str(nano.path() / "tokenizer.json")))


def text_of(encoder, ids):
    return str(encoder.tokenizer.decode(ids, skip_special_tokens=False))


def test_answers_weigh_the_first_token_of_each_value_most(encoder):
    ids, weights = encoder.answer(["4071234", "98"])
    assert text_of(encoder, ids) == " 4071234, 98.<|im_end|>"
    assert weights == [3.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0]
    assert encoder.given("x 1")[1] == [0.0] * len(encoder.ids("x 1"))


def test_every_value_asked_for_is_in_the_context(recipe, encoder):
    filler = encoder.ids("Somebody said so. Nobody heard it.")
    for seed in range(30):
        ids, weights = recipe["dense"].recall(
            random.Random(seed), 256, encoder, lambda _, count: (filler * count)[:count],
            recipe["dense"].Recall(brief=0.5, uuids=0.0),
        )  # fmt: skip
        assert len(ids) == len(weights) <= 256
        firsts = [at for at, weight in enumerate(weights) if weight == 3.0]
        given = text_of(encoder, ids[: firsts[0]])
        values = [text_of(encoder, ids[at : at + 3]) for at in firsts if at + 3 <= len(ids)]
        assert values
        assert all(f"is:{value}." in given for value in values)


def test_ruler_sequences_fit_and_supervise_only_the_answer(recipe, encoder):
    words = ["Somebody said so."] * 4000
    for task in ("niah_single_2", "niah_multivalue", "vt_0shot", "fwe"):
        ids, weights = recipe["prompts"].ruler(random.Random(1), 512, encoder, words, task)
        assert len(ids) <= 512
        start = next(at for at, weight in enumerate(weights) if weight > 0)
        assert "<|im_start|>assistant\n" in text_of(encoder, ids[:start])
        assert text_of(encoder, ids[start:]).endswith("<|im_end|>")
        assert min(weights[start:]) > 0


def test_steps_lower_the_loss_and_gaps_between_positions_hide_nothing(recipe):
    torch.manual_seed(0)
    run = recipe["run"].Run()
    ids = torch.randint(3, 8192, (2, 24)).repeat(1, 2)
    weights = torch.cat([torch.zeros(2, 24), torch.ones(2, 24)], dim=1)
    positions = torch.arange(48).repeat(2, 1)
    positions[:, 24:] += 40
    losses = [run.update(ids, weights, positions, 1e-3) for _ in range(3)]
    assert losses[-1]["loss"] < losses[0]["loss"]
    assert losses[0]["exact"] > 0.02  # induction reaches over the gap; by chance 1 / 8192
    assert "first" not in losses[0]
    assert run.step == 3


def test_chains_are_asked_in_their_order(recipe, encoder):
    for seed in range(20):
        ids, weights = recipe["dense"].chains(random.Random(seed), 256, encoder)
        text = text_of(encoder, ids)
        before = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text))
        answers = re.findall(r"they are: ((?:[A-Z]{5} ?)+)\n", text)
        assert answers
        for answer in answers:
            names = answer.split()
            assert before[names[0]].isdigit()
            assert [before[name] for name in names[1:]] == names[:-1]
        assert weights.count(3.0) >= len(answers)
        told = ids.index(encoder.ids(":")[0])
        assert weights[:told] == [0.0] * told


def test_a_new_model_looks_back_and_repeats(recipe):
    torch.manual_seed(0)
    model = recipe["model"].new_model()
    ids = torch.randint(3, 8192, (8, 20)).repeat(1, 3)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        read = model(input_ids=ids, output_attentions=True)
    for head, offset in enumerate(recipe["model"].OFFSETS):
        assert float(read.attentions[0][:, head].diagonal(-offset, 1, 2).mean()) > 0.6
    right = read.logits[:, 40:-1].argmax(-1) == ids[:, 41:]
    assert float(right.float().mean()) > 0.2  # by chance 1 / 8192


def test_learning_rate_by_hand(recipe):
    phase = recipe["phases"].Phase(name="x", steps=110, lr=1.0, final_lr=0.5, warmup=10, buckets=())
    rate = recipe["run"].learning_rate
    assert rate(phase, 0) == pytest.approx(0.1)
    assert rate(phase, 10) == pytest.approx(1.0)
    assert rate(phase, 60) == pytest.approx(0.75)
    assert rate(phase, 110) == pytest.approx(0.5)


def test_shipped_phases_are_read_and_name_known_sequences(recipe):
    phases = recipe["phases"].read_phases(RECIPE / "phases.toml")
    assert [phase.name for phase in phases][:2] == ["A", "B"]
    known = {
        "loop", "pairs", "uuid_pairs", "series", "groups", "chains", "recall", "values",
        "uuids", "text", "chat", "prose", "talk", *recipe["data"].RULER_TASKS,
    }  # fmt: skip
    phases += recipe["phases"].read_phases(RECIPE / "more.toml")
    assert {name for phase in phases for b in phase.buckets for name in b.mix} <= known


def test_batches_are_a_function_of_the_step(recipe, tmp_path, monkeypatch):
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
    monkeypatch.setattr(recipe["prepare"], "GROUP_COPIES", 10)
    monkeypatch.setattr(recipe["prepare"], "UUIDS", 10)
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


def test_weights_are_averaged_tensor_by_tensor(recipe, tmp_path):
    for step, value in enumerate((1.0, 2.0, 6.0)):
        model = {"w": torch.full((2, 3), value), "lm_head.weight": torch.zeros(2)}
        torch.save({"model": model, "step": step}, tmp_path / f"{step}.pt")
    checkpoints = [tmp_path / f"{step}.pt" for step in range(3)]
    assert recipe["export"].export(checkpoints, nano.path(), tmp_path / "mean") == 2
    tensors = load_file(tmp_path / "mean" / "model.safetensors")
    assert tensors.keys() == {"w"}
    assert tensors["w"].dtype == torch.bfloat16
    assert (tensors["w"] == 3.0).all()


def test_documents_are_held_out_by_name_and_hash(recipe, tmp_path):
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
