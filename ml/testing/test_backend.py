"""What ``pytest --pyargs ml.testing --ml-backend=NAME`` collects."""

from ml.testing.backend import BackendTests


class TestBackend(BackendTests):
    chosen_by_option = True
