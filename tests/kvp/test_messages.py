"""The text of any chat template is encoded as it is written, or refused in one line."""

from itertools import product

import pytest
from transformers import AutoTokenizer

import kvp
from kvp import load_model
from kvp.data.encode import ChangedTextError, encode
from kvp.data.rows.samples import row_samples
from kvp.data.task import Sample, TaskSettings
from kvp.errors import KvpError, ModelError, UsageError
from kvp.hf.contexts import context_ids

LOOP = (
    "{% for message in messages %}{{ '<|start|>' + message.role + '\\n' }}{{ CONTENT }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
TEXT = "A <b>\"word\" & an 'é'</b>:\n\n  let us\tthink,  100 %. " * 15


def content(expression):
    return LOOP.replace("CONTENT", expression)


PLAIN = content("message.content")
SAME = {
    "plain": PLAIN,
    "trim": content("message.content | trim"),
    "date": "{{ strftime_now('%Y') }}" + PLAIN,
    "only the first": content("message.content | trim if loop.first else message.content"),
}
OTHER = {
    "words": content("message.content.split() | join(' ')"),
    "escaped": content("message.content | e"),
    "cut": content("message.content[:700]"),
    "more on a word": "{% if 'think' in messages[0].content %}Think.{% endif %}" + PLAIN,
    "less on a word": content("message.content.split('let us')[-1]"),
    "twice": content("message.content + message.content"),
    "the last alone": "{{ messages[-1].content }}",
    "reversed": PLAIN.replace("in messages", "in messages | reverse"),
}


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture
def using(tokenizer, monkeypatch):
    """The tokenizer with another chat template."""

    def use(text):
        monkeypatch.setattr(tokenizer, "chat_template", text)
        return tokenizer

    return use


def sample(context="", question="", **fields):
    return Sample(id="s", task="t", split="test", context=context, question=question, **fields)


def turns(*contents):
    roles = ["user", "assistant"] * len(contents)
    return tuple({"role": r, "content": c} for r, c in zip(roles, contents, strict=False))


SAMPLES = {
    "question": sample(TEXT, "Who?", answer_prefix="It is"),
    "chat": sample(messages=turns(TEXT, "Let us think. " + TEXT, f"  {TEXT}\n\n", "Ann")),
}


def render(one, tokenizer):
    given = list(one.messages or ())[:-1] or turns(one.context + one.question)
    text = tokenizer.apply_chat_template(list(given), tokenize=False, add_generation_prompt=True)
    return text + one.answer_prefix


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("name", SAME)
def test_encoded_ids_are_what_the_template_writes(using, name, kind):
    tokenizer = using(SAME[name])
    ids = encode(SAMPLES[kind], tokenizer).ids
    assert tokenizer.decode(ids) == render(SAMPLES[kind], tokenizer)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name, kind in product(OTHER, SAMPLES)
        if kind == "chat" or name not in ("the last alone", "reversed")  # one message is as it was
    ],
)
def test_a_template_that_writes_something_else_is_refused(using, name, kind, one_line):
    tokenizer = using(OTHER[name])
    with one_line(ModelError, match="the chat template of"):
        encode(SAMPLES[kind], tokenizer)
    given = list(turns(TEXT))  # without boundaries inside, its text is taken as it is
    made = tokenizer.apply_chat_template(given, tokenize=True, return_dict=True)
    assert context_ids(given, tokenizer) == made["input_ids"]


def test_a_text_that_a_template_leaves_alone_is_fed(using):
    tokenizer = using(OTHER["less on a word"])
    one = sample("Some text.", "Who?")
    assert tokenizer.decode(encode(one, tokenizer).ids) == render(one, tokenizer)
    with pytest.raises(ChangedTextError, match="changes the text of sample s"):
        encode(SAMPLES["question"], tokenizer)


def test_rows_whose_text_is_changed_are_left_out(using, tmp_path, jsonl):
    tokenizer = using(OTHER["less on a word"])
    chats = [turns(text, "Yes.", text, "No.") for text in (TEXT, "Is it? " * 90, TEXT)]
    questions = [{"question": text, "answer": "x"} for text in ("Say, let us see.", "And now?")]
    for name, rows in (("chats", [{"messages": each} for each in chats]), ("asked", questions)):
        data = jsonl(tmp_path / f"{name}.jsonl", *rows)
        settings = TaskSettings(split="all", count=9, length=900, seed=0)
        source = row_samples(data, settings, tokenizer, flag="data")
        assert "has text that the chat template changes" in source.notes[0]
        assert len(source) == 1
        assert tokenizer.decode(encode(source[0], tokenizer).ids) == render(source[0], tokenizer)


@pytest.fixture(scope="module")
def model(model_folder):
    return load_model(str(model_folder))[0]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        (PLAIN + "{{ '\\ud800' }}", "surrogates not allowed"),
        ("{{ raise_exception('one\\ntwo') }}", "one"),
        (None, "is missing: give texts"),
    ],
)
def test_templates_that_fail_are_one_line(model, using, template, said, one_line):
    with one_line(ModelError, match=f"the chat template of .*{said}"):
        kvp.compress(model, using(template), turns(TEXT), "knorm", 32)


HALF = "half of a surrogate pair"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\ud800" + TEXT, HALF),
        (turns(TEXT + "\udfff"), HALF),
        ([{"role": "us\ud800er", "content": TEXT}], HALF),
        ([{"role": None, "content": TEXT}], "'role' of message 1 is of type NoneType"),
        ([{"role": " ", "content": TEXT}], "'role' of message 1 is empty"),
        ([*turns(TEXT), {"role": 5, "content": TEXT}], "'role' of message 2 is of type int"),
        ([{"role": "user", "content": [{"type": "text"}]}], "'content' of message 1"),
        ([{"role": "user", "content": TEXT, "name": 3}], "'name' of message 1"),
        (["user"], "message 1 is of type str"),
        ([], "messages are a list"),
        ({"role": "user", "content": TEXT}, "messages are a list"),
    ],
    ids=range(11),
)
def test_impossible_texts_and_messages_are_refused(model, using, text, said, one_line):
    with one_line(UsageError, match=said):
        kvp.compress(model, using(PLAIN), text, "knorm", 32)


@pytest.mark.parametrize("template", [PLAIN, None], ids=["template", "plain"])
def test_impossible_samples_are_refused(using, template, one_line):
    half, tokenizer = "a\ud800", using(template)
    for one in (
        sample(half, "b"), sample("a", "b", answer_prefix=half), sample(half),
        sample("a", "b", reply=half), sample(messages=turns("a", half)), sample(messages=()),
        sample(messages=turns("a")), sample(messages=[{"role": None}, *turns("a", "b")]),
    ):  # fmt: skip
        with one_line(KvpError):
            encode(one, tokenizer)
