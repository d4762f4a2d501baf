"""JSON lines: checksums find every flipped bit, torn last lines are no damage."""

import json

import pytest

from kvp.artifacts.files import CHECKSUM, JsonLines

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


@pytest.mark.parametrize("removed", [1, 5, 40])
def test_a_torn_last_line_is_left_out_and_cut_off_by_the_writer(lines, removed):
    whole = lines.path.read_bytes()
    lines.path.write_bytes(whole[:-removed])
    assert list(lines) == RECORDS[:1]
    lines.cut_torn_line()
    lines.append(RECORDS[1:])
    assert lines.path.read_bytes() == whole
