"""Check a policy, make its card, upload both in one commit: readers see all of it or nothing."""

from __future__ import annotations

from pathlib import Path

from rich.filesize import decimal

from eval.push.card import model_card
from eval.push.config import PushConfig
from eval.push.measured import measured
from kvp.errors import PolicyError, UsageError
from kvp.progress import phase
from kvp.quiet_logs import quiet_logs
from policies.policy_files import Shard, load_shard
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
    results = None
    if config.results is not None:
        results = measured(Path(config.results), policy, config.bootstrap)
    card = model_card(policy, config.repository, license=config.license, results=results)
    files = policy_files(policy.source.folder)
    if config.dry_run:
        print(card)
        for path in files:
            print(f"{path.name}: {decimal(path.stat().st_size)}")
        total = decimal(sum(path.stat().st_size for path in files))
        print(f"dry run: {CARD} and {len(files)} files of {total}; nothing was uploaded")
        return None
    return _upload(config, policy, card, files)


def _upload(config: PushConfig, policy: Shard, card: str, files: list[Path]) -> str:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    phase(f"uploading {policy.source.name} to {config.repository}")
    added = [CommitOperationAdd(path_in_repo=path.name, path_or_fileobj=path) for path in files]
    added.append(CommitOperationAdd(path_in_repo=CARD, path_or_fileobj=card.encode()))
    api = HfApi(library_name="kvp")
    try:
        with quiet_logs():
            # None leaves the choice to the organisation, which False would not.
            api.create_repo(config.repository, private=config.private or None, exist_ok=True)
            commit = api.create_commit(
                config.repository, added, commit_message="Policy and card by kvp push"
            )
    except (LocalTokenNotFoundError, HfHubHTTPError) as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 401
        raise UsageError(_refused(config.repository, status, error)) from error
    except HFValidationError as error:
        raise UsageError(f"{config.repository}: the hub takes no such name ({error})") from error
    except ConnectionError as error:
        raise UsageError(f"{config.repository}: the hub cannot be reached ({error})") from error
    print(f"{commit.commit_url}\nto use it: load_policy({config.repository!r})")
    return str(commit.oid)


def _refused(repository: str, status: int, error: Exception) -> str:
    if status in (401, 403):
        return (
            f"{repository}: the hub asks for a token that may write there: log in with "
            "`hf auth login` or set HF_TOKEN"
        )
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{repository}: the hub refused the upload ({first})"
