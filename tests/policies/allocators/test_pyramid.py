"""PyramidKV: bounds; `tests/golden` has the line."""

from policies.registry import make_allocator


def per_layer(spec, request):
    counts = make_allocator(spec).allocate(request)
    assert (counts == counts[:, :1]).all()  # all heads of a layer equally
    return counts[:, 0].tolist()


def test_the_protected_tokens_of_high_layers_are_paid_for_by_the_others(layers_of):
    # The line of B = 32 over 5 layers: 70.4, 55.2, 40, 24.8, 9.6. The highest is raised to 20; the
    # others share 180 in proportion to 190.4.
    counts = per_layer("pyramid", layers_of(5, 40, 500, floor=20))
    assert counts == [67, 52, 38, 23, 20]


def test_never_more_than_the_prompt_is_allocated(layers_of):
    # B = 52, high = 101.4 but at most 60 - 8 = 52: nothing is left of the pyramid.
    assert per_layer("pyramid", layers_of(4, 60, 60)) == [60] * 4
    # B = 42: high 52, low 32, and 8 for each.
    assert per_layer("pyramid", layers_of(3, 50, 60)) == [60, 50, 40]


def test_budgets_within_the_window_and_single_layers(layers_of):
    assert per_layer("pyramid", layers_of(1, 64, 900)) == [64]
    assert per_layer("pyramid", layers_of(3, 8, 900)) == [8, 8, 8]
    assert per_layer("pyramid", layers_of(3, 5, 900)) == [5, 5, 5]
