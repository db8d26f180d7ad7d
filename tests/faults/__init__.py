"""The table of faults: each fault is tried many times, and must end as the docs say.

``__main__.py`` is ``make faults``. Each part of the table is a module with a function ``rows``, which yields rows as
they are done. ``page.py`` writes the results into docs/failures.md.
"""
