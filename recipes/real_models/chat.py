"""A conversation over a long document with an evicted cache; docs/python.md explains it.

    python recipes/real_models/fetch.py && python recipes/real_models/chat.py

prints both answers and what the cache keeps, and draws that to kept.png.
"""

from pathlib import Path

from transformers import DynamicCache

from kvp import Protection, evicting, load_model
from kvp.data.synthetic.text import prose

# or a hub id: HuggingFaceTB/SmolLM2-135M-Instruct
model, tokenizer = load_model(str(Path(__file__).parents[2] / "models/smollm2-135m-instruct"))
stories = [prose(seed, words=350, split="test") for seed in range(3)]
facts = ["The code of the north gate is 48213. ", "The telephone number of Dr. Osei is 5550173. "]
document = f"{stories[0]} {facts[0]}{stories[1]} {facts[1]}{stories[2]}"

messages = [{"role": "system", "content": "You answer questions about a document."}]
opening = len(tokenizer.apply_chat_template(messages)["input_ids"])
cache = DynamicCache(config=model.config)
kept_always = Protection(sinks=opening, recents=0)
with evicting(model, "smollm2-135m-instruct+ada", "12.5%", kept_always) as kept:
    for question in (
        f"{document}\n\nWhat is the code of the north gate?",
        "What is the telephone number of Dr. Osei?",
    ):
        print(question.splitlines()[-1], flush=True)
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**prompt, past_key_values=cache, max_new_tokens=40, do_sample=False)
        answer = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        print(answer)
print(kept)
kept.draw().savefig("kept.png")  # which tokens each head holds
