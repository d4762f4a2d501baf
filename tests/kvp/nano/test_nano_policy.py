"""The bundled policies belong to their models, and `evicting` takes them by name."""

import re
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import pytest

import kvp
from kvp import compress, evicting, load_model, load_policy, prefill_and_evict
from kvp.allocation import check_fits_model
from kvp.data.metrics import string_match_all
from kvp.data.task import TaskSettings
from kvp.data.tasks.ruler import generate
from kvp.errors import KvpError, ModelError
from kvp.hf import geometry_of
from kvp.hf.model_identity import model_identity, weights_digest
from kvp.names import SMOLLM2
from kvp.nano import path
from policies.sources import BUNDLED


def test_is_of_the_bundled_model_as_it_is_now():
    model, tokenizer = load_model("nano")
    policy = load_policy("nano")
    check_fits_model(policy, geometry_of(model.config))
    weights = weights_digest(model)
    assert policy.metadata["model"] == model_identity("nano", None, tokenizer, weights)


@pytest.mark.parametrize("folder", [*BUNDLED.values(), path()], ids=[*BUNDLED, "model"])
def test_names_no_machine(folder):
    for name in ("policy.json", "README.md", "config.json", "tokenizer_config.json"):
        text = (folder / name).read_text(encoding="utf-8") if (folder / name).exists() else ""
        assert not re.findall(r"(?<=[\s\"=:,])/\w[\w./-]+", text)


def test_the_policy_of_smollm2_stays_within_seven_megabytes():
    assert sum(file.stat().st_size for file in BUNDLED[SMOLLM2].iterdir()) < 7_000_000


@pytest.mark.parametrize(
    ("task", "share"),
    [("niah_single_1", None), ("niah_multikey_2", None), ("niah_multikey_1", "12.5%")],
)
def test_answers_with_the_whole_cache_and_with_an_eighth(task, share):
    model, tokenizer = load_model("nano")
    scores = []
    for index in range(6):
        sample = generate(
            task, TaskSettings(length=480, seed=11, split="test"), index=index,
            count_tokens=lambda sample: len(tokenizer(sample.text)["input_ids"]),
        )  # fmt: skip
        chat = [{"role": "user", "content": sample.context + sample.question}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(
            prompt + sample.answer_prefix, return_tensors="pt", add_special_tokens=False
        )
        with evicting(model, "nano", share, allocator="global") if share else nullcontext():
            made = model.generate(**inputs, do_sample=False, max_new_tokens=12)
        reply = tokenizer.decode(made[0, inputs["input_ids"].shape[1] :])
        scores.append(string_match_all(reply, sample.references))
    assert sum(scores) >= 5


@pytest.mark.parametrize("rule", [None, "ada", "global"])
@pytest.mark.parametrize("name", ["nano", "snapkv(kernel=31)", str(BUNDLED["nano"])])
def test_names_of_methods_policies_and_allocators_are_taken(name, rule):
    model, tokenizer = load_model("nano")
    ids = tokenizer(20 * "One thing after the other. ", return_tensors="pt")["input_ids"]
    made = kvp.make_scorer(name) if "snapkv" in name else load_policy(name)
    ruled = kvp.make_allocator(rule) if rule else None
    kept = []
    for scorer, allocator in ((made, ruled), (name, rule), (f"{name}+{rule or 'uniform'}", None)):
        with evicting(model, scorer, "12.5%", allocator=allocator) as found:
            model(ids, use_cache=True)
        kept.append([found.positions(layer, head).tolist() for layer in (0, 4) for head in (0, 3)])
    assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize("kind", [False, True])
def test_words_of_the_command_line_and_scorers_without_needs_are_taken(kind):
    """A class of scorers, or a frozen object, that says nothing of what it needs."""
    model, tokenizer = load_model("nano")

    @dataclass(frozen=True)
    class Newest:
        name: ClassVar[str] = "newest"

        def score(self, view):
            return view.positions[:, None].expand(view.keys.shape[:3]).float()

    scorer, text = Newest if kind else Newest(), 20 * "One thing after the other. "
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    for word, first in (("off", ids.shape[1] - 32), ("on", 0), (None, 0)):
        cache = prefill_and_evict(model, ids, scorer, 32, word)
        assert int(cache.layers[0].positions.min()) == first
        with evicting(model, scorer, 32, protection=word) as kept:
            model(ids)
        assert kept.positions(0, 0)[0] == first
        made = compress(model, tokenizer, text, scorer, 32, protection=word)
        assert (made.facts.kept, made.facts.policy) == (32, "newest")


def test_names_that_mean_nothing_are_one_line(one_line):
    model, _ = load_model("nano")
    for name, message in (
        ("snapvk", r"did you mean snapkv\?.* or a policy: nano, smollm2-135m-instruct, "),
        ("SnapKV", r"unknown method 'SnapKV' \(did you mean snapkv\?\)"),
        ("smollm2-135m-instuct", r"'smollm2-135m-instuct' \(did you mean smollm2-135m-instruct\?"),
        ("kvp/polcy", "there is no folder 'kvp/polcy'"),  # the folder kvp is here
        ("nano+ada", "the allocator is given twice"),
    ):
        with one_line(KvpError, match=message):
            evicting(model, name, "12.5%", allocator="ada")
    for attempt, message in (
        (lambda: evicting(model, "nano", "50%", protection="both"), 'is neither "on", "off" nor'),
        (lambda: compress(model, model, "", "nano", protection=False), "protection=False is neit"),
        (lambda: evicting(model, "smollm2-135m-instruct", 99), "-Instruct, 30 layers x 3 KV heads"),
        (lambda: evicting(model, "+ada", "50%"), "method '' is not of the form name"),
        (lambda: load_policy("nano+global"), "'nano.global' names an allocator, too"),
    ):
        with one_line(KvpError, match=message):
            attempt()
    with pytest.raises(
        ModelError, match=r"^model kvp/nan: no such folder \(did you mean kvp/nano\?"
    ):
        load_model("kvp/nan")
