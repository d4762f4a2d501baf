"""Search for budgets per layer by CMA-ES (EvolKV, algorithm 1), one group of layers at a time.

The search needs no model: `score_schemes` maps schemes (token counts per layer) to task scores.
Every layer starts at the mean budget c. Groups follow each other from the first layer to the last.
In a group of n layers CMA-ES samples x in [0, 1]^n, which gives k = c reach^(x - 1/2) tokens; the
other layers stay at the best weights so far. With `project` the whole scheme is rescaled to the
exact total (largest remainders) before it is evaluated, so that budget also moves between groups;
with `soft` k itself is evaluated, and only the fitness limits the size. Equal schemes are evaluated
once. Differences to the paper: projection by default, and ceil(L / n) groups (its text: floor).

A resumed search draws the same candidates from the same seed and takes their scores from its
journal, search.jsonl, which has one JSON line per generation; nothing is unpickled.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from cmaes import CMA
from pydantic import Field, TypeAdapter

from eval.results.record_names import MANIFEST
from eval.results.stats import Floats
from kvp.allocation import apportion
from kvp.artifacts.claim import FolderKind
from kvp.artifacts.files import JsonLines, raising_as
from kvp.artifacts.manifest import Format
from kvp.budgets import Budget
from kvp.errors import ResultsError

FORMAT = Format("kvp-search", 2)
JOURNAL = "search.jsonl"
SEARCH = FolderKind(
    noun="search", marker=MANIFEST, error=ResultsError, format=FORMAT, optional=("model_digest",)
)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One generation of one group."""

    group: int
    """From 0, bottom to top; -1 for the uniform start."""
    generation: int
    schemes: list[tuple[int, ...]]
    scores: list[Annotated[float, Field(ge=0, le=1)]]
    fitness: list[Annotated[float, Field(ge=0, le=2)]]
    evaluated: Annotated[int, Field(ge=0)]
    """Schemes that had to be run; the others had been run before."""
    seconds: Annotated[float, Field(ge=0, le=1e9)] = 0.0


class Journal:
    """The generations of a search: those in its file are taken from there, new ones appended."""

    def __init__(self, path: Path) -> None:
        """Open or create; a torn last line is dropped, ResultsError on other damage."""
        self.path = path
        self.on_append: Callable[[Generation], object] = lambda entry: None
        """Called with each generation that is appended."""
        self.generations: list[Generation] = []
        self._lines = JsonLines(path)
        self._lines.cut_torn_line()
        for number, record in self._lines.numbered() if path.exists() else ():
            with raising_as(f"{path} line {number}", ResultsError):
                entry = TypeAdapter(Generation).validate_python(record)
                [*zip(entry.scores, entry.fitness, entry.schemes, strict=True)]
            self.generations.append(entry)
        self._started = time.monotonic()

    def append(self, entry: Generation) -> None:
        """Add a generation and bring it to the disk."""
        now = time.monotonic()
        entry = replace(entry, seconds=now - self._started)
        self._started = now
        self._lines.append([asdict(entry)])
        self.generations.append(entry)
        self.on_append(entry)


Scheme = tuple[int, ...]
"""Tokens per KV head of each layer, [L]."""
ScoreSchemes = Callable[[Sequence[Scheme]], Sequence[float]]
"""From schemes to their mean task scores, 0 to 1."""

UNIFORM_GROUP = -1
"""Group number of the first generation in the journal: the uniform scheme alone."""
SIGMA = 0.3
"""Initial step size of CMA-ES in the unit cube (EvolKV), as are the next two."""
LAMBDA = 0.3
"""Weight of the cache score in the fitness."""
GAMMA = 0.2
"""Slope of the cache score below the target."""
REACH = 16.0
"""Largest count of a layer divided by the smallest, before projection."""
MIN_SCORE = 1e-6
"""A task score of 0 counts as this, so that the cache score still orders useless candidates."""


def cache_score(mean: float, target: float) -> float:
    """Score of a mean budget against its target, both tokens per KV head (EvolKV, section 3).

    max(0, 1 - (mean - target) / target) above the target, 1 - gamma (1 - mean / target) below.
    """
    if mean > target:
        return max(0.0, 1.0 - (mean - target) / target)
    return 1.0 - GAMMA * (1.0 - mean / target)


def reply_score(nll: float, tokens: int) -> float:
    """Task score of a given reply: 1 / perplexity, the geometric mean of its tokens' probabilities.

    `nll` is summed over the reply's tokens, in nats. The paper only has generated answers.
    """
    return math.exp(-nll / tokens)


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """Settings of a search."""

    layers: int
    target: Budget
    """The budget that schemes split, of every prompt."""
    budget: int
    """c, the same in tokens per KV head, for a cache of the reference length."""
    minimum: int
    """Tokens that every layer keeps."""
    maximum: int
    """Tokens that a layer can keep: the reference length."""
    group: int
    generations: int
    constraint: str
    seed: int

    @property
    def uniform(self) -> Scheme:
        """The initial scheme: every layer at the mean budget."""
        return (self.budget,) * self.layers

    def fitness(self, scheme: Scheme, score: float) -> float:
        """EvolKV's fitness r = f (1 + lambda cache_score): f is the mean task score, 0 to 1."""
        mean = sum(scheme) / self.layers
        return max(score, MIN_SCORE) * (1.0 + LAMBDA * cache_score(mean, self.budget))

    def scheme(self, weights: Floats) -> Scheme:
        """Counts with which the weights [L] of a candidate are evaluated."""
        if self.constraint == "soft":
            return tuple(np.clip(np.rint(weights), self.minimum, self.maximum).astype(int).tolist())
        total = self.budget * self.layers
        counts = apportion(
            torch.from_numpy(weights), total, minimum=self.minimum, maximum=self.maximum
        )
        return tuple(counts.tolist())

    def counts(self, scheme: Scheme, cached: int) -> list[int]:
        """A scheme rescaled to `cached` tokens, exact sum; each count from the minimum to `cached`.

        Where fewer than the minimum are cached, every layer keeps them all.
        """
        budget, minimum = min(self.target.tokens(cached), cached), min(self.minimum, cached)
        total = round(sum(scheme) * budget / self.budget)
        bounded = min(max(total, len(scheme) * minimum), len(scheme) * cached)
        shares = torch.tensor(scheme, dtype=torch.float64)
        return apportion(shares, bounded, minimum=minimum, maximum=cached).tolist()


@dataclass(frozen=True)
class Candidate:
    """A scheme that was evaluated."""

    weights: Floats
    """[L], tokens before projection."""
    scheme: Scheme
    score: float
    fitness: float


def layer_groups(layers: int, size: int) -> list[slice]:
    """Consecutive layers, bottom to top, `size` at a time; the last group may be smaller."""
    return [slice(start, min(start + size, layers)) for start in range(0, layers, size)]


def search(plan: SearchPlan, score_schemes: ScoreSchemes, journal: Journal) -> Candidate:
    """Run a search, or continue that of the journal, for the fittest scheme.

    Raises ResultsError where the journal is of another search.
    """
    score_of: dict[Scheme, float] = {}
    recorded = enumerate([*journal.generations], start=1)

    def evaluate_generation(group: int, generation: int, weights: list[Floats]) -> list[Candidate]:
        schemes, new = [*map(plan.scheme, weights)], list[Scheme]()
        line, entry = next(recorded, (0, None))
        if entry is None:
            new = [scheme for scheme in dict.fromkeys(schemes) if scheme not in score_of]
            score_of.update(zip(new, score_schemes(new) if new else (), strict=True))
        elif (entry.group, entry.generation, entry.schemes) == (group, generation, schemes):
            score_of.update(zip(schemes, entry.scores, strict=True))
        else:
            raise ResultsError(
                f"{journal.path} line {line} is not what this search draws; choose another --out"
            )
        scores = [score_of[scheme] for scheme in schemes]
        fitness = [*map(plan.fitness, schemes, scores)]
        if entry is None:
            journal.append(
                Generation(
                    group=group, generation=generation, schemes=schemes, scores=scores,
                    fitness=fitness, evaluated=len(new),
                )
            )  # fmt: skip
        return [*map(Candidate, weights, schemes, scores, fitness)]

    (elite,) = evaluate_generation(UNIFORM_GROUP, 0, [np.full(plan.layers, float(plan.budget))])
    for group, span in enumerate(layer_groups(plan.layers, plan.group)):
        fixed = elite.weights
        size = span.stop - span.start
        seed = int(np.random.SeedSequence([plan.seed, group]).generate_state(1)[0])
        bounds = np.tile([0.0, 1.0], (size, 1))  # starts at x = 1/2, the mean budget
        optimiser = CMA(mean=np.full(size, 0.5), sigma=SIGMA, bounds=bounds, seed=seed)
        for generation in range(plan.generations):
            if optimiser.should_stop():
                break
            points = [optimiser.ask() for _ in range(optimiser.population_size)]
            weights = [_weights(plan, fixed, span, x) for x in points]
            candidates = evaluate_generation(group, generation, weights)
            optimiser.tell([(x, -one.fitness) for x, one in zip(points, candidates, strict=True)])
            elite = max(elite, *candidates, key=attrgetter("fitness"))  # of equal ones the first
    return elite


def _weights(plan: SearchPlan, fixed: Floats, span: slice, x: Floats) -> Floats:
    """`fixed` [L] with the layers of one group at the k of `x` [n]."""
    weights = fixed.copy()
    weights[span] = plan.budget * REACH ** (x - 0.5)
    return weights


def describe_search(plan: SearchPlan, journal: Journal, elite: Candidate) -> dict[str, Any]:
    """How a search was made and what came out, as budgets.json records it."""
    start = journal.generations[0]
    return {
        "constraint": plan.constraint, "lambda": LAMBDA, "gamma": GAMMA, "sigma": SIGMA,
        "reach": REACH, "group": plan.group, "generations": len(journal.generations) - 1,
        "evaluations": sum(entry.evaluated for entry in journal.generations),
        "seconds": sum(entry.seconds for entry in journal.generations),
        "uniform": {"score": start.scores[0], "fitness": start.fitness[0]},
        "elite": {"score": elite.score, "fitness": elite.fitness},
        "best_fitness": [max(entry.fitness) for entry in journal.generations],
    }  # fmt: skip
