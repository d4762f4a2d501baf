"""kvp-report: from results folders to one HTML page and PNG figures, from their files alone.

`eval.results` reads and checks the files; `aggregates`, `comparison`, `costs`, `failures` and
`tokens` compute every number once; `tables` and `figures` (matplotlib) show them; `page` puts them
into sections, which the template `web/page.html` writes. The page says what a folder lacks.
"""
