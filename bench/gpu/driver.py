"""What real drivers do to processes that nobody protects: hazards H1 to H16 of docs/dev/checkpointer.md, once.

A row is a script of steps, ``what is done -> what is answered`` (SUCCESS where nothing is written). The fake machine
and the stub ``libcuda.so.1`` answer so (tests/stubs/test_hazards.py); on hardware ``bench.gpu --hazards`` records the
answers. ``waits`` is a call without an answer, and ``then`` asks for the answer that came later.
"""

from dataclasses import dataclass
from typing import Protocol

WAITS = "waits"


@dataclass(frozen=True)
class Row:
    """One thing that drivers do."""

    hazard: str
    what: str
    script: str
    lasting: bool = False
    """The fake GPU stays spoilt: it needs a machine of its own."""

    def __str__(self) -> str:
        return f"{self.hazard} {self.what}".strip()

    @property
    def steps(self) -> list[tuple[str, str, bool]]:
        """What is done, the answer, and whether the row is about it. To park is to lock and to checkpoint."""
        found = []
        for step in " ; ".join(self.script.split("\n")).split(" ; "):
            done, shown, answer = map(str.strip, step.partition("->"))
            verb, _, name = done.partition(" ")
            pair = {"park": ("lock", "checkpoint"), "activate": ("restore", "unlock")}.get(verb)
            found += [(f"{one} {name}" if pair else done, answer or "SUCCESS", bool(shown)) for one in pair or (verb,)]
        return [step for step in found if step[0]]


class Driver(Protocol):
    """A machine on which a row is played."""

    async def do(self, step: list[str], expected: str) -> str:
        """Do it; the answer. ``expected`` says for what to wait."""


async def play(driver: Driver, row: Row) -> list[tuple[str, str]]:
    """Every step, and what was answered."""
    return [(step, await driver.do(step.split(), expected)) for step, expected, _ in row.steps]


ROWS = (
    Row("", "a verb in the wrong state is refused and changes nothing", """
        a has 1
        checkpoint a -> ILLEGAL_STATE ; restore a -> ILLEGAL_STATE ; unlock a -> ILLEGAL_STATE ; state a -> RUNNING
        lock a
        lock a -> ILLEGAL_STATE ; restore a -> ILLEGAL_STATE ; state a -> LOCKED
        checkpoint a
        lock a -> ILLEGAL_STATE ; checkpoint a -> ILLEGAL_STATE ; unlock a -> ILLEGAL_STATE ; state a -> CHECKPOINTED
        restore a
        lock a -> ILLEGAL_STATE ; restore a -> ILLEGAL_STATE ; state a -> LOCKED
        unlock a"""),
    Row("", "own calls of a locked or parked process wait until it runs again", """
        a has 1 ; lock a
        a allocates -> waits ; a asks -> waits
        checkpoint a ; used -> 0 0 ; activate a
        then a allocates -> SUCCESS ; then a asks -> SUCCESS ; used -> 2 0"""),
    Row("", "a parked process can be killed and leaves nothing", """
        a has 70 ; park a ; kill a ; state a -> OPERATING_SYSTEM ; used -> 0 0 ; violations -> none"""),
    Row("", "a state query waits for a checkpoint under way", """
        a has 1 ; inject hang verb=checkpoint pid=a ; lock a
        checkpoint a -> waits ; state a -> waits ; tid a
        clear ; then checkpoint a -> SUCCESS ; then state a -> CHECKPOINTED"""),
    Row("", "a state query waits for a restore under way", """
        a has 1 ; inject hang verb=restore pid=a ; park a
        restore a -> waits ; state a -> waits ; tid a
        clear ; then restore a -> SUCCESS ; then state a -> LOCKED"""),
    Row("", "a checkpoint whose caller was killed is finished by the target", """
        a has 1 ; inject hang verb=checkpoint pid=a ; lock a ; checkpoint a -> waits
        caller dies ; clear ; state a -> CHECKPOINTED ; activate a ; a asks"""),
    Row("", "a restore whose caller was killed is finished by the target", """
        a has 1 ; inject hang verb=restore pid=a ; park a ; restore a -> waits
        caller dies ; clear ; state a -> LOCKED ; unlock a ; a asks"""),
    Row("", "the target of a checkpoint under way dies", """
        a has 10 ; inject die-mid-checkpoint pid=a ; lock a
        checkpoint a -> OPERATING_SYSTEM ; a ends -> SIGKILL ; used -> 0 0"""),
    Row("", "a process that was lost stays lost", """
        a has 1 ; inject lose verb=checkpoint code=999 pid=a ; lock a
        checkpoint a -> UNKNOWN ; state a -> FAILED
        lock a -> ILLEGAL_STATE ; checkpoint a -> ILLEGAL_STATE ; restore a -> OPERATING_SYSTEM
        unlock a -> ILLEGAL_STATE"""),
    Row("H1", "a restore without room loses the process and part of the memory until it is killed", """
        a has 60 ; park a ; fill 50
        restore a -> OUT_OF_MEMORY ; state a -> CHECKPOINTED
        empty
        restore a -> OPERATING_SYSTEM ; unlock a -> ILLEGAL_STATE ; a allocates -> ILLEGAL_STATE
        used -> 15 0 ; violations -> restore-without-room 1
        kill a ; used -> 0 0"""),
    Row("H2", "the kill of a process that was restored wedges the GPU", """
        inject wedge-on-kill times=10 ; a has 20 ; b has 5 on 1
        kill b ; used -> 20 0
        park a ; activate a ; kill a ; clear
        used -> 20 0 ; violations -> killed-after-restore 1""", lasting=True),
    Row("H2", "a process that was restored and parked again wedges nothing", """
        inject wedge-on-kill times=10 ; a has 20 ; park a ; activate a ; park a ; kill a ; clear
        used -> 0 0 ; violations -> none"""),
    Row("H3", "a lock kills its target and finds it gone", """
        a has 1 ; inject segfault-on-lock pid=a
        lock a -> OPERATING_SYSTEM ; a ends -> SIGSEGV ; state a -> OPERATING_SYSTEM"""),
    Row("H4", "a synchronize as the first call while parked kills the process", """
        a has 1 ; park a ; a synchronizes -> SIGSEGV"""),
    Row("H4", "a synchronize of a process that is only locked returns at once", """
        a has 1 ; a synchronizes ; lock a ; a synchronizes"""),
    Row("H4", "a synchronize of a stream as the first call while parked kills the process", """
        a has 1 ; park a ; a synchronizes-a-stream -> SIGSEGV"""),
    Row("H4", "a synchronize behind another call that waits does so as well", """
        a has 1 ; park a ; a asks -> waits ; a synchronizes -> waits
        activate a ; then a asks -> SUCCESS ; then a synchronizes -> SUCCESS"""),
    Row("H5", "a lock of a stopped process waits until it goes on", """
        a has 1 ; stop a ; lock a -> waits ; continue a ; then lock a -> SUCCESS"""),
    Row("H5", "a state query and a restore of a stopped process wait, the restore thread is known", """
        a has 1 ; park a ; stop a ; state a -> waits ; tid a ; restore a -> waits ; used -> 0 0
        continue a ; then state a -> CHECKPOINTED ; then restore a -> SUCCESS ; unlock a"""),
    Row("H5", "a lock that hung takes effect even if its caller was killed", """
        a has 1 ; stop a ; lock a -> waits ; caller dies ; continue a ; soon state a -> LOCKED ; unlock a"""),
    Row("H7", "a communicator of one rank is harmless unless the driver aborts", """
        a has 1 ; a joins ; park a ; activate a
        inject die-mid-restore pid=a ; park a ; restore a -> OPERATING_SYSTEM ; a ends -> SIGKILL"""),
    Row("H8", "the lock of a rank waits while another is locked", """
        a has 1 ; b has 1 on 1 ; a joins ; b joins
        lock a ; lock b -> waits ; state b -> RUNNING
        unlock a ; then lock b -> SUCCESS ; state b -> LOCKED"""),
    Row("H8", "the lock of a rank goes on when the other dies", """
        a has 1 ; b has 1 on 1 ; a joins ; b joins ; lock a ; lock b -> waits ; kill a ; then lock b -> SUCCESS"""),
    Row("H8", "a communicator that its ranks left blocks no park, and can be joined again", """
        a has 1 ; b has 1 on 1 ; a joins ; b joins ; lock a ; lock b -> waits
        a leaves ; then lock b -> SUCCESS ; b leaves
        checkpoint a ; checkpoint b ; activate a ; activate b ; a joins"""),
    Row("H8", "the restore of a rank fails for good while the others live", """
        a has 1 ; b has 1 on 1 ; a joins ; b joins ; park a
        restore a -> UNKNOWN ; state a -> FAILED ; violations -> none"""),
    Row("H9", "memory shared by CUDA IPC has no checkpoint, and the contexts are dead", """
        a has 1 ; a shares ; lock a
        checkpoint a -> NOT_SUPPORTED ; state a -> LOCKED ; unlock a ; state a -> RUNNING
        a asks -> UNKNOWN ; a synchronizes -> UNKNOWN"""),
    Row("H10", "managed memory has no checkpoint, and the contexts are dead", """
        a has 1 ; a manages ; lock a
        checkpoint a -> NOT_SUPPORTED ; state a -> LOCKED ; unlock a ; state a -> RUNNING
        a asks -> UNKNOWN ; a synchronizes -> UNKNOWN"""),
    Row("H13", "no process comes to a GPU whose device node it does not have", """
        a has 1 nodes 0 ; park a
        restore a 0>1 1>0 -> NOT_SUPPORTED ; state a -> CHECKPOINTED ; restore a 0>0 1>1"""),
    Row("H14", "a map of all GPUs moves the process, whose own calls go where it is", """
        a has 30 ; park a ; restore a 0>1 1>0 ; unlock a ; used -> 0 30 ; a allocates ; used -> 0 31
        park a ; restore a 0>1 1>0 ; used -> 31 0 ; violations -> none"""),
    Row("H14", "a map that misses a GPU or names one twice is an invalid value", """
        a has 1 ; park a
        restore a 0>1 -> INVALID_VALUE ; restore a 0>1 1>1 -> INVALID_VALUE ; restore a 0>0 ?>1 -> INVALID_VALUE
        restore a 0>1 1>0 ?>? -> INVALID_VALUE
        state a -> CHECKPOINTED ; restore a 0>0 1>1"""),
    *(Row("H15", f"{verb} fails without effect", f"""
        a has 1 ; park a ; inject fail verb={call} code=304 pid=a
        {verb} a -> OPERATING_SYSTEM ; state a -> CHECKPOINTED ; activate a""")
      for verb, call in (("state", "get_state"), ("tid", "get_restore_tid"), ("restore", "restore"))),
    Row("", "a forked child with the context of its parent is never restored (vLLM #42873)", """
        a has 1 ; a inherits ; park a
        restore a -> INVALID_VALUE ; restore a -> INVALID_VALUE ; state a -> CHECKPOINTED"""),
)  # fmt: skip
