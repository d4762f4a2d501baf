"""Generated text: prose and dialogues, and the keys, numbers and names of generated tasks."""
