"""Makes the README's table of public names from the first lines of their docstrings.

    python tools/api_reference.py           prints it
    python tools/api_reference.py --write   puts it into README.md, between the two markers

Sources are parsed and not imported, so that it needs nothing installed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "flexgen_h2o"

PUBLIC = {
    "": ("LLM", "Policy", "Placement", "H2OConfig"),
    "streaming": ("Stream", "Streamer"),
    "output": ("Output", "Scored"),
    "config": ("SamplingParams",),
    "report": ("RunStats",),
    "trace": ("Trace",),
    "planning.rows": ("Workload",),
    "errors": ("UserError",),
    "models": ("checkpoint_folder",),
    "integrations.transformers": ("enable_h2o", "EnabledH2O", "H2OCache"),
}
"""The module that users import from, of the package: the names."""

BEGIN = "<!-- python tools/api_reference.py --write makes this table from docstrings -->"
END = "<!-- end of the table -->"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def source(module: str) -> Path:
    """The file of a module of the package, by its name in the package; "" is the package."""
    path = ROOT.joinpath(PACKAGE, *filter(None, module.split(".")))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def definition(module: str, name: str) -> ast.ClassDef | Function:
    """Where a name is defined: in the module, or where that imports it from.

    Raises
    ------
    LookupError
        The module neither defines nor imports it.
    """
    tree = ast.parse(source(module).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | Function) and node.name == name:
            return node
        if (isinstance(node, ast.ImportFrom) and node.module is not None
                and node.module.startswith(f"{PACKAGE}.")
                and name in [alias.name for alias in node.names]):
            return definition(node.module.removeprefix(f"{PACKAGE}."), name)
    raise LookupError(f"{source(module)} has no {name}")


def summary(node: ast.ClassDef | Function) -> str:
    """The first line of a docstring, for a table's cell. LookupError if there is none."""
    text = ast.get_docstring(node)
    if not text:
        raise LookupError(f"{node.name} has no docstring")
    return text.splitlines()[0].replace("|", "\\|")


def call(node: Function) -> str:
    """A function as it is called: its name and the names of its parameters."""
    given = node.args
    names = [arg.arg for arg in (*given.posonlyargs, *given.args) if arg.arg not in ("self", "cls")]
    if given.vararg is not None:
        names.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        names.append("*")
    names += [arg.arg for arg in given.kwonlyargs]
    if given.kwarg is not None:
        names.append(f"**{given.kwarg.arg}")
    return f"{node.name}({', '.join(names)})"


def members(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Each public method and property of a class, and its summary."""
    for child in node.body:
        if isinstance(child, Function) and not child.name.startswith("_"):
            is_property = "property" in map(ast.unparse, child.decorator_list)
            yield child.name if is_property else call(child), summary(child)


def table() -> str:
    """The table in markdown, a row for each name and for each method of a class."""
    rows = ["| from | name | what it is |", "|---|---|---|"]
    for module, names in PUBLIC.items():
        place = f"`{PACKAGE}.{module}`" if module else f"`{PACKAGE}`"
        for name in names:
            node = definition(module, name)
            shown = name if isinstance(node, ast.ClassDef) else call(node)
            rows.append(f"| {place} | `{shown}` | {summary(node)} |")
            if isinstance(node, ast.ClassDef):
                rows += [f"| | `.{member}` | {words} |" for member, words in members(node)]
    return "\n".join(rows)


def put_into(text: str) -> str:
    """A text with the table between its markers. ValueError if it has not both."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Print the table, or write it. Returns the exit status."""
    if arguments not in ([], ["--write"]):
        print(f"usage: python {Path(__file__).name} [--write]", file=sys.stderr)
        return 2
    if arguments:
        readme = ROOT / "README.md"
        readme.write_text(put_into(readme.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
