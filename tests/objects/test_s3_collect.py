"""kvp collect onto S3, by one process and by several, also killed: the store that a disk gets."""

import pytest

from kvp.store import TraceReader


@pytest.fixture(scope="module")
def collectors(collecting, model_folder, fork_server):
    """Starts runs of kvp collect with the flags of `collected`."""
    modules = ("trace_collect.run", "obstore")
    return fork_server("collect", *collecting, modules=modules, model=model_folder)


@pytest.mark.parametrize("launcher", ["one", "torchrun"])
def test_collected_onto_s3_as_onto_a_disk(
    collectors, collected, prefix, s3_environment, launchers, launcher, assert_same_files
):
    started = [collectors.start(prefix, s3_environment | one) for one in launchers[launcher]]
    ends = [collectors.end(collector) for collector in started]
    assert ends == [0] * len(started), collectors.errors.read_text()
    assert_same_files(prefix, collected)
    reader = TraceReader(prefix)
    assert reader.complete
    assert reader.manifest["config"]["out"] == str(prefix)
