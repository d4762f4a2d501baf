"""Settings that several programs share, each declared once; no torch here, for a fast `--help`.

A program's config inherits the groups it reads and adds its own fields. All of them are flags
without a prefix, so a flag has one type and one meaning everywhere; a program that needs another
default repeats the field without a docstring. `command_line` turns a config into flags: the
first line of a group's docstring is its title in `--help`, a field's docstring is its help.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args, get_type_hints

from annotated_types import Ge

from kvp.artifacts.addresses import is_address
from kvp.bounds import NotNegative, Positive, Weight
from kvp.errors import UsageError
from kvp.geometry import DtypeName
from kvp.names import check_model_name
from kvp.plugins import is_object_name
from kvp.processes import Rank, rank_of
from kvp.specification import split_list


class MayBeAddress(NamedTuple):
    """Mark of a setting's type: it may be an address (`kvp.artifacts.addresses`)."""


PathOrAddress = Annotated[str, MayBeAddress()]
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Base of configs and groups, without a setting: bounds are checked when a config is made."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Values that each `--preset` gives; the first is the default."""
    FOLDERS: ClassVar[Mapping[str, str]] = {}
    """Settings that name folders which must be there, and what to say of one that is not."""

    def __post_init__(self) -> None:
        """Raise UsageError naming the flag that is out of bounds, missing, or no such address."""
        if getattr(self, "out", None) == "" and not getattr(self, "dry_run", False):
            raise UsageError("--out is missing")
        marks = _marks_of(type(self))
        for name, value in vars(self).items():
            texts = value if isinstance(value, list | tuple) else [value]
            for text in texts if MayBeAddress() not in marks[name] else ():
                if isinstance(text, str) and is_address(text):
                    raise UsageError(
                        f"--{name} cannot lie in an object store ({text}): name a path on a disk"
                    )
            for mark in marks[name]:
                if isinstance(mark, Ge) and value is not None and not value >= mark.ge:
                    raise UsageError(f"--{name} must be at least {mark.ge}, got {value}")

    def check_names(self) -> None:
        """Raise KvpError on a name that cannot exist, before what it names is imported."""
        for setting, message in self.FOLDERS.items():
            name = getattr(self, setting)
            if not is_address(name) and not (name and Path(name).is_dir()):
                raise UsageError(message.format(name or "''"))


def _marks_of(config_class: type[Group]) -> dict[str, set[object]]:
    """Marks of every setting; one that a subclass repeats keeps those that it had."""
    marks: dict[str, set[object]] = defaultdict(set)
    for owner in config_class.__mro__:
        for name, hint in get_type_hints(owner, include_extras=True).items():
            for part in (hint, *get_args(hint)):
                marks[name].update(getattr(part, "__metadata__", ()))
    return marks


@dataclass(frozen=True, kw_only=True)
class DeviceConfig(Group):
    """Device."""

    device: str = "cpu"
    """Torch device: cpu, cuda or cuda:INDEX."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _DEVICE.fullmatch(self.device):
            raise UsageError(f"--device must be cpu, cuda or cuda:INDEX, got {self.device!r}")


@dataclass(frozen=True, kw_only=True)
class RunConfig(DeviceConfig):
    """Run."""

    seed: NotNegative = 0
    """Seed of everything that is drawn or generated."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Group):
    """Model."""

    model: str = "nano"
    """`nano` (bundled), a local folder, a GGUF file or a hub id."""
    revision: str | None = None
    """Hub revision of the model."""
    dtype: DtypeName = "float32"
    """Dtype of the model, and of traces that are taken from it."""
    chat_template: bool = True
    """Put prompts and messages into the tokenizer's chat template, where it has one; without it
    they are plain text. Running text and worked examples never have one."""

    def check_names(self) -> None:
        """Raise KvpError on a name that cannot exist."""
        super().check_names()
        check_model_name(self.model)


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Group):
    """Prompts."""

    tasks: str = "ruler"
    """Tasks, comma separated: `ruler` (all of RULER's that fit into `length`), `scbench`,
    `niah_heatmap`, or single ones by their names; docs/data.md lists all. kvp eval, kvp tune and
    kvp evolve also know `chat` (perplexity of dialogues), `text` (of running text), `data` (answers
    to rows of your own) and `longbench`."""
    length: Positive = 512
    """Maximum prompt tokens, chat template included. The answer comes on top, except for the task
    `text`, whose context and continuation have this many together."""
    essays: str | None = None
    """Text file or folder of `.txt` files for the essay haystack, instead of generated prose."""
    squad: str | None = None
    """SQuAD's questions for RULER's `qa_1`: its JSON, or rows of context, question and answers."""
    hotpotqa: str | None = None
    """HotpotQA's questions with distractors for RULER's `qa_2`: its JSON, or rows of the hub."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.task_list:
            raise UsageError("--tasks is empty")

    def check_names(self) -> None:
        """Raise KvpError on a name that cannot exist."""
        from kvp.data.tasks import expand_tasks  # no sooner: --help stays fast

        super().check_names()
        expand_tasks([name for name in self.task_list if not is_object_name(name)])

    @property
    def task_list(self) -> tuple[str, ...]:
        """Task names in order, without repeats."""
        return split_list(self.tasks)


@dataclass(frozen=True, kw_only=True)
class DataConfig(TaskConfig):
    """Data."""

    data: str | None = None
    """Rows of your own: a file, a folder or a hub data set (`NAME` or `NAME:CONFIGURATION`), see
    docs/data.md. kvp collect also takes `ruler` and `chat` (generated prompts), and mixtures
    (`ruler:0.5,chat:0.3,FILE:0.2`); kvp eval, kvp tune and kvp evolve read it for the task `data`
    and for benchmarks."""
    tree_paths: Literal["best", "all"] = "best"
    """Threads of a message tree that become dialogues: `best` (the best-ranked one, so that no text
    is used twice) or `all`. A chat has at most one of a tree."""


@dataclass(frozen=True, kw_only=True)
class ProtectionConfig(Group):
    """Protection."""

    sinks: NotNegative = 4
    """First tokens that protection always keeps."""
    recents: NotNegative = 16
    """Most recent tokens that protection always keeps."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(Group):
    """Memory."""

    memory_gb: Weight = 4.0
    """RAM for what is kept instead of being read or computed again, GB in each process."""


@dataclass(frozen=True, kw_only=True)
class WorkersConfig(Group):
    """Workers."""

    rank: NotNegative | None = None
    """Which of the processes that share this job this is, from 0; all have the same --out. Without
    it what torchrun or Slurm say (docs/scaling.md)."""
    world_size: Positive | None = None
    """How many processes share this job."""
    engine: Literal["local", "ray"] = "local"
    """Who does the work: this process (local), or workers that Ray starts (ray, with the extra
    `ray`: pip install -e '.[ray]')."""
    workers: Positive | None = None
    """Workers of --engine ray, each with the model in its memory and, with --device cuda, a GPU.
    Without it as many as Ray has devices for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rank_of(self.rank, self.world_size)
        if self.engine == "ray":
            if self.rank is not None or self.world_size is not None:
                raise UsageError(
                    "--engine ray numbers its workers itself: leave out --rank and --world_size"
                )
        elif self.workers is not None:
            raise UsageError("--workers is for --engine ray")

    @property
    def worker(self) -> Rank:
        """Which process this is."""
        return rank_of(self.rank, self.world_size)

    def local(self, **settings: Any) -> Self:  # noqa: ANN401
        """The same job without Ray, with other `settings`."""
        return replace(self, engine="local", workers=None, **settings)

    def recorded_settings(self) -> dict[str, Any]:
        """All settings but these, which change nothing in what is written."""
        left_out = {field.name for field in fields(WorkersConfig)}
        return {name: value for name, value in asdict(self).items() if name not in left_out}


@dataclass(frozen=True, kw_only=True)
class DryRunConfig(Group):
    """Dry run."""

    dry_run: bool = False
    """Print what the run would do and cost, and stop; nothing is written."""
