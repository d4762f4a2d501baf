"""One small random model per family: vLLM loads and compresses its contexts as transformers does.

In an environment with vLLM (`make test-vllm`); skipped, and says so, elsewhere.
"""

import pytest
import torch
import transformers

from kvp import load_model
from kvp.contexts import read_context
from kvp.nano import path

parallel_state = pytest.importorskip(
    "vllm.distributed.parallel_state", reason="needs vLLM: make test-vllm"
)
pytestmark = pytest.mark.vllm

SIZES = {
    "vocab_size": 8192, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2,
    "sliding_window": None,
}  # fmt: skip
WIDE = {"head_dim": 64}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES = {
    "Qwen3": WIDE,
    "Qwen3Moe": {**WIDE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "Mistral": {},
    "Mixtral": {"num_local_experts": 4},
    "Gemma": WIDE,
    "Olmo2": {},
    "Phi3": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    "Granite": {"attention_multiplier": 0.1, "logits_scaling": 4.0, "embedding_multiplier": 3.0},
}
"""Family -> what its config has besides `SIZES`."""
QUICK = ("Qwen3Moe", "Olmo2", "Phi3")


@pytest.fixture
def serve(tmp_path, start_engine, monkeypatch):
    """An engine of a family with random weights, in this process, where it starts in seconds."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    started = []

    def serve_family(family, settings):
        torch.manual_seed(7)
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data += torch.empty_like(parameter).uniform_(-0.3, 0.3)
        folder = tmp_path / "model"
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(path()).save_pretrained(folder)
        made = load_model(str(folder))
        made[0].base_model.do_not_compile = True  # vLLM wraps transformers' own class of OLMo 2
        started.append(start_engine(folder, *made, tmp_path / "contexts", "keydiff"))
        return started[0]

    yield serve_family
    for engine in started:
        engine.close()
    parallel_state.cleanup_dist_env_and_memory()


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES],
)
def test_a_family_is_served_as_in_transformers(family, serve):
    engine = serve(family, FAMILIES[family])
    off, moved, same, rows = [], [], 0, 0
    for number in range(3):
        theirs, question = engine.context(number, "25%")
        expected, _ = engine.expected(theirs, question)
        off.append(engine.first(theirs, question)[1] - expected)
        whole = torch.tensor([[*theirs.token_ids.tolist(), *question]])
        with torch.no_grad():
            moved.append(engine.model(whole).logits[0, -1].log_softmax(-1) - expected)

        told = engine.compressed(theirs.token_ids.tolist(), "25%")
        ours = read_context(engine.folder / f"{told['digest']}.context")
        pairs = zip([*ours.keys, *ours.values], [*theirs.keys, *theirs.values], strict=True)
        for mine, other in pairs:
            close = (mine - other).abs().amax(-1) < 1e-3
            same, rows = same + int(close.sum()), rows + close.numel()
        off.append(engine.first(ours, question)[1] - engine.expected(ours, question)[0])
    worst = float(torch.stack(off).abs().max())
    print(f"{family}: log-probabilities differ by {worst:.1e}, {same} of {rows} rows are the same")
    assert worst < 2e-4
    assert same >= 0.999 * rows
    assert all(float(each.abs().max()) > 0.1 for each in moved), "whole contexts do as well"


def test_keys_that_kvp_would_turn_wrongly_are_not_compressed(serve):
    engine = serve("Cohere", {"logit_scale": 1.0})  # RoPE of neighbouring channels
    ids = engine.tokenizer("The grass is green. The sky is blue. " * 9).input_ids
    assert "kvp cannot move them" in engine.compressed(ids, "25%")["error"]
    assert not engine.folder.exists()
