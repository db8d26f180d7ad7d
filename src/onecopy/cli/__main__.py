"""Runs the command line as ``python -m onecopy.cli``, and with torchrun as ``torchrun -m onecopy.cli``."""

from onecopy.cli.main import main

if __name__ == "__main__":
    main()
