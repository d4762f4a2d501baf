"""Costs that a dry run predicts next to those of the run, part by part.

    python -m benchmarks.cost_prediction --out found.json

A case is a model with its sequences and a short training. In every round a store with queries and
one with an importance grid are collected and trained on, and a policy is trained while the model
runs. Right before each of these parts the rates are measured (`kvp.hf.rates`), as by a dry run of
its command, because other work changes the speed of a machine within minutes. All are processes of
their own, forked after the imports, with one thread. Seconds are processor time of all threads
after a short run;
of collecting, those of two sequences are taken off, because a run loads the model again. Memory is
the growth of the peak of resident memory over that after the imports. Ratios are
predicted over measured; medians are over rounds. `random` is a model of 29 million random weights
whose answers are decoded, `nano` the bundled one with the data's answers. Predictions for larger
models (`--configs`, folders in benchmarks/configs) are from the data sheet of a device
(`--device_sheet`), which nothing here measures.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import machine

if TYPE_CHECKING:
    from train.config import TrainConfig

PARTS = ("collect-qkv", "train-qkv", "collect-importance", "train-importance", "train-online")
"""What is predicted and run, in this order."""
CONFIGS = Path(__file__).with_name("configs")
TASKS = "niah_single_2,niah_multikey_1"
SETTINGS: dict[str, dict[str, Any]] = {
    "nano": {"tasks": TASKS, "length": 512, "answers": "reference", "max_new_tokens": 32},
    "random": {"tasks": TASKS, "length": 384, "answers": "model", "max_new_tokens": 24},
}
"""Sequences of each case."""
TRAINING: dict[str, Any] = {
    "sequences": 12,
    "validation_sequences": 4,
    "steps": 10,
    "contexts": 4,
    "hidden": 128,
    "validation_contexts": 8,
    "validate_every": 5,
    "calibration_contexts": 8,
    "checkpoint_every": 10,
}


def main() -> None:
    """Measure all cases and write the JSON file."""
    args = _arguments()
    _import_all()
    measured = json.loads(args.again.read_text())["cases"] if args.again else {}
    cases = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in args.cases.split(","):
            again = measured.get(case, {}).get("rounds", [])
            rounds = [_again(case, Path(folder) / f"{case}-again", one) for one in again]
            for index in range(args.rounds):
                rounds.append(_round(case, Path(folder) / f"{case}{index}"))
            cases[case] = {"rounds": rounds, "median_ratios": _medians(rounds)}
            print(case, json.dumps(cases[case]["median_ratios"], indent=1), flush=True)
    predictions = {}
    for name in filter(None, args.configs.split(",")):
        predictions[name] = _prediction(str(CONFIGS / name), args.device_sheet)
    report = {
        "machine": machine(),
        "settings": {"training": TRAINING, "cases": SETTINGS, "rounds": args.rounds},
        "cases": cases,
        "predictions": predictions,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--cases", default="nano,random")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--configs",
        default="qwen2.5-7b,llama-70b",
        help="configurations to predict for, folders in benchmarks/configs",
    )
    parser.add_argument("--again", type=Path, help="add to the rounds of this file")
    parser.add_argument("--device_sheet", default="h100")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def _round(case: str, folder: Path) -> dict[str, Any]:
    """Rates, and predicted and measured numbers of one round by part."""
    folder.mkdir(parents=True)
    if case == "random":
        _call("make", case, folder)
    rates, measured = {}, {}
    for part in PARTS:
        rates[part] = _call("rates", case, folder)
        measured[part] = _call(part, case, folder)
    predicted = {part: _predicted(case, folder, found)[part] for part, found in rates.items()}
    for part in ("collect-qkv", "collect-importance"):
        store = folder / part.removeprefix("collect-")
        measured[part]["disk_bytes"] = sum(
            file.stat().st_size for file in store.rglob("*") if file.is_file()
        )
    return {"rates": rates, "predicted": predicted, "measured": measured}


def _again(case: str, folder: Path, earlier: dict[str, Any]) -> dict[str, Any]:
    """An earlier round with what is predicted today by the rates that it measured, by part."""
    if case == "random" and not folder.exists():
        folder.mkdir(parents=True)
        _make(case, folder)
    rates = earlier["rates"]
    predicted = {part: _predicted(case, folder, found)[part] for part, found in rates.items()}
    return earlier | {"predicted": predicted}


def _medians(rounds: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Predicted over measured, the median over rounds."""
    return {
        part: {
            name: round(
                statistics.median(
                    one["predicted"][part][name] / one["measured"][part][name] for one in rounds
                ),
                3,
            )
            for name in numbers
        }
        for part, numbers in rounds[0]["predicted"].items()
    }


def _call(child: str, case: str, folder: Path) -> Any:  # noqa: ANN401
    """The result of a part in a process of its own, forked after the imports."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)

    def run() -> None:
        theirs.send(_CHILDREN[child](case, folder))

    process = fork.Process(target=run)
    process.start()
    theirs.close()
    try:
        result = ours.recv()
    except EOFError:
        raise SystemExit(f"{case}: {child} failed") from None
    process.join()
    print(case, child, json.dumps(result), flush=True)
    return result


def _import_all() -> None:
    """What the parts need, so that none of them measures imports."""
    import torch
    from transformers import Qwen2ForCausalLM

    import trace_collect.run
    import train.dry_run
    import train.online.training_data
    import train.run

    torch.set_num_threads(1)
    assert all((Qwen2ForCausalLM, trace_collect.run, train.dry_run, train.online, train.run))


def _make(_: str, folder: Path) -> None:
    """A model of random weights with nano's tokenizer, in `folder / "model"`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from kvp import nano

    torch.manual_seed(0)
    target = folder / "model"
    shutil.copytree(
        nano.path(), target, ignore=shutil.ignore_patterns("model.safetensors", "policy")
    )
    vocabulary = json.loads((nano.path() / "config.json").read_text())["vocab_size"]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )
    Qwen2ForCausalLM(config).save_pretrained(target)


def _model(case: str, folder: Path) -> str:
    return "nano" if case == "nano" else str(folder / "model")


def _rates(case: str, folder: Path) -> dict[str, Any]:
    """The rates of this machine, by processor time."""
    from kvp.hf import load_config
    from kvp.hf.rates import rates_of
    from policies.ranker_rate import ranker_flops_of
    from train.dry_run import planned, spec_of

    config = _planned_settings(case, folder)
    model_config = load_config(config.model)
    plan = planned(config, model_config)
    spec = spec_of(config.recipe(), plan.model.geometry.head_dim)
    rates = rates_of(
        "measured",
        model_config,
        plan,
        device="cpu",
        ranker_flops=ranker_flops_of(spec, plan),
        clock=time.process_time,
    )
    return {name: value for name, value in asdict(rates).items() if name != "device_bytes"}


def _planned_settings(case: str, folder: Path) -> TrainConfig:
    from train.config import TrainConfig

    model = _model(case, folder)
    return TrainConfig(out="-", dry_run=True, model=model, **SETTINGS[case], **TRAINING)


def _predicted(case: str, folder: Path, found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """What the model of costs says of every part, by rates that were measured."""
    from kvp.costs import ONLINE, STORES, Rates, costs_of
    from kvp.costs.memory import collecting_memory, training_memory
    from kvp.hf import load_config
    from train.dry_run import planned

    config = _planned_settings(case, folder)
    plan = planned(config, load_config(config.model))
    result: dict[str, dict[str, float]] = {}
    for cost in costs_of(plan, Rates(**found)):
        if cost.way == ONLINE:
            ram = cost.memory.ram_bytes
            result["train-online"] = {"seconds": cost.seconds, "ram_bytes": ram}
            continue
        store = STORES[cost.way]
        result[f"collect-{store}"] = {
            "seconds": cost.collect_seconds,
            "ram_bytes": collecting_memory(plan, False, store).ram_bytes,
            "disk_bytes": cost.disk_bytes,
        }
        result[f"train-{store}"] = {
            "seconds": cost.train_seconds,
            "ram_bytes": training_memory(plan, False, store).ram_bytes,
        }
    return result


def _collect(store: str, case: str, folder: Path) -> dict[str, float]:
    """What collecting a store takes."""
    from trace_collect.config import CollectConfig
    from trace_collect.run import run

    def collect(out: str, train: int, validation: int) -> None:
        config = CollectConfig(
            out=str(folder / out),
            model=_model(case, folder),
            train=train,
            validation=validation,
            store=store,  # type: ignore[arg-type]
            **SETTINGS[case],
        )
        run(config)

    counts = TRAINING["sequences"], TRAINING["validation_sequences"]
    few = _measured(lambda: collect(f"{store}-first", 1, 1), lambda: collect(f"{store}-few", 1, 1))
    whole = _measured(lambda: None, lambda: collect(store, *counts))
    # Loading takes the same in both, so what the other sequences took counts for all of them.
    share = sum(counts) / (sum(counts) - 2)
    seconds = {name: share * (whole[name] - few[name]) for name in ("seconds", "wall_seconds")}
    return seconds | {"ram_bytes": few["ram_bytes"] + whole["ram_bytes"]}


def _train(source: str, case: str, folder: Path) -> dict[str, float]:
    """What training on a store, or while the model runs, takes."""
    import train.run
    from train.config import TrainConfig

    settings = dict(TRAINING)
    if source == "online":
        settings |= SETTINGS[case] | {"source": "model", "model": _model(case, folder)}
        settings |= {"buffer": settings["sequences"]}
    else:
        del settings["validation_sequences"]
        settings |= {"traces": str(folder / source)}

    def run(name: str, **changed: int) -> None:
        out = str(folder / f"policy-{source}-{name}")
        train.run.run(TrainConfig(out=out, **(settings | changed)))

    short = {"sequences": 2, "steps": 1, "validation_contexts": 1, "calibration_contexts": 1}
    short |= {"validation_sequences": 1, "buffer": 2} if source == "online" else {}
    return _measured(lambda: run("first", **short), lambda: run("whole"))


def _measured(first: Callable[[], None], whole: Callable[[], None]) -> dict[str, float]:
    """Processor seconds of all threads, and growth of the peak of resident memory, of `whole`.

    A short run comes first and loads what is loaded once, which takes time that no length of the
    run changes; memory is that over the imports alone.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    first()
    start, started = time.process_time(), time.perf_counter()
    whole()
    return {
        "seconds": time.process_time() - start,
        "wall_seconds": time.perf_counter() - started,
        "ram_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
    }


def _prediction(folder: str, device: str) -> dict[str, Any]:
    """The table of ways for a configuration, bfloat16 at 4,096 tokens, from a data sheet."""
    from kvp.costs import assumed_rates, costs_of
    from kvp.hf import load_config
    from train.config import TrainConfig
    from train.dry_run import planned

    config = TrainConfig(out="-", dry_run=True, model=folder, dtype="bfloat16", length=4096)
    plan = planned(config, load_config(folder))
    rates = assumed_rates(device, plan.model, plan.lengths, 2, plan.batch)
    rows = {cost.way: asdict(cost) | {"seconds": cost.seconds} for cost in costs_of(plan, rates)}
    return {"rates": asdict(rates), "train": plan.train, "memory_gb": plan.memory_gb, "ways": rows}


_CHILDREN = {
    "make": _make,
    "rates": _rates,
    "collect-qkv": lambda case, folder: _collect("qkv", case, folder),
    "collect-importance": lambda case, folder: _collect("importance", case, folder),
    "train-qkv": lambda case, folder: _train("qkv", case, folder),
    "train-importance": lambda case, folder: _train("importance", case, folder),
    "train-online": lambda case, folder: _train("online", case, folder),
}

if __name__ == "__main__":
    main()
