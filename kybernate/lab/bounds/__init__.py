"""Bounds on what any scheduler could have reached: a dual bound from below, clairvoyant schedules from above."""
