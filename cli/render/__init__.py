"""Tables as data first (``table``), then as text (``text``), Markdown and CSV (``markup``); numbers in ``numbers``."""
