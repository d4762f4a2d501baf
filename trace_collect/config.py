"""Settings of kvp collect, and the checks that need no model. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from kvp.bounds import NotNegative, Positive
from kvp.data.splits import SPLITS
from kvp.errors import UsageError
from kvp.program import settings
from kvp.specification import split_list
from kvp.training_names import STORED_LABELS


@dataclass(frozen=True, kw_only=True)
class CollectConfig(
    settings.DataConfig,
    settings.ModelConfig,
    settings.RunConfig,
    settings.WorkersConfig,
    settings.DryRunConfig,
):
    """Which samples are collected, and which tensors are stored."""

    data: str = "ruler"
    out: settings.PathOrAddress = ""
    """What is written. A trace store, needed but for --dry_run: new, empty, or an interrupted one
    of the same settings, which is continued. Ranks of one run (`--rank`) may write it together. A
    folder, or an address such as s3://bucket/folder."""
    train: NotNegative = 200
    """Sequences of the train split."""
    validation: NotNegative = 40
    """Sequences of the validation split, which training is validated on."""
    test: NotNegative = 0
    """Sequences of the test split."""
    answers: Literal["model", "reference"] = "model"
    """What follows the prompt in a trace: the model's own greedy answer, or the data's."""
    max_new_tokens: Positive = 128
    """Maximum tokens of an answer. Tasks with a number of their own stop there."""
    labels: str = ""
    """What else to store for every prompt token, for `kvp train --label`, comma separated: kvzip,
    kvzip_plus (each an extra pass over the prompt)."""
    batch_size: Positive | None = None
    """Prompts whose answers are decoded together; the traces do not depend on it. Without it as
    many as fit into 4 GiB with their queries, keys and values, at most 16."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sequences:
            raise UsageError("--train, --validation and --test are all 0: nothing to collect")
        for label in split_list(self.labels):
            if label not in STORED_LABELS:
                raise UsageError(f"--labels: no label {label!r}; use {', '.join(STORED_LABELS)}")

    @property
    def label_list(self) -> tuple[str, ...]:
        """Labels of `--labels`, in the order of `STORED_LABELS`."""
        return tuple(label for label in STORED_LABELS if label in split_list(self.labels))

    @property
    def counts(self) -> dict[str, int]:
        """Requested sequences by split."""
        return {split: getattr(self, split) for split in SPLITS}

    @property
    def sequences(self) -> int:
        """Requested sequences."""
        return sum(self.counts.values())

    @property
    def max_tokens(self) -> int:
        """Longest sequence, tokens."""
        return self.length + self.max_new_tokens
