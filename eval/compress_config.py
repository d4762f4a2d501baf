"""Settings of `kvp compress`; no torch here."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from eval.config import check_flag
from kvp import names
from kvp.budgets import parse_budget
from kvp.errors import UsageError
from kvp.gguf_architectures import EQUAL_COUNTS
from kvp.program.settings import DeviceConfig, ModelConfig
from kvp.specification import split_method, split_policy


@dataclass(frozen=True, kw_only=True)
class CompressConfig(ModelConfig, DeviceConfig):
    """Compress."""

    documents: str | Sequence[str] = field(kw_only=False)
    """Texts to compress, a context each. Text files, folders of them, or rows (JSONL, JSON,
    parquet, a hub data set) whose `context`, `text` or `messages` is the context."""
    policy: str | None = None
    """Policy that chooses tokens. A directory written by kvp train, a bundled one's name, an
    address, or org/name on the hub. POLICY+global: heads share the budget."""
    method: str | None = None
    """Method that chooses tokens where there is no policy, or METHOD+ALLOCATOR."""
    budget: str = "12.5%"
    """Tokens kept per KV head on average, protected ones included; `%` is of the cached tokens.
    Rounded up to a multiple of 32, the same number in every head without an allocator; 4 first and
    16 last tokens are protected. For questions not known in advance: POLICY+global and 25%, or 50%
    with equal counts."""
    gguf: str | None = None
    """GGUF file of a model. A slot file for a llama-server that runs it is written beside each
    context; without --model this file also computes the context. Every head keeps equally many."""
    out: str
    """What is written. A folder of contexts, each a file that its digest names."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("budget", parse_budget, self.budget)

    @property
    def label(self) -> str:
        """What chooses tokens, as files and messages name it; UsageError where nothing does."""
        if bool(self.policy) == bool(self.method):
            raise UsageError("give one of --policy and --method, which chooses tokens")
        return self.policy or str(self.method)

    @property
    def sides(self) -> tuple[str, str | None]:
        """What ranks tokens, and the allocator."""
        return split_policy(self.label) if self.policy else split_method(self.label)

    def check_names(self) -> None:
        """Raise KvpError on a name that cannot exist, and for an allocator with --gguf."""
        super().check_names()
        name, allocator = self.sides
        if self.policy:
            names.check_policy(name, "--policy: ")
            names.check_allocators([allocator] if allocator else [], "policy")
        else:
            names.check_methods([self.label], "method", ())
        if self.gguf and allocator not in (None, names.UNIFORM):
            raise UsageError(f"--gguf: {EQUAL_COUNTS}")
