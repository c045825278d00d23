"""One file a format, one class a file. The registry finds every ``Format`` subclass defined in this folder."""
