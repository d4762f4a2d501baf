"""The report of the program as a page: its text, and what a browser shows of it.

The browser is Debian's chromium, headless, one for all tests of this module.
"""

import csv
import io
import random
import re
import shutil

import pytest
from matplotlib.image import imread
from toy_results import PROTOCOLS, answer_records, result_record, timing_records, write_results

from kvp.program.table import report as main

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def html(reported):
    return (reported / "report.html").read_text(encoding="utf-8")


def _report(folder, *flags):
    assert main([str(folder), *flags]) == 0
    return (folder / "report.html").read_text(encoding="utf-8")


def test_the_page_has_every_part_and_loads_nothing(html):
    for ident in (
        "answers-query_aware", "answers-query_agnostic", "perplexity-query_aware",
        "answers-query_aware-tasks", "answers-query_aware-differences",
        "answers", "reading", "about",
    ):  # fmt: skip
        assert f'<details id="{ident}"' in html
    first, other = re.findall(r'<p class="summary" data-budget="50%">(.*?)</p>', html)[:2]
    assert 'class="summary" data-budget="25%" hidden>At 25% of the cache, with the question' in html
    assert "with the question not seen before" in other
    assert first.startswith(
        "At 50% of the cache, with the question seen before compression, kvp +p answers 100% (95 % "
        "interval "
    )
    assert html.count("were picked on these prompts") == html.count("paired by prompt. The best")
    sources = re.findall(r'[ :](?:src|href|srcset|data|action)="([^#"][^"]{0,12})', html)
    assert sources == []
    loaded = re.sub(r' xmlns(:xlink)?="[^"]*"', "", html)
    assert not re.search(r"url\([^#]|@import|https?:|fetch\(|XMLHttpRequest|<link|<iframe", loaded)
    figures = ("Accuracy against", "Perplexity of the given text against")
    captions = re.findall(r"<(?:fig)?caption>(?:<span>)?(.*?)</", html)
    others = ("How this was made", "Answers", *figures)
    captions = [each for each in captions if not each.startswith(others)]
    assert captions
    for caption in captions:
        assert len(re.findall(r"question (?:is )?(?:not )?seen", caption)) == 1, caption
    assert html.count("half a prompt more at 0") == 1  # "How to read this"
    drawn = re.findall(r"<figcaption>(.*?)</", html)
    fixed = [caption for caption in drawn if "best at" in caption]  # whatever budget is chosen
    assert fixed
    assert all("at every budget" in caption for caption in fixed)
    assert "kvp eval <span>--out</span> &#39;two words&#39;" in html
    assert "torch 2.9.0" in html


def test_figures_are_written_and_show_something(reported):
    pixels = {path.stem: imread(path) for path in (reported / "figures").glob("*.png")}
    assert pixels.keys() == {"perplexity-query_aware", *(f"answers-{one}" for one in PROTOCOLS)}
    for drawn in pixels.values():
        assert drawn.shape[1] == 1260
        assert drawn.std() > 0.01


def test_a_folder_that_a_run_of_other_tasks_extended_has_a_report(tmp_path):
    runs = (("A", 0.5, ("full", "knorm", "keydiff")), ("B", 0.5, ("oracle", "snapkv")),
            ("chat", None, ("oracle", "snapkv")))  # fmt: skip
    records = [
        result_record(
            method, task=task, example=example, protected=method != "full", score=score,
            budget_spec=None if method == "full" else "25%",
            nll=9.0 if task == "chat" else None, reply_tokens=10 if task == "chat" else None,
        )
        for task, score, methods in runs for method in methods for example in ("e1", "e2")
    ]  # fmt: skip
    page = _report(write_results(tmp_path / "r", records=records))
    for method in ("knorm", "keydiff", "oracle", "snapkv"):
        assert re.search(rf"<t[hd][^>]*>{method}<", page), method


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("{tmp}/missing",), "is not a folder; give the results folder of kvp eval"),
        (("{tmp}/r", "--out", "{tmp}/notes.html"), "was not written by kvp report"),
        (("{tmp}/r", "--out", "{tmp}/notes.html/x/y.html"), "Not a directory"),
        (("{tmp}/r", "--png", "{tmp}/notes.html"), "File exists"),
    ],
)
def test_what_cannot_work_is_one_line_and_replaces_nothing(tmp_path, capsys, flags, message):
    write_results(tmp_path / "r")
    (tmp_path / "notes.html").write_text("<!DOCTYPE html>\n<html><title>KV-cache eviction")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    given = [flag.format(tmp=tmp_path) for flag in flags]
    assert main([*given]) == 2
    *progress, error = capsys.readouterr().err.splitlines()
    assert error.startswith("kvp report: error: ")
    assert message.format(tmp=tmp_path) in error
    assert all(line.startswith(("computing ", "drawing: ")) for line in progress)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (extra dev)")
    if CHROMIUM is None:
        pytest.skip("needs a browser: apt-get install chromium (.ci/run does)")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Open a report with all parts unfolded; nothing may be requested or go wrong."""
    contexts, wrong = [], []

    def said(message):
        if message.type in ("error", "warning"):
            wrong.append(message.text)

    def start(report, *, width=1400, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        files = []
        page.on("request", lambda request: files.append(request.url))
        page.on("console", said)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(report.as_uri())
        page.locator("a[download][href]").wait_for()
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert [url for url in files if not url.startswith("data:")] == [report.as_uri()]
        return page

    yield start
    for context in contexts:
        context.close()
    assert not wrong


def test_script_in_names_is_text(tmp_path, open_page):
    script = '</script></template><img src=x onerror="window.ran=1"><script>window.ran=1</script>'
    link = "<a href=\"javascript:window.ran=1\" onclick='window.ran=1'>$x_{\\frac$ {{ 7*7 }}</a>"
    text = {"task": script, "prediction": link, "question": script, "references": [link]}
    text["reply"] = None
    records = [
        result_record(method, **text, example=f"{script}{n}", protected=False, score=0.5,
                      policy=label, policy_seed=label and 0, variant=link, budget_spec=size)
        for method, label, size in (("full", None, None), (script, None, "9%"), ("kvp", link, "9%"))
        for n in range(2)
    ]  # fmt: skip
    folder = write_results(tmp_path / "r", records=records, model=script)
    _report(folder)
    page = open_page(folder / "report.html")
    assert page.evaluate("window.ran") is None
    assert page.locator("img, a[href^=javascript], [onerror], [onclick]").count() == 0
    assert page.locator("script").count() == 1
    assert all(each in page.locator("body").inner_text() for each in (script, link, f"{script}0"))


def test_all_numbers_are_downloaded_as_csv(reported, open_page):
    page = open_page(reported / "report.html")
    with page.expect_download() as download:
        page.get_by_text("All numbers as CSV").click()
    assert download.value.suggested_filename == "numbers.csv"
    rows = list(csv.DictReader(io.StringIO(download.value.path().read_text())))
    (kvp,) = (
        row for row in rows
        if (row["metric"], row["protocol"], row["task"], row["method"], row["budget"])
        == ("answers", "query_aware", "all", "kvp", "25%")
    )  # fmt: skip
    assert (kvp["estimate"], kvp["n"], kvp["policies"]) == ("0.75", "4", "2")
    assert {row["metric"] for row in rows} == {"answers", "perplexity"}


@pytest.mark.parametrize(("scheme", "width"), [("dark", 390), ("light", 1024)])
def test_nothing_that_axe_checks_is_violated(reported, open_page, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = open_page(reported / "report.html", color_scheme=scheme, width=width)
    found = axe.Axe().run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == []


def test_a_narrow_page_does_not_scroll_sideways_and_its_figures_are_readable(reported, open_page):
    page = open_page(reported / "report.html", width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    figures = page.locator("[role=img]").filter(visible=True).all()
    assert figures
    for figure in figures:
        assert 300 < figure.bounding_box()["width"] <= 390
        assert figure.locator("path").count() > 5
        sizes = figure.locator("text").evaluate_all(
            "all => all.map(one => parseFloat(getComputedStyle(one).fontSize)"
            " * Math.hypot(one.getScreenCTM().a, one.getScreenCTM().b))"
        )
        assert min(sizes) >= 10


def _shown(page):
    """Names of the comparisons that are visible."""
    found = page.locator("main > details.comparison").filter(visible=True).all()
    return [str(one.get_attribute("id")) for one in found]


def test_the_address_of_the_page_holds_the_view(reported, open_page):
    page = open_page(reported / "report.html")
    everything = [*(f"answers-{name}" for name in PROTOCOLS), "perplexity-query_aware"]
    assert _shown(page) == everything
    page.get_by_label("Protocol").select_option("query_aware")
    page.get_by_label("Budget").select_option("25%")
    page.get_by_role("checkbox", name="random").uncheck()
    address = page.url
    assert "protocol=query_aware" in address
    for again in (lambda: None, page.reload, lambda: page.goto(address)):
        again()
        assert page.url == address
        view, other = _shown(page)
        summary = page.locator(f"#{view} .summary").filter(visible=True)
        assert summary.inner_text().startswith("At 25% of the cache")
        rows = page.locator(f"#{view} tbody tr").filter(visible=True)
        assert "random" not in " ".join(rows.all_inner_texts())
        kvp = next(text for text in rows.all_inner_texts() if text.startswith("kvp"))
        assert kvp.split("\t")[1].startswith("75.0")
        assert page.locator(f"#{view} svg [data-method=random]").filter(visible=True).count() == 0
        assert page.locator(f"#{view} svg [data-method=kvp]").filter(visible=True).count() > 0
    page.get_by_label("Protocol").select_option("query_agnostic")
    assert _shown(page) == ["answers-query_agnostic"]
    page.go_back()
    assert page.url == address
    assert _shown(page) == [view, other]
    page.goto(f"{reported.as_uri()}/report.html#protocol=gone&method=gone&budget=7")
    assert _shown(page) == everything


def test_columns_can_be_sorted(reported, open_page):
    page = open_page(reported / "report.html")
    table = page.locator("#answers-query_aware > .scroll table")
    table.get_by_role("button", name="25%").press("Enter")
    cells = table.locator("tbody td:nth-child(2)").all_inner_texts()
    values = [float(cell.split()[0]) for cell in cells]
    assert values == sorted(values, reverse=True)
    assert table.locator("thead [aria-sort]").count() == 1


def test_savings_stand_below_the_sentence(tmp_path, open_page):
    records = [
        {**each, "cache_bytes": 1e6 if each["method"] == "full" else 250e3}
        for each in answer_records()
        if each["method"] in ("full", "knorm") and each["protected"] != (each["method"] == "full")
    ]
    timing = timing_records()
    timing[1]["by_prompt"]["decode_seconds_per_token"][0] *= 4
    folder = write_results(tmp_path / "r", records=records, timing=timing)
    _report(folder)
    saved = open_page(folder / "report.html").locator("#answers-query_aware .saved:visible")
    assert saved.inner_text() == (
        "knorm +p keeps 250.0 kB of 1.0 MB per prompt (25.0%). Compression takes 1 ms, the prefill "
        "12 ms. A decoded token takes 0.75 x its time with the full cache (median of 6 prompts, "
        "95 % interval 0.75 to 3.00)."
    )


def test_answers_can_be_read_prompt_by_prompt(reported, open_page):
    page = open_page(reported / "report.html")
    read = page.locator(".answers")
    read.get_by_text("1 of 10").wait_for()  # 4 prompts of 2 protocols, 2 dialogues
    page.get_by_label("Protocol").select_option("query_aware")
    page.get_by_label("Budget").select_option("25%")
    read.get_by_text("1 of 6").wait_for()
    prompts = read.locator("select.prompt")
    prompts.select_option(label="chat: e3, question seen")  # an example of another task, too
    read.get_by_text("6 of 6").wait_for()
    prompts.select_option(label="two: e3, question seen")
    rows = read.locator("tbody tr").all_inner_texts()
    assert [row.split("\t") for row in rows if row.strip().startswith(("kvp", "snapkv"))] == [
        ["kvp +p (seed0)", "25%", "right", "–", "kvp at 25%"],
        ["kvp +p (seed1)", "25%", "wrong", "–", "kvp at 25%"],
        ["snapkv +p", "25%", "right", "–", "snapkv at 25%"],
    ]


def test_the_keyboard_reaches_and_operates_everything(reported, open_page):
    page = open_page(reported / "report.html", width=1024)
    page.locator(".answers tbody tr").first.wait_for()
    reached = []
    for _ in range(500):
        page.keyboard.press("Tab")
        seen = page.evaluate(
            "(({outlineStyle: line}, one) => [one.name || one.className || '', line])"
            "(getComputedStyle(document.activeElement), document.activeElement)"
        )
        if seen[0] == "prompt" and "prompt" not in reached:
            page.keyboard.press("ArrowDown")
            page.locator(".answers").get_by_text("2 of 10").wait_for()
        assert seen[1] != "none" or seen[0] == "", seen
        reached.append(seen[0])
    wanted = "protocol budget method prompt previous next scroll"
    assert set(wanted.split()) <= set(reached)


@pytest.mark.slow
def test_a_large_report_is_below_two_megabytes(tmp_path):
    draw = random.Random(0)
    methods = ["full", *(f"kvpress:Press{number}" for number in range(19))]
    records = [
        result_record(
            method, protocol=protocol, task=f"task{task}", example=f"task{task}/test/0/{example}",
            protected=False, budget_spec=spec, score=float(draw.random() < 0.7),
            references=["1234567"], prediction="".join(draw.choices("abcde ", k=60)),
        )
        for protocol in PROTOCOLS
        for task in range(12)
        for example in range(8)
        for method in methods
        for spec in ((None,) if method == "full" else [f"{share}%" for share in range(5, 45, 5)])
    ]  # fmt: skip
    timing = [
        {**timing_records()[1], "method": method, "protected": False, "budget_spec": "25%"}
        for method in methods[1:]
    ]
    page = _report(write_results(tmp_path / "r", records=records, timing=timing))
    assert len(page.encode()) < 2e6
    assert "of up to 8 prompts per task" in page
    assert ". Not drawn: kvpress" in page
