"""Where a policy comes from by its name: a folder, the wheel, the hub, an object store."""

from dataclasses import dataclass
from pathlib import Path

from kvp import names, nano
from kvp.artifacts.addresses import Place, is_address, place
from kvp.artifacts.files import cache_folder, copy_files, digest_json, raising_as
from kvp.artifacts.manifest import read_sealed_json
from kvp.errors import PolicyError
from kvp.hub import POLICY_FILE, HubName, download
from kvp.names import check_policy, policy_kind

INDEX = POLICY_FILE
"""File that makes a folder a policy."""
_FOLDER = Path(__file__).parent / "bundled"
BUNDLED = {name: _FOLDER / name for name in names.POLICIES} | {names.NANO: nano.path() / "policy"}
"""Bundled policies: name -> folder."""


@dataclass(frozen=True, kw_only=True)
class PolicySource:
    """A policy folder and the name that led to it."""

    name: str
    """As it was given."""
    folder: Path
    """The folder, whether it holds a policy or not."""
    repository: str | None = None
    """`org/name` on the hub; None for others."""
    commit: str | None = None
    """Commit of that repository, 40 hexadecimal digits."""

    @property
    def label(self) -> str:
        """What the policy is called in results, where nothing else is said."""
        if is_address(self.name):
            return place(self.name).name
        if self.repository is not None:
            return self.repository.partition("/")[2]
        return self.name if self.name in BUNDLED else self.folder.resolve().name


def find_policy(name: str | Path) -> PolicySource:
    """The folder of a policy that is named as users name it.

    A path that exists wins; then the names of the bundled policies, and `org/name` or
    `org/name@revision` a repository of the hub, which is downloaded unless it is in the cache, as
    is a policy at an address of an object store. Raises PolicyError where there is none.
    """
    if isinstance(name, Path) or policy_kind(name) == "path":
        return PolicySource(name=str(name), folder=Path(name))
    kind = policy_kind(name)
    if kind == "address":
        return PolicySource(name=name, folder=_fetch_policy(place(name)))
    if kind == "bundled":
        return PolicySource(name=name, folder=BUNDLED[name])
    check_policy(name)
    hub = HubName.parse(name)
    assert hub is not None, "checked"
    files = (INDEX, "layer_*_head_*.safetensors")  # nothing else is fetched
    folder = download(hub, files, error=PolicyError, what=f"policy {name}")
    return PolicySource(name=name, folder=folder, repository=hub.repository, commit=folder.name)


def _fetch_policy(address: Place) -> Path:
    """A policy of an object store in the cache, by the digest that its index carries."""
    check_index(address)
    index = read_sealed_json(address / INDEX, PolicyError)
    folder = cache_folder() / "policies" / digest_json(index)
    if not (folder / INDEX).exists():
        with raising_as(address / INDEX, PolicyError):
            head_files = [name for name in index["files"] if "/" not in name and name != INDEX]
        copy_files(address, folder, head_files)
        if missing := [name for name in sorted(head_files) if not (folder / name).exists()]:
            raise PolicyError(f"{address / missing[0]} is missing: copy or export the policy again")
        copy_files(address, folder, [INDEX])
    return folder


def check_index(folder: Place) -> None:
    """Raise PolicyError unless a folder has the file that makes it a policy."""
    if not (folder / INDEX).exists():
        why = "it is not a policy directory, or its export did not finish"
        if (folder / "run.json").exists():  # which kvp train writes first
            why += " (an unfinished training: repeat its kvp train command)"
        raise PolicyError(f"{folder} has no {INDEX}: {why}")


def list_policy_files(folder: Path) -> list[Path]:
    """The files of a policy that is in `folder`, the index last; nothing else that lies there."""
    listed = read_sealed_json(folder / INDEX, PolicyError)["files"]
    return [*(folder / name for name in sorted(listed)), folder / INDEX]
