"""Traces of real request arrivals, whatever their format, as one type: ``load(path)`` gives ``Arrival`` rows.

The format is recognised from the header; plain or gzip. Reading is lazy: a trace of a week is not held in memory.
"""

from kybernate.lab.traces.formats import Arrival, Trace, TraceError
from kybernate.lab.traces.reader import load

__all__ = ["Arrival", "Trace", "TraceError", "load"]
