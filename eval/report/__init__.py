"""kvp-report: from a results folder to one HTML page and PNG figures, from its files alone.

`load` reads and checks the files; `numbers`, `choice`, `costs`, `ranks` and `timings` compute every
number once; `figures` and `tables` put them into descriptions (`figure`, `markup`), which
`draw_html` (plotly), `draw_png` (matplotlib) and `page` only write. No number is computed twice and
none is invented: the page says what a folder lacks.
"""
