"""Errors of the store: one class for each kind, each also the built-in that a caller would catch.

A miss is a value, never an error. An error says that a call as asked cannot be carried out, and that nothing
was changed. `docs/errors.md` has one row for each class.
"""

import os
from collections.abc import Mapping
from typing import Any, ClassVar, Final

__all__ = [
    "ConfigError",
    "CorruptError",
    "DeviceError",
    "FormatVersionError",
    "GeometryError",
    "HiCacheStoreError",
    "LeaseError",
    "NamespaceError",
    "PoolExhaustedError",
    "ResourceLimitError",
    "StoreClosedError",
    "StoreIOError",
    "UnsupportedError",
]


class HiCacheStoreError(Exception):
    """Every error of this package.

    Attributes:
        kind: Name of the kind of error, the same in Rust, in the tools' JSON and here.
        message: One sentence: what was expected and what was found.
        context: Named facts for programs, such as `path` or `key`.
        errno: The system's error number, where a system call failed.
        filename: The file that a system call failed on.
    """

    kind: ClassVar[str] = "error"

    message: str
    context: dict[str, str]
    errno: int | None
    filename: str | None

    def __init__(
        self,
        message: str,
        context: Mapping[str, str] | None = None,
        errno: int | None = None,
        filename: str | None = None,
    ) -> None:
        """Makes an error; the store is who raises them.

        Args:
            message: One sentence, lower case, without a full stop.
            context: Named facts.
            errno: The system's error number.
            filename: The file that a system call failed on.
        """
        super().__init__(message)
        self.message = message
        self.context = dict(context or {})
        self.errno = errno
        self.filename = filename

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.context, self.errno, self.filename)


class ConfigError(HiCacheStoreError, ValueError):
    """A bad option or argument: impossible size, unknown name, missing value."""

    kind: ClassVar[str] = "config"


class NamespaceError(HiCacheStoreError, ValueError):
    """A namespace or pool description is not usable, or differs from the one stored."""

    kind: ClassVar[str] = "namespace"


class GeometryError(HiCacheStoreError, ValueError):
    """A length, slot, stride, rectangle or data type does not fit."""

    kind: ClassVar[str] = "geometry"


class CorruptError(HiCacheStoreError):
    """Bytes that must be whole are not: an archive, a description given by the caller.

    A damaged page is never this error: it is an outcome of `View.restore`.
    """

    kind: ClassVar[str] = "corrupt"


class FormatVersionError(HiCacheStoreError):
    """Written in a newer format than this build reads."""

    kind: ClassVar[str] = "unsupported_version"


class StoreIOError(HiCacheStoreError, OSError):
    """The system said no; `errno`, `strerror` and `filename` are as in any `OSError`."""

    kind: ClassVar[str] = "io"

    def __init__(
        self,
        message: str,
        context: Mapping[str, str] | None = None,
        errno: int | None = None,
        filename: str | None = None,
    ) -> None:
        """Makes an error as its base does; `strerror` follows from `errno`."""
        super().__init__(message, context, errno, filename)
        self.strerror = None if errno is None else os.strerror(errno)


class PoolExhaustedError(HiCacheStoreError):
    """A host pool has fewer free slots than asked for; `context` has `wanted`, `free` and `slots`."""

    kind: ClassVar[str] = "pool_exhausted"


class LeaseError(HiCacheStoreError, BufferError):
    """A slot used after its release, released twice or of another pool; or a pool closed while in use."""

    kind: ClassVar[str] = "lease"


class ResourceLimitError(HiCacheStoreError, OSError):
    """RLIMIT_MEMLOCK, a memory cgroup or the machine has less than a pool needs; the message says where."""

    kind: ClassVar[str] = "limit"


class DeviceError(HiCacheStoreError, RuntimeError):
    """A call of the CUDA driver failed; the message has the name of the call and of the error."""

    kind: ClassVar[str] = "device"


class StoreClosedError(HiCacheStoreError, RuntimeError):
    """Used after `close`, or in a forked child of the process that opened the store."""

    kind: ClassVar[str] = "closed"


class UnsupportedError(HiCacheStoreError, NotImplementedError):
    """Not possible on this machine or file system, or not with this store."""

    kind: ClassVar[str] = "unsupported"


# What the extension raises, by name of the kind.
BY_KIND: Final[Mapping[str, type[HiCacheStoreError]]] = {
    error.kind: error
    for error in (
        ConfigError,
        NamespaceError,
        GeometryError,
        CorruptError,
        FormatVersionError,
        StoreIOError,
        StoreClosedError,
        UnsupportedError,
        PoolExhaustedError,
        LeaseError,
        ResourceLimitError,
        DeviceError,
    )
}
