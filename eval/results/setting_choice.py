"""Which setting of each method is shown."""

from collections.abc import Iterable, Sequence

from eval.results.method_setting import MethodSetting
from eval.results.tuned_settings import TunedMethod
from kvp.grouping import group_by
from kvp.names import LEARNED


def choose_settings(
    settings: Iterable[MethodSetting], tuned: Sequence[tuple[TunedMethod, str]] = ()
) -> dict[MethodSetting, str]:
    """One setting per family, and how it was chosen; "" where the family has no other.

    It is the same at every budget and is never chosen on the prompts shown: kvp tune chose it on
    other prompts, or it is the one closest to the method's default. Every default is
    protected if that of the policy is, or if there is none, since protected and unprotected methods
    do not compare. `tuned` are results of kvp tune with their split. If several settings were
    tuned, such as seeds of a policy, the one with the best score is taken.
    """
    chosen: dict[MethodSetting, str] = {}
    families = group_by(settings, lambda setting: setting.family).values()
    policies = [setting for family in families for setting in family if setting.method == LEARNED]
    first = min(policies, key=lambda setting: setting.distance_from_default(False), default=None)
    protected = first is None or first.protected
    for family in families:
        best, how = min(family, key=lambda setting: setting.distance_from_default(protected)), ""
        found = [(setting, *run) for run in tuned for setting in family if run[0].chose(setting)]
        if found:
            best, entry, split = max(found, key=lambda choice: choice[1].chosen.score)
            how = f"chosen on {split} ({entry.tried} settings)" if entry.tried > 1 else ""
        elif len(family) > 1:
            how = f"of {len(family)} settings the one nearest to the default"
        chosen[best] = how
    return chosen
