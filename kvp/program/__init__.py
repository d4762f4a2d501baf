"""Programs: their table, settings, command line, names, progress and costs."""
