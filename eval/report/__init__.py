"""kvp report: from a results folder to one HTML page and PNG figures, from its files alone.

`eval.results` reads and checks the files and, with `costs`, computes every number once; `tables`
and `figures` (matplotlib) show them; `answers` picks prompts to read; `page` puts all into
views, which the template `web/page.html` writes. The page says what a folder lacks.
"""
