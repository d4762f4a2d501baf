"""The harness's model class `kvp`: its HFLM, with the cache of every context compressed.

Prompts, truncation, stop sequences and scores are the harness's own; what is replaced is how a
context is read: it is prefilled and compressed once, and the rest fed. Without eviction the numbers
are those of HFLM.
"""

import inspect
import os
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.lm_harness.compression import CONTEXT_FIELDS, parse_compression
from eval.runner import rows_of_logits, select_for_methods
from kvp.allocation import check_fits_model
from kvp.errors import UsageError
from kvp.geometry import DtypeName
from kvp.hf import EvictingCache, geometry_of, load_config, load_model, load_tokenizer, prefill
from kvp.hf.attention import use_kvp_attention
from kvp.hf.decoding import next_logits
from kvp.hf.loading import local_folder
from kvp.hf.model_checks import check_model
from kvp.hf.model_identity import warn_of_another_model, weights_digest
from kvp.hf.scorer_inputs import check_inputs
from kvp.hf.shrink import gather
from kvp.progress import say
from kvp.scoring import Needs, needs_of

_HFLM_ARGUMENTS = (
    "max_length", "add_bos_token", "prefix_token_id", "softmax_dtype",
    "think_end_token", "enable_thinking", "chat_template_args", "truncation",
)  # fmt: skip
"""Arguments of HFLM that mean here what they mean there."""
_SETTINGS = "settings of kvp"

LogLikelihood = tuple[float, bool]
"""Log-likelihood of a continuation, nats, and whether greedy decoding would give it."""
Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""Context and continuation as text (None: a window of a running text) and as token ids."""


@register_model("kvp")
class KvpLM(HFLM):  # type: ignore[misc]
    """HFLM with evicted caches.

    `loglikelihood` prefills each context once, compresses it, and scores every continuation from a
    fork, the first token included; `generate_until` answers from the compressed cache, one prompt
    at a time; `loglikelihood_rolling` has no context to compress, so it takes `full` alone.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel = "nano",
        *,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        batch_size: int | str = 1,
        max_batch_size: int = 64,
        **settings: Any,  # noqa: ANN401 - checked here
    ) -> None:
        """Load the model and build the method.

        `settings` are those of `parse_compression` and `load`, and the arguments of HFLM in
        `_HFLM_ARGUMENTS` (docs/lm_eval.md). A loaded model needs its `tokenizer`; `batch_size` auto
        is `max_batch_size`. Raises UsageError where an argument cannot work, and as kvp eval.
        """
        if settings.pop("trust_remote_code", False):
            raise UsageError("trust_remote_code: kvp never runs code that comes with a model")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                "the model class kvp runs in one process: start it without torchrun "
                "and accelerate launch"
            )
        of_hflm = {name: settings.pop(name) for name in _HFLM_ARGUMENTS if name in settings}
        loading, known = (inspect.getfullargspec(it).kwonlyargs for it in (load, parse_compression))
        to_load = {name: settings.pop(name) for name in loading if name in settings}
        if unknown := sorted(set(settings) - set(known)):
            raise UsageError(
                f"--model_args {', '.join(unknown)}: not an argument of the model class kvp; "
                f"of HFLM's it takes {', '.join(_HFLM_ARGUMENTS)}"
            )
        method, self._question, self._identity = parse_compression(**settings)
        name, model, its_tokenizer = load(pretrained, tokenizer, **to_load)
        if (scorer := method.scorer) is not None:  # refused before any request is read
            check_inputs(model, [scorer])
            check_fits_model(scorer, geometry_of(model.config), method.allocator)
            warn_of_another_model(model, scorer)
        super().__init__(
            pretrained=model, tokenizer=its_tokenizer, backend="causal", batch_size=1, **of_hflm
        )
        if name is not None:  # a hub id, whose commit the results name
            self.pretrained, self.revision = name, to_load.get("revision") or "main"
        self._batch = max_batch_size if str(batch_size).startswith("auto") else int(batch_size)
        self._method = method
        self._dtype = self.softmax_dtype or torch.float32
        self._after: dict[str, int] = {}  # prompt -> its tokens after the compressed ones
        self._answered = 1  # the same, of the prompt that is being answered

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[LogLikelihood]:
        """(log-likelihood in nats, whether it is the greedy answer) of every continuation.

        Raises UsageError where a context has no such field as `question` needs, and where a
        continuation is empty or longer than the model.
        """
        asked = [(request.args[0], request) for request in requests if request.args[0]]
        self._after = {text: self._tokens_after(request, text.rstrip()) for text, request in asked}
        return list(super().loglikelihood(requests, disable_tqdm=disable_tqdm))

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole texts, as HFLM; UsageError for a method that evicts."""
        if self._method.scorer is not None:
            raise UsageError(
                f"method={self._method.spec}: a running text has no context to "
                "compress; kvp eval --tasks text measures its perplexity after eviction"
            )
        return list(super().loglikelihood_rolling(requests, disable_tqdm))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answer to every prompt, one after another; UsageError where its field is missing."""
        answers: list[str] = []
        for request in tqdm(requests, desc="answering", disable=disable_tqdm):
            self._answered = self._tokens_after(request, request.args[0])
            answers += super().generate_until([request], disable_tqdm=True)
        return answers

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Take the file of `--use_cache`; UsageError where it was begun with other settings."""
        stored = cache_hook.dbdict
        if stored is not None:
            mine = f"{self._identity} {weights_digest(self.model)}"
            if len(stored) == 0:
                stored[_SETTINGS] = mine
            elif stored.get(_SETTINGS) != mine:
                raise UsageError(
                    f"--use_cache: {stored.filename} holds answers of another model, method, "
                    "budget or boundary; name another file"
                )
        super().set_cache_hook(cache_hook)

    def _tokens_after(self, request: Instance, prompt: str) -> int:
        """Tokens fed after the compressed document, 1 or more; UsageError where it is missing."""
        if self._question == "inside":
            return 1
        texts = (request.doc.get(field) for field in CONTEXT_FIELDS)
        named = (text.strip() for text in texts if isinstance(text, str))
        text = next(filter(None, named), "")
        if not text or (start := prompt.rfind(text)) < 0:  # the last time that it is there
            raise UsageError(
                f"question={self._question}: the prompt holds no text of the document's "
                f"{', '.join(CONTEXT_FIELDS)} (it has {', '.join(request.doc)}); use "
                "question=inside"
            )
        special = {} if self.add_bos_token is None else {"add_special_tokens": self.add_bos_token}
        encoded = self.tokenizer(prompt, return_offsets_mapping=True, **special)
        after: int = sum(stop > start + len(text) for _, stop in encoded["offset_mapping"])
        return max(1, after)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **_: object
    ) -> list[LogLikelihood]:
        """Requests with the same context share its prefill, whatever their order."""
        groups: dict[tuple[tuple[int, ...], int], list[int]] = {}
        likelihoods: dict[int, LogLikelihood] = {}
        cut = 0
        for number, (texts, context, continuation) in enumerate(requests):
            # The end of a context that is too long, as HFLM: the last token of all is not fed.
            kept = [*context, *continuation][-(self.max_length + 1) : -len(continuation)]
            if texts and not kept:
                raise UsageError(
                    f"the continuation {texts[1]!r:.60} has {len(continuation)} tokens: the model "
                    f"scores 1 to {self.max_length} (max_length=); leave its document out"
                )
            cut += texts is not None and len(kept) < len(context)
            after = 1 if texts is None else self._after.get(texts[0], 1)
            groups.setdefault((tuple(kept), after), []).append(number)
        if cut:
            say(
                f"note: {cut} contexts lost their beginning: the model has {self.max_length} tokens"
            )
        bar = tqdm(total=sum(map(len, groups.values())), desc="scoring", disable=disable_tqdm)
        for (tokens, after), members in groups.items():
            conts = [requests[number][2] for number in members]
            scores = self._score_continuations(tokens, after, conts)
            for number, score in zip(members, scores, strict=True):
                likelihoods[number] = score
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], score)
            bar.update(len(members))
        bar.close()
        return [likelihoods[number] for number in range(len(requests))]

    @torch.inference_mode()
    def _context_cache(self, ids: Tensor, after: int) -> EvictingCache:
        """The compressed cache of all but the last `after` of `ids` [T] int64.

        With `after=1` the last token is prefilled too, so that the method sees its query, and left
        out of the cache: it is fed again. Empty where nothing comes before those tokens.
        """
        cut = max(len(ids) - after, 0)
        if cut == 0:
            return EvictingCache.of(self.model.config)
        method = self._method
        again = int(after == 1)
        scorer = method.scorer
        needs = needs_of(scorer) if scorer is not None and method.shrinks(cut) else Needs()
        fed = ids[None, : cut + again].to(self.model.device)
        seen = prefill(self.model, fed, needs, tokenizer=self.tokenizer, fed_again=again)
        ((_, kept),) = select_for_methods(seen, [method], None)
        return gather(seen, [kept])

    @torch.inference_mode()
    def _score_continuations(
        self, context: Sequence[int], after: int, continuations: Sequence[Sequence[int]]
    ) -> list[LogLikelihood]:
        """Log-likelihood of each continuation of a context of which all but `after` is compressed.

        Every token after the compressed ones attends to what was kept, also the last one of the
        context, from which the first token of a continuation is predicted. Continuations that
        differ in their last token alone are fed once.
        """
        ids = torch.tensor(context, device=self.model.device)
        with use_kvp_attention(self.model):
            cache = self._context_cache(ids, after)
            seen = cache.get_seq_length()
            if seen < len(ids) - 1:
                next_logits(self.model, ids[None, seen:-1], cache, seen, keep=1)
            sharing: dict[tuple[int, ...], list[int]] = {}  # what is fed -> continuations
            for number, continuation in enumerate(continuations):
                sharing.setdefault((context[-1], *continuation[:-1]), []).append(number)
            scores: dict[int, LogLikelihood] = {}
            for batch in self._batches(sorted(sharing, key=len)):
                for fed, log_probs in self._log_probs(cache, batch, len(ids) - 1):
                    best = log_probs.argmax(-1)
                    for number in sharing[fed]:
                        index = torch.tensor(continuations[number], device=log_probs.device)
                        total = log_probs.gather(-1, index[:, None]).double().sum()
                        scores[number] = float(total), bool((best == index).all())
        return [scores[number] for number in range(len(continuations))]

    def _batches(self, fed: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """Inputs, short ones first, as many together as `batch` and the memory of logits allow."""
        batch: list[tuple[int, ...]] = []
        for tokens in fed:
            if len(batch) >= rows_of_logits(self.model, len(tokens), self._batch):
                yield batch
                batch = []
            batch.append(tokens)
        yield batch

    def _log_probs(
        self, cache: EvictingCache, batch: Sequence[tuple[int, ...]], position: int
    ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Log-probabilities [F, V] after each of F tokens of every input, padded on the right."""
        width = max(map(len, batch))
        rows = [[*tokens, *(0,) * (width - len(tokens))] for tokens in batch]
        fed = torch.tensor(rows, device=self.model.device)
        empty = cache.get_seq_length() == 0
        fork = EvictingCache.of(self.model.config) if empty else cache.fork(len(batch))
        logits = next_logits(self.model, fed, fork, position, keep=width)
        for tokens, row in zip(batch, logits, strict=True):
            yield tokens, row[: len(tokens)].log_softmax(-1, self._dtype)

    def _model_generate(
        self,
        context: Tensor,
        max_length: int,
        stop: list[str],
        **generation_kwargs: Any,  # noqa: ANN401
    ) -> Tensor:
        """Tokens [1, T + answer] that continue `context` [1, T] from its compressed cache."""
        with use_kvp_attention(self.model):
            cache = self._context_cache(context[0], self._answered)
            beams = int(generation_kwargs.get("num_beams", 1))
            if beams > 1 and cache.get_seq_length() > 0:
                cache = cache.fork(beams)
            tokens: Tensor = super()._model_generate(
                context, max_length, stop, past_key_values=cache, **generation_kwargs
            )
        return tokens


def load(
    pretrained: str | PreTrainedModel,
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    *,
    device: str | None = None,
    dtype: str = "auto",
    revision: str | None = None,
) -> tuple[str | None, PreTrainedModel, PreTrainedTokenizerBase]:
    """Hub id (None: it is none), model and tokenizer.

    `device` None or cuda is the CPU where there is no CUDA device, as in HFLM; `dtype` auto is that
    of the model's configuration. All else, and errors, as `kvp.hf.load_model`.
    """
    if isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer)
    if not isinstance(pretrained, str):
        if tokenizer is None:
            raise UsageError("pretrained= is a model object: give its tokenizer=, too")
        check_model(pretrained)
        return None, pretrained, tokenizer
    if dtype == "auto":
        declared = str(load_config(pretrained, revision=revision).dtype).removeprefix("torch.")
        dtype = declared if declared in get_args(DtypeName) else "float32"
    dtype = str(dtype).removeprefix("torch.")
    model, own = load_model(pretrained, device=_device(device), dtype=dtype, revision=revision)
    return None if local_folder(pretrained) else pretrained, model, tokenizer or own


def _device(device: str | None) -> str:
    """The device to compute on. The harness's command line says cuda:0 unless it is told."""
    if torch.cuda.is_available():
        return device or "cuda"
    if device is not None and not device.startswith("cuda"):
        return device
    say("note: no CUDA device here, computing on the CPU")
    return "cpu"
