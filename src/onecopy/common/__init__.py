"""Helpers that need nothing of onecopy: flat views, tagged JSON, profiling marks, torch's private names."""
