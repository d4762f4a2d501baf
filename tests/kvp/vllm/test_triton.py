"""vLLM's Triton backend over contexts of uneven counts, in Triton's interpreter.

In an environment with vLLM (`make test-vllm`), in a process of its own: Triton reads its variables
when it is imported. It shows that a single head fits the backend, not how fast, and no graphs.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytest.importorskip("triton", reason="needs Triton, which comes with torch on Linux")
pytestmark = pytest.mark.vllm


def test_every_head_attends_to_its_own_rows():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path.cwd())}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


def main():
    from triton.backends import backends

    driver = SimpleNamespace(is_active=lambda: True)  # vLLM for CPUs looks for one
    backends["cpu"] = SimpleNamespace(driver=driver)
    import torch
    from test_backend import GROUP, HEADS, SCALE, STEPS, WIDTH, check_step
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvp.vllm.backend import extend_backend

    model = SimpleNamespace(
        get_num_attention_heads=lambda _: GROUP * HEADS, get_num_kv_heads=lambda _: HEADS,
        get_head_size=lambda: WIDTH, rswa_window=None,
    )  # fmt: skip
    graphs = SimpleNamespace(cudagraph_mode=None, static_forward_context={})
    config = SimpleNamespace(model_config=model, parallel_config=None, compilation_config=graphs)
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.float32
    )
    backend = extend_backend(TritonAttentionBackend)
    builder = backend.get_builder_cls()(spec, [], config, torch.device("cpu"))
    impl = backend.get_impl_cls()(GROUP * HEADS, WIDTH, SCALE, HEADS, None, None, "auto")
    one = torch.ones(1)
    layer = SimpleNamespace(_k_scale=one, _v_scale=one, _q_scale=one)
    for name in ("decoding", "mixed"):
        check_step(STEPS[name], builder, impl, layer)


if __name__ == "__main__":
    main()
