"""kvp store: look at trace stores, check them, convert them; one module per subcommand."""
