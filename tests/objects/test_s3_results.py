"""kvp eval onto S3, by one process and by several, also killed: the results that a disk gets."""

import random
import signal

import pytest

from kvp.artifacts.files import copy_files
from kvp.program.table import report

KILLS = 4


@pytest.fixture(scope="module")
def evaluations(model_folder, trained, fork_server):
    """Starts small runs of kvp eval."""
    settings = {
        "model": model_folder, "methods": "full,kvp,random,snapkv", "prompts": 4,
        "tasks": "niah_single_1", "budgets": "12.5%,25%", "length": 300,
        "timing_prompts": 1, "max_new_tokens": 3,
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in settings.items()]
    return fork_server("eval", *flags, modules=("eval.run", "obstore"), model=model_folder)


@pytest.fixture(scope="module")
def whole(evaluations, trained, tmp_path_factory):
    """The results folder that one process writes to a disk."""
    out = tmp_path_factory.mktemp("alone") / "results"
    run = evaluations.start(out, {}, "--policies", str(trained))
    assert evaluations.end(run) == 0, evaluations.errors.read_text()
    return out


@pytest.fixture
def policy(trained, prefix):
    """The policy on S3."""
    copy_files(
        trained, prefix / "policy", [path.name for path in trained.iterdir() if path.is_file()]
    )
    return prefix / "policy"


@pytest.mark.parametrize("launcher", ["one", "array"])
def test_evaluated_onto_s3_as_onto_a_disk(
    evaluations, whole, policy, s3_environment, tmp_path, launchers, launcher, assert_same_results
):
    out = policy.parent / "results"
    given = s3_environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    flags = ["--policies", str(policy)]
    started = [evaluations.start(out, given | one, *flags) for one in launchers[launcher]]
    ends = [evaluations.end(one) for one in started]
    assert ends == [0] * len(started), evaluations.errors.read_text()
    assert_same_results(out, whole, but=("out", "policies"))
    again = evaluations.start(out, given, *flags)
    assert evaluations.end(again) == 0
    assert_same_results(out, whole, but=("out", "policies"))


@pytest.mark.slow
def test_killed_evaluations_are_started_again(
    evaluations, whole, policy, s3_environment, watch, tmp_path, launchers, assert_same_results
):
    ends, draw = [], random.Random(0)
    given = s3_environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    for attempt in range(KILLS):
        out = policy.parent / f"results{attempt // 2}"
        wait = watch(out)
        first, second = launchers[("torchrun", "array")[attempt // 2 % 2]]
        killed = evaluations.start(out, given | first, "--policies", str(policy))
        wait(draw.randint(1, 4), killed)  # fewer than one of two writes
        ends.append(evaluations.kill(killed, after=draw.uniform(0, 0.05)))
        if attempt % 2:
            for environment in (second, first):
                other = evaluations.start(out, given | environment, "--policies", str(policy))
                assert evaluations.end(other) == 0, evaluations.errors.read_text()
            assert_same_results(out, whole, but=("out", "policies"))
    assert set(ends) <= {signal.SIGKILL, 0}
    assert signal.SIGKILL in ends


def test_a_report_is_made_of_results_on_s3(whole, prefix, tmp_path, capsys):
    out = prefix / "results"
    copy_files(whole, out, [path.name for path in whole.iterdir()])
    assert report([str(out)]) == 2
    assert "--out is missing: a page cannot be written to s3://" in capsys.readouterr().err
    page = tmp_path / "page.html"
    assert report([str(out), "--out", str(page)]) == 0
    assert page.stat().st_size > 10_000
    assert report([str(prefix / "nothing"), "--out", str(page)]) == 2
    assert "nothing does not exist; is this a results folder?" in capsys.readouterr().err
