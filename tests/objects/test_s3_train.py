"""kvp train with traces and policies on S3: the weights of a training from a disk, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from kvp import load_policy
from kvp.artifacts.addresses import files_below
from kvp.errors import PolicyError
from kvp.program.table import train


def _weights(policy):
    """Files of the heads, and what their index says of them."""
    index = json.loads((policy / "policy.json").read_bytes())
    return {name: (policy / name).read_bytes() for name in index["files"]} | {
        "held_out": json.dumps([index["held_out"], index["calibration"]]).encode()
    }


def test_training_from_s3_equals_training_from_a_disk(on_s3, trained, training, prefix, capsys):
    out, record = prefix / "policy", on_s3 / "sequences" / "000001.json"
    content = record.read_bytes()
    record.unlink()
    assert train(["--traces", str(on_s3), "--out", str(out), *training]) == 2
    assert f"{on_s3} lacks 1 of 8 sequences; let kvp collect finish" in capsys.readouterr().err
    record.write_bytes(content)
    assert train(["--traces", str(on_s3), "--out", str(out), *training]) == 0
    assert _weights(out) == _weights(trained)
    assert {name.partition("/")[0] for name, _ in files_below(out)} == {
        path.name for path in trained.iterdir()
    }
    assert f"--policies {out}" in capsys.readouterr().out
    assert train(["--traces", str(on_s3), "--out", str(out), *training]) == 0
    assert "already holds the finished policy" in capsys.readouterr().out
    assert train(["--traces", str(on_s3), "--out", str(out), *training, "--seed", "1"]) == 2
    assert f"--out {out} holds a finished policy of other settings" in capsys.readouterr().err

    scorer, local = load_policy(str(out)), load_policy(str(trained))
    for name, weights in local.rankers.state_dict().items():
        assert torch.equal(weights, scorer.rankers.state_dict()[name])
    (out / "policy.json").unlink()
    with pytest.raises(PolicyError, match=r"has no policy.json: it is not a policy directory"):
        load_policy(str(out))


@pytest.mark.slow
def test_a_killed_training_on_s3_continues_from_its_checkpoint(
    on_s3, trained, training, prefix, tmp_path
):
    out = prefix / "policy"
    flags = ["--traces", str(on_s3), "--out", str(out), *training]
    code = "import sys; from kvp.program.table import train as main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "lost")},
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not any(
        name.endswith(".ckpt") for name, _ in files_below(out)
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "policy.json").exists(), "the run was too short to be killed"
    names = [name for name, _ in files_below(out)]
    assert "checkpoints/last.ckpt" in names
    assert any(name.startswith("logs/") for name in names)
    assert train(flags) == 0
    assert _weights(out) == _weights(trained)
    assert not any(name.startswith("checkpoints/") for name, _ in files_below(out))
