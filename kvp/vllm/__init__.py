"""Compressed contexts in a stock vLLM: a KV connector for the engine, and a client of its server.

    from kvp.vllm.client import Client

The connector is named to vLLM as module `kvp.vllm.connector`, class `KvpConnector`.
"""
