"""Differences of one setting from all others, paired by prompt, corrected over all of them (Holm).

    python -m recipes.real_models.paired OUT.csv LEAD FOLDER

Other settings are taken from LEAD: method, policy, options and allocator. Differences are over the
tasks of the means in FOLDER (those whose rows in `summary()` are not apart). OUT.csv has of every
other setting at every budget the difference of accuracy (0 to 1), its 95 % interval, the p value,
and whether it differs from 0 at 5 % after correction.
"""

import argparse

import pandas as pd

from eval.results.method_setting import MethodSetting
from eval.results.stats import holm, paired_difference, prompt_values
from kvp import read_results


def main(out: str, lead: str, folder: str) -> None:
    """Write OUT.csv and print it."""
    results = read_results(folder)
    summary, rows = results.summary(), pd.DataFrame(results)
    rows = rows[rows["task"].isin(summary[~summary["apart"]]["task"])]
    rows = rows.astype(object).where(rows.notna(), None)
    groups = {name: name or "" for name in rows["policy"]}
    rows["setting"] = [MethodSetting.of(row, groups).label for row in rows.to_dict("records")]
    full = rows[rows["method"] == "full"]
    found = {}
    for budget, at in rows[rows["method"] != "full"].groupby("budget_spec", sort=False):
        ours = prompt_values(at[at["setting"] == lead].to_dict("records"))
        for setting, same in pd.concat([at, full]).groupby("setting"):
            if setting != lead:
                gap = paired_difference(ours, prompt_values(same.to_dict("records")))
                found[budget, setting] = gap
    differ = holm(found)
    table = pd.DataFrame(
        {
            "budget": budget, "minus": setting, "difference": round(gap.mean, 4),
            "low": round(gap.low, 4), "high": round(gap.high, 4), "p": round(gap.p, 5),
            "differs": "yes" if (budget, setting) in differ else "no",
        }
        for (budget, setting), gap in found.items()
    )  # fmt: skip
    table.to_csv(out, index=False)
    print(table.to_string(index=False))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", help="the table that is written, CSV")
    parser.add_argument("lead", help="a setting, such as kvp/general+global")
    parser.add_argument("folder", help="results of kvp eval")
    main(**vars(parser.parse_args()))
