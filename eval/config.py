"""Settings of kvp eval, and the checks that need no model.

Lists are comma-separated strings, on the command line and in YAML. What a name means (task,
method, budget) is decided where it is used; this module imports no torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

from eval.results.record_names import PROTOCOLS
from kvp import names as known_names
from kvp.artifacts.manifest import portable, recorded_name
from kvp.bounds import NotNegative, Positive
from kvp.budgets import Budget, parse_budgets
from kvp.data.metrics import METRIC_NAMES
from kvp.errors import UsageError
from kvp.names import LEARNED, UNIFORM
from kvp.program import settings as groups
from kvp.specification import Specification, split_label, split_list, split_method

Made = TypeVar("Made")
PROTECTIONS = {"both": (True, False), "on": (True,), "off": (False,)}
"""Values of `--protection`: whether first and last tokens are always kept."""
NEEDS_POLICIES = (
    "--methods kvp needs --policies: a policy of the model (a folder of kvp train, org/name, or "
    f"bundled: {', '.join(known_names.POLICIES)}); or leave kvp out: --methods full,snapkv,keydiff"
)


@dataclass(frozen=True, kw_only=True)
class PromptConfig(groups.DataConfig):
    """Prompts."""

    split: Literal["train", "validation", "test", "all"] = "test"
    """Which split of keys, values and haystack text (or rows) prompts come from. `all` takes every
    row of a file, for data that nothing was trained on."""
    chat: str | None = None
    """Dialogues for the task `chat` instead of generated ones: a file, folder or hub data set."""
    text: str | None = None
    """Text for the task `text`: a text file, a folder of them, or rows with a column `text`."""
    metric: str | None = None
    """Metric of all rows of --data, instead of the one that each row names or that fits its form:
    all, part, exact, f1, rouge_l, rouge_recall, number, code, or none (perplexity).
    For `niah_heatmap` all and rouge_recall."""
    continuation_tokens: Positive = 128
    """Tokens of running text whose likelihood the task `text` measures."""
    depths: str | None = None
    """Depths of the needle for `niah_heatmap`, % of the haystack (default 0,25,50,75,100)."""
    lengths: str | None = None
    """Prompt tokens for `niah_heatmap`, comma separated, at most `length` (default a quarter, a
    half, three quarters and all of it)."""
    max_new_tokens: Positive | None = None
    """Maximum tokens of an answer. Without it, the number that each task sets."""
    measure: Literal["answers", "perplexity"] = "answers"
    """What is measured of prompts that have an answer: the score of the generated one, or the
    perplexity of the reference. Dialogues and running text always have the perplexity measured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.depth_list, self.length_list  # reading them checks them
        if self.metric is not None and self.metric not in METRIC_NAMES:
            raise UsageError(
                f"--metric: no metric {self.metric!r}; use one of {', '.join(METRIC_NAMES)} "
                "(multiple choice: kvp lm-eval)"
            )

    @property
    def depth_list(self) -> tuple[float, ...] | None:
        """`--depths` as numbers; None where it is not given."""
        return _numbers("depths", self.depths, most=100)

    @property
    def length_list(self) -> tuple[int, ...] | None:
        """`--lengths` as whole numbers; None where it is not given."""
        numbers = _numbers("lengths", self.lengths, most=float("inf"))
        if numbers is not None and not all(number.is_integer() and number for number in numbers):
            raise UsageError(f"--lengths must be numbers of tokens, got {self.lengths!r}")
        return None if numbers is None else tuple(map(int, numbers))


def check_flag(flag: str, parse: Callable[[Any], Made], given: object) -> Made:
    """What `parse` makes of a value; where it raises UsageError, the message names the flag."""
    try:
        return parse(given)
    except UsageError as error:
        raise UsageError(f"--{flag}: {error}") from None


def _numbers(flag: str, text: str | None, *, most: float) -> tuple[float, ...] | None:
    """Numbers of a comma-separated list from 0 to `most`; UsageError, naming the flag, else."""
    if text is None:
        return None
    try:
        numbers = tuple(map(float, split_list(text)))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 <= number <= most and number < 1e9 for number in numbers):
        wanted = f"from 0 to {most:g}" if most < 1e9 else "of tokens"
        raise UsageError(f"--{flag} must be numbers {wanted}, comma separated, got {text!r}")
    return numbers


@dataclass(frozen=True, kw_only=True)
class MeasureConfig(groups.Group):
    """Measurement."""

    protection: Literal["both", "on", "off"] = "both"
    """Always keep the protected tokens (on), or not (off); kvp eval also runs methods both ways."""
    policies: groups.PathOrAddress = ""
    """Policies for the method `kvp`: `POLICY` or `label=POLICY`, comma separated. A policy is a
    folder, `nano` (bundled), `org/name` or `org/name@revision` on the hub, or an address such as
    s3://bucket/folder. A folder that holds
    policy directories means all of them; kvp evolve takes one policy. Without any, `kvp` on the
    model nano is the bundled one."""
    decode_batch: Positive = 256
    """Maximum sequences in the cache that are decoded as one batch."""

    def check_names(self) -> None:
        """Raise KvpError on a name that cannot exist."""
        super().check_names()
        for given in split_list(self.policies):
            known_names.check_policy(split_label(given)[1], "--policies: ")


_IDENTIFYING = (groups.ModelConfig, PromptConfig, groups.ProtectionConfig)
"""Groups whose settings, but for `tasks`, decide what a record means."""


def _names(group: type[groups.Group]) -> list[str]:
    return [setting.name for setting in fields(group)]


@dataclass(frozen=True, kw_only=True)
class SharedConfig(PromptConfig, MeasureConfig, groups.ModelConfig, groups.ProtectionConfig):
    """What kvp eval, kvp tune and kvp evolve share."""

    IDENTITY: ClassVar[tuple[str, ...]] = (
        *(name for group in _IDENTIFYING for name in _names(group) if name != "tasks"),
        "seed",
    )
    """Settings that decide what a record means: a results folder keeps them for life. All others
    may change between runs that extend one folder (`docs/formats.md`, Results folder)."""

    @cached_property
    def model_name(self) -> str:
        """What artefacts call the model."""
        return recorded_name(self.model)

    def identity(self) -> dict[str, Any]:
        """The settings that every run of one output folder must share."""
        values = asdict(self) | {"model": self.model_name}
        return {name: portable(values[name]) for name in self.IDENTITY}


@dataclass(frozen=True, kw_only=True)
class EvalConfig(SharedConfig, groups.RunConfig, groups.WorkersConfig, groups.DryRunConfig):
    """Settings of kvp eval."""

    out: groups.PathOrAddress = ""
    """What is written. A results folder, needed but for --dry_run: new, empty, or one of the same
    configuration to resume or extend. Ranks of one run (`--rank`) may write it together."""
    methods: str | Sequence[object] = (
        "full,kvp,random,streaming_llm,knorm,keydiff,lagkv,snapkv,tova,h2o,oracle"
    )
    """Methods, comma separated. Each is SCORER or SCORER+ALLOCATOR, both `name`, `name:preset` or
    `name(option=value)`, or one of your own as `package.module:Class`; `kvp list` prints
    them. `nulls` means all that score nothing: what the others have to beat; `tuned:FILE` what
    kvp tune chose. From Python also a list that may hold scorer objects."""
    allocators: str = UNIFORM
    """Allocators, comma separated, for every method that names none."""
    budgets: str = "6%,9%,12.5%,19%,25%,37.5%,50%"
    """Tokens kept per KV head on average, comma separated, protected ones included; `%` is of the
    cached tokens."""
    protocols: str = ",".join(PROTOCOLS)
    """Whether compression sees the question."""
    prompts: Positive = 100
    """Prompts per task."""
    timing_prompts: NotNegative = 6
    """Prompts timed one at a time after the scored ones (0: none); fewer than 6 give no interval,
    and kvp report then leaves the seconds out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag in ("methods", "allocators", "budgets", "protocols"):
            value = getattr(self, flag)
            if not (split_list(value) if isinstance(value, str) else value):
                raise UsageError(f"--{flag} is empty")
        for protocol in self.protocol_list:
            if protocol not in PROTOCOLS:
                raise UsageError(
                    f"--protocols: no protocol {protocol!r}; use {', '.join(PROTOCOLS)}"
                )
        check_flag("budgets", parse_budgets, self.budgets)

    def check_names(self) -> None:
        """Raise KvpError on a name that cannot exist, and where `kvp` has no policy."""
        super().check_names()
        named = [method for method in self.method_list if isinstance(method, str)]
        known_names.check_methods(named, "methods")
        known_names.check_allocators(self.allocator_list, "allocators")
        bases = {Specification.split(split_method(method)[0]).base for method in named}
        if LEARNED in bases and not self.policy_list:
            raise UsageError(NEEDS_POLICIES)

    @property
    def method_list(self) -> tuple[Any, ...]:
        """Method specs in order, without repeats; from Python also a list with scorer objects."""
        return split_list(self.methods) if isinstance(self.methods, str) else tuple(self.methods)

    @property
    def allocator_list(self) -> tuple[str, ...]:
        """Allocator specs in order, without repeats."""
        return split_list(self.allocators)

    @property
    def budget_list(self) -> tuple[Budget, ...]:
        """Budgets in order, without repeats."""
        return parse_budgets(self.budgets)

    @property
    def protocol_list(self) -> tuple[str, ...]:
        """Protocol names in order, without repeats."""
        return split_list(self.protocols)

    @property
    def policy_list(self) -> tuple[str, ...]:
        """Policies that `kvp` may be, `DIR` or `label=DIR`: without any, on nano, its own."""
        bundled = (known_names.NANO,) if self.model == known_names.NANO else ()
        return split_list(self.policies) or bundled


def make_eval_config(config: SharedConfig, **settings: Any) -> EvalConfig:  # noqa: ANN401
    """Settings of kvp eval that a program's config shares with it, and others."""
    names = {*_names(EvalConfig)}.intersection(_names(type(config)))
    values = {name: getattr(config, name) for name in names}
    return EvalConfig(**values, timing_prompts=0, **settings)
