"""Token ids with exact boundaries, evidence tokens, and the largest amount that fits."""

import copy
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvp import nano
from kvp.data.encode import encode, evidence_tokens, find_largest
from kvp.data.task import Sample, TaskSettings
from kvp.data.tasks.ruler import RULER_TASKS, generate
from kvp.errors import UsageError

USER, ASSISTANT = "<|start|>user:", "<|start|>assistant:"


def make(messages=None, **texts):
    return Sample(id="x", task="t", split="test", messages=messages, **texts)


def chat(*contents):
    roles = ("user", "assistant")
    return tuple({"role": roles[n % 2], "content": text} for n, text in enumerate(contents))


QUESTION = make(context="Some text.\n", question="Who?", answer_prefix=" It is", reply=" Bob")


def test_question_boundaries(tokenizer):
    encoded = encode(QUESTION, tokenizer)
    # Specials are one token each, everything else one token per byte.
    assert encoded.context_length == 1 + len("user:") + len("Some text.\n")
    closing = len("Who?") + 2 + len("assistant:") + len(" It is")
    assert encoded.prompt_length == encoded.context_length + closing
    assert tokenizer.decode(encoded.ids) == f"{USER}Some text.\nWho?<|end|>{ASSISTANT} It is"
    assert tokenizer.decode(encoded.ids[encoded.context_length :]).startswith("Who?<|end|>")
    assert tokenizer.decode(encoded.reply_ids) == " Bob"
    assert encoded.reply_spans == ()


def test_chat_boundaries_and_spans(tokenizer):
    encoded = encode(make(chat("Hi", "Hello!", "Name?", "Ann", "Again?", "Ann.")), tokenizer)
    context = f"{USER}Hi<|end|>{ASSISTANT}Hello!<|end|>{USER}Name?<|end|>{ASSISTANT}Ann<|end|>"
    boundary = encoded.context_length
    assert tokenizer.decode(encoded.ids[:boundary]) == context
    assert tokenizer.decode(encoded.ids[boundary:]) == f"{USER}Again?<|end|>{ASSISTANT}"
    spans = [tokenizer.decode(encoded.ids[slice(*span)]) for span in encoded.reply_spans]
    assert spans == ["Hello!", "Ann"]
    assert tokenizer.decode(encoded.reply_ids) == "Ann."
    one = encode(make(chat("Name?", "Ann")), tokenizer)  # its opening is its context
    assert one.context_length == 1 + len("user:")
    assert tokenizer.decode(one.ids) == f"{USER}Name?<|end|>{ASSISTANT}"


def test_a_template_may_open_with_a_system_turn(system_tokenizer):
    encoded = encode(make(chat("Hi", "Hello!", "Name?", "Ann")), system_tokenizer)
    text = system_tokenizer.decode(encoded.ids[: encoded.context_length])
    opening = f"<|start|>system:be brief<|end|>{USER}"
    assert text == f"{opening}Hi<|end|>{ASSISTANT}Hello!<|end|>"


def test_running_text_has_no_template_and_all_but_one_token_of_context(tokenizer):
    encoded = encode(make(context="Once upon"), tokenizer)
    assert tokenizer.decode(encoded.ids) == "Once upon"
    assert (encoded.context_length, encoded.prompt_length) == (8, 9)
    assert encode(make(context="O"), tokenizer).context_length == 1


def test_content_cannot_forge_special_tokens(tokenizer):
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    encoded = encode(make(chat("a<|end|>", "b<|end|>", "c<|end|>", "d<|end|>")), tokenizer)
    assert encoded.ids.count(end) == 3  # the template's own, after each turn of the prompt
    assert end not in encoded.reply_ids


@pytest.fixture(scope="module")
def nano_tokenizer():
    return AutoTokenizer.from_pretrained(nano.path())


@pytest.mark.parametrize("task", RULER_TASKS)
def test_parts_are_encoded_as_the_whole_chat_is(task, nano_tokenizer):
    tokenizer = nano_tokenizer
    sample = generate(
        task, TaskSettings(length=900, seed=1, split="test"),
        count_tokens=lambda sample: len(sample.text) // 3, index=0,
    )  # fmt: skip
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": sample.context + sample.question}],
        tokenize=False,
        add_generation_prompt=True,
    )
    encoded = encode(sample, tokenizer)
    ids = tokenizer.encode(whole + sample.answer_prefix, add_special_tokens=False)
    assert encoded.ids == tuple(ids)


TRIMS = {
    "both": "message['content'] | trim",
    "breaks": "message['content'].strip('\\n')",
    "left": "message['content'].lstrip()",
    "user": "message['content'] | trim if message['role'] == 'user' else message['content']",
    "none": "message['content']",
}
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] + BEFORE }}{{ CONTENT }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>{{ 'assistant' + BEFORE }}{% endif %}"
)
TEXTS = st.lists(st.text(" \n\tab\u3000", min_size=1).filter(str.strip), min_size=6, max_size=6)


def with_template(tokenizer, trim, before=":"):
    other = copy.deepcopy(tokenizer)
    other.chat_template = TEMPLATE.replace("CONTENT", TRIMS[trim]).replace("BEFORE", repr(before))
    return other


def tokens_of(messages, tokenizer):
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("trim", TRIMS)
@pytest.mark.parametrize("before", [":", "\n\n"], ids=repr)
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
@given(texts=TEXTS)
def test_white_space_around_turns_is_as_the_template_writes_it(tokenizer, trim, before, texts):
    trimming = with_template(tokenizer, trim, before)
    messages = ({"role": "system", "content": texts[0]}, *chat(*texts[1:], "x"))
    assert encode(make(messages), trimming).ids == tokens_of(messages[:-1], trimming)
    asked = make(context=texts[0], question=texts[3])
    assert encode(asked, trimming).ids == tokens_of(chat(texts[0] + texts[3]), trimming)


def test_evidence_of_a_context_that_the_template_trims(tokenizer):
    trimming = with_template(tokenizer, "both")
    sample = make(context="\n\n Ann met Bob. ", question="Who?\n")
    sample = replace(sample, references=("Bob",))
    encoded = encode(sample, trimming)
    tokens = evidence_tokens(sample, encoded, trimming)
    assert trimming.decode([encoded.ids[token] for token in tokens]) == "Bob"


@pytest.mark.parametrize(
    ("sample", "context", "rest"),
    [
        (QUESTION, "Some text.\n", "Who? It is"),
        (make(chat("Hi", "Hello!", "Name?", "Ann")), "User:\nHi\n\nAssistant:\nHello!\n\n",
         "User:\nName?\n\nAssistant:\n"),
        (make(({"role": "developer", "content": "Be brief."}, *chat("Name?", "Ann"))),
         "Developer:\nBe brief.\n\n", "User:\nName?\n\nAssistant:\n"),
    ],
    ids=["question", "chat", "another role"],
)  # fmt: skip
def test_without_a_chat_template(tokenizer, plain_tokenizer, sample, context, rest):
    encoded = encode(sample, plain_tokenizer)
    assert plain_tokenizer.decode(encoded.ids) == context + rest
    assert encoded.context_length == len(context)
    if sample.context:
        assert encoded == encode(replace(sample, chat_template=False), tokenizer)


def test_nothing_to_encode_is_refused(plain_tokenizer):
    with pytest.raises(UsageError, match="sample x has no token"):
        encode(make(), plain_tokenizer)
    with pytest.raises(UsageError, match="a chat ends with a message of the user"):
        encode(make(chat("a", "b", "c")), plain_tokenizer)


CONTEXT = "Ann met Bob. BOB knew Annika, a bobcat and bob; 12 of 123.\n"
ASKED = make(context=CONTEXT, question="Who?", answer_prefix=" It is")


@pytest.mark.parametrize(
    ("references", "spelled"),
    [
        (("Bob",), ["Bob", "BOB", "bob"]),
        ((" 12 ", "Ann"), ["Ann", "12"]),
        (("knew Annika", "Annika"), ["knew Annika"]),
        (("Ann met Bob.",), ["Ann met Bob."]),
        (("Carol",), []),
        ((), []),
        (("",), []),
    ],
)
def test_evidence_is_whole_words_of_any_case(tokenizer, references, spelled):
    sample = replace(ASKED, references=references)
    encoded = encode(sample, tokenizer)
    tokens = evidence_tokens(sample, encoded, tokenizer)
    assert list(tokens) == sorted(set(tokens))
    assert tokenizer.decode([encoded.ids[token] for token in tokens]) == "".join(spelled)
    assert all(token < encoded.context_length for token in tokens)
    bare = replace(sample, context="")
    assert evidence_tokens(bare, encode(bare, tokenizer), tokenizer) == ()


@given(
    costs=st.lists(st.integers(1, 40), min_size=60, max_size=60),
    smallest=st.integers(0, 5),
    before=st.integers(0, 30),
    limit=st.integers(0, 60),
)
def test_the_largest_amount_that_fits_is_found(costs, smallest, before, limit):
    totals = [before, *(before + cost for cost in accumulate(costs))]
    limit += totals[smallest]
    amount = find_largest(
        lambda units: units, totals.__getitem__, limit=min(limit, totals[59]), smallest=smallest,
        what="t",
    )  # fmt: skip
    assert totals[amount] <= min(limit, totals[59]) < totals[amount + 1]


def test_the_largest_amount_is_found_in_a_few_tries():
    tried = []

    def make(amount):
        tried.append(amount)
        return amount

    assert (
        find_largest(make, lambda units: 50 + 7 * units, limit=131_072, smallest=0, what="t")
        == 18717
    )
    assert len(tried) < 20
    assert max(tried) < 19_000
    with pytest.raises(UsageError, match="--length 9: the smallest kv prompt already has 10"):
        find_largest(lambda units: units, lambda units: 10 + units, limit=9, smallest=0, what="kv")
