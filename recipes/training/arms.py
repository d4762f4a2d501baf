"""The arms of every study, as settings of kvp-train.

An arm of the study `objectives` is tuned (learning rate, and the strength of a softened sort) on
validation sequences. Those of the other studies train with the objective and learning rate that the
first study chose (of the arm they are `like`), and differ in one thing.
"""

from __future__ import annotations

from dataclasses import dataclass

Settings = dict[str, str]

LEARNING_RATES = ("1e-4", "3e-4", "1e-3", "3e-3", "1e-2", "3e-2", "1e-1")
FIRST_LEARNING_RATE = "3e-3"
TEMPERATURES = ("1e-4", "1e-3", "0.01", "0.1", "1", "10")
FIRST_TEMPERATURE = "0.1"
"""Strengths of a softened sort, for scores with standard deviation 1."""


@dataclass(frozen=True)
class Arm:
    """One of the things compared."""

    name: str
    settings: Settings
    """Flags of kvp-train without their dashes."""
    softened: bool = False
    """Whether there is a temperature to choose."""
    one_ranking: bool = False
    """One permutation per context, of as many contexts as the others draw permutations per step."""
    like: str = "listwise"
    """The arm of `objectives` whose learning rate and temperature an arm of another study uses."""


def _sorts() -> list[Arm]:
    return [
        Arm(f"{sort}_{loss}", {"objective": sort, "sort_loss": loss}, softened=True)
        for sort in ("soft_rank", "soft_sort", "neural_sort")
        for loss in ("ranks", "cost")
    ]


_FORMS = [
    Arm("rloo", {"objective": "rloo"}),
    Arm("rloo_32", {"objective": "rloo", "permutations": "32"}),
    Arm("rloo_batch", {"objective": "rloo_batch"}, one_ranking=True),
    Arm("exact", {"objective": "exact"}),
    Arm("exact_64", {"objective": "exact", "pairs": "64"}),
    Arm("listwise", {"objective": "listwise"}),
    Arm("regress", {"objective": "regress"}),
    *_sorts(),
]

_BETTER: dict[str, Settings] = {
    "muon": {"optimizer": "muon"},
    "end": {"optimizer": "muon", "key_frame": "end"},
}

OBJECTIVES = [
    *_FORMS,
    *(
        Arm(f"{arm.name}_{name}", {**arm.settings, **settings})
        for name, settings in _BETTER.items()
        for arm in _FORMS
        if arm.name in ("rloo", "rloo_32", "exact", "listwise")
    ),
    *(
        Arm(
            f"listwise_peak_{name}",
            {"objective": "listwise", "label": "max_future_attention", **settings},
        )
        for name, settings in _BETTER.items()
    ),
]
"""Estimators and objectives by AdamW; some of them by Muon, as `fourier` trains, and some by Muon
on keys seen from the end of the cache; `listwise` by both on the peak of future attention, too."""

REWARDS = [
    Arm("rloo", {"objective": "rloo"}, like="rloo"),
    Arm("listwise", {}),
    Arm("rloo_ratio", {"objective": "rloo", "reward": "ratio"}, like="rloo"),
    Arm("rloo_mass", {"objective": "rloo", "reward": "mass"}, like="rloo"),
    Arm("rloo_log", {"objective": "rloo", "budget_weights": "log"}, like="rloo"),
    Arm("rloo_window", {"objective": "rloo", "budget_weights": "6%:50%"}, like="rloo"),
    Arm("rloo_protected", {"objective": "rloo", "exclude_protected": "false"}, like="rloo"),
    Arm("listwise_protected", {"exclude_protected": "false"}),
    Arm("listwise_peak", {"label": "max_future_attention"}),
    Arm("listwise_visits", {"points_per_sequence": "4"}),
]
"""Rewards; in `listwise_visits` all contexts of a step come from one sequence."""

LABELS = [
    Arm("attention", _BETTER["muon"], like="listwise_muon"),
    Arm("peak", {**_BETTER["muon"], "label": "max_future_attention"}, like="listwise_peak_muon"),
]
"""Importance of a token: the sum or the largest of the future attention."""

INPUTS = [
    Arm(name, {"inputs": inputs})
    for name, inputs in {
        "all": "key,value,position,distance",
        "no_key": "value,position,distance",
        "no_value": "key,position,distance",
        "no_position": "key,value,distance",
        "no_distance": "key,value,position",
        "key": "key",
        "value": "value",
        "places": "position,distance",
        "key_value": "key,value",
    }.items()
]

SIZES = [
    Arm(f"blocks{blocks}_hidden{hidden}", {"blocks": str(blocks), "hidden": str(hidden)})
    for hidden in (16, 32, 64, 128, 512)
    for blocks in (1, 2)
]

SHARING = [
    Arm("heads", {"sharing": "heads"}),
    Arm("model", {"sharing": "model"}),
    Arm("model_hidden128", {"sharing": "model", "hidden": "128"}),
]

SEQUENCES = [
    Arm(f"sequences{count}", {"sequences": str(count)}) for count in (5, 10, 20, 40, 80, 160, 300)
]

STEPS = [
    Arm(f"{arm.name}_steps1200", {**arm.settings, "steps": "1200"}, like=arm.name)
    for arm in OBJECTIVES
    if arm.name in ("rloo", "listwise", "listwise_muon", "listwise_end")
]
"""Four times the steps of `objectives`, at the learning rate that was best there."""

QUICK = [
    Arm("quick", {}, like="listwise_end"),
    Arm("ten_times", {"steps": "10000"}, like="listwise_end"),
]
"""The shipped short run, and one ten times as long."""

_AS_FOURIER = {
    "reward": "skill",
    "exclude_protected": "true",
    "advantage_clip": "3",
    "future_max": "512",
    "compress_prompt": "0.4",
    "compress_context": "0.4",
    "compress_uniform": "0.2",
    "min_prefix": "64",
    "uniform_points": "16",
}

LENGTHS = [
    Arm("features", {}),
    Arm("no_position", {"inputs": "key,value,distance"}),
    Arm("no_places", {"inputs": "key,value"}),
    Arm("end", {"key_frame": "end"}),
    Arm("end_no_position", {"key_frame": "end", "inputs": "key,value,distance"}),
    Arm("end_no_places", {"key_frame": "end", "inputs": "key,value"}),
    Arm("table", {"preset": "paper", **_AS_FOURIER}),
    Arm("uniform_cuts", {"compress_prompt": "0", "compress_context": "0", "compress_uniform": "1"}),
]
"""Ways to tell a ranker where a token is, for lengths beyond the trained one; `table` is the
paper's learned position table in the paper's network, on raw keys and values; `uniform_cuts` trains
on caches of all sizes up to its length."""

LONGER = [arm for arm in LENGTHS if arm.name in ("features", "uniform_cuts")]
