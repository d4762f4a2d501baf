"""Prompts from a user's files, folders and hub data sets, row by row.

`files` reads rows, `tally` says which are used, `forms` and `ruler_rows` recognise their form,
`trees` joins messages, `documents` is the entry point; `question_sets` reads SQuAD and HotpotQA. A
row that cannot be used is skipped and counted with its location.
"""
