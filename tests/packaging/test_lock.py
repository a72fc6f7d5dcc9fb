"""requirements.lock pins all that pyproject.toml asks for, and nothing but names and versions is in it."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)")


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    matches = [LINE.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(matches), "a line of requirements.lock is not name==version"
    return {canonicalize_name(match[1]): match[2] for match in matches if match}


def test_all_requirements_are_locked_in_a_fitting_version() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = settings["project"]
    groups = [settings["build-system"]["requires"], project["dependencies"]]
    groups += project["optional-dependencies"].values()
    versions = locked()
    for text in (text for group in groups for text in group):
        requirement = Requirement(text)
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), text


def test_the_default_torch() -> None:
    assert locked()["torch"] == "2.11.0"


def test_the_oldest_python_that_is_promised_can_install_all() -> None:
    """Else the first minute fails there: scripts/setup installs these. Debian 12 has Python 3.11.2."""
    promised = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    oldest = promised.removeprefix(">=") + ".0"
    refused, known = [], 0
    for name in locked():
        try:
            required = metadata(name)["Requires-Python"]
        except PackageNotFoundError:  # of another torch
            continue
        known += 1
        if required and not SpecifierSet(required).contains(oldest):
            refused.append(f"{name} needs Python {required}")
    assert known
    assert not refused
