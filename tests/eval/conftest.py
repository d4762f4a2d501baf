"""Random-weight Qwen2 models small enough to run hundreds of forward passes in a test."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import kvp.hf
from eval.config import EvalConfig
from eval.evaluate import Bench
from kvp.geometry import Geometry
from kvp.hf import load_model
from policies.policy_files import PolicyMeta, save_policy
from policies.ranker import HeadRankers, RankerSpec

END = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    "One of the special magic numbers for abrasive-pathology is: 1234567. ",
    "A special magic number is hidden within the following text. Make sure to memorize it. ",
    "I will quiz you about the number afterwards. What is the special magic number for it "
    "mentioned in the provided text? The special magic number for it is",
]


def _qwen2(vocabulary, seed, layers=2):
    assert kvp.hf.EvictingCache  # importing kvp.hf registers its attention
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        attn_implementation="kvp",
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
        initializer_range=0.6,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="session")
def tiny_model():
    """Two layers, four query and two KV heads, 40 tokens; token 0 ends an answer."""
    return _qwen2(40, seed=7)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A model folder with a trained BPE tokenizer and a chat template, as `--model` takes it."""
    folder = tmp_path_factory.mktemp("tiny")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[END, "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    _qwen2(len(tokenizer), seed=11).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory):
    """An untrained policy for the tiny models."""
    folder = tmp_path_factory.mktemp("policies") / "seed0"
    geometry = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        rankers = HeadRankers(RankerSpec(head_dim=8, hidden=8), heads=geometry.total_kv_heads)
    meta = PolicyMeta(
        geometry=geometry, model={"id": "tiny", "revision": None}, training={"seed": 5}
    )
    save_policy(folder, rankers, meta)
    return folder


@pytest.fixture(scope="module")
def bench(tiny_folder):
    """The tiny model, loaded, with answers of at most 8 tokens."""
    model, tokenizer = load_model(str(tiny_folder))
    return Bench(
        model=model, tokenizer=tokenizer,
        config=EvalConfig(model=str(tiny_folder), length=200, max_new_tokens=8, dry_run=True),
    )  # fmt: skip
