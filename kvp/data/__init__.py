"""Where prompts come from: RULER, generated prose and dialogues, files and hub data sets.

`sources.open_source` is the way in, `encode.encode` the way out; nothing here knows a model.
"""
