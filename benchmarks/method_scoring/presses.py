"""kvpress's presses: what each adds to a prefill, timed in its own environment.

`python -m benchmarks.method_scoring` starts this with the interpreter of `--kvpress`.
"""

import json
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from unittest.mock import patch

import kvpress
import torch
import transformers
from kvpress.presses import kvzip_press
from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.measuring import Seconds, Stopwatch, timed
from benchmarks.method_scoring import setting
from benchmarks.method_scoring.__main__ import parser
from benchmarks.method_scoring.setting import Times
from kvp import nano
from recipes.kvpress.policy_press import PolicyPress

PRESSES = {
    "random": "RandomPress",
    "streaming_llm:kvpress": "StreamingLLMPress",
    "knorm:kvpress": "KnormPress",
    "keydiff:kvpress": "KeyDiffPress",
    "lagkv:kvpress": "LagKVPress",
    "snapkv:kvpress": "SnapKVPress",
    "tova:kvpress": "TOVAPress",
    "h2o:kvpress": "ObservedAttentionPress",
    "expected_attention:kvpress": "ExpectedAttentionPress",
    "kvzip:kvpress": "KVzipPress",
    "kvzap": "KVzapPress",
    "kvp": "PolicyPress",
}
"""kvp's method -> the press that is the same."""
READS_WEIGHTS = "h2o:kvpress"
"""The method whose press reads attention weights, which takes another kind of prefill."""


def main() -> None:
    """Print the rows of every press as JSON."""
    transformers.utils.logging.disable_progress_bar()
    given = parser().parse_args()
    model = setting.model_of(given)
    names = setting.selected(given, list(PRESSES))
    presses = {name: _press(name, model) for name in names}
    environment = f"kvpress {version('kvpress')}, transformers {transformers.__version__}"
    times = {name: Times(name, "kvpress", environment, name == READS_WEIGHTS) for name in names}
    tokenizer = AutoTokenizer.from_pretrained(nano.path())
    ids = setting.prompt(given.child, given.device)
    with patch.object(kvzip_press.AutoTokenizer, "from_pretrained", lambda _: tokenizer):
        _round(model, setting.prompt(min(128, given.child), given.device), presses, given.device)
        for _ in setting.rounds(given):
            for name, taken in _round(model, ids, presses, given.device).items():
                times[name].rounds.append(taken)
    print(json.dumps([one.row(given.child) for one in times.values()]))


def _press(name: str, model: PreTrainedModel) -> kvpress.BasePress:
    ratio = 1 - setting.KEPT
    if name == "kvp":
        return PolicyPress(ratio, setting.learned(model))
    press = getattr(kvpress, PRESSES[name])(ratio)
    if name == "kvzap":
        config = model.config
        press.kvzap_model_name = f"nvidia/KVzap-mlp-{config.name_or_path.split('/')[-1]}"
        press.kvzap_model = KVzapModel(
            KVzapConfig(
                input_dim=config.hidden_size,
                output_dim=config.num_key_value_heads,
                n_modules=config.num_hidden_layers,
                hidden_dim=config.hidden_size // 8,
            )
        )
    return press


def _round(
    model: PreTrainedModel, ids: Tensor, presses: dict[str, kvpress.BasePress], device: str
) -> dict[str, tuple[Seconds, Seconds, Seconds]]:
    """Of each press: what it adds, the prefill alone, and the prefill with it."""
    bare = timed(partial(setting.prefill, model, ids), device)[1]
    found = {}
    for name, press in presses.items():
        watch = Stopwatch(device)
        kind = type(press)
        timed_part = "_perform_kvzip_compression" if name.startswith("kvzip") else "forward_hook"
        with ExitStack() as stack:
            original = getattr(kind, timed_part)
            stack.enter_context(patch.object(kind, timed_part, watch.around(original)))
            if name == READS_WEIGHTS:
                model.set_attn_implementation("eager")
                stack.callback(model.set_attn_implementation, "sdpa")
            whole = timed(partial(_pressed, model, ids, press), device)[1]
        difference = Seconds(whole.wall - bare.wall, whole.processor - bare.processor)
        added = difference if name == READS_WEIGHTS else watch.total
        found[name] = added, bare, whole
    return found


@torch.no_grad()
def _pressed(model: PreTrainedModel, ids: Tensor, press: kvpress.BasePress) -> None:
    with press(model):
        setting.prefill(model, ids)


if __name__ == "__main__":
    main()
