"""Sources of `--data`: tasks, generated chats, files and mixtures; and plans of collections."""

import re
from collections import Counter
from itertools import islice

import pytest

from kvp.data import sources
from kvp.data.encode import encode
from kvp.data.task import TaskSettings
from kvp.errors import UsageError


def make_settings(data="ruler", **changes):
    given = {"tasks": ("niah_single_2", "niah_multikey_2"), "count": 6, "seed": 1, "length": 1600}
    return TaskSettings(data=data, **(given | changes))


def open_data(tokenizer, data="ruler", **changes):
    return sources.open_source(make_settings(data, **changes), tokenizer)


@pytest.mark.parametrize("data", ["ruler", "chat"])
def test_a_sample_depends_on_its_index_alone(data, tokenizer):
    few, many = open_data(tokenizer, data, count=2), open_data(tokenizer, data, count=6)
    assert list(few) == [many[0], many[1]]
    assert len({sample.id for sample in many}) == len(many) == 6
    with pytest.raises(IndexError):
        many[6]
    assert open_data(tokenizer, data, seed=2)[0] != many[0]
    for sample in few:  # one more line or exchange would not fit
        assert 1350 < encode(sample, tokenizer).prompt_length <= 1600


def test_tasks_take_turns_and_a_task_alone_gives_the_same_samples(tokenizer):
    both = list(open_data(tokenizer, count=4))
    assert [sample.task for sample in both] == ["niah_single_2", "niah_multikey_2"] * 2
    assert list(open_data(tokenizer, tasks=("niah_multikey_2",), count=2)) == both[1::2]


def test_running_text_is_cut_before_a_word(tmp_path, tokenizer, jsonl):
    data = jsonl(tmp_path / "t.jsonl", *({"text": f"text{n} of several words"} for n in range(30)))
    pieces = list(open_data(tokenizer, data, length=16, count=99))
    assert pieces
    for sample in pieces:
        assert re.fullmatch(r"text\d+ of", sample.context)  # "several" ends at 16+
        assert sample.reply == " several words"
    whole = list(open_data(tokenizer, data, length=50, count=99))
    assert all(sample.context.endswith("words") for sample in whole)
    assert {(sample.metric, sample.reply, sample.messages) for sample in whole} == {
        ("none", "", None)
    }


def test_rows_too_long_are_left_out_and_counted(tmp_path, tokenizer, jsonl):
    rows = [
        {"context": f"{n:02d}" * (45 if n % 3 == 0 else 5), "question": "Q?"} for n in range(60)
    ]
    source = open_data(tokenizer, jsonl(tmp_path / "qa.jsonl", *rows), length=60, count=99)
    assert {len(sample.context) for sample in source} == {10}
    (note,) = source.notes
    assert re.search(r"train split: left out \d+ rows: line \d+ has \d+ prompt tokens, more", note)


def test_needles_that_do_not_fit_are_drawn_again(tokenizer):
    """The smallest prompts differ by the length of their key: some draws are too long."""
    roomy = open_data(tokenizer, tasks=("niah_single_1",), count=60, length=2000)
    for length in range(440, 800, 4):
        try:
            tight = list(open_data(tokenizer, tasks=("niah_single_1",), count=60, length=length))
        except UsageError:
            continue
        break
    assert len({sample.references for sample in tight}) == 60
    assert all(encode(sample, tokenizer).prompt_length <= length for sample in tight)
    pairs = zip(tight, roomy, strict=True)
    drawn_again = sum(one.references != other.references for one, other in pairs)
    assert 10 < drawn_again < 60


@pytest.fixture
def prose(tmp_path, jsonl):
    """A file with rows of running text."""
    rows = ({"text": f"Line {number} of a story. " * 12} for number in range(20))
    return jsonl(tmp_path / "prose.jsonl", *rows)


@pytest.mark.parametrize("weights", [(1, 1), (0.5, 0.3, 0.2), (7, 1), (1, 1e-6), (2, 3, 5, 1)])
def test_every_prefix_of_a_mixture_has_its_parts_by_weight(weights):
    order = list(islice(sources.interleave(weights), 200))
    for number in range(1, len(order) + 1):
        given = Counter(order[:number])
        for part, weight in enumerate(weights):
            assert abs(given[part] - number * weight / sum(weights)) < len(weights)
    assert order[0] == weights.index(max(weights))


def test_a_mixture_takes_samples_of_its_parts_by_weight(tokenizer, prose):
    data = f"ruler:0.5,chat:0.3,{prose}:0.2"
    mixed = list(open_data(tokenizer, data, count=10))
    tasks = Counter(sample.task for sample in mixed)
    assert tasks == {"niah_single_2": 3, "niah_multikey_2": 2, "chat": 3, "prose": 2}
    assert len({sample.id for sample in mixed}) == 10
    assert list(open_data(tokenizer, data, count=4)) == mixed[:4]
    alone = list(open_data(tokenizer, "chat", count=3))
    assert [sample for sample in mixed if sample.task == "chat"] == alone
    ended = open_data(tokenizer, f"chat:0.1,{prose}:0.9", count=100, length=200)
    assert 10 < len(ended) < 30
    (note,) = [note for note in ended.notes if "the mixture ends there" in note]
    assert note.startswith(f"--data {prose}: only ")


def test_the_plan_of_a_mixture_and_its_identity(tokenizer, prose):
    mixed = make_settings(f"ruler:1,{prose}:1", tasks=("niah_single_1",), length=900)
    digest = sources.data_identity(mixed, ())["digest"]
    assert digest == sources.data_identity(make_settings(prose), ())["digest"] is not None
    assert sources.data_identity(make_settings("ruler:1,chat:1"), ())["digest"] is None
    plan = sources.plan_collection(mixed, {"train": 4, "validation": 2}, tokenizer)
    assert plan.tasks == ("niah_single_1",)
    assert [sample.task for sample in plan] == ["niah_single_1", "prose"] * 3


def test_a_file_whose_name_has_a_comma_is_one_part(tmp_path):
    (tmp_path / "a,b:1").touch()
    assert list(sources.parts_of(str(tmp_path / "a,b:1"))) == [str(tmp_path / "a,b:1")]


@pytest.mark.parametrize(
    ("data", "changes", "message"),
    [
        ("ruler", {"tasks": ("niah_single_9",)}, "--tasks: unknown task 'niah_single_9'"),
        ("ruler", {"essays": "/no/such/file"}, "--essays /no/such/file: no such file or folder"),
        ("chat", {"length": 10}, "--length 10: the smallest chat already has"),
        ("none.jsonl", {}, "--data none.jsonl: no such file or folder"),
        ("ruler,chat:0.3", {}, "--data: ruler has no weight"),
        ("ruler:nan,chat:1", {}, "--data: ruler:nan has no weight"),
        ("chat:0.5,ruler:0.5,chat:0.5", {}, "--data: chat is named twice"),
        ("a/x.jsonl:1,b/x.jsonl:1", {}, "--data: two parts are called x.jsonl; rename"),
        # names of no data do not reach the hub
        (" ", {}, "--data is empty"),
        ("./nope", {}, "--data ./nope: no such file or folder"),
    ],
)
def test_requests_that_cannot_work(data, changes, message, tokenizer):
    with pytest.raises(UsageError, match=f"^{re.escape(message)}"):
        open_data(tokenizer, data, **changes)[0]


def test_generated_benchmarks_are_collected(tokenizer):
    request = make_settings(tasks=("scbench", "niah_heatmap"), length=1200)
    plan = sources.plan_collection(request, {"train": 10, "test": 2}, tokenizer)
    names = [sample.task for sample in plan]
    assert names[:5] == names[5:10] == list(plan.tasks)
    assert names[4] == "niah_heatmap"
    assert len(plan) == 12


def test_tasks_of_a_group_that_do_not_fit_are_left_out(tokenizer):
    fitting = sources.fitting_tasks(make_settings(tasks=("scbench",), length=500), tokenizer)
    assert "scbench_mf" in fitting
    assert "scbench_kv" not in fitting
    with pytest.raises(UsageError, match="--length 30: no task of scbench fits"):
        sources.fitting_tasks(make_settings(tasks=("scbench",), length=30), tokenizer)
    for task in ("longbench", "longbench_trec", "scbench_qa_eng", "data"):
        with pytest.raises(UsageError, match=f"--tasks {task} is a task of kvp eval"):
            sources.fitting_tasks(make_settings(tasks=(task,)), tokenizer)
