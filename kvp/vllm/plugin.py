"""What vLLM loads of kvp in each of its processes, as a plug-in, before it makes a model.

The attention backends that can hold contexts of uneven counts take the places of vLLM's own of the
same names. Where a process has no `KvpConnector` with such contexts, these are used unchanged.
"""

BACKENDS = ("CPU_ATTN", "TRITON_ATTN", "FLASH_ATTN")
"""vLLM's names of those that kvp extends; only the first was run in an engine."""
LAYOUT = "BLHNC"
"""vLLM's name of the order of a cache in which a block holds all layers and heads of its tokens."""


def register() -> None:
    """Set the backends; a vLLM that has no such registry, or lacks one of them, stays as it is."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:
        return
    for name in BACKENDS:
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], f"kvp.vllm.backend.{name}")
