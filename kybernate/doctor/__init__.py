"""``kyb doctor``: reads facts about this machine, checks them, and reports one finding with a remedy each."""

from kybernate.doctor.gpu import examine_gpu
from kybernate.doctor.model import Finding, Severity
