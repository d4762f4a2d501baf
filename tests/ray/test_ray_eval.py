"""kvp eval with two workers of Ray: one results folder, as by one process."""

import shutil

import pytest

from kvp import nano

pytestmark = pytest.mark.ray


def test_two_workers_evaluate_what_one_process_does(
    cluster, end, whole_results, tmp_path, assert_same_results
):
    # With a Ray of its own: how most people will start it.
    program = cluster.evaluate(tmp_path / "out", own=True)
    code, output, errors = end(program)
    assert code == 0, errors
    assert "accuracy, %" in output
    assert "ray" not in errors.replace("workers of Ray", "").lower().replace(str(tmp_path), "")
    assert_same_results(tmp_path / "out", whole_results)


def test_errors_of_workers_are_one_line(cluster, end, tmp_path):
    # Weights are read by workers alone.
    model = shutil.copytree(nano.path(), tmp_path / "model")
    for file in model.glob("*.safetensors"):
        file.unlink()
    flags = ("--model", model, "--train=1", "--out", tmp_path / "store")
    code, _, errors = end(cluster.start("collect", *flags))
    assert code == 2
    assert errors.splitlines()[-1].startswith(f"kvp collect: error: --model {model}: ")
    assert "Traceback" not in errors


def test_a_worker_that_ray_has_no_room_for_is_refused(cluster, end, tmp_path):
    flags = ("--device=cuda", "--train=1", "--out", tmp_path / "store")
    code, _, errors = end(cluster.start("collect", *flags))
    assert code == 2
    assert "Ray has 2 CPUs and 0 GPUs, and each worker takes 1 and 1" in errors.splitlines()[-1]
