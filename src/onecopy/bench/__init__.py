"""The benchmark: every way to train that people would use instead, in one run, with the same seeds and flags."""
