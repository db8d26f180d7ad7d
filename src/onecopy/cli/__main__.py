"""The command ``onecopy``, also as ``python -m onecopy.cli``."""

import sys


def main() -> None:
    """Run the command line interface, or say which packages it needs."""
    try:
        from onecopy.cli.main import app
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        sys.exit(f"the command onecopy needs {error.name}: pip install 'onecopy[cli]'")
    app()


if __name__ == "__main__":
    main()
