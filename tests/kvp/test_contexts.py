"""Context files are read back as they were written, and other files refused."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from small_context import COUNTS, make_context

from kvp.artifacts.tensors import write_safetensors
from kvp.budgets import parse_budget
from kvp.contexts import Context, kept_rows, read_context, read_facts
from kvp.errors import ContextError
from kvp.placeholders import placeholder_ids


@pytest.fixture(params=[None, COUNTS], ids=["equal", "uneven"])
def context(request):
    return make_context(request.param)


def test_a_context_comes_back_as_it_was(context, tmp_path):
    path = context.write(tmp_path)
    assert path.name == f"{context.digest[:32]}.context"
    again = read_context(path)
    assert again.facts == context.facts
    assert all(map(torch.equal, again.keys, context.keys))
    assert again.digest == context.digest
    assert again.placeholders == placeholder_ids(context.digest, 64, 1000)
    assert context.facts.nbytes == sum(part.nbytes for part in (*context.keys, *context.values))
    version = 1 if context.facts.counts is None else 2
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["kvp"])
    assert header["format_version"] == version
    assert ("counts" in header) == (version == 2)
    assert not {"policy_digest", "allocator", "protection"} & header.keys()


FOREIGN = {
    "renamed": lambda path, context: (
        replace(context, keys=[-keys for keys in context.keys]).write(path.parent).replace(path)
    ),
    "kvp compress": lambda path, context: write_safetensors(path, context.tensors, {}),
    "no regular file": lambda path, _: path.symlink_to(path.rename(path.parent / "there")),
    "its header has 33,554,": lambda path, _: path.write_bytes((2**25).to_bytes(8, "little")),
}


@pytest.mark.parametrize("expected", FOREIGN)
def test_another_file_under_its_name_is_refused(expected, context, tmp_path):
    path = context.write(tmp_path)
    FOREIGN[expected](path, context)
    with pytest.raises(ContextError, match=expected):
        read_facts(path)


READ = """
import sys
from pathlib import Path
from kvp.contexts import read_context, read_facts
from kvp.errors import ContextError
for turn in range(2000):
    try:
        (read_facts if turn % 50 else read_context)(Path(sys.argv[1]))
    except ContextError:
        pass
"""


def test_a_file_may_be_overwritten_while_it_is_read(context, tmp_path):
    """As `cp` does: a mapped file would end the process."""
    facts = replace(context.facts, tokens=8192, kept=8192, counts=None)
    parts = [torch.randn(8192, 2, 8) for _ in range(4)]
    ids = torch.arange(8192) % 1000
    long = Context(facts=facts, keys=parts[:2], values=parts[2:], token_ids=ids)
    path = long.write(tmp_path)
    whole = path.read_bytes()
    reader = subprocess.Popen([sys.executable, "-c", READ, path])
    while reader.poll() is None:
        path.write_bytes(whole)
    assert reader.returncode == 0
    assert read_context(path).facts == facts


@pytest.mark.parametrize(
    ("budget", "tokens", "kept"),
    [("12.5%", 1000, 128), ("100%", 1000, 1000), ("1", 1000, 32), ("999", 40, 40)],
)
def test_kept_rows_are_whole_blocks(budget, tokens, kept):
    assert kept_rows(parse_budget(budget), tokens) == kept
