"""What a seed gives stays: results are extended by the ids and digests of their prompts."""

from dataclasses import replace

import pytest

from kvp.data.task import TaskSettings
from kvp.data.tasks import build_samples

DIGESTS = {
    "chat": "357749bb66057338",
    "cwe": "78cabf7d9c869c63",
    "fwe": "77ca4e43e84f95ec",
    "niah_heatmap": "49b124e16c99ca8f",
    "niah_multikey_1": "e6f027c3fab5fd5e",
    "niah_multikey_2": "ad279fdf3098d0b5",
    "niah_multikey_3": "55363447c3dc0fca",
    "niah_multiquery": "22831b71410e1943",
    "niah_multivalue": "91ce288c184a6d51",
    "niah_single_1": "b770f02667f7f86a",
    "niah_single_2": "36e55b532c069dab",
    "niah_single_3": "bf61ed4397edf5ce",
    "scbench_hashhop": "10c9072f6283da83",
    "scbench_kv": "b20c9f8fc80781ed",
    "scbench_many_shot": "52a674a21ef8d1a9",
    "scbench_mf": "f8569c5c6e2834c3",
    "vt": "72bf19187bffc046",
    "vt_0shot": "caaca79582bf8fac",
}
"""Of the first prompt of 1,900 bytes of the validation split, seed 0."""


@pytest.mark.parametrize("task", DIGESTS)
def test_prompts_stay(plain_tokenizer, task):
    settings = TaskSettings(split="validation", count=2, seed=0, length=1900)
    sample, other = build_samples(task, settings, plain_tokenizer)
    assert [sample] == list(build_samples(task, replace(settings, count=1), plain_tokenizer))
    assert sample.digest != other.digest
    assert sample.id.partition("@")[0] == f"{task}/validation/0/0"
    assert sample.digest == DIGESTS[task]
