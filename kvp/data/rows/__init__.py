"""Prompts from a user's files, folders and hub data sets, row by row.

`files` reads rows and counts those that are not used, `forms` recognises their form, `documents`
joins message trees, `samples` makes prompts; `benchmarks` is for rows of published benchmarks. A
row that cannot be used is skipped and counted with its location.
"""
