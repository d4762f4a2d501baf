"""Prompts from a user's files, folders and hub data sets, row by row.

`files` reads rows, `forms` recognises their form, `trees` joins messages, `documents` is the
entry point. A row that cannot be used is skipped and counted with its location.
"""
