"""What the tests of the engine's side share: the real SGLang on a CPU, its pools, its tree, both backends.

Importing anything of this package makes the engine usable first, so `harness` goes before `sglang`.
"""

from harness import cpu_sglang

__all__ = ["cpu_sglang"]
