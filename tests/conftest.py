"""Fixtures of the whole suite: no network, few threads, deterministic seeds; a local S3 server."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import hypothesis
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

sys.path.append(str(Path(__file__).parent / "helpers"))
hypothesis.settings.register_profile("kvp", deadline=None)  # machines are busy
hypothesis.settings.load_profile("kvp")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)  # exact comparisons need equal numbers, also in processes that tests start
if not torch.cuda.is_available():
    # Kernels run in triton's interpreter, which must be chosen before anybody imports triton.
    os.environ["TRITON_INTERPRET"] = "1"

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
_LOOPBACK = ("127.", "::1", "localhost")


class NetworkCallError(AssertionError):
    """A test tried to reach another machine."""


def pytest_runtest_setup(item):
    """Skip tests that need a CUDA device where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def launchers():
    """Variables that launchers set: launcher -> those of each process of a job."""
    return {
        "one": [{}],
        "torchrun": [
            {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} for rank in range(2)
        ],
        "array": [
            {
                "SLURM_ARRAY_TASK_ID": str(10 + task),
                "SLURM_ARRAY_TASK_MIN": "10",
                "SLURM_ARRAY_TASK_COUNT": "2",
                "SLURM_PROCID": "0",
                "SLURM_NTASKS": "1",
            }
            for task in range(2)
        ],
    }


@pytest.fixture(scope="session")
def one_line():
    """`pytest.raises` for an error of one line, which contains the text `said`."""

    @contextmanager
    def check(error, said="", match=None):
        with pytest.raises(error, match=match) as caught:
            yield caught
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)

    return check


@pytest.fixture(scope="session")
def jsonl():
    """Write rows, or lines that are text already, to a file of JSON lines; its path as text."""

    def write(path, *rows):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture(scope="session")
def run_python():
    """Run code in a process of its own, in a folder, up to an exit code: what it printed.

    Modules of that folder come before those of this repository.
    """

    def run(code, folder=None, *, exit_code=0):
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )  # fmt: skip
        assert done.returncode == exit_code, done.stderr[-2000:]
        return done

    return run


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Write a module of a user's own: `own_module(name, code)` returns its name.

    It lies in the working folder, which is not on the import path; a second call replaces it.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    written = set()

    def write(name, code):
        (tmp_path / f"{name}.py").write_text(code)
        sys.modules.pop(name, None)
        written.add(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """Refuse every connection that leaves this machine, and every name look-up."""
    connect = socket.socket.connect
    lookup = socket.getaddrinfo

    def guarded_connect(self, address):
        local = self.family == socket.AF_UNIX or str(address[0]).startswith(_LOOPBACK)
        if not local:
            raise NetworkCallError(f"network call to {address!r}")
        connect(self, address)

    def guarded_lookup(host, *args, **kwargs):
        if host is not None and not str(host).startswith(_LOOPBACK):
            raise NetworkCallError(f"name look-up of {host!r}")
        return lookup(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_lookup)


@pytest.fixture
def run_until():
    """Let a process, given by its id, run until a condition holds or the process ends.

    It is stopped while the condition is checked, so that a slow machine does not miss the moment.
    """

    def run(child, holds):
        # A process that has ended and is not waited for has no command line.
        while not holds() and Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(child, signal.SIGCONT)
            time.sleep(0.002)
            os.kill(child, signal.SIGSTOP)
        os.kill(child, signal.SIGCONT)

    return run


@pytest.fixture
def watch(run_until):
    """Note the files below a folder or an address; the result waits until there are so many new
    ones, or until a process (its id) ends.
    """
    from kvp.artifacts.addresses import files_below

    def watched(folder):
        known = {name for name, _ in files_below(folder)}

        def wait(wanted, child):
            new = set()

            def written():
                new.update({name for name, _ in files_below(folder)} - known)
                return len(new) >= wanted

            run_until(child, written)

        return wait

    return watched


@pytest.fixture(autouse=True)
def _seeded():
    """Seed torch's global generator, which random-weight models draw from."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A model of random weights with a byte-level tokenizer, small enough to collect from.

    Qwen2 with 2 layers, 4 query and 2 KV heads, context 1024; vocabulary of 600.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    from kvp.data.synthetic.text import prose

    folder = tmp_path_factory.mktemp("model")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|pad|>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([prose(0, 5000, "train")], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|start|>"],
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(folder)
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=600, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        initializer_range=0.3, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def letters():
    """Make a tokenizer with one id per character, below 64; with `chat` also a template."""

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(*, chat=False):
        tokens = ["<pad>", "<u>", "<e>", "<a>", *"abcdefghijklmnopqrstuvwxyzR \n.,0123456789"]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            pad_token="<pad>",
            additional_special_tokens=tokens[1:4],
            chat_template="<u>{{ messages[0].content }}<e>"
            "{% if add_generation_prompt %}<a>{% endif %}"
            if chat
            else None,
        )

    return make


@pytest.fixture(scope="session")
def left_padded():
    """Token ids [B, T] of rows [T or fewer], and their mask."""

    def pad(rows):
        return (
            pad_sequence(part, batch_first=True, padding_side="left")
            for part in (rows, [torch.ones_like(row) for row in rows])
        )

    return pad


# Imports modules once, then forks a program for every line of input, which has its environment and
# arguments as JSON. For a line with a number it waits for the process of that id.
_FORKING = textwrap.dedent(
    """
    import importlib, json, os, sys
    import torch
    program, modules, model = json.loads(sys.argv[1])
    for name in modules:
        importlib.import_module(name)
    from kvp.program.table import run_program
    torch.set_num_threads(1)
    if model is not None:
        from kvp.hf import load_model
        load_model(model)  # imports the architecture once for all children
    for line in sys.stdin:
        job = json.loads(line)
        if isinstance(job, int):
            print(os.waitpid(job, 0)[1], flush=True)
            continue
        child = os.fork()
        if not child:
            sys.stdout = sys.stderr
            os.environ.update(job[0])
            os._exit(run_program(program, job[1]))
        print(child, flush=True)
    """
)


@dataclass(frozen=True)
class ForkServer:
    """A process that forks runs of one program."""

    process: subprocess.Popen[str]
    errors: Path
    """What the runs write to standard error."""
    flags: tuple[str, ...]
    """Given to every run."""

    def start(self, out, environment=None, *flags):
        """Begin a run that writes `out`; its process id."""
        return self._say([environment or {}, [*self.flags, *flags, "--out", str(out)]])

    def end(self, run):
        """Wait for a run; its wait status."""
        return self._say(run)

    def kill(self, run, *, after=0.0):
        """Kill a run after some seconds; its wait status."""
        time.sleep(after)
        os.kill(run, signal.SIGKILL)
        return self.end(run)

    def _say(self, job):
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory):
    """Makes `ForkServer`s of a program by its name; `modules` are imported before any fork."""
    with ExitStack() as stack:

        def make(program, *flags, modules=(), model=None):
            errors = tmp_path_factory.mktemp("server") / "errors"
            given = json.dumps([program, modules, None if model is None else str(model)])
            stream = stack.enter_context(errors.open("w"))
            process = subprocess.Popen(
                [sys.executable, "-c", _FORKING, given],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, text=True,
            )  # fmt: skip
            stack.enter_context(process)
            stack.callback(process.communicate, timeout=120)
            return ForkServer(process, errors, flags)

        yield make


_S3_SERVER = textwrap.dedent(
    """
    import logging, sys
    from moto.server import ThreadedMotoServer
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()
    """
)


@pytest.fixture(scope="session")
def s3_server():
    """Address of an S3 server with the bucket `bucket`."""
    with subprocess.Popen(
        [sys.executable, "-c", _S3_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=30).close()
        yield url
        server.communicate(timeout=60)


@pytest.fixture(scope="session")
def s3_environment(s3_server):
    """What a program needs to find the server; set for this process, too."""
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ALLOW_HTTP": "true",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "KVP_RETRY_SECONDS": "20",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield environment


_NUMBERS = count()


@pytest.fixture
def prefix(s3_environment):
    """A new folder of the bucket."""
    from kvp.artifacts.addresses import place

    return place(f"s3://bucket/test{next(_NUMBERS)}")


@pytest.fixture(scope="session")
def make_trace():
    """Make the trace of a sequence of a plan; its index decides all but `changes`."""
    from kvp.store import SequenceRecord, Trace

    def build(plan, index, **changes):
        generator = torch.Generator().manual_seed(index)
        tokens = changes.get("length", plan.max_tokens - 1 - index % 5)
        size, dtype = plan.geometry, getattr(torch, plan.dtype)

        def noise(*shape):
            return torch.randn(*shape, size.head_dim, generator=generator).to(dtype)

        facts = {
            "id": f"naïve-{index} ✓", "task": "niah",
            "split": "validation" if index % 2 else "train", "length": tokens,
            "context_length": tokens - 6, "prompt_length": tokens - 4,
            "token_ids": tuple(range(index, index + tokens)),
            "reply_spans": ((tokens - 4, tokens),),
        }  # fmt: skip
        heads = (size.layers, size.kv_heads)
        queries, keys = noise(*heads, size.group, tokens), noise(*heads, tokens)
        return Trace(
            record=SequenceRecord(index=index, **facts | changes),
            queries=queries, keys=keys, values=noise(*heads, tokens),
        )  # fmt: skip

    return build


@pytest.fixture(scope="session")
def assert_same_tensors():
    """Compare every array of a sequence bit for bit."""

    def compare(one, index, other, other_index):
        first, second = one.trace(index), other.trace(other_index)
        assert set(first.labels) == set(second.labels)
        pairs = [(first.labels[name], second.labels[name]) for name in first.labels]
        for name in ("queries", "keys", "values"):
            ours, theirs = getattr(first, name), getattr(second, name)
            assert (ours is None) == (theirs is None), name
            pairs += [] if ours is None else [(ours, theirs)]
        assert len(pairs) >= 2
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)

    return compare


@pytest.fixture(scope="session")
def assert_same_store(assert_same_tensors):
    """Compare a store on a disk with what one process wrote with other `--out`."""

    def compare(store, whole):
        from kvp.store import TraceReader

        shared = TraceReader(store)
        assert shared.complete
        assert shared.records() == whole.records()
        assert shared.manifest["identity"] == whole.manifest["identity"]
        ours, theirs = (one.manifest.get("config", {}) for one in (shared, whole))
        assert {**ours, "out": ""} == {**theirs, "out": ""}
        for record in whole.records():
            assert_same_tensors(shared, record.index, whole, record.index)
        assert _names(store) == _names(whole.path)

    return compare


@pytest.fixture(scope="session")
def assert_same_files():
    """Compare two stores, on S3 or on a disk, byte for byte."""

    def files(folder):
        # Without the manifest, which holds `--out` and a time.
        return {name: (folder / name).read_bytes() for name in _files(folder) - {"manifest.json"}}

    def compare(store, other):
        assert files(store) == files(other)

    return compare


@pytest.fixture(scope="session")
def assert_same_results(tmp_path_factory):
    """Compare results, on a disk or on S3, with those of one process on a disk.

    The settings named in `but` may differ.
    """

    def compare(out, whole, *, but=("out",)):
        from eval.results.folder import load_results
        from eval.results.record_schemas import RESULTS_ROWS
        from eval.results.records import key_of, read_records

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
            left, right = (load_results(name) for name in (out, whole))
        ours, theirs = (
            {
                key_of(record): record
                for record in read_records(it.folder / "rows.jsonl", RESULTS_ROWS)  # no equal keys
            }
            for it in (left, right)
        )
        assert ours == theirs
        for name in ("identity", "policies", "notes", "earlier_runs"):
            assert left.manifest[name] == right.manifest[name]
        other = dict.fromkeys(but)
        assert {**left.manifest["config"], **other} == {**right.manifest["config"], **other}
        assert _names(out) == _names(whole)

    return compare


def _names(folder):
    """Names of all files and folders below a folder, locks and half-written files included."""
    if isinstance(folder, Path):
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    return _files(folder)


def _files(folder):
    from kvp.artifacts.addresses import files_below

    return {name for name, _ in files_below(folder)}
