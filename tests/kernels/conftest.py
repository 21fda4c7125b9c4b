"""Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before they are defined."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where Triton kernels run here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
