"""Placeholders name their context, and ordinary prompts name none."""

from hypothesis import given
from hypothesis import strategies as st

from kvp.placeholders import placeholder_ids, read_placeholders

DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)


@given(DIGESTS, st.integers(64, 400), st.integers(200, 300_000), st.lists(st.integers(0, 199)))
def test_placeholders_spell_their_digest(digest, count, vocabulary, question):
    ids = placeholder_ids(digest, count, vocabulary)
    assert len(ids) == count
    assert vocabulary // 4 <= min(ids) <= max(ids) < vocabulary - vocabulary // 4
    found = read_placeholders([*ids, *question], vocabulary)
    assert found[0] == digest[:32]
    assert count <= found[1] <= count + len(question)


@given(st.lists(st.integers(0, 999), max_size=80))
def test_ordinary_prompts_name_no_context(ids):
    assert read_placeholders(ids, 1000) is None


def test_placeholders_end_where_one_is_changed():
    ids = placeholder_ids("5" * 64, 64, 1000)
    assert read_placeholders([*ids[:40], ids[40] ^ 1, *ids[41:]], 1000) == ("5" * 32, 40)
    assert read_placeholders([ids[0] ^ 1, *ids[1:]], 1000) is None
