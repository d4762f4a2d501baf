"""The repository itself: what the wheel holds, what the top level shows, what the contracts say."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from kvp.program.command_line import flags_of
from kvp.program.programs import PROGRAMS, SCRIPTS, load

CONFIGS = [load(program.config) for program in PROGRAMS.values() if program.config is not None]
ROOT = Path(__file__).parent.parent
PACKAGES = {"kvp", "trace_collect", "train", "policies", "eval"}
DOTTED = re.compile(rf"({'|'.join(PACKAGES)})(\.\w+)+")
DOCS = sorted((ROOT / "docs").glob("*.md"))
TOP_LEVEL = PACKAGES | {
    "pyproject.toml", "configs", "tests", "README.md", "docs", "recipes", "Makefile",
    "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", ".ci", ".gitignore", "benchmarks",
}  # fmt: skip


def _tracked():
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    return listing.stdout.splitlines()


def test_top_level_holds_only_what_people_expect():
    assert {name.split("/")[0] for name in _tracked()} <= TOP_LEVEL


def test_no_file_holds_what_only_a_developer_machine_has():
    forbidden = ["/" + "work/", "/" + "root/", ".." + "/shared", "/" + "opt/", "<" * 7, ">" * 7]
    for name in _tracked():
        path = ROOT / name
        if path.suffix in {".safetensors", ".png"} or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        assert not [word for word in forbidden if word in text], name


def test_wheel_holds_exactly_the_five_packages_and_what_they_read(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        wheel_names = archive.namelist()
    top = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)
    bundled = [*(ROOT / "kvp/nano").rglob("*.*"), *(ROOT / "policies/bundled").rglob("*.*")]
    parts = [path for path in bundled if path.is_file() and path.suffix != ".pyc"]
    assert len(parts) > 22 + 6 + 4 * (2 + 48)  # the model, its policy, those of other models
    assert {str(path.relative_to(ROOT)) for path in parts} <= set(wheel_names)
    web = {f"eval/report/web/page.{kind}" for kind in ("html", "css", "js")}
    typed = {f"{package}/py.typed" for package in PACKAGES}
    assert {*web, *typed, "eval/card.jinja", "kvp/program/help.toml"} <= set(wheel_names)


def test_bundled_model_stays_within_twelve_megabytes():
    size = sum(path.stat().st_size for path in (ROOT / "kvp" / "nano").iterdir() if path.is_file())
    assert 0 < size <= 12 * 1024 * 1024
    policy = (ROOT / "kvp" / "nano" / "policy").iterdir()
    assert 0 < sum(path.stat().st_size for path in policy) <= 2.5 * 1024 * 1024


def test_the_console_scripts_are_those_that_people_know():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"kvp", *(f"kvp-{name}" for name in SCRIPTS)}


def test_a_contract_keeps_every_module_of_kvp_from_its_programs():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = [
        item for item in settings["contracts"] if item.get("forbidden_modules") == ["kvp.program"]
    ]
    paths = [*ROOT.glob("kvp/*.py"), *(path.parent for path in ROOT.glob("kvp/*/__init__.py"))]
    modules = {f"kvp.{path.stem}" for path in paths} - {"kvp.__init__"}
    assert modules == {*contract["source_modules"], "kvp.__main__", "kvp.program"}


def test_a_flag_means_one_thing_in_every_program():
    meanings = {}
    for config in CONFIGS:
        for flag in flags_of(config).values():
            sentence = re.split(r"[.:] |\.$| \(default", flag.help)[0]
            meaning = (flag.kind, sentence, config)
            first = meanings.setdefault(flag.name, meaning)
            assert meaning[:2] == first[:2], f"--{flag.name}: {meaning} and {first}"


def _missing(name):
    """Whether a path of the repository, or a dotted name of its packages, does not exist."""
    if "/" in name:
        known = name.split("/")[0] in TOP_LEVEL - {".ci", ".gitignore"} and "<" not in name
        return known and not any(ROOT.glob(name.rstrip("/")))
    parts = name.split(".")
    folder = ROOT
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    module = folder / f"{parts[0]}.py" if parts else folder
    if parts and module.is_file():
        parts.pop(0)
    else:
        module = folder / "__init__.py"
    text = module.read_text(encoding="utf-8") if module.is_file() else ""
    return not all(re.search(rf"\b{part}\b", text) for part in parts)


@pytest.mark.parametrize(
    "page", ["CONTRIBUTING.md", "README.md", *(f"docs/{path.name}" for path in DOCS)]
)
def test_a_page_names_files_and_modules_that_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = {match.split("(")[0] for match in re.findall(r"`([^`\n ]+)`", text)}
    files = {name for name in named if re.fullmatch(r"[\w.*-]+(/[\w.*<>-]*)+", name)}
    files -= {"kvp/LABEL", "kvp/seed0"}  # methods in results
    assert not sorted(filter(_missing, files | set(filter(DOTTED.fullmatch, named))))


def test_the_product_names_modules_that_exist():
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    named = {name for path in paths for name in re.findall(r"`([\w.]+)", path.read_text("utf-8"))}
    assert not sorted(filter(_missing, filter(DOTTED.fullmatch, named)))


def test_nobody_is_told_to_install_kvp_from_an_index():
    """It is on none (README): a clone is installed."""
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    for path in (
        ROOT / told for told in _tracked() if told.endswith((".md", ".py", ".ipynb", ".sh"))
    ):
        text = path.read_text(encoding="utf-8")
        assert not re.findall(rf"pip install.*\b{name}\b|\b{name}\[.*", text), path


def test_every_mutation_can_be_made_and_run(tmp_path):
    """Its text occurs once in its file, and the changed file is Python whose names are defined."""
    table = tomllib.loads((ROOT / "benchmarks" / "mutations.toml").read_text(encoding="utf-8"))
    for number, mutation in enumerate(table["mutation"]):
        text = (ROOT / mutation["file"]).read_text(encoding="utf-8")
        assert text.count(mutation["before"]) == 1, mutation["name"]
        assert all((ROOT / path).exists() for path in mutation["tests"].split()), mutation["name"]
        changed = text.replace(mutation["before"], mutation["after"])
        assert changed != text, mutation["name"]
        (tmp_path / f"mutation_{number}.py").write_text(changed, encoding="utf-8")
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache"]
    ended = subprocess.run(
        [*ruff, "--select", "F821,F822,F823", tmp_path], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout
