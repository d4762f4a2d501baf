"""One table: what is checked for each scorer of the registry. A new method is a new entry."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from reference import contrast, future, scorers, windows
from reference.inputs import Inputs

Array = np.ndarray
Truth = Callable[[Inputs, int], Array]

NOT_COMPUTED = {
    name: "drawn, not computed: tests/policies/test_controls.py checks the draws"
    for name in ("random", "random_pinned", "random_per_layer")
}
"""Registered scorers without a formula to check, and why."""


@dataclass(frozen=True)
class Golden:
    """A specification, its true scores, and the lengths at which something changes."""

    spec: str
    truth: Truth
    lengths: tuple[int, ...]
    values: bool = True
    """Scores themselves agree below `FORCED`; otherwise only the kept sets."""
    rtol: float = 1e-5
    """float32 against float64, relative: softmax of logits up to 20 loses 20 * 2^-24 * a few."""
    atol: float = 1e-7
    """float32 against float64, absolute."""
    sums_tie: bool = True
    """Tokens with equal inputs score equal in float32, too. A sum of many unequal terms can round
    differently at different indices of a vector."""


def _compared(*rows: tuple[str, Truth, tuple[int, ...]], **how) -> tuple[Golden, ...]:
    """Specification, truth and lengths, row by row, of what is compared alike."""
    return tuple(Golden(*row, **how) for row in rows)


def _of(truth, **options) -> Truth:
    return partial(truth, **options)


_SNAPKV = (1, 2, 5, 31, 32, 33, 70, 140)
_WIDE = (1, 2, 30, 90)
_AGGREGATION = {"observed": 16, "top": 16}

GOLDEN = (
    *_compared(
        ("knorm", scorers.knorm, _WIDE),
        ("knorm:kvpress", scorers.knorm, _WIDE),
        ("snapkv", scorers.snapkv, _SNAPKV),
        (
            "snapkv:kvpress",
            _of(scorers.snapkv, window=64, kernel=5, pool="avg"),
            (63, 64, 65, 66, 67, 68, 130),
        ),
        ("snapkv(window=3,kernel=1)", _of(scorers.snapkv, window=3, kernel=1), (2, 3, 4, 60)),
        ("tova", scorers.tova, _WIDE),
        ("tova:kvpress", _of(scorers.tova, force_last=True), _WIDE),
        ("tova(per_kv_head=true)", _of(scorers.tova, per_kv_head=True), (40,)),
        ("h2o(recents=false)", lambda inputs, _: scorers.received(inputs, visible=False), (40,)),
        ("h2o:kvpress", lambda inputs, _: scorers.received(inputs, visible=True), (1, 2, 65)),
        ("h2o:kvcache_factory", scorers.h2o_window, (31, 32, 33, 65)),
        ("oracle", scorers.oracle, (1, 30)),
        ("kvzip", scorers.kvzip, (1, 30)),
        ("kvzip:kvpress", _of(scorers.kvzip, forced=4), (3, 30)),
        ("kvzip:paper", scorers.kvzip, (30,)),
    ),
    *_compared(
        (
            "snapkv:paper",
            _of(scorers.snapkv, window=32, kernel=7, pool="max"),
            (31, 32, 33, 35, 36, 100),
        ),
        ("snapkv:official", _of(scorers.snapkv, window=32, kernel=5, pool="avg"), (33, 100)),
        sums_tie=False,
    ),
    *_compared(
        ("keydiff:kvpress", scorers.keydiff, (1, 3, 30, 90)),
        ("keydiff", scorers.keydiff, (1, 3, 30, 90)),
        atol=1e-6,
    ),
    *_compared(
        ("streaming_llm", scorers.streaming_llm, _WIDE),
        ("streaming_llm(sinks=0)", _of(scorers.streaming_llm, sinks=0), (9,)),
        ("streaming_llm:kvpress", _of(scorers.streaming_llm, keep_recents=False), (1, 3, 4, 5, 30)),
        ("ring", scorers.ring, _WIDE),
        ("lagkv", scorers.lagkv, (1, 4, 11, 12, 13, 40, 300)),
        ("lagkv:kvpress", _of(scorers.lagkv, lag=128), (20, 259, 260, 261, 387, 388, 389)),
        ("lagkv:official", _of(scorers.lagkv, sinks=16, lag=1024), (2063, 2064, 2090)),
        ("lagkv(sinks=0,lag=5)", _of(scorers.lagkv, sinks=0, lag=5), (9, 10, 11, 14, 15, 16)),
        ("h2o", scorers.h2o, (1, 2, 3, 30, 65)),
        ("h2o(normalize=visible)", _of(scorers.h2o, visible=True), (40,)),
        ("contrastkv(beta=0,gamma=0)", scorers.kvzip, (100,)),
        values=False,
    ),
    *_compared(
        ("contrastkv", contrast.contrastkv, (1, 19, 20, 21, 100)),
        ("contrastkv:paper", contrast.contrastkv, (60,)),
        (
            "contrastkv(scope=head,beta=0.3,gamma=2.0)",
            _of(contrast.contrastkv, beta=0.3, gamma=2.0, per_head=True),
            (100,),
        ),
        values=False,
        rtol=0.0,
        atol=1e-6,
    ),
    *_compared(
        ("expected_attention", future.expected_attention, (2, 4, 5, 6, 40, 120)),
        ("expected_attention:kvpress", _of(future.expected_attention, epsilon=0.0), (40,)),
        (
            "expected_attention(covariance=false,values=false,future=7,sinks=0)",
            _of(future.expected_attention, covariance=False, values=False, future=7, sinks=0),
            (1, 40),
        ),
        (
            "expected_attention(sinks=9,epsilon=0.5)",
            _of(future.expected_attention, sinks=9, epsilon=0.5),
            (11, 40),
        ),
        rtol=5e-5,
    ),
    *_compared(
        ("gvote", future.gvote, (6, 40, 90)),
        ("gvote:paper", _of(future.gvote, include_current=False), (40, 90)),
        (
            "gvote(p_nuc=0.52,samples=3,future=9,skip=0)",
            _of(future.gvote, p_nuc=0.52, future=9),
            (1, 2, 40),
        ),
        rtol=0.0,
        atol=3e-6,
    ),
    *_compared(
        ("windowkv", windows.windowkv, (3, 4, 5, 35, 36, 37, 68, 150)),
        (
            "windowkv(task=aggregation)",
            _of(windows.windowkv, **_AGGREGATION),
            (15, 16, 17, 48, 49, 150),
        ),
        ("windowkv:llama", _of(windows.windowkv, observed=16, window=8, top=8), (17, 24, 25, 100)),
        (
            "windowkv(setting=llama,task=aggregation)",
            _of(windows.windowkv, observed=32, window=16, top=8),
            (33, 100),
        ),
        (
            "windowkv(task=aggregation,per_head=true)",
            _of(windows.windowkv, **_AGGREGATION, per_head=True),
            (100,),
        ),
        values=False,
        rtol=0.0,
    ),
)
