"""Names, sizes and imports of the product's own code."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import kvp

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "docs/glossary.md"
PACKAGES = ("kvp", "policies", "trace_collect", "train", "eval")
PATHS = [path.relative_to(ROOT) for p in PACKAGES for path in (ROOT / p).rglob("*.py")]
MODULES = {
    ".".join(path.with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
    for path in PATHS
}
NODES = [(module, node) for module, tree in MODULES.items() for node in ast.walk(tree)]
FUNCTIONS = [(m, n) for m, n in NODES if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
LONE = re.compile(
    r"_*([a-z]+(ed|ing|ly)|made|held|kept|told|shown|found|said|left|lost|given|grown|drawn|known|"
    r"seen|done|taken|woven|written|about|above|alone|apart|around|aside|below|between|inside|now|"
    r"only|over|own|present|together|within|without)_*"
)
"""Participles and adverbs: they do not say what a function does, or to what."""
GOOD = {
    *("apply", "now"),  # a verb, and the time
    *("competing", "missing", "numbered", "over", "pooled"),  # of an object: progress.over(files)
    *("setting", "tracking", "wording"),  # nouns
    *("evicting", "recording", "_locked"),  # context managers of a class or of their own kind
    "_answered",  # the counterpart of a row's question
}


def _imports(tree):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else str(node.module) for name in names)
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from _imports(node)


def test_a_class_name_occurs_once():
    names = [node.name for _, node in NODES if isinstance(node, ast.ClassDef)]
    assert sorted(names) == sorted(set(names))


def test_a_noun_of_the_glossary_is_one_class():
    table = re.findall(r"^\| \w+ \| .* \| `(\w+)` \|$", GLOSSARY.read_text(), flags=re.M)
    names = [node.name for _, node in NODES if isinstance(node, ast.ClassDef)]
    assert len(table) == 10
    assert [name for name in table if names.count(name) != 1] == []


def test_no_function_has_more_than_sixty_lines():
    long = [(m, n.name) for m, n in FUNCTIONS if (n.end_lineno or 0) - n.lineno >= 60]
    assert long == []


def test_functions_are_named_by_what_they_do():
    names = [
        node.name for _, node in FUNCTIONS
        if not re.search("property|contextmanager", " ".join(map(ast.unparse, node.decorator_list)))
    ]  # fmt: skip
    assert [name for name in names if LONE.fullmatch(name) and name not in GOOD] == []


def test_imports_make_no_circle():
    TopologicalSorter({name: [*_imports(tree)] for name, tree in MODULES.items()}).prepare()


def test_kvp_names_no_module_of_policies():
    """No import by name goes around the contracts; `kvp` itself has the documented lazy names."""

    def goes_around(node):
        match node:
            case ast.Constant():
                return re.fullmatch(r"policies(\.\w+)+(:\w+)?", str(node.value))
            case ast.Call():
                return re.match(r"import_own\(['\"]policies", ast.unparse(node))
            case ast.ImportFrom(module="kvp"):
                return {alias.name for alias in node.names} & {*kvp.__all__}

    found = [(m, ast.unparse(n)) for m, n in NODES if m.startswith("kvp.") and goes_around(n)]
    assert found == [("kvp.vllm.settings", "from kvp import resolve_method")]
