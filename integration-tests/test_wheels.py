"""What is inside the wheels, and what they ask for."""

import re
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

import lane

MODULES = {
    "easyckpt-core": "easyckpt_core",
    "easyckpt-megatron": "easyckpt_megatron",
    "easyckpt-hf": "easyckpt_hf",
    "rapidformer-engine": "rapidformer",
    "rapidformer-cli": "rapidformer_cli",
}
NAMESPACE = ("aimaster", "aimaster/python", "aimaster/python/torch")
FORBIDDEN = {
    "easyckpt-core": r"transformers|datasets|accelerate|megatron|deepspeed|fairscale|rapidformer",
    "easyckpt-megatron": r"transformers|datasets|accelerate|megatron|deepspeed|rapidformer",
    "easyckpt-hf": r"megatron|deepspeed|fairscale|rapidformer|easyckpt-megatron",
    "rapidformer-engine": r"megatron|deepspeed|fairscale|onnxruntime|apex|easyckpt",
    "rapidformer-cli": r"megatron|deepspeed|fairscale|onnxruntime|apex|easyckpt-(hf|megatron)",
}
packages = pytest.mark.parametrize("package", lane.PACKAGES)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return lane.build_wheels(tmp_path_factory.mktemp("dist"))


def files(wheel: Path) -> list[str]:
    with ZipFile(wheel) as archive:
        return archive.namelist()


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode("utf-8"))


def requirements(wheel: Path) -> list[Requirement]:
    return [Requirement(line) for line in metadata(wheel).get_all("Requires-Dist", [])]


@packages
def test_a_wheel_has_its_module_its_type_marker_and_its_licence(wheels, package):
    names = files(wheels[package])
    assert f"{MODULES[package]}/__init__.py" in names
    assert f"{MODULES[package]}/py.typed" in names
    assert any(re.fullmatch(r"[^/]+\.dist-info/licenses/LICENSE", name) for name in names)


@packages
def test_a_wheel_has_nothing_but_its_modules(wheels, package):
    allowed = {MODULES[package]}
    if package in ("easyckpt-megatron", "easyckpt-hf"):
        allowed.add("aimaster")
    tops = {name.split("/")[0] for name in files(wheels[package])}
    assert {top for top in tops if not top.endswith(".dist-info")} == allowed


@packages
def test_the_shared_folders_have_no_package_file(wheels, package):
    shared = {f"{folder}/__init__.py" for folder in (*NAMESPACE, f"{NAMESPACE[-1]}/easyckpt")}
    assert shared.isdisjoint(files(wheels[package]))


def test_the_published_modules_are_in_the_wheels(wheels):
    published = "aimaster/python/torch/easyckpt"
    assert f"{published}/transformers.py" in files(wheels["easyckpt-hf"])
    assert f"{published}/megatron/__init__.py" in files(wheels["easyckpt-megatron"])
    assert f"{published}/megatron/hook.py" in files(wheels["easyckpt-megatron"])


def test_no_file_is_in_two_wheels(wheels):
    owners: dict[str, str] = {}
    for package, wheel in wheels.items():
        for name in files(wheel):
            assert owners.setdefault(name, package) == package


@packages
def test_siblings_are_asked_for_by_range(wheels, package):
    for requirement in requirements(wheels[package]):
        if requirement.name in lane.PACKAGES:
            operators = {specifier.operator for specifier in requirement.specifier}
            assert operators == {">=", "<"}, f"{package} asks for {requirement}"


@packages
def test_a_package_does_not_ask_for_what_its_users_may_not_have(wheels, package):
    unconditional = [
        requirement.name
        for requirement in requirements(wheels[package])
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]
    unwanted = [name for name in unconditional if re.match(FORBIDDEN[package], name)]
    assert unwanted == []


@packages
def test_every_supported_python_is_named(wheels, package):
    described = metadata(wheels[package])
    assert described["Requires-Python"] == ">=3.10"
    assert described["License-Expression"] == "Apache-2.0"
    classifiers = described.get_all("Classifier", [])
    for version in ("3.10", "3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in classifiers
