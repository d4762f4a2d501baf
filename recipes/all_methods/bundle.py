"""Put a policy into the package, with its card.

    python recipes/all_methods/bundle.py RUN/policies-query_agnostic/seed0 \
        --results RUN/test-query_agnostic --name nano
    python recipes/all_methods/bundle.py RUN/policy --results RUN/results \
        --name smollm2-135m-instruct --weights bfloat16 \
        --base_model HuggingFaceTB/SmolLM2-135M-Instruct

The model's digests are taken from the results. `--base_model` is the hub id of the model that a
quantised copy was made of. What was written by hand at the end of the former card stays.
"""

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eval.card import model_card
from eval.results.folder import load_results
from kvp.artifacts.manifest import portable
from policies.policy_files import DTYPES, load_shard, save_policy
from policies.sources import BUNDLED


def main(argv: Sequence[str] | None = None) -> None:
    """Write the folder of the bundled policy anew."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("policy", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--name", choices=tuple(BUNDLED), required=True)
    parser.add_argument("--base_model")
    parser.add_argument("--weights", choices=tuple(DTYPES), default="float32")
    given = parser.parse_args(argv)
    policy = load_shard(given.policy)
    model = dict(load_results(given.results).manifest["identity"]["model_digest"])
    if given.base_model:
        model["base_model"] = given.base_model
    meta = replace(policy.meta, model=portable(model), training=portable(policy.meta.training))
    rankers = policy.rankers.with_dtype(DTYPES[given.weights])
    card = model_card(
        replace(policy, meta=meta), given.name, license="apache-2.0", results=given.results
    )
    folder = BUNDLED[given.name]
    page = folder / "README.md"
    former = page.read_text(encoding="utf-8") if page.exists() else ""
    # What `model_card` makes ends with the section Measured.
    _, heading, by_hand = former.partition("\n## Measured\n")[2].partition("\n## ")
    shutil.rmtree(folder, ignore_errors=True)
    save_policy(folder, rankers, meta, calibration=policy.calibration)
    page.write_text(card + heading + by_hand, encoding="utf-8")


if __name__ == "__main__":
    main()
