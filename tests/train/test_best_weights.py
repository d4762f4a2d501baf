import copy
import math
from dataclasses import replace

import torch

from kvp.store import TraceReader
from policies.policy_files import load_policy
from train import training
from train.config import TrainConfig
from train.data.compression_points import held_out_points
from train.data.contexts import ContextSource
from train.learning.initial_rankers import random_rankers
from train.learning.validation import validate_rankers
from train.recipe import FOURIER
from train.run import run
from train.training import RankerTraining

SKILLS = {2: [0.9, 0.1, 0.5, math.nan], 4: [0.8, 0.6, 0.5, math.nan]}
"""Skill of every head that validation reports at a step."""


def test_the_exported_file_holds_every_head_s_best_average(store, tmp_path, monkeypatch):
    seen = []

    def reported(rankers, *args, **options):
        result = validate_rankers(rankers, *args, **options)
        seen.append(copy.deepcopy(rankers))
        object.__setattr__(result, "skill", torch.tensor(SKILLS[2 * len(seen)]))
        return result

    monkeypatch.setattr(training, "validate_rankers", reported)
    out = tmp_path / "policy"
    run(
        TrainConfig(
            traces=str(store),
            out=str(out),
            steps=4,
            validate_every=2,
            hidden=8,
            contexts=1,
            min_prefix=40,
            validation_contexts=2,
        )
    )
    exported = load_policy(out)
    # equal skill keeps the earlier, no skill the later weights
    assert exported.metadata["training"]["best_step"] == [2, 4, 2, 4]
    states = exported.rankers.head_states()
    for head, index in enumerate([0, 1, 0, 1]):
        expected = seen[index].head_states()[head]
        for name, tensor in states[head].items():
            meant = torch.zeros(1) if name == "score_bias" else expected[name]  # of a loss of order
            assert torch.equal(tensor, meant), (head, name)


def test_validation_evaluates_the_averaged_weights(store):
    reader = TraceReader(store)
    source = ContextSource(reader, memory_bytes=10**7)
    recipe = replace(FOURIER, inputs="key,value,position,distance", hidden=8)
    records = reader.records("train")
    first, other = (random_rankers(recipe, reader, records, range(4), seed) for seed in (0, 1))
    module = RankerTraining(first, recipe, source, records, seed=0)
    with torch.no_grad():
        for weight, value in zip(module.average.parameters(), other.parameters(), strict=True):
            weight.copy_(value)
    points = held_out_points(reader.records("validation"), recipe, limit=2)
    found = module.validate(map(source.context, points))

    def skill(rankers):
        return validate_rankers(rankers, map(source.context, points)).skill

    assert torch.equal(found.skill, skill(module.average))
    assert not torch.equal(found.skill, skill(module.rankers))
    assert torch.equal(module.best_skill, found.skill)
