"""Tasks by name: the built-in ones, and a user's own in three ways."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvp.artifacts.manifest import sha256_file
from kvp.data.sources import data_identity, open_source
from kvp.data.task import TaskSettings
from kvp.data.tasks import build_samples, expand_tasks, find_task, naming_tasks
from kvp.errors import UsageError

MODULE = """
from dataclasses import dataclass, replace
from itertools import count
from kvp.data.task import blank_sample

@dataclass(frozen=True)
class Reversed:
    name: str = "reversed"

    def build(self, settings, tokenizer):
        return [
            replace(blank_sample(settings, self.name, str(n)), context=f"{n} ", question="Back?",
                    references=(str(n)[::-1],), metric="all")
            for n in range(settings.count)
        ]

    def score(self, sample, answer):
        return float(sample.references[0] in answer)

class Endless(Reversed):
    def build(self, settings, tokenizer):
        for n in count():  # of its own accord it never ends
            yield replace(blank_sample(settings, self.name, str(n)), context="c", question="q")

class Faulty(Reversed):
    def build(self, settings, tokenizer):
        faults = [("references", "123"), ("metric", "al"), ("task", "vt"), ("split", "foo"),
                  ("token_ids", (3, 10**6)), ("labels", {"depth": [1]}), ("context", "c" * 500)]
        blank = replace(blank_sample(settings, self.name, ""), question="q")
        yield replace(blank, **dict([faults[settings.seed]])) if settings.seed < 7 else "text"

class Leaves:
    def __init__(self):
        raise SystemExit(0)

thing = 3
taken = Reversed('vt')
"""


SETTINGS = TaskSettings(length=100)


@pytest.fixture
def module(own_module):
    return own_module("kvp_test_tasks", MODULE)


def test_ruler_means_all_ruler_tasks():
    names = expand_tasks(["ruler", "vt", "chat"])
    assert len(names) == 13 + 1
    assert {"qa_1", "qa_2"} <= set(names)
    assert "vt_0shot" not in names
    assert names[-1] == "chat"


def test_a_task_by_its_module(module, tokenizer):
    name = f"{module}:Reversed"
    assert expand_tasks([name]) == (name,)
    own = replace(SETTINGS, data="ruler", tasks=(name,), count=3)
    source = open_source(own, tokenizer)
    assert [sample.context for sample in source] == ["0 ", "1 ", "2 "]
    assert find_task(name).score(source[1], "it is 1") == 1
    assert find_task(name) is find_task(name)  # what it notes when it builds is there later
    identity = data_identity(own, [name, "vt"])
    assert identity["tasks"] == ["reversed", "vt"]
    file = sys.modules[module].__file__
    assert identity["code"] == {f"{module}.py": sha256_file(Path(file))}
    assert "code" not in data_identity(own, ["vt"])
    said = {"Leaves": "cannot be made", "thing": "a task has a name, build"}
    for unusable, text in {**said, "taken": "task 'vt': kvp has its own of this name"}.items():
        with pytest.raises(UsageError, match=text):
            find_task(f"{module}:{unusable}")


def test_a_task_from_python(module):
    mine = find_task(f"{module}:Reversed")
    with naming_tasks(["chat", mine]) as names:
        assert names == "chat,reversed"
        assert find_task("reversed") is mine
        with pytest.raises(UsageError, match="two tasks are called 'reversed': rename one"):
            expand_tasks(["reversed", f"{module}:Reversed"])
    with pytest.raises(UsageError, match="unknown task 'reversed'"):
        find_task("reversed")  # the objects of one call are not those of the next
    for given, message in (
        ([replace(mine, name="vt")], "task 'vt': kvp has its own of this name"),
        ([mine, replace(mine)], "two tasks are called 'reversed': rename one"),
    ):
        with pytest.raises(UsageError, match=message), naming_tasks(given):
            pass


def test_a_task_may_be_a_generator_and_gives_as_many_samples_as_requested(module, tokenizer):
    tasks = (f"{module}:Endless", "chat")
    settings = TaskSettings(data="ruler", tasks=tasks, split="test", count=5, length=400)
    source = open_source(settings, tokenizer)
    assert [sample.task for sample in source] == ["reversed", "chat"] * 2 + ["reversed"]
    assert source[2].id == "reversed/test/0/1"


def test_a_task_that_fails_is_named(module, tokenizer):
    said = [
        "a sample: references must be a valid tuple, got '123'",
        "sample whose metric is 'al'",
        "a sample whose task is 'vt', not",
        "a sample whose split is 'foo', not train or vali",
        "token 1000000, not of 0 to",
        "labels must be .*, got {'depth'",
        "too long a prompt: r",
    ]
    for seed, text in enumerate([*said, "'text', not"]):
        with pytest.raises(UsageError, match=f"--tasks {module}:Faulty: .*{text}"):
            build_samples(f"{module}:Faulty", replace(SETTINGS, seed=seed), tokenizer)
