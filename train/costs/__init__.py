"""What a policy costs before anything runs: bytes, memory and hours of every way to train one.

Bytes and memory are counted (`plan`, `memory`). Seconds of single parts are measured on a small
store of random tokens (`sample`, `measured`) or assumed for a named device (`assumed`); `ways` adds
them up, and `table` prints. The dry run of a training on a store measures that store's own job.
"""
