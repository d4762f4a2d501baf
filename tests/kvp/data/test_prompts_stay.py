"""A seed gives the same prompts in every version, by whose ids and digests results are extended."""

from dataclasses import replace

import pytest

from kvp.data.task import TaskSettings
from kvp.data.tasks import build_samples

DIGESTS = {
    "chat": ("357749bb66057338", 128),
    "cwe": ("78cabf7d9c869c63", 120),
    "fwe": ("77ca4e43e84f95ec", 50),
    "niah_heatmap": ("49b124e16c99ca8f", 50),
    "niah_multikey_1": ("e6f027c3fab5fd5e", 128),
    "niah_multikey_2": ("ad279fdf3098d0b5", 128),
    "niah_multikey_3": ("55363447c3dc0fca", 128),
    "niah_multiquery": ("22831b71410e1943", 128),
    "niah_multivalue": ("91ce288c184a6d51", 128),
    "niah_single_1": ("b770f02667f7f86a", 128),
    "niah_single_2": ("36e55b532c069dab", 128),
    "niah_single_3": ("bf61ed4397edf5ce", 128),
    "scbench_hashhop": ("10c9072f6283da83", 150),
    "scbench_kv": ("b20c9f8fc80781ed", 150),
    "scbench_many_shot": ("52a674a21ef8d1a9", 10),
    "scbench_mf": ("f8569c5c6e2834c3", 5),
    "vt": ("72bf19187bffc046", 30),
    "vt_0shot": ("caaca79582bf8fac", 30),
}
"""Of the first prompt of 1,900 bytes of the validation split, seed 0, and its new tokens."""


@pytest.mark.parametrize("task", DIGESTS)
def test_prompts_of_a_seed_stay_the_same(plain_tokenizer, task):
    settings = TaskSettings(split="validation", count=2, seed=0, length=1900)
    sample, other = build_samples(task, settings, plain_tokenizer)
    assert [sample] == list(build_samples(task, replace(settings, count=1), plain_tokenizer))
    assert sample.digest != other.digest
    assert sample.id.partition("@")[0] == f"{task}/validation/0/0"
    assert (sample.digest, sample.max_new_tokens) == DIGESTS[task]
