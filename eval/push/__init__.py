"""kvp push: upload a policy to the hub, with a card made of its own numbers."""
