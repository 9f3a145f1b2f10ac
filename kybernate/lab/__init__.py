"""Simulator, trace readers, planner and studies. Production code never imports them."""

INSTALL = "pip install 'kybernate[lab]' (in a checkout: make setup)"
"""The remedy where a package of the extra ``lab`` is missing."""
