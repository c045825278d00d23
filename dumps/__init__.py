"""The dump format: scan, read, write, foreign formats; what a trainer imports."""
