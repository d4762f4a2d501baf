"""Instructions before a long document: rows for `--tasks data`.

    python -m recipes.real_models.instructions OUT D/squad_test.json

An instruction for every answer stands before passages of SQuAD, of which one is asked about. The
score is whether the answer holds the words that the instruction asks for. Takes a second.
"""

import argparse
import json
import random
from pathlib import Path

from recipes.real_models.documents import write_rows

DOCUMENTS, PASSAGES = 3, 9
INSTRUCTIONS = {
    "Begin every answer with the word Understood.": "Understood",
    "End every answer with the words Stay safe.": "Stay safe",
    "Call the reader Captain in every answer.": "Captain",
    "Sign every answer with the name Marlow.": "Marlow",
    "Write the word NOTICE before every answer.": "NOTICE",
    "Mention in every answer that the office closes at 17:30.": "17:30",
    'Write every answer as JSON with the key "result".': '"result"',
    "Name archive 42 as the source of every answer.": "archive 42",
    "Begin every answer with the words Thank you.": "Thank you",
    "End every answer with the code ZX-81.": "ZX-81",
}


def main(out: Path, squad: Path) -> None:
    """Write the rows, three documents for each instruction."""
    draw = random.Random(11)
    passages = json.loads(squad.read_text(encoding="utf-8"))
    rows = []
    for instruction, words in INSTRUCTIONS.items():
        for _ in range(DOCUMENTS):
            drawn = draw.sample(passages, PASSAGES)
            text = "\n\n".join(dict.fromkeys(row["context"].strip() for row in drawn))
            row = {
                "task": "instructions",
                "context": f"Rule for all your answers: {instruction}\n\nDocument:\n\n{text}\n\n",
                "question": drawn[0]["question"],
                "answer": words,
                "metric": "all",
                "max_new_tokens": 60,
            }
            rows.append(row)
    write_rows(out, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="rows, JSONL")
    parser.add_argument("squad", type=Path, help="passages of texts.py")
    main(**vars(parser.parse_args()))
