"""Doctests import every module; those of packages that are not installed are left out."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("axolotl") else ["holdfast/hosts/axolotl.py"]
