"""Helpers that import nothing else of onecopy: flat views, tagged JSON, profiler ranges, torch's private names."""
