from trace_collect.config import CollectConfig


def test_lists_and_counts():
    config = CollectConfig(out="x", tasks=" vt, fwe,,vt ", train=3, validation=2, test=1, length=50)
    assert config.task_list == ("vt", "fwe")
    assert config.counts == {"train": 3, "validation": 2, "test": 1}
    assert (config.sequences, config.max_tokens) == (6, 178)
