"""kvp store: look at trace stores, check them, and make new ones of those that are there.

One module per subcommand; `source_stores` opens stores to copy from, `copying` writes the new one.
"""
