"""The layers hold: crate graph, module order inside core, where unsafe may stand, what Python imports.

    sys  <  core  <  cli  <  py  <  hicache_store  <  hicache_store.sglang | hicache_store.engine
             ranks  <  cli, py

Everything imports downwards only. Inside core the order is total: a module imports what stands left of it.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
CORE = ROOT / "rust" / "hicache-core" / "src"
PACKAGE = ROOT / "python" / "hicache_store"

# Which of our crates each product crate may depend on, in any way (normal, build or test).
CRATES = {
    "hicache-sys": set[str](),
    "hicache-ranks": set[str](),
    "hicache-core": {"hicache-sys"},
    "hicache-cli": {"hicache-core", "hicache-ranks", "hicache-sys"},
    "hicache-py": {"hicache-cli", "hicache-core", "hicache-ranks", "hicache-sys"},
}
# These use the product; nobody uses them.
USERS = {"hicache-tests", "hicache-benches"}

# Order of the modules of hicache-core. A new module is entered here, at the place where it belongs.
MODULE_ORDER = (
    "error",
    "dtype",
    "key",
    "tile",
    "canonical",
    "namespace",
    "pool",
    "layout",
    "host_pool",
    "plan",
    "format",
    "store",
    "inspect",
    "transfer",
)

# Outside these, the word unsafe stands nowhere.
UNSAFE_ALLOWED = (
    Path("rust/hicache-sys"),
    Path("rust/hicache-py/src/buffers.rs"),
    Path("rust/hicache-py/src/exports.rs"),
)
# Crate roots that forbid unsafe code outright.
FORBID_UNSAFE = (
    Path("rust/hicache-ranks/src/lib.rs"),
    Path("rust/hicache-core/src/lib.rs"),
    Path("rust/hicache-cli/src/lib.rs"),
    Path("rust/hicache-cli/src/main.rs"),
)

# Never imported by `import hicache_store` or by the tool, not even to see whether they are there.
HEAVY = ("numpy", "sglang", "torch")


# --- crates ---------------------------------------------------------------------------------------------


def cargo_metadata() -> dict[str, Any]:
    """What cargo says about the workspace, without looking at any registry."""
    command = ["cargo", "metadata", "--no-deps", "--offline", "--format-version", "1"]
    result = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    metadata: dict[str, Any] = json.loads(result.stdout)
    return metadata


def test_crate_graph_goes_down_only() -> None:
    packages = {package["name"]: package for package in cargo_metadata()["packages"]}
    ours = set(packages)
    assert ours == set(CRATES) | USERS, "a crate without a place in the table above"
    for name, package in packages.items():
        used = {dependency["name"] for dependency in package["dependencies"]} & ours
        allowed = CRATES[name] if name in CRATES else set(CRATES) - {"hicache-py"}
        assert used <= allowed, f"{name} may not depend on {sorted(used - allowed)}"


# --- Rust text ------------------------------------------------------------------------------------------

RUST_TOKEN = re.compile(
    r"""
      //[^\n]*                                 # line comment
    | /\*(?:[^*]|\*(?!/))*\*/                  # block comment
    | b?r(?P<fence>\#*)"(?:.|\n)*?"(?P=fence)  # raw string
    | b?"(?:\\(?:.|\n)|[^"\\])*"               # string
    | b?'(?:\\[^\n]+?|[^'\\\n])'               # character
    """,
    re.VERBOSE,
)


def rust_code(path: Path) -> str:
    """The text of a Rust file without comments and literals; line numbers stay."""
    return RUST_TOKEN.sub(lambda match: "\n" * match.group().count("\n") or " ", path.read_text("utf-8"))


def without_unit_tests(code: str) -> str:
    """Drops inline `#[cfg(test)] mod`: rustfmt puts the closing brace of a module in the first column."""
    return re.sub(r"^#\[cfg\(test\)\]\nmod \w+ \{\n(?:.*\n)*?\}$", "", code, flags=re.MULTILINE)


def rust_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.rs")):
            if "target" not in path.relative_to(ROOT).parts:
                yield path


def split_group(group: str) -> Iterator[str]:
    """The items of `a::b, c::{d, e}` at the outermost level."""
    depth, item = 0, ""
    for char in group:
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            yield item.strip()
            item = ""
        else:
            item += char
    if item.strip():
        yield item.strip()


def first_names(code: str, prefix: str) -> Iterator[str]:
    """The first path element after each `prefix`, through braces: `crate::{a::B, c}` gives a and c."""
    for match in re.finditer(prefix, code):
        rest = code[match.end() :]
        if rest.startswith("{"):
            depth = end = 0
            for end, char in enumerate(rest):  # noqa: B007
                depth += (char == "{") - (char == "}")
                if depth == 0:
                    break
            for item in split_group(rest[1:end]):
                yield item.split("::")[0].split(" as ")[0].strip()
        else:
            name = re.match(r"\w+|\*", rest)
            yield name.group() if name else ""


def reexports() -> dict[str, str]:
    """Names that lib.rs lifts to the crate root, with the module each comes from."""
    lifted = {}
    for match in re.finditer(
        r"^pub use (?:crate::)?(\w+)::([^;]+);", rust_code(CORE / "lib.rs"), re.MULTILINE
    ):
        module, names = match.groups()
        for name in re.findall(r"\w+", names):
            lifted[name] = module
    return lifted


def module_of(path: Path) -> str:
    return path.relative_to(CORE).parts[0].removesuffix(".rs")


def core_imports() -> Iterator[tuple[Path, str, str]]:
    """(file, module, imported module) for every path from the crate root in core's product code."""
    lifted = reexports()
    for path in sorted(CORE.rglob("*.rs")):
        if path == CORE / "lib.rs" or path.name == "tests.rs":
            continue
        module = module_of(path)
        code = without_unit_tests(rust_code(path))
        names = list(first_names(code, r"\bcrate::"))
        if path.parent == CORE or (path.name == "mod.rs" and path.parent.parent == CORE):
            # In the file of a top-level module, `super` is the crate root.
            names += first_names(code, r"(?<!super::)\bsuper::")
        for name in names:
            yield path, module, lifted.get(name, name)


def test_core_modules_are_in_the_table() -> None:
    modules = {module_of(path) for path in CORE.rglob("*.rs")} - {"lib"}
    assert modules <= set(MODULE_ORDER), f"no place in MODULE_ORDER: {sorted(modules - set(MODULE_ORDER))}"


def test_core_module_order() -> None:
    wrong = []
    for path, module, used in core_imports():
        if used not in MODULE_ORDER:
            wrong.append(f"{path.relative_to(ROOT)}: crate::{used} is no module and not re-exported by name")
        elif module in MODULE_ORDER and MODULE_ORDER.index(used) > MODULE_ORDER.index(module):
            wrong.append(f"{path.relative_to(ROOT)}: {module} may not import {used}")
    assert not wrong, "\n".join(wrong)


def test_unsafe_stands_where_it_may() -> None:
    wrong = []
    for path in rust_files("rust", "tests", "benches"):
        relative = path.relative_to(ROOT)
        if any(relative == allowed or allowed in relative.parents for allowed in UNSAFE_ALLOWED):
            continue
        for number, line in enumerate(rust_code(path).splitlines(), 1):
            if re.search(r"\bunsafe\b", line):
                wrong.append(f"{relative}:{number}: unsafe outside {', '.join(map(str, UNSAFE_ALLOWED))}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", FORBID_UNSAFE, ids=str)
def test_crate_forbids_unsafe(path: Path) -> None:
    assert re.search(r"^#!\[forbid\((?:\w+, )*unsafe_code", rust_code(ROOT / path), re.MULTILINE)


# --- Python ---------------------------------------------------------------------------------------------

# Notes every import that is tried, so that one inside `try: ... except ImportError` is seen as well, on a
# machine with the package and on one without.
WATCH = """
import runpy, sys
heavy = set(sys.argv.pop(1).split(","))
tried = set()
class Watch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in heavy:
            tried.add(name.partition(".")[0])
sys.meta_path.insert(0, Watch)
what = sys.argv.pop(1)
try:
    exec(what)
except SystemExit as stop:
    assert not stop.code, f"ended with {stop.code}"
tried |= heavy & set(sys.modules)
print("TRIED", *sorted(tried))
"""


def tried_imports(code: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", WATCH, ",".join(HEAVY), code, *arguments]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1].split()
    assert last[0] == "TRIED"
    return last[1:]


def test_watch_sees_a_guarded_import() -> None:
    assert tried_imports("try:\n import torch.nn\nexcept ImportError:\n pass\nimport numpy") == [
        "numpy",
        "torch",
    ]


def test_import_is_light() -> None:
    assert tried_imports("import hicache_store") == []


def test_import_of_ranks_is_light() -> None:
    assert tried_imports("import hicache_store.ranks, hicache_store.ranks.exceptions") == []


def test_tool_is_light() -> None:
    assert tried_imports("import hicache_store._tool; hicache_store._tool.main()", "--version") == []


def python_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every absolute module named by an import anywhere in a file, with its line."""
    inside = ("hicache_store", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(inside[: len(inside) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (package, node.module)))
            yield node.lineno, module
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def test_python_packages_import_down_only() -> None:
    # Sub-package ("": the public package itself) -> roots that no line of it may import.
    barred = {
        "": ("torch", "sglang", "hicache_store.sglang", "hicache_store.engine"),
        "sglang": ("hicache_store.engine",),
        "engine": ("sglang", "hicache_store.sglang"),
    }
    # The one file that speaks to process groups.
    over_torch = Path("ranks/torch_transport.py")
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]
    assert files, f"no Python under {PACKAGE}"
    wrong = set()
    for path in files:
        top = path.relative_to(PACKAGE).parts[0]
        for line, module in python_imports(path):
            for root in barred.get(top, barred[""]):
                if root == "torch" and path.relative_to(PACKAGE) == over_torch:
                    continue
                if module == root or module.startswith(root + "."):
                    wrong.add(f"{path.relative_to(ROOT)}:{line}: imports {root}")
    assert not wrong, "\n".join(sorted(wrong))
