"""How large the project is: files, lines and statements of the package, lines of the tests, words of the documentation.

python benchmarks/size.py [ROOT]
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

LONGEST = 600  # lines


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def public(tree: ast.AST) -> list[ast.FunctionDef | ast.ClassDef]:
    """Functions and classes without an underscore, of a module and of its public classes; no overloads."""
    found = [node for node in ast.iter_child_nodes(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    found = [node for node in found if not node.name.startswith("_")]
    found = [node for node in found if not any("overload" in ast.dump(each) for each in node.decorator_list)]
    return [*found, *(inner for node in found if isinstance(node, ast.ClassDef) for inner in public(node))]


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    known = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    files = [root / name for name in known.splitlines() if (root / name).is_file()]
    package = root / "src" / "onecopy"
    source = [path for path in files if path.suffix == ".py" and package in path.parents]
    count, length = Counter[str](), Counter[str]()
    for path in source:
        folder = path.relative_to(package).parts[0] if path.parent != package else "."
        count[folder] += 1
        length[folder] += lines(path)
    print(f"{'src/onecopy':<16}{'files':>7}{'lines':>9}")
    for folder in sorted(count, key=lambda name: -length[name]):
        print(f"{folder:<16}{count[folder]:>7}{length[folder]:>9,}")
    print(f"{'in all':<16}{len(source):>7}{sum(length.values()):>9,}")
    long = [f"{path.relative_to(root)} ({lines(path)})" for path in source if lines(path) > LONGEST]
    print(f"files over {LONGEST} lines: {', '.join(long) or 'none'}")
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in source]
    names = [node for tree in trees for node in public(tree)]
    print(f"statements: {sum(isinstance(node, ast.stmt) for tree in trees for node in ast.walk(tree)):,}")
    without = [node.name for node in names if not ast.get_docstring(node)]
    print(f"public names: {len(names):,}; without a docstring: {', '.join(without) or 'none'}")
    tests = [path for path in files if path.suffix == ".py" and root / "tests" in path.parents]
    print(f"tests: {len(tests)} files, {sum(map(lines, tests)):,} lines")
    pages = [root / "README.md", root / "CONTRIBUTING.md", *(p for p in files if root / "docs" in p.parents)]
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages if page.suffix == ".md")
    print(f"documentation: {words:,} words (README, CONTRIBUTING and docs)")


if __name__ == "__main__":
    main()
