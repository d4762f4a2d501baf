"""Options that cannot be are refused in one line that names the method and the option."""

from __future__ import annotations

import pytest

from kvp.errors import UsageError
from policies.registry import METHODS


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("contrastkv", {"beta": 0.6}, "beta must be a number from 0 to 0.5, got 0.6"),
        ("contrastkv", {"gamma": -1}, "gamma must be a number >= 0, got -1"),
        ("contrastkv", {"gamma": "x"}, "gamma must be"),
        ("contrastkv", {"gamma": float("nan")}, "gamma must be"),
        ("contrastkv", {"gamma": float("inf")}, "gamma must be"),
        ("contrastkv", {"chunk": 0}, "chunk must be an integer >= 1"),
        ("contrastkv", {"noise": 0}, "noise must be an integer >= 1"),
        ("contrastkv", {"denominator": "all"}, "denominator must be one of chunk, full"),
        ("contrastkv", {"scope": "model"}, "scope must be one of layer, head"),
        ("contrastkv", {"contrast": "text"}, "contrast must be one of random, context"),
        ("expected_attention", {"future": 0}, "future must be an integer >= 1, got 0"),
        ("expected_attention", {"sinks": -1}, "sinks must be an integer >= 0"),
        ("expected_attention", {"epsilon": -0.1}, "epsilon must be a number >= 0, got -0.1"),
        ("expected_attention", {"covariance": 1}, "covariance must be one of true, false"),
        ("gvote", {"p_nuc": 1.5}, "p_nuc must be a number from 0 to 1, got 1.5"),
        ("gvote", {"samples": 0}, "samples must be an integer >= 1"),
        ("gvote", {"min_keep": 0}, "min_keep must be an integer >= 1"),
        ("gvote", {"space": "value"}, "space must be one of hidden, query"),
        ("gvote", {"include_current": "no"}, "include_current must be one of true, false"),
        ("h2o", {"normalize": "all"}, "normalize must be one of none, visible"),
        ("h2o", {"window": -1, "recents": False}, "window must be an integer >= 0, got -1"),
        ("h2o", {"window": 8}, "window=8 needs recents=false"),
        ("kvzip", {"chunk": 0}, "chunk must be an integer >= 1, got 0"),
        ("kvzip", {"forced": -1}, "forced must be"),
        ("kvzip", {"plus": 1}, "plus must be one of false, true, got 1"),
        ("lagkv", {"lag": 1}, "lag must be an integer"),
        ("lagkv", {"lag": 2.0}, "lag must be an integer"),
        ("lagkv", {"n_sink": -1}, "n_sink must be an integer"),
        ("random", {"seed": True}, "seed must be an integer >= 0"),
        ("random_pinned", {"seed": -1}, "seed must be an integer >= 0"),
        ("snapkv", {"window": "wide"}, "window must be"),
        ("snapkv", {"kernel": 4}, "kernel must be odd, got 4"),
        ("snapkv", {"pool": "min"}, "pool must be one of max, avg, got 'min'"),
        ("streaming_llm", {"n_sink": -1}, "n_sink must be an integer >= 0, got -1"),
        ("streaming_llm", {"keep_recents": 1}, "keep_recents must be one of true, false"),
        ("tova", {"per_kv_head": 1}, "per_kv_head must be one of true, false, got 1"),
        ("windowkv", {"task": "poetry"}, "task must be one of qa, aggregation, heuristic, bert"),
        ("windowkv", {"task": "bert"}, "task=bert and classifier=FOLDER go together, got task=b"),
        ("windowkv", {"classifier": "x"}, "task=bert and classifier=FOLDER go together, got tas"),
        ("windowkv", {"setting": "gemma"}, "setting must be one of qwen, llama"),
        ("windowkv", {"window": 0}, "window must be an integer >= 1 or auto"),
        ("windowkv", {"top": "most"}, "top must be an integer >= 1 or auto"),
    ],
)
def test_bad_options(method: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{method}: {message}"):
        METHODS[method](**options)
