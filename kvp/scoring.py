"""The contract between methods and models: inputs, declared needs and output of a scorer.

A scorer ranks the tokens of one layer's cache; `kvp.hf` (or a trace) supplies the view. Protection
is `kvp.protection`, allocators `kvp.allocation`, selection `kvp.ranking`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Protocol, cast, runtime_checkable

import torch
from annotated_types import Ge
from torch import Tensor

from kvp.bounds import NotNegative, Positive, Share
from kvp.errors import UsageError
from kvp.field_checks import check_fields
from kvp.geometry import Geometry
from kvp.plugins import OptionalParts, class_label, instance_of, user_errors
from kvp.rope import Rope

ALL_QUERIES = -1
"""`Needs.queries` value of a method that reads the query of every token."""

AUTO_GROUP = 0
"""`Needs.layer_group` value: groups of at most 8 layers, at least 4 groups."""


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Extra passes in which the model repeats its context, chunk by chunk (KVzip, section 3)."""

    chunk: Positive = 2048
    """Context tokens repeated per pass."""
    sinks: NotNegative = 4
    """First cached keys that stay in the softmax of every chunk."""
    weighted: bool = False
    """KVzip+: attention times the norm of the projected value over the norm of the hidden state."""
    full: bool = False
    """Softmax over the whole cache instead of sinks, chunk and the pass itself."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """One extra pass of foreign tokens over the whole cache (ContrastKV's negative signal)."""

    tokens: Positive = 64
    """Random tokens, drawn uniformly from the ordinary vocabulary."""
    seed: NotNegative = 0
    beginning: Share = 0.0
    """Above 0: this share of the prompt, its first tokens, is fed in place of random ones."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Inputs of a scorer besides keys, values and positions; the caller provides exactly those."""

    queries: Annotated[int, Ge(ALL_QUERIES)] = 0
    """Number of most recent queries (tokens) to record, or `ALL_QUERIES`."""
    future: bool = False
    """True only for hindsight methods: the attention future queries really paid."""
    rope: bool = False
    """True to get the model's rotary embedding, for methods that move queries in position."""
    hidden_after: NotNegative | None = None
    """Not None to get statistics of the hidden states, this many first tokens left out."""
    every_state: bool = False
    """With `hidden_after`: True to get the hidden states of every token, too."""
    reconstruction: Reconstruction | None = None
    """Not None to get the attention received while the model repeats its context."""
    noise: Noise | None = None
    """Not None to get the attention received from random tokens."""
    question: bool = False
    """True to be told which cached tokens are the question."""
    text: NotNegative = 0
    """Prompt tokens, counted from the end, whose text the method reads (0: none)."""
    budget: bool = False
    """True to read `View.budget`; such a method is scored anew for every budget."""
    layer_group: Annotated[int, Ge(AUTO_GROUP)] = 1
    """Consecutive layers that take over the scores of the first of them, or `AUTO_GROUP`."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.every_state and self.hidden_after is None:
            raise ValueError("Needs(every_state=True) needs hidden_after, too: 0 or more tokens")

    @property
    def recorded(self) -> tuple[int, int | None, bool]:
        """What a prefill records: one prefill serves all methods that record the same."""
        return self.queries, self.hidden_after, self.every_state


@dataclass(frozen=True, kw_only=True)
class HiddenStates:
    """Hidden states that enter a layer's attention: statistics, the way to queries, or all."""

    mean: Tensor
    """[B, W] float32 mean over tokens, W = width of the model."""
    variance: Tensor
    """[B, W] float32 biased variance over tokens."""
    project: Callable[[Tensor], Tensor]
    """Hidden states [B, S, W] -> queries before RoPE [B, Q, S, D], bias and norms included."""
    states: Tensor | None = None
    """[B, N, W] the states themselves, in the model's dtype, where `Needs.every_state` asks."""


@dataclass(frozen=True, kw_only=True)
class View:
    """One layer's keys, values and queries at the moment of compression, without padding.

    Batches with padding are scored one prompt at a time, so every token of a view is real. N counts
    every token of the view here; no cache keeps the last `fed_again`. Axes are in the order that
    each field gives: B prompts, H KV heads, Q query heads (those of KV head h are h * Q / H and the
    Q / H - 1 after it), tokens oldest first, D channels. Tensors may share memory with the cache
    and are not contiguous in general: `reshape` them, not `view`, and do not write to them.
    """

    layer: int
    """Index of the layer in the model, 0-based; not all layers of a model are scored."""
    heads: slice = field(default_factory=lambda: slice(None))
    """KV heads of the layer that are shown: one where heads hold different numbers of tokens."""
    keys: Tensor
    """[B, H, N, D] keys after RoPE, in the model's dtype."""
    values: Tensor
    """[B, H, N, D] values, in the model's dtype."""
    positions: Tensor
    """[B, N] int64 true positions, ascending; [B, H, N] in a cache that has been shrunk before,
    whose heads hold different tokens."""
    budget: int | None = None
    """Tokens per KV head to be kept, protected ones included; None without `Needs.budget`."""
    fed_again: int = 0
    """Last tokens that are fed once more after the eviction; their scores are dropped."""
    queries: Tensor | None = None
    """[B, Q, W, D] queries after RoPE, in the model's dtype, of the last W = min(needs.queries, N)
    tokens; in a cache that has been shrunk before, of those after the last evicted one."""
    future: Tensor | None = None
    """[B, H, N] float32 future attention of every token (`kvp.ops.future_attention`)."""
    rope: Rope | None = None
    """The model's rotary embedding at this length."""
    hidden: HiddenStates | None = None
    reconstruction: Tensor | None = None
    """[B, H, N] float32 largest attention, over query group and repeating tokens."""
    noise: Tensor | None = None
    """[B, H, N] float32 largest attention, over query group and random tokens."""
    question_tokens: int = 0
    """Tokens of the question, the last ones; 0 where it has not been read, or is unknown."""
    prompt_tokens: int = 0
    """Tokens before the answer: those at positions below this; 0 until the model answers."""
    text: str | None = None
    """Text of the last `needs.text` tokens (views that carry it have B = 1)."""

    @property
    def head_positions(self) -> Tensor:
        """`positions` with an axis of heads: [B, 1, N], or [B, H, N] where heads differ."""
        return self.positions if self.positions.ndim == 3 else self.positions[:, None]


@runtime_checkable
class Scorer(Protocol):
    """A method that ranks tokens. Higher score = keep; ties go to the newer token."""

    @property
    def name(self) -> str:
        """Name in the registry, with its preset or options."""

    def score(self, view: View) -> Tensor:
        """Score every token of one layer: [B, H, N] float32, finite or -inf, never NaN."""


class ScorerParts(OptionalParts):
    """What a scorer may have besides name and `score`, and what counts where it has not."""

    needs: Needs = Needs()
    """Inputs that the view must have."""
    sizes: Callable[[Tensor], Tensor] | None = None
    """For the allocator `self_sized` (GVote), the number of tokens per head: scores [..., N] ->
    [...] int64, at least 1. Protected tokens come at +inf, and add to those that it selects."""
    recommended_allocator: str | None = None
    """The allocator that a vLLM server takes where it is given none; None: equal counts."""
    label: str | None = None
    """What it is called in messages and files; None: its name."""
    geometry: Geometry | None = None
    """The only geometry of models that it works with."""
    model_name: str | None = None
    """The model that it was trained for, as people load it."""
    metadata: Mapping[str, Any] | None = None
    """How it was trained, as in `policy.json`: `model` is a `model_identity`."""


def needs_of(scorer: Scorer) -> Needs:
    """Inputs that the views of a scorer must have."""
    return ScorerParts(scorer).needs


def check_scorer(thing: Any, label: str, hint: str = "") -> Scorer:  # noqa: ANN401
    """Return `thing`, or one made of it if it is a class; UsageError where that is no scorer."""
    thing = instance_of(thing, class_label("scorer", thing))
    with user_errors(thing, label):
        missing = ", ".join(part for part in ("name", "score") if not hasattr(thing, part))
        if missing or not isinstance(needs_of(thing), Needs):
            lacks = missing or "needs of type kvp.scoring.Needs"
            raise UsageError(f"{label} is no scorer: it has no {lacks}{hint}")
    return cast(Scorer, thing)


def expect_tensor(thing: object, what: str) -> Tensor:
    """Return `thing`; UsageError, which begins with `what`, where it is no tensor."""
    if not isinstance(thing, Tensor):
        raise UsageError(f"{what} {type(thing).__name__}, expected a tensor")
    return thing


def label_of(scorer: Scorer) -> str:
    """What a method is called in messages and files: a policy's label, or else its name."""
    return str(ScorerParts(scorer).label or scorer.name)


def sizes_of(scorer: Scorer) -> Callable[[Tensor], Tensor] | None:
    """`sizes` of a scorer that gives each head a size, checked; None for all others."""
    return ScorerParts(scorer).sizes and partial(_checked_sizes, scorer)


def _checked_sizes(scorer: Any, scores: Tensor) -> Tensor:  # noqa: ANN401
    """Its `sizes` of scores [..., N]: [...] int64; UsageError where they are none."""
    with user_errors(scorer, name := f"method {scorer.name}: its sizes"):
        sizes = expect_tensor(scorer.sizes(scores), f"{name} are")
        if sizes.shape != scores.shape[:-1] or sizes.dtype != torch.int64:
            raise UsageError(f"{name} are {tuple(sizes.shape)} {sizes.dtype}, not int64 per head")
    return sizes


def score_layers(scorer: Scorer, views: Iterable[View]) -> list[Tensor]:
    """Score every layer of a model, in order: one [B, H, N - fed_again] float32 tensor per layer.

    Scorers score all N tokens of a view; the scores of those that are fed again are dropped here,
    for every method alike. Layers of a group (`Needs.layer_group`) get the tensor of its first one,
    unless those of any group hold different tokens or heads have views of their own. Without groups
    a view is asked for when those before it have been scored, so one layer's may be made at a time.
    Raises UsageError when a scorer returns another shape, integers, NaN or +inf, or a user's fails.
    """
    needs, name, size = needs_of(scorer), f"method {scorer.name}", 1
    if needs.layer_group != 1:
        size = _views_per_group(views := [*views], needs.layer_group)
    scores: list[Tensor] = []
    for index, view in enumerate(views):
        if index % size:
            scores.append(scores[-1])
            continue
        view = view if needs.budget else replace(view, budget=None)
        before, shape = _versions(view), view.keys.shape[:3]
        with user_errors(scorer, name, ": its view has only the inputs that `needs` asks for"):
            scored = expect_tensor(scorer.score(view), f"{name} returned")
            if scored.shape != shape:
                raise UsageError(
                    f"{name} returned scores {tuple(scored.shape)} in layer {view.layer}, "
                    f"expected {tuple(shape)}"
                )
            if not scored.is_floating_point():
                raise UsageError(f"{name} returned scores of {scored.dtype}, expected floats")
            scored = scored.float()  # in which a larger number is infinite
            if bad := int((~(scored < torch.inf)).sum()):
                what = f"{'NaN' if bool(scored.isnan().any()) else '+inf'} in layer {view.layer}"
                count = f"{bad} of {scored.numel()} scores"
                raise UsageError(
                    f"{name} returned {what}: {count}; what always stays is finite, too"
                )
            if _versions(view) != before:
                raise UsageError(f"{name} writes to its view: copy first (clone)")
        scores.append(scored[..., : scored.shape[-1] - view.fed_again])
    return scores


def _versions(view: View) -> list[int]:
    """Counters of a view's tensors that every change in place raises; none in inference mode."""
    holders = filter(None, (view, view.hidden, view.rope))
    parts = [part for holder in holders for part in vars(holder).values()]
    return [one._version for one in parts if isinstance(one, Tensor) and not one.is_inference()]


def layers_per_group(layers: int, layer_group: int) -> int:
    """Layers that share one choice; `AUTO_GROUP` gives 7 of 28 layers, 8 of 32, 2 of 5."""
    if layer_group != AUTO_GROUP:
        return layer_group
    groups = max(4, -(-layers // 8))
    return max(1, -(-layers // groups))


def _views_per_group(views: Sequence[View], layer_group: int) -> int:
    """Views that share scores: 1 where heads have their own, or layers of a group other tokens."""
    size = layers_per_group(len(views), layer_group)
    places = [view.positions.cpu() for view in views]
    alike = all(map(torch.equal, places, (places[i - i % size] for i in range(len(places)))))
    return size if alike and len({view.layer for view in views}) == len(views) else 1


@torch.inference_mode()
def score_prompt(scorer: Scorer, views: Iterable[View]) -> Tensor:
    """Scores of one prompt in every layer, [L, H, N] float32 on the CPU (`score_layers`)."""
    return torch.cat([layer.cpu() for layer in score_layers(scorer, views)])


def group_budgets(needs: Needs, budgets: Sequence[int]) -> list[Sequence[int]]:
    """Budgets in groups that one scoring serves: all of them, or each where a method reads it."""
    return [[budget] for budget in budgets] if needs.budget else [budgets]
