"""What is done to a program, or to what it wrote, and what must follow."""

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

from benchmarks.faults.harness import (
    FAULTS,
    NOBODY,
    Child,
    Ended,
    Trial,
    program_outcome,
    reader_outcome,
    worst,
)
from benchmarks.faults.programs import (
    COMMANDS,
    Command,
    Reader,
    read_budgets,
    read_contexts,
    read_or_refuse,
    read_policy,
    read_results,
    read_settings,
    read_traces,
)


class Area(NamedTuple):
    """One kind of disturbance of one program or artefact."""

    run: Callable[[int], list[Trial]]
    """Makes a number of trials."""
    trials: int
    """Their number in a whole run."""


class Run:
    """A command that is run again and again, each time into a new place."""

    def __init__(self, name: str, made: Path, scratch: Path) -> None:
        """Run it once, undisturbed; RuntimeError where that fails."""
        self.command, self.made, self.scratch = COMMANDS[name], made, scratch
        self.name, self.draw, self.number = name, random.Random(name), 1
        self.place = self._make_folder()
        before = time.monotonic()
        ended = self.start().wait(300)
        self.seconds = time.monotonic() - before
        self.truth = self.read().value
        if ended.code != 0 or not self.truth or "value" not in self.truth:
            raise RuntimeError(f"{name} failed undisturbed: {ended.error[-2000:]} {self.truth}")
        self.bytes = sum(path.stat().st_size for path in self.place.rglob("*") if path.is_file())

    def new_place(self) -> None:
        """Make the folder of the next trial, in which the program makes `out`."""
        shutil.rmtree(self.place)
        self.number += 1
        self.place = self._make_folder()

    def _make_folder(self) -> Path:
        folder = Path(mkdtemp(prefix=self.name, dir=self.scratch))
        folder.chmod(0o755)
        return folder

    @property
    def out(self) -> str:
        """What the program writes."""
        return str(self.place / "out")

    def start(self, other: Command | None = None, **limits: int | None) -> Child:
        """Begin the command, or another one in its place."""
        work = (other or self.command).work(self.made, self.out)
        return Child(work, **limits)

    def read(self) -> Ended:
        """Read its output in a child process."""
        return Child(self.command.content(self.out)).wait()

    def moment(self) -> float:
        """A random time within its run, seconds."""
        return self.draw.uniform(0, self.seconds)

    def again(self) -> Trial:
        """The same command once more, undisturbed: it must end as ever."""
        trial = program_outcome(self.start().wait())
        found = reader_outcome(self.read(), self.truth["value"])
        if trial.outcome in FAULTS or found.outcome == "survived":
            return max(trial, found, key=lambda each: each.outcome in FAULTS)
        outcome = "hang" if trial.outcome == "said" else "silent"
        return Trial(outcome=outcome, detail=f"repeated: {trial.detail}; read: {found.detail}")


def killed(run: Run) -> Iterator[Trial]:
    """SIGKILL at a random moment."""
    child = run.start()
    time.sleep(run.moment())
    child.signal(signal.SIGKILL)
    yield program_outcome(child.wait())
    yield run.again()


def full_disk(run: Run) -> Iterator[Trial]:
    """A small file system; in every second trial, and where none can be mounted, small files."""
    size = max(4096, int(run.draw.random() ** 2 * 1.2 * run.bytes))
    mounted = run.number % 2 == 0 and _mount(run.place, f"size={size}")
    try:
        yield program_outcome(run.start(largest_file=None if mounted else size).wait())
        if mounted:
            _mount(run.place, "remount,size=1g")
        yield run.again()
    finally:
        if mounted:
            subprocess.run(["umount", run.place], check=True)


def _mount(folder: Path, options: str) -> bool:
    call = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(call, capture_output=True, check=False).returncode == 0


def read_only(run: Run) -> Iterator[Trial]:
    """A folder that may not be written: the one above, or what an interrupted run has left."""
    if run.number % 2:
        child = run.start()
        time.sleep(run.moment())
        child.signal(signal.SIGKILL)
        child.wait()
    folders = [run.place, *(path for path in run.place.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    user = NOBODY if run.place.stat().st_uid == 0 else None  # root writes everywhere
    yield program_outcome(run.start(user=user).wait())
    for folder in folders:
        folder.chmod(0o755)
    yield run.again()


def replaced(run: Run) -> Iterator[Trial]:
    """A process is stopped, another takes its place, and the first goes on."""
    child, out = run.start(), Path(run.out)
    time.sleep(run.moment())
    child.signal(signal.SIGSTOP)
    kind = run.number % 3
    if kind == 1:  # somebody who thinks that it is dead
        (out / "writer.lock").unlink(missing_ok=True)
    elif kind == 2 and out.exists():
        out.rename(run.place / "away")
    yield program_outcome(run.start().wait())
    child.signal(signal.SIGCONT)
    yield program_outcome(child.wait())
    yield run.again()


def together(run: Run) -> Iterator[Trial]:
    """Two programs write one folder: the same command twice, or another one."""
    folders = [name for name in COMMANDS if COMMANDS[name].folder and name != run.name]
    other = COMMANDS[run.draw.choice(folders)] if run.command.folder and run.number % 2 else None
    children = [run.start(), run.start(other)]
    parts = [program_outcome(child.wait()) for child in children]
    yield from parts
    ours, theirs = (part.outcome == "survived" for part in parts)
    if other is None or not theirs:
        yield run.again()
    elif ours:
        yield Trial(outcome="silent", detail=f"{other.program} wrote there, too")


DISTURBANCES = {
    "kill": (killed, 50), "full disk": (full_disk, 20), "read-only folder": (read_only, 20),
    "stopped and replaced": (replaced, 12), "two programs": (together, 12),
}  # fmt: skip
"""Each disturbance, and the trials of a whole area."""


def disturb(name: str, program: str, made: Path, scratch: Path, trials: int) -> list[Trial]:
    """Disturb one program in `trials` trials."""
    run, found = Run(program, made, scratch), []
    for _ in range(trials):
        run.new_place()
        found.append(worst(DISTURBANCES[name][0](run), str(run.number)))
    return found


FILES: dict[str, tuple[str, Reader, Sequence[str]]] = {
    "trace store": (
        "traces", read_traces,
        ("manifest.json", "zarr.json", "*/zarr.json", "*/c.*", "output_gram.safetensors",
         "sequences/*"),
    ),
    "policy": ("policy", read_policy, ("policy.json", "layer_*")),
    "results": ("results", read_results, ("manifest.json", "rows.jsonl", "timing.jsonl")),
    "settings": ("tuned", read_settings, ("settings.json",)),
    "budget file": ("budgets", read_budgets, ("budgets.json",)),
    "context": ("contexts", read_contexts, ("*.context",)),
}  # fmt: skip
"""Of each artefact its folder, its reader and patterns of its files."""
RESUMED = {
    "train": ("run.json", "checkpoints/last.ckpt"),
    "evolve": ("manifest.json", "search.jsonl"),
    "eval": ("manifest.json", "rows.jsonl"),
}
"""Programs that go on from an unfinished folder, and its files."""


def flipped(source: Path, copy: Path, kind: str, draw: random.Random) -> str:
    """Copy a folder with one flipped bit in a file of a kind; returns file and bit, in words."""
    shutil.copytree(source, copy)
    path = draw.choice(sorted(copy.glob(kind)))
    data = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"{path.relative_to(copy)} bit {bit}"


def flip_read(artefact: str, kind: str, made: Path, scratch: Path, trials: int) -> list[Trial]:
    """Read an artefact with a flipped bit: the same content, or one line."""
    folder, read, _ = FILES[artefact]
    draw, truth, found = random.Random(artefact + kind), read(made / folder), []
    for number in range(trials):
        name = flipped(made / folder, copy := scratch / f"{folder}{number}", kind, draw)
        ended = Child(partial(read_or_refuse, read, copy)).wait()
        found.append(worst([reader_outcome(ended, truth)], name))
        shutil.rmtree(copy)
    return found


def flip_resumed(program: str, kind: str, made: Path, scratch: Path, trials: int) -> list[Trial]:
    """Repeat the command of an unfinished folder with a flipped bit: the same end, or one line."""
    run, found = Run(program, made, scratch), []
    for _ in range(trials):
        run.new_place()
        name = flipped(made / f"unfinished {program}", Path(run.out), kind, run.draw)
        trial = program_outcome(run.start().wait())
        if trial.outcome == "survived":
            trial = reader_outcome(run.read(), run.truth["value"])
        found.append(worst([trial], name))
    return found


def areas(made: Path, scratch: Path) -> dict[str, Area]:
    """Every area by its name."""
    found: dict[str, Area] = {}
    for name, (_, trials) in DISTURBANCES.items():
        for program in COMMANDS:
            area = partial(disturb, name, program, made, scratch)
            found[f"{name}, kvp {program}"] = Area(area, trials)
    for artefact, (_, _, kinds) in FILES.items():
        for kind in kinds:
            area = partial(flip_read, artefact, kind, made, scratch)
            found[f"flipped bit read, {kind} of a {artefact}"] = Area(area, 50)
    for program, kinds in RESUMED.items():
        for kind in kinds:
            area = partial(flip_resumed, program, kind, made, scratch)
            found[f"flipped bit resumed, {kind} of {program}"] = Area(area, 50)
    return found
