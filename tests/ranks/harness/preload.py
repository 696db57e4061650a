"""What every rank needs, imported once by the process that they are forked from."""

import torch
import torch.distributed

from harness import programs

__all__ = ["programs", "torch"]
