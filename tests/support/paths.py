"""Where the repository and its tests are."""

from pathlib import Path

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
FIXTURES = TESTS / "fixtures"
