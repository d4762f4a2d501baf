"""Check a policy, make its card, upload both in one commit: readers see all of it or nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.filesize import decimal

from eval.push.card import model_card
from eval.push.config import PushConfig
from kvp.errors import PolicyError, UsageError
from kvp.progress import phase, quiet_logs
from policies.policy_files import load_shard
from policies.sources import policy_files

CARD = "README.md"
"""Name under which the hub shows a card."""


def run(config: PushConfig) -> str | None:
    """Upload `config.policy`; returns the commit, None after a dry run.

    Raises:
        PolicyError: the policy is damaged, unfinished, or a shard.
        ResultsError: `--results` is no sound results folder.
        UsageError: `--results` are of another policy, or the hub refuses.
    """
    policy = load_shard(config.policy)  # reads every file and checks it
    if policy.meta.heads is not None:
        raise PolicyError(f"{config.policy} is a shard: join all shards of it with kvp merge first")
    card = model_card(
        policy,
        config.repository,
        license=config.license,
        results=None if config.results is None else Path(config.results),
        resamples=config.bootstrap,
    )
    files = policy_files(policy.source.folder)
    if config.dry_run:
        print(card)
        for path in files:
            print(f"{path.name}: {decimal(path.stat().st_size)}")
        total = decimal(sum(path.stat().st_size for path in files))
        print(f"dry run: {CARD} and {len(files)} files of {total}; nothing was uploaded")
        return None
    phase(f"uploading {policy.source.name} to {config.repository}")
    with TemporaryDirectory() as folder:
        for path in files:
            shutil.copy(path, folder)
        (Path(folder) / CARD).write_text(card, encoding="utf-8")
        return _upload(Path(folder), config)


def _upload(folder: Path, config: PushConfig) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    api, repository = HfApi(library_name="kvp"), config.repository
    try:
        with quiet_logs():
            # None leaves the choice to the organisation, which False would not.
            api.create_repo(repository, private=config.private or None, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message="Policy and card by kvp push",
            )
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, ConnectionError) as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in (401, 403) or isinstance(error, LocalTokenNotFoundError):
            why = "log in with `hf auth login` or set HF_TOKEN to a token that may write there"
        elif isinstance(error, ConnectionError):
            why = f"the hub cannot be reached ({error})"
        else:
            why = (
                f"the hub refused ({(str(error).strip() or type(error).__name__).splitlines()[0]})"
            )
        raise UsageError(f"{repository}: {why}") from error
    print(f"{commit.commit_url}\nto use it: load_policy({repository!r})")
    return str(commit.oid)
