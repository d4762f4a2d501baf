"""The folder of a search: manifest.json, search.jsonl (the journal), and budgets.json at the end.

A folder keeps one search for life: the same settings resume it or find it finished, others are
refused (`kvp.artifacts.claim`). The journal has one JSON line per generation, appended and flushed
as it ends. A resumed search draws the same candidates from the same seed and takes their scores
from there; nothing is unpickled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kvp.artifacts.addresses import Place
from kvp.artifacts.claim import FolderKind, OutputFolder
from kvp.artifacts.jsonl import JsonLines
from kvp.errors import ResultsError
from kvp.manifest import read_sealed_json, write_sealed_json

FORMAT = "kvp-search"
FORMAT_VERSION = 2
MANIFEST = "manifest.json"
JOURNAL = "search.jsonl"


def _read_manifest(path: Place) -> Mapping[str, Any]:
    content = read_sealed_json(path, ResultsError)
    if (version := content.get("format_version")) != FORMAT_VERSION:
        raise ResultsError(
            f"{path} has format_version {version!r}, this kvp evolve reads {FORMAT_VERSION}; "
            "choose another --out"
        )
    return content


SEARCH = FolderKind(
    noun="search",
    marker=MANIFEST,
    error=ResultsError,
    format=FORMAT,
    read=_read_manifest,
    optional=("model_digest",),
)


def begin_search(folder: OutputFolder, identity: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Write the manifest of a claimed folder, unless it is there; else compare the identity."""
    folder.refresh(identity)
    if folder.existing_marker is None:
        content = {"format": FORMAT, "format_version": FORMAT_VERSION, "identity": dict(identity)}
        write_sealed_json(folder.path / MANIFEST, {**content, "run": dict(run)})


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One generation of one group."""

    group: int
    """From 0, bottom to top; -1 for the uniform start."""
    generation: int
    x: list[list[float]]
    """Points of the unit cube, one per candidate."""
    schemes: list[tuple[int, ...]]
    """Counts per layer, one scheme per candidate."""
    scores: list[float]
    """Mean task scores."""
    fitness: list[float]
    evaluated: int
    """Schemes that had to be run; the others had been seen before."""
    seconds: float = 0.0
    """Wall-clock time."""


class Journal:
    """The generations of a search: first replayed, then appended to."""

    def __init__(
        self, path: Path, *, on_append: Callable[[Generation], None] | None = None
    ) -> None:
        """Open or create; a torn last line is dropped, ResultsError on other damage.

        `on_append` is called with every appended generation.
        """
        self.path = path
        self._on_append = on_append
        self.generations: list[Generation] = []
        self._lines = JsonLines(path)
        self._lines.cut_torn_line()
        for number, record in self._lines.numbered() if path.exists() else ():
            try:
                entry = TypeAdapter(Generation).validate_python(record)
            except ValidationError:
                entry = None
            if entry is None or not len(entry.scores) == len(entry.fitness) == len(entry.schemes):
                raise ResultsError(f"{path} line {number} is damaged; choose another --out")
            self.generations.append(entry)
        self._replayed = 0
        self._started = time.monotonic()

    @property
    def last(self) -> Generation:
        """The generation just replayed or appended."""
        return self.generations[self._replayed - 1]

    @property
    def evaluations(self) -> int:
        """Schemes that were run."""
        return sum(entry.evaluated for entry in self.generations)

    @property
    def seconds(self) -> float:
        """Wall-clock time of all generations, over all runs."""
        return sum(entry.seconds for entry in self.generations)

    def replay(self, group: int, generation: int, schemes: Sequence[tuple[int, ...]]) -> bool:
        """Move to the next recorded generation, if there is one.

        Raises ResultsError if it is of another search.
        """
        if self._replayed == len(self.generations):
            return False
        entry = self.generations[self._replayed]
        if (entry.group, entry.generation, entry.schemes) != (group, generation, list(schemes)):
            raise ResultsError(
                f"{self.path} line {self._replayed + 1} is not what this search draws; "
                "choose another --out"
            )
        self._replayed += 1
        return True

    def append(self, entry: Generation) -> None:
        """Add a generation and bring it to the disk."""
        now = time.monotonic()
        entry = Generation(**{**vars(entry), "seconds": now - self._started})
        self._started = now
        self._lines.append([asdict(entry)])
        self.generations.append(entry)
        self._replayed += 1
        if self._on_append is not None:
            self._on_append(entry)
