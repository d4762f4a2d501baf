"""Files and folders that programs write: whole or not at all, and one writer at a time.

`files` writes one file, `tensors` a safetensors file, `jsonl` a growing file of records; `locks`
and `claim` decide whose folder it is. What the files mean is specified in `docs/formats.md`.
"""
