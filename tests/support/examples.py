"""The scripts in examples/ as modules."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"


def example(name: str) -> ModuleType:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))
