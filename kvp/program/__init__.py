"""Programs: their table, settings, command line, names and progress."""
