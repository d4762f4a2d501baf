"""A results folder as readers see it: its parts, what of the plan is done, what is damaged.

`eval.output_folder` writes it, `docs/formats.md` describes the files. Missing optional parts are
None or empty, and the report says so; damaged parts are errors. A torn last line, which an
interrupted run can leave, is left out with a note.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from eval.results.method_setting import PolicyGroups, group_policies
from eval.results.parts import fetch_results_folder
from eval.results.record_names import MANIFEST, NO_RESULTS, ROWS, TIMING
from eval.results.record_schemas import RESULTS_ROWS, TIMING_ROWS, ResultsRow, TimingRow
from eval.results.records import SETTING_FIELDS, Key, key_of, read_records
from eval.results.sealing import describe_changes
from eval.results.tuned_settings import TunedMethod, TunedSettings
from kvp.artifacts.manifest import Format, shown_text
from kvp.data.tasks.ruler import RULER_13
from kvp.errors import ResultsError

FORMAT = Format("kvp-results", 3)


@dataclass(frozen=True, kw_only=True)
class Results:
    """A results folder, read."""

    folder: Path
    manifest: Mapping[str, Any]
    records: tuple[ResultsRow, ...]
    timing: tuple[TimingRow, ...]
    """timing.jsonl; empty where there was no timing pass."""
    tuned: tuple[TunedSettings, ...]
    """What kvp tune chose and the run took from `tuned:FILE`."""
    notes: tuple[str, ...]
    altered: str = ""
    """How the files differ from what the last finished run left (`sealing.describe_changes`)."""

    def setting(self, name: str) -> Any:  # noqa: ANN401
        """A setting of the run as its manifest records it, None where it does not."""
        for part in ("identity", "config"):
            if name in self.manifest.get(part, {}):
                return self.manifest[part][name]
        return None

    @property
    def model_name(self) -> str:
        """The model as it was given; for a path its last part."""
        name = str(self.setting("model"))
        return Path(name).name if Path(name).is_absolute() or name.startswith(".") else name

    @property
    def model_details(self) -> str:
        """The model's dtype, weights digest and revision, as a sentence."""
        digest = self.setting("model_digest") or {}
        known = {"weights": (digest.get("weights") or "")[:12], "revision": digest.get("revision")}
        parts = [f", {name} {value}" for name, value in known.items() if value]
        return f"Computed in {self.setting('dtype')}{''.join(parts)}"

    @property
    def commands(self) -> list[str]:
        """Command lines that wrote the folder, the earliest first."""
        runs = (*self.manifest.get("earlier_runs", []), self.manifest)
        lines = (shown_text(run.get("command") or "command not recorded") for run in runs)
        return list(dict.fromkeys(lines))

    def describe_records(self, records: Sequence[ResultsRow]) -> str:
        """Model, prompts, length, split and seed behind some records, in a sentence."""
        prompts = {(record["task"], record["example"]) for record in records}
        tasks = list(dict.fromkeys(record["task"] for record in records))
        named = _ruler_share(tasks) or f"{len(tasks)} tasks" if len(tasks) > 3 else ", ".join(tasks)
        return (
            f"{self.model_name}, {len(prompts)} prompt{'s' if len(prompts) != 1 else ''} of "
            f"{named}, at most {self.setting('length')} tokens, {self.setting('split')} split, "
            f"seed {self.setting('seed')}."
        )

    @cached_property
    def policy_groups(self) -> PolicyGroups:
        """Group of every policy label in `records`."""
        return group_policies(self.records)

    @cached_property
    def in_plan(self) -> list[ResultsRow]:
        """`records` in the order of the plan; workers that share a run write them in any order."""
        places: dict[Key, int] = {}
        for part in self.manifest.get("planned", ()):
            for task, setting in product(part["prompts"], part["settings"]):
                places.setdefault((part["protocol"], task, *setting), len(places))
        fields = "protocol", "task", *SETTING_FIELDS
        return sorted(self.records, key=lambda row: places.get(key_of(row, fields), len(places)))

    def count_done_prompts(self) -> tuple[dict[tuple[str, str], tuple[int, int]], list[str]]:
        """Numbers of done and of planned prompts by task and protocol; the methods that lack any.

        A prompt is done where every setting of the runs that planned it has its row. Empty for a
        folder without a plan, such as one of kvp tune.
        """
        rows: dict[tuple[Any, ...], set[str]] = defaultdict(set)
        for record in self.records:
            setting = key_of(record, ("task", "protocol", *SETTING_FIELDS))
            rows[setting].add(record["example"])
        counts: dict[tuple[str, str], tuple[int, int]] = {}
        missing: dict[str, None] = {}
        for part in self.manifest.get("planned", ()):
            for task, prompts in part["prompts"].items():
                key = task, part["protocol"]
                there = set.intersection(*(rows[*key, *setting] for setting in part["settings"]))
                for method, *others in part["settings"]:
                    if len(rows[*key, method, *others]) < prompts:
                        missing[method] = None
                lacking, planned = counts.get(key, (0, 0))
                counts[key] = max(lacking, prompts - len(there)), max(planned, prompts)
        done = {key: (planned - lacking, planned) for key, (lacking, planned) in counts.items()}
        return done, list(missing)

    @cached_property
    def unfinished(self) -> str:
        """The planned prompts that are not done, in one sentence; "" where a folder is complete."""
        parts, missing = self.count_done_prompts()
        lacking = [
            f"{done} of {planned} prompts of {task} ({protocol})"
            for (task, protocol), (done, planned) in parts.items()
            if done < planned
        ]
        if not lacking:
            return self.altered and f"Unfinished: {self.altered}; the same command continues."
        more = f", {len(lacking) - 2} more" if len(lacking) > 2 else ""
        done, planned = (sum(part[side] for part in parts.values()) for side in (0, 1))
        again = "the same command"
        if self.manifest.get("files") and not self.altered:  # the last one has ended
            again = f"an earlier command, whose --methods has {', '.join(missing)},"
        return (
            f"Unfinished: {', '.join(lacking[:2])}{more}; {done} of {planned} evaluations are "
            f"done, {again} continues."
        )

    def tuned_under(self, protocol: str) -> list[tuple[TunedMethod, str]]:
        """What kvp tune chose for a protocol, with the split that it chose on."""
        chosen = [(entry, settings.split) for settings in self.tuned for entry in settings.methods]
        return [(entry, split) for entry, split in chosen if entry.protocol == protocol]


def load_results(name: str | Path) -> Results:
    """Read the results folder at a path or an address; KvpError where it is none or damaged."""
    return read_folder(fetch_results_folder(str(name)))


def read_folder(folder: Path) -> Results:
    """Read a results folder; ResultsError, naming the file, where it is none or damaged."""
    if not folder.is_dir():
        raise ResultsError(NO_RESULTS.format(folder))
    if not (folder / MANIFEST).exists():
        raise ResultsError(f"{folder} holds no {MANIFEST}; is this a results folder of kvp eval?")
    manifest = FORMAT.read(folder / MANIFEST, ResultsError)
    notes = [*map(shown_text, manifest.get("notes", []))]
    read: dict[str, tuple[Any, ...]] = {ROWS: (), TIMING: ()}
    for kind in (RESULTS_ROWS, TIMING_ROWS):
        if (folder / (name := kind.file)).exists():
            read[name] = tuple(read_records(folder / name, kind))
            if (folder / name).read_bytes()[-1:] not in (b"", b"\n"):
                notes.append(f"The last line of {name} is torn (an interrupted run) and left out.")
    if not read[ROWS]:
        raise ResultsError(f"{folder} holds no {ROWS} with records yet; repeat its kvp eval")
    label, tuned = str(folder / MANIFEST), manifest.get("tuned", {}).values()
    return Results(
        folder=folder, manifest=manifest, records=read[ROWS], timing=read[TIMING],
        tuned=tuple(TunedSettings.from_json(settings, label) for settings in tuned),
        notes=tuple(notes), altered=describe_changes(folder, manifest),
    )  # fmt: skip


def _ruler_share(names: Iterable[str]) -> str:
    """How many of RULER's thirteen tasks a mean over tasks is over; empty without any of them."""
    ran = set(names)
    lacking = [name for name in RULER_13 if name not in ran]
    if len(lacking) == len(RULER_13):
        return ""
    others = sorted(ran - set(RULER_13))
    share = f"{len(RULER_13) - len(lacking)} of " if lacking else "" if others else "exactly "
    more = f" and {len(others)} more ({', '.join(others)})" if others else ""
    text = f"{share}RULER's {len(RULER_13)} tasks{more}"
    return f"{text}, without {', '.join(lacking)}" if 0 < len(lacking) <= 6 else text
