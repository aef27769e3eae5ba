"""Write what the wheel contains and needs, as CycloneDX JSON: ``make sbom``.

cyclonedx-py lists the environment of the interpreter that runs this program. What the package
requires stays in the list, without its extras, and the code of others in the wheel is added.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "flexgen_h2o"
UPLOT = ROOT / PACKAGE / "serving" / "page" / "uplot" / "uPlot.iife.min.js"


def required(package: str) -> set[str]:
    """Return the canonical names of all packages that a package requires, itself not included."""
    names: set[str] = set()
    todo = [package]
    while todo:
        for text in metadata.requires(todo.pop()) or ():
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            if name in names or requirement.marker and not requirement.marker.evaluate(
                    {"extra": ""}):
                continue
            names.add(name)
            todo.append(name)
    return names


def uplot() -> dict[str, Any]:
    """Return the component of the chart library of the server's page."""
    version = re.search(r"\(v([\d.]+)\)", UPLOT.read_text(encoding="utf-8")[:200])
    assert version is not None
    return {"type": "library", "name": "uplot", "version": version[1], "bom-ref": "uplot",
            "purl": f"pkg:npm/uplot@{version[1]}", "licenses": [{"license": {"id": "MIT"}}]}


def bill() -> dict[str, Any]:
    """Return the bill of materials."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--pyproject",
               str(ROOT / "pyproject.toml"), "--mc-type", "library", "--output-reproducible",
               sys.executable]
    document = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    names = required(PACKAGE)
    components = [component for component in document["components"]
                  if canonicalize_name(component["name"]) in names]
    missing = names - {canonicalize_name(component["name"]) for component in components}
    if missing:
        sys.exit(f"these packages are required but not installed: {', '.join(sorted(missing))}")
    root = document["metadata"]["component"]
    root["version"] = metadata.version(PACKAGE)
    refs = {component["bom-ref"] for component in components} | {root["bom-ref"]}
    dependencies = [{**each, "dependsOn": [ref for ref in each.get("dependsOn", ())
                                           if ref in refs]}
                    for each in document["dependencies"] if each["ref"] in refs]
    document["components"] = [*components, uplot()]
    for each in dependencies:
        if each["ref"] == root["bom-ref"]:
            each["dependsOn"].append("uplot")
    document["dependencies"] = [*dependencies, {"ref": "uplot"}]
    return document


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the file")
    arguments = parser.parse_args()
    arguments.out.mkdir(exist_ok=True)
    document = bill()
    path = arguments.out / f"{PACKAGE}-{document['metadata']['component']['version']}.cdx.json"
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"{path}: {len(document['components'])} components")


if __name__ == "__main__":
    main()
