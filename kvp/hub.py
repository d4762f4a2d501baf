"""Folders of the Hugging Face hub, downloaded once and then read from the hub's cache.

`HF_HUB_OFFLINE`, `HF_HUB_CACHE`, `HF_ENDPOINT` and `HF_TOKEN` are read by huggingface_hub. Only the
files that a caller names are fetched, and none of them is executed.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Self

from kvp.errors import KvpError, did_you_mean, reason_of
from kvp.progress import phase, quiet_logs

MODEL_FILE = "config.json"
"""What a folder with a model holds."""
POLICY_FILE = "policy.json"
"""What a folder with a policy holds."""
BUDGET_FILE = "budgets.json"
"""What a folder with token counts of kvp evolve holds."""
_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^\s@]+))?")


@dataclass(frozen=True)
class HubName:
    """A repository of models and one of its revisions: `org/name` or `org/name@revision`."""

    repository: str
    revision: str | None = None
    """Branch, tag or commit; None: the main branch."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The name that a text is; None where it can only be a path."""
        match = _NAME.fullmatch(text)
        return None if match is None else cls(match["repository"], match["revision"])


def is_path(name: str) -> bool:
    """Whether a name looks like a path or begins with a folder that exists.

    The hub is never asked for such a name, whether or not the path exists.
    """
    first, slash, rest = name.partition("@")[0].partition("/")
    return name.startswith((".", "/", "~")) or "/" in rest or (bool(slash) and Path(first).is_dir())


def folder_meant(name: str, known: Iterable[str], file: str) -> str:
    """For messages on a name that is no folder: the nearest known one, or folder with `file`."""
    tops = Path(name).parent, Path("models")
    names = [*known, *(str(path.parent) for top in tops for path in top.glob(f"*/{file}"))]
    of_hub = HubName.parse(name) is not None and not is_path(name)  # it may well be meant
    return did_you_mean(name, names, cutoff=0.85 if of_hub else 0.6)


def download(name: HubName, files: Sequence[str], *, error: type[KvpError], what: str) -> Path:
    """Fetch the files of a repository that match the patterns `files`, or find them in the cache.

    The result is a folder of the hub's cache whose name is the commit, 40 hexadecimal digits. The
    first of `files` is one that every such repository has; `what` names the option in messages.
    Raises `error` in one line where the hub does not give them, or there is no such first file.
    """
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name.repository, files[0], revision=name.revision)
        if not isinstance(cached, str):
            phase(f"looking for {name.repository} on the model hub")
        with quiet_logs():
            path = snapshot_download(
                name.repository,
                revision=name.revision,
                allow_patterns=list(files),
                library_name="kvp",
            )
    except Exception as problem:  # the client lets through what its HTTP library raises
        reason = shorten(reason_of(problem), 160, placeholder=" ...")
        raise error(
            f"{what}: no folder here, and the hub could not give it ({reason}); for a private or "
            "restricted repository log in with `hf auth login` or set HF_TOKEN"
        ) from problem
    folder = Path(path)
    if not (folder / files[0]).is_file():
        raise error(
            f"{what}: the repository {name.repository} holds no {files[0]} at its top in "
            f"{name.revision or 'main'}: it is of another kind, or was not uploaded wholly"
        )
    return folder
