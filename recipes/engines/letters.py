"""A hundred rows as users may have them: letters, and questions about what three firms still owe.

    python recipes/engines/letters.py rows.jsonl

takes a second. docs/your_model.md trains on some of the rows and asks about others.
"""

import argparse
import json
import random
from pathlib import Path

from kvp.data.synthetic.text import prose

NAMES = ["Harbour", "Castle", "Willow", "Station", "Market", "Orchard", "Bridge", "Chapel"]
KINDS = ["Bakery", "Books", "Garage", "Florist", "Laundry", "Pharmacy", "Optician", "Brewery"]


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="the file that is written, such as rows.jsonl")
    given = parser.parse_args()
    draw, rows = random.Random(0), []
    firms = [f"{name} {kind}" for name in NAMES for kind in KINDS]
    for _ in range(100):
        parts, questions = [], []
        for firm in draw.sample(firms, 3):
            euros = str(draw.randrange(1000, 10000))
            parts.append(prose(draw.randrange(10**6), words=150, split="test"))
            parts.append(f"The sum that {firm} still owes us is {euros} euros.")
            asked = {"question": f"Which sum does {firm} still owe us?", "answer": euros}
            questions.append({**asked, "answer_prefix": f" The sum that {firm} still owes us is"})
        letter = " ".join([*parts, prose(draw.randrange(10**6), words=150, split="test")])
        rows.append({"context": f"{letter}\n\n", "questions": questions, "max_new_tokens": 12})
    given.out.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
