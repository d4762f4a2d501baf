"""kvp collect onto S3, by one process and by several, also killed: the store that a disk gets."""

import pytest


@pytest.fixture(scope="module")
def collectors(model_folder, fork_server):
    """Runs of kvp collect with the flags of `collected`."""
    flags = f"--model {model_folder} --length 300 --train 6 --validation 2 --max-new-tokens 2"
    return fork_server(
        "collect", *flags.split(), "--tasks", "niah_single_1",
        modules=("trace_collect.run", "obstore"), model=model_folder,
    )  # fmt: skip


@pytest.mark.parametrize("launcher", ["one", "torchrun"])
def test_collected_onto_s3_as_onto_a_disk(
    collectors, collected, prefix, s3_environment, launchers, launcher, assert_same_files
):
    started = [collectors.start(prefix, s3_environment | one) for one in launchers[launcher]]
    ends = [collectors.end(collector) for collector in started]
    assert ends == [0] * len(started), collectors.errors.read_text()
    assert_same_files(prefix, collected)
