"""How many files are on the stack when something is done with a prompt, a trace and a budget.

Every walk has turning points: the model runs, a method scores, tokens are chosen, a loss is
computed, a row is written. Counted are the product's files that have a function on the stack when a
turning point is reached, from where the walk begins. The turning point's own file is where one
arrives; it is counted only where it also leads on. Files of functions that were called before and
have returned are not on the stack, so a reader opens more. A program's code is never called by the
packages below it.
"""

import inspect
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import eval.run
import trace_collect.run
import train.run
from eval.config import EvalConfig
from eval.results.records import RecordFile
from kvp.hf import evicting, load_model
from kvp.hf.cache_layers import selected_layer
from kvp.metrics import lost_importance
from kvp.ranking import Selection
from kvp.reward import expected_cost
from kvp.store import TraceReader
from policies.policy_files import save_policy
from policies.ranker import HeadRankers
from policies.snapkv import SnapKV
from trace_collect.config import CollectConfig
from train.config import TrainConfig

ROOT = Path(__file__).parent.parent
ORDER = {"kvp": 0, "policies": 0, "trace_collect": 1, "train": 1, "eval": 1}
"""Packages of the product; 1: programs."""


@contextmanager
def walk(begin, *turning_points):
    """The files that lead from `begin` to the turning points, all of which must be reached."""
    unseen = {inspect.unwrap(point).__code__ for point in turning_points}
    codes, files = frozenset(unseen), set[str]()
    first = inspect.unwrap(begin).__code__

    def follow(frame, event, _):
        if event != "call" or frame.f_code not in codes:
            return
        names = []
        above = frame
        while above is not None and above.f_code is not first:
            above = above.f_back
            path = Path(above.f_code.co_filename if above else "")
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ORDER:
                names.append(str(path.relative_to(ROOT)))
        if above is not None:
            unseen.discard(frame.f_code)
            files.update(names)
            places = [ORDER[name.partition("/")[0]] for name in names]
            assert places == sorted(places), f"a program is called from below: {names}"

    sys.setprofile(follow)
    try:
        yield files
    finally:
        sys.setprofile(None)
    assert not unseen


@pytest.fixture(scope="module")
def model():
    return load_model("nano")[0]


def test_a_prompt_meets_six_files(model, tmp_path):
    """Of kvp eval, from the prepared work to a row: two of eval, four of kvp."""
    config = EvalConfig(
        out=str(tmp_path / "results"), model="nano", methods="snapkv", tasks="niah_single_1",
        prompts=1, length=200, budgets="25%", max_new_tokens=2, timing_prompts=0,
    )  # fmt: skip
    forward = type(model).forward
    ends = (forward, SnapKV.score, Selection.tokens, selected_layer, RecordFile.append)
    with walk(eval.run.evaluate_all, *ends) as files:
        eval.run.run(config)
    assert len(files) <= 6, sorted(files)


def test_a_budget_meets_four_files(model):
    """Of `evicting`, from `generate` to the tokens that stay."""
    ids = torch.arange(1, 101)[None]
    ends = (type(model).forward, SnapKV.score, Selection.tokens, selected_layer)
    with walk(type(model).generate, *ends) as files, evicting(model, SnapKV(), "25%"):
        model.generate(ids, max_new_tokens=2, do_sample=False)
    assert len(files) <= 4, sorted(files)


def test_a_trace_meets_eight_files(tmp_path):
    """Of kvp train, from its settings to saved weights.

    Six lead to the weights, and two measure what they are worth: validation, which also chooses
    among them, and calibration, which comes after the last step.
    """
    traces, policy = str(tmp_path / "traces"), str(tmp_path / "policy")
    trace_collect.run.run(
        CollectConfig(
            out=traces, model="nano", tasks="niah_single_1", length=200, train=2, validation=1,
            answers="reference",
        )
    )  # fmt: skip
    config = TrainConfig(
        traces=traces, out=policy, steps=2, contexts=1, hidden=16, permutations=4,
        validation_contexts=1, objective="exact",
    )  # fmt: skip
    ends = (TraceReader.trace, HeadRankers.forward, expected_cost, lost_importance, save_policy)
    with walk(train.run.run, *ends) as files:
        train.run.run(config)
    assert len(files) <= 8, sorted(files)
