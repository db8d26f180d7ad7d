"""The messages on docs/troubleshooting.md are the real ones.

After a change of a message: ``python -m tests.project.test_troubleshooting``, from the root of the repository, writes
the page's messages anew.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from tests.support import mistakes
from tests.support.harness import pools
from tests.support.paths import ROOT

PAGE = ROOT / "docs/troubleshooting.md"

BLOCK = re.compile(r"(<!-- message: (\w+) -->\n```text\n)(.*?)(\n```)", re.DOTALL)
"""A message on the page, under the name of the mistake that it is the message of."""


def messages(folder: Path) -> dict[str, str]:
    """The text of every message, by the name of the mistake."""
    ranks = pools.run(2, "tests.support.mistakes", "messages_of_rank", {"folder": str(folder)})
    found = {name: mistakes.on_page([rank[name] for rank in ranks]) for name in ranks[0]}
    alone = {each.__name__: mistakes.on_page([mistakes.message_of(each, folder)]) for each in mistakes.ALONE}
    return {**alone, **found}


def test_every_message_on_the_page_is_the_real_one(tmp_path: Path) -> None:
    real = messages(tmp_path)
    shown = {match[2]: match[3] for match in BLOCK.finditer(PAGE.read_text())}
    assert all(real.values()), [name for name, text in real.items() if not text]
    assert shown == real, "run python -m tests.project.test_troubleshooting"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        made = messages(Path(place))
    PAGE.write_text(BLOCK.sub(lambda match: match[1] + made[match[2]] + match[4], PAGE.read_text()))
    pools.close()
