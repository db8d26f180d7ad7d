"""Give random manifests to the reader of checkpoints, guided by the lines that they reach.

Needs atheris (``pip install atheris``). Every manifest gets the right checksum. A manifest that the parser accepts is
written beside real files and loaded. Any exception except the errors for checkpoints ends the run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import atheris

with atheris.instrument_imports(include=["onecopy.checkpoint.manifest"]):
    from onecopy.checkpoint import manifest

from onecopy.errors import CheckpointError
from tests.support.hostile import FRONT, Pair, Seen, attempt, seal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("count", type=int, nargs="?", default=100_000, help="the number of manifests")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    seen = Seen()
    with tempfile.TemporaryDirectory() as name:
        pair = Pair()
        pair.step()
        folder = pair.save(Path(name) / "root")
        corpus = Path(name) / "corpus"
        corpus.mkdir()
        text = (folder / "manifest.json").read_bytes()
        (corpus / "one").write_bytes(text[len(FRONT) :])

        def one(data: bytes) -> None:
            text = seal(FRONT + data)
            try:
                manifest.parse(text, "here")
            except CheckpointError:
                return
            (folder / "manifest.json").write_bytes(text)
            attempt(folder, Pair(1), seen, "a manifest that was accepted")
            assert not seen.problems, seen.problems

        options = [f"-runs={arguments.count}", f"-seed={arguments.seed + 1}", f"-max_len={2 * len(text)}"]
        atheris.Setup([sys.argv[0], *options, "-len_control=0", str(corpus)], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
