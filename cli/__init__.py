"""Parse, render, exit: the only package that prints."""
