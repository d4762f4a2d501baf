"""Output files and folders: atomic writes, one writer at a time.

`files` writes one file, `tensors` a safetensors file, `jsonl` a growing file of records; `locks`
and `claim` give a folder to one writer. What the files mean is specified in `docs/formats.md`.
"""
