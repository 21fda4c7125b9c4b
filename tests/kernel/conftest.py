"""Where kernels run."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return where Triton kernels run here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
