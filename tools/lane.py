"""Test one package as its users get it: wheels in a clean environment, and nothing else.

    python tools/lane.py easyckpt-core
    python tools/lane.py megatron-stack     # every package together with Megatron's library

Needs no package itself. A checkout where all packages are installed editable hides a dependency
that was forgotten, a file that is missing in the wheel, and a package that reaches for a sibling
which its users do not have. A lane shows them.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "easyckpt-core",
    "easyckpt-megatron",
    "easyckpt-hf",
    "rapidformer-engine",
    "rapidformer-cli",
)


class LaneError(Exception):
    """The lane found something wrong; the message says what."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """What a user of one package has installed, and what not."""

    siblings: tuple[str, ...] = ()
    """Other packages of this repository that it is installed with."""

    extras: tuple[str, ...] = ()
    """Extras of the package that its users need for these tests."""

    modules: tuple[str, ...]
    """Modules that must be importable: the front doors."""

    absent: tuple[str, ...]
    """Prefixes of distributions that must not be installed."""


FRAMEWORKS = ("transformers", "datasets", "accelerate")
OPTIONAL = ("megatron", "deepspeed", "fairscale", "onnxruntime", "apex")

LANES = {
    "easyckpt-core": Lane(
        modules=("easyckpt_core",),
        absent=("easyckpt-hf", "easyckpt-megatron", "rapidformer", *FRAMEWORKS, *OPTIONAL),
    ),
    "easyckpt-megatron": Lane(
        siblings=("easyckpt-core",),
        modules=("easyckpt_megatron", "aimaster.python.torch.easyckpt.megatron"),
        absent=("easyckpt-hf", "rapidformer", *FRAMEWORKS, *OPTIONAL),
    ),
    "easyckpt-hf": Lane(
        siblings=("easyckpt-core",),
        modules=("easyckpt_hf", "aimaster.python.torch.easyckpt.transformers"),
        absent=("easyckpt-megatron", "rapidformer", *OPTIONAL),
    ),
    "rapidformer-engine": Lane(
        siblings=("easyckpt-core",),
        extras=("easyckpt",),
        modules=("rapidformer",),
        absent=("easyckpt-hf", "easyckpt-megatron", "rapidformer-cli", *OPTIONAL),
    ),
    "rapidformer-cli": Lane(
        siblings=("rapidformer-engine", "easyckpt-core"),
        modules=("rapidformer_cli", "rapidformer_cli.main"),
        absent=("easyckpt-hf", "easyckpt-megatron", *OPTIONAL),
    ),
}

MEGATRON_STACK = """
import megatron.core
import easyckpt_core, easyckpt_hf, easyckpt_megatron, rapidformer, rapidformer_cli
try:
    easyckpt_megatron.initialize_easyckpt(1, 5, 5)
except easyckpt_megatron.UnsupportedMegatronError as error:
    assert megatron.core.__version__ in str(error), error
else:
    raise SystemExit("initialize_easyckpt did not refuse")
print("megatron.core", megatron.core.__version__, "beside every package of this repository")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lane", choices=[*PACKAGES, "megatron-stack"])
    parser.add_argument("--dist", type=Path, help="folder of wheels; fresh ones in it are used")
    parser.add_argument("--keep", action="store_true", help="leave the environment for a look")
    arguments = parser.parse_args()

    work = Path(tempfile.mkdtemp(prefix=f"lane-{arguments.lane}-"))
    try:
        wheels = build_wheels(arguments.dist or work / "dist")
        python = make_environment(work / "venv")
        if arguments.lane == "megatron-stack":
            result = run_megatron_stack(python, wheels, work)
        else:
            result = run_lane(arguments.lane, python, wheels, work)
    except (LaneError, subprocess.CalledProcessError) as error:
        print(f"lane {arguments.lane}: FAILED: {error}", flush=True)
        return 1
    finally:
        if arguments.keep:
            print(f"kept: {work}", flush=True)
        else:
            shutil.rmtree(work, ignore_errors=True)
    print(f"lane {arguments.lane}: OK ({result})", flush=True)
    return 0


def run_lane(name: str, python: Path, wheels: dict[str, Path], work: Path) -> str:
    lane = LANES[name]
    extras = set(lane.extras) | ({"test"} & declared_extras(wheels[name]))
    install(python, work, wheels, {name: extras} | {sibling: set() for sibling in lane.siblings})
    check_distributions(python, {name, *lane.siblings}, lane.absent)
    for module in lane.modules:
        run_python(python, f"import {module}", cwd=work)
    return f"{run_tests(name, python, work)} passed"


def run_megatron_stack(python: Path, wheels: dict[str, Path], work: Path) -> str:
    wanted: dict[str, set[str]] = {name: set() for name in PACKAGES}
    install(python, work, wheels, wanted | {"easyckpt-megatron": {"megatron"}})
    check_distributions(python, set(PACKAGES), ())
    run_python(python, MEGATRON_STACK, cwd=work)
    return "imports"


def build_wheels(dist: Path) -> dict[str, Path]:
    """Return a wheel of every package, built where it is missing or older than its sources."""
    dist.mkdir(parents=True, exist_ok=True)
    wheels = {}
    for name in PACKAGES:
        source = ROOT / "packages" / name
        wheel = find_wheel(dist, name)
        if wheel is None or wheel.stat().st_mtime <= newest_change(source):
            if wheel is not None:
                wheel.unlink()
            command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
            call([*command, "--wheel-dir", str(dist), str(source)], cwd=dist)
            wheel = find_wheel(dist, name)
        if wheel is None:
            raise LaneError(f"building {name} left no single wheel of it in {dist}")
        wheels[name] = wheel
    return wheels


def find_wheel(dist: Path, name: str) -> Path | None:
    found = list(dist.glob(f"{name.replace('-', '_')}-*.whl"))
    if len(found) > 1:
        raise LaneError(f"several wheels of {name} in {dist}; delete all but one")
    return found[0] if found else None


def newest_change(source: Path) -> float:
    files = [source / "pyproject.toml", *(source / "src").rglob("*")]
    return max(path.stat().st_mtime for path in files)


def declared_extras(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode("utf-8")
    return set(re.findall(r"^Provides-Extra: (\S+)$", text, flags=re.MULTILINE))


def make_environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True, symlinks=True)
    return folder / "bin" / "python"


def install(python: Path, work: Path, wheels: dict[str, Path], wanted: dict[str, set[str]]) -> None:
    """Install the wanted packages with the given extras, and pytest.

    The wanted packages are named by their wheels, and a constraint ties the others to theirs: pip
    then cannot take one of these names from an index, whoever asks for it.
    """
    # Only the others: pip before 24 fails on a constraint that meets the same name with an extra.
    others = {name: path for name, path in wheels.items() if name not in wanted}
    siblings = work / "siblings.txt"
    siblings.write_text("".join(f"{name} @ {path.as_uri()}\n" for name, path in others.items()))
    requirements = [
        f"{name}[{','.join(sorted(extras))}] @ {wheels[name].as_uri()}"
        if extras
        else f"{name} @ {wheels[name].as_uri()}"
        for name, extras in wanted.items()
    ]
    command = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(siblings)]
    call([*command, *requirements, "pytest"], cwd=work)
    call([str(python), "-m", "pip", "check"], cwd=work)


def check_distributions(python: Path, expected: set[str], absent: tuple[str, ...]) -> None:
    """Compare what is installed with what should be."""
    code = "import importlib.metadata as m; print(*(d.name for d in m.distributions()), sep='\\n')"
    listed = subprocess.run(
        [str(python), "-I", "-c", code], check=True, text=True, stdout=subprocess.PIPE
    )
    names = {re.sub(r"[-_.]+", "-", line).lower() for line in listed.stdout.split()}
    ours = names & set(PACKAGES)
    if ours != expected:
        raise LaneError(f"packages installed: {sorted(ours)}, expected: {sorted(expected)}")
    unwanted = sorted(name for name in names if name.startswith(absent)) if absent else []
    if unwanted:
        raise LaneError(f"installed, and must not be: {', '.join(unwanted)}")


def run_tests(name: str, python: Path, work: Path) -> int:
    """Run a copy of the package's tests, with nothing of the checkout beside it."""
    project = work / "project"
    project.mkdir()
    shutil.copytree(
        ROOT / "packages" / name / "tests",
        project / "tests",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copy(ROOT / "pyproject.toml", project)
    # Its example is tested too.
    shutil.copy(ROOT / "packages" / name / "README.md", project)
    report = work / "report.xml"
    call([str(python), "-m", "pytest", "tests", f"--junit-xml={report}"], cwd=project)
    counts = {"tests": 0, "skipped": 0, "failures": 0, "errors": 0}
    for suite in ElementTree.parse(report).iter("testsuite"):
        for key in counts:
            counts[key] += int(suite.get(key, 0))
    passed = counts["tests"] - counts["skipped"] - counts["failures"] - counts["errors"]
    if passed < 1:
        raise LaneError("no test passed: none was collected, or all were skipped")
    return passed


def run_python(python: Path, code: str, *, cwd: Path) -> None:
    call([str(python), "-c", code], cwd=cwd)


def call(command: list[str], *, cwd: Path) -> None:
    subprocess.run(command, check=True, cwd=cwd, env=environment(), stdin=subprocess.DEVNULL)


def environment() -> dict[str, str]:
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


if __name__ == "__main__":
    sys.exit(main())
