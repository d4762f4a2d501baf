"""The report as its reader meets it: one page without requests, tables with the right numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from eval.report import page as page_module
from eval.report.page import LIBRARIES
from kvp.artifacts.jsonl import JsonLines
from kvp.programs import evaluate
from kvp.programs import report as main

Write = Callable[..., Path]
WEB = Path(page_module.__file__).parent / "web"
PROTOCOLS = ("query_aware", "query_agnostic")
BEST = "highlighted"
"""What the captions of headline tables have."""


class Page(HTMLParser):
    """Tags with their attributes, tables with their captions, and the rest as text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[tuple[str, list[list[str]]]] = []
        self.captions: list[str] = []
        self.text = ""
        self._into: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append(("", []))
        elif tag == "tr":
            self.tables[-1][1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][1][-1].append("")
        elif tag == "figcaption":
            self.captions.append("")
        elif tag == "small":
            self.handle_data("|")
        if tag in ("th", "td", "caption", "figcaption", "script", "style"):
            self._into = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self._into:
            self._into = None

    def handle_data(self, data: str) -> None:
        if self._into in ("script", "style"):
            return
        self.text += data
        if self._into == "caption":
            caption, rows = self.tables[-1]
            self.tables[-1] = (caption + data, rows)
        elif self._into == "figcaption":
            self.captions[-1] += data
        elif self._into in ("th", "td"):
            self.tables[-1][1][-1][-1] += data

    def table(self, *words: str) -> dict[str, list[str]]:
        """Rows by first cell of the only table whose caption has all `words`."""
        (rows,) = (rows for caption, rows in self.tables if all(word in caption for word in words))
        return {row[0].partition("|")[0]: row[1:] for row in rows}


def _without_libraries(html: str) -> str:
    """The page without what others wrote, which must be in it once."""
    for name in LIBRARIES:
        source = (WEB / name).read_text(encoding="utf-8").strip()
        assert html.count(source) == 1, name
        html = html.replace(source, "")
    return html


@pytest.fixture(scope="module")
def html(reported: Path) -> str:
    return (reported / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_the_page_loads_nothing(html: str, page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "source", "form")
        assert not {"src", "srcset", "data", "poster", "action", "background"} & set(attributes)
        assert (attributes.get("href") or "#").startswith("#")
    ours = _without_libraries(html)
    assert not re.search(r"url\(|@import|https?:|//cdn|fetch\(|XMLHttpRequest", ours)
    (policy,) = (
        attributes["content"]
        for tag, attributes in page.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_every_table_and_figure_is_of_one_protocol(page: Page) -> None:
    captions = [caption for caption, _ in page.tables] + page.captions
    assert len(captions) == len(page.tables) + len(page.captions) >= 15
    for caption in captions:
        assert sum(protocol in caption for protocol in PROTOCOLS) == 1, caption


def test_headline_numbers_are_the_hand_computed_ones(page: Page) -> None:
    table = page.table("Accuracy, %, mean", BEST, "query_aware,")
    assert table["method"] == ["25% (4)", "50% (8)"]
    means = {name: [cell.split("|")[0] for cell in cells] for name, cells in table.items()}
    assert means["full cache"] == ["100.0", "100.0"]
    assert means["oracle"] == ["75.0", "100.0"]
    assert means["kvp"] == ["75.0", "100.0"]
    assert means["knorm"] == ["25.0", "100.0"]
    assert means["random"] == ["0.0", "25.0"]
    assert means["kvp minus best attention-free"] == ["+50.0", "+0.0"]
    assert table["kvp minus best attention-free"][1].endswith("|knorm|both reach full")
    (caption,) = (
        caption for caption, _ in page.tables
        if caption.startswith("Accuracy, %, mean") and BEST in caption and "query_aware," in caption
    )  # fmt: skip
    assert "(95 % bootstrap interval over prompts and policy seeds)" in caption
    # two of the policies to knorm, and those of oracle, kvp, knorm and snapkv to random
    assert "* differs from 0 at 5 % after Holm's correction for the 10 differences" in caption
    assert table["kvp"][0].split("|")[2] == "+75.0 over random"
    assert table["knorm"][1].split("|")[2] == "+75.0 over random"
    assert "over" not in table["random"][0] + table["full cache"][0]
    other = page.table("Accuracy, %, mean", BEST, "query_agnostic,")
    assert [cell.split("|")[0] for cell in other["kvp"]] == ["0.0", "0.0"]


def test_no_mean_is_marked_that_other_intervals_reach(html: str, page: Page) -> None:
    assert 'class="best"' not in html  # four prompts resolve nothing
    explained = "highlighted: better than every other method of its column by intervals that do not"
    assert explained in next(caption for caption, _ in page.tables if BEST in caption)


def test_the_first_thing_is_a_sentence(html: str) -> None:
    first = html.partition('<div id="sentences"')[2].partition("</p>")[0]
    assert first.endswith(
        "At 50% of the cache (the question seen before compression) kvp answers 100% of what the "
        "full cache answers; the best method without training, knorm, 100%; the best null, random, "
        "25%."
    )


def test_full_tables_show_every_setting(page: Page) -> None:
    table = page.table("every setting", "Accuracy", "query_aware,")
    rows = {cells[0].partition("|")[0] for cells in ([name] for name in table)}
    assert rows == {"method", "full cache", "oracle", "kvp", "knorm", "random", "snapkv"}
    caption = next(caption for caption, _ in page.tables if "every setting" in caption)
    assert "n = 4 prompts (2 per task), split test, prompt seed 0" in caption
    (rows_,) = (
        rows
        for caption, rows in page.tables
        if "every setting" in caption and "Accuracy" in caption and "query_aware," in caption
    )
    knorm = [row for row in rows_ if row[0].startswith("knorm")]
    assert [row[0] for row in knorm] == ["knorm|protected", "knorm|unprotected"]
    assert [row[1].split("|")[0] for row in knorm] == ["25.0", "37.5"]


def test_perplexity_area_and_timing_tables(page: Page) -> None:
    losses = page.table("Perplexity", BEST, "no null was run")
    assert [cell.split("|")[0] for cell in losses["full cache"]] == ["2.72", "2.72"]
    assert [cell.split("|")[0] for cell in losses["knorm"]] == ["7.39", "4.48"]
    areas = page.table("Area under the cost curves")
    assert areas["kvp"][0] == "1.50|1.25 to 1.75"
    assert areas["knorm"] == ["2.50", "0.50"]
    costs = page.table("One request at a time", "median and its 95 % interval over 6 prompts")
    assert costs["knorm (protected)"] == [
        "8", "512", "0.500", "12.5|10.0 to 15.0", "1.0|1.0 to 1.0", "3.00|2.40 to 3.60",
        "0.750|0.750 to 0.750",
    ]  # fmt: skip


def test_header_says_how_it_was_made(page: Page) -> None:
    assert "kvp-eval --out 'two words'" in page.text
    assert "torch 2.9.0" in page.text
    assert "seed0, seed1" in page.text


def test_figures_are_written_and_show_something(reported: Path) -> None:
    names = {path.stem for path in (reported / "figures").glob("*.png")}
    assert names == {
        *(f"accuracy-{protocol}" for protocol in PROTOCOLS),
        *(f"accuracy-tasks-{protocol}" for protocol in PROTOCOLS),
        "perplexity-query_aware", "cost-query_aware", "tokens", "tokens-text",
    }  # fmt: skip
    for name in names:
        pixels = imread(reported / "figures" / f"{name}.png")
        assert pixels.shape[1] == 1800
        assert pixels.std() > 0.01


def test_tokens_can_be_chosen_and_are_escaped(html: str, page: Page) -> None:
    options = [attributes["value"] for tag, attributes in page.tags if tag == "option"]
    assert options == ["kvp/seed0", "oracle", "knorm"] * 2
    assert "&lt;b&gt;</span>" in html
    kept = [a for tag, a in page.tags if tag == "span" and " kept" in (a.get("class") or "")]
    assert len(kept) == 2 * (1 + 2)


def test_missing_parts_are_named_and_texts_are_escaped(
    tmp_path: Path, write_results: Write, make_record: Callable[..., dict[str, Any]]
) -> None:
    evil = '"><img src=x onerror=alert(1)>$x^2$</script>'
    records = [
        make_record(method, policy=policy, task=evil, budget_spec=budget, example=evil, score=1.0)
        for method, policy, budget in (("kvp", evil, "25%"), ("full", None, None))
    ]
    folder = write_results(tmp_path / "r", records=records, model=evil)
    out = tmp_path / "deep" / "page.html"
    assert main([str(folder), "--out", str(out), "--bootstrap", "5"]) == 0
    text = _without_libraries(out.read_text(encoding="utf-8"))
    assert "<img" not in text
    assert "</script>$" not in text
    page = Page(text)
    assert evil in page.text
    for sentence in (
        "No given replies in this folder: run kvp-eval --tasks chat or text.",
        "No traces measured in this folder: run kvp-eval --traces TRACES.",
        "No cost curves in this folder: run kvp-eval --traces TRACES.",
        "No token ranks in this folder: run kvp-eval --tokens true.",
        "No timing pass in this folder: run kvp-eval --timing_prompts 6.",
    ):
        assert sentence in page.text
    assert [path.name for path in (tmp_path / "deep" / "figures").iterdir()] == [
        "accuracy-query_aware.png"
    ]


def test_validation_chooses_the_setting(
    tmp_path: Path, write_results: Write, answers: list[dict[str, Any]]
) -> None:
    swapped = [
        {**record, "protected": not record["protected"]} if record["method"] == "knorm" else record
        for record in answers
    ]
    validation = write_results(tmp_path / "v", records=swapped, split="validation")
    records = [record for record in answers if record["protocol"] == "query_aware"]
    folder = write_results(tmp_path / "r", records=records)
    assert main([str(folder), "--validation_results", str(validation), "--bootstrap", "5"]) == 0
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    table = page.table("Accuracy, %, mean", BEST)
    assert [cell.split("|")[0] for cell in table["knorm"]] == ["37.5", "50.0"]
    assert "the setting of each method chosen on validation prompts" in page.text


def test_it_reads_what_kvp_eval_writes(tmp_path: Path, tiny_folder: Path) -> None:
    results = tmp_path / "results"
    arguments = {
        "model": tiny_folder, "methods": "full,knorm,oracle", "tasks": "niah_single_1,chat",
        "budgets": "25%", "protocols": "query_agnostic", "prompts": 1, "length": 260,
        "timing_prompts": 1, "max_new_tokens": 2, "bootstrap": 5, "out": results,
    }  # fmt: skip
    assert evaluate([part for k, v in arguments.items() for part in (f"--{k}", str(v))]) == 0
    assert main([str(results), "--bootstrap", "5"]) == 0
    page = Page((results / "report.html").read_text(encoding="utf-8"))
    assert "niah_single_1" in page.text
    assert page.table("One request at a time")["full cache"][0] == "all"
    missing = [text for text in page.text.splitlines() if "in this folder" in text]
    assert missing == [
        "No cost curves in this folder: run kvp-eval --traces TRACES.",
        "No traces measured in this folder: run kvp-eval --traces TRACES.",
    ]
    nbytes = page.table("Bytes of keys and values right after the eviction")
    assert nbytes["knorm"][0].endswith("0.250 of full")


def test_self_sized_methods_bytes_and_attention_recall_are_shown(
    tmp_path: Path, write_results: Write, make_record: Callable[..., Any]
) -> None:
    records = [
        make_record("full", protected=False, budget_spec=None, score=1.0, cache_bytes=1600),
        make_record("knorm", score=0.5, cache_bytes=400),
        make_record("knorm", score=1.0, allocator="ada", cache_bytes=408),
        make_record(
            "gvote", score=1.0, allocator="self_sized", budget_spec=None, budget=None,
            kept_tokens=6.5, cache_bytes=650,
        ) | {"budget_spec": "own"},
    ]  # fmt: skip
    kept = [
        {
            **{name: records[1][name] for name in ("model", "method", "variant", "policy",
                                                   "policy_seed", "protected", "protocol")},
            "allocator": allocator, "budget_spec": "25%", "kept": share, "low": share - 0.1,
            "high": share + 0.1, "kept_tokens": 4, "cached_tokens": 16, "sequences": 3,
        }
        for allocator, share in (("uniform", 0.5), ("ada", 0.625))
    ]  # fmt: skip
    folder = write_results(tmp_path / "r", records=records)
    JsonLines(folder / "kept.jsonl").rewrite(kept)
    assert main([str(folder), "--bootstrap", "5"]) == 0
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    table = page.table("Accuracy", "highlighted")
    assert table["method"] == ["25% (4)", "own size"]
    assert table["gvote+self_sized"][1].startswith("100.0|")
    assert table["gvote+self_sized"][1].endswith("at 40.6 % (6)")
    nbytes = page.table("Bytes of keys and values right after the eviction")
    assert nbytes["knorm"] == ["400|0.250 of full", "–"]  # its default: uniform budgets
    assert nbytes["gvote+self_sized"] == ["–", "650|0.406 of full"]
    every = page.table("Future attention kept", "every setting")
    assert every["knorm"] == ["62.5|52.5 to 72.5"]  # the later of two settings of that name
    assert (folder / "figures" / "kept-query_aware.png").exists()
