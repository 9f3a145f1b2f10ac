"""What works on this machine and what to do about the rest: read facts, judge them, say one line each."""

from kybernate.doctor.finding import Finding, Level, exit_code
from kybernate.doctor.gpu import DoctorError, examine_gpu

__all__ = ["DoctorError", "Finding", "Level", "examine_gpu", "exit_code"]
