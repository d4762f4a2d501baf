import torch

from kvp.hf import EvictingCache
from kvp.hf.decoding import decode_greedily, end_tokens


def test_end_tokens_are_the_generation_configs_or_else_the_tokenizers(qwen, letters):
    tokenizer = letters()
    tokenizer.eos_token = "R"
    for config, expected in (([5, 6], (5, 6)), (5, (5,)), (None, (tokenizer.eos_token_id,))):
        qwen.generation_config.eos_token_id = config
        assert end_tokens(qwen, tokenizer) == expected
    assert end_tokens(qwen) == ()


def test_greedy_answers_are_those_of_generate(qwen, prompt):
    ids = prompt(20, batch=3)
    whole = qwen.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
    )[:, 20:].tolist()
    ends = (whole[0][4], whole[2][0])
    expected = []
    for answer in whole:
        stops = [index for index, token in enumerate(answer) if token in ends]
        expected.append(answer[: stops[0] + 1] if stops else answer)
    assert decode_greedily(qwen, EvictingCache(), ids, 0, max_new_tokens=12, ends=ends) == expected
    assert decode_greedily(qwen, EvictingCache(), ids, 0, max_new_tokens=12, ends=()) == whole
