"""Report words that the project's language does not use, and pages that its users do not have. Exit 1 if there is one.

    python scripts/check_language.py [PATH …]     default: every tracked text file

The project is written in the English of the field: subject, verb, object, and the technical term. The words below hide
the subject or the term (``docs/glossary.md`` has the terms). Identifiers are split into their words before they are
compared, so ``JobsTold`` and ``processes_told`` count too.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

UNUSED = {
    "somebody": "name it: the seat, the caller, the pod, the operator",
    "nobody": "no seat, no caller, no router",
    "whoever": "name it",
    "whom": "name it",
    "who comes": "the incoming seat",
    "comer": "the incoming seat",
    "comers": "the incoming seats",
    "newcomer": "a new user, a new contributor, the incoming seat",
    "newcomers": "new users, new contributors",
    "told": "reported, configured, informed",
    "heard": "received",
    "said": "reported, published, logged, answered",
    "put up with": "tolerate",
    "in words": "as text",
    "of its own": "own, separate",
    "a way in": "an entry point",
    "the research": "a source that readers have: a page of docs/, the vendor's documentation",
}
"""Word or phrase: what to write instead."""

_ABSENT = re.compile(r"\b(?:research|shared/design)/[\w-]+\.md\b|\bresearch (?:§|notes\b)")
ABSENT_REMEDY = "a source that readers have: a page of docs/, the vendor's documentation, an issue's number"
"""Pages that were written for the authors and are not in the repository."""

RIDDLES = re.compile(
    r"\b(?:of|in|for) which\b|\b(?:the one|those) (?:that|which|who)\b|\bwhat (?:is|was|does)\b", re.IGNORECASE
)
MOST_RIDDLES = 30
"""Of the pages below ``docs/`` and README together; lower it with the pages. Two sentences say the same."""

NOT_OURS = re.compile(
    r"^(LICENSE|services/console/assets/vendor/|tests/ui/vendor/|kybernate/pb/|proto/|requirements.*\.txt|docs/images/|docs/dev/measurements/"
    r"|scripts/check_language\.py$|tests/test_checks\.py$)"
)
"""Files that are not written by the project, results that are kept as they were measured, this list and its test."""

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_PATTERN = re.compile(r"\b(" + "|".join(re.escape(word) for word in sorted(UNUSED, key=len, reverse=True)) + r")\b")


def findings(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield (line number, word) for each word of the list, also where a phrase runs over a line's end, and for each
    page that is not in the repository."""
    lines = list(lines)
    for number, line in enumerate(lines, start=1):
        yield from ((number, match.group()) for match in _ABSENT.finditer(line))
    texts = [re.sub(r"[\s_]+", " ", _CAMEL.sub(" ", line)).strip().lower() for line in lines]
    for number, text in enumerate(texts, start=1):
        following = texts[number] if number < len(texts) else ""
        joined = f"{text} {following.lstrip('#*/ ')}"
        for match in _PATTERN.finditer(joined):
            if match.start() < len(text):
                yield number, match.group(1)


def tracked(paths: Iterable[str]) -> list[Path]:
    """Return the tracked files below ``paths``, relative to the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *paths], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [Path(name) for name in listed.split("\0") if name and not NOT_OURS.match(name)]


def main(arguments: list[str]) -> int:
    """Print each finding as ``path:line: word: remedy``."""
    found, riddles = 0, dict[Path, int]()
    for path in tracked(arguments):
        try:
            lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
        if path.suffix == ".md":
            riddles[path] = len(RIDDLES.findall("\n".join(lines)))
        for number, word in findings(lines):
            print(f"{path}:{number}: {word!r}: write {UNUSED.get(word, ABSENT_REMEDY)}")
            found += 1
    if (riddled := sum(riddles.values())) > MOST_RIDDLES:
        worst = ", ".join(f"{path} {riddles[path]}" for path in sorted(riddles, key=riddles.__getitem__)[-5:])
        print(f"pages say 'of which', 'those that', 'what is' {riddled} times, limit {MOST_RIDDLES}: name it ({worst})")
        found += 1
    if found:
        print(f"check_language: {found} findings", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
