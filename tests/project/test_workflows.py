"""The workflows run targets of the Makefile and nothing else, and the files of a release agree with each other."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import onecopy
from tests.support.paths import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGET, OTHER = re.compile(r"\$\{\{ matrix\.target \}\}"), re.compile(r"\$\{\{.*?\}\}")


def targets(makefile: str) -> set[str]:
    """The targets of a Makefile that a person can name."""
    return set(re.findall(r"^([a-z-]+):(?!=)", makefile, re.MULTILINE))


def problems(workflow: dict[str, Any], known: set[str]) -> list[str]:
    """Everything in a workflow that is not as it must be."""
    found = [] if workflow.get("permissions") == {"contents": "read"} else ["permissions are not contents: read"]
    found += [] if "concurrency" in workflow else ["no concurrency"]
    for name, job in workflow["jobs"].items():
        found += [] if "timeout-minutes" in job else [f"{name}: no timeout"]
        matrix = job.get("strategy", {}).get("matrix", {})
        named = [*matrix.get("target", ()), *(each["target"] for each in matrix.get("include", ()))]
        for step in job["steps"]:
            if "uses" in step and not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]):
                found.append(f"{name}: {step['uses']} is not pinned by its commit")
            if "run" not in step:
                continue
            for command in [OTHER.sub("x", TARGET.sub(each, step["run"])) for each in named or [""]]:
                make, target, *settings = command.split()
                if make != "make" or target not in known or not all("=" in setting for setting in settings):
                    found.append(f"{name}: {command!r} is not one target of the Makefile")
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_step_is_one_target_and_each_action_is_pinned(path: Path) -> None:
    text, known = path.read_text(), targets((ROOT / "Makefile").read_text())
    assert problems(yaml.safe_load(text), known) == []
    for wrong in (
        re.sub(r"make \$\{\{ matrix.target \}\}|make \w+", "make tets", text, count=1),
        re.sub(r"@[0-9a-f]{40}", "@v4", text, count=1),
        re.sub(r" +timeout-minutes: \d+\n", "", text, count=1),
        text.replace("contents: read", "contents: write", 1),
    ):
        assert len(problems(yaml.safe_load(wrong), known)) >= 1, "a workflow with a mistake passed"


@pytest.mark.parametrize("tag", ["v9.9.9", f"v{onecopy.__version__}x", f"v{onecopy.__version__}"])
def test_a_release_needs_the_same_version_everywhere(tag: str) -> None:
    command = ["make", "release-check", f"TAG={tag}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    listed = f"## [{onecopy.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert (done.returncode == 0) == (tag == f"v{onecopy.__version__}" and listed), done.stdout
    cited = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == [onecopy.__version__]
