"""JSON lines: checksums find every flipped bit, torn last lines are no damage."""

import json

import pytest

from kvp.artifacts.files import CHECKSUM, JsonLines
from kvp.errors import ResultsError

RECORDS = [{"name": "é\n", "score": 0.1, "inner": {"2": [1, None]}}, {"name": "b", "score": 1}]


@pytest.fixture
def lines(tmp_path):
    file = JsonLines(tmp_path / "rows.jsonl")
    file.append(RECORDS[:1])
    file.append(RECORDS[1:])
    return file


def test_records_come_back_without_their_checksums(lines):
    assert list(lines) == RECORDS
    assert [number for number, _ in lines.numbered()] == [1, 2]
    assert all(CHECKSUM in json.loads(line) for line in lines.path.read_text().splitlines())


def test_no_flipped_bit_is_read_as_other_data(lines):
    whole = lines.path.read_bytes()
    messages = set[str]()
    for position in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << bit
            lines.path.write_bytes(bytes(flipped))
            try:
                records = list(lines)
            except ResultsError as error:
                messages.add(str(error))
            else:
                assert records == RECORDS[:1]  # the last line lost its end: torn
                assert position == len(whole) - 1
    assert messages
    assert all(f"{lines.path} line " in message for message in messages)


@pytest.mark.parametrize("removed", [1, 5, 40])
def test_a_torn_last_line_is_left_out_and_cut_off_by_the_writer(lines, removed):
    whole = lines.path.read_bytes()
    lines.path.write_bytes(whole[:-removed])
    assert list(lines) == RECORDS[:1]
    lines.cut_torn_line()
    lines.append(RECORDS[1:])
    assert lines.path.read_bytes() == whole


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3 is damaged"),
        ("", "line 3 is damaged"),
        ("[1]", "line 3 is damaged .*it is no JSON object"),
        ('{"a": 1, "checksum": "00"}', "line 3 is damaged .*its checksum does not match"),
        ('{"a": 1}', "line 3 is damaged .*no checksum in it"),
    ],
)
def test_damage_names_file_and_line(lines, line, message):
    with lines.path.open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(ResultsError, match=rf"rows\.jsonl {message}"):
        list(lines)


def test_all_records_can_be_replaced(lines):
    lines.rewrite(RECORDS[::-1])
    assert list(lines) == RECORDS[::-1]
    assert [path.name for path in lines.path.parent.iterdir()] == ["rows.jsonl"]
    lines.path.unlink()
    with pytest.raises(ResultsError, match=r"rows\.jsonl does not exist"):
        list(lines)
