"""kvp serve: llama-cpp-python's OpenAI-compatible server, its model within a bounded cache."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from eval.config import ServeConfig
from kvp.errors import UsageError
from kvp.plugins import require
from kvp.progress import say
from policies import load_policy, make_scorer


def run(config: ServeConfig) -> None:
    """Serve until interrupted; requests run one after the other, as that server does.

    Raises KvpError where the file, the method, the model, the extra or the address cannot work.
    """
    if not Path(config.gguf).is_file():
        raise UsageError(f"{config.gguf}: no such file; kvp serve reads a GGUF file")
    require("the server", "llama-cpp", "llama_cpp", "gguf", "uvicorn", "starlette_context")
    scorer = load_policy(config.policy) if config.policy else make_scorer(config.method)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        why = f"--host {config.host} --port {config.port}: {str(error.strerror).partition(' (')[0]}"
        raise UsageError(f"{why}: give another --port or --host") from None
    import uvicorn
    from llama_cpp.server import app as server
    from llama_cpp.server.settings import ModelSettings, ServerSettings

    from kvp.llamacpp import bounded

    settings = ModelSettings(
        model=config.gguf, n_ctx=config.cells, flash_attn=True, logits_all=False, verbose=False
    )
    try:
        app = server.create_app(
            server_settings=ServerSettings(host=config.host, port=config.port),
            model_settings=[settings],
        )
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"{config.gguf}: llama.cpp cannot load it ({error})") from None
    llama = server._llama_proxy()
    complete = llama.create_completion

    def ending(*prompt: Any, **options: Any) -> Any:  # noqa: ANN401
        """What chats, streamed or not, call; without a limit as many tokens as there are cells."""
        if options.get("max_tokens", 0) is None:
            options["max_tokens"] = config.cells
        return complete(*prompt, **options)

    llama.create_completion = ending
    name = f"policy {config.policy}" if config.policy else scorer.name
    with bounded(llama, scorer), listener, suppress(KeyboardInterrupt):
        say(f"http://{config.host}:{config.port}/v1: {config.cells} cells, {name}")
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
