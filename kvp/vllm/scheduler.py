"""The scheduler's side of the connector: what requests ask for, and what workers do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvp.contexts import BLOCK, SUFFIX, ContextFacts, read_facts
from kvp.errors import ContextError, one_line
from kvp.placeholders import read_placeholders
from kvp.vllm.backend import UnevenRequest
from kvp.vllm.engine import EngineModel
from kvp.vllm.work import Load, Save, Saved, Work, logger

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

COMPRESS = "kvp_compress"
"""What a request asks for, in its `kv_transfer_params`: the budget of a context."""


class Scheduler:
    """Finds contexts of one folder in prompts, and plans their loads and new ones, step by step."""

    def __init__(self, model: EngineModel, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._contexts: dict[str, ContextFacts] = {}  # of requests that are answered from one
        self._loads: dict[str, Load] = {}  # of requests that name one; both until they are finished
        self._waiting: list[Load] = []  # from the allocation of their blocks to the next step
        self._salts = count()  # one for each request that is refused
        self._saves: dict[str, Save] = {}  # until the step that reads a prompt's last token
        self._answers: dict[str, dict[str, Any]] = {}  # from then, or a refusal, to the reply

    def add(self, request: Request) -> None:
        """Note what a new request asks for: a context to go on from, or one to be made of it."""
        ids, name, wrong = request.prompt_token_ids or [], request.request_id, ""
        placeholders = read_placeholders(ids, self._model.vocabulary)
        given = request.kv_transfer_params
        params = given if isinstance(given, Mapping) else {}
        budget = params.get(COMPRESS)
        if unknown := [key for key in params if str(key).startswith("kvp_") and key != COMPRESS]:
            wrong = f"kv_transfer_params has no {unknown[0]!r}: kvp reads {COMPRESS!r} alone"
        elif placeholders is None and budget is not None:
            wrong = _compression_refusal_reason(request)
            if not wrong:
                self._saves[name] = Save(name, tuple(ids), (), str(budget))
        if wrong:
            self._answers[name] = {"error": wrong}
        if placeholders is not None:
            twice = "it asks to compress what is compressed" if budget is not None else ""
            self._find_context(request, *placeholders, wrong or twice)

    def _find_context(self, request: Request, digest: str, written: int, wrong: str) -> None:
        """Find the context of a new request, and why it cannot be answered from it."""
        name, stop = request.request_id, min(written, len(request.prompt_token_ids) - 1)
        try:
            facts = read_facts(self._folder / f"{digest}{SUFFIX}")
            facts.check(self._model.facts)
            refused = wrong or _refusal_reason(request, facts, written, self._model)
        except ContextError as error:
            refused = str(error)
        if not refused:
            self._contexts[name], stop = facts, facts.kept
        self._loads[name] = Load(digest, (), 0, stop, refused)
        if refused:
            logger.error("%s", one_line(f"request {name} is refused: {refused}"))
            # Never around the connector, and nothing in common with requests that are answered.
            request.skip_reading_prefix_cache = False
            request.cache_salt = f"kvp-refused-{next(self._salts)}"
            request.block_hashes = []
            request.update_block_hashes()

    def count_missing_rows(self, request: Request, computed: int) -> int:
        """Rows of a request's context that the engine lacks when it has `computed` tokens."""
        load = self._loads.get(request.request_id)
        return 0 if load is None else max(load.stop - computed, 0)

    def place_rows(self, request: Request, blocks: tuple[int, ...], rows: int) -> None:
        """Have the last `rows` of a request's context loaded; `blocks` are all of the request's."""
        load = self._loads[request.request_id]
        self._waiting.append(replace(load, blocks=blocks, start=load.stop - rows))

    def plan_step(self, step: SchedulerOutput, manager: KVCacheManager) -> Work:
        """What the workers load before this step and compress after it."""
        work, self._waiting = Work(self._waiting), []
        scheduled = step.num_scheduled_tokens
        uneven = {name for name, facts in self._contexts.items() if facts.counts}
        ours = (self._saves.keys() | uneven) & scheduled.keys()
        before = _computed_tokens(step) if ours else {}
        for name in ours:
            save, facts = self._saves.get(name), self._contexts.get(name)
            tokens, stop = scheduled[name], before[name] + scheduled[name]
            (blocks,) = manager.get_block_ids(name)
            if save and stop >= len(save.token_ids):
                work.saves.append(replace(self._saves.pop(name), blocks=tuple(blocks)))
                self._answers[name] = {}
            if facts and facts.counts:
                request = UnevenRequest(facts.kept, facts.counts, blocks[0], tokens, stop)
                work.uneven.append(request)
        return work

    def take_answers(self, saved: Saved) -> None:
        """Keep what workers say of their saves for the replies; drop it for ended requests."""
        waited_for = self._answers.keys() & saved.answers
        self._answers.update({name: saved.answers[name] for name in waited_for})

    def finish(self, request: Request) -> dict[str, Any] | None:
        """Forget a request: `kv_transfer_params` of its reply, a context's name and sizes."""
        name = request.request_id
        self._saves.pop(name, None)
        answer = self._answers.pop(name, None)
        facts, load = self._contexts.pop(name, None), self._loads.pop(name, None)
        if answer is None and facts and load:
            answer = {"digest": load.digest, "tokens": facts.tokens, "kept": facts.kept}
        return {"kvp_context": answer} if answer else None


def _computed_tokens(step: SchedulerOutput) -> dict[str, int]:
    """Tokens of every scheduled request that the engine has before the step."""
    cached = step.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return before | {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}


def _compression_refusal_reason(request: Request) -> str:
    """Why the prompt of a request cannot be compressed; empty where it can."""
    if request.lora_request:
        return "a context with an adapter is not compressed"
    if request.mm_features:
        return "a context with images is not compressed"
    if (tokens := len(request.prompt_token_ids or [])) < BLOCK:
        return f"a context of {tokens} tokens is not compressed: {BLOCK} are the least"
    return ""


def _refusal_reason(request: Request, facts: ContextFacts, written: int, model: EngineModel) -> str:
    """Why a request with this context cannot be answered; empty where it can."""
    ids, options = request.prompt_token_ids or [], request.sampling_params
    if facts.counts is not None and not model.uneven:
        return (
            "its heads keep different numbers of tokens: start the server with a policy that has "
            'an allocator, POLICY+global, or with "uneven": true'
        )
    if written < facts.kept:
        return f"{written} of the context's {facts.kept} placeholders are there"
    if len(ids) == facts.kept:
        return "nothing follows the placeholders: add a question"
    if request.skip_reading_prefix_cache:
        return "prompt_logprobs and skip_reading_prefix_cache would compute the placeholders"
    if (adapter := request.lora_request) is not None:
        return f"it asks for the adapter {adapter.lora_name}, without which it was made"
    answer = 0 if options is None else options.max_tokens or 0
    length = facts.tokens + len(ids) - facts.kept + answer
    if length > model.positions:
        return f"context, question and answer have {length} tokens, the model {model.positions}"
    return ""
