"""What ``pytest --pyargs ml.testing --ml-backend=NAME`` collects."""

from ml.testing.backend import BackendTests


class TestBackend(BackendTests):
    """On the backend that ``--ml-backend`` names."""
