"""The tests of the repository."""

import pytest

pytest.register_assert_rewrite("tests.helpers")
