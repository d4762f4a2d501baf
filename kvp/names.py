"""Names of methods, allocators, policies and models, which command lines check without torch.

How methods are written is in `kvp.specification`. A new scorer or allocator is a file in
`policies`, a name here and its class in `policies.registry`.
"""

import unicodedata
from collections.abc import Collection, Iterable, Sequence
from os.path import exists
from typing import Literal

from kvp.artifacts.addresses import is_address
from kvp.artifacts.files import raising_as
from kvp.artifacts.manifest import GGUF, recorded_name
from kvp.errors import ModelError, PolicyError, UsageError, did_you_mean
from kvp.hub import MODEL_FILE, POLICY_FILE, HubName, folder_meant, is_path
from kvp.plugins import is_object_name, module_exists
from kvp.specification import Specification, split_method

SCORER_NAMES = (
    "random", "random_pinned", "random_per_layer", "ring", "streaming_llm", "knorm", "keydiff",
    "lagkv", "snapkv", "tova", "h2o", "kvzip", "contrastkv", "expected_attention", "gvote",
    "windowkv", "oracle",
)  # fmt: skip
"""Built-in scorers, the names of `policies.registry.SCORERS`."""
NULLS = ("random", "random_pinned", "random_per_layer", "ring", "streaming_llm")
"""Scorers that score nothing: a method that does not beat them has learned nothing of a prompt."""
ALLOCATOR_NAMES = (
    "uniform", "pyramid", "ada", "global", "windowkv", "shared", "self_sized", "evolved",
)  # fmt: skip
"""Built-in allocators, the names of `policies.registry.ALLOCATORS`."""
UNIFORM = "uniform"
"""The allocator that keeps equally many tokens in every head."""
CALIBRATED = "global"
"""The allocator recommended for a calibrated policy; docs/decisions.md has the reasons."""
KVZAP = "kvzap"
"""The method whose weights do not come with kvp (`policies.registry.FROM_OUTSIDE`)."""
LEARNED = "kvp"
"""The policies of `--policies`."""
FULL = "full"
"""No eviction."""
ALL_NULLS = "nulls"
"""All scorers that score nothing."""
TUNED = "tuned"
"""Before a colon: a file of kvp tune."""
OTHER_METHODS = (LEARNED, FULL, ALL_NULLS, TUNED)
"""Names that mean no single scorer."""

NANO = "nano"
"""The bundled model, and a policy of it."""
SMOLLM2 = "smollm2-135m-instruct"
QWEN = "qwen2.5-coder-0.5b-instruct"
QWEN_1_5B = "qwen2.5-coder-1.5b-instruct"
POLICIES = (NANO, SMOLLM2, "smollm2-135m-instruct-kv", QWEN, QWEN_1_5B)
"""Bundled policies; all but `SMOLLM2` read keys and values, and no queries."""


def plain_name(name: str) -> str:
    """The name itself, of a task, model, method or policy; ValueError where no table holds it."""
    unseen = ("Cc", "Cs", "Zl", "Zp")  # control characters, halves of surrogate pairs, line ends
    odd = [char for char in name if char == "`" or unicodedata.category(char) in unseen]
    if odd or len(name) > 1000:
        has = f"the character {odd[0]!a}" if odd else "more than 1,000 characters"
        raise ValueError(f"the name {name!a:.80} has {has}")
    return name


def check_model_name(name: str) -> None:
    """Raise ModelError on a path without a model, a misspelt "nano", a name no artefact holds."""
    with raising_as(f"--model {name}", ModelError, "cannot be recorded"):
        plain_name(recorded_name(name))
    kind = "file" if name.endswith(GGUF) else "folder"
    near = "/" not in name and did_you_mean(name, [NANO], cutoff=0.75)
    if (near or is_path(name) or kind == "file") and not exists(name):
        raise ModelError(f"--model {name}: no such {kind}{folder_meant(name, [NANO], MODEL_FILE)}")


def policy_kind(name: str) -> Literal["address", "path", "bundled", "hub"] | None:
    """What the name of a policy is, the first of these that it can be; None: no policy's name."""
    if is_address(name):
        return "address"
    if name and exists(name):  # the empty path is the working folder
        return "path"
    if name in POLICIES:
        return "bundled"
    hub = HubName.parse(name) is not None and not is_path(name) and split_method(name)[1] is None
    return "hub" if hub else None


def check_policy(name: str, flag: str = "") -> None:
    """Raise PolicyError, which begins with `flag`, on a policy that cannot exist."""
    if policy_kind(name) is not None:
        return
    if split_method(name)[1] is not None:
        raise PolicyError(
            f"{flag}{name!r} names an allocator, too: name the policy alone here, the allocator in "
            "evicting(...) or as POLICY+ALLOCATOR in --methods"
        )
    if Specification.split(name).base in SCORER_NAMES:
        raise PolicyError(
            f"{flag}{name!r} is a method, not a policy: give it to kvp compress --method, "
            "kvp eval --methods or make_scorer"
        )
    raise PolicyError(
        f"{flag}there is no folder {name!r}{folder_meant(name, POLICIES, POLICY_FILE)}: a "
        f"policy is a folder that kvp train made, {', '.join(POLICIES)} (bundled), "
        "org/name[@revision] on the hub or an address (s3://bucket/folder)"
    )


def check_methods(specs: Iterable[str], flag: str, others: Sequence[str] = OTHER_METHODS) -> None:
    """Raise UsageError, naming the flag, on an allocator or method that it cannot take."""
    for spec in specs:
        scorer, allocator = split_method(spec)
        check_name("method", scorer, SCORER_NAMES, (KVZAP, *others), prefix=f"--{flag}: ")
        if allocator is not None:
            check_allocators([allocator], flag)


def check_allocators(specs: Iterable[str], flag: str) -> None:
    """Raise UsageError, naming the flag, on an allocator that cannot exist."""
    for spec in specs:
        check_name("allocator", spec, ALLOCATOR_NAMES, prefix=f"--{flag}: ")


def check_name(
    kind: str, spec: str, names: Collection[str], others: Sequence[str] = (), *,
    prefix: str = "", policy: str = "",
) -> None:  # fmt: skip
    """Raise UsageError, which begins with `prefix`, on a specification whose name cannot exist.

    A name without a dot is a module's only if there is such a module: a misspelt method is none.
    `policy` is the text where it could name a policy.
    """
    written, choices = Specification.split(spec), (*names, *others)
    name, owner = written.base, written.name.rpartition(":")[0]
    if not name or name in choices:
        return
    if is_object_name(owner) and module_exists(owner):
        how = f"a preset of an own class is written as {owner}(option=value)"
        raise UsageError(f"{prefix}{kind} {written.name}: {how}")
    of_a_module = is_object_name(written.name)
    if of_a_module and ("." in name or module_exists(name)):
        return
    hint = _hint_at_other_kind(kind, name, LEARNED in others)
    hint = hint or did_you_mean(name, choices, cutoff=0.75 if of_a_module else 0.6)
    if of_a_module and not hint:
        hint = f" (there is no module {name} in the working folder or among installed packages)"
    hint += did_you_mean(policy, POLICIES) if policy else ""
    more = f"; or a policy: {', '.join(POLICIES)}, a folder, org/name" if policy else ""
    listed = ", ".join((*names, "package.module:Name", *others))
    raise UsageError(f"{prefix}unknown {kind} {name!r}{hint}: choose from {listed}{more}")


def _hint_at_other_kind(kind: str, name: str, takes_policies: bool) -> str:
    """What a name is where it is of another kind, and how that is written; else ""."""
    if name in POLICIES:
        elsewhere = "give it to kvp compress --policy or load_policy"
        write = f"write {LEARNED} with --policies {name}" if takes_policies else elsewhere
        return f" (this is a policy: {write})"
    if kind == "method" and name in ALLOCATOR_NAMES:
        return f" (this is an allocator: write METHOD+{name})"
    if kind == "allocator" and name in SCORER_NAMES:
        return " (this is a method)"
    return ""
