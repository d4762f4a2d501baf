"""vLLM's connector loads and compresses contexts, and refuses wrong ones as transformers does.

vLLM itself is a stand-in here, of the few names that the connector imports.
"""

import importlib
import shutil
import sys
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kvp import nano
from kvp.artifacts.manifest import sha256_file
from kvp.contexts import read_context, read_facts
from kvp.errors import ContextError, UsageError
from kvp.hf import load_model
from kvp.hf.contexts import compress, load_context
from policies import load_policy, make_scorer

TEXT = "One of the special magic numbers for lazy-cat is: 4821973. The grass is green. " * 4
BLOCK = 32
Role = SimpleNamespace(SCHEDULER=0, WORKER=1)


class Base:
    """What the connector inherits."""

    def __init__(self, config, role, cache):
        self._kv_cache_manager = object()

    def bind_connector_metadata(self, metadata):
        pass

    def clear_connector_metadata(self):
        pass


class Backend:
    """A backend that stores elements as they come: [blocks, key or value, row, head, channel]."""

    @staticmethod
    def do_kv_cache_update(layer, keys, values, cache, slots):
        for part, rows in enumerate((keys, values)):
            cache[slots // BLOCK, part, slots % BLOCK] = rows


@pytest.fixture(scope="module")
def made():
    """The bundled model, and a context of it."""
    model, tokenizer = load_model("nano")
    return model, compress(model, tokenizer, TEXT, make_scorer("knorm"), "60%")


@pytest.fixture
def start(monkeypatch, made):
    """Start a folder's connectors in both roles, and the lines of their log."""
    logged = []
    warned = []
    log = SimpleNamespace(
        error=lambda line, *parts: logged.append(line % parts),
        warning=lambda line, *parts: warned.append(line % parts),
    )
    kinds = {"KVConnectorBase_V1": Base, "KVConnectorMetadata": object, "KVConnectorRole": Role,
             "KVConnectorWorkerMetadata": object}  # fmt: skip
    for name, content in {
        "vllm.distributed.kv_transfer.kv_connector.v1.base": kinds,
        "vllm.logger": {"init_logger": lambda _: log},
        "vllm.version": {"__version__": "0.33.0"},
        "vllm.model_executor.models.utils": {
            "extract_layer_index": lambda name: int(name.split(".")[1])
        },
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    names = [f"kvp.vllm.{it}" for it in ("connector", "worker", "scheduler", "work", "engine")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module, work, *_ = map(importlib.import_module, names)
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    config = made[0].config
    text = SimpleNamespace(
        model=str(config.name_or_path), hf_text_config=config, use_mla=False, revision=None,
        dtype=torch.float32, get_head_size=lambda: config.head_dim,
        get_total_num_hidden_layers=lambda: config.num_hidden_layers,
        get_total_num_kv_heads=lambda: config.num_key_value_heads,
    )  # fmt: skip

    def start(folder, policy="knorm", ranks=1, block_size=BLOCK, cache="auto"):
        transfer = SimpleNamespace(
            kv_load_failure_policy="fail", kv_connector_module_path="kvp.vllm.connector",
            kv_connector_extra_config={"contexts": str(folder), "policy": policy},
        )  # fmt: skip
        engine = SimpleNamespace(
            model_config=text, kv_transfer_config=transfer, speculative_config=None,
            cache_config=SimpleNamespace(block_size=block_size, cache_dtype=cache),
            device_config=SimpleNamespace(device_type="cpu"),
            parallel_config=SimpleNamespace(world_size=ranks),
        )  # fmt: skip
        groups = SimpleNamespace(kv_cache_groups=[0])
        sides = [module.KvpConnector(engine, role, groups) for role in vars(Role).values()]
        assert warned[-1].endswith("tried on CPUs with vLLM 0.32, not with vLLM 0.33.0 on cpu")
        return work, *sides, logged

    return start


def layers_of(config):
    """Attention layers with memory that holds random numbers."""
    shape = (8, 2, BLOCK, config.num_key_value_heads, config.head_dim)
    return {
        f"layers.{index}.attn": SimpleNamespace(
            impl=Backend, kv_cache=torch.randn(shape), num_kv_heads=shape[3], head_size=shape[4]
        )
        for index in range(config.num_hidden_layers)
    }


def step_of(**tokens):
    """A step of vLLM that computes so many first tokens of the requests that are named."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=0) for name in tokens],
        scheduled_cached_reqs=SimpleNamespace(req_ids=(), num_computed_tokens=()),
    )


def asked(ids, **changes):
    """A request of vLLM."""
    usual = {
        "request_id": "r", "prompt_token_ids": ids, "kv_transfer_params": None, "mm_features": None,
        "lora_request": None, "sampling_params": SimpleNamespace(max_tokens=8),
        "skip_reading_prefix_cache": False, "update_block_hashes": lambda: None,
    }  # fmt: skip
    return SimpleNamespace(**usual | changes)


def schedule(connector, ids, **changes):
    """The answer to a request of vLLM's scheduler, and the work that it hands to workers."""
    request = asked(ids, **changes)
    connector.on_new_request(request)
    rows, _ = connector.get_num_new_matched_tokens(request, 0)
    blocks = SimpleNamespace(get_block_ids=lambda: ([*range(8)],))
    connector.update_state_after_alloc(request, blocks, rows)
    work = connector.build_connector_meta(step_of())
    return connector.request_finished(request, [])[1], work


def load(connector, work, config):
    """Load in a worker; the blocks that it could not fill."""
    connector.bind_connector_metadata(work)
    connector.start_load_kv(SimpleNamespace(no_compile_layers=layers_of(config)))
    return connector.get_block_ids_with_load_errors()


def check_refused(start, folder, ids, config, expected, *readers):
    """What the connector logs and `readers` raise is one line each that says `expected`."""
    _, scheduler, worker, logged = start(folder)
    told, work = schedule(scheduler, [*ids, 1, 2])
    assert load(worker, work, config) == {0, 1}
    refused = work.loads[0].refused
    assert (told is None) == bool(refused)
    lines = [*logged, *(refused,) * bool(refused)]
    for read in readers:
        with pytest.raises(ContextError) as caught:
            read()
        lines.append(str(caught.value))
    for line in lines:
        assert expected in line
        assert line.isprintable()


STRANGERS = {
    "another RoPE than this model has": ("frequencies", lambda own: [each / 2 for each in own]),
    "other weights or adapters": ("norms", lambda _: "0"),
    "this model computes in float32": ("dtype", lambda _: "bfloat16"),
}


@pytest.mark.parametrize("expected", STRANGERS)
def test_a_context_of_another_model_is_refused(expected, made, start, tmp_path):
    (model, context), (name, change) = made, STRANGERS[expected]
    who = {**context.facts.model, name: change(context.facts.model[name])}
    stranger = replace(context, facts=replace(context.facts, model=who))
    stranger.write(tmp_path)
    ids, reader = stranger.placeholders, partial(load_context, stranger, model)
    check_refused(start, tmp_path, ids, model.config, expected, reader)


def test_heads_of_other_counts_are_refused(made, start, tmp_path):
    context = made[1]
    layers = len(context.keys)
    counts = [[32, 64, 64, 64], *[[64] * 4] * (layers - 1)]

    def packed(parts):
        rows = [part.transpose(0, 1).flatten(0, 1) for part in parts]
        return [rows[0][32:], *rows[1:]]

    uneven = replace(
        context, facts=replace(context.facts, counts=counts), keys=packed(context.keys),
        values=packed(context.values),
    )  # fmt: skip
    uneven.write(tmp_path)
    _, connector, _, logged = start(tmp_path)
    told, work = schedule(connector, [*uneven.placeholders, 1, 2])
    assert told is None
    assert "heads keep different numbers of tokens" in work.loads[0].refused
    assert len(logged) == 1
    for wrong in ({"ranks": 2}, {"block_size": 64}, {"cache": "int8_per_token_head"}):
        said = "one worker" if "ranks" in wrong else "uneven counts"
        with pytest.raises(UsageError, match=f"kvp contexts: .*{said}"):
            start(tmp_path, "knorm+ada", **wrong)
    logged.clear()
    _, connector, _, logged = start(tmp_path, "knorm+ada")
    told, work = schedule(connector, [*uneven.placeholders, 1, 2])
    assert told["kvp_context"]["kept"] == 64
    assert not logged


def test_right_contexts_are_loaded_and_finite_blocks_compressed(made, start, tmp_path):
    """And what the engine's blocks hold is compressed, unless it is not finite."""
    model, context = made
    context.write(tmp_path)
    with pytest.raises(UsageError, match="kvzip reads reconstruction, which engines do not show"):
        start(tmp_path, "kvzip")
    module, scheduler, connector, logged = start(tmp_path, "streaming_llm")  # reads the budget
    told, work = schedule(scheduler, [*context.placeholders, 1, 2])
    assert told["kvp_context"] == {"digest": context.name, "tokens": 89, "kept": 64}
    assert not load(connector, work, model.config)
    assert not logged
    ids, layers = tuple(context.token_ids.tolist()), layers_of(model.config)
    layers["layers.0.attn"].kv_cache[:3, 0] = first_keys(model, ids)
    for value, tokens, expected in (
        (1.0, ids, "'digest'"),
        (1.0, tuple(range(48)), "no token comes twice"),
        (float("inf"), ids, "1.values has NaN or infinity"),
    ):
        layers["layers.1.attn"].kv_cache[:, 1] = value
        save = module.Save("r", tokens, (0, 1, 2), "60%")
        connector.bind_connector_metadata(module.Work(saves=[save]))
        connector.start_load_kv(SimpleNamespace(no_compile_layers=layers))
        connector.wait_for_save()
        assert expected in str(connector.build_connector_worker_meta().answers)
    assert len([*tmp_path.glob("*.context")]) == 2


def test_a_policy_makes_the_same_context_wherever_it_lies(made, start, tmp_path):
    model, context = made
    ids, layers = tuple(context.token_ids.tolist()), layers_of(model.config)
    layers["layers.0.attn"].kv_cache[:3, 0] = first_keys(model, ids)
    for place in ("here", "there"):
        policy = shutil.copytree(nano.path() / "policy", tmp_path / place / "policy")
        module, _, connector, _ = start(tmp_path / "contexts", f"{policy}+uniform")
        save = module.Save("r", ids, (0, 1, 2), "60.0%")
        connector.bind_connector_metadata(module.Work(saves=[save]))
        connector.start_load_kv(SimpleNamespace(no_compile_layers=layers))
        connector.wait_for_save()
    (path,) = (tmp_path / "contexts").iterdir()
    ours, theirs = read_facts(path), compress(*load_model("nano"), TEXT, load_policy(policy), "60%")
    assert replace(ours, model=theirs.facts.model, tokenizer=theirs.facts.tokenizer) == theirs.facts
    assert (ours.policy, ours.allocator) == ("policy", "uniform")
    assert ours.policy_digest == sha256_file(policy / "policy.json")
    assert ours.protection == {"sinks": 4, "recents": 16}


def first_keys(model, ids):
    """Keys of the first layer, in blocks [3, row, head, channel]: what RoPE turns."""
    with torch.no_grad():
        keys = model(torch.tensor([ids])).past_key_values.layers[0].keys[0]  # [H, N, D]
    whole = torch.zeros(3 * BLOCK, keys.shape[0], keys.shape[2])
    whole[: len(ids)] = keys.transpose(0, 1)
    return whole.view(3, BLOCK, *whole.shape[1:])


@pytest.mark.parametrize(
    "changes",
    [
        *({"kv_transfer_params": given} for given in ("kvp_compress", 5, [1], [["a", "b"]], {})),
        {"lora_request": SimpleNamespace(lora_name="a\nb")},
        {"request_id": "r\nERROR: \x1b[2J", "skip_reading_prefix_cache": True},
    ],
    ids=range(7),
)
def test_odd_requests_are_refused_in_one_line(changes, made, start, tmp_path):
    """Their answers are those of others; why they are refused is one line."""
    model, context = made
    context.write(tmp_path)
    _, scheduler, worker, logged = start(tmp_path)
    told, work = schedule(scheduler, [*context.placeholders, 1, 2], **changes)
    assert (told is None) == ("kv_transfer_params" not in changes) == bool(logged)
    assert bool(load(worker, work, model.config)) == bool(logged)
    assert all(map(str.isprintable, logged))


def test_a_misspelt_parameter_of_a_request_is_named(made, start, tmp_path):
    made[1].write(tmp_path)
    for ids, others in (([*range(40)], {"kvp_compress": "60%"}), ([*made[1].placeholders, 1], {})):
        request = asked(ids, kv_transfer_params={"kvp_compres": "9", **others})
        (connector := start(tmp_path)[1]).on_new_request(request)
        assert not connector.build_connector_meta(step_of(r=len(ids))).saves
        assert "no 'kvp_compres'" in str(connector.request_finished(request, []))


def test_nothing_is_left_of_a_request_that_is_ended_early(made, start, tmp_path):
    _, context = made
    module, connector, *_ = start(tmp_path)
    connector._kv_cache_manager = SimpleNamespace(get_block_ids=lambda _: ([0, 1, 2],))
    for told in ({}, {"digest": "5"}):
        request = asked(context.token_ids.tolist(), kv_transfer_params={"kvp_compress": "60%"})
        connector.on_new_request(request)
        assert len(connector.build_connector_meta(step_of(r=89)).saves) == 1
        saved = SimpleNamespace(kv_connector_worker_meta=module.Saved({"r": told} if told else {}))
        connector.update_connector_output(saved)
        expected = {"kvp_context": told} if told else None
        assert connector.request_finished(request, []) == (False, expected)
        late = SimpleNamespace(kv_connector_worker_meta=module.Saved({"r": {"digest": "6"}}))
        connector.update_connector_output(late)
        assert connector.request_finished(request, []) == (False, None)


@pytest.mark.parametrize("damage", ["empty", "folder"])
def test_files_that_are_no_contexts_are_refused(damage, made, start, tmp_path):
    model, context = made
    path = context.write(tmp_path)
    path.unlink()
    path.mkdir() if damage == "folder" else path.touch()
    expected = "is no regular file" if damage == "folder" else "is not a readable safetensors file"
    readers = (partial(read, path) for read in (read_facts, read_context))
    check_refused(start, tmp_path, context.placeholders, model.config, expected, *readers)
