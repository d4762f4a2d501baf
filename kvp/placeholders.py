"""Placeholders: token ids that stand in a prompt for a compressed context.

They spell the digest of the context's file and a checksum (`placeholder_ids`). They name one
context, an engine's own prefix cache keeps contexts apart by them, and ordinary text has none.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import count, islice, takewhile
from operator import eq

from kvp.errors import ContextError

DIGEST_BITS = 128
_CHECKED = 8
"""Placeholders that must fit the checksum before a prompt is taken for one of a context."""


def placeholder_ids(digest: str, count: int, vocabulary: int) -> list[int]:
    """`count` token ids that name a context: its digest first, then a checksum of it.

    They lie in the middle half of the vocabulary, where no family has special tokens. Raises
    ContextError for so few that nobody could tell them from ordinary text.
    """
    bits, base, span, head = _alphabet(vocabulary)
    number = int(digest[: DIGEST_BITS // 4], 16)
    if count < head + _CHECKED:
        raise ContextError(f"{count} tokens cannot name a context: keep {head + _CHECKED} or more")
    ids = [base + (number >> (bits * place)) % (1 << bits) for place in range(head)]
    return [*ids, *islice(_checks(digest, base, span), count - head)]


def read_placeholders(ids: Sequence[int], vocabulary: int) -> tuple[str, int] | None:
    """The context that a prompt begins with: start of its digest (hex), and its placeholders.

    None where the prompt begins with none. What follows the placeholders may continue the checksum
    by chance, so a context's own `kept` decides where they end.
    """
    bits, base, span, head = _alphabet(vocabulary)
    digits = [token - base for token in ids[:head]]
    if len(ids) < head + _CHECKED or not all(0 <= digit < 1 << bits for digit in digits):
        return None
    number = sum(digit << (bits * place) for place, digit in enumerate(digits))
    if number >> DIGEST_BITS:
        return None
    digest = f"{number:0{DIGEST_BITS // 4}x}"
    checks = map(eq, ids[head:], _checks(digest, base, span))
    found = head + len([*takewhile(bool, checks)])
    return (digest, found) if found >= head + _CHECKED else None


def _alphabet(vocabulary: int) -> tuple[int, int, int, int]:
    """Bits of the digest per id, the first id, how many there are, how many spell a digest."""
    span = vocabulary // 2
    bits = span.bit_length() - 1
    return bits, vocabulary // 4, span, -(-DIGEST_BITS // bits)


def _checks(digest: str, base: int, span: int) -> Iterator[int]:
    """Ids that follow those of the digest, without end."""
    for block in count():
        drawn = hashlib.sha256(f"{digest[: DIGEST_BITS // 4]}/{block}".encode()).digest()
        yield from (
            base + int.from_bytes(drawn[at : at + 4], "big") % span for at in range(0, 32, 4)
        )
