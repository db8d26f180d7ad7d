"""Random training programs, each run with plain DDP and with onecopy: both must train the same.

A program is a value that is drawn from a seed and printed as a script of its own. That script is what the ranks run, so
what is printed for a failure is what has failed.
"""
