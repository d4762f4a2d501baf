"""kvp eval in several processes, as torchrun and Slurm start them, writes what one process does."""

import random
import signal

import pytest

from kvp.program.table import report

pytestmark = pytest.mark.slow
METHODS = "full,kvp,random,snapkv,oracle,knorm+ada"
EVALUATIONS = 16
"""4 prompts of 2 tasks, 2 protocols."""


@pytest.fixture(scope="module")
def evaluations(model_folder, tiny_policy, fork_server):
    """Starts small runs of kvp eval."""
    settings = {
        "model": model_folder, "policies": tiny_policy, "methods": METHODS, "prompts": 4,
        "tasks": "niah_single_1,chat", "budgets": "12.5%,25%", "length": 300,
        "timing_prompts": 1, "max_new_tokens": 6,
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in settings.items()]
    return fork_server("eval", *flags, modules=("eval.run",), model=model_folder)


@pytest.fixture(scope="module")
def whole(evaluations, tmp_path_factory):
    """The results folder of one process."""
    out = tmp_path_factory.mktemp("alone") / "results"
    assert evaluations.end(evaluations.start(out, {})) == 0, evaluations.errors.read_text()
    return out


def test_a_killed_process_is_started_again(
    evaluations, whole, tmp_path, run_until, launchers, assert_same_results
):
    ends, seen = [], []
    for seed, launcher in enumerate(("torchrun", "array")):
        draw, out = random.Random(seed), tmp_path / f"out{seed}"
        first, second = launchers[launcher]
        killed = evaluations.start(out, first)
        other = evaluations.start(out, second) if seed else 0
        wanted = draw.randint(0, EVALUATIONS // 2 - 2)
        run_until(killed, lambda out=out, wanted=wanted: _parts(out) >= wanted)
        ends.append(evaluations.kill(killed, after=draw.uniform(0, 0.05)))
        seen.append(_parts(out))
        other = other or evaluations.start(out, second)
        assert evaluations.end(other) == 0, evaluations.errors.read_text()
        # Alone and for all that is missing, or as one of the two.
        again = evaluations.start(out, first if seed else {})
        assert evaluations.end(again) == 0, evaluations.errors.read_text()
        assert_same_results(out, whole)
    assert set(ends) <= {signal.SIGKILL, 0}
    assert signal.SIGKILL in ends
    assert any(0 < parts < EVALUATIONS for parts in seen), "no kill fell between two prompts"


def _parts(out):
    return len(list((out / "rows").glob("*.jsonl")))


def test_a_process_killed_while_it_joins_is_started_again(
    evaluations, whole, tmp_path, run_until, launchers, assert_same_results
):
    out, (first, second) = tmp_path / "out", launchers["torchrun"]
    assert evaluations.end(evaluations.start(out, first)) == 0
    assert not (out / "rows.jsonl").exists()
    assert report([str(out)]) == 0  # of what is there
    (out / "report.html").unlink()  # in the folder itself, not in the copy it was made from
    killed = evaluations.start(out, second)
    run_until(killed, (out / "rows.jsonl").exists)
    evaluations.kill(killed)
    for environment in (first, second):  # they find all rows there, and so does a late one
        joined = (out / "rows.jsonl").read_bytes()
        assert evaluations.end(evaluations.start(out, environment)) == 0
        assert_same_results(out, whole)
        assert (out / "rows.jsonl").read_bytes() == joined
