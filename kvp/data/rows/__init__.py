"""Prompts from outside: files, folders and hub data sets, row by row.

`files` reads rows, `forms` says what a row means, `trees` puts messages together, `documents` is
the way in. A row that cannot be used is skipped and counted with its location;
nothing else is lost.
"""
