"""The evaluations of a run in pieces: prompts that share a prefill, done together or not at all.

Questions about one context that the compression does not see share a prefill: it is run and
compressed once. Every question is then fed to caches of its own, gathered from that prefill, so
none sees another one, and records are those of each prompt alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from eval.evaluate import Bench, RunNames, evaluate_together, identify
from eval.prepare import Prepared
from eval.results.records import RecordFile, key_of
from eval.settings import Setting
from eval.tasks import Prompt
from kvp.errors import ResultsError

Work = tuple[Prompt, str, Sequence[Setting]]
"""A prompt, a protocol, and the settings to evaluate."""


def by_prefill(work: Iterable[Work]) -> list[list[Work]]:
    """Groups of equal prefill, protocol, task and settings, in the order of their first members."""
    groups: dict[object, list[Work]] = {}
    for prompt, protocol, settings in work:
        again = prompt.fed_again(protocol)
        key = (
            prompt.task,
            protocol,
            prompt.encoded.ids[: prompt.boundary(protocol) + again],
            again,
            prompt.question_tokens(protocol),
            tuple(map(id, settings)),
        )
        groups.setdefault(key, []).append((prompt, protocol, settings))
    return list(groups.values())


class WorkPieces:
    """The pieces of a run, numbered alike in all its processes, and which of them are done."""

    def __init__(self, run: RunNames, prepared: Prepared, file: RecordFile) -> None:
        """Append to `file`.

        Raises ResultsError where the file holds answers to other prompts of the same names.
        """
        for prompt in prepared.prompts:
            digest = file.digests.get((prompt.task, prompt.sample.id))
            if digest is not None and digest != prompt.sample.digest:
                raise ResultsError(
                    f"{file.path} holds answers to another prompt called {prompt.sample.id}: the "
                    "data or its task has changed since; choose another --out"
                )
        self._run = run
        self._file = file
        self._groups = by_prefill(
            (prompt, protocol, prepared.settings(prompt, protocol))
            for prompt, protocol in prepared.work
        )

    def __len__(self) -> int:
        """Number of pieces."""
        return len(self._groups)

    def prompts(self, numbers: Iterable[int]) -> int:
        """Prompts, per protocol, in some pieces."""
        return sum(len(self._groups[number]) for number in numbers)

    def missing(self, number: int) -> list[Work]:
        """The prompts of a piece with the settings that have no record yet."""
        left: list[Work] = []
        for prompt, protocol, planned in self._groups[number]:
            settings = [
                setting for setting in planned
                if key_of(identify(self._run, prompt, protocol, setting)) not in self._file.keys
            ]  # fmt: skip
            if settings:
                left.append((prompt, protocol, settings))
        return left

    def undone(self, numbers: Iterable[int]) -> list[int]:
        """Those of some pieces that lack records."""
        return [number for number in numbers if self.missing(number)]

    def do(self, bench: Bench, number: int, advance: Callable[[str], None]) -> None:
        """Evaluate what is missing of a piece; `advance` is called with the name of each prompt."""
        for group in by_prefill(self.missing(number)):
            _, protocol, shared = group[0]
            prompts = [prompt for prompt, _, _ in group]
            together = evaluate_together(bench, prompts, protocol, shared)
            for prompt, records in zip(prompts, together, strict=True):
                self._file.append(records)
                advance(f"{prompt.task} {protocol}")
