"""The rankers' Triton kernel against the form in PyTorch: on a CUDA device where there is one,
else in triton's interpreter on the CPU.

The interpreter gets bfloat16 products wrong, so weights of bfloat16 are tested on devices only;
float16 takes the same way through the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvp.geometry import Geometry
from kvp.scoring import View
from policies.calibration import Calibration
from policies.learned import LearnedScorer, has_kernel
from policies.ranker import HeadRankers, RankerSpec
from policies.recent_features import RECENT_FEATURES

pytest.importorskip("triton", reason="triton, the extra `gpu`, is not installed")

from policies.fused_scoring import score_by_kernel, unsupported

MakeView = Callable[..., View]
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
EVERYTHING = ("key", "value", "position", "distance", "recent")
HALVES = [torch.float16] + [torch.bfloat16] * ON_GPU


def _rankers(spec: RankerSpec, heads: int, dtype: torch.dtype = torch.float32) -> HeadRankers:
    """Random ones in which every weight and statistic counts."""
    generator = torch.Generator().manual_seed(spec.hidden + heads)
    rankers = HeadRankers(spec, heads, generator)
    with torch.no_grad():
        for parameter in rankers.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    if spec.architecture == "fourier":
        shape = (heads, spec.head_dim)
        parts = {f"{name}_{part}": torch.rand(shape, generator=generator) + 0.5
                 for name in ("key", "value") for part in ("mean", "std")}  # fmt: skip
        rankers.standardise(**parts)
    return rankers.with_dtype(dtype).requires_grad_(False).to(DEVICE)


def _case(
    spec: RankerSpec, heads: int, tokens: int, dtype: torch.dtype = torch.float32, batch: int = 2
) -> dict[str, Any]:
    """Random arguments of `score_by_kernel`; the prompts start at different positions."""
    generator = torch.Generator().manual_seed(tokens)
    shape = (batch, heads, tokens, spec.head_dim)
    keys = 2 * torch.randn(shape, generator=generator) + 0.5
    values = torch.randn(shape, generator=generator)
    positions = torch.arange(tokens) + 30_000 * torch.arange(batch)[:, None]
    recent = torch.randn(*shape[:3], len(RECENT_FEATURES), generator=generator)
    arguments = {
        "keys": keys.to(dtype), "values": values.to(dtype), "positions": positions,
        "lengths": positions[:, -1] + 1 + torch.arange(batch),
        "recent": recent if spec.reads_queries else None,
    }  # fmt: skip
    return {k: None if v is None else v.to(DEVICE) for k, v in arguments.items()}


def _by_kernel(rankers: HeadRankers, case: dict[str, Any], **options: Any) -> Tensor:
    scores = score_by_kernel(rankers.spec, rankers.weights(slice(None)), **case, **options)
    assert scores.dtype == torch.float32
    return scores


def _by_torch(rankers: HeadRankers, case: dict[str, Any], gaps: bool = False) -> Tensor:
    """[B, H, N], one prompt at a time."""
    recent, lengths = case["recent"], case["lengths"]
    found = []
    for entry, keys in enumerate(case["keys"]):
        length = lengths[entry].reshape(-1, 1).expand(-1, keys.shape[1])  # [1 or H, N]
        found.append(rankers(
            keys, case["values"][entry], case["positions"][entry],
            length if gaps or len(length) > 1 else length[0],
            None if recent is None else recent[entry], stacked=True, gaps=gaps,
        ))  # fmt: skip
    return torch.stack(found)


def _assert_same(result: Tensor, expected: Tensor) -> None:
    """Within the rounding of float32: of sums of up to 600 products, LayerNorm between them."""
    assert result.shape == expected.shape
    limit = 1e-5 * max(1.0, expected.abs().max().item())
    assert (result - expected).abs().max() <= limit


SPECS = {
    "default": RankerSpec(head_dim=64, hidden=64, neighbours=31),
    "narrow": RankerSpec(head_dim=32, hidden=16),
    "odd": RankerSpec(head_dim=80, hidden=40, neighbours=3, position_width=20, frequencies=5),
    "wide": RankerSpec(head_dim=128, hidden=256, neighbours=2),
    "odd and wide": RankerSpec(head_dim=96, hidden=136),
    "one block": RankerSpec(head_dim=32, hidden=96, blocks=1, neighbours=9),
    "paper": RankerSpec(head_dim=64, hidden=32, architecture="paper", max_positions=50),
    "recent": RankerSpec(head_dim=32, hidden=32, inputs=EVERYTHING, neighbours=5),
    "key": RankerSpec(head_dim=32, hidden=32, inputs=("key",)),
    "value, distance": RankerSpec(head_dim=32, hidden=32, inputs=("value", "distance")),
    "position": RankerSpec(head_dim=32, hidden=32, inputs=("position",)),
    "recent alone": RankerSpec(head_dim=32, hidden=32, inputs=("recent",)),
    "turned": RankerSpec(head_dim=32, hidden=32, key_frequencies=tuple(0.7**i for i in range(16))),
    "turned in part": RankerSpec(head_dim=32, hidden=32, key_frequencies=(1.0, 0.1, 0.01)),
}  # fmt: skip


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_every_ranker_gets_the_same_scores(spec: RankerSpec) -> None:
    rankers = _rankers(spec, heads=2)
    case = _case(spec, heads=2, tokens=37)
    _assert_same(_by_kernel(rankers, case, block=32), _by_torch(rankers, case))


@pytest.mark.parametrize(
    ("heads", "tokens", "batch"), [(1, 1, 1), (8, 5, 1), (3, 16, 2), (2, 300, 1), (4, 64, 1)]
)
def test_any_number_of_heads_tokens_and_prompts(heads: int, tokens: int, batch: int) -> None:
    spec = RankerSpec(head_dim=32, hidden=32, neighbours=4)
    rankers = _rankers(spec, heads)
    case = _case(spec, heads, tokens, batch=batch)
    _assert_same(_by_kernel(rankers, case), _by_torch(rankers, case))


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("chunk", [16, 32, 128])
def test_pieces_of_any_size_give_the_same(block: int, chunk: int) -> None:
    spec = RankerSpec(head_dim=48, hidden=72, neighbours=4)
    rankers, case = _rankers(spec, 1), _case(spec, 1, 50)
    _assert_same(_by_kernel(rankers, case, block=block, chunk=chunk), _by_torch(rankers, case))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_caches_of_half_precision_are_read_as_they_are(dtype: torch.dtype) -> None:
    """Rankers of float32 compute in float32 whatever the cache holds."""
    spec = SPECS["default"]
    rankers, case = _rankers(spec, 2), _case(spec, 2, 40, dtype)
    in_single = case | {name: case[name].float() for name in ("keys", "values")}
    _assert_same(_by_kernel(rankers, case), _by_torch(rankers, in_single))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["default", "wide", "paper", "recent", "one block"])
def test_weights_of_half_precision_err_no_more_than_in_pytorch(
    name: str, dtype: torch.dtype
) -> None:
    """The same weights in float32 are the truth; PyTorch rounds every intermediate tensor, too."""
    spec = SPECS[name]
    rankers, case = _rankers(spec, 2, dtype), _case(spec, 2, 70, dtype)
    truth = _by_torch(rankers.with_dtype(torch.float32), case)
    error = (_by_kernel(rankers, case) - truth).square().mean().sqrt()
    allowed = (_by_torch(rankers, case) - truth).square().mean().sqrt()
    assert 0 < error <= allowed


def test_views_of_a_cache_are_read_where_they_lie() -> None:
    """Other orders of axes, tokens before and after; what is left out is NaN."""
    spec = RankerSpec(head_dim=32, hidden=32)
    rankers, case = _rankers(spec, 3), _case(spec, 3, 40)
    expected = _by_torch(rankers, case)
    for name in ("keys", "values"):
        room = torch.full((2, 50, 3, 40), torch.nan, device=DEVICE)
        room[:, 4:44, :, :32] = case[name].transpose(1, 2)
        case[name] = room[:, 4:44, :, :32].transpose(1, 2)
    _assert_same(_by_kernel(rankers, case), expected)
    case["keys"] = case["keys"].mT.contiguous().mT
    _assert_same(_by_kernel(rankers, case), expected)


def test_unset_memory_is_never_read() -> None:
    spec = SPECS["recent"]
    rankers, case = _rankers(spec, 2), _case(spec, 2, 21)
    expected = _by_torch(rankers, case)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=DEVICE).isnan().all()
        result = _by_kernel(rankers, case, block=16)
    finally:
        torch.use_deterministic_algorithms(False)
    _assert_same(result, expected)


def test_heads_that_hold_different_tokens() -> None:
    """Positions and lengths of heads, with gaps: neighbours are those near in position."""
    spec = replace(SPECS["default"], key_frequencies=(1.0, 0.2))
    rankers, case = _rankers(spec, 3), _case(spec, 3, 40)
    random = torch.Generator().manual_seed(5)
    drawn = [torch.randperm(90, generator=random)[:40].sort().values for _ in range(6)]
    case["positions"] = torch.stack(drawn).view(2, 3, 40).to(DEVICE)
    case["lengths"] = case["positions"][..., -1] + 1
    _assert_same(_by_kernel(rankers, case, gaps=True), _by_torch(rankers, case, gaps=True))


def test_far_positions_keep_their_phase() -> None:
    """Sines of positions near a million, where a float32 quotient has lost the wave."""
    spec = RankerSpec(head_dim=32, hidden=32, inputs=("position",))
    rankers, case = _rankers(spec, 1), _case(spec, 1, 64)
    case["positions"] = case["positions"] + 999_937
    _assert_same(_by_kernel(rankers, case), _by_torch(rankers, case))


def test_nothing_to_score() -> None:
    spec = SPECS["default"]
    rankers = _rankers(spec, 2)
    case = _case(spec, 2, 3)
    nothing = {name: case[name][:, :, :0] for name in ("keys", "values")}
    nothing |= {"positions": case["positions"][:, :0]}
    assert _by_kernel(rankers, case | nothing).shape == (2, 2, 0)
    assert _by_kernel(rankers, _case(spec, 2, 3, batch=0)).shape == (0, 2, 3)


GEOMETRY = Geometry(layers=3, query_heads=4, kv_heads=2, head_dim=32)


def _policy(spec: RankerSpec) -> LearnedScorer:
    heads = GEOMETRY.total_kv_heads
    calibration = Calibration(
        target="share",
        scores=torch.linspace(-3, 3, 9).expand(heads, 9).contiguous(),
        values=torch.arange(9.0).expand(heads, 9) + torch.arange(float(heads))[:, None],
    )
    return LearnedScorer(rankers=_rankers(spec, heads), geometry=GEOMETRY, calibration=calibration)


@pytest.mark.parametrize("name", ["recent", "turned"])
def test_a_policy_scores_the_same_by_kernel(make_view: MakeView, name: str) -> None:
    """Batches, a token fed again, one head, heads that hold different tokens, calibration."""
    policy = _policy(SPECS[name])
    whole = make_view(tokens=25, width=32)
    shrunk = whole.positions[:, None] * torch.tensor([2, 3])[None, :, None]
    head = slice(1, 2)
    one = {"heads": head, "keys": whole.keys[:, head], "values": whole.values[:, head],
           "queries": whole.queries[:, 2:]}  # fmt: skip
    views = [whole, replace(whole, fed_again=3), replace(whole, positions=shrunk),
             replace(whole, **one)]  # fmt: skip
    for view in views:
        fields = {n: getattr(view, n) for n in ("keys", "values", "positions", "queries")}
        view = replace(view, **{n: tensor.to(DEVICE) for n, tensor in fields.items()})
        scores = [replace(policy, fused=fused).score(view) for fused in (False, True)]
        assert scores[0].shape == view.keys.shape[:3]
        torch.testing.assert_close(scores[1], scores[0], rtol=1e-5, atol=2e-5)


def test_rankers_that_do_not_fit_are_left_to_pytorch() -> None:
    assert unsupported(SPECS["wide"], _rankers(SPECS["wide"], 1).weights(slice(None))) is None
    for change, reason in (
        ({"hidden": 257}, "hidden and head_dim up to 256"),
        ({"head_dim": 320}, "hidden and head_dim up to 256"),
        ({"neighbours": 64}, "63 neighbours"),
        ({"frequencies": 65}, "64 frequencies"),
    ):
        spec = replace(SPECS["narrow"], **change)
        rankers = _rankers(spec, 1)
        assert reason in (unsupported(spec, rankers.weights(slice(None))) or "")
        with pytest.raises(ValueError, match=reason):
            _by_kernel(rankers, _case(spec, 1, 4))
    shared = _rankers(SPECS["narrow"], 2).weights(slice(None))
    shared["first_weight"] = shared["first_weight"][:1]
    assert "share no weights" in (unsupported(SPECS["narrow"], shared) or "")
    doubles = _rankers(SPECS["narrow"], 2, torch.float64).weights(slice(None))
    assert "float32, bfloat16" in (unsupported(SPECS["narrow"], doubles) or "")


def test_a_cpu_has_no_kernel() -> None:
    assert not has_kernel(_rankers(SPECS["narrow"], 1), torch.device("cpu"))


def test_wrong_shapes_are_refused() -> None:
    rankers, case = _rankers(SPECS["recent"], 2), _case(SPECS["recent"], 2, 9)
    for wrong in (
        {"keys": case["keys"][:, :1]},
        {"values": case["values"][:, :, :8]},
        {"keys": case["keys"][..., :16], "values": case["values"][..., :16]},
    ):
        with pytest.raises(ValueError, match=r"must both be \[batch, 2, tokens, 32\]"):
            _by_kernel(rankers, case | wrong)
    with pytest.raises(ValueError, match="recent need its features"):
        _by_kernel(rankers, case | {"recent": None})


COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from policies import fused_scoring
from policies.ranker import HeadRankers, RankerSpec
from policies.recent_features import RECENT_FEATURES

class Device:  # what a launch asks of the driver before it compiles
    def get_current_target(self): return GPUTarget("cuda", capability, 32)
    def get_current_device(self): return capability
    def get_current_stream(self, device): return 0

class Compiler:
    def __getitem__(self, grid):
        return lambda *given, **named: made.append(kernel.warmup(*given, grid=grid, **named))

kernel, made = fused_scoring.score_block, []
fused_scoring.score_block = Compiler()
driver.set_active(Device())
everything = ("key", "value", "position", "distance", "recent")
turned = RankerSpec(
    head_dim=80, hidden=32, inputs=everything, neighbours=5, key_frequencies=(1.0, 0.5)
)
paper = RankerSpec(head_dim=64, hidden=16, architecture="paper", blocks=1)
for capability, spec, dtype in ((90, turned, torch.bfloat16), (80, paper, torch.float32)):
    keys = torch.randn(2, 2, 37, spec.head_dim).bfloat16()
    positions = torch.arange(37).expand(2, 37)
    weights = HeadRankers(spec, 2).with_dtype(dtype).weights(slice(None))
    recent = torch.randn(2, 2, 37, len(RECENT_FEATURES)) if spec.reads_queries else None
    length = torch.tensor([37, 37])
    fused_scoring.score_by_kernel(
        spec, weights, keys, keys.mT.contiguous().mT, positions, length, recent, chunk=16
    )
    assert made[-1].asm["cubin"]
    assert made[-1].metadata.shared <= 64 * 1024, made[-1].metadata.shared
assert len(made) == 2
"""


def test_the_kernel_compiles_without_a_device(run_compiler: Callable[[str], None]) -> None:
    run_compiler(COMPILE)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_scores_by_the_kernel_as_a_cpu_does_without(
    make_view: MakeView, dtype: torch.dtype
) -> None:
    spec = replace(SPECS["default"], head_dim=32)
    on_cpu = _rankers(spec, GEOMETRY.total_kv_heads, dtype).cpu()
    view = make_view(tokens=3000, width=32)
    expected = LearnedScorer(rankers=on_cpu, geometry=GEOMETRY).score(view)
    fields = {n: getattr(view, n).to(DEVICE) for n in ("keys", "values", "positions")}
    rankers = on_cpu.materialise().to(DEVICE)
    assert has_kernel(rankers, DEVICE)
    scores = LearnedScorer(rankers=rankers, geometry=GEOMETRY).score(replace(view, **fields))
    limit = 1e-4 if dtype == torch.float32 else 0.05
    assert (scores.cpu() - expected).abs().max() <= limit * expected.abs().max()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("hidden", [16, 64, 128])
def test_on_a_gpu_the_kernel_takes_no_longer_than_pytorch(hidden: int) -> None:
    """A layer of a 7B model, 8,192 tokens; the median of ten calls after two that compile."""
    spec = RankerSpec(head_dim=128, hidden=hidden, neighbours=31)
    rankers = _rankers(spec, 4, torch.bfloat16)
    case = _case(spec, 4, 8192, torch.bfloat16, batch=1)

    def milliseconds(call: Callable[..., Tensor]) -> float:
        found = []
        for _ in range(12):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call(rankers, case)
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end))
        return sorted(found[2:])[5]

    assert milliseconds(_by_kernel) <= milliseconds(_by_torch)
