"""Ranks to colours."""

from __future__ import annotations

from typing import Any

import pytest

from eval.report.draw_png import lay_out
from eval.report.tokens import protected_ranges, rank_color, token_map


def test_ranks_become_percent_below_and_sixteen_levels(tokens: dict[str, Any]) -> None:
    shown = token_map(tokens, ("kvp", "oracle", "knorm"))
    assert shown.methods == ("kvp/seed0", "oracle", "knorm")
    oracle, knorm = shown.means[1], shown.means[2]
    assert (oracle[0], oracle[-1]) == (100.0, 0.0)
    assert knorm == pytest.approx((50.0,) * 16)
    assert shown.heads == ("mean over heads", "layer 0, head 0", "layer 0, head 1")
    assert shown.levels["oracle"] == ("fedcba9876543210",) * 3
    assert shown.levels["knorm"] == ("8" * 16, "fedcba9876543210", "0123456789abcdef")
    assert shown.left_out == 0


def test_large_maps_leave_heads_out_evenly(tokens: dict[str, Any]) -> None:
    tokens["methods"] = {"knorm": [list(range(16))] * 9}
    tokens["geometry"]["kv_heads"] = 1
    shown = token_map(tokens, (), maximum_digits=16 * 4)
    assert shown.heads[1:] == ("layer 0, head 0", "layer 4, head 0", "layer 8, head 0")
    assert shown.left_out == 6


@pytest.mark.parametrize(
    ("tokens_", "sinks", "recents", "ranges"),
    [
        (16, 1, 2, ((0, 1), (14, 16))),
        (16, 0, 2, ((14, 16),)),
        (16, 4, 0, ((0, 4),)),
        (16, 0, 0, ()),
        (5, 4, 16, ((0, 5),)),
    ],
)
def test_protected_tokens_are_two_ends(
    tokens_: int, sinks: int, recents: int, ranges: tuple[tuple[int, int], ...]
) -> None:
    assert protected_ranges(tokens_, sinks, recents) == ranges


def test_colours_run_from_white_to_the_darkest() -> None:
    assert (rank_color(0), rank_color(15)) == ("#ffffff", "#08306b")
    brightness = [sum(int(rank_color(n)[i : i + 2], 16) for i in (1, 3, 5)) for n in range(16)]
    assert brightness == sorted(brightness, reverse=True)


def test_text_is_laid_out_on_a_grid() -> None:
    pieces = list(lay_out(["ab", " cd", "x\ny", "", "longest"], 5))
    assert pieces == [
        (0, 0, 0, "ab"),
        (1, 0, 2, " cd"),
        (2, 1, 0, "x"),
        (2, 2, 0, "y"),
        (3, 2, 1, "·"),
        (4, 3, 0, "longe"),
        (4, 4, 0, "st"),
    ]
