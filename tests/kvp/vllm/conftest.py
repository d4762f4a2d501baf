"""A stock vLLM engine with kvp's connector, and the same model in transformers."""

import os
import random

import pytest
import torch

from kvp.hf.contexts import compress, load_context
from policies import make_allocator, resolve_method

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back. "


class Engine:
    """One vLLM engine of the checkpoint `served`; `model` and `tokenizer` are transformers'."""

    def __init__(self, served, model, tokenizer, folder, policy):
        import vllm  # in an environment of its own

        self.model, self.tokenizer, self.folder, self.policy = model, tokenizer, folder, policy
        self.sampling = vllm.SamplingParams
        settings = {"contexts": str(folder), "policy": policy, "memory_gb": 0.01}
        gpu = {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.2}
        self.llm = vllm.LLM(
            str(served), dtype="float32", enforce_eager=True, max_model_len=2048, max_logprobs=-1,
            enable_prefix_caching=True, block_size=32, num_gpu_blocks_override=70,
            max_num_batched_tokens=256, max_num_seqs=64,  # long prompts are read in chunks
            disable_log_stats=False, **(gpu if torch.cuda.is_available() else {}),
            kv_transfer_config=vllm.config.KVTransferConfig(
                kv_connector="KvpConnector", kv_connector_module_path="kvp.vllm.connector",
                kv_role="kv_both", kv_connector_extra_config=settings,
            ),
        )  # fmt: skip

    def close(self):
        self.llm.llm_engine.engine_core.shutdown()

    def answer(self, ids, **options):
        sampling = self.sampling(**{"temperature": 0, "max_tokens": 8, **options})
        return self.llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)[0]

    def first(self, context, question):
        """The answer, and log-probabilities of all its first tokens."""
        answer = self.answer([*context.placeholders, *question], logprobs=-1)
        first = answer.outputs[0].logprobs[0]
        return answer, torch.tensor([first[token].logprob for token in range(len(first))])

    def expected(self, context, question):
        """Log-probabilities of the first token, and eight tokens, of transformers."""
        ids = torch.tensor([[*context.placeholders, *question]])
        made = self.model.generate(
            ids, past_key_values=load_context(context, self.model), max_new_tokens=8,
            do_sample=False, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        return made.logits[0][0].log_softmax(-1), made.sequences[0, ids.shape[1] :].tolist()

    def whole(self, ids):
        """Eight tokens of transformers after a prompt without a context."""
        made = self.model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
        return made[0, len(ids) :].tolist()

    def context(self, number, budget, allocator=None):
        """A document with a needle, compressed, and the question about it."""
        draw = random.Random(number)
        needle = (
            f"One of the special magic numbers for cat-{number} is: {draw.randint(10**6, 10**7)}. "
        )
        sentences = [FILLER] * draw.randint(8, 16)
        sentences.insert(draw.randrange(len(sentences)), needle)
        scorer, _ = resolve_method(self.policy)
        context = compress(
            self.model, self.tokenizer, "".join(sentences), scorer, budget,
            allocator=allocator and make_allocator(allocator.format(folder=self.folder)),
        )  # fmt: skip
        context.write(self.folder)
        question = (
            f"What is the special magic number for cat-{number}? The special magic number for"
        )
        return context, list(self.tokenizer(question, add_special_tokens=False).input_ids)

    def compressed(self, ids, budget):
        """What vLLM tells of the context that it compresses itself from tokens `ids`."""
        made = self.answer(
            ids, max_tokens=4, min_tokens=4,
            extra_args={"kv_transfer_params": {"kvp_compress": budget}},
        )  # fmt: skip
        return made.kv_transfer_params["kvp_context"]


@pytest.fixture(scope="session")
def start_engine():
    """`Engine`, in an environment that suits CPUs."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_WORKER_MULTIPROC_METHOD="spawn", VLLM_ALLOW_INSECURE_SERIALIZATION="1",
    )  # fmt: skip
    return Engine
