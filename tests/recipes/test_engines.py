"""What a config asks of an engine."""

from saccade.config import load
from saccade.recipes.engines import settings_of


def test_every_row_that_passes_the_data_check_fits(family_of):
    def asked(*options):
        settings = settings_of(load(None, list(options)), family_of("qwen2_5_vl"))
        return settings.max_images, settings.max_pixels

    assert asked() == (64, 2_000_000)
    assert asked("data.max_images=100", "data.max_pixels=2000000") == (100, 2_000_000)
    assert asked("env.eval.max_images=80", "data.max_pixels=5000") == (80, 2_000_000)
