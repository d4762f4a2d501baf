"""Groups of policies, axes of budgets, and which setting of a method is shown."""

import pytest
from toy_results import answer_records, result_record

from eval.results.estimates import make_estimates
from eval.results.method_setting import are_shares, budget_axis, group_policies
from eval.results.setting_choice import choose_settings
from eval.results.tuned_settings import ScoredSetting, TunedMethod

GROUPS = {None: "", "seed0": "", "seed1": ""}


def _chosen(answers, *tuned):
    """Label and note of the setting shown, by family."""
    records = [record for record in answers if record["protocol"] == "query_aware"]
    cells = make_estimates("answers", records, group_policies(records))
    chosen = choose_settings(dict.fromkeys(setting for setting, _ in cells), tuned)
    return {setting.family: (setting.label, note) for setting, note in chosen.items()}


@pytest.mark.parametrize(
    ("labels", "groups"),
    [
        ({"seed0": 0, "seed1": 1}, {"seed0": "", "seed1": ""}),
        (
            {"ratio-seed0": 0, "ratio-seed12": 12, "skill_s0": 0},
            {"ratio-seed0": "ratio", "ratio-seed12": "ratio", "skill_s0": "skill"},
        ),
        ({"seed0": 0, "paper.0": 0}, {"seed0": "", "paper.0": "paper"}),
        ({"a1": None, "a2": None, "v": 0, "v0": 0}, {"a1": "a1", "a2": "a2", "v": "v", "v0": "v0"}),
        ({"a0": 0, "a1": 1, "m3": 3, "0.0": 0}, {"a0": "a", "a1": "a", "m3": "m3", "0.0": "0.0"}),
    ],
)
def test_policies_that_differ_only_in_seed_are_one_group(labels, groups):
    records = [result_record("kvp", policy=label, policy_seed=seed, score=0.0)
               for label, seed in labels.items()]  # fmt: skip
    assert group_policies(records) == {None: "", **groups}


def test_budgets_are_percent_where_all_are():
    records = [result_record(budget_spec=spec) for spec in ("50%", "12.5%", "25%")]
    budgets = budget_axis([*records, result_record("full", budget_spec=None)])
    assert are_shares(budgets)
    mixed = budget_axis([*records, result_record(budget_spec="64", budget=64)])
    assert [*mixed.items()] == [("12.5%", 2.0), ("25%", 4.0), ("50%", 8.0), ("64", 64.0)]
    assert not are_shares(mixed)


def _tuned(allocator="uniform"):
    entry = TunedMethod(
        method="knorm", requested="knorm", protocol="query_aware",
        chosen=ScoredSetting(scorer="knorm", variant="auto", allocator=allocator, protected=False,
                             score=0.5, interval=(0.4, 0.6)),
        published=(), tried=48,
    )  # fmt: skip
    return entry, "validation"


def test_the_prompts_shown_never_choose_the_setting():
    # snapkv is best without protection, with a preset: neither makes it the one that is shown
    best = [
        {**record, "variant": "paper", "protected": False, "score": 1.0}
        for record in answer_records()
        if record["method"] == "snapkv"
    ]
    policies = [
        result_record("kvp", policy="seed0", policy_seed=0, score=0.0, allocator=allocator,
                      protected=False)
        for allocator in ("global", "ada")
    ]  # fmt: skip
    answers = [*answer_records(), *best, *policies]
    nearest = "of 2 settings the one nearest to the default"
    assert _chosen(answers)["snapkv"] == ("snapkv +p", nearest)
    assert _chosen(answers)["kvp"][0] == "kvp+global"  # what is recommended
    chosen = _chosen(answers, _tuned())["knorm"]
    assert chosen == ("knorm", "chosen on validation (48 settings)")
    untried = _chosen(answers, _tuned(allocator="ada"))["knorm"]
    assert untried == ("knorm", nearest)
