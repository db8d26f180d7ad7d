"""Helpers that import nothing else of onecopy: flat views, tagged JSON, digests, torch internals."""
