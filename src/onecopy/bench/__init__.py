"""The benchmark compares onecopy with its alternatives in one run, with the same seeds and flags."""
