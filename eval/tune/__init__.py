"""kvp tune: choose the setting of every method on validation prompts, with one effort for all."""
