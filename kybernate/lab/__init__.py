"""Simulator, trace readers, planner and studies. Production code never imports them."""
