"""When a pure object wants to be called again. One pending alarm per name; pure."""

import heapq

Name = tuple[str, str | int]


class Alarms:
    """A heap of (time, name). Times are whatever the caller's ``now`` is."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Name]] = []
        self._at: dict[Name, float] = {}
        self._count = 0

    def set(self, name: Name, at: float) -> None:
        """Ring at ``at``, unless this name rings earlier anyway."""
        if at >= self._at.get(name, float("inf")):
            return
        self._at[name] = at
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, name))

    def clear(self, name: Name) -> None:
        """Do not ring."""
        self._at.pop(name, None)
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._at):
            self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def due(self, now: float) -> list[Name]:
        """Take those that ring by now, in order."""
        names = []
        while self._heap and self._heap[0][0] <= now:
            at, _, name = heapq.heappop(self._heap)
            if self._at.get(name) == at:
                del self._at[name]
                names.append(name)
        return names

    def next(self) -> float | None:
        """When the next one rings."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
