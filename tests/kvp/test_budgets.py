import pytest

from kvp.budgets import parse_budget, parse_budgets
from kvp.errors import UsageError


@pytest.mark.parametrize(
    ("text", "cached", "tokens"),
    [
        ("128", 512, 128),
        ("128", 64, 128),  # larger than the cache: nothing is evicted, the number stays
        ("12.5%", 508, 64),  # 63.5 rounds up
        ("12.5%", 507, 63),  # 63.375
        ("50%", 5, 3),  # 2.5 rounds up, not to even
        ("0.1%", 100, 1),  # at least one
        ("100%", 77, 77),
        (" 19 % ", 100, 19),
    ],
)
def test_the_tokens_of_a_budget(text, cached, tokens):
    assert parse_budget(text).tokens(cached) == tokens


@pytest.mark.parametrize(
    "text", ["", "many", "0", "-3", "1.5", "0%", "101%", "-5%", "%", "nan%", "inf%"]
)
def test_bad_budgets_are_one_line_errors(text):
    with pytest.raises(UsageError, match="budget"):
        parse_budget(text)


def test_spelling_and_lists():
    assert [str(one) for one in parse_budgets("128,12.50%,050%")] == ["128", "12.5%", "50%"]
    expected = (parse_budget("64"), parse_budget("12.5%"))
    assert parse_budgets("64, 12.5%,64") == expected
    assert parse_budgets([64, 64.0, "12.5%"]) == expected
    with pytest.raises(UsageError, match="no budget"):
        parse_budgets("")


@pytest.mark.parametrize(
    ("share", "percent"),
    [("0.25", "25%"), (0.5, "50%"), (".125", "12.5%"), (0.07, "7%"), (1.0, "100%")],
)
def test_a_share_is_refused_with_the_percentage_to_write(share, percent):
    with pytest.raises(UsageError, match=f'write a share of the cache as "{percent}"'):
        parse_budget(share)
