"""Rules that split a budget over layers and KV heads: one file per rule (`kvp.names`)."""
