"""One table: what is checked for each scorer of the registry. A new method is a new entry."""

from __future__ import annotations

import re
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


@dataclass(frozen=True, kw_only=True)
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

    @property
    def method(self):
        """Name in the registry."""
        return re.split(r"[:(]", self.spec)[0]


_SNAPKV = (1, 2, 5, 31, 32, 33, 70, 140)
_WIDE = (1, 2, 30, 90)

GOLDEN = (
    Golden(spec="streaming_llm", truth=scorers.streaming_llm, lengths=_WIDE, values=False),
    Golden(
        spec="streaming_llm(n_sink=0)",
        truth=partial(scorers.streaming_llm, n_sink=0),
        lengths=(9,),
        values=False,
    ),
    Golden(
        spec="streaming_llm:kvpress",
        truth=partial(scorers.streaming_llm, keep_recents=False),
        lengths=(1, 3, 4, 5, 30),
        values=False,
    ),
    Golden(spec="ring", truth=scorers.ring, lengths=_WIDE, values=False),
    Golden(spec="knorm", truth=scorers.knorm, lengths=_WIDE),
    Golden(spec="knorm:kvpress", truth=scorers.knorm, lengths=_WIDE),
    Golden(spec="keydiff:kvpress", truth=scorers.keydiff, lengths=(1, 3, 30, 90), atol=1e-6),
    Golden(spec="keydiff", truth=scorers.keydiff, lengths=(1, 3, 30, 90), atol=1e-6),
    Golden(spec="lagkv", truth=scorers.lagkv, lengths=(1, 4, 11, 12, 13, 40, 300), values=False),
    Golden(
        spec="lagkv:kvpress",
        truth=partial(scorers.lagkv, lag=128),
        lengths=(259, 260, 261, 387, 388, 389),
        values=False,
    ),
    Golden(
        spec="lagkv:official",
        truth=partial(scorers.lagkv, n_sink=16, lag=1024),
        lengths=(2063, 2064, 2090),
        values=False,
    ),
    Golden(
        spec="lagkv(n_sink=0,lag=5)",
        truth=partial(scorers.lagkv, n_sink=0, lag=5),
        lengths=(9, 10, 11, 14, 15, 16),
        values=False,
    ),
    Golden(spec="snapkv", truth=scorers.snapkv, lengths=_SNAPKV),
    Golden(
        spec="snapkv:kvpress",
        truth=partial(scorers.snapkv, window=64, kernel=5, pool="avg"),
        lengths=(63, 64, 65, 66, 67, 68, 130),
    ),
    Golden(
        spec="snapkv:paper",
        truth=partial(scorers.snapkv, window=32, kernel=7, pool="max"),
        lengths=(31, 32, 33, 35, 36, 100),
        sums_tie=False,
    ),
    Golden(
        spec="snapkv:official",
        truth=partial(scorers.snapkv, window=32, kernel=5, pool="avg"),
        lengths=(33, 100),
        sums_tie=False,
    ),
    Golden(
        spec="snapkv(window=3,kernel=1)",
        truth=partial(scorers.snapkv, window=3, kernel=1),
        lengths=(2, 3, 4, 60),
    ),
    Golden(spec="tova", truth=scorers.tova, lengths=_WIDE),
    Golden(spec="tova:kvpress", truth=partial(scorers.tova, force_last=True), lengths=_WIDE),
    Golden(
        spec="tova(per_kv_head=true)", truth=partial(scorers.tova, per_kv_head=True), lengths=(40,)
    ),
    Golden(spec="h2o", truth=scorers.h2o, lengths=(1, 2, 3, 30, 65), values=False),
    Golden(
        spec="h2o(normalize=visible)",
        truth=partial(scorers.h2o, visible=True),
        lengths=(40,),
        values=False,
    ),
    Golden(
        spec="h2o(recents=false)",
        truth=lambda inputs, budget: scorers.received(inputs, visible=False),
        lengths=(40,),
    ),
    Golden(
        spec="h2o:kvpress",
        truth=lambda inputs, budget: scorers.received(inputs, visible=True),
        lengths=(1, 2, 65),
    ),
    Golden(spec="h2o:kvcache_factory", truth=scorers.h2o_window, lengths=(31, 32, 33, 65)),
    Golden(spec="oracle", truth=scorers.oracle, lengths=(1, 30)),
    Golden(spec="kvzip", truth=scorers.kvzip, lengths=(1, 30)),
    Golden(spec="kvzip:kvpress", truth=partial(scorers.kvzip, forced=4), lengths=(3, 30)),
    Golden(spec="kvzip:paper", truth=scorers.kvzip, lengths=(30,)),
    Golden(
        spec="contrastkv",
        truth=contrast.contrastkv,
        lengths=(1, 19, 20, 21, 100),
        values=False,
        rtol=0.0,
        atol=1e-6,
    ),
    Golden(
        spec="contrastkv:paper",
        truth=contrast.contrastkv,
        lengths=(60,),
        values=False,
        rtol=0.0,
        atol=1e-6,
    ),
    Golden(
        spec="contrastkv(scope=head,beta=0.3,gamma=2.0)",
        truth=partial(contrast.contrastkv, beta=0.3, gamma=2.0, per_head=True),
        lengths=(100,),
        values=False,
        rtol=0.0,
        atol=1e-6,
    ),
    Golden(spec="contrastkv(beta=0,gamma=0)", truth=scorers.kvzip, lengths=(100,), values=False),
    Golden(
        spec="expected_attention",
        truth=future.expected_attention,
        lengths=(2, 4, 5, 6, 40, 120),
        rtol=5e-5,
    ),
    Golden(
        spec="expected_attention:kvpress",
        truth=partial(future.expected_attention, epsilon=0.0),
        lengths=(40,),
        rtol=5e-5,
    ),
    Golden(
        spec="expected_attention(covariance=false,values=false,future=7,sinks=0)",
        truth=partial(future.expected_attention, covariance=False, values=False, future=7, sinks=0),
        lengths=(1, 40),
        rtol=5e-5,
    ),
    Golden(
        spec="expected_attention(sinks=9,epsilon=0.5)",
        truth=partial(future.expected_attention, sinks=9, epsilon=0.5),
        lengths=(11, 40),
        rtol=5e-5,
    ),
    Golden(spec="gvote", truth=future.gvote, lengths=(6, 40, 90), rtol=0.0, atol=3e-6),
    Golden(
        spec="gvote:paper",
        truth=partial(future.gvote, include_current=False),
        lengths=(40, 90),
        rtol=0.0,
        atol=3e-6,
    ),
    Golden(
        spec="gvote(p_nuc=0.52,samples=3,future=9,n_skip=0)",
        truth=partial(future.gvote, p_nuc=0.52, future=9),
        lengths=(1, 2, 40),
        rtol=0.0,
        atol=3e-6,
    ),
    Golden(
        spec="windowkv",
        truth=windows.windowkv,
        lengths=(3, 4, 5, 35, 36, 37, 68, 150),
        values=False,
        rtol=0.0,
    ),
    Golden(
        spec="windowkv(task=aggregation)",
        truth=partial(windows.windowkv, observed=16, top=16),
        lengths=(15, 16, 17, 48, 49, 150),
        values=False,
        rtol=0.0,
    ),
    Golden(
        spec="windowkv:llama",
        truth=partial(windows.windowkv, observed=16, window=8, top=8),
        lengths=(17, 24, 25, 100),
        values=False,
        rtol=0.0,
    ),
    Golden(
        spec="windowkv(setting=llama,task=aggregation)",
        truth=partial(windows.windowkv, observed=32, window=16, top=8),
        lengths=(33, 100),
        values=False,
        rtol=0.0,
    ),
    Golden(
        spec="windowkv(task=aggregation,per_head=true)",
        truth=partial(windows.windowkv, observed=16, top=16, per_head=True),
        lengths=(100,),
        values=False,
        rtol=0.0,
    ),
)
