"""What the tests of prefixes, sessions and branches stand on. PYTEST_DONT_REWRITE: of this file."""

import pytest

pytest.register_assert_rewrite(__name__)
