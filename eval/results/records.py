"""Records of a results folder: rows.jsonl is append-only, a run resumes by the keys in it.

All records of one prompt are appended in one write (`kvp.artifacts.files`), so an interrupted run
repeats whole prompts. `docs/formats.md` defines the fields.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from eval.results.record_names import ROWS, TIMING
from eval.results.record_schemas import RESULTS_ROWS, RecordKind
from kvp.artifacts.addresses import Place
from kvp.artifacts.files import JsonLines
from kvp.errors import ResultsError

RECORDS = (ROWS, TIMING)

Record = dict[str, Any]
Key = tuple[Any, ...]

SETTING_FIELDS = ("method", "variant", "allocator", "policy", "protected", "budget_spec")
"""Fields that tell records of one prompt under one protocol apart."""


def key_of(record: Mapping[str, Any], fields: Iterable[str] = RESULTS_ROWS.key) -> Key:
    """Values of some fields of a record; KeyError where it lacks one."""
    return tuple(record[field] for field in fields)


def value_of(record: Mapping[str, Any]) -> float:
    """The score of an answer, or the log-likelihood per token of a given reply: more is better."""
    if record["nll"] is None:
        return float(record["score"])
    return -float(record["nll"]) / float(record["reply_tokens"])


def evidence_share(record: Mapping[str, Any]) -> float | None:
    """Share of the evidence that heads keep, mean over heads; None without evidence."""
    if not record.get("evidence_tokens") or not record.get("evidence_kept"):
        return None
    heads: list[float] = [kept for layer in record["evidence_kept"] for kept in layer]
    return round(sum(heads) / len(heads) / int(record["evidence_tokens"]), 3)


class RecordFile:
    """rows.jsonl of a results folder, and keys and values of the records that it holds."""

    def __init__(self, path: Place) -> None:
        """Read what is there; raises ResultsError on damage."""
        self.path = path
        self.values: dict[Key, float] = {}
        """Value of every record (`value_of`), by its key."""
        self.digests: dict[tuple[str, str], str] = {}
        """Task and example -> digest of the prompt (`Sample.digest`)."""
        self.refresh()

    def refresh(self) -> None:
        """Read the file, dropping a torn last line; raises ResultsError on damage."""
        self._lines.cut_torn_line()
        self._remember(read_records(self.path, RESULTS_ROWS) if self.path.exists() else ())

    def append(self, records: Iterable[Record]) -> None:
        """Append records in one write, flushed to the disk."""
        records = list(records)
        self._lines.append(records)
        self._remember(records)

    def write_whole(self, file: Path) -> None:
        """Write all records to a file, where they are not in it already."""
        assert file == self.path, "a file is written where it is"

    def delete_parts(self) -> None:
        """Delete what is no longer needed once the records stand in one file: nothing."""

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self.path, RESULTS_ROWS.check)

    def _remember(self, records: Iterable[Record]) -> None:
        for record in records:
            self.values[key_of(record)] = value_of(record)
            self.digests[record["task"], record["example"]] = record["prompt_digest"]


def read_records(path: Place, kind: RecordKind | None = None) -> Iterator[Record]:
    """Records of a JSON-lines file in order, without a torn last line; unchecked without a `kind`.

    Raises ResultsError, naming file and line, on a missing file, on a damaged line before the last,
    where different records have the same key, and where a record has another shape.
    """
    if not path.exists():
        raise ResultsError(f"{path} does not exist; is this a results folder?")
    lines: dict[Key, tuple[int, int]] = {}
    for number, record in JsonLines(path, kind.check if kind else None).numbered():
        this = number, hash(repr(record))
        first = lines.setdefault(key_of(record, kind.key), this) if kind else this
        if first[1] != this[1]:
            raise ResultsError(f"{path} line {number} repeats line {first[0]}; delete that line")
        if first == this:  # else a writer was stopped, and another one took its place
            yield record


def merge_records(path: Path, records: Iterable[Record], kind: RecordKind) -> None:
    """Rewrite a JSON-lines file: the given records replace those with the same key."""
    earlier = read_records(path, kind) if path.exists() else ()
    merged = {key_of(record, kind.key): record for record in (*earlier, *records)}
    JsonLines(path, kind.check).rewrite(merged.values())
