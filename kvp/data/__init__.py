"""Where prompts come from: tasks, generated prose and dialogues, files and hub data sets.

`tasks` is the registry that collecting and evaluating share, `rows` reads files, `sources` is what
`--data` names, `encode` turns a sample into token ids. Nothing here depends on a model.
"""
