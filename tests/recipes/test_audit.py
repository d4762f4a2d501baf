"""The audit: its script parses, its page holds every part of two small folders."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvp.artifacts.jsonl import JsonLines
from kvp.manifest import digest_json, write_sealed_json

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "audit"
BACKENDS = {"sdpa": {}, "eager": {"attention": "eager"}}


def _rows(backend: str) -> list[dict[str, Any]]:
    """Two prompts, right with the full cache; eager makes one answer of ring wrong."""
    rows = []
    for protocol in ("query_aware", "query_agnostic"):
        for method, protected, budget, scores, kept in (
            ("full", False, None, (1.0, 1.0), 2),
            ("ring", True, "25%", (1.0, 1.0), 2),
            ("ring", False, "25%", (0.0, 0.0), 0),
            ("snapkv", True, "25%", (1.0, 0.0), 1),
            ("snapkv", False, "25%", (1.0, 1.0), 2),
        ):
            for number, score in enumerate(scores):
                wrong = (backend, method, protected, number) == ("eager", "ring", True, 0)
                rows.append(
                    {
                        "model": "toy", "method": method, "variant": "auto",
                        "allocator": "uniform", "policy": None, "policy_seed": None,
                        "protected": protected, "protocol": protocol, "task": "needle",
                        "budget_spec": budget, "budget": budget and 4, "example": str(number),
                        "score": 0.0 if wrong else score, "prediction": f"{score}{wrong}",
                        "nll": None, "reply_tokens": None, "kept_tokens": 4 if budget else 16,
                        "cached_tokens": 16, "cache_bytes": None, "evidence_tokens": 2,
                        "evidence_kept": [[kept, kept]], "evidence_lost": 2 - kept,
                        "prompt_digest": "0" * 16, "metric": "all",
                    }
                )  # fmt: skip
    return rows


def _folder(path: Path, backend: str) -> Path:
    identity = {
        "model": "toy", "length": 20, "split": "test", "seed": 0, "sinks": 1, "recents": 2,
        **BACKENDS[backend],
    }  # fmt: skip
    path.mkdir()
    manifest = {
        "format": "kvp-results", "format_version": 3, "config": identity, "identity": identity,
        "identity_digest": digest_json(identity), "command": ["kvp-eval", backend],
    }  # fmt: skip
    write_sealed_json(path / "manifest.json", manifest)
    JsonLines(path / "rows.jsonl").rewrite(_rows(backend))
    return path


def test_its_script_parses() -> None:
    subprocess.run(["bash", "-n", str(RECIPE / "run.sh")], check=True)


def test_the_page_has_every_part(tmp_path: Path) -> None:
    folders = [str(_folder(tmp_path / backend, backend)) for backend in BACKENDS]
    command = [sys.executable, str(RECIPE / "table.py"), *folders]
    text = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout  # fmt: skip
    titles = re.findall(r"^## (.*?),.*; (.*)$", text, flags=re.MULTILINE)
    assert titles == [
        (protocol, part)
        for protocol in ("query_aware", "query_agnostic")
        for part in ("protected", "unprotected", "eager instead of sdpa")
    ]
    assert "kvp-eval sdpa\nkvp-eval eager" in text
    protected = text[: text.index("; unprotected")]
    assert "| snapkv (protected) | -50.0 (-100.0 to +100.0) |" in (protected)
    assert "1 of 2, 0 gained, 1 with a token gone" in protected
    assert "| snapkv (protected) | 50 | 50 (50 50) |" in protected
    backends = text[text.index("eager instead of sdpa") :].partition("\n## ")[0]
    assert "| ring (protected) | -50.0 (-100.0 to +100.0, 1 of 2 answers) |" in backends
    assert "| full cache | +0.0 (-100.0 to +100.0, 0 of 2 answers) |" in backends
