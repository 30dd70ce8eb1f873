"""The version of the whole product, in one place: setup.py, `--version`, Hello and metrics read it here."""

VERSION = "0.1.0"
