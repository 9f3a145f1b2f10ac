"""``docs/dev/obstacles.md``, from the rows of the manager's list."""

import services.gpu_manager.core.riders  # noqa: F401 with their rows
from services.gpu_manager.core.obstacles import ROWS

PATH = "docs/dev/obstacles.md"

_HEAD = """# What a seat waits for

A node decides by one ordered list of obstacles, and shows its first entry: `kyb why MODEL`, `blocked` of the roster,
the texts of the start gate and the refusals of commands come from it. A seat is granted a group exactly when its list
there is empty: a *stop* needs an act of a person, a *wait* ends by itself. This page is made from
`services/gpu_manager/core/obstacles.py` and the files of `core/riders`.

`kyb why -o json` and `GET /v1/why` have the first entry as `stage` (`stage`, `text`, `data`, `clock`), the others under
`also`. A `clock` has `since`, `usual_seconds` (the median of the last nine), `deadline_at` and `late`; null: not known.
The names are stable. A
seat that serves has the stage `active`. The stages of a switch: `drain` (data `victim`, `incoming`, `op`, `routers`:
in flight by router, null where one has not acknowledged, `engine`, `seconds` until streams are cut), `host-memory`
(copies are dropped for that of the victim: `seats`, `drained_seconds`), `vram-evidence` (the park is not proven:
`victim`, `incoming`, `op`, `journaled`, `drained_seconds`), `activating`, `switch`.

| nr | stage | kind | about | it holds while | who ends it | ends by itself | code of a refused command |
|---|---|---|---|---|---|---|---|
"""


def documents() -> dict[str, str]:
    """The page by its path."""
    lines = []
    for row in ROWS:
        text = " ".join((row.holds.__doc__ or "").split()).replace("``", "`")
        code = f"`{row.code}`" if row.kind == "stop" or row.code != "blocked" else ""
        lines.append(
            f"| {row.nr} | `{row.stage}` | {row.kind} | {row.subject} | {text} | {row.who} | {row.ends} | {code} |\n"
        )
    return {PATH: _HEAD + "".join(lines)}
