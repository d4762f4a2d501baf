"""Settings of `kvp tune`; no torch here."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from eval.config import EvalConfig, SharedConfig, make_eval_config
from kvp.bounds import Positive
from kvp.program.settings import RunConfig


@dataclass(frozen=True, kw_only=True)
class TuneConfig(SharedConfig, RunConfig):
    """Tuning."""

    out: str
    """What is written. A results folder with settings.json and settings.csv: new, empty, or one of
    the same configuration to resume or extend."""
    methods: str = "random,streaming_llm,knorm,keydiff,lagkv,snapkv,tova,h2o"
    """Methods, comma separated. What is written with a name is fixed
    (`snapkv(kernel=7)+ada`), everything else is searched."""
    allocators: str = "uniform,pyramid,ada,global"
    """Allocators, comma separated, for every method that names none."""
    settings_per_method: Annotated[int, Ge(2)] = 48
    """Settings that are tried for each method and protocol, published presets among them. A search
    whose best number is then at an end of what was tried goes on beyond it, with up to as many."""
    budgets: str = "6%,12.5%,25%,50%"
    """Tokens kept per KV head on average, comma separated, protected ones included; `%` is of the
    cached tokens."""
    protocols: str = EvalConfig.protocols
    """Whether compression sees the question."""
    prompts: Positive = 20
    """Prompts per task."""
    split: Literal["validation", "train"] = "validation"
    """Which split of keys, values and haystack text (or rows) prompts come from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.eval_config  # reading it checks it

    def check_names(self) -> None:
        """Raise KvpError as kvp eval does."""
        self.eval_config.check_names()

    @property
    def eval_config(self) -> EvalConfig:
        """The settings of the measurement, as kvp eval takes them."""
        return make_eval_config(self)
