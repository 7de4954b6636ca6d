"""One file per method, named like its preset."""
