"""Rules that the repository keeps."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import tomllib

import changed_packages
import lane

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "demo" / "data" / "uci-sentences"
HATCH = tomllib.loads((ROOT / "hatch.toml").read_text())


def repository_files(pattern: str) -> list[Path]:
    """Files that are tracked, or would be if they were added."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", pattern]
    try:
        listed = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def test_no_python_file_has_more_than_500_lines():
    long = {
        str(path.relative_to(ROOT)): count
        for path in repository_files("*.py")
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 500
    }
    assert long == {}


def test_python_sources_are_ascii():
    assert [str(path) for path in repository_files("*.py") if not path.read_bytes().isascii()] == []


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/start.md", ".ci/run"])
def test_hatch_scripts_that_are_written_down_exist(document):
    scripts = set(HATCH["envs"]["default"]["scripts"]) | {"python"}
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"hatch run ([\w-]+)", text))
    assert named
    assert named <= scripts


def test_every_environment_installs_with_pip():
    assert {name: table.get("installer") for name, table in HATCH["envs"].items()} == dict.fromkeys(
        HATCH["envs"], "pip"
    )


def test_every_package_is_in_every_list():
    folders = {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    scripts = HATCH["envs"]["default"]["scripts"]
    members = {Path(member).name for member in HATCH["envs"]["default"]["workspace"]["members"]}
    assert set(lane.PACKAGES) == folders
    assert set(lane.LANES) == folders
    assert set(changed_packages.DEPENDANTS) == folders
    assert members == folders
    assert {name.removeprefix("test-") for name in scripts if name.startswith("test-")} == folders


def test_the_table_of_dependants_agrees_with_the_packages():
    needs = {name: set() for name in lane.PACKAGES}
    for name in lane.PACKAGES:
        text = (ROOT / "packages" / name / "pyproject.toml").read_text()
        project = tomllib.loads(text)["project"]
        groups = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
        for requirement in (line for group in groups for line in group):
            needs[name] |= {re.match(r"[\w-]+", requirement).group()} & set(lane.PACKAGES)
    for name, dependants in changed_packages.DEPENDANTS.items():
        direct = {other for other in lane.PACKAGES if name in needs[other]}
        assert direct <= set(dependants)
        for dependant in direct:
            assert set(changed_packages.DEPENDANTS[dependant]) <= set(dependants)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["docs/start.md", "README.md"], []),
        (["packages/easyckpt-hf/README.md"], ["easyckpt-hf"]),
        (["packages/rapidformer-engine/src/x.py"], ["rapidformer-engine", "rapidformer-cli"]),
        (["packages/easyckpt-core/src/x.py"], list(lane.PACKAGES)),
        (["constraints.txt"], list(lane.PACKAGES)),
    ],
)
def test_a_change_concerns_a_package_and_its_dependants(files, expected):
    assert changed_packages.concerned(files) == expected


def read(name: str) -> list[dict[str, str]]:
    lines = (DATA / f"{name}.jsonl").read_text(encoding="ascii").splitlines()
    return [json.loads(line) for line in lines]


def test_no_demo_sentence_is_in_both_files():
    texts = [" ".join(row["text"].split()).casefold() for row in read("train") + read("validation")]
    assert len(texts) == len(set(texts))


@pytest.mark.parametrize("name", ["train", "validation"])
def test_the_demo_data_is_what_its_readme_says(name):
    rows = read(name)
    assert all(row.keys() == {"text", "label"} and row["text"] for row in rows)
    positive = sum(row["label"] == "positive" for row in rows)
    negative = sum(row["label"] == "negative" for row in rows)
    assert positive + negative == len(rows)
    line = f"| `{name}.jsonl` | {len(rows):,} | {positive:,} | {negative:,} |"
    assert line in (DATA / "README.md").read_text()
