"""What surrounds the steps of one run: checks, folder, Lightning's Trainer, printed tables."""
