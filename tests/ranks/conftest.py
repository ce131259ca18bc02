from tests.estimate.conftest import built_once, large, models, shaped  # noqa: F401
