"""Compressed contexts in a stock vLLM: a KV connector, and attention over uneven counts.

The connector is named to vLLM as module `kvp.vllm.connector`, class `KvpConnector`.
"""
