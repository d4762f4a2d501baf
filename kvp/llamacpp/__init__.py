"""Learned eviction in llama.cpp, through llama-cpp-python (extra `llama-cpp`).

    from kvp.llamacpp.eviction import bounded, shrink

The two need the extra; reading and writing states (`kvp.llamacpp.state`) needs `gguf` alone.
"""
