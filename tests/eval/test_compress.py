"""kvp compress: texts, messages and rows become context files, and what is refused in one line."""

import json
from pathlib import Path

import pytest

from kvp import compress, load_context, load_model, make_scorer
from kvp.contexts import read_context
from kvp.program.table import main

TEXT = "The grass is green. One of the special magic numbers for lazy-cat is: 4821973. " * 12


def test_texts_and_rows_become_contexts(tmp_path, jsonl, capsys):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(TEXT)
    (tmp_path / "texts" / "b.md").write_text(TEXT[:-300])
    (tmp_path / "texts" / "c.csv").write_text(TEXT)
    rows = [
        {"context": TEXT, "question": "Which?", "answer": "4821973"},
        {"context": TEXT, "question": "And?", "answer": "none"},
        {"messages": [{"role": "user", "content": TEXT}]},
        {"other": 1},
    ]
    documents = [str(tmp_path / "texts"), jsonl(tmp_path / "rows.jsonl", *rows)]
    out = tmp_path / "contexts"
    given = [*documents, "--policy", "nano", "--budget", "25%", "--out", str(out)]
    assert main(["compress", *given]) == 0
    printed = capsys.readouterr()
    told = [json.loads(line) for line in printed.out.splitlines()]
    names = [Path(each["document"]).name for each in told]
    assert names == ["a.txt", "b.md", "rows.jsonl line 1", "rows.jsonl line 3"]
    assert "skipped 1 of 4 rows" in printed.err
    assert printed.err.count("note: heads keep equal counts; with nano+global they share") == 1
    assert f"{tmp_path / 'texts'}: files that were not read (1): c.csv" in printed.err
    model, _ = load_model("nano")
    for each in told:
        context = read_context(Path(each["file"]))
        assert context.placeholders == each["placeholders"]
        assert load_context(context, model).get_seq_length() == each["kept"]
    assert {each["policy"] for each in told} == {"nano"}
    assert told[0]["file"] == told[2]["file"]  # the same context, the same name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["", "--out", "x", "--policy", "nano"], "error: DOCUMENTS is empty"),
        (["none.txt", "--out", "x", "--policy", "nano"], "error: DOCUMENTS none.txt: "),
        (["short.txt", "--out", "x", "--policy", "nano"], "short.txt: a context of"),
        (["a.txt", "--out", "x"], "give one of --policy and --method"),
        (["a.txt", "--out", "x", "--method", "nano"], "'nano' (this is a policy: give it to kvp c"),
        (["a.txt", "--out", "x", "--policy", "nano+foo"], "--policy: unknown allocator 'foo'"),
        (["a.txt", "--out", "x", "--policy", "nano", "--budget", "many"], "--budget: budget"),
        (["a.txt", "--out", "x", "--method", "keydiff+self_sized"], "does not say how many tokens"),
        (["a.txt", "--out", "x", "--policy", "smollm2-135m-instruct"],
         "was trained for HuggingFaceTB/SmolLM2-135M-Instruct, 30 layers x 3 KV heads (9 query"),
        (["rows.jsonl", "--out", "x", "--policy", "nano"], "none of its 1 rows"),
    ],
)  # fmt: skip
def test_what_cannot_be_compressed_is_one_line(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(TEXT)
    Path("short.txt").write_text("Hello.")
    Path("rows.jsonl").write_text('{"messages": [{"content": "x"}]}')
    assert main(["compress", *flags]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1, said
    assert message in said[0]
    assert not Path("x").exists()


@pytest.mark.filterwarnings("always:of the")
def test_suggestions_are_flags_and_methods_of_the_program(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(TEXT)
    given = ["compress", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--method"]
    assert main([*given, "knor"]) == 2
    assert "did you mean knorm?" in capsys.readouterr().err
    assert main([*given, "knorm", "--budget", "25"]) == 0
    said = capsys.readouterr().err
    assert "note: --budget 25 is 25 tokens; for a share of the cache write 25%\n" in said
    assert "20 are the protected first and last ones: raise the budget\n" in said
    assert "protection=" not in said


def test_names_do_in_python_and_on_the_command_line(tmp_path, capsys):
    model, tokenizer = load_model("nano")
    by_name = compress(model, tokenizer, TEXT, "keydiff", 64)
    assert by_name.digest == compress(model, tokenizer, TEXT, make_scorer("keydiff"), 64).digest
    shared = compress(model, tokenizer, TEXT, "nano", 64, allocator="global")
    assert shared.facts.counts is not None
    (tmp_path / "a.txt").write_text(TEXT)
    given = [str(tmp_path / "a.txt"), "--policy", "nano+global", "--budget", "64"]
    assert main(["compress", *given, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert Path(json.loads(printed.out)["file"]).stem == shared.name
    assert "equal counts" not in printed.err
