"""Programs: their table, settings, command line, exit codes and Ray workers."""
