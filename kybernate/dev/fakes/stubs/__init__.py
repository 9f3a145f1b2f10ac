"""C libraries with the sonames of NVIDIA's driver, in front of the fake GPU daemon. ``build_stubs`` compiles them."""

from kybernate.dev.fakes.stubs.build import StubError, build_stubs

__all__ = ["StubError", "build_stubs"]
