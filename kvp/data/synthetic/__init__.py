"""Generated text: RULER tasks, prose and dialogues."""
