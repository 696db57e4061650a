"""What every rank needs, imported once by the process that they are forked from."""

import torch
import torch.distributed

from harness import lifetimes, programs

__all__ = ["lifetimes", "programs", "torch"]
