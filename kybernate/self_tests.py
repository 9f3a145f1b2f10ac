"""Self-tests of the backend ``vllm+cuda``: which engine came back from which driver's checkpoint on this node.

The program ``services.checkpointer.self_test`` writes them into the state folder; checkpointer and doctor read them.
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from kybernate import files
from kybernate.engines import VLLM_CUDA

FILE = "self-tests.json"
HOW = "kyb doctor gpu --self-test URL --pid PID on the node, with a vLLM that no seat has"


class SelfTest(BaseModel):
    """The latest self-test of one driver with one engine."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    driver: str
    """``580.95.05``."""
    engine: str
    """Version of vLLM, as it reports it."""
    cycles: int
    at: float
    """Unix seconds."""
    trouble: str = ""
    """Why it failed; empty: it passed."""


_RECORDS = TypeAdapter(tuple[SelfTest, ...])


@dataclass(frozen=True)
class SelfTests:
    """The records in a state folder; None: there are none."""

    folder: Path | None = None

    def read(self) -> tuple[SelfTest, ...]:
        """All records; none where the file is absent or unreadable: what is not known has not passed. Blocking."""
        try:
            return _RECORDS.validate_json((self.folder / FILE).read_bytes()) if self.folder is not None else ()
        except (OSError, ValidationError):
            return ()

    def add(self, test: SelfTest) -> None:
        """Replace the record of this pair; on disk when this returns. Blocking. Raises OSError."""
        assert self.folder is not None
        others = tuple(one for one in self.read() if (one.driver, one.engine) != (test.driver, test.engine))
        files.replace(self.folder / FILE, _RECORDS.dump_json((*others, test)), durable=True)

    def refusal(self, driver: str, engine: str) -> str:
        """Why this engine must not be checkpointed asleep by this driver; empty if its self-test has passed."""
        found = next((one for one in self.read() if (one.driver, one.engine) == (driver, engine)), None)
        if found is not None and driver and engine and not found.trouble:
            return ""
        what = f"vLLM {engine or 'of unknown version'} on driver {driver or 'of unknown version'}"
        if found is None:
            return f"{VLLM_CUDA} is off for {what} until a self-test has passed ({HOW}); use backend vllm"
        return f"{VLLM_CUDA} is off for {what}, whose self-test failed: {found.trouble}; use backend vllm"
