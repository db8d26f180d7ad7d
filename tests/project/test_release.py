"""The files of a release agree with each other."""

from __future__ import annotations

import re

import onecopy
from tests.support.paths import ROOT


def test_the_version_is_the_same_everywhere() -> None:
    for file, pattern in (("pyproject.toml", r'^version = "(.*)"$'), ("CITATION.cff", r"^version: (.*)$")):
        assert re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE) == [onecopy.__version__], file


def test_the_workflow_runs_what_contributors_run() -> None:
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    assert "run: .ci/run" in workflow
    assert "id-token: write" in workflow, "trusted publishing needs it"
    assert "password" not in workflow
