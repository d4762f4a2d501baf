"""Settings of kvp-eval and the checks that need no model.

Lists are comma-separated strings, on the command line and in YAML alike. What a name means (task,
method, budget) is decided where it is used; this module imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvp.budgets import Budget, parse_budgets
from kvp.cli import split_list
from kvp.errors import UsageError

PROTOCOLS = ("query_aware", "query_agnostic")
"""Question seen at compression, or only afterwards; never mixed in one table."""

IDENTITY_FIELDS = (
    "model",
    "revision",
    "length",
    "split",
    "essays",
    "chat",
    "text",
    "data",
    "continuation",
    "seed",
    "dtype",
    "sinks",
    "recents",
    "max_new_tokens",
)
"""Settings that decide what a row means: a results folder keeps them for life. All others may
change between runs that extend one folder (`docs/formats.md`, Results folder)."""

_LEAST = {
    "prompts": 1,
    "length": 1,
    "rows": 1,
    "continuation": 1,
    "bootstrap": 1,
    "curve_sequences": 1,
    "max_new_tokens": 1,
    "timing_prompts": 0,
    "sinks": 0,
    "recents": 0,
    "seed": 0,
}


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Settings of one evaluation."""

    out: str
    """Results folder: new, empty, or one of the same configuration to resume or extend."""
    model: str = "nano"
    """`nano` (bundled), a local folder or a hub id."""
    revision: str | None = None
    """Hub revision of the model."""
    policies: str = ""
    """Policy directories for `kvp`: `DIR` or `label=DIR`, comma separated. A folder that holds
    policy directories stands for all of them."""
    methods: str = "full,kvp,random,streaming_llm,knorm,keydiff,lagkv,snapkv,tova,h2o,oracle"
    """Methods, comma separated, each SCORER or SCORER+ALLOCATOR, both as `name`, `name:preset` or
    `name(option=value)`; `kvp-eval --list` prints them."""
    allocators: str = "uniform"
    """Allocators, comma separated, for every method that names none."""
    tasks: str = "ruler"
    """RULER task names, `ruler` for all of them, `chat` for dialogue perplexity, `text` for the
    perplexity of running text (`--text`)."""
    budgets: str = "6%,9%,12.5%,19%,25%,37.5%,50%"
    """Tokens kept per KV head, protected ones included; `%` is of the tokens in the cache."""
    protocols: str = "query_aware,query_agnostic"
    """Whether compression sees the question."""
    protection: Literal["both", "on", "off"] = "both"
    """Run methods with first and last tokens always kept, without, or both ways."""
    sinks: int = 4
    """First tokens that protection keeps."""
    recents: int = 16
    """Most recent tokens that protection keeps."""
    prompts: int = 100
    """Prompts per task."""
    length: int = 512
    """Most prompt tokens, chat template and answer prefix included; the answer comes on top, but
    for the task `text`, whose context and continuation have this many together."""
    split: Literal["train", "validation", "test"] = "test"
    """Which split of keys, values and haystack text (or dialogues) prompts come from."""
    essays: str | None = None
    """Text file or folder for the essay haystack instead of the built-in prose."""
    chat: str | None = None
    """JSONL of dialogues for the chat task instead of the built-in ones."""
    data: str | None = None
    """File, folder or hub data set whose rows the task `data` measures (docs/data.md)."""
    text: str | None = None
    """Text file, folder of text files or JSONL with a `text` column, for the task `text`."""
    continuation: int = 128
    """Tokens of running text whose likelihood the task `text` measures."""
    max_new_tokens: int | None = None
    """Most tokens to generate, instead of each task's own number."""
    seed: int = 0
    """Seed of prompts, random methods and resampling."""
    device: str = "cpu"
    """Torch device."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Model dtype."""
    rows: int = 256
    """Most cache rows that are decoded as one batch."""
    timing_prompts: int = 3
    """Prompts timed one row at a time after the scored ones (0: none)."""
    curves: str | None = None
    """Trace store whose held-out sequences give the cost-per-budget curves."""
    curve_sequences: int = 32
    """Most sequences of the trace store used for the curves."""
    tokens: bool = True
    """Write the ranks of one prompt for every method."""
    bootstrap: int = 2000
    """Resamples behind each interval of the closing table."""
    dry_run: bool = False
    """Say what the run would take, from its settings and one measured prompt, and stop."""

    def __post_init__(self) -> None:
        """Raise ValueError or UsageError, naming the flag, on settings that cannot work."""
        for flag, least in _LEAST.items():
            value = getattr(self, flag)
            if value is not None and value < least:
                raise ValueError(f"--{flag} must be at least {least}, got {value}")
        for flag in ("methods", "allocators", "tasks", "budgets", "protocols"):
            if not split_list(getattr(self, flag)):
                raise ValueError(f"--{flag} is empty")
        for protocol in self.protocol_list:
            if protocol not in PROTOCOLS:
                raise ValueError(
                    f"--protocols: no protocol {protocol!r}; use {', '.join(PROTOCOLS)}"
                )

        try:
            parse_budgets(self.budgets)
        except UsageError as error:
            raise UsageError(f"--budgets: {error}") from None

    @property
    def method_list(self) -> tuple[Any, ...]:
        """Method specs in order, without repeats."""
        if isinstance(self.methods, str):
            return split_list(self.methods)
        return tuple(self.methods)

    @property
    def allocator_list(self) -> tuple[str, ...]:
        """Allocator specs in order, without repeats."""
        return split_list(self.allocators)

    @property
    def task_list(self) -> tuple[str, ...]:
        """Task names in order, without repeats."""
        return split_list(self.tasks)

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
        """Policy arguments, `DIR` or `label=DIR`."""
        return split_list(self.policies)

    def identity(self) -> dict[str, Any]:
        """The settings every run of one results folder must share."""
        values = asdict(self)
        identity = {name: values[name] for name in IDENTITY_FIELDS}
        if self.data is None:  # folders of earlier versions do not have it
            del identity["data"]
        return identity
