"""Tokens that one policy keeps in kvp and in kvpress, and one heuristic in both.

    compare.py here FOLDER     in kvp's environment: evict, save what every head kept
    compare.py there FOLDER    in kvpress's environment: the same as a press, and compare
    compare.py presses         in kvp's environment with kvpress beside it: presses as scorers

`check.sh` makes the environments and runs all three. Exits with 1 where anything differs by more
than rounding can explain: near ties that two versions of transformers order differently.
"""

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from kvp import nano
from policies.policy_files import PolicyMeta, load_policy, save_policy
from policies.ranker import HeadRankers, RankerSpec

RATIOS = (0.25, 0.5, 0.9)
TOKENS = 400
BUDGET = 200
"""Tokens per head of presses as scorers: more than LagKV scores equally."""
SAME = 0.995
"""Share of kept tokens that must agree."""


def prompt() -> torch.Tensor:
    """Ids [1, TOKENS] that every environment draws alike."""
    return torch.randint(300, 8000, (1, TOKENS), generator=torch.Generator().manual_seed(7))


def policies(folder: Path) -> dict[str, str]:
    """The bundled policy, and one of random weights that reads the last queries."""
    reading = folder / "reads_queries"
    if not reading.exists():
        geometry = load_policy("nano").geometry
        inputs = ("key", "value", "position", "distance", "recent")
        spec = RankerSpec(head_dim=geometry.head_dim, hidden=16, inputs=inputs)
        rankers = HeadRankers(spec, geometry.total_kv_heads, torch.Generator().manual_seed(3))
        save_policy(reading, rankers, PolicyMeta(geometry=geometry, model={"id": "nano"}))
    return {"nano": "nano", "reads_queries": str(reading)}


def here(folder: Path) -> None:
    """Evict with kvp and save the positions that every head kept."""
    from kvp.hf import load_model, prefill_and_evict
    from kvp.protection import UNPROTECTED

    model, _ = load_model("nano")
    kept: dict[str, Any] = {}
    for name, path in policies(folder).items():
        for ratio in RATIOS:
            cache = prefill_and_evict(
                model, prompt(), load_policy(path), int(TOKENS * (1 - ratio)), UNPROTECTED
            )
            layers = cache.stored.values()
            kept[f"{name} {ratio}"] = [layer.positions[0].tolist() for layer in layers]
    (folder / "kept.json").write_text(json.dumps(kept))


def there(folder: Path) -> None:
    """Evict with kvpress and compare."""
    import transformers
    from kvpress import AdaKVPress
    from policy_press import PolicyPress
    from transformers import AutoModelForCausalLM, DynamicCache

    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(nano.path(), dtype=torch.float32).eval()
    expected = json.loads((folder / "kept.json").read_text())
    shares = []
    for name, path in policies(folder).items():
        for ratio in RATIOS:
            full, cache = DynamicCache(), DynamicCache()
            with torch.no_grad():
                model(prompt(), past_key_values=full)
                with PolicyPress(ratio, path)(model):
                    model(prompt(), past_key_values=cache)
            same = total = 0
            for layer, heads in enumerate(expected[f"{name} {ratio}"]):
                for head, positions in enumerate(heads):
                    ours = full.layers[layer].keys[0, head, positions]
                    theirs = cache.layers[layer].keys[0, head]
                    distance = (ours[:, None] - theirs).abs().amax(dim=-1).amin(dim=1)
                    same += int((distance < 1e-3).sum())
                    total += len(positions)
                    assert len(positions) == theirs.shape[0], "another number of tokens"
            shares.append(same / total)
            print(f"{name}, ratio {ratio}: {same} of {total} kept tokens agree")
    with torch.no_grad(), AdaKVPress(PolicyPress(0.5))(model):
        answer = model.generate(prompt(), max_new_tokens=5, do_sample=False)
    print(f"AdaKVPress(PolicyPress): {answer.shape[1] - TOKENS} tokens generated")
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    sys.exit(min(shares) < SAME)


def presses() -> None:
    """Compare presses as scorers with kvp's own methods, and see that other presses are refused."""
    from kvp.hf import load_model

    model, _ = load_model("nano")
    compare_presses(model)
    check_generation(model)
    for hidden in (None, 24):
        compare_kvzap(model, hidden)
    check_refusals(model)


def select_tokens(model: PreTrainedModel, spec: str) -> list[set[int]]:
    """The tokens that every head keeps by a scorer, layer by layer."""
    from kvp.hf.prefill import prefill
    from kvp.protection import UNPROTECTED
    from kvp.ranking import Selection
    from kvp.scoring import score_layers
    from policies import make_scorer

    scorer = make_scorer(spec)
    scores = score_layers(scorer, prefill(model, prompt()).views(scorer.needs, BUDGET))
    stacked = torch.stack([layer[0] for layer in scores])
    tokens = Selection(stacked, UNPROTECTED).tokens(BUDGET, None)
    return [set(head.tolist()) for layer in tokens for head in layer]


def compare_presses(model: PreTrainedModel) -> None:
    """Print what presses keep, and compare it with kvp's own methods where there is one."""
    from policies import make_scorer

    for press, method in (
        ("presses:KnormPress", "knorm"), ("presses:KeyDiffPress", "keydiff"),
        ("presses:LagKVPress", "lagkv:kvpress"), ("presses:StreamingLLMPress", None),
        ("presses:CURPress", None), ("presses:LagKVPress(n_sink=8)", None),
    ):  # fmt: skip
        tokens, text = select_tokens(model, press), ""
        if method is not None:
            pairs = zip(tokens, select_tokens(model, method), strict=True)
            share = sum(len(a & b) for a, b in pairs) / sum(map(len, tokens))
            text = f", {share:.1%} of the tokens that {method} keeps"
            assert share >= SAME, f"{press} and {method} keep other tokens"
        print(f"{make_scorer(press).name}: {BUDGET} tokens per head{text}")


def check_generation(model: PreTrainedModel) -> None:
    """See that a model answers while a press evicts."""
    from kvp.hf import evicting
    from policies import make_scorer

    answer = model.generate(prompt(), max_new_tokens=5, do_sample=False)
    with evicting(model, make_scorer("presses:KnormPress"), budget=BUDGET):
        evicted = model.generate(prompt(), max_new_tokens=5, do_sample=False)
    assert answer.shape == evicted.shape


def check_refusals(model: PreTrainedModel) -> None:
    """See that presses that need more than a scorer gets are refused."""
    from kvp.errors import UsageError

    for press in ("presses:SnapKVPress", "presses:AdaKVPress"):
        try:
            select_tokens(model, press)
        except UsageError as error:
            print(f"refused: {error}")
        else:
            raise AssertionError(f"{press} was not refused")


def compare_kvzap(model: PreTrainedModel, hidden: int | None) -> None:
    """Compare scores of a random KVzap, written by kvpress, with those of kvpress's own modules."""
    from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel

    from kvp.hf.prefill import prefill
    from kvp.scoring import score_layers
    from policies import make_scorer

    config = model.config
    gates = KVzapModel(
        KVzapConfig(
            input_dim=config.hidden_size,
            output_dim=config.num_key_value_heads,
            n_modules=config.num_hidden_layers,
            hidden_dim=hidden,
        )
    )
    with TemporaryDirectory() as folder:
        gates.save_pretrained(folder)
        scorer = make_scorer(f"kvzap:{folder}")
    seen = prefill(model, prompt(), scorer.needs)
    views = list(seen.views(scorer.needs, BUDGET))
    for layer, (view, scores) in enumerate(zip(views, score_layers(scorer, views), strict=True)):
        with torch.no_grad():
            theirs = gates.layers[layer](view.hidden.states).transpose(1, 2)
        assert torch.allclose(scores, theirs, atol=1e-6), "kvzap scores differ"
    print(f"kvzap, hidden_dim {hidden}: the scores of kvpress's own modules")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    steps = parser.add_subparsers(required=True)
    for step in (here, there, presses):
        command = steps.add_parser(step.__name__, help=step.__doc__)
        command.set_defaults(step=step)
        if step is not presses:
            command.add_argument("folder", type=Path)
    given = vars(parser.parse_args())
    given.pop("step")(**given)
