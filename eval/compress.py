"""kvp compress: texts to context files that engines go on from, a line of JSON for each."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from warnings import catch_warnings

from eval.compress_config import CompressConfig
from kvp.allocation import check_fits_model
from kvp.artifacts.claim import FolderKind, OutputFolder
from kvp.budgets import parse_budget
from kvp.data.rows.files import Tally, files_of, read_rows, read_text
from kvp.data.rows.values import RowError, text_of
from kvp.errors import ContextError, KvpError, UsageError
from kvp.hf import geometry_of
from kvp.hf.contexts import check_length, compress, context_ids
from kvp.hf.loading import load_config, load_configured_model, load_configured_tokenizer
from kvp.hf.model_config import context_limit
from kvp.messages import Text, check_messages
from kvp.plugins import require
from kvp.progress import Progress, say
from kvp.scoring import ScorerParts
from policies import load_policy, make_scorer, resolve_method

CONTEXTS = FolderKind(noun="folder of contexts", marker="", error=ContextError)


def run(config: CompressConfig) -> None:
    """Write a context file per document; KvpError names the flag or document that cannot work."""
    ranking, allocator_spec = config.sides
    ranked_by = load_policy(ranking) if config.policy else make_scorer(ranking)
    scorer, allocator = resolve_method(ranked_by, allocator_spec)
    if config.gguf:
        require("--gguf", "gguf", "gguf")
        from kvp.llamacpp.slots import read_gguf, write_slot

        read_gguf(config.gguf)  # refuses before anything is computed
        if config.model == type(config).model:
            config = replace(config, model=config.gguf)
    model_config = load_config(config.model, revision=config.revision)
    check_fits_model(scorer, geometry_of(model_config), allocator)
    documents, tokenizer = dict(_documents(config.documents)), load_configured_tokenizer(config)
    limit, budget = context_limit(model_config), parse_budget(config.budget)
    for name, text in documents.items():
        try:
            check_length(len(context_ids(text, tokenizer)), limit)
        except KvpError as error:
            raise type(error)(f"{name}: {error}") from None
    if budget.percent is None and (budget.count or 0) <= 100:
        say(f"note: --budget {budget} is {budget} tokens; for a share of the cache write {budget}%")
    best = ScorerParts(scorer).recommended_allocator
    if best and allocator_spec is None and not config.gguf:
        say(f"note: heads keep equal counts; with {ranking}+{best} they share a budget, as in vLLM")
    model, tokenizer = load_configured_model(config, config.device)
    folder = OutputFolder(Path(config.out), CONTEXTS, shared=True)
    with catch_warnings(), folder, Progress("compressing", len(documents)) as progress:
        warnings.showwarning = lambda text, *_: say(f"note: {text}")
        for name, text in documents.items():
            context = compress(model, tokenizer, text, scorer, budget, allocator=allocator)
            file = str(context.write(config.out))
            slot = write_slot(context, config.gguf, config.out) if config.gguf else None
            line = {
                "document": name, "policy": config.label, "file": file,
                **({"slot": slot.name} if slot else {}),
                "tokens": context.facts.tokens, "kept": context.facts.kept,
                "placeholders": context.placeholders,
            }  # fmt: skip
            print(json.dumps(line), flush=True)
            progress.advance(note=name)
    say(f"contexts in {config.out}: {len(documents)}")


def _documents(names: str | Sequence[str]) -> Iterator[tuple[str, Text]]:
    """Every named text with its location; where rows share a context, the first row."""
    for name in (names,) if isinstance(names, str) else names:
        tally, (files, texts, others) = Tally(), files_of(name, "DOCUMENTS")
        if texts:
            tally.left_out = [file.name for file in files + others]
            yield from ((str(file), read_text(str(file), "DOCUMENTS")[0]) for file in texts)
        else:
            rows = read_rows(name, "DOCUMENTS", tally.left_out)
            contexts: dict[str, tuple[str, Text]] = {}
            for location, text in tally.parse_rows(rows, lambda _, row: _context(row)):
                contexts.setdefault(json.dumps(text), (f"{name} {location}", text))
            tally.check(name, contexts)
            yield from contexts.values()
        for note in tally.notes(name):
            say(note)


def _context(row: Mapping[str, Any]) -> Text:
    if (turns := row.get("messages")) is not None:
        try:
            return check_messages(
                [{"role": turn.get("role"), "content": text_of(turn["content"])} for turn in turns]
            )
        except UsageError as error:
            raise RowError(f"has no messages that a template takes: {error}") from None
    for column in ("context", "text"):
        if row.get(column) is not None:
            return text_of(row[column])
    raise RowError("has no context, text or messages")
