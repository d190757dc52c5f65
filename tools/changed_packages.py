"""Print the packages that a change concerns, as a JSON list: those touched, and their dependants.

    python tools/changed_packages.py origin/main

A file outside packages/ concerns every package, unless it is documentation.
"""

import argparse
import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEPENDANTS = {
    "easyckpt-core": ("easyckpt-megatron", "easyckpt-hf", "rapidformer-engine", "rapidformer-cli"),
    "easyckpt-megatron": (),
    "easyckpt-hf": (),
    "rapidformer-engine": ("rapidformer-cli",),
    "rapidformer-cli": (),
}
# A change of these concerns no package; a change of any other file outside packages/, all of them.
HARMLESS = ("docs/", "benchmarks/", "README.md", "CONTRIBUTING.md", "mkdocs.yml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="commit or branch to compare with; 'all' for every package")
    arguments = parser.parse_args()
    if arguments.base == "all":
        print(json.dumps(list(DEPENDANTS)))
    else:
        print(json.dumps(concerned(changed_files(arguments.base))))


def changed_files(base: str) -> list[str]:
    command = ["git", "diff", "--name-only", f"{base}...HEAD"]
    done = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE)
    return done.stdout.splitlines()


def concerned(files: list[str]) -> list[str]:
    """Return the packages to test when `files` changed, each dependency before its dependants."""
    found: set[str] = set()
    for file in files:
        parts = file.split("/")
        if parts[0] == "packages" and len(parts) > 2 and parts[1] in DEPENDANTS:
            found |= {parts[1], *DEPENDANTS[parts[1]]}
        elif not file.startswith(HARMLESS):
            found |= set(DEPENDANTS)
    return [name for name in DEPENDANTS if name in found]


if __name__ == "__main__":
    main()
