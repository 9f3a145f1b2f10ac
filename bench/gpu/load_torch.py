"""GPU work with PyTorch: seeded tensors, matrix products, a CUDA graph, a pinned buffer; as much as an engine uses."""

import time
from typing import Any

import torch

from bench.gpu.load_cuda import managed

BLOCK = 1 << 30
COPY = 2 << 30
_REPEATS = 3
_PIECE = 1 << 22
"""Numbers that a checksum looks at together; keeps its scratch memory at some tens of MiB."""


class TorchLoad:
    """So many bytes of seeded data, and what is computed beside them."""

    kind = f"torch {torch.__version__}"

    def __init__(self, gib: float, seed: int) -> None:
        self._device = torch.device("cuda", 0)
        random = torch.Generator(device=self._device)
        random.manual_seed(seed)
        self._blocks = []
        left = int(gib * BLOCK)
        while left > 0:
            size = min(BLOCK, left)
            numbers = torch.randint(
                -(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device=self._device, generator=random
            )
            self._blocks.append(numbers)
            left -= size
        self._matrix = torch.randn(2048, 2048, device=self._device, generator=random, dtype=torch.bfloat16)
        self._pinned = torch.arange(1 << 20, dtype=torch.int32).pin_memory()
        self._capture()
        torch.cuda.synchronize()

    def _capture(self) -> None:
        """A graph, as engines replay them for every token."""
        self._input = torch.ones(1024, 1024, device=self._device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._output = self._input @ self._input
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = (self._input @ self._input) * 0.5

    @property
    def bytes(self) -> int:
        """What PyTorch has taken."""
        return int(torch.cuda.memory_reserved())

    def checksum(self) -> list[int]:
        """One exact number per block that depends on every element and its place (integers: no rounding)."""
        found = []
        for block in self._blocks:
            total = 0
            for piece in block.split(_PIECE):
                places = torch.arange(1, piece.numel() + 1, device=self._device)
                total = (total * 31 + int((piece.to(torch.int64) * places).sum())) % (1 << 63)
            found.append(total)
        return found

    def work(self) -> list[Any]:
        """A product and a copy from pinned memory."""
        product = (self._matrix @ self._matrix).float().sum()
        copied = self._pinned.to(self._device, non_blocking=True).sum()
        torch.cuda.current_stream().synchronize()
        return [float(product), int(copied)]

    def graph(self) -> list[float] | None:
        """Replay the graph with another input each time; what came out."""
        found = []
        for factor in (1.0, 2.0):
            self._input.fill_(factor)
            self._graph.replay()
            found.append(float(self._output.sum()))
        return found

    def busy(self, seconds: float) -> None:
        """Submit about so many seconds of work, and do not wait for it."""
        size = 16384
        left = torch.randn(size, size, device=self._device, dtype=torch.bfloat16)
        self._kept = left @ left
        torch.cuda.synchronize()
        began = time.perf_counter()
        self._kept = left @ left
        torch.cuda.synchronize()
        once = max(time.perf_counter() - began, 1e-4)
        for _ in range(min(int(seconds / once), 900)):  # a full launch queue would block this process
            torch.mm(left, left, out=self._kept)

    def synchronize(self) -> None:
        """A synchronize as the first call (H4)."""
        torch.cuda.synchronize()

    def managed(self, count: int) -> int:
        """Managed memory (H10); the result code."""
        return managed(count)


def block(gib: float, seed: int) -> torch.Tensor:
    """So much written memory, and nothing computed."""
    return torch.full((int(gib * BLOCK),), seed, dtype=torch.uint8, device="cuda")


def copy_limits() -> dict[str, float]:
    """GB/s of plain copies by kind and direction, best of three."""
    device = torch.empty(COPY, dtype=torch.uint8, device="cuda")
    found = {}
    for kind in ("pinned", "pageable"):
        host = torch.ones(COPY, dtype=torch.uint8, pin_memory=kind == "pinned")
        for way, into, source in (("out", host, device), ("in", device, host)):
            found[f"{kind}_{way}"] = COPY / min(_seconds(into, source) for _ in range(_REPEATS)) / 1e9
    return found


def _seconds(into: torch.Tensor, source: torch.Tensor) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    into.copy_(source)
    torch.cuda.synchronize()
    return time.perf_counter() - began
