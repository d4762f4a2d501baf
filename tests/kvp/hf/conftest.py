"""Small random models of six families, and attention under explicit masks as their reference."""

from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field

import pytest
import torch
import transformers
from torch import Tensor, nn

from kvp.hf.visibility import EMPTY
from kvp.scoring import Needs

SMALL_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # peaked attention: a wrongly visible token changes the logits
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}

SMALL_MODELS = {
    "qwen2": {}, "llama": {}, "mistral": {"sliding_window": None}, "olmo2": {}, "phi3": {},
    "qwen3": {"head_dim": 16},
}  # fmt: skip


@pytest.fixture(params=sorted(SMALL_MODELS))
def family(request):
    """Each architecture in turn."""
    return str(request.param)


@pytest.fixture
def build():
    """Build a frozen model of a family with kvp's attention; the same weights every time."""

    def make(family, **more):
        import kvp.hf  # noqa: F401  (registers the attention)

        name = family[0].upper() + family[1:]
        config_class = getattr(transformers, f"{name}Config")
        torch.manual_seed(7)
        config = config_class(**{**SMALL_SIZES, **SMALL_MODELS.get(family, {}), **more})
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        model.requires_grad_(False).train(False)
        model.set_attn_implementation("kvp")
        return model

    return make


@pytest.fixture
def model(build, family):
    """One model of each family."""
    return build(family)


@pytest.fixture
def qwen(build):
    """The architecture of the bundled model alone."""
    return build("qwen2")


@pytest.fixture
def prompt():
    """Random token ids [batch, tokens] that are never the padding token."""

    def draw(tokens, *, batch=1, seed=1):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(1, 64, (batch, tokens), generator=generator)

    return draw


@pytest.fixture
def attention_inputs():
    """States [B, N, W] that enter each layer's attention while the block lasts, without kvp."""

    @contextmanager
    def recorded(model):
        states = []

        def hook(module, args, kwargs):
            states.append(args[0] if args else kwargs["hidden_states"])

        with ExitStack() as hooks:
            for layer in model.model.layers:
                attention = layer.self_attn
                hooks.enter_context(attention.register_forward_pre_hook(hook, with_kwargs=True))
            yield states

    return recorded


@pytest.fixture
def generate():
    """Run greedy `model.generate`, with further options, and return its whole output."""

    def run(model, ids, tokens, **options):
        settings = {
            "attention_mask": torch.ones_like(ids),
            "do_sample": False,
            "return_dict_in_generate": True,
            **options,
        }
        return model.generate(input_ids=ids, max_new_tokens=tokens, **settings)

    return run


def attention_of(model, layer):
    """The attention module of a layer, without kvp."""
    projections = ("q_proj", "qkv_proj", "query_key_value", "c_attn", "query")
    (found,) = (
        module
        for module in model.modules()
        if getattr(module, "layer_idx", None) == layer
        and any(hasattr(module, name) for name in projections)
    )
    return found


@pytest.fixture
def masks_set():
    """Stock eager attention in which each layer's queries see `allowed` [H, T, T] keys alone."""

    @contextmanager
    def setting(model, allowed):
        with ExitStack() as hooks:
            for layer, seen in allowed.items():
                bias = torch.zeros(seen.shape, dtype=model.dtype)
                bias = bias.masked_fill(~seen, torch.finfo(model.dtype).min)
                bias = bias.repeat_interleave(model.config.num_attention_heads // len(seen), dim=0)

                def with_mask(module, args, kwargs, bias=bias):
                    return args, {**kwargs, "attention_mask": bias[None]}

                attention = attention_of(model, layer)
                hooks.enter_context(
                    attention.register_forward_pre_hook(with_mask, with_kwargs=True)
                )
            hooks.callback(model.set_attn_implementation, model.config._attn_implementation)
            model.set_attn_implementation("eager")
            yield

    return setting


@pytest.fixture
def masked_logits(masks_set):
    """Logits of one sequence under stock eager attention with an explicit mask per layer and head.

    Queries before `boundary` see every earlier token; later ones see of the first `boundary` tokens
    only those in `kept[layer][kv_head]`, and all after. `layers`: indices, the first by default.
    """

    def run(model, ids, boundary, kept, layers=None):
        tokens = ids.shape[1]
        allowed = {}
        for layer, heads in zip(layers or range(len(kept)), kept, strict=True):
            allowed[layer] = torch.ones(len(heads), tokens, tokens).tril().bool()
            for head, chosen in enumerate(heads):
                dropped = [i for i in range(boundary) if i not in set(chosen)]
                allowed[layer][head, boundary:, dropped] = False
        with masks_set(model, allowed), torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits

    return run


Held = dict[int, list[list[int]]]
"""Layer -> positions that each KV head holds."""


@dataclass
class Row:
    """One row of a batch, pass by pass: tokens fed, positions held, and last logits."""

    fed: list[Tensor] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    """What every head held before a pass."""
    after: list[list[list[int]]] = field(default_factory=list)
    """Numbers of tokens per layer and head after a pass, before an eviction between passes."""
    logits: list[Tensor] = field(default_factory=list)


def held_by(cache, entry):
    """Positions that a row's heads hold, without empty slots."""
    return {
        index: [[p for p in head if p < EMPTY] for head in layer.positions[entry].tolist()]
        for index, layer in cache.stored.items()
    }


@contextmanager
def rows_noted(model, rows):
    """Note every forward pass of a batch inside an evicting block in `rows`."""

    def before(module, args, kwargs):
        cache, fed = kwargs["past_key_values"], kwargs["input_ids"]
        mask = kwargs.get("attention_mask")  # None where nothing is padded
        real = (torch.ones_like(fed) if mask is None else mask[:, -fed.shape[1] :]).bool()
        for entry, row in enumerate(rows):
            row.fed.append(fed[entry][real[entry]])
            row.held.append(held_by(cache, entry) if cache.get_seq_length() else {})

    def after(module, args, kwargs, output):
        for entry, row in enumerate(rows):
            row.logits.append(output.logits[entry, -1].clone())
            held = held_by(kwargs["past_key_values"], entry)
            row.after.append([[len(head) for head in heads] for heads in held.values()])

    with (
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ):
        yield


@pytest.fixture
def noted():
    """A context in which every forward pass of one sequence is noted in a `Row`."""

    @contextmanager
    def noting(model):
        rows = [Row()]
        with rows_noted(model, rows):
            yield rows[0]

    return noting


@pytest.fixture
def conversation(generate, left_padded):
    """A batch of prompts, answers and turns inside `block`, as one `Row` per row of the last turn.

    `turns` has the rows' questions, token ids each; between two turns the cache goes on as it is,
    or as a `fork` with a row per question.
    """

    def run(model, prompts, turns, block, origin="same", answer=7):
        rows = [Row() for _ in prompts]
        ids, mask = left_padded(prompts)
        options = {"min_new_tokens": answer}
        with block, rows_noted(model, rows):
            output = generate(model, ids, answer, attention_mask=mask, **options)
            for questions in turns:
                cache, times = output.past_key_values, len(questions) // len(rows)
                rows[:] = [deepcopy(row) for row in rows for _ in range(times)]
                if origin == "fork":
                    cache = cache.fork(times)
                asked, real = left_padded(questions)
                said = nn.functional.pad(mask, (0, answer), value=1)
                mask = torch.cat([said.repeat_interleave(times, dim=0), real], dim=1)
                options["past_key_values"] = cache
                ids = torch.cat([output.sequences.repeat_interleave(times, dim=0), asked], dim=1)
                output = generate(model, ids, answer, attention_mask=mask, **options)
        return rows

    return run


@pytest.fixture
def assert_row_masked(masks_set):
    """The logits of all passes of a row are those of one pass under a mask per layer and head."""

    def compare(model, row, atol):
        ids = torch.cat(row.fed)
        allowed = {
            layer: torch.zeros(len(heads), len(ids), len(ids), dtype=torch.bool)
            for layer, heads in row.held[-1].items()
        }
        stops = torch.tensor([len(fed) for fed in row.fed]).cumsum(0).tolist()
        for start, stop, held in zip([0, *stops], stops, row.held, strict=False):
            for layer, of_layer in allowed.items():
                of_layer[:, start:stop, start:stop] = torch.ones(stop - start, stop - start).tril()
                for head, tokens in enumerate(held.get(layer, ())):
                    of_layer[head, start:stop, tokens] = True
        with masks_set(model, allowed), torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
        for stop, found in zip(stops, row.logits, strict=True):
            torch.testing.assert_close(found, logits[stop - 1], rtol=0, atol=atol)

    return compare


COMBINED = [
    # between turns, every, padded, allocator
    ("same", None, False, None),
    ("same", 5, True, "ada"),
    ("fork", None, True, "ada"),
    ("fork", 5, False, None),
    ("same", None, False, "ada"),
    ("fork", 5, True, None),
]


@pytest.fixture(params=COMBINED, ids=["-".join(map(str, line)) for line in COMBINED])
def combined(request, conversation, assert_row_masked):
    """Checks one combination: masked logits, and rows that are what each is alone."""
    from kvp.hf import evicting
    from kvp.protection import Protection
    from policies.registry import make_allocator

    origin, every, padded, allocator = request.param

    def check(model, scorer, prompts, turns, atol):
        """`prompts` has a long and a short one; the turns' questions are for two rows of each."""

        def block():
            return evicting(
                model, scorer, "40%", Protection(sinks=2, recents=4), every=every,
                allocator=allocator and make_allocator(allocator),
            )  # fmt: skip

        prompts = list(prompts if padded else prompts[:1])
        times = 2 if origin == "fork" else 1
        turns = [turn[: len(prompts) * times] for turn in turns]
        rows = conversation(model, prompts, turns, block(), origin)
        for number, row in enumerate(rows):
            assert_row_masked(model, row, atol)
            mine = [prompts[number // times], *(turn[number] for turn in turns)]
            (alone,) = conversation(model, mine[:1], [[one] for one in mine[1:]], block())
            assert row.held == alone.held
            for found, expected in zip(row.logits, alone.logits, strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=atol)

    return check


class ByContent:
    """Scores from keys, values and the last queries, different in every layer and head."""

    name = "by_content"

    def __init__(self, queries=3):
        self.needs = Needs(queries=queries)

    def score(self, view):
        batch, heads, _, head_dim = view.keys.shape
        grouped = view.queries.float().reshape(batch, heads, -1, view.queries.shape[2], head_dim)
        attention = torch.einsum("bhgwd,bhnd->bhgwn", grouped, view.keys.float())
        # Repeated tokens may tie in the first layer.
        ties = 1e-3 * view.head_positions
        return attention.amax(dim=(2, 3)) - view.values.float().norm(dim=-1) + ties


class Fixed:
    """Scores drawn once per layer, head and position, for texts of at most `tokens` tokens."""

    needs = Needs()
    name = "fixed"

    def __init__(self, tokens, *, layers=3, heads=2):
        generator = torch.Generator().manual_seed(11)
        self.scores = torch.rand(layers, heads, tokens, generator=generator)
        self.layers = []
        """The layer of every call."""

    def score(self, view):
        self.layers.append(view.layer)
        places = view.head_positions
        of_heads = self.scores[view.layer, view.heads].expand(len(places), -1, -1)
        return of_heads.gather(2, places.expand(*of_heads.shape[:2], -1))

    def kept(self, budget, sinks=4, recents=16):
        """Tokens that stay, by sorting in plain Python: protected ones, then the best."""
        tokens = self.scores.shape[-1]
        protected = {*range(sinks), *range(tokens - recents, tokens)}
        result = []
        for layer in self.scores.tolist():
            heads = []
            for scores in layer:
                order = sorted(range(tokens), key=lambda i, s=scores: (i not in protected, -s[i]))
                heads.append(sorted(order[:budget]))
            result.append(heads)
        return result


class Uneven:
    """Allocates `by` tokens less than the budget to the first head, and more to the second."""

    name = "uneven"

    def __init__(self, by=1):
        self.by = by
        self.requests = []

    def allocate(self, request):
        self.requests.append(request)
        counts = torch.tensor([[request.budget - self.by, request.budget + self.by]])
        return counts.repeat(len(request.scores), 1)


@pytest.fixture
def uneven():
    """Makes an allocator of two heads, `uneven(by)`."""
    return Uneven


@pytest.fixture
def by_content():
    """Makes a scorer that reads queries, `by_content(queries)`."""
    return ByContent


@pytest.fixture
def fixed():
    """Makes a scorer whose choice a test can recompute, `fixed(tokens)`."""
    return Fixed


@pytest.fixture
def longrope(build):
    """Phi-3 with other RoPE frequencies past 48 tokens."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4, "original_max_position_embeddings": 48, "factor": 4.0,
    }  # fmt: skip
    return build("phi3", original_max_position_embeddings=48, rope_parameters=rope)
