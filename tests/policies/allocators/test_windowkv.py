"""WindowKV's budgets: bounds; `tests/golden` has both rules."""

from policies.registry import make_allocator


def test_a_shorter_last_group_keeps_the_sum(layers_of):
    request = layers_of(10, 90, 4000)
    counts = make_allocator("windowkv(group=4)").allocate(request)[:, 0]
    # Per layer 154.29, 90 and 25.71, for 4, 4 and 2 layers 1028.6 in all; scaled to 900 these are
    # 135, 78.75 and 22.5, and four are rounded up.
    assert counts.tolist() == [135] * 4 + [79] * 4 + [22] * 2
    assert int(counts.sum()) == 900


def test_what_does_not_fit_goes_to_the_other_groups(layers_of):
    counts = make_allocator("windowkv(group=1)").allocate(layers_of(4, 60, 80))[:, 0].tolist()
    # Line 115.7 78.6 41.4 4.3: two layers at all 80, the others share 80 as 41.4 to 4.3:
    # 72.5 and 7.5.
    assert counts == [80, 80, 73, 7]
