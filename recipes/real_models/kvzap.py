"""KVzap's networks for a model of your own: what KVzip+ would give a token, from its hidden state.

    python -m recipes.real_models.kvzap MODEL DOCUMENTS OUT [COUNT]

Reads the first message of the first COUNT (126) conversations of DOCUMENTS (`documents.py`), lets
MODEL score their tokens by KVzip+, and fits one MLP per layer to the logarithm of the scores (arXiv
2601.07891: one hidden layer of an eighth of the width, GELU, mean squared error). OUT is read by
`--methods kvzap:OUT+global`. Seed 0.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvp.hf.prefill import prefill
from kvp.scoring import Needs, Reconstruction

NEEDS = Needs(hidden_after=0, every_state=True, reconstruction=Reconstruction(weighted=True))
TOKENS, EPOCHS, BATCH, RATE, FLOOR = 512, 20, 512, 2e-3, 1e-6
"""Tokens of a document that are learned from, passes over them, tokens of a step, learning rate,
smallest score whose logarithm is taken."""


@torch.no_grad()
def read_pairs(model_path: str, documents: Path, count: int) -> tuple[list[Tensor], list[Tensor]]:
    """Of every layer: states [documents x TOKENS, W] bfloat16, log scores [.., H] float32."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).eval()
    states: list[list[Tensor]] = [[] for _ in range(model.config.num_hidden_layers)]
    scores: list[list[Tensor]] = [[] for _ in states]
    lines = documents.read_text(encoding="utf-8").splitlines()[:count]
    for index, line in enumerate(lines):
        first = json.loads(line)["prompt"][:1]
        text = tokenizer.apply_chat_template(first, tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        views = prefill(model, ids, NEEDS, tokenizer=tokenizer).views(NEEDS, budget=1)
        learned = torch.randperm(ids.shape[1])[:TOKENS]
        for layer, view in enumerate(views):
            states[layer].append(view.hidden.states[0, learned].bfloat16())
            logarithms = view.reconstruction[0][:, learned].float().clamp_min(FLOOR).log()
            scores[layer].append(logarithms.T)
        print(f"documents: {index + 1}/{len(lines)}", file=sys.stderr, flush=True)
    return [torch.cat(layer) for layer in states], [torch.cat(layer) for layer in scores]


def fit(states: Tensor, scores: Tensor) -> nn.Sequential:
    """The MLP of a layer, of which the last bias is the mean score when training begins."""
    width, heads = states.shape[1], scores.shape[1]
    network = nn.Sequential(nn.Linear(width, width // 8), nn.GELU(), nn.Linear(width // 8, heads))
    nn.init.zeros_(network[2].weight)
    network[2].bias.data.copy_(scores.mean(0))
    steps = EPOCHS * (len(states) // BATCH)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for _ in range(steps):
        drawn = torch.randint(len(states), (BATCH,))
        loss = (network(states[drawn].float()) - scores[drawn]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network


def main(model: str, documents: Path, out: Path, count: int) -> None:
    """Write config.json and model.safetensors, as `policies.kvzap` reads them."""
    torch.manual_seed(0)
    states, scores = read_pairs(model, documents, count)
    tensors: dict[str, Tensor] = {}
    for layer, pair in enumerate(zip(states, scores, strict=True)):
        network = fit(*pair)
        tensors |= {f"layers.{layer}.{name}": value for name, value in network.state_dict().items()}
        with torch.no_grad():
            left = (network(pair[0].float()) - pair[1]).var() / pair[1].var()
        print(f"layer {layer}: {1 - left:.3f} of the variance", file=sys.stderr, flush=True)
    width, heads = states[0].shape[1], scores[0].shape[1]
    config = {
        "model_type": "kvzap", "input_dim": width, "output_dim": heads, "n_modules": len(states),
        "hidden_dim": width // 8,
    }  # fmt: skip
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a folder or a hub id")
    parser.add_argument("documents", type=Path, help="conversations of documents.py")
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("count", type=int, nargs="?", default=126, help="of conversations (126)")
    main(**vars(parser.parse_args()))
